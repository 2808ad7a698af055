"""Pages under docs/reproducing: the sections, baseline levels, costs and rules needed to read their effects."""

import json
import re
from collections import Counter

import pytest

from cpt_lab.paths import ROOT, results_dir
from cpt_lab.studies import tuned
from cpt_lab.studies.h7 import arms as h7
from cpt_lab.studies.h10 import arms as h10

PAGES = "docs/reproducing"


def page(name):
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def section_of(name, heading):
    """Return the text below a heading of a page, up to the next heading of its level."""
    mark = heading.split()[0]
    parts = re.split(rf"^{mark} ", page(f"{PAGES}/{name}.md"), flags=re.M)
    (found,) = (
        part for part in parts if part.startswith(heading.removeprefix(f"{mark} "))
    )
    return found


def test_critical_periods_page_shows_learning_rate_decays():
    told = section_of("critical-periods", "## What the learning-rate decay does")
    assert "h3.jsonl" in told
    assert "| step | +1.09 [+0.95, +1.23] |" in told
    assert "-0.42 [-0.63, -0.22] | 0.0012 | 10 |" in told
    assert "| step minus constant | +0.63 [+0.42, +0.84] points |" in told
    assert "**secondary and uncorrected**" in told
    assert "learning_rate_decay.png" in told
    assert (results_dir() / "learning_rate_decay.png").exists()


def test_critical_periods_page_judges_footnote_5():
    told = section_of("critical-periods", "## Claims and measurements")
    (claim,) = re.findall(
        r"^\| The decay of the learning rate does not matter.*$", told, re.M
    )
    assert "**not equal in 1 of 2 experiments**" in claim
    assert "step minus constant learning rate +0.63" in claim
    assert "`h3`" in told


@pytest.mark.parametrize(
    "name",
    ["critical-periods", "images", "graphs", "language", "detection", "schedules"],
)
def test_evidence_page_states_baseline_of_every_effect(name):
    """State the full-precision level for each effect of a claim or for its experiment."""
    told = section_of(name, "## Claims and measurements")
    level = r"(?:static \d+|no deficit) reaches "
    experiments = dict(
        re.findall(rf"^\| ([^|]+) \| [^|]+ \| ({level}|see the effects)", told, re.M)
    )
    effects = re.findall(r"<br>([^<|]*: [^<|]*\(\d+[^()]*\))", told)
    without = []
    for effect in effects:
        experiment = effect.partition(": ")[0]
        if experiments.get(
            experiment, "see the effects"
        ) == "see the effects" and not re.search(level, effect):
            without.append(effect)
    assert len(effects) >= 4
    assert without == []


@pytest.mark.parametrize("name", ["where-to-spend-bits", "when-to-switch"])
def test_study_page_states_levels_costs_and_rates(name):
    told = page(f"{PAGES}/{name}.md")
    assert "| 8/8 reaches | training |" in told
    assert "1.4 epochs of 10,000 images of 16 x 16" in told
    assert "wider operand: max(a, b)^2 | tensor cores" in told
    assert "both at 8 bits" in told
    assert "both at their own bits" in told


@pytest.mark.parametrize(
    ("study", "name"),
    [(h7.STUDY, "where-to-spend-bits"), (h10.STUDY, "when-to-switch")],
    ids=["h7", "h10"],
)
def test_study_page_counts_rates_at_ends(study, name):
    chosen = [
        rate for case in study.cases for rate, _ in tuned.settings(study, case).values()
    ]
    counts = Counter(chosen)
    ends = counts[0.5] + counts[2.0]
    assert (
        f"{ends} of the {len(chosen)} choices lie at an end of this grid"
        in " ".join(page(f"{PAGES}/{name}.md").split())
    )


def test_cifar_copies_level_equals_stored_rows():
    found = []
    for line in (results_dir() / "h7.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["spec"]["recipe"]["dataset"].startswith("cifar10") and row["spec"][
            "arm"
        ].startswith("8/8"):
            metrics = {
                (m["name"], m["precision"], m["split"], m["when"]): m["value"]
                for m in row["metrics"]
            }
            found.append(100 * metrics["accuracy", "q_max", "test", "final"])
    (line,) = re.findall(
        r"^\| CIFAR-10 copies .*epochs of 10,000.*$",
        page(f"{PAGES}/where-to-spend-bits.md"),
        re.M,
    )
    assert f"| {sum(found) / len(found):.1f} % |" in line


def test_questions_page_has_both_evaluation_rules():
    questions = page(f"{PAGES}/questions.md")
    (header,) = re.findall(r"^\|  \| question \|.*$", questions, re.M)
    assert [cell.partition(",")[0] for cell in header.split(" | ")[-2:]] == [
        "both at 8 bits",
        "both at their own bits",
    ]
    for question in (
        "H2",
        "H5",
        "H7a",
        "H7b",
        "H7c",
        "H8a",
        "H8b",
        "H10a",
        "H10b",
        "H10c",
    ):
        row, *_ = re.findall(
            rf"^\| {question} \|.*$", questions, re.M
        )  # the first table has the outcomes
        assert "–" not in row.split(" | ")[-2:], question
    assert re.search(
        r"^\| H2 \|.* \| open; .*; p 0\.13 \| the same; p 0\.00012 \|$", questions, re.M
    )
    assert re.search(
        r"^\| H7a \|.* \| open; the pair gains in 3 of 6; p 0\.35 \| confirmed; ",
        questions,
        re.M,
    )
    told = page(f"{PAGES}/where-to-spend-bits.md")
    assert "The pair gains in 4 of 6, p 0.0039" in told
    assert re.search(
        r"\| tasks that gain, p of at least 4 \| 3 of 6, p 0\.11 \| 5 of 6, ", told
    )


def test_questions_and_repeating_pages_state_baselines():
    levels = section_of("questions", "# Questions asked before their runs")
    for name in ("H1", "H2", "H3", "H4", "H5", "H6"):
        assert re.search(
            rf"^\| (?:.*, )?{name}(?:, .*)? \| .* reaches .* \|$", levels, re.M
        ), name
    repeated = section_of("repeating", "## Repeat an effect")
    rows = [
        line
        for line in repeated.splitlines()
        if re.search(r"\[.*\].*\[.*\]", line) and line.startswith("|")
    ]
    assert rows
    assert all(" reaches " in row for row in rows)
    assert "static 8 reaches 52.9 %" in section_of(
        "schedules", "## Schedules within the range test"
    )


def test_index_page_counts_claims_without_evidence():
    told = page(f"{PAGES}/index.md")
    there, of = map(
        int,
        re.search(
            r"(\d+) of the (\d+) claims have a measured or computed effect", told
        ).groups(),
    )
    missing = [
        name.name
        for name in (results_dir().parents[1] / PAGES).glob("*.md")
        for _ in re.findall(r"\*\*not run\*\*", name.read_text())
    ]
    assert of - there == len(missing)
