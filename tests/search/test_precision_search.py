"""Precision search: reports follow from simulated trainings; a user's model stays unchanged, and searches resume."""

import json
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from helpers import refused
from scipy import stats
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import quantize_
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
from tests.search.test_restartable import problem as training_problem


@dataclass
class Trainings:
    """Simulated trainings: by default 2 and 3 bits, gradients below 5 bits, and CR lose quality."""

    noise: float = 0.1
    reached: float = 90.0
    lost: dict[int, float] = field(default_factory=lambda: {2: 9.0, 3: 4.0})
    lost_by_gradients: float = 3.0
    lost_by_cr: float = 2.0
    gained_by_rr: float = 0.0
    diverged: tuple[str, ...] = ()
    seconds: float = 1.5
    stop_after: int | None = None

    def __post_init__(self):
        self.done, self.max_at_once = [], 0

    def __call__(self, arms, seed):
        if len(self.done) == self.stop_after:
            raise KeyboardInterrupt
        self.max_at_once = max(self.max_at_once, len(arms))
        results = {}
        for arm in arms:
            seconds = 1.0 if arm.name == FLOAT32_ARM else self.seconds
            results[arm.name] = Result(self.quality(arm, seed), seconds)
        return results

    def quality(self, arm, seed):
        self.done.append((arm.name, seed))
        if arm.name in self.diverged:
            return math.nan
        quality = self.reached - self.lost.get(arm.bits, 0.0)
        if arm.q_grad < 5:
            quality -= self.lost_by_gradients
        if arm.name.startswith("CR"):
            quality -= self.lost_by_cr
        if arm.name.startswith("RR"):
            quality += self.gained_by_rr
        rng = np.random.default_rng([seed, *arm.name.encode()])
        return quality + self.noise * rng.standard_normal()


def search(trainings, title="net on data", steps=400, **options):
    options = {"margin": 1.0, "unit": "points", "minutes": 5, **options}
    return run_precision_search(trainings, title, steps, **options)


SOME = ("3 bits", "4 bits, gradients 5")
ALL_BITS = tuple(f"{bits} bits" for bits in STATIC_BITS)
LOSING = dict.fromkeys((5, 4, 3, 2), 9.0)
EQUAL = {"noise": 0.0, "lost": {}, "lost_by_gradients": 0.0, "lost_by_cr": 0.0}
REPORTS = {  # name -> trainings, and options of the search
    "clear": (Trainings(), {}),
    "wide_margin": (Trainings(), {"margin": 4.1}),
    "some_arms_diverge": (Trainings(diverged=SOME), {}),
    "all_static_bits_diverge": (Trainings(diverged=ALL_BITS), {}),
    "one_static_diverges": (
        Trainings(lost=LOSING, diverged=("6 bits",)),
        {"seeds": 3},
    ),
    "static_and_schedule_diverge": (
        Trainings(lost=LOSING, diverged=("6 bits", "CR at 6")),
        {"seeds": 3},
    ),
    "schedule_is_worse": (Trainings(gained_by_rr=-2.0), {}),
    "schedule_is_better": (Trainings(gained_by_rr=2.0), {}),
    # two bits are enough, and no schedule is as cheap
    "schedule_is_better_than_more_bits": (
        Trainings(gained_by_rr=2.0, noise=0.01, lost={2: 0.5, 3: 0.5}),
        {},
    ),
    "too_short_to_time": (Trainings(seconds=0.8), {}),
    "noisy": (Trainings(noise=3.0), {"seeds": 3}),
    "one_seed": (Trainings(), {"seeds": 1}),
    "equal": (Trainings(reached=100.0, **EQUAL), {}),
    "untrained": (Trainings(reached=49.0, noise=0.0), {}),
    "interrupted": (Trainings(stop_after=8), {}),
    "no_cr_of_this_cost": (Trainings(), {"steps": 8, "cycles": 1}),
    "no_schedule_of_this_cost": (Trainings(), {"steps": 11, "cycles": 1}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_precision_search_report(name, golden):
    trainings, options = REPORTS[name]
    result = search(replace(trainings), **options)
    if name == "untrained":
        assert len(replace(result, chance_level=48.9).sentences()) > 3
        result = replace(result, chance_level=50.0)
    text = f"{result.headline}\n\n{result}\n\n{result.code()}\n"
    golden(f"precision_search/{name}.txt", text)


def test_precision_search_trains_clear_arms_once():
    trainings = Trainings()
    result = search(trainings)
    num_arms = 1 + len(STATIC_BITS) + 2 + 3
    assert len(trainings.done) == len(set(trainings.done)) == MIN_SEEDS * num_arms
    schedules = [arm for arm in result.arms.values() if arm.kind == "schedule"]
    assert {arm.bits for arm in schedules} == {6, 5, 4, 3}
    for arm in schedules:
        static_cost = result.arms[f"{arm.bits} bits"].cost
        assert arm.cost == pytest.approx(static_cost, rel=1e-3), arm.name
        assert arm.schedule.bits()[-1] >= 7


def test_precision_search_code_sets_bits():
    names = {"cpt": cpt, "model": nn.Sequential(nn.Linear(4, 4)), "total_steps": 3}
    exec(search(Trainings()).code(), names)
    precision = names["model"][0].precision
    assert (precision.bits, precision.q_grad) == (4, 5)


@pytest.mark.slow
def test_precision_search_repeats_only_inconclusive_arms():
    def repeated_arms(trainings, seeds):
        search(trainings, seeds=seeds)
        return {name for name, seed in trainings.done if seed >= MIN_SEEDS}

    repeated = repeated_arms(Trainings(noise=1.0), 12)
    assert repeated
    assert not {"8 bits", "2 bits"} & repeated

    class OneIsNoisy(Trainings):
        def quality(self, arm, seed):
            self.noise = 3.0 if arm.name == "RR at 4" else 0.1
            return super().quality(arm, seed)

    assert repeated_arms(OneIsNoisy(), 6) == {"4 bits", "RR at 4"}


def test_precision_search_pastes_no_unclear_bits():
    noisy = search(Trainings(noise=3.0), seeds=3)
    assert noisy.q_grad < 8
    assert "q_grad=8" in noisy.code()
    assert max(d.seeds_needed for d in noisy.unclear) > 20


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0, 5.0])
def test_seeds_needed_detect_margin_in_four_of_five_searches(std):
    arm = Arm("4 bits", "static", 4, cpt.StaticSchedule(4, 10), 8, "float32")
    values = std * np.array([-1.0, 1.0]) / np.std([-1.0, 1.0], ddof=1)
    needed = Difference(arm, tuple(values), margin=1.0).seeds_needed

    def power(seeds):
        critical = stats.t.ppf(0.975, seeds - 1)
        return 1 - stats.nct.cdf(critical, seeds - 1, np.sqrt(seeds) / std)

    assert 0.78 < power(needed)
    assert power(needed - 2) < 0.82


@pytest.mark.slow
def test_precision_search_figure_omits_diverged_arms():
    (ax,) = search(Trainings(diverged=SOME)).figure().axes
    drawn = {text.get_text() for text in ax.texts}
    assert {"4 bits", "2 bits", "6", "4"} < drawn
    assert not {"3 bits", "5"} & drawn
    trainings, options = REPORTS["one_static_diverges"]
    assert search(replace(trainings), **options).figure()


def test_precision_search_rejects_diverging_float32():
    message = "in float32 training diverges, or its evaluation gives no"
    refused(message, search, Trainings(diverged=(FLOAT32_ARM,)))


def test_precision_search_respects_time_limit(monkeypatch):
    clock, trainings = [0.0], Trainings()
    monkeypatch.setattr(
        "cpt_extras.search.search_loop.time.monotonic", lambda: clock[0]
    )

    def slow(arms, seed):
        clock[0] += 20.0
        return trainings(arms, seed)

    result = search(slow, minutes=3, at_once=2)
    assert clock[0] <= 180
    assert trainings.max_at_once == 2
    assert result.out_of_time
    assert "; stopped before all was clear" in str(result)
    nothing = search(slow, minutes=0.5)
    assert nothing.sentences() == {
        "Bits": "Nothing can be said: it was stopped before float32 and one precision were trained. A training takes "
        "1 s; a first answer needs a dozen."
    }
    assert nothing.headline.startswith("It was stopped before")
    assert nothing.code() == ""


def test_precision_search_stops_at_interrupt():
    try:
        assert search(Trainings(stop_after=8)).out_of_time
    except KeyboardInterrupt:
        pytest.fail("the results of the finished trainings are lost")
    with pytest.raises(KeyboardInterrupt):
        search(Trainings(stop_after=0))


@pytest.mark.parametrize(
    ("values", "verdict", "text"),
    [
        ((0.1, -0.1, 0.0), "as good as", "+0 [-0.25, +0.25]"),
        ((3.0, 3.1, 2.9), "better than", "+3 [+2.8, +3.2]"),
        ((-3.0, -3.1, -2.9), "worse than", "-3 [-3.2, -2.8]"),
        ((-3.0, 3.0, 0.5), "unclear", "+0.17 [-7.3, +7.7]"),
        ((0.0, 0.0), "unclear", "+0 (2 seeds)"),
        ((0.0, math.nan, 0.0), "worse than", None),
        ((0.0, -math.inf, 0.0), "worse than", "diverged"),
        ((1.0,), "unclear", "+1 (one seed)"),
        ((-40.0, 42.0), "unclear", "+1 (2 seeds)"),  # an interval of t(1) is none
        ((0.1 + 0.2, -0.3, 0.0), "as good as", "+0 [-0.75, +0.75]"),
        ((0.0, 1.0, 2.0), "unclear", "+1 [-1.5, +3.5]"),  # t(2) = 4.30
    ],
)
def test_difference_verdict_and_text(values, verdict, text):
    schedule = cpt.make_schedule("STATIC", q_max=4, total_steps=9)
    arm = Arm("4 bits", "static", 4, schedule, 8, FLOAT32_ARM)
    assert Difference(arm, values, 1.0).verdict == verdict
    if text is not None:
        assert str(Difference(arm, values, 1.0)) == text
        assert str(Difference(arm, values, 1.0, "points")).startswith(text)


# --- a user's model ---------------------------------------------------------------------------------------------------
AFFINE_VALUES = {"weight": None, "activation": None}  # roles of a ladder
OPTIONS = {"steps": 8, "seeds": 1, "cycles": 1, "progress": False}


def problem():
    """Return the problem of all searches, with the share of inputs that the model separates."""
    model, train_step, optimizer, seen = training_problem()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(2))

    def evaluate():
        return 100 * float((model(x).argmax(1) == (x.sum(1) > 0)).float().mean())

    return (model, train_step, optimizer, evaluate), seen


@pytest.mark.slow
def test_try_precision_resumes_store(tmp_path):
    store = tmp_path / "try.jsonl"
    options = {**OPTIONS, "steps": 16, "cycles": 2, "store": store}
    given, seen = problem()
    whole = try_precision(*given, **options)
    lines = store.read_text().strip().splitlines()
    assert len(lines) == 12
    assert set(seen) == set(range(16))
    (_, train_step, _, evaluate), _ = problem()  # the same training by hand
    for step in range(16):
        train_step(step)
    assert whole.results[FLOAT32_ARM][0].value == pytest.approx(evaluate())

    store.write_text("\n".join([*lines[:5], lines[5][:20]]))  # killed while it wrote
    given, seen = problem()
    resumed = try_precision(*given, **options)
    assert len(seen) == 16 * 7
    for name, results in whole.results.items():
        assert resumed.results[name][0].value == results[0].value
    complete = [x for x in store.read_text().splitlines() if x.endswith("}")]
    arms = [[json.loads(line)["arm"] for line in part] for part in (complete, lines)]
    assert arms[0] == arms[1]

    store.write_text("3\n")
    message = "holds trainings of 3, this is 'Sequential"
    refused(message, try_precision, *given, **options)
    store.write_text("\n".join(lines))
    model, train_step, optimizer, _ = training_problem(seed=5)
    message = r"try.jsonl holds trainings of 'Sequential, 16 steps.* take another file"
    refused(message, try_precision, model, train_step, optimizer, evaluate, **options)


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    "ladder",
    [
        cpt.FormatLadder({2: "mxfp4", 6: "mxfp6_e2m3", 8: "mxfp8_e4m3"}).filled(),
        {
            "gradient": cpt.FormatLadder({2: "e2m1", 8: "e4m3"}).filled(),
            **AFFINE_VALUES,
        },
        cpt.FormatLadder({2: "e2m1", 8: "e4m3"}),  # with holes
    ],
)
def test_try_precision_rejects_ladders_before_training(ladder, is_converted):
    model = nn.Sequential(nn.Linear(32, 32))
    config = cpt.QuantConfig(ladder=ladder)
    if is_converted:
        quantize_(model, config)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = OPTIONS if is_converted else {**OPTIONS, "config": config}
    message = "layer '0' has a ladder of number formats.*without ladder="
    given = model, seen.append, optimizer, lambda: 1.0
    refused(message, try_precision, *given, **options)
    assert seen == []
    assert hasattr(model[0], "precision") == is_converted


@pytest.fixture(scope="module")
def stored_search(tmp_path_factory):
    """Return the path of a store, and a function that searches with it after a change of model and optimizer."""
    path = tmp_path_factory.mktemp("store") / "try.jsonl"

    def search(config=None, change=lambda model, optimizer: None, **options):
        given, seen = problem()
        quantize_(given[0], config)
        replacement = change(given[0], given[2])
        optimizer = given[2] if replacement is None else replacement
        options = {**OPTIONS, "steps": 16, "store": path, **options}
        try_precision(*given[:2], optimizer, given[3], **options)
        return len(seen)

    assert search() == 16 * 12
    return search


def set_option(optimizer, **options):
    optimizer.param_groups[0].update(options)


def set_buffer(model):
    model[1].running_mean += 1


def fill_momentum(model, optimizer):
    """Make momentum of a step that changed no weight."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.load_state_dict(weights, strict=False)


def seed_other_generators(model, optimizer):
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


@pytest.mark.parametrize(
    "change",
    [
        {"config": cpt.QuantConfig(float32=("0",))},
        {"config": cpt.QuantConfig().with_zero_points()},
        {"config": cpt.QuantConfig().with_shared_steps()},
        {"config": cpt.QuantConfig(running_start="zero")},
        {"config": cpt.QuantConfig(seed=1)},
        {"config": cpt.QuantConfig(execution="integer")},
        {"change": lambda model, _: torch.optim.Adam(model.parameters(), lr=0.2)},
        {"change": lambda _, optimizer: set_option(optimizer, momentum=0.5)},
        {"change": lambda _, optimizer: set_option(optimizer, weight_decay=0.1)},
        {"change": lambda model, _: set_buffer(model)},
        {"change": lambda model, _: model[0].requires_grad_(False) and None},
        {"change": lambda model, _: model[1].eval() and None},
        {"change": lambda *_: torch.manual_seed(5) and None},
        {"change": fill_momentum},
        {"stateful": [torch.nn.BatchNorm1d(2)]},
        {"cycles": 2},
    ],
)
def test_try_precision_refuses_store_of_other_training(stored_search, change):
    message = "try.jsonl holds trainings of 'Sequential, 16 steps.* take another file"
    refused(message, stored_search, **change)


def test_try_precision_reads_store_of_equal_training(stored_search):
    """Repeat no training, whatever the random numbers that torch does not draw."""
    assert stored_search(change=seed_other_generators) == 0


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
    (model, train_step, optimizer, evaluate), _ = problem()
    options = {"evaluate": evaluate, **OPTIONS, "steps": 16, "cycles": 2, **changes}
    refused(message, try_precision, model, train_step, optimizer, **options)
    assert type(model[0]) is nn.Linear


def test_try_precision_rejects_identical_seeds():
    (model, train_step, *given), _ = problem()
    message = (
        r"seed 1 is the same training as one before; .* from number 8 on, or seeds"
    )
    options = {**OPTIONS, "seeds": 3}
    repeat = lambda step: train_step(step % 8)  # noqa: E731
    refused(message, try_precision, model, repeat, *given, **options)
    assert type(model[0]) is nn.Linear


@pytest.mark.slow
def test_try_precision_code_depends_on_conversion():
    (model, *given), _ = problem()
    config = cpt.QuantConfig(float32=("4",))
    result = try_precision(model, *given, config=config, **OPTIONS)
    assert result.code().startswith("cpt.quantize_(model, config)\n")
    cpt.quantize_(model)
    result = try_precision(model, *given, **OPTIONS)
    assert result.code().startswith("# the model is quantised already\n")
    message = "quantised already, so that config= would change nothing"
    refused(message, try_precision, model, *given, config=config, **OPTIONS)
