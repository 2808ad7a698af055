"""Pages under docs/reproducing: the sections, baselines, costs and rules needed to read their effects."""

import json
import re

import pandas as pd
import pytest

from book.claim_tables import last_bits
from cpt_lab.analysis.claims import claims
from cpt_lab.paths import ROOT, results_dir

PAGES = ROOT / "docs" / "reproducing"


def page(name):
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def section_of(name, heading):
    """Return the text below a heading of a page, up to the next heading of its level."""
    mark, _, title = heading.partition(" ")
    parts = re.split(rf"^{mark} ", page(name), flags=re.M)
    (found,) = (part for part in parts if part.startswith(title))
    return found


def test_critical_periods_page_judges_footnote_5():
    text = section_of("critical-periods", "## Claims and measurements")
    pattern = r"^\| The decay of the learning rate does not matter.*$"
    (claim,) = re.findall(pattern, text, re.M)
    assert "**equal in 1 of 3 experiments**" in claim
    assert "*not equal*" not in claim
    assert "*equal*<br>Facebook/gcn 2-8" in claim
    assert "step minus constant learning rate +0.63" in claim
    assert "`h3`" in text


@pytest.mark.parametrize(
    "name",
    ["critical-periods", "images", "graphs", "language", "detection", "schedules"],
)
def test_evidence_page_states_baseline_of_every_effect(name):
    """State the baseline for each effect of a claim or for its experiment."""
    text = section_of(name, "## Claims and measurements")
    baseline, elsewhere = r"(?:static \d+|no deficit) reaches ", "see the effects"
    pattern = rf"^\| ([^|]+) \| [^|]+ \| ({baseline}|{elsewhere})"
    experiments = dict(re.findall(pattern, text, re.M))
    effects = re.findall(r"<br>([^<|]*: [^<|]*\(\d+[^()]*\))", text)
    assert len(effects) >= 4
    for effect in effects:
        experiment = effect.partition(": ")[0]
        in_table = experiments.get(experiment, elsewhere) != elsewhere
        assert in_table or re.search(baseline, effect), effect


def test_cifar_copies_baseline_equals_stored_rows():
    accuracies = []
    for line in (results_dir() / "h7.jsonl").read_text().splitlines():
        row = json.loads(line)
        is_cifar = row["spec"]["recipe"]["dataset"].startswith("cifar10")
        if is_cifar and row["spec"]["arm"].startswith("8/8"):
            accuracies += [
                100 * m["value"]
                for m in row["metrics"]
                if (m["name"], m["precision"], m["split"], m["when"])
                == ("accuracy", "q_max", "test", "final")
            ]
    pattern = r"^\| CIFAR-10 copies .*epochs of 10,000.*$"
    (line,) = re.findall(pattern, page("where-to-spend-bits"), re.M)
    assert f"| {sum(accuracies) / len(accuracies):.1f} % |" in line


ANSWERS = (  # lines of pages with the outcomes under both rules of evaluation
    (
        "earlier-questions",
        r"^\| H2 \|.* \| inconclusive; .*; p 0\.13 \| the same; p 0\.00012 \|$",
    ),
    (
        "earlier-questions",
        r"^\| H7a \|.* \| inconclusive; the pair gains in 3 of 6; p 0\.35 \| confirmed; ",
    ),
    (
        "where-to-spend-bits",
        r"\| tasks that gain, p of at least 4 \| 3 of 6, p 0\.11 \| 5 of 6, ",
    ),
)


def test_earlier_questions_have_both_evaluation_rules():
    text = page("earlier-questions")
    (header,) = re.findall(r"^\|  \| question \|.*$", text, re.M)
    rules = [cell.partition(",")[0] for cell in header.split(" | ")[-2:]]
    start = "outcome if both are evaluated at"
    assert rules == [f"{start} 8 bits", f"{start} their own bits"]
    for question in "H2 H5 H7a H7b H7c H8a H8b H10a H10b H10c".split():
        row, *_ = re.findall(rf"^\| {question} \|.*$", text, re.M)  # of the outcomes
        assert "–" not in row.split(" | ")[-2:], question
    for name, pattern in ANSWERS:
        assert re.search(pattern, page(name), re.M)


def test_questions_and_repeating_pages_state_baselines():
    baselines = section_of("earlier-questions", "# Appendix: questions H1 to H10")
    for name in ("H1", "H2", "H3", "H4", "H5", "H6"):
        pattern = rf"^\| (?:.*, )?{name}(?:, .*)? \| .* reaches .* \|$"
        assert re.search(pattern, baselines, re.M), name
    repeated = section_of("repeating", "## Repeat an effect").splitlines()
    rows = [x for x in repeated if re.search(r"^\|.*\[.*\].*\[.*\]", x)]
    assert rows
    assert all(" reaches " in row for row in rows)


def test_index_page_counts_claims_without_evidence():
    pattern = r"(\d+) of the (\d+) claims have a measured or computed effect"
    measured, total = map(int, re.search(pattern, page("index")).groups())
    texts = [path.read_text() for path in PAGES.glob("*.md")]
    assert total - measured == sum(text.count("**not run**") for text in texts)


def test_index_page_counts_claims_of_paper_alone():
    (total,) = re.findall(r"^\| all \| +\| (\d+) \|", page("index"), re.M)
    lines = re.findall(r"^\| [^|]+ \| [^|]+ \| (\d+) \|", page("index"), re.M)
    of_paper = [claim for claim in claims() if not claim.place.startswith("ours")]
    assert int(total) == len(of_paper) < len(claims())
    assert sum(map(int, lines)) == int(total)


@pytest.mark.parametrize(
    "name",
    [
        *("critical-periods", "images", "graphs", "language", "detection"),
        *("schedules", "entailment"),
    ],
)
def test_evidence_page_begins_with_answers(name):
    """Begin with the paper, our result, how sure it is, and why they may differ."""
    text = page(name)
    short = section_of(name, "## In short")
    heads = re.findall(r"^- \*\*([^*]+)\*\*: \S", short, re.M)
    assert heads == ["The paper", "Here", "How sure", "Why they may differ"]
    assert text.index("## In short") == text.index("## ")


def test_pages_describe_every_committed_store():
    texts = "".join(path.read_text() for path in PAGES.glob("*.md"))
    stores = [path.name for path in results_dir().glob("*.jsonl")]
    assert len(stores) > 20
    assert [store for store in stores if f"`{store}` | " not in texts] == []


def test_evidence_pages_name_schedules_that_end_below_q_max():
    runs = pd.DataFrame(
        {
            "arm": ["RR", "CR", "static 8", "RR"],
            "q_min": 2,
            "q_max": 8,
            "total_steps": [64, 64, 64, 6400],
            "n_cycles": 4,
            "store": ["data/results/a.jsonl"] * 3 + ["data/results/b.jsonl"],
            "dataset": "graph/",
            "model": "gcn",
        }
    )
    assert last_bits(runs) == {("a.jsonl", "graph/gcn", "2 to 8"): {"RR": {6}}}
    text = section_of("graphs", "## Claims and measurements")
    (line,) = re.findall(r"^\| Facebook/gcn 2-8 .*$", text, re.M)
    assert "; RR, RTV, RTH end at 6 bits" in line
    assert "say little about the paper" in " ".join(text.split())
    assert "say little about the paper" not in " ".join(page("images").split())
