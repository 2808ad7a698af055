"""Precision range test: its decision rule on losses by hand, its effects on a model, and recipes."""

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
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training.recipe_search import recipe_range_test
from cpt_lab.training.session import quant_config
from tests.search.test_restartable import problem
from tests.search.test_restartable import range_test as run

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_extras.search.range_test.RangeTestWarning"
)
NAN = math.nan
CONTINUING = {"mode": "continuing", "threshold": 0.05}
NOISY = {"seeds": 3, "noise": 0.1}


def judge(levels, start=3.0, mode="reset", threshold=0.8, seeds=1, noise=0.0):
    """Judge seeds with the loss ``start`` first and a loss per precision afterwards; the first one has noise."""
    traces = []
    for s in range(seeds):
        shift = noise * (s - (seeds - 1) / 2)
        losses = [levels[0] + shift, *levels[1:]]
        traces.append([[start, *[loss] * 7] for loss in losses])
    return evaluate_range_test(traces, (2, 3, 8), mode, threshold, 8, "by hand")


RULES = {  # name -> losses at 2, 3 and 8 bits, options, and the answer
    "share_is_enough": ((2.0, 1.4, 1.0), {}, 3),
    "share_is_too_small": ((2.0, 1.42, 1.0), {}, 8),
    "lowest_that_passes": ((1.3, 1.42, 1.0), {}, 2),
    "lower_threshold": ((2.0, 1.4, 1.0), {"threshold": 0.5}, 2),
    "sure": ((2.0, 1.1, 1.0), NOISY, 3),
    "doubtful_above": ((1.36, 1.1, 1.0), NOISY, 2),
    "doubtful_below": ((1.44, 1.1, 1.0), NOISY, 3),
    "loss_does_not_fall": ((3.0, 3.0, 3.0), {}, None),
    "loss_rises": ((2.0, 2.0, 3.5), {}, None),
    "diverges_at_q_max": ((2.0, 1.0, NAN), {}, None),
    "diverges_at_low_bits": ((NAN, 1.2, 1.0), {}, 3),
    "continuing": ((2.98, 2.4, 2.3), CONTINUING, 3),
    "continuing_without_fall": ((2.99, 2.98, 2.97), CONTINUING, None),
    "continuing_diverges": ((NAN, 2.0, 1.0), CONTINUING, None),
    "continuing_below_0": ((-10.1, -11.0, -11.0), CONTINUING | {"start": -10.0}, 3),
    "continuing_from_0": ((-1.0, -2.0, -3.0), CONTINUING | {"start": 0.0}, None),
}


@pytest.mark.parametrize("name", RULES)
def test_range_test_rule(name, golden):
    losses, options, q_min = RULES[name]
    result = judge(losses, **options)
    assert result.q_min == q_min
    golden(f"range_test/{name}.txt", f"{result}\n")
    assert json.dumps(result.to_dict(), allow_nan=False)
    assert result.mean(2) == pytest.approx(
        np.mean([row[0] for row in result.shares]), nan_ok=True
    )


@pytest.mark.parametrize(
    ("trace", "q_min"),
    [
        ([3.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0], 2),  # the second half counts
        ([3.0, *[3.1, 2.7] * 4][:8], None),  # a fall by 0.1 in noise of +- 0.12
        ([3.0, *[2.95, 2.85] * 4][:8], 2),  # in noise of +- 0.03
    ],
)
def test_range_test_judges_second_half_beyond_noise(trace, q_min):
    result = evaluate_range_test([[trace, trace]], (2, 8), "reset", 0.8, 8, "")
    assert result.q_min == q_min
    assert result.losses[0][0] == pytest.approx(np.mean(trace[4:]))


@pytest.mark.slow
def test_range_test_figure_shows_seeds_and_threshold():
    result = judge((2.0, 1.3, 1.0), seeds=3, noise=0.2)
    (ax,) = result.figure().axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    shares = [list(row[:2]) for row in result.shares]
    assert [list(line.get_ydata()) for line in dots] == shares
    assert any(list(line.get_ydata()) == [0.8, 0.8] for line in ax.lines)
    assert any(list(line.get_xdata()) == [3, 3] for line in ax.lines)


# --- a user's training loop -------------------------------------------------------------------------------------------


def test_range_test_repeats_batches_and_initial_weights():
    model, train_step, optimizer, seen = problem(dropout=0.5)
    initial = []

    def watched(step):
        if step % 8 == 0:
            initial.append(model[0].weight.detach().clone())
        return train_step(step)

    run(model, watched, optimizer)
    # the second seed takes the next batches
    assert seen == [*list(range(8)) * 3, *list(range(8, 16)) * 3]
    assert all(torch.equal(weight, initial[0]) for weight in initial)
    # the same dropout masks at 8 and 9 bits
    same = run(model, train_step, optimizer, bits=(8,), q_max=9, seeds=(0,))
    assert same.losses[0][0] == pytest.approx(same.losses[0][1], rel=0.05)


@pytest.mark.parametrize("bits", [(4,), (2, 4, 6)])
@pytest.mark.parametrize("mode", ["reset", "continuing"])
def test_range_test_seeds_share_no_batches(mode, bits):
    model, train_step, optimizer, seen = problem()
    seeds = (0, 1, 3)
    run(model, train_step, optimizer, mode=mode, bits=bits, seeds=seeds)
    numbers_by_seed = np.split(np.array(seen), len(seeds))
    batches = len(set(seen)) // len(seeds)
    for seed, numbers in zip(seeds, numbers_by_seed, strict=True):
        assert set(numbers) == set(range(seed * batches, (seed + 1) * batches))


@pytest.mark.parametrize(
    ("mode", "threshold", "numbers"),
    [("reset", 0.8, [*range(8)] * 3), ("continuing", 0.05, [*range(24)])],
)
def test_range_test_sets_bits_and_default_threshold(mode, threshold, numbers):
    model, _, optimizer, _ = problem()
    steps, bits = [], []

    def spy(step):
        layer = convert.layer_precisions(model)["0"]
        steps.append(step)
        bits.append((layer.bits, layer.q_grad))
        return 1.0 / (1 + step)

    result = run(model, spy, optimizer, seeds=(0,), mode=mode)
    assert result.threshold == threshold
    assert steps == numbers
    assert bits == [(2, 8)] * 8 + [(4, 8)] * 8 + [(8, 8)] * 8


def test_range_test_stops_training_at_nan():
    model, train_step, optimizer, seen = problem()

    def diverges(step):
        bits = convert.layer_precisions(model)["0"].bits
        return train_step(step) * (NAN if (bits, step) == (2, 3) else 1)

    result = run(model, diverges, optimizer, seeds=(0,))
    assert seen == [*range(4), *range(8), *range(8)]
    assert math.isnan(result.losses[0][0])
    assert result.q_min in (4, 8)


def test_range_test_warns_and_stores_warning():
    model, train_step, optimizer, _ = problem()  # of 16 batches
    repeated = {"bits": (4, 2, 4, 8), "seeds": (0, 0)}  # which is one seed
    with pytest.warns(RangeTestWarning, match="one seed"):
        result = run(model, train_step, optimizer, **repeated)
    assert result.bits == (2, 4, 8)
    assert "one seed" in result.warning
    assert "warning: one seed" in str(result)
    with pytest.warns(RangeTestWarning, match="all 2 seeds saw the same batches"):
        result = run(model, train_step, optimizer, dwell=16)
    assert result.losses[0] == result.losses[1]


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


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recipe_range_test_equals_manual_training():
    """Compute f(3) of the digits network in a plain training loop with manually set bits."""
    r = recipe("smoke", "digits")
    result = recipe_range_test(r, bits=(3,), dwell=12, seeds=(4,))
    losses = {3: [], 8: []}
    for q in losses:
        torch.manual_seed(4)
        spec = run_spec(r, f"static {q}", q_max=8, seed=4)
        task = ImageTask(spec, torch.device("cpu"))
        model = convert.quantize_(task.build_model(), quant_config(r, 4))
        optimizer, _ = task.optimizer(model)
        schedule = make_schedule("STATIC", q_max=q, total_steps=12)
        PrecisionScheduler(model, schedule, q_grad=8)
        for _, batch in zip(range(12), task.batches(0), strict=False):
            model.train()
            loss, _ = task.loss(model, batch, None)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), r.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses[q].append(loss.item())
    start = losses[8][0]
    low, high = (np.mean(losses[q][6:]) for q in (3, 8))
    assert result.start == (pytest.approx(start),)
    assert result.losses[0] == (pytest.approx(low), pytest.approx(high))
    assert result.shares[0][0] == pytest.approx((start - low) / (start - high))
