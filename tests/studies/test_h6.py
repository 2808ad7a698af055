"""Study H6 of docs/preregistration.md on synthetic rows with a known answer."""

import numpy as np
import pytest

from cpt_lab.analysis.run_table import table
from cpt_lab.studies.h6 import outcome
from cpt_lab.studies.h6.arms import CASES, LATE, on_ladders
from tests.studies.study_rows import row_at

pytestmark = pytest.mark.slow


def rows(gain=0.0, late=0.0, slope=10.0, noise=0.05, lost=()):
    """Return rows with quality linear in cost, and schedules ``gain`` above or below the line."""
    found = []
    rng = np.random.default_rng(0)
    for case, c in CASES.items():
        for spec in on_ladders(case):
            own = (
                0.0
                if spec.arm.startswith("static")
                else late
                if spec.arm == LATE
                else gain
            )
            quality = (
                slope * spec.relative_cost
                + own * c.margin
                + noise * rng.standard_normal()
            )
            status = "failed" if (case, spec.arm, spec.seed) in lost else "ok"
            found.append(row_at(spec, quality, status=status))
    return table(found)


def test_h6_schedules_below_line_confirm():
    a, b, c = outcome.answers(rows(gain=-0.2, late=-0.2, noise=0.01))
    assert a.outcome.startswith("confirmed: dearer schedules are better")
    assert "confirmed: nothing beats static" in b.outcome
    assert "contradicted" not in b.outcome + c.outcome
    assert len(a.primary) == len(b.primary) == 6
    assert all(e.mean / e.margin == pytest.approx(-0.2, abs=0.1) for e in b.primary)
    assert all(e.mean == pytest.approx(1, abs=0.05) for e in a.primary)


def test_h6_schedules_above_line_contradict():
    _, b, c = outcome.answers(rows(gain=2.0, late=-2.0))
    assert "contradicted: better in 6 of 6" in b.outcome
    assert "confirmed" not in b.outcome
    assert "confirmed" in c.outcome
    assert "static is better in 6 of 6" in c.outcome


def test_h6_quality_falling_with_cost_contradicts():
    a, *_ = outcome.answers(rows(slope=-10.0))
    assert "contradicted: the reverse in 6" in a.outcome
    assert "confirmed" not in a.outcome


def test_h6_diverged_and_missing_runs():
    """Score diverged runs as chance, and give no answer while runs are missing."""
    found = rows(lost={("digits", LATE, 100)})
    cell = outcome.cells(found)[0]
    assert cell.num_lost == 1
    assert cell.quality[LATE][100] == pytest.approx(10)
    a, b, c = outcome.answers(found[found["seed"] != 103])
    assert {a.outcome, b.outcome, c.outcome} == {f"open: {744 - 93} of 744 runs"}
    assert list(outcome.sections(found[found["seed"] != 103])) == []


def test_h6_sections_have_complete_tables():
    first, second = outcome.sections(rows())
    assert len(first.table) == 3
    assert len(second.table) == 6 * 11
