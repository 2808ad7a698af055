"""Studies H7 and H8 of docs/preregistration.md on synthetic rows with a known answer."""

import numpy as np
import pytest
from helpers import refused

from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies import tuned
from cpt_lab.studies.h7 import outcome
from cpt_lab.studies.h7.arms import CASES, STUDY
from tests.studies.study_rows import row_at

pytestmark = pytest.mark.slow

WORSE = 5.0  # points or percent that the other rates and evaluations lose


def best(spec):
    """Return the factor of the recipe's rate that is best for a task."""
    return 2.0 if spec.recipe.task == "language_model" else 0.5


@pytest.fixture(autouse=True, scope="module")
def chosen(rated):
    """Provide settings: the best rate of a task for every arm, and own bits except for 8/8; the file of their rows."""

    def qualities(spec):
        at_own = 0.0 if spec.arm.endswith(f" at {best(spec):g}") else -WORSE
        return at_own + (WORSE if spec.arm.startswith("8/8") else -WORSE), at_own

    return rated(STUDY, qualities)


def rows(pair=0.0, cycle=0.0, by_case=None, noise=0.05, lost=()):
    """Return rows in which pairs and cycles beat static 3, 4 and 5 by given multiples of the margin."""
    made, rng = [], np.random.default_rng(0)
    for case, c in CASES.items():
        gain = (by_case or {}).get(case, pair)
        for spec in STUDY.runs(case):
            arm = spec.arm.rpartition(" at ")[0]
            own = (
                gain * arm.endswith("/5")
                + cycle * arm.startswith("cycle")
                + 3 * (arm == "8/8")
            )
            q = c.margin * (own + noise * rng.standard_normal())
            top = q if arm == "8/8" else q - WORSE
            made.append(
                row_at(
                    spec, top, q, "failed" if (case, arm, spec.seed) in lost else "ok"
                )
            )
    return table(made)


def test_h7_settings_are_best_in_validation():
    for case, c in CASES.items():
        found = tuned.settings(STUDY, case)
        assert {rate for rate, _ in found.values()} == {best(c)}
        assert [arm for arm, (_, at) in found.items() if at == "8 bits"] == ["8/8"]
        assert {s.recipe.lr for s in STUDY.runs(case)} == {best(c) * c.recipe.lr}


def test_h7_task_without_rates_has_no_runs(chosen, tmp_path, monkeypatch):
    _, *others = chosen.read_text().splitlines(
        keepends=True
    )  # the first is of the first task
    (tmp_path / STUDY.file).write_text("".join(others))
    monkeypatch.setattr(tuned, "results_dir", lambda: tmp_path)
    tuned.held_out.cache_clear()
    refused(
        r"lacks 1 of the 90 runs .* run h7-rates/characters",
        STUDY.runs,
        "characters",
        error=NotMeasuredError,
    )
    assert len(STUDY.runs("digits")) == 10 * 6
    assert {a.outcome for a in outcome.answers(table([]))} == {"open: 0 of 360 runs"}


def test_h7_words_for_gains_and_losses():
    a, b, c, d, e = outcome.answers(rows(pair=2.0, cycle=-1.0))
    for found in (a, b, c):
        assert found.outcome == "confirmed: gradients may pay; the pair gains in 6 of 6"
        assert len(found.primary) == 6
        assert all(
            x.mean / x.margin == pytest.approx(2, abs=0.1) for x in found.primary
        )
    for found in (d, e):
        assert (
            found.outcome
            == "confirmed: no cycle beats static by the margin; static is better in 6 of 6"
        )


def test_h7_needs_four_gains_and_no_loss():
    *names, last = CASES

    def word(gaining, **others):
        return outcome.answers(
            rows(by_case={**dict.fromkeys(names[:gaining], 2.0), **others})
        )[0].outcome

    assert word(3) == "open; the pair gains in 3 of 6"
    assert word(4) == "confirmed: gradients may pay; the pair gains in 4 of 6"
    told = "contradicted: gradients should keep their bits (Penn Treebank, small, 4/5 minus 3/8)"
    assert word(5, **{last: -1.5}) == f"{told}; the pair gains in 5 of 6"
    assert word(5, **{last: -0.5}).startswith(
        "confirmed: gradients may pay; contradicted: "
    )


def test_h8_winning_cycle_contradicts():
    *_, d, e = outcome.answers(rows(cycle=2.0))
    assert d.outcome.startswith(
        "contradicted: a cycle wins in 6 of 6 (characters, cycle at 4/5 minus 4/5; "
    )
    assert "confirmed" not in d.outcome + e.outcome


def test_h7_diverged_and_missing_runs():
    """Score diverged runs as chance, and give no answer while runs are missing."""
    found = rows(pair=2.0, lost={("digits", "4/5", 300)})
    parts, missing = outcome.tasks(found)
    assert (missing, parts[1].num_lost) == ("", 1)
    assert parts[1].quality("4/5")[0] == pytest.approx(10)
    some = found[found["dataset"] != "ptb"]
    assert {a.outcome for a in outcome.answers(some)} == {"open: 300 of 360 runs"}
    first, shares, by_rule, arm = outcome.sections(some)
    assert "Nothing is decided" in first.notes[1]
    assert len(first.figure.axes) == 3
    assert len(shares.table) == 5
    assert len(by_rule.table) == 6
    assert len(arm.table) == 5 * 10
    first, *_, last = outcome.sections(found)
    assert len(first.notes) == 1
    assert len(first.table) == 5
    assert len(last.table) == 3 * 6 + 6
    refused("no task of H7 is complete", outcome.figure, [])


def test_h7_reports_outcome_by_both_evaluation_rules():
    """Report the outcome by both evaluation rules even if they agree."""
    a, *_ = outcome.answers(rows(pair=2.0))
    assert [rule for rule, _ in a.by_rule] == ["8 bits", "their own bits"]
    assert all(
        said.startswith("confirmed: gradients may pay; the pair gains in 6 of 6; p ")
        for _, said in a.by_rule
    )
    assert "depends on the rule" not in a.outcome
    assert a.rules_text().startswith("Judged at 8 bits: confirmed: gradients may pay;")


def test_h7_gains_by_evaluation_count_tasks():
    parts, _ = outcome.tasks(rows(pair=2.0))
    table = outcome.gains_by_evaluation(parts)
    assert list(table.columns[1:]) == [
        f"4/5 minus 3/8 [95 %], {name}"
        for name in (
            "each as chosen on held-out data",
            "both at 8 bits",
            "both at their own bits",
        )
    ]
    assert all(cell.startswith("6 of 6, p ") for cell in table.iloc[-1, 1:])
    assert len(table) == len(CASES) + 1
    gains = outcome.gains(parts).set_index("task")
    assert (
        gains.loc["digits", "8/8 reaches"] == "53.0 %"
    )  # three margins above the half of all
    assert (
        gains.loc["CIFAR-10 copies", "training"]
        == "1.4 epochs of 10,000 images of 16 x 16"
    )


def test_h7_rates_at_ends_are_counted():
    """Count rates that are twice the recipe's for text and half of it elsewhere."""
    found = tuned.rates_at_ends(STUDY).set_index("task")
    assert found.loc["characters"].tolist() == [10, 0, 10]
    assert found.loc["digits"].tolist() == [10, 10, 0]
