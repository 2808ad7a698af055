"""Rules of claims: verdicts, Holm's correction, baselines of effects, dates of rules, and the table of claims."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from helpers import NAN, refused
from scipy import stats

from bench import date_claim_rules
from cpt_lab.analysis import (
    baselines,
    claim_measures,
    predictors,
    run_groups,
    run_table,
    statistics,
)
from cpt_lab.analysis import claims as rules
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.claims import (
    BELOW_MARGIN,
    CONFIRMED,
    CONTRADICTED,
    MIXED,
    claims,
    combined,
    effect_verdict,
    judge,
    verdict,
)
from cpt_lab.analysis.effects import Effect
from cpt_lab.analysis.estimates import INCONCLUSIVE, holm
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs, grids
from cpt_lab.paths import paper_dir
from tests.analysis.synthetic import by_arm, runs_of

IDS = {claim.id: claim for claim in claims()}
demo = partial(designs.quality_cost, "demo", static_bits=[8], seeds=range(3))

VERDICTS = [  # test, margin, low, high, n, verdict
    ("more", 0, 0.1, 2.0, 3, CONFIRMED),
    ("more", 0, -0.1, 2.0, 3, INCONCLUSIVE),
    ("more", 0, -2.0, -0.1, 3, CONTRADICTED),
    ("more", 0, 0.1, 2.0, 2, INCONCLUSIVE),  # two seeds settle nothing
    ("more", 0.5, 0.1, 0.6, 5, CONFIRMED),
    ("more", 0.5, -0.3, 0.6, 5, INCONCLUSIVE),
    ("more", 0.5, 0.1, 0.4, 5, BELOW_MARGIN),  # there, but 0.5 is ruled out
    ("more", 0.5, -0.1, 0.1, 5, BELOW_MARGIN),
    ("more", 0.5, -1.2, 0.4, 5, BELOW_MARGIN),
    ("more", 0.5, -0.3, -0.1, 5, CONTRADICTED),
    ("more", 0, NAN, NAN, 9, INCONCLUSIVE),
    ("no_worse", 0.5, -0.4, 1.0, 5, CONFIRMED),
    ("no_worse", 0.5, -0.6, 1.0, 5, INCONCLUSIVE),
    ("no_worse", 0.5, -2.0, -0.6, 5, CONTRADICTED),
    ("equal", 0.5, -0.4, 0.4, 5, CONFIRMED),
    ("equal", 0.5, -0.4, 0.6, 5, INCONCLUSIVE),
    ("equal", 0.5, 0.6, 0.9, 5, CONTRADICTED),
    ("equal", 0.5, -0.9, -0.6, 5, CONTRADICTED),
    ("correlation", 0, 0.2, 0.9, 11, CONFIRMED),
    ("majority", 0, -0.9, -0.2, 11, CONTRADICTED),
    ("predictor", 0, 0.2, 0.9, 3, CONFIRMED),
    ("exact", 0, 1, 1, 3, CONFIRMED),
    ("exact", 0, -1, -1, 3, CONTRADICTED),
]


@pytest.mark.parametrize(("test", "margin", "low", "high", "n", "expected"), VERDICTS)
def test_verdict_follows_interval_and_margin(test, margin, low, high, n, expected):
    assert verdict(test, margin, ((low + high) / 2, low, high), n) == expected


@pytest.mark.parametrize("interval", [(-0.4, -1.2, 0.3), (0.0, -0.1, 0.11)])
def test_verdict_claims_no_effect_of_null_or_negative_means(interval):
    assert verdict("more", 0.5, interval, 8) == "below the margin"


LETTERS = {
    "+": CONFIRMED,
    "-": CONTRADICTED,
    "0": INCONCLUSIVE,
    "<": BELOW_MARGIN,
    "?": MIXED,
}
COMBINED = [  # test, votes as task and verdict, combined verdict
    ("more", "a+ a0", CONFIRMED),
    ("more", "a- a0", CONTRADICTED),
    ("more", "a+ a-", MIXED),
    ("more", "a+ a<", MIXED),
    ("more", "a+ a?", MIXED),
    ("more", "a?", MIXED),
    ("more", "a< a0", BELOW_MARGIN),
    ("more", "", INCONCLUSIVE),
    ("more", "a0 a0", INCONCLUSIVE),
    ("correlation", "a+ a0", INCONCLUSIVE),  # claimed for every domain
    ("correlation", "a+ a+", CONFIRMED),
    ("correlation", "a- a0", CONTRADICTED),
    ("correlation", "a+ a-", MIXED),
    ("predictor", "a+ a+", INCONCLUSIVE),  # one domain
    ("predictor", "a+ b+ a0", CONFIRMED),
    ("predictor", "a+ b0", INCONCLUSIVE),
    ("predictor", "a+ b+ c-", MIXED),
    ("majority", "a+ a0 b+ c0", CONFIRMED),  # two of three, whatever a leaves open
    ("majority", "a+ b+", INCONCLUSIVE),  # two tasks are too few to speak of domains
    ("majority", "a+ c0 b0", INCONCLUSIVE),
    ("majority", "a+ a- b+ c0", INCONCLUSIVE),  # one task that disagrees with itself
    ("majority", "a+ b+ c0 d0", INCONCLUSIVE),  # half is no majority
    ("majority", "a- b- c0", CONTRADICTED),
]


@pytest.mark.parametrize(("test", "votes", "expected"), COMBINED)
def test_combined_verdict_of_several_experiments(test, votes, expected):
    pairs = [(task, LETTERS[letter]) for task, letter in votes.split()]
    assert combined(pairs, test) == expected


def students(*values):
    """Return an effect whose interval follows from differences by seed."""
    interval = partial(statistics.interval, values)
    return Effect("made up", "demo", interval, len(values), "a minus b")


@pytest.mark.parametrize("seed", range(6))
def test_holm_matches_scipy_pvalues(seed):
    """Select the same significant experiments as Holm-adjusted p-values of scipy."""
    rng = np.random.default_rng(seed)
    samples = [rng.normal(shift, 1, 5) for shift in (3, -2, 2, 1.5, 1, 0)]
    claim = replace(IDS["schedule_controls"], margin=0.0)
    words = rules.corrected_verdicts(
        [partial(effect_verdict, claim, students(*x)) for x in samples]
    )
    pvalues = [stats.ttest_1samp(x, 0).pvalue for x in samples]
    assert [w != INCONCLUSIVE for w in words] == [p <= 0.05 for p in holm(pvalues)]
    falling = {w for w, x in zip(words, samples, strict=True) if x.mean() < 0}
    assert falling <= {CONTRADICTED, INCONCLUSIVE}


@pytest.mark.parametrize(("scale", "other"), [("paper", "demo"), ("demo", "paper")])
def test_holm_corrects_within_one_scale(scale, other, monkeypatch):
    """Correct over the experiments of one scale; keep demo and paper scale separate."""
    weak, none = students(0.1, 0.9, 0.5, 0.2, 0.6), students(-1, 1, 0.5, -0.5, 0.1)
    effects = [replace(weak, scale=scale), *[replace(none, scale=other)] * 2]
    monkeypatch.setitem(MEASURES, "made_up", lambda runs, claim: effects)
    claim = replace(IDS["schedule_controls"], measure="made_up", margin=0.0)
    words = [word for _, word in judge(claim, table([])).effects]
    assert words == [CONFIRMED, INCONCLUSIVE, INCONCLUSIVE]


# --- the table of claims --------------------------------------------------------------------------


def test_claims_name_known_grids_and_margins():
    assert len(IDS) == len(claims()) >= 50
    assert {test for test in rules.TESTS if test != "exact"} == {*rules.SMALLER_SCALES}
    for claim in claims():
        assert claim.place.startswith(("section", "abstract", "ours, not in the paper"))
        assert all("paper" in grids.GRIDS[grid].scales for grid in claim.grids.split())
        assert claim.margin > 0 or claim.test not in ("no_worse", "equal"), claim.id


def test_claims_reject_unknown_measure(monkeypatch):
    listed = pd.read_csv(paper_dir() / "claims.csv", keep_default_na=False)
    listed.loc[0, "measure"] = "guess"
    monkeypatch.setattr(pd, "read_csv", lambda *a, **k: listed)
    refused("unknown measure of claim ptb_costs 'guess'; the nearest of", claims)


# --- baselines: quality at full bits, beside every effect --------------------------------------------


def test_experiment_baseline_falls_back_to_best_arm():
    deficits = designs.deficit_scan("demo", "digits", seeds=range(3))
    runs = runs_of(deficits, lambda s: 0.5 if s.schedule.windows else 0.8)
    assert baselines.experiment_baseline(runs) == "no deficit reaches 80.0 %"
    cyclic = demo(schedules=["CR", "RR"], static_bits=[])
    runs = runs_of(cyclic, lambda s: 0.6 if s.arm == "CR" else 0.5)
    text = "no run at 8/8; the best arm (CR) reaches 60.0 %"
    assert baselines.experiment_baseline(runs) == text
    fewer = [replace(s, q_grad=6) for s in demo(schedules=["CR"])]
    assert baselines.full_bits(runs_of(fewer)).empty


def test_quality_text_spans_recipes_and_perplexities():
    text = partial(demo, "pydoc", task="language_model", schedules=[], seeds=[0, 1])
    runs = runs_of(
        [*text(), *text(steps=320)], lambda s: 1280 / s.recipe.steps, "perplexity"
    )
    first = runs[runs["total_steps"] == 320]
    assert baselines.quality_text(first) == "perplexity 4.00"
    assert baselines.quality_text(runs).startswith("perplexity 4.00 to ")
    assert baselines.quality_text(runs.iloc[:0]) == ""


# --- dates of rules: a changed rule needs a new date, and older rows are marked -------------------


@pytest.mark.slow
def test_claim_dates_match_last_rule_changes():
    """Fail after a change of a rule until ``python -m bench.date_claim_rules`` dates it."""
    found = claims()
    assert [c.id for c in found if c.rule != date_claim_rules.fingerprint(c)] == []
    assert all(pd.Timestamp(c.since).tzinfo is not None for c in found)
    newest = pd.Timestamp(max(c.since for c in found))
    assert newest > pd.Timestamp("2026-01-01", tz="UTC")


def test_rule_fingerprint_changes_with_rule(monkeypatch):
    claim = IDS["entailment_small"]
    old = date_claim_rules.fingerprint(claim)
    unrelated = replace(claim, claim="in other words", place="section 9", since="")
    assert date_claim_rules.fingerprint(unrelated) == old
    other = {
        "measure": "delay",
        "a": "ER",
        "b": "static 6",
        "tasks": "",
        "test": "equal",
        "margin": 1.0,
        "only": "q_max=6",
        "grids": "",
    }
    assert set(other) == set(date_claim_rules.LINE)
    for name, value in other.items():
        changed = replace(claim, **{name: value})
        assert date_claim_rules.fingerprint(changed) != old, name
    code = (another_rule, *date_claim_rules.CODE[1:])
    monkeypatch.setattr(date_claim_rules, "CODE", code)
    assert date_claim_rules.fingerprint(claim) != old
    new = date_claim_rules.update_date(claim, "2030-01-01T00:00:00+00:00")
    assert new.since == "2030-01-01T00:00:00+00:00"
    assert date_claim_rules.update_date(new, "2031-01-01T00:00:00+00:00") == new


def another_rule(*_, **__):
    """Return another number."""
    return 1 + 1


another_rule.__module__ = rules.__name__

PARTS = [  # what the fingerprint of a claim has to cover
    (rules, "_majority", "cost_decides", another_rule),
    (rules, "MIN_SEEDS", "cpt_improves", 2),
    (statistics, "by_seed", "cpt_improves", another_rule),
    (statistics, "ALPHA", "cpt_improves", 0.1),
    (predictors, "rank_correlation", "noise_decides", another_rule),
    (predictors, "PREDICTORS", "noise_decides", {"relative_cost": 1}),
    (claim_measures, "_lengths", "deficit_length", another_rule),
    (run_groups, "preregistered", "cpt_improves", another_rule),
    (rules, "_add_full_bits_quality", "cpt_improves", another_rule),
    (rules.Entry, "verdict", "cpt_improves", another_rule),
    (rules.Entry, "_tested", "cpt_improves", another_rule),
    (run_table, "EXTERNAL_FAILURE", "cpt_improves", re.compile("no memory")),
]


@pytest.mark.parametrize(("module", "name", "claim", "other"), PARTS)
def test_rule_fingerprint_covers_called_functions(
    module, name, claim, other, monkeypatch
):
    """Include called functions, constants and patterns in the fingerprint of a rule."""
    old = date_claim_rules.fingerprint(IDS[claim])
    monkeypatch.setattr(module, name, other)
    assert date_claim_rules.fingerprint(IDS[claim]) != old


def test_rule_fingerprint_ignores_comments_and_docstrings():
    def documented(x):
        """Documented."""
        return x + 1  # a comment

    def undocumented(x):
        return x + 1

    def different(x):
        return x - 1

    def words(function):
        found = date_claim_rules.code_words(function)
        return [word for word in found if word[0] != "FunctionDef"]  # but for its name

    assert words(undocumented) == words(documented) != words(different)


@pytest.mark.parametrize(
    ("since", "starts", "note"),
    [
        ("2025-12-31T10:00", {}, ""),
        ("2026-01-01T00:01", {}, "; rows older than the rule"),
        ("2026-01-01T00:01", {1: "2999-01-01"}, "; some rows older than the rule"),
    ],
)
def test_claim_marks_rows_older_than_rule(since, starts, note):
    rows = by_arm(demo(), {})  # started on the first of January 2026
    for row in rows:
        started = starts.get(row["spec"]["seed"], row["provenance"]["started"])
        row["provenance"] = {**row["provenance"], "started": started}
    entry = judge(replace(IDS["cpt_improves"], since=f"{since}:00+00:00"), table(rows))
    assert entry.rule() == f"{since.replace('T', ' ')} UTC{note}"
    assert replace(entry, claim=replace(entry.claim, since="")).rule() == "undated"
