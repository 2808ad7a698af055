"""Preregistered tests of figure 3 and table 1 on synthetic rows with known effects."""

import numpy as np
import pytest

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import cifar_tests
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.grids import grid_specs
from tests.helpers import row_of


def rows_of_figure_3(quality):
    """Return rows whose accuracy in percent depends on arm, relative cost and seed."""
    specs = grid_specs(cifar_tests.FIGURE_3)
    return [row_of(s, quality(s.arm, s.relative_cost, s.seed) / 100) for s in specs]


def rows_of_table_1(quality):
    return [
        row_of(s, quality(s.arm) / 100 + s.seed / 1e5)
        for s in grid_specs(cifar_tests.TABLE_1)
    ]


def test_slopes_return_points_per_doubling():
    runs = table(
        rows_of_figure_3(lambda arm, cost, seed: 70 + 2 * np.log2(cost) + seed / 100)
    )
    assert cifar_tests.slopes(runs).values == pytest.approx([2, 2, 2, 2])


def test_gains_over_static_subtract_static_line():
    """Measure gains against the line through the static precisions."""
    runs = table(
        rows_of_figure_3(
            lambda arm, cost, seed: 70 + 5 * cost + (1.5 if arm in SUITE else 0)
        )
    )
    gains = cifar_tests.gains_over_static(runs)
    assert list(gains) == list(SUITE)
    assert gains.to_numpy() == pytest.approx(1.5, abs=1e-6)


def test_gains_over_static_need_two_precisions():
    runs = table(rows_of_figure_3(lambda arm, cost, seed: 70))
    with pytest.raises(
        ValueError, match="at least two static precisions are needed, got 1"
    ):
        cifar_tests.gains_over_static(runs[runs["arm"].isin(["static 8", *SUITE])])


def test_outcomes_follow_preregistered_rules():
    noise = {10: -0.02, 11: 0.01, 12: 0.02, 13: -0.01}
    figure_3 = rows_of_figure_3(
        lambda arm, cost, seed: 70 + (3 + noise[seed]) * np.log2(cost)
    )
    damage = {cifar_tests.LONGEST_DEFICIT: -1.0, cifar_tests.EARLY_WINDOW: 0.2}
    table_1 = rows_of_table_1(lambda arm: 75 + damage.get(arm, 0))
    found = cifar_tests.preregistered_tests(table([*figure_3, *table_1]))
    words = cifar_tests.outcomes(found)
    assert words[0] == "as the paper says"
    assert words[2:] == ["as the paper says", "against the paper"]
    assert found[2].estimate.mean == pytest.approx(1.0)


def test_outcomes_report_missing_runs():
    figure_3 = rows_of_figure_3(lambda arm, cost, seed: 70)[:7]
    words = cifar_tests.outcomes(cifar_tests.preregistered_tests(table(figure_3)))
    assert (
        words == ["not complete: 7 of 60 runs"] * 2 + ["not complete: 0 of 36 runs"] * 2
    )


def test_outcomes_ignore_effects_below_margin():
    noise = {10: -0.02, 11: 0.01, 12: 0.02, 13: -0.01}
    figure_3 = rows_of_figure_3(
        lambda arm, cost, seed: 70 + noise[seed] * np.log2(cost)
    )
    found = cifar_tests.preregistered_tests(table(figure_3))
    assert cifar_tests.outcomes(found)[0] == "no difference worth naming"
