"""Costs of deficits by date and decay, of committed and of synthetic rows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers import refused

from cpt_lab.analysis import deficit_dates, run_table
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.claims import claims
from cpt_lab.experiments import designs
from cpt_lab.experiments.grids import grid_specs
from tests.analysis.synthetic import figure_text, rows_of, runs_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_preregistered")]

DECAYS = ("step", "cosine", "constant")


@pytest.fixture(scope="session")
def h3_runs():
    return run_table.committed("h3")


def test_deficit_tables_and_figure_show_outcome(h3_runs, golden):
    found = deficit_dates.outcome(h3_runs)
    parts = (
        text_of(deficit_dates.loss_table(found)),
        text_of(deficit_dates.difference_table(found)),
        deficit_dates.finding(found),
        deficit_dates.decay_figure(h3_runs).get_supxlabel(),
        figure_text(deficit_dates.decay_figure(h3_runs)),
    )
    golden("tables/deficit_dates.txt", "\n\n".join(parts) + "\n")


def runs_with_slopes(*slopes):
    """Return runs of H3 that lose a point at the first date, with slopes by decay."""
    slope_by_decay = dict(zip(DECAYS, slopes, strict=True))

    def value(spec):
        if not spec.schedule.windows:
            return 0.9
        start = spec.schedule.windows[0][0]
        return 0.9 - (1 + slope_by_decay[spec.recipe.lr_rule] * start / 48) / 100

    return run_table.table(rows_of(grid_specs("h3/facebook"), value))


@pytest.mark.parametrize(
    ("slopes", "finding"),
    [
        (
            (-1, -1, -1),
            "An early deficit costs more than a late one with step, cosine and constant decay",
        ),
        (
            (-1, 0.5, 0.5),
            "An early deficit costs more than a late one with step decay; "
            "costs less than a late one with cosine and constant decay",
        ),
    ],
)
def test_finding_names_decays_with_early_harm(slopes, finding):
    found = deficit_dates.outcome(runs_with_slopes(*slopes))
    assert deficit_dates.finding(found) == finding


def test_finding_reports_inconclusive_slopes(h3_runs):
    found = deficit_dates.outcome(h3_runs)
    values = np.array([-1.0, 1.0, 0.5])
    unclear = replace(found.slopes["constant"], values=values)
    unclear = found._replace(slopes=dict.fromkeys(DECAYS, unclear))
    assert deficit_dates.finding(unclear) == (
        "Early and late deficits: no clear difference with step decay, cosine decay and a constant learning rate"
    )


def test_outcome_rejects_runs_of_fixed_length():
    runs = runs_of(designs.deficit_scan("demo", "digits", seeds=range(3)))
    message = "expected one experiment with deficits at 3 dates or more, got 0"
    refused(message, deficit_dates.outcome, runs)


def deficits_at_start(**changes):
    """Return runs with a deficit at the start of training, in both designs of figure 8."""
    specs = designs.deficit_scan(
        "demo",
        "digits",
        deficit_lengths=[200],
        deficit_starts=[0],
        seeds=range(3),
        **changes,
    )
    return runs_of(specs, lambda spec: 0.9 - 0.1 * bool(spec.schedule.windows))


def decay_effects(runs):
    """Return the comparisons of the claim that the decay does not matter."""
    (claim,) = [claim for claim in claims() if claim.id == "deficit_decay"]
    return [
        [part.comparison.partition("steps, ")[2] for part in (e, *e.other_controls)]
        for e in MEASURES["deficit_decay"](runs, claim)
    ]


@pytest.mark.parametrize(
    ("decay", "compared"),
    [
        (["step"], []),
        (["recipe", "step"], []),
        (
            ["step", "constant"],
            [
                [
                    "step at 67 and 83 % minus constant learning rate",
                    "step minus constant learning rate",
                ]
            ],
        ),
        (["cosine", "constant"], [["cosine minus constant learning rate"]]),
    ],
    ids=str,
)
def test_deficit_decay_compares_kinds_of_decay(decay, compared):
    """One step decay, counted from the end of a deficit or from the start, is not two decays."""
    assert decay_effects(deficits_at_start(decay=decay)) == compared


def test_deficit_decay_names_decays_of_other_experiments():
    tuned = deficits_at_start(decay=["constant"], learning_rate=0.08)
    other_bits = deficits_at_start(decay=["constant"], deficit_bits=3)
    runs = deficits_at_start(decay=["cosine", "step"])
    (unnamed,) = decay_effects(pd.concat([runs, other_bits]))
    (named,) = decay_effects(pd.concat([runs, other_bits, tuned]))
    assert not any("not with" in comparison for comparison in unnamed)
    assert named == [
        f"{comparison} (not with constant, an experiment apart)"
        for comparison in unnamed
    ]


def test_outcome_compares_deficits_of_equal_recovery():
    """H12 also has a deficit at the start of a longer training, which has more time to recover."""
    specs = [s for s in grid_specs("h12/digits") if s.seed < 603]
    specs = [s for s in specs if s.recipe.lr_rule != "constant"]
    longest = max(s.recipe.steps for s in specs if s.schedule.windows == ((0, 150),))

    def value(spec):
        if not spec.schedule.windows:
            return 0.9
        if spec.recipe.steps == longest and spec.recipe.lr_rule == "cosine":
            return 0.7
        return 0.88 if spec.recipe.lr_rule == "cosine" else 0.87

    found = deficit_dates.outcome(runs_of(specs, value))
    assert (found.deficit_steps, found.recovery_steps) == (150, 300)
    (effect,) = found.differences.values()
    assert effect.mean == pytest.approx(1.0)
    (header,) = [
        name for name in deficit_dates.difference_table(found) if "loss" in name
    ]
    assert header == "loss of the deficit [0, 150) [95 %]"


def test_outcome_leaves_out_decay_of_fewer_dates(h3_runs):
    is_late = h3_runs["start"] > 0
    one_date = h3_runs[~(is_late & (h3_runs["lr_rule"] == "constant"))]
    found = deficit_dates.outcome(one_date)
    assert list(found.slopes) == ["step", "cosine"]
    assert list(found.differences) == [("step", "cosine")]
    assert len(deficit_dates.difference_table(found)) == 1


def test_dated_groups_separate_preregistered_runs(h3_runs):
    others = h3_runs.assign(key="other " + h3_runs["key"])
    found = deficit_dates.dated_groups(pd.concat([h3_runs, others]))
    assert [len(group) for group in found] == [300, 300]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (("graph", "", ""), "cosine"),  # older rows: the default is left out of specs
        (("graph", "constant", ""), "constant"),
        (("language_model", "plateau", ""), "plateau"),
        (("image", "", "0.5 0.75"), "step"),
        (("image", "milestones", "0.5 0.75"), "step"),
        (("image", "", "0.67 0.83"), "step at 67 and 83 %"),
        (("image", "", ""), "constant"),
        (("image", "cosine", "0.5 0.75"), "cosine"),
        (("entailment", "", ""), "linear"),
        (("detection", "", ""), "constant"),
    ],
)
def test_decay_name_follows_recipe(fields, name):
    assert deficit_dates.decay_name(*fields) == name
