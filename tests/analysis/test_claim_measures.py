"""Measures of claims: compared arms, q_max, aggregation, model and data, with effects of both signs."""

import pytest

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.claims import CONFIRMED, CONTRADICTED, OPEN, SMALLER, combined
from cpt_lab.experiments import designs, grids
from tests.analysis.test_claims import by_arm, entry, rows_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
BOTH = [(1, CONFIRMED), (-1, CONTRADICTED)]


def word_of(rows, name, paper_scale=True):
    """Return the verdict of a claim on synthetic rows."""
    return entry(rows, name).verdict(paper_scale)


@pytest.mark.parametrize(("q_max", "top"), [(8, "static 8"), (6, "static 6")])
def test_claim_compares_with_static_q_max(q_max, top):
    """Compare schedules with the static arm at the q_max of their experiment."""
    specs = designs.quality_cost(
        "paper", "cifar100", schedules=["ER", "ETH"], q_max=[q_max]
    )
    e = entry(by_arm(specs, {top: 0.7}), "cifar_small")
    assert e.verdict(True) == CONFIRMED
    assert f"small minus {top}: +10.0" in e.evidence()[0]


def test_claim_allows_one_exceptional_schedule():
    specs = designs.quality_cost("paper", "cifar10", q_max=[8])
    better = by_arm(specs, {"static 8": 0.7, "RR": 0.6})
    assert word_of(better, "cifar_nearly_all") == CONFIRMED  # one is worse
    two_worse = by_arm(specs, {"static 8": 0.7, "RR": 0.6, "LT": 0.6})
    assert word_of(two_worse, "cifar_nearly_all") == CONTRADICTED
    nine = [row for row in better if row["spec"]["arm"] != "ETH"]
    assert (
        entry(nine, "cifar_nearly_all").effects == ()
    )  # nothing is said of all by nine
    scenes = designs.quality_cost(
        "demo", "digit-scenes", static_bits=[8], seeds=range(3)
    )
    worst = by_arm(scenes, {"CT": 0.7}, "map50")
    assert word_of(worst, "detection_all", False) == CONTRADICTED
    assert (
        word_of(by_arm(scenes, {"CT": 0.9}, "map50"), "detection_all", False)
        == CONFIRMED
    )
    assert len(SUITE) == 10


def test_claim_at_paper_scale_needs_matching_data():
    """Judge a claim at paper scale only by the data of its grids."""
    cifar = by_arm(
        designs.quality_cost("paper", "cifar10", q_max=[8]), {"static 8": 0.7}
    )
    assert word_of(cifar, "cifar_small") == CONFIRMED
    assert entry(cifar, "imagenet_small").effects == ()
    small = by_arm(designs.quality_cost("demo", seeds=range(3)), {"static 8": 0.7})
    assert [
        word_of(small, name, False) for name in ("cifar_small", "imagenet_small")
    ] == [CONFIRMED] * 2  # stand-ins


def test_claim_selects_q_max_aggregation_and_model():
    gcn = by_arm(
        designs.quality_cost("paper", "ogbn-arxiv", q_max=[8]), {"static 8": 0.9}
    )
    q_agg = by_arm(designs.q_agg("paper", "ogbn-arxiv", q_max=[8]), {"static 8": 0.6})
    assert word_of(gcn + q_agg, "arxiv_large") == CONFIRMED
    assert word_of(gcn + q_agg, "arxiv_large_q_agg") == CONTRADICTED
    assert word_of(gcn + q_agg, "arxiv_small_q_agg") == CONFIRMED
    assert len(entry(gcn + q_agg, "arxiv_large").effects) == 1  # FP-Agg alone
    assert entry(gcn + q_agg, "products_large").effects == ()  # another model
    words = designs.quality_cost("paper", "ptb", q_max=[6, 8])
    six = rows_of(
        words, lambda s: 99.0 if s.arm == "CR" and s.q_max == 6 else 90.0, "perplexity"
    )
    assert word_of(six, "language_cr") == CONFIRMED  # the claim is about 8
    assert word_of([r for r in six if r["spec"]["q_max"] == 6], "language_cr") == OPEN


def cycles_of_demos():
    of = {"schedules": ["CR"], "static_bits": [], "seeds": range(3)}
    return [s for n in (2, 8) for s in designs.quality_cost("demo", n_cycles=n, **of)]


def deficits_of_two_decays():
    both = (
        {"deficit_lengths": [100]},
        {"deficit_lengths": [100], "milestones": (0.3, 0.6)},
    )
    return [
        s
        for of in both
        for s in designs.deficit_length("demo", "digits", seeds=range(3), **of)
    ]


# claim -> the runs that it compares, which of them have the effect, and the words for what that is, in accuracy
DIRECTIONS = {
    "cycles": (
        cycles_of_demos,
        lambda s: s.recipe.n_cycles == 8,
        {0.0: CONFIRMED, -0.05: CONTRADICTED},
    ),
    "entailment_cycles": (
        lambda: [
            s
            for s in grids.grid_specs("xnli/cycles")
            if s.recipe.lr == 1e-5 and s.q_max == 8
        ],
        lambda s: s.recipe.n_cycles == 1,
        {0.0: CONFIRMED, 0.02: CONTRADICTED},
    ),
    "products_fanout": (
        lambda: grids.grid_specs("ogbn-products/fanout"),
        lambda s: s.recipe.fanout == 64,
        {0.0: CONFIRMED, 0.02: CONTRADICTED},
    ),
    "deficit_decay": (
        deficits_of_two_decays,
        lambda s: s.schedule.windows and s.recipe.milestones[0] < 0.5,
        {0.0: CONFIRMED, -0.1: CONTRADICTED},
    ),
    "gradients_stabilize": (
        lambda: designs.quality_cost(
            "demo", schedules=(), static_bits=[6], q_max=[6, 8], seeds=range(3)
        ),
        lambda s: s.q_grad == 8,
        {0.01: CONFIRMED, -0.01: CONTRADICTED},
    ),
    "gcn_aggregation": (
        lambda: designs.aggregation("demo", "digits-graph", seeds=range(3)),
        lambda s: s.recipe.aggregation == "fp",
        {0.01: CONFIRMED, 0.003: SMALLER, 0.0: SMALLER, -0.01: CONTRADICTED},
    ),
    "sage_aggregation": (
        lambda: designs.aggregation("demo", "digits-graph", "sage", seeds=range(3)),
        lambda s: s.recipe.aggregation == "fp",
        {0.003: CONFIRMED, 0.0: CONFIRMED, 0.01: CONTRADICTED},
    ),
    "delay": (
        lambda: designs.equal_cost("demo", "digits", seeds=range(3)),
        lambda s: "delayed" in s.arm,
        {0.05: CONFIRMED, -0.05: CONTRADICTED},
    ),
    "detection_etv": (
        lambda: designs.quality_cost("paper", "voc2012", schedules=["ETV"], q_max=[8]),
        lambda s: s.arm == "ETV",
        {0.015: CONFIRMED, 0.005: SMALLER, -0.015: CONTRADICTED},
    ),
}


@pytest.mark.parametrize("claim", DIRECTIONS)
def test_claim_verdict_follows_effect_direction(claim):
    specs, has, words = DIRECTIONS[claim]
    made, metric = specs(), "map50" if claim == "detection_etv" else "accuracy"
    for gap, word in words.items():
        e = entry(
            rows_of(made, lambda s, gap=gap: 0.7 + gap * bool(has(s)), metric), claim
        )
        assert e.verdict(made[0].scale == "paper") == word
        assert len(e.effects) == 1
        assert e.effects[0][0].stores == ("made_up.jsonl",)
    usual = [
        s
        for s in made
        if claim != "deficit_decay" or s.recipe.milestones == made[0].recipe.milestones
    ]
    without = [s for s in usual if not has(s)]
    assert 0 < len(without) < len(made)
    assert entry(rows_of(without, lambda s: 0.7, metric), claim).effects == ()


@pytest.mark.parametrize(("test_gap", "word"), [(0.008, CONFIRMED), (-0.008, "mixed")])
def test_aggregation_claim_reports_validation_and_test(test_gap, word):
    specs = designs.aggregation("paper", "ogbn-arxiv")
    rows = rows_of(specs, lambda s: 0.7 + test_gap * (s.recipe.aggregation == "fp"))
    for row, spec in zip(rows, specs, strict=True):
        (m,) = row["metrics"]
        row["metrics"] = [
            m,
            {
                **m,
                "split": "valid",
                "value": 0.7
                + 0.01 * (spec.recipe.aggregation == "fp")
                + 1e-4 * spec.seed,
            },
        ]
    e = entry(rows, "gcn_aggregation")
    assert e.verdict(True) == word
    (effect, _), *others = e.effects
    assert not others
    assert "validation nodes: +1.00" in effect.number()
    assert "test nodes" in effect.other_controls[0].number()


def costs_by_length(cost):
    """Return rows of early deficits on digits that cost ``cost(steps)`` of accuracy."""
    specs = designs.deficit_length("demo", "digits", seeds=range(3))
    return rows_of(
        specs,
        lambda s: 0.9 - (cost(s.schedule.windows[0][1]) if s.schedule.windows else 0),
    )


@pytest.mark.parametrize(
    ("cost", "short", "longer"),
    [
        (
            lambda n: 0.0005 * n if n < 400 else 0.1,
            CONTRADICTED,
            CONFIRMED,
        ),  # 50 steps cost 2.5 points; 200 as 400
        (lambda n: 0.0 if n < 400 else 0.3, CONFIRMED, CONTRADICTED),
    ],
)
def test_deficit_claims_separate_short_and_long(cost, short, longer):
    rows = costs_by_length(cost)
    assert (
        word_of(rows, "deficit_short", False),
        word_of(rows, "deficit_longer", False),
    ) == (short, longer)
    (effect, _), *_ = entry(rows, "deficit_longer").effects
    assert effect.comparison == "a deficit of 400 minus one of 200 steps"


@pytest.mark.parametrize(("sign", "word"), BOTH)
def test_sampling_claim_detects_fanout_effect(sign, word):
    specs = grids.grid_specs("ogbn-products/fanout")
    rows = rows_of(
        specs,
        lambda s: (
            0.7 - sign * 0.001 * s.recipe.fanout * (s.recipe.aggregation == "quantized")
        ),
    )
    e = entry(rows, "products_sampling")
    assert e.verdict(True) == word
    assert e.effects[0][0].interval[0] == pytest.approx(5.6 * sign, abs=0.1)


def test_fanout_design_requires_neighbour_sampling():
    with pytest.raises(
        ValueError,
        match="gcn on digits-graph trains on the full graph: no neighbours are sampled",
    ):
        designs.fanout("demo", "digits-graph")
    assert {
        s.recipe.fanout
        for s in designs.fanout("demo", "digits-graph", "sage", fanouts=[5, 10])
    } == {5, 10}


@pytest.mark.parametrize(("sign", "word"), BOTH)
def test_best_schedule_claim_uses_disjoint_seeds(sign, word):
    """Choose the best schedule on some seeds and compare it on the remaining ones."""
    digits, text = (
        designs.quality_cost("demo", data, seeds=range(8))
        for data in ("digits", "pydoc")
    )

    def value(s):
        return 0.8 + 0.1 * (s.arm == "ER") * (1 if s.seed % 2 == 0 else sign)

    e = entry(
        rows_of(digits, value) + by_arm(text, {"RR": 0.7}, "perplexity"),
        "no_one_schedule",
    )
    (of_digits, said), (of_text, _) = e.effects
    assert (said, of_digits.n, of_digits.comparison) == (
        word,
        4,
        "ER minus RR, the best of other tasks",
    )
    assert of_digits.interval[0] == pytest.approx(10 * sign, abs=0.05)
    assert of_text.comparison == "RR minus ER, the best of other tasks"
    same = entry(
        rows_of(digits, value) + by_arm(text, {"ER": 0.7}, "perplexity"),
        "no_one_schedule",
    )
    assert [(effect.interval, said) for effect, said in same.effects] == [
        ((0, 0, 0), OPEN)
    ] * 2
    assert (
        entry(rows_of(digits, value), "no_one_schedule").effects == ()
    )  # there is no other task


@pytest.mark.parametrize(("sign", "word"), BOTH)
def test_deficit_slope_accounts_for_training_gain(sign, word):
    """Compare damage with the accuracy gained meanwhile; skip windows at the end of training."""
    specs = designs.deficit_scan("demo", "digits", seeds=range(3))
    curve = [
        {"step": t, "test": {"accuracy": 0.9 - 0.9 * 2 ** (-t / 100)}}
        for t in range(50, 601, 50)
    ]

    def value(s):
        (start, stop), *_ = s.schedule.windows or ((0, 0),)
        return (
            0.9
            if not stop
            else 0.7 + sign * (start if stop < s.recipe.steps else -2_000) / 10_000
        )

    rows = [row | {"evaluations": curve} for row in rows_of(specs, value)]
    ((effect, said),) = entry(rows, "deficit_slope").effects
    assert (said, effect.n, effect.comparison) == (
        word,
        3,
        "rank correlation over 4 windows",
    )
    assert effect.interval[0] == pytest.approx(sign)
    assert (
        entry(
            by_arm(designs.deficit_length("demo", "digits", seeds=range(3)), {}),
            "deficit_slope",
        ).effects
        == ()
    )


def test_combined_verdict_follows_task_majority():
    def of(*votes):
        return combined(votes, "majority")

    images, more, graphs, words = (
        ("image", CONFIRMED),
        ("image", OPEN),
        ("graph", CONFIRMED),
        ("language_model", OPEN),
    )
    assert (
        of(images, more, graphs, words) == CONFIRMED
    )  # two of three, whatever another experiment leaves open
    assert of(images, graphs) == OPEN  # two tasks are too few to speak of domains
    assert of(images, words, ("graph", OPEN)) == OPEN
    assert (
        of(images, ("image", CONTRADICTED), graphs, words) == OPEN
    )  # one task that disagrees with itself
    halves = [
        (t, v) for t, v in zip("abcd", (CONFIRMED, CONFIRMED, OPEN, OPEN), strict=True)
    ]
    assert of(*halves) == OPEN  # half is no majority
    against = [(task, CONTRADICTED) for task in ("image", "graph")]
    assert of(*against, words) == CONTRADICTED
