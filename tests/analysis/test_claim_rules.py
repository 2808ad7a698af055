"""Dates of claim rules: a changed rule needs a new date, and older rows are marked."""

import re
from dataclasses import replace

import pandas as pd
import pytest

from bench import date_claim_rules
from cpt_lab.analysis import (
    claim_measures,
    predictors,
    run_groups,
    run_table,
    statistics,
)
from cpt_lab.analysis import claims as claims_
from cpt_lab.analysis.claims import CONFIRMED, claims, judge
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from tests.analysis.test_claims import IDS, by_arm, entry

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.mark.slow
def test_claim_dates_match_last_rule_changes():
    """Fail after a change of a rule until ``python -m bench.date_claim_rules`` dates it."""
    found = claims()
    assert [c.id for c in found if c.rule != date_claim_rules.fingerprint(c)] == []
    assert all(pd.Timestamp(c.since).tzinfo is not None for c in found)
    assert pd.Timestamp("2026-01-01", tz="UTC") < pd.Timestamp(
        max(c.since for c in found)
    )


def test_rule_fingerprint_changes_with_rule(monkeypatch):
    claim = IDS["entailment_small"]
    old = date_claim_rules.fingerprint(claim)
    assert old == date_claim_rules.fingerprint(
        replace(claim, claim="in other words", place="section 9", since="")
    )
    other = dict(
        measure="delay",
        a="ER",
        b="static 6",
        tasks="",
        test="equal",
        margin=1.0,
        only="q_max=6",
        grids="",
    )
    assert set(other) == set(date_claim_rules.LINE)
    for name, value in other.items():
        assert date_claim_rules.fingerprint(replace(claim, **{name: value})) != old, (
            name
        )

    def verdict(test, margin, effect, n):
        """Another rule."""
        return CONFIRMED

    monkeypatch.setattr(date_claim_rules, "CODE", (verdict, *date_claim_rules.CODE[1:]))
    assert date_claim_rules.fingerprint(claim) != old
    new = date_claim_rules.update_date(claim, "2030-01-01T00:00:00+00:00")
    assert new.since == "2030-01-01T00:00:00+00:00"
    assert date_claim_rules.update_date(new, "2031-01-01T00:00:00+00:00") == new


@pytest.mark.parametrize(
    ("module", "name", "claim"),
    [
        (claims_, "_majority", "cost_decides"),
        (claims_, "MIN_SEEDS", "cpt_improves"),
        (statistics, "by_seed", "cpt_improves"),
        (statistics, "ALPHA", "cpt_improves"),
        (predictors, "rank_correlation", "noise_decides"),
        (predictors, "PREDICTORS", "noise_decides"),
        (claim_measures, "_lengths", "deficit_length"),
        (run_groups, "preregistered", "cpt_improves"),
        (run_table, "EXTERNAL_FAILURE", "cpt_improves"),
    ],
)
def test_rule_fingerprint_covers_called_functions(module, name, claim, monkeypatch):
    """Include called functions, constants and patterns in the fingerprint of a rule."""
    old, there = date_claim_rules.fingerprint(IDS[claim]), getattr(module, name)
    changed = {int: 2, float: 0.1, dict: {"relative_cost": 1}}.get(type(there), another)
    monkeypatch.setattr(
        module,
        name,
        re.compile("no memory") if isinstance(there, re.Pattern) else changed,
    )
    assert date_claim_rules.fingerprint(IDS[claim]) != old


def another(*_, **__):
    """Another rule."""
    return 1 + 1


another.__module__ = claims_.__name__


def first(x):
    """Documented."""
    return x + 1  # a comment


def test_rule_fingerprint_ignores_comments_and_docstrings():
    def undocumented(x):
        return x + 1

    def other(x):
        return x - 1

    def words(function):  # but for its name
        return [
            w for w in date_claim_rules.code_words(function) if w[0] != "FunctionDef"
        ]

    assert words(undocumented) == words(first)
    assert words(other) != words(first)


@pytest.mark.parametrize(
    ("since", "older"), [("2025-12-31T10:00", False), ("2026-01-01T00:01", True)]
)
def test_claim_marks_rows_older_than_rule(since, older):
    rows = by_arm(
        designs.quality_cost("demo", seeds=range(3)), {}
    )  # started on the first of January 2026
    e = judge(replace(IDS["cpt_improves"], since=f"{since}:00+00:00"), table(rows))
    assert e.rule() == f"{since.replace('T', ' ')} UTC" + (
        "; rows older than the rule" if older else ""
    )
    assert (
        judge(replace(IDS["cpt_improves"], since=""), table(rows)).rule() == "undated"
    )
    new = {**rows[0]["provenance"], "started": "2999-01-01"}
    later = [{**r, "provenance": new} if r["spec"]["seed"] else r for r in rows]
    assert (
        entry(later, "cpt_improves")
        .rule()
        .endswith("UTC; some rows older than the rule")
    )
