"""What claims compare: arms by what they are, runs by q_max, aggregation, model and data, each in both directions."""

from dataclasses import replace

import pytest

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.claims import CONFIRMED, CONTRADICTED, OPEN, SMALLER, combined, judge
from cpt_lab.analysis.runs import table
from cpt_lab.experiments import designs, grids
from tests.analysis.test_claims import IDS, by_arm, entry, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning")
BOTH = [(1, CONFIRMED), (-1, CONTRADICTED)]


def word_of(rows, name, paper_scale=True):
    """The word for one claim, judged by made-up rows."""
    return entry(rows, name).verdict(paper_scale)


@pytest.mark.parametrize(("q_max", "top"), [(8, "static 8"), (6, "static 6")])
def test_static_is_that_of_the_experiment(q_max, top):
    specs = designs.quality_cost("paper", "cifar100", schedules=["ER", "ETH"], q_max=[q_max])
    e = entry(by_arm(specs, {top: 0.7}), "cifar_small")
    assert e.verdict(True) == CONFIRMED
    assert f"small minus {top}: +10.0" in e.evidence()[0]


def test_all_schedules_but_one():
    specs = designs.quality_cost("paper", "cifar10", q_max=[8])
    better = by_arm(specs, {"static 8": 0.7, "RR": 0.6})
    assert word_of(better, "cifar_nearly_all") == CONFIRMED  # one is worse
    two_worse = by_arm(specs, {"static 8": 0.7, "RR": 0.6, "LT": 0.6})
    assert word_of(two_worse, "cifar_nearly_all") == CONTRADICTED
    nine = [row for row in better if row["spec"]["arm"] != "ETH"]
    assert entry(nine, "cifar_nearly_all").effects == ()  # nothing is said of all by nine
    scenes = designs.quality_cost("demo", "digit-scenes", static=[8], seeds=range(3))
    worst = by_arm(scenes, {"CT": 0.7}, "map50")
    assert word_of(worst, "detection_all", False) == CONTRADICTED
    assert word_of(by_arm(scenes, {"CT": 0.9}, "map50"), "detection_all", False) == CONFIRMED
    assert len(SUITE) == 10


def test_at_paper_scale_a_claim_is_about_the_data_of_its_grids():
    cifar = by_arm(designs.quality_cost("paper", "cifar10", q_max=[8]), {"static 8": 0.7})
    assert word_of(cifar, "cifar_small") == CONFIRMED
    assert entry(cifar, "imagenet_small").effects == ()
    small = by_arm(designs.quality_cost("demo", seeds=range(3)), {"static 8": 0.7})
    assert [word_of(small, name, False) for name in ("cifar_small", "imagenet_small")] == [CONFIRMED] * 2  # stand-ins


def test_a_claim_may_name_q_max_aggregation_and_model():
    gcn = by_arm(designs.quality_cost("paper", "ogbn-arxiv", q_max=[8]), {"static 8": 0.9})
    q_agg = by_arm(designs.q_agg("paper", "ogbn-arxiv", q_max=[8]), {"static 8": 0.6})
    assert word_of(gcn + q_agg, "arxiv_large") == CONFIRMED
    assert word_of(gcn + q_agg, "arxiv_large_q_agg") == CONTRADICTED
    assert word_of(gcn + q_agg, "arxiv_small_q_agg") == CONFIRMED
    assert len(entry(gcn + q_agg, "arxiv_large").effects) == 1  # FP-Agg alone
    assert entry(gcn + q_agg, "products_large").effects == ()  # another model
    words = designs.quality_cost("paper", "ptb", q_max=[6, 8])
    six = rows_of(words, lambda s: 99.0 if s.arm == "CR" and s.q_max == 6 else 90.0, "perplexity")
    assert word_of(six, "language_cr") == CONFIRMED  # the claim is about 8
    assert word_of([r for r in six if r["spec"]["q_max"] == 6], "language_cr") == OPEN


@pytest.mark.parametrize(("points", "word"), [(1.5, CONFIRMED), (0.5, SMALLER), (-1.5, CONTRADICTED)])
def test_the_size_of_an_effect_is_part_of_a_claim(points, word):
    specs = designs.quality_cost("paper", "voc2012", schedules=["ETV"], q_max=[8])
    rows = by_arm(specs, {"ETV": 0.8 + points / 100}, "map50")
    assert word_of(rows, "detection_etv") == word


@pytest.mark.parametrize(("test_gap", "word"), [(0.008, CONFIRMED), (-0.008, "mixed")])
def test_aggregations_are_compared_on_validation_nodes_and_on_test_nodes(test_gap, word):
    specs = designs.aggregation("paper", "ogbn-arxiv")
    rows = rows_of(specs, lambda s: 0.7 + test_gap * (s.recipe.aggregation == "fp"))
    for row, spec in zip(rows, specs, strict=True):
        (m,) = row["metrics"]
        row["metrics"] = [
            m,
            {**m, "split": "valid", "value": 0.7 + 0.01 * (spec.recipe.aggregation == "fp") + 1e-4 * spec.seed},
        ]
    e = entry(rows, "gcn_aggregation")
    assert e.verdict(True) == word
    (effect, _), *others = e.effects
    assert not others
    assert "validation nodes: +1.00" in effect.number()
    assert "test nodes" in effect.others[0].number()


def costs_by_length(cost):
    """Rows of deficits at the start on digits; ``cost`` of the low steps, in accuracy."""
    specs = designs.deficit_length("demo", "digits", seeds=range(3))
    return rows_of(specs, lambda s: 0.9 - (cost(s.schedule.windows[0][1]) if s.schedule.windows else 0))


@pytest.mark.parametrize(
    ("cost", "short", "longer"),
    [
        (lambda n: 0.0005 * n if n < 400 else 0.1, CONTRADICTED, CONFIRMED),  # 50 steps cost 2.5 points; 200 as 400
        (lambda n: 0.0 if n < 400 else 0.3, CONFIRMED, CONTRADICTED),
    ],
)
def test_short_deficits_and_long_ones(cost, short, longer):
    rows = costs_by_length(cost)
    assert (word_of(rows, "deficit_short", False), word_of(rows, "deficit_longer", False)) == (short, longer)
    (effect, _), *_ = entry(rows, "deficit_longer").effects
    assert effect.what == "a deficit of 400 minus one of 200 steps"


@pytest.mark.parametrize(("gap", "word"), [(0.0, CONFIRMED), (0.1, CONTRADICTED)])
def test_deficits_under_two_decays(gap, word):
    usual = designs.deficit_length("demo", "digits", lengths=[100], seeds=range(3))
    sooner = designs.deficit_length("demo", "digits", lengths=[100], seeds=range(3), milestones=(0.3, 0.6))
    early = {s.recipe.milestones for s in sooner}
    rows = rows_of(
        usual + sooner,
        lambda s: 0.9 - bool(s.schedule.windows) * (0.05 + gap * (s.recipe.milestones in early)),
    )
    assert word_of(rows, "deficit_decay", False) == word
    assert entry(rows[: len(usual)], "deficit_decay").effects == ()


@pytest.mark.parametrize(("gain", "word"), [(0.0, CONFIRMED), (0.02, CONTRADICTED)])
def test_more_neighbours_than_32(gain, word):
    rows = rows_of(grids.grid_specs("ogbn-products/fanout"), lambda s: 0.7 + gain * (s.recipe.fanout == 64))
    assert word_of(rows, "products_fanout") == word
    assert len(entry(rows, "products_fanout").effects) == 1  # with FP-Agg


@pytest.mark.parametrize(("sign", "word"), BOTH)
def test_q_agg_with_more_neighbours(sign, word):
    specs = grids.grid_specs("ogbn-products/fanout")
    rows = rows_of(specs, lambda s: 0.7 - sign * 0.001 * s.recipe.fanout * (s.recipe.aggregation == "quantized"))
    e = entry(rows, "products_sampling")
    assert e.verdict(True) == word
    assert e.effects[0][0].interval[0] == pytest.approx(5.6 * sign, abs=0.1)


@pytest.mark.parametrize(("gap", "word"), [(0.0, CONFIRMED), (0.02, CONTRADICTED)])
def test_one_cycle_and_two(gap, word):
    specs = [s for s in grids.grid_specs("xnli/cycles") if s.recipe.lr == 1e-5 and s.q_max == 8]
    assert {s.recipe.n_cycles for s in specs} == {1, 2}
    rows = rows_of(specs, lambda s: 0.7 + gap * (s.recipe.n_cycles == 1))
    assert word_of(rows, "entailment_cycles") == word


def test_fanouts_need_samples():
    with pytest.raises(ValueError, match="gcn on digits-graph trains on the full graph: no neighbours are sampled"):
        designs.fanout("demo", "digits-graph")
    assert {s.recipe.fanout for s in designs.fanout("demo", "digits-graph", "sage", fanouts=[5, 10])} == {5, 10}


def test_what_is_saved_is_computed():
    saves = IDS["detection_saves"]
    assert entry([], "detection_saves").verdicts() == ("confirmed, exact", "–")
    assert "23.1" in entry([], "detection_saves").evidence()[0]
    assert judge(replace(saves, b="40"), table([])).verdict(True) == CONTRADICTED
    assert entry([], "cost_order").verdict(True) == CONFIRMED


def test_the_majority_of_the_tasks():
    def of(*votes):
        return combined(votes, "majority")

    images, more, graphs, words = ("image", CONFIRMED), ("image", OPEN), ("graph", CONFIRMED), ("language_model", OPEN)
    assert of(images, more, graphs, words) == CONFIRMED  # two of three, whatever another experiment leaves open
    assert of(images, graphs) == OPEN  # two tasks are too few to speak of domains
    assert of(images, words, ("graph", OPEN)) == OPEN
    assert of(images, ("image", CONTRADICTED), graphs, words) == OPEN  # one task that disagrees with itself
    halves = [(t, v) for t, v in zip("abcd", (CONFIRMED, CONFIRMED, OPEN, OPEN), strict=True)]
    assert of(*halves) == OPEN  # half is no majority
    against = [(task, CONTRADICTED) for task in ("image", "graph")]
    assert of(*against, words) == CONTRADICTED
