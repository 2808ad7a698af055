"""Precision range test: its decision rule, its effects on the model, and its reports without an answer."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn

from cpt_core.quantization import convert
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_core.schedules.make import make_schedule
from cpt_extras.search.range_test import RangeTestWarning
from cpt_extras.search.range_test_result import evaluate_range_test
from cpt_lab.experiments.registry import recipe
from cpt_lab.training.recipe_search import recipe_range_test
from tests.search.test_restartable import problem
from tests.search.test_restartable import range_test as run

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_extras.search.range_test.RangeTestWarning"
)


# --- the rule, on losses by hand ------------------------------------------------------------------


def judged(
    *levels, bits=(2, 3, 8), start=3.0, mode="reset", threshold=0.8, seeds=1, noise=0.0
):
    """Judge seeds with a loss of ``start`` first and ``level`` (a number per precision) afterwards."""
    traces = []
    for s in range(seeds):
        shift = noise * (s - (seeds - 1) / 2)
        traces.append(
            [
                [start, *[level + (shift if i == 0 else 0)] * 7]
                for i, level in enumerate(levels)
            ]
        )
    return evaluate_range_test(traces, bits, mode, threshold, 8, "by hand")


def test_range_test_shares_of_hand_computed_cases():
    found = judged(2.0, 1.4, 1.0)
    assert found.shares == (
        (pytest.approx(0.5), pytest.approx(0.8), pytest.approx(1.0)),
    )
    assert found.q_min == 3  # 0.8 is enough
    assert found.mean(2) == pytest.approx(0.5)
    assert judged(2.0, 1.42, 1.0).q_min == 8
    assert judged(1.3, 1.42, 1.0).q_min == 2  # the lowest that passes
    assert judged(2.0, 1.4, 1.0, threshold=0.5).q_min == 2


def test_range_test_uses_second_half_of_dwell():
    trace = [[3.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]]
    found = evaluate_range_test([trace * 2], (2, 8), "reset", 0.8, 8, "")
    assert found.losses == ((1.0, 1.0),)
    assert found.q_min == 2


def test_range_test_warns_of_uncertain_answer():
    sure = judged(2.0, 1.1, 1.0, seeds=3, noise=0.1)
    assert (sure.q_min, sure.warning) == (3, "")
    for level, q_min in ((1.35, 2), (1.45, 3)):  # f(2) = 0.825 or 0.775, +- 0.05
        doubtful = judged(level, 1.1, 1.0, seeds=3, noise=0.1)
        assert doubtful.q_min == q_min
        assert "f(2) = 0." in doubtful.warning
        assert "within two standard deviations of the threshold 0.8" in doubtful.warning
    assert "one seed" in judged(2.0, 1.1, 1.0).warning


def test_range_test_has_no_answer_without_progress():
    """Give no answer if the loss does not fall, or if training at q_max diverges."""
    flat = judged(3.0, 3.0, 3.0)
    assert flat.q_min is None
    assert (
        "training at 8 bits does not reduce the loss in 8 steps (from 3 to 3)"
        in flat.reason
    )
    assert judged(2.0, 2.0, 3.5).q_min is None
    diverged = judged(2.0, 1.0, math.nan)
    assert diverged.q_min is None
    assert "training diverges at 8 bits" in diverged.reason
    assert "no answer" in str(diverged)
    assert "diverged" in str(diverged)
    json.loads(json.dumps(diverged.to_dict(), allow_nan=False))


def test_range_test_rejects_diverging_precision():
    found = judged(math.nan, 1.2, 1.0)
    assert found.q_min == 3
    assert math.isnan(found.mean(2))
    assert "   2   diverged" in str(found)


def test_range_test_ignores_noise_as_progress():
    for swing, q_min in (
        (0.2, None),
        (0.05, 2),
    ):  # a fall by 0.1, of which +- 0.12 and +- 0.03 are noise
        trace = [3.0, *[2.9 + swing, 2.9 - swing] * 4][:8]
        assert (
            evaluate_range_test([[trace, trace]], (2, 8), "reset", 0.8, 8, "").q_min
            == q_min
        )


def test_range_test_continuing_takes_first_falling_loss():
    found = judged(2.98, 2.4, 2.3, mode="continuing", threshold=0.05)
    assert found.q_min == 3
    assert found.shares[0] == (
        pytest.approx(0.02 / 3),
        pytest.approx(0.58 / 3),
        pytest.approx(0.1 / 3),
    )
    none = judged(2.99, 2.98, 2.97, mode="continuing", threshold=0.05)
    assert none.q_min is None
    assert "at no precision the loss falls" in none.reason
    assert judged(math.nan, 2.0, 1.0, mode="continuing", threshold=0.05).q_min is None
    assert (
        judged(
            -10.1, -11.0, -11.0, start=-10.0, mode="continuing", threshold=0.05
        ).q_min
        == 3
    )
    assert (
        "the loss starts at 0"
        in judged(-1.0, -2.0, -3.0, start=0.0, mode="continuing", threshold=0.05).reason
    )


# --- a training loop of one's own -----------------------------------------------------------------


def test_range_test_repeats_batches_and_initial_weights():
    model, train_step, optimizer, seen = problem(dropout=0.5)
    first = []

    def watched(step):
        if step % 8 == 0:
            first.append(model[0].weight.detach().clone())
        return train_step(step)

    run(model, watched, optimizer)
    assert seen == [
        *list(range(8)) * 3,
        *list(range(8, 16)) * 3,
    ]  # seed 1 takes the next batches
    assert all(torch.equal(w, first[0]) for w in first)
    same = run(
        model, train_step, optimizer, bits=(8,), q_max=9, seeds=(0,)
    )  # 8 and 9 bits: the same dropout masks
    assert same.losses[0][0] == pytest.approx(same.losses[0][1], rel=0.05)


def test_range_test_sets_bits_and_default_threshold():
    model, _, optimizer, _ = problem()
    steps, bits = [], []

    def spy(step):
        layer = convert.layer_precisions(model)["0"]
        steps.append(step)
        bits.append((layer.bits, layer.q_grad))
        return 1.0 / (1 + step)

    for mode, threshold, numbers in (
        ("reset", 0.8, [*range(8)] * 3),
        ("continuing", 0.05, [*range(24)]),
    ):
        assert (
            run(model, spy, optimizer, seeds=(0,), mode=mode).threshold == threshold
        )  # that nobody chose
        assert (steps, bits) == (numbers, [(2, 8)] * 8 + [(4, 8)] * 8 + [(8, 8)] * 8)
        steps.clear(), bits.clear()


def test_range_test_stops_training_at_nan():
    model, train_step, optimizer, seen = problem()

    def diverges(step):
        loss = train_step(step)
        bits = convert.layer_precisions(model)["0"].bits
        return loss * math.nan if bits == 2 and step == 3 else loss

    found = run(model, diverges, optimizer, seeds=(0,))
    assert seen == [*range(4), *range(8), *range(8)]
    assert math.isnan(found.losses[0][0])
    assert found.q_min in (4, 8)


def test_range_test_warns_and_stores_warning():
    model, train_step, optimizer, _ = problem()  # of 16 batches
    with pytest.warns(RangeTestWarning, match="one seed"):
        found = run(
            model, train_step, optimizer, bits=(4, 2, 4, 8), seeds=(0, 0)
        )  # no second repetition
    assert found.bits == (2, 4, 8)
    assert "one seed" in found.warning
    assert "warning: one seed" in str(found)
    with pytest.warns(RangeTestWarning, match="all 2 seeds saw the same batches"):
        found = run(model, train_step, optimizer, dwell=16)
    assert found.losses[0] == found.losses[1]


# --- recipes --------------------------------------------------------------------------------------


def test_recipe_range_test_equals_manual_training():
    """Compute f(3) of the digits network in a plain training loop with manually set bits."""
    r = recipe("smoke", "digits")
    found = recipe_range_test(r, bits=(3,), dwell=12, seeds=(4,))
    from cpt_lab.experiments.spec import run_spec
    from cpt_lab.tasks.image import ImageTask
    from cpt_lab.training.session import quant_config

    losses = {}
    for q in (3, 8):
        spec = run_spec(r, f"static {q}", q_max=8, seed=4)
        torch.manual_seed(4)
        task = ImageTask(spec, torch.device("cpu"))
        model = convert.quantize_(task.build_model(), quant_config(r, 4))
        optimizer, _ = task.optimizer(model)
        PrecisionScheduler(
            model, make_schedule("STATIC", q_max=q, total_steps=12), q_grad=8
        )
        losses[q] = []
        for _, batch in zip(range(12), task.batches(0), strict=False):
            model.train()
            loss, _ = task.loss(model, batch, None)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), r.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses[q].append(loss.item())
    means = {q: np.mean(values[6:]) for q, values in losses.items()}
    start = losses[8][0]
    assert found.start == (pytest.approx(start),)
    assert found.losses[0] == (pytest.approx(means[3]), pytest.approx(means[8]))
    assert found.shares[0][0] == pytest.approx((start - means[3]) / (start - means[8]))


def test_recipe_range_test_of_language_model():
    found = recipe_range_test(recipe("smoke", "pydoc"), bits=(2,), dwell=8, seeds=(0,))
    assert found.bits == (2, 8)
    assert all(math.isfinite(x) for x in found.losses[0])
    assert "LSTM" in found.title


def test_range_test_figure_shows_seeds_and_threshold():
    found = judged(2.0, 1.3, 1.0, seeds=3, noise=0.2)
    (ax,) = found.figure().axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 3
    assert [list(line.get_ydata()) for line in dots] == [
        list(row[:2]) for row in found.shares
    ]
    assert any(list(line.get_ydata()) == [0.8, 0.8] for line in ax.lines)
    assert any(list(line.get_xdata()) == [3, 3] for line in ax.lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 1}, "threshold must lie between 0 and 1, got 1"),
        ({"dwell": 3}, "dwell must be a whole number of at least 4 .* got 3"),
        ({"bits": (4, 9)}, "bits must name precisions below q_max = 8"),
        (
            {"q_max": 2, "bits": None},
            "q_max must be at least 3, as 2 to q_max - 1 are tried; got 2",
        ),
        ({"seeds": ()}, "seeds must name at least one"),
        ({"seeds": (-1,)}, "each of seeds must be a whole number of at least 0"),
    ],
)
def test_range_test_rejects_invalid_arguments_before_training(changes, message):
    model, train_step, optimizer, seen = problem()
    refused(message, run, model, train_step, optimizer, **changes)
    assert not seen
    assert type(model[0]) is nn.Linear
