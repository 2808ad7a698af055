"""Study H10 of docs/preregistration.md on synthetic rows with a known answer."""

import numpy as np
import pytest

from cpt_lab.analysis.run_table import table
from cpt_lab.studies.h10 import outcome
from cpt_lab.studies.h10.arms import CASES, LATE, STUDY
from tests.studies.study_rows import row_at


@pytest.fixture(autouse=True, scope="module")
def chosen(rated):
    """Provide settings: the recipe's rate and own bits for every arm; 5/4 and "both late" are best in validation."""

    def qualities(spec):
        good = 2 * spec.arm.startswith(("5/4", "both")) - 5 * (
            not spec.arm.endswith(" at 1")
        )
        return good - 3, good

    rated(STUDY, qualities)


def rows(gains, cases=CASES):
    """Return rows in which arms beat 4/4 by given multiples of the margin."""
    made, rng = [], np.random.default_rng(0)
    for case in cases:
        for spec in STUDY.runs(case):
            q = (
                gains.get(spec.arm.rpartition(" at ")[0], 0.0)
                + 0.05 * rng.standard_normal()
            )
            made.append(row_at(spec, q - 3, q))
    return table(made)


def test_h10_compares_with_best_validation_arm():
    parts, missing = outcome.tasks(rows({}))
    assert missing == ""
    assert [t.best(("4/6", "5/4")) for t in parts] == ["5/4"] * 4 + ["4/6"]
    assert {t.best(("gradients late", "both late")) for t in parts} == {"both late"}
    assert {rate for t in parts for rate, _ in t.settings.values()} == {1.0}


def test_h10_words_for_win_loss_and_tie():
    a, b, c = outcome.answers(
        rows({LATE: 2.0, "both late": 4.0, "forward spread": 2.0})
    )
    assert a.outcome.startswith(
        "contradicted: the forward switch wins in 5 of 5 (characters, forward late minus 5/4; "
    )
    assert (
        b.outcome
        == "confirmed: the forward switch beats it nowhere by the margin; the other is better in 5 of 5"
    )
    assert (
        c.outcome
        == "confirmed: the forward switch beats it nowhere by the margin; the other is better in 0 of 5"
    )
    assert [len(x.secondary) for x in (a, b, c)] == [10, 5, 0]


def test_h10_missing_tasks_are_inconclusive():
    some = rows({LATE: 2.0}, ["digits", "ptb"])
    assert {x.outcome for x in outcome.answers(some)} == {"open: 96 of 234 runs"}
    first, arm = outcome.sections(some)
    assert "Nothing is decided (open: 96 of 234 runs)" in first.notes[1]
    assert (
        first.figure.get_suptitle()
        == "A late forward switch wins 6 of 6 comparisons and loses 0"
    )
    assert len(arm.table) == 16
    *_, last = outcome.sections(rows({}))
    assert len(last.table) == 15


def test_h10_switches_compare_forward_with_gradients():
    parts, _ = outcome.tasks(rows({LATE: 2.0, "gradients late": 1.0}))
    table = outcome.switches(parts).set_index("task")
    assert table.loc["digits", "forward late minus gradients late [95 %]"].startswith(
        "+1.0"
    )
    assert list(table["n"]) == ["6"] * 5
    assert all(level for level in table["8/8 reaches"])


def test_h10_gains_by_evaluation_have_no_count():
    parts, _ = outcome.tasks(rows({}))
    assert len(outcome.gains_by_evaluation(parts)) == len(CASES)
