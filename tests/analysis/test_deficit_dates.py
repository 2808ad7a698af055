"""Costs of deficits by date and decay, against a recount of committed rows and on synthetic rows."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cpt_lab.analysis import claims, deficit_dates, run_table
from cpt_lab.analysis.deficit_dates import decay_name
from cpt_lab.experiments import designs
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.paths import results_dir
from tests.analysis.synthetic import rows_of
from tests.analysis.test_claims import IDS
from tests.helpers import refused, row_of

STARTS = (0, 12, 24, 36, 48)
DECAYS = ("step", "cosine", "constant")


@pytest.fixture(scope="module")
def committed():
    return run_table.committed("h3")


@pytest.fixture(scope="module")
def recount():
    """Return the loss in points by decay, start and seed, read from JSON lines without the package."""
    accuracy = {}
    for line in (results_dir() / "h3.jsonl").read_text().splitlines():
        row = json.loads(line)
        for m in row["metrics"]:
            if (m["name"], m["precision"], m["split"], m["when"]) == (
                "accuracy",
                "q_max",
                "test",
                "final",
            ):
                accuracy[row["spec"]["arm"], row["spec"]["seed"]] = 100 * m["value"]
    seeds = sorted({seed for _, seed in accuracy})
    return {
        (decay, start): np.array(
            [
                accuracy[f"no deficit of {start + 48}, {decay}", seed]
                - accuracy[f"[{start}, {start + 16}) of {start + 48}, {decay}", seed]
                for seed in seeds
            ]
        )
        for decay in DECAYS
        for start in STARTS
    }


def test_deficit_losses_match_recount(committed, recount):
    found = deficit_dates.outcome(committed)
    assert list(found.losses) == [
        (decay, start) for decay in DECAYS for start in STARTS
    ]
    assert (found.deficit_steps, found.recovery_steps) == (16, 32)
    for place, loss in found.losses.items():
        np.testing.assert_allclose(loss.values, recount[place], atol=1e-9)
        assert loss.unit == "points"


def test_deficit_slopes_match_recount(committed, recount):
    found = deficit_dates.outcome(committed)
    for decay in DECAYS:
        y = np.array([recount[decay, start] for start in STARTS])
        slopes = [
            stats.linregress(np.array(STARTS) / 48, column).slope for column in y.T
        ]
        np.testing.assert_allclose(found.slopes[decay].values, slopes, atol=1e-9)
        assert found.slopes[decay].p() == pytest.approx(
            stats.ttest_1samp(slopes, 0).pvalue
        )
    assert found.slopes["step"].text() == "-0.42 [-0.63, -0.22] points"


def test_deficit_differences_match_recount(committed, recount):
    found = deficit_dates.outcome(committed)
    assert list(found.differences) == [
        ("step", "cosine"),
        ("step", "constant"),
        ("cosine", "constant"),
    ]
    for (one, other), difference in found.differences.items():
        np.testing.assert_allclose(
            difference.values, recount[one, 0] - recount[other, 0], atol=1e-9
        )
        slopes = found.slopes[one].values - found.slopes[other].values
        np.testing.assert_allclose(
            found.slope_differences[one, other].values, slopes, atol=1e-9
        )
    assert found.differences["step", "constant"].text() == "+0.63 [+0.42, +0.84] points"


def test_deficit_tables_show_losses_and_slopes(committed):
    found = deficit_dates.outcome(committed)
    table = deficit_dates.loss_table(found).set_index("learning rate")
    assert list(table.index) == list(DECAYS)
    assert table.loc["step", "[0, 16)"] == "+1.09 [+0.95, +1.23]"
    assert (
        table.loc["step", "slope, latest minus earliest (points)"]
        == "-0.42 [-0.63, -0.22]"
    )
    assert set(table["n"]) == {"10"}
    assert all(level.endswith(" %") for level in table["no deficit reaches"])
    others = deficit_dates.difference_table(found).set_index("learning rates")
    assert (
        others.loc["step minus constant", "loss of the deficit [0, 16) [95 %]"]
        == "+0.63 [+0.42, +0.84] points"
    )


def test_decay_figure_draws_intervals_per_decay(committed):
    figure = deficit_dates.decay_figure(committed)
    (ax,) = figure.axes
    assert len(ax.containers) == 3
    title, said = figure.get_suptitle(), figure.get_supxlabel()
    assert title.replace("\n", " ") == deficit_dates.finding(
        deficit_dates.outcome(committed)
    )
    assert "n = 10" in said
    assert "without a deficit 92.0 to 93.9 %" in said
    assert "without correction" in said


def made(slopes):
    """Return runs of H3 that lose a point at the first date, with given slopes by decay."""
    rng, rows = np.random.default_rng(0), []
    for spec in grid_specs("h3/facebook"):
        loss = 0.0
        if spec.schedule.windows:
            loss = 1 + slopes[spec.recipe.lr_rule] * spec.schedule.windows[0][0] / 48
        rows.append(row_of(spec, 0.9 - loss / 100 + 1e-4 * rng.normal()))
    return run_table.table(rows)


@pytest.mark.parametrize(
    ("slopes", "said"),
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
def test_finding_names_decays_with_early_harm(slopes, said):
    """Name the decays with which an early deficit costs more than a late one."""
    assert (
        deficit_dates.finding(
            deficit_dates.outcome(made(dict(zip(DECAYS, slopes, strict=True))))
        )
        == said
    )


def test_finding_reports_inconclusive_slopes(committed):
    found = deficit_dates.outcome(committed)
    unclear = dict.fromkeys(
        DECAYS, replace(found.slopes["constant"], values=np.array([-1.0, 1.0, 0.5]))
    )
    said = deficit_dates.finding(found._replace(slopes=unclear))
    assert said == (
        "Early and late deficits: no clear difference with step decay, cosine decay and a constant learning rate"
    )


def test_outcome_rejects_runs_of_fixed_length():
    rows = rows_of(
        designs.deficit_scan("demo", "digits", seeds=range(3)), lambda s: 0.8
    )
    refused(
        "expected one experiment with deficits at 3 dates or more, got 0",
        deficit_dates.outcome,
        run_table.table(rows),
    )


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
    assert decay_name(*fields) == name


def entry_of(claim, found):
    (entry,) = claims.judge_claims(found, [claim])
    return entry


def test_decay_claim_names_both_decays(committed):
    ((effect, word),) = entry_of("deficit_decay", committed).effects
    pairs = [part.comparison for part in (effect, *effect.other_controls)]
    assert pairs == [
        f"cost of a deficit of 16 of 48 steps, {one} minus {other} learning rate"
        for one, other in (
            ("step", "cosine"),
            ("step", "constant"),
            ("cosine", "constant"),
        )
    ]
    assert [
        f"{part.interval[0]:+.2f}" for part in (effect, *effect.other_controls)
    ] == [
        "+0.43",
        "+0.63",
        "+0.20",
    ]
    assert (
        word == claims.OPEN
    )  # differences, but not beyond the margin of 0.5 points for all pairs
    assert effect.stores == ("h3.jsonl",)


def test_window_claim_reports_equal_recovery_per_decay(committed):
    found = {
        effect.bits: (effect, word)
        for effect, word in entry_of("deficit_window", committed).effects
    }
    assert list(found) == [f"q_min 2, {decay} learning rate" for decay in DECAYS]
    effect, word = found["q_min 2, step learning rate"]
    assert (f"{effect.interval[0]:+.2f}", word) == ("+0.42", claims.CONFIRMED)
    assert "32 steps after each" in effect.comparison


def test_deficit_claims_ignore_preregistered_runs(committed):
    """Judge preregistered runs only by the two claims that name them."""
    deficits = [claim.id for claim in claims.claims() if claim.id.startswith("deficit")]
    names = {
        entry.claim.id
        for entry in claims.judge_claims(committed, deficits)
        if entry.effects
    }
    assert names == {"deficit_decay", "deficit_window"}
    assert all(IDS[name].measure in claims.PREREGISTERED_MEASURES for name in names)


def test_dated_groups_separate_preregistered_runs(committed):
    others = committed.assign(key="other " + committed["key"])
    found = deficit_dates.dated_groups(pd.concat([committed, others]))
    assert [len(group) for group in found] == [300, 300]
