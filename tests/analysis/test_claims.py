"""Claims of the paper: rules in both directions, known effects, and consistency of the table of claims."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cpt_lab.analysis import claims as rules
from cpt_lab.analysis import statistics
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.claims import (
    CONFIRMED,
    CONTRADICTED,
    MIXED,
    OPEN,
    SMALLER,
    claims,
    effect_verdict,
    judge,
    verdict,
)
from cpt_lab.analysis.effects import Effect
from cpt_lab.analysis.estimates import holm
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs, grids
from cpt_lab.paths import paper_dir, results_dir
from cpt_lab.sweeps import stores
from tests.helpers import refused, row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.mark.parametrize(
    ("test", "margin", "low", "high", "n", "said"),
    [
        ("more", 0, 0.1, 2.0, 3, CONFIRMED),
        ("more", 0, -0.1, 2.0, 3, OPEN),
        ("more", 0, -2.0, -0.1, 3, CONTRADICTED),
        ("more", 0, 0.1, 2.0, 2, OPEN),  # two seeds settle nothing
        ("more", 0.5, 0.1, 0.6, 5, CONFIRMED),
        ("more", 0.5, -0.3, 0.6, 5, OPEN),
        ("more", 0.5, 0.1, 0.4, 5, SMALLER),  # there, but 0.5 is ruled out
        ("more", 0.5, -0.3, 0.4, 5, SMALLER),
        ("more", 0.5, -0.3, -0.1, 5, CONTRADICTED),
        ("no_worse", 0.5, -0.4, 1.0, 5, CONFIRMED),
        ("no_worse", 0.5, -0.6, 1.0, 5, OPEN),
        ("no_worse", 0.5, -2.0, -0.6, 5, CONTRADICTED),
        ("equal", 0.5, -0.4, 0.4, 5, CONFIRMED),
        ("equal", 0.5, -0.4, 0.6, 5, OPEN),
        ("equal", 0.5, 0.6, 0.9, 5, CONTRADICTED),
        ("equal", 0.5, -0.9, -0.6, 5, CONTRADICTED),
        ("correlation", 0, 0.2, 0.9, 11, CONFIRMED),
        ("majority", 0, -0.9, -0.2, 11, CONTRADICTED),
        ("predictor", 0, 0.2, 0.9, 3, CONFIRMED),
        ("more", 0, float("nan"), float("nan"), 9, OPEN),
        ("exact", 0, 1, 1, 3, CONFIRMED),
        ("exact", 0, -1, -1, 3, CONTRADICTED),
    ],
)
def test_verdict_follows_interval_and_margin(test, margin, low, high, n, said):
    assert verdict(test, margin, ((low + high) / 2, low, high), n) == said


def test_verdict_rejects_unknown_rule():
    refused(
        "unknown test 'better'; choose from more, no_worse",
        verdict,
        "better",
        0,
        (0, 0, 0),
        3,
    )


def test_combined_verdict_of_several_experiments():
    def of(*verdicts, test="more", domains="aaaa"):
        return rules.combined(zip(domains, verdicts, strict=False), test)

    assert of(CONFIRMED, OPEN) == CONFIRMED
    assert of(CONTRADICTED, OPEN) == CONTRADICTED
    assert (
        of(CONFIRMED, CONTRADICTED)
        == of(CONFIRMED, SMALLER)
        == of(CONFIRMED, MIXED)
        == of(MIXED)
        == MIXED
    )
    assert of(SMALLER, OPEN) == SMALLER
    assert of() == of(OPEN, OPEN) == OPEN
    assert of(CONFIRMED, OPEN, test="correlation") == OPEN  # claimed for every domain
    assert of(CONFIRMED, CONFIRMED, test="correlation") == CONFIRMED
    assert of(CONTRADICTED, OPEN, test="correlation") == CONTRADICTED
    assert of(CONFIRMED, CONTRADICTED, test="correlation") == MIXED
    assert of(CONFIRMED, CONFIRMED, test="predictor") == OPEN  # one domain
    assert of(CONFIRMED, CONFIRMED, OPEN, test="predictor", domains="aba") == CONFIRMED
    assert of(CONFIRMED, OPEN, test="predictor", domains="ab") == OPEN
    assert (
        of(CONFIRMED, CONFIRMED, CONTRADICTED, test="predictor", domains="abc") == MIXED
    )


def students(*values):
    """Return an effect whose interval follows from differences by seed."""
    return Effect(
        "made up",
        "demo",
        lambda alpha: statistics.interval(values, alpha),
        len(values),
        "a minus b",
    )


@pytest.mark.parametrize("seed", range(6))
def test_holm_matches_scipy_pvalues(seed):
    """Select the same significant experiments as Holm-adjusted p-values of scipy."""
    rng = np.random.default_rng(seed)
    samples = [rng.normal(shift, 1, 5) for shift in (3, -2, 2, 1.5, 1, 0)]
    claim = replace(IDS["schedule_controls"], margin=0.0)
    words = rules.holm(
        [
            lambda alpha, e=e: effect_verdict(claim, e, alpha)
            for e in (students(*x) for x in samples)
        ]
    )
    pvalues = [stats.ttest_1samp(x, 0).pvalue for x in samples]
    assert [w != OPEN for w in words] == [p <= 0.05 for p in holm(pvalues)]
    assert {w for w, x in zip(words, samples, strict=True) if x.mean() < 0} <= {
        CONTRADICTED,
        OPEN,
    }


def test_holm_corrects_within_one_scale(monkeypatch):
    """Correct over the experiments of one scale; keep demo and paper scale separate."""
    weak, none = students(0.1, 0.9, 0.5, 0.2, 0.6), students(-1, 1, 0.5, -0.5, 0.1)
    for scale, other in (("paper", "demo"), ("demo", "paper")):
        effects = [
            replace(weak, scale=scale),
            replace(none, scale=other),
            replace(none, scale=other),
        ]
        monkeypatch.setitem(
            MEASURES, "made_up", lambda runs, claim, effects=effects: effects
        )
        claim = replace(IDS["schedule_controls"], measure="made_up", margin=0.0)
        assert [word for _, word in judge(claim, table([])).effects] == [
            CONFIRMED,
            OPEN,
            OPEN,
        ]


# --- effects --------------------------------------------------------------------------------------

IDS = {claim.id: claim for claim in claims()}


def entry(rows, name):
    """Return the entry of one claim, judged by synthetic rows."""
    return judge(
        IDS[name], table({**row, "store": "somewhere/made_up.jsonl"} for row in rows)
    )


def rows_of(specs, value, metric="accuracy"):
    rng = np.random.default_rng(0)
    return [row_of(s, value(s) + 1e-4 * rng.normal(), metric) for s in specs]


def by_arm(specs, values, metric="accuracy"):
    return rows_of(specs, lambda s: values.get(s.arm, 0.8), metric)


@pytest.mark.parametrize("sign", [1, -1])
def test_claim_compares_arms_and_savings_groups(sign):
    specs = designs.quality_cost("demo", seeds=range(3))
    rows = by_arm(
        specs,
        {"ER": 0.8 + 0.1 * sign, "ETH": 0.8 + 0.1 * sign, "CR": 0.8 + 0.05 * sign},
    )
    word = CONFIRMED if sign > 0 else CONTRADICTED
    for name, effect in (
        ("schedule_controls", 10),
        ("cpt_improves", 5),
        ("other_schedules", 5),
        ("cifar_small", 10),
    ):
        e = entry(rows, name)
        assert e.verdict(False) == word
        assert e.verdict(True) == OPEN  # demo rows say nothing at paper scale
        assert e.effects[0][0].interval[0] == pytest.approx(effect * sign, abs=0.05)
        assert e.effects[0][0].n == 3
    two = [r for r in rows if r["spec"]["seed"] < 2]
    assert entry(two, "schedule_controls").verdict(False) == OPEN


def test_claim_ignores_smoke_rows():
    """Ignore smoke rows, and judge rows at paper scale separately."""
    smoke = by_arm(designs.quality_cost("smoke", seeds=range(3)), {"static 8": 0.9})
    assert entry(smoke, "imagenet_large").effects == ()
    paper = by_arm(
        designs.quality_cost("paper", "imagenet", q_max=[8]), {"static 8": 0.9}
    )
    e = entry(paper, "imagenet_large")
    assert (e.verdict(True), e.verdict(False)) == (CONFIRMED, OPEN)
    assert e.verdicts() == (
        "confirmed in 1 of 1 experiment: imagenet/resnet18 (q_min 4, n 3)",
        "open (not run)",
    )


@pytest.mark.parametrize(("six", "said"), [(11.0, CONFIRMED), (9.0, CONTRADICTED)])
def test_language_claim_judges_perplexity_at_six_bits(six, said):
    specs = designs.quality_cost(
        "demo", "pydoc", schedules=["RR", "RTH"], static_bits=[8], seeds=range(3)
    )
    specs += designs.quality_cost(
        "demo", "pydoc", schedules=[], static_bits=[6], q_max=[6], seeds=range(3)
    )
    rows = rows_of(specs, lambda s: six if s.arm == "static 6" else 10.0, "perplexity")
    e = entry(rows, "language_q_max")
    assert e.verdict(False) == said
    assert e.effects[0][0].interval[0] == pytest.approx(
        100 * np.log(six / 10), abs=0.1
    )  # percent of the perplexity
    worse = rows_of(
        specs, lambda s: 12.0 if s.arm in ("RR", "RTH") else 10.0, "perplexity"
    )
    assert entry(worse, "language_large").verdict(False) == CONTRADICTED


@pytest.mark.parametrize("sign", [1, -1])
def test_correlation_claim_follows_sign(sign):
    specs = designs.quality_cost("demo", seeds=range(3))
    rows = rows_of(specs, lambda s: 0.5 + 0.1 * sign * float(s.schedule.bits().mean()))
    claim = replace(IDS["cost_decides"], test="correlation")
    e = judge(claim, table(rows))
    assert e.verdict(False) == (CONFIRMED if sign > 0 else CONTRADICTED)
    assert e.effects[0][0].n == 3  # seeds, not arms
    assert "over 11 arms" in e.evidence()[0]
    two = [r for r in rows if r["spec"]["seed"] < 2]
    assert judge(claim, table(two)).verdict(False) == OPEN
    assert (
        judge(claim, table(two)).verdicts()[1] == "open: fewer than 3 seeds on digits"
    )
    assert (
        entry(rows, "cost_decides").verdict(False) == OPEN
    )  # one task is no majority of domains


def test_predictor_claim_needs_several_domains():
    def by_noise(s):
        return 0.5 - 1e-4 * s.schedule.noise_exposure()

    images = rows_of(designs.quality_cost("demo", seeds=range(3)), by_noise)
    graphs = rows_of(
        designs.quality_cost("demo", "digits-graph", seeds=range(3)), by_noise
    )
    assert (
        entry(images, "noise_decides").verdict(False) == OPEN
    )  # one domain is too few
    e = entry(images + graphs, "noise_decides")
    # each by itself, but not two together: in this suite of schedules even quality that is noise alone stays open
    assert [effect_verdict(e.claim, effect) for effect, _ in e.effects] == [
        CONFIRMED
    ] * 2
    assert e.verdict(False) == OPEN
    assert "open (better predictor by itself, not among 2)" in e.evidence()[0]
    assert "strength of noise exposure minus that of cost" in e.evidence()[0]
    price = rows_of(
        designs.quality_cost("demo", seeds=range(3)),
        lambda s: 0.5 + 0.1 * s.schedule.relative_cost(),
    )
    assert entry(price, "noise_decides").effects[0][1] == CONTRADICTED


@pytest.mark.parametrize("sign", [1, -1])
def test_critical_period_claims_detect_length_and_window(sign):
    specs = designs.deficit_scan("demo", "digits", seeds=range(3))

    def value(s):
        if not s.schedule.windows:
            return 0.9
        ((start, stop),) = s.schedule.windows
        late = 0 if stop == s.recipe.steps else start / 10_000
        return 0.9 - sign * ((stop - start) / 2_000 - late)

    rows = rows_of(specs, value)
    length, window = entry(rows, "deficit_length"), entry(rows, "deficit_window")
    said = CONFIRMED if sign > 0 else CONTRADICTED
    assert (length.verdict(False), window.verdict(False)) == (said, said)
    assert length.effects[0][0].interval[0] == pytest.approx(
        20 * sign, abs=0.1
    )  # the longest, 400 steps
    assert "400 of 800 steps" in length.effects[0][0].comparison
    assert window.effects[0][0].interval[0] == pytest.approx(
        3 * sign, abs=0.1
    )  # [300, 500) against [0, 200)
    assert "[300, 500) of 600 minus [0, 200) of 600" in window.effects[0][0].comparison


def test_deficit_claim_separates_lost_time_from_damage():
    """Call a deficit mixed if its two controls disagree."""
    specs = designs.deficit_length("demo", "digits", seeds=range(3))

    def value(s):
        low = sum(stop - start for start, stop in s.schedule.windows)
        return 0.5 + (s.recipe.steps - low / 2) / 10_000

    e = entry(rows_of(specs, value), "deficit_length")
    assert e.verdict(False) == MIXED
    assert e.verdicts()[1] == "mixed in 1 of 1 experiment: digits/mlp6 (q_min 2, n 3)"
    normal, (as_long,) = e.effects[0][0], e.effects[0][0].other_controls
    assert normal.comparison.startswith("400 steps at q_max minus")
    assert as_long.comparison.startswith("800 steps at q_max minus")
    assert normal.interval[0] < 0 < as_long.interval[0]
    assert f"{normal.number()}; {as_long.number()}" in e.evidence()[0]
    rng = np.random.default_rng(0)
    harmed_by_length = rows_of(
        specs, lambda s: 0.5 - s.recipe.steps / 10_000 + 1e-3 * rng.normal()
    )
    assert (
        entry(harmed_by_length, "deficit_length").verdict(False) == OPEN
    )  # worse than one, like the other


# --- the list -------------------------------------------------------------------------------------


def test_claims_name_known_grids_and_margins():
    found = claims()
    assert len(found) >= 50
    assert len(IDS) == len(found)
    assert {test for test in rules.TESTS if test != "exact"} == set(
        rules.SMALLER_SCALES
    )
    for claim in found:
        assert claim.place.startswith(("section", "abstract", "ours, not in the paper"))
        for grid in claim.grids.split():
            assert grid in grids.GRIDS
            assert "paper" in grids.GRIDS[grid].scales
        if claim.test in ("no_worse", "equal"):
            assert claim.margin > 0, claim.id


def test_claims_reject_unknown_measure(monkeypatch):
    listed = pd.read_csv(paper_dir() / "claims.csv", keep_default_na=False)
    listed.loc[0, "measure"] = "guess"
    monkeypatch.setattr(pd, "read_csv", lambda *a, **k: listed)
    refused("unknown measure of claim ptb_costs 'guess'; the nearest of", claims)


def test_claim_effect_matches_independent_recount():
    """Recompute one effect of the committed rows here, without the module."""
    rows = stores.load_rows(results_dir() / "graph_facebook.jsonl")
    effect = next(
        e
        for e, _ in entry(rows, "gcn_aggregation").effects
        if "facebook" in e.experiment
    )
    value = {}
    for row in rows:
        spec = row["spec"]
        if spec["arm"] == "static 8" and spec["recipe"]["model"] == "gcn":
            (accuracy,) = [
                m["value"]
                for m in row["metrics"]
                if (m["name"], m["split"], m["when"], m["precision"])
                == ("accuracy", "test", "final", "q_max")
            ]
            value[spec["recipe"]["aggregation"], spec["seed"]] = accuracy
    seeds = sorted(
        {seed for _, seed in value if {("fp", seed), ("quantized", seed)} <= set(value)}
    )
    differences = [100 * (value["fp", s] - value["quantized", s]) for s in seeds]
    (on_test_nodes,) = effect.other_controls  # figure 5 has validation nodes
    assert on_test_nodes.interval == pytest.approx(statistics.interval(differences))
