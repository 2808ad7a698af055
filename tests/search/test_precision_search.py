"""Precision search: answers follow from the trainings, the model stays unchanged, interrupted searches resume."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn

import cpt_core as cpt
from cpt_extras.search.precision_search import try_precision
from cpt_extras.search.search_loop import run_precision_search
from cpt_extras.search.search_result import (
    FLOAT32_ARM,
    MIN_SEEDS,
    STATIC_BITS,
    Arm,
    Difference,
    Result,
)
from tests.search.test_restartable import problem as trained

LOST = {2: 9.0, 3: 4.0}  # points against float32
SOME = ("3 bits", "4 bits, gradients 5")


class Trainings:
    """Simulated trainings: 2 and 3 bits lose, gradients need 5 bits, CR loses and RR does not."""

    def __init__(
        self, noise=0.1, reached=90.0, rr=0.0, lost=LOST, diverged=(), seconds=1.5
    ):
        self.noise, self.reached, self.rr, self.lost = noise, reached, rr, lost
        self.diverged, self.seconds, self.done, self.most = diverged, seconds, [], 0

    def __call__(self, arms, seed):
        self.most = max(self.most, len(arms))
        return {
            arm.name: Result(
                self.value(arm, seed), self.seconds if arm.name != FLOAT32_ARM else 1.0
            )
            for arm in arms
        }

    def value(self, arm, seed):
        self.done.append((arm.name, seed))
        if arm.name in self.diverged:
            return math.nan
        lost = (
            self.lost.get(arm.bits, 0.0)
            + 3.0 * (arm.q_grad < 5)
            + 2.0 * arm.name.startswith("CR")
        )
        rng = np.random.default_rng([seed, *arm.name.encode()])
        return (
            self.reached
            - lost
            + self.rr * arm.name.startswith("RR")
            + self.noise * rng.standard_normal()
        )


def answer(run, **options):
    return run_precision_search(
        run,
        "net on data",
        400,
        **{"margin": 1.0, "unit": "points", "minutes": 5, **options},
    )


def test_precision_search_finds_known_answer():
    run = Trainings()
    found = answer(run)
    assert (found.bits, found.q_grad, found.matched_bits, found.out_of_time) == (
        4,
        5,
        4,
        False,
    )
    words = {d.arm.name: d.verdict for d in found.deciding_comparisons}
    assert words == {
        "4 bits": "as good as",
        "3 bits": "worse than",
        "CR at 4": "worse than",
        "RR at 4": "as good as",
        "4 bits, gradients 6": "as good as",
        "4 bits, gradients 5": "as good as",
        "4 bits, gradients 4": "worse than",
    }
    told = found.sentences()
    assert list(told) == ["Bits", "Schedule", "Gradients", "Cost", "Time"]
    assert told["Bits"].startswith(
        "With 4 bits it is as good as in float32, which reaches 90"
    )
    assert ". With 3 bits it is worse than float32 (-4" in told["Bits"]
    assert told["Schedule"].startswith(
        "At the cost of 4 bits no schedule is clearly better than 4 bits throughout. With bits that rise in cycles, by "
        "a cosine (CR) or late (RR): CR -1.9 ["
    )
    assert told["Gradients"].startswith(
        "With 4 bits for weights and activations, gradients may have 5 ("
    )
    cost = "4 bits, with gradients of 8, do 0.42 of the bit operations of 8 bits, with 5-bit gradients 0.29."
    assert told["Cost"] == cost  # (16 + 64) / 192, (16 + 40) / 192
    assert told["Time"].endswith("a training takes 1.5 times float32's.")
    assert (
        found.headline
        == "4 bits are enough, 5 for gradients; no schedule is clearly better"
    )
    pasted = {"cpt": cpt, "model": nn.Sequential(nn.Linear(4, 4)), "total_steps": 3}
    exec(found.code(), pasted)
    assert (pasted["model"][0].precision.bits, pasted["model"][0].precision.q_grad) == (
        4,
        5,
    )
    assert (
        len(run.done)
        == len(set(run.done))
        == MIN_SEEDS * (1 + len(STATIC_BITS) + 2 + 3)
    )  # clear: no further seed
    assert str(found).startswith(
        "net on data: 36 trainings, 3 seeds; plus is better, 1 point is too little to matter\nBits:"
    )
    schedules = [a for a in found.arms.values() if a.kind == "schedule"]
    assert {a.bits for a in schedules} == {6, 5, 4, 3}
    for arm in schedules:
        assert arm.cost == pytest.approx(
            found.arms[f"{arm.bits} bits"].cost, rel=1e-3
        ), arm.name
        assert arm.schedule.bits()[-1] >= 7


@pytest.mark.parametrize(
    ("of", "margin", "bits", "q_grad", "part", "said", "finding"),
    [
        # at a margin of 4.1 points the 4 that 3 bits lose are too little to matter
        (
            dict(),
            4.1,
            3,
            4,
            "Bits",
            "With 3 bits it is slightly worse than in float32, which",
            "3 bits are enough",
        ),
        (
            dict(diverged=SOME),
            1.0,
            4,
            6,
            "Bits",
            "With 3 bits it is worse than float32 (diverged).",
            "4 bits are",
        ),
        (
            dict(diverged=[f"{b} bits" for b in STATIC_BITS]),
            1.0,
            8,
            4,
            "Bits",
            "worse than in float32, which reaches 9",
            "Even 8 bits are not enough",
        ),
        (
            dict(rr=-2.0),
            1.0,
            4,
            5,
            "Schedule",
            "At the cost of 4 bits schedules are clearly worse than 4 bits",
            "",
        ),
        (
            dict(rr=2.0),
            1.0,
            4,
            5,
            "Schedule",
            "RR is clearly better than 4 bits",
            "; a schedule is clearly better",
        ),
        (  # two bits are enough, which no schedule costs
            dict(rr=2.0, noise=0.01, lost={2: 0.5, 3: 0.5}),
            1.0,
            2,
            5,
            "Schedule",
            "the nearest that schedules have",
            "; a schedule is clearly better than 3 bits",
        ),
        (
            dict(seconds=0.8),
            1.0,
            4,
            5,
            "Time",
            "is simulated; these were too short to time.",
            "",
        ),
    ],
)
def test_precision_search_answer_follows_trainings(
    of, margin, bits, q_grad, part, said, finding
):
    found = answer(Trainings(**of), margin=margin)
    assert (found.bits, found.q_grad) == (bits, q_grad)
    assert said in found.sentences()[part]
    assert finding in found.headline


def test_precision_search_figure_omits_diverged_arms():
    (ax,) = answer(Trainings(diverged=SOME)).figure().axes
    drawn = {text.get_text() for text in ax.texts}
    assert {"4 bits", "2 bits", "6", "4"} < drawn
    assert not {"3 bits", "5"} & drawn


def test_precision_search_compares_schedules_with_diverged_static():
    lost = dict.fromkeys((5, 4, 3, 2), 9.0)
    found = answer(Trainings(lost=lost, diverged=("6 bits",)), seeds=3)
    words = {
        name: found.difference(name).verdict
        for name in ("6 bits", "CR at 6", "RR at 6")
    }
    assert words == {
        "6 bits": "worse than",
        "CR at 6": "better than",
        "RR at 6": "better than",
    }
    assert str(found.difference("CR at 6")) == "the other diverged"
    both = answer(Trainings(lost=lost, diverged=("6 bits", "CR at 6")), seeds=3)
    assert both.difference("CR at 6").values == ()
    assert found.figure()


def test_precision_search_rejects_diverging_float32():
    refused(
        "in float32 training diverges, or its evaluation gives no",
        answer,
        Trainings(diverged=(FLOAT32_ARM,)),
    )


def test_precision_search_reports_schedules_without_cost_match():
    """Name the schedules that have too few steps to reach exactly the cost of static bits."""
    told = run_precision_search(
        Trainings(), "net", 8, cycles=1, margin=1.0
    ).sentences()["Schedule"]
    assert "late (RR): RR +" in told
    assert told.endswith(
        "]. Not tried: CR, of which so few steps have none of exactly the cost of 4 bits."
    )
    told = run_precision_search(
        Trainings(), "net", 11, cycles=1, margin=1.0
    ).sentences()["Schedule"]
    assert (
        told
        == "Not tried: CR and RR, of which so few steps have none of exactly the cost of 4 bits."
    )


def test_precision_search_repeats_only_inconclusive_arms():
    run = Trainings(noise=1.0)
    found = answer(run, seeds=12)
    repeated = {name for name, seed in run.done if seed >= MIN_SEEDS}
    assert repeated
    assert not {"8 bits", "2 bits"} & repeated

    class OneIsNoisy(Trainings):
        def value(self, arm, seed):
            self.noise = 3.0 if arm.name == "RR at 4" else 0.1
            return super().value(arm, seed)

    run = OneIsNoisy()
    answer(run, seeds=6)
    assert {name for name, seed in run.done if seed >= MIN_SEEDS} == {
        "4 bits",
        "RR at 4",
    }
    noisy = answer(Trainings(noise=3.0), seeds=3)
    assert "Not clear" in noisy.sentences()
    assert "points" not in noisy.sentences()["Not clear"]  # 1 point
    pasted = noisy.code()
    assert (noisy.q_grad < 8, "q_grad=8" in pasted) == (
        True,
        True,
    )  # what is not clear is told, not given to paste
    few = answer(Trainings(), seeds=1).sentences()["Not clear"]
    assert few.endswith("To tell 1 point apart takes 3 seeds or more.")
    assert "bits are perhaps enough" in noisy.headline
    assert max(d.seeds_needed for d in noisy.unclear) > 20
    assert len(found.results[FLOAT32_ARM]) >= MIN_SEEDS


def test_precision_search_is_inconclusive_for_equal_results():
    class Same(Trainings):
        def value(self, arm, seed):
            return 100.0

    found = answer(Same())
    assert (found.headline, found.code()) == ("Nothing tells precisions apart", "")
    assert found.sentences() == {
        "Bits": "All 36 trainings reached 100 %: nothing tells precisions apart."
    }


def test_precision_search_is_inconclusive_for_untrained_float32():
    found = replace(answer(Trainings(reached=49.0, noise=0.0)), chance_level=50.0)
    assert found.sentences() == {
        "Bits": "Nothing can be said: in float32 it reaches 49 %, no more than guessing (50)."
    }
    assert found.headline == "In float32 it reaches 49 %, no more than guessing (50)"
    assert found.code() == ""
    assert len(replace(found, chance_level=48.9).sentences()) > 3


def test_precision_search_respects_time_limit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(
        "cpt_extras.search.search_loop.time.monotonic", lambda: clock[0]
    )
    run = Trainings()

    def slow(arms, seed):
        clock[0] += 20.0
        return run(arms, seed)

    found = answer(slow, minutes=3, at_once=2)
    assert clock[0] <= 180
    assert run.most == 2
    assert found.out_of_time
    assert "; stopped before all was clear" in str(found)
    nothing = answer(slow, minutes=0.5)
    assert nothing.sentences() == {
        "Bits": "Nothing can be said: it was stopped before float32 and one precision were trained. A training takes "
        "1 s; a first answer needs a dozen."
    }
    assert nothing.headline.startswith("It was stopped before")
    assert nothing.code() == ""


def test_precision_search_returns_partial_result_on_interrupt():
    def stopped(after):
        run = Trainings()

        def trained(arms, seed):
            if len(run.done) == after:
                raise KeyboardInterrupt
            return run(arms, seed)

        return trained

    try:
        found = answer(stopped(8))
    except KeyboardInterrupt:
        pytest.fail("nothing is said of what was trained")
    assert found.out_of_time
    assert found.sentences()["Bits"].startswith(
        "With 4 bits it is perhaps as good as in float32"
    )
    assert found.sentences()["Schedule"] == "Not compared yet."
    assert (
        found.headline
        == "4 bits are perhaps enough, perhaps 6 for gradients; schedules were not compared"
    )
    with pytest.raises(KeyboardInterrupt):
        answer(stopped(0))


def test_difference_wording():
    arm = Arm(
        "4 bits",
        "static",
        4,
        cpt.make_schedule("STATIC", q_max=4, total_steps=9),
        8,
        FLOAT32_ARM,
    )
    for values, word in (
        ((0.1, -0.1, 0.0), "as good as"),
        ((3.0, 3.1, 2.9), "better than"),
        ((-3.0, -3.1, -2.9), "worse than"),
        ((-3.0, 3.0, 0.5), "unclear"),
        ((0.0, 0.0), "unclear"),
        ((0.0, math.nan, 0.0), "worse than"),
    ):
        assert Difference(arm, values, 1.0).verdict == word, values
    assert str(Difference(arm, (1.0,), 1.0, "points")) == "+1 (one seed) points"
    assert (
        str(Difference(arm, (-40.0, 42.0), 1.0, "points")) == "+1 (2 seeds) points"
    )  # an interval of t(1) is none
    assert str(Difference(arm, (0.1 + 0.2, -0.3, 0.0), 1.0)).startswith("+0 [-0.75, ")
    assert (
        str(Difference(arm, (0.0, 1.0, 2.0), 1.0)) == "+1 [-1.5, +3.5]"
    )  # t(2) = 4.30


# --- a model of one's own -------------------------------------------------------------------------
def problem():
    """Return the problem of all trials, with the share of inputs that the model separates."""
    model, train_step, optimizer, seen = trained()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(2))

    def evaluate():
        return 100 * float((model(x).argmax(1) == (x.sum(1) > 0)).float().mean())

    return model, train_step, optimizer, evaluate, seen


def test_try_precision_restores_model_and_resumes_store(tmp_path):
    model, step, optimizer, evaluate, seen = problem()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    store, options = (
        tmp_path / "try.jsonl",
        {"steps": 16, "seeds": 1, "cycles": 2, "progress": False},
    )
    whole = try_precision(model, step, optimizer, evaluate, store=store, **options)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert (type(model[0]), type(model[4])) == (nn.Linear, nn.Linear)
    lines = store.read_text().strip().splitlines()
    assert len(lines) == 12
    assert set(seen) == set(range(16))
    plain = problem()  # the same training, without anything of ours
    for i in range(16):
        plain[1](i)
    assert whole.results[FLOAT32_ARM][0].value == pytest.approx(plain[3]())

    store.write_text("\n".join([*lines[:5], lines[5][:20]]))  # killed while it wrote
    again, step, optimizer, evaluate, seen = problem()
    found = try_precision(again, step, optimizer, evaluate, store=store, **options)
    assert len(seen) == 16 * 7
    assert {n: r[0].value for n, r in found.results.items()} == {
        n: r[0].value for n, r in whole.results.items()
    }
    whole_lines = [
        line for line in store.read_text().splitlines() if line.endswith("}")
    ]
    assert [json.loads(line)["arm"] for line in whole_lines] == [
        json.loads(line)["arm"] for line in lines
    ]

    store.write_text("3\n")
    given = step, optimizer, evaluate
    refused(
        "holds trainings of 3, this is 'Sequential",
        try_precision,
        again,
        *given,
        store=store,
        **options,
    )
    store.write_text("\n".join(lines))
    other, step, optimizer, _ = trained(seed=5)
    said = r"try.jsonl holds trainings of 'Sequential, 16 steps.* take another file"
    refused(
        said, try_precision, other, step, optimizer, evaluate, store=store, **options
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluate": 3},
            "evaluate must be a function without arguments that returns a number, got 3",
        ),
        ({"minutes": 0}, "minutes must be a number of more than 0, got 0"),
        ({"steps": 15}, "steps must be a whole number of at least 16"),
        (
            {"evaluate": lambda: "good"},
            "evaluate must return a quality, one number; got 'good'",
        ),
    ],
)
def test_try_precision_rejects_invalid_arguments(changes, message):
    model, step, optimizer, evaluate, _ = problem()
    given = {
        "evaluate": evaluate,
        "steps": 16,
        "cycles": 2,
        "progress": False,
        **changes,
    }
    refused(message, try_precision, model, step, optimizer, **given)
    assert type(model[0]) is nn.Linear


def test_try_precision_rejects_identical_seeds():
    model, step, optimizer, evaluate, _ = problem()
    said = r"seed 1 is the same training as one before; .* from number 8 on, or seeds"
    given = model, lambda number: step(number % 8), optimizer, evaluate
    refused(said, try_precision, *given, steps=8, cycles=1, progress=False)
    assert type(model[0]) is nn.Linear


def test_precision_search_lines_convert_as_searched():
    model, step, optimizer, evaluate, _ = problem()
    options = {"steps": 8, "seeds": 1, "cycles": 1, "progress": False}
    config = cpt.QuantConfig(float32=("4",))
    found = try_precision(model, step, optimizer, evaluate, config=config, **options)
    assert found.code().startswith("cpt.quantize_(model, config)\n")
    cpt.quantize_(model)
    found = try_precision(model, step, optimizer, evaluate, **options)
    assert found.code().startswith("# the model is quantised already\n")
    said = "quantised already, so that config= would change nothing"
    refused(
        said, try_precision, model, step, optimizer, evaluate, config=config, **options
    )
