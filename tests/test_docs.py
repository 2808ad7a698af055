"""Documentation: examples run, links lead somewhere, and generated pages match code and rows."""

import doctest
import importlib
import itertools
import json
import re
import statistics
import tomllib
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from notebook_dataflow import PAPER
from scipy.stats import ttest_1samp

import cpt_core
from bench import paper_scale, rising_vs_falling, roles
from book import figures as readme_figure
from book import results
from cpt_core.models.lstm_lm import LanguageModel
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.analysis import claims, figure_data, paper_numbers, report
from cpt_lab.analysis.estimates import holm
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.statistics import interval
from cpt_lab.experiments import grids
from cpt_lab.paths import results_dir
from cpt_lab.studies.h5.arms import allocated

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in ROOT.glob("cpt_*/**/*.py")
    if p.name != "__main__.py"
    and "quantization/coverage"
    not in p.as_posix()  # the last one is an error, by design
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0
    assert module.__doc__


@pytest.mark.slow
def test_results_pages_are_up_to_date():
    pages = results.pages()
    kept = {
        path: path.read_text()
        for path in (*results.PAGES.iterdir(), ROOT / "data/paper/claims.txt")
    }
    assert kept == pages, "run: python -m book.results"
    rows = [
        line
        for page in pages.values()
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    for claim in claims.claims():
        assert (
            sum(row.startswith(f"| {claim.claim} ({claim.place}) | **") for row in rows)
            == 1
        ), claim.id


def test_pages_name_existing_grids():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"cpt(?:_lab)? run ([\w/-]+)", page.read_text("utf-8"))
    }
    assert {"h6", "h10-rates", "cifar10/resnet74", "h1/facebook"} <= named
    for name in named:
        assert grids.find_grids(name), name


def page(name):
    return (ROOT / name).read_text()


def kept(name):
    """Return the content of a file in data/results."""
    return json.loads((results_dir() / f"{name}.json").read_text())


# task -> what pages call it, and the unit of its gains
TASKS = {
    "digits": ("digits", "points"),
    "characters": ("characters", "%"),
    "gcn": ("Facebook GCN", "points"),
    "ptb": ("Penn Treebank, small", "%"),
}


def test_small_studies_page_states_rising_bits():
    text = page("docs/small-studies.md")
    for task, runs in kept("adaptive")["tasks"].items():
        gain = interval_text(
            *interval([run["adaptive"] - run["static"] for run in runs])
        )
        assert re.search(rf"{re.escape(gain)} (points|%) on {task}", text)
        assert all(abs(run["costs"]["static"] / run["cost"] - 1) < 1e-3 for run in runs)


def test_small_studies_page_states_evaluation_bits():
    found = {
        (row["task"], row["trained"], row["seed"]): row["quality"]
        for row in kept("evaluated_at")["rows"]
    }
    assert len(found) == 4 * 5 * 8

    def minus(task, one, other):
        (trained, at), (its, its_at) = one, other
        values = [
            found[task, trained, s][at] - found[task, its, s][its_at]
            for s in range(600, 608)
        ]
        return interval(values)

    for (task, (word, unit)), b in itertools.product(TASKS.items(), (3, 4, 5, 6)):
        more, rounded = (
            minus(task, (b, "8"), (b, str(b))),
            minus(task, (8, str(b)), (b, str(b))),
        )
        line = f"| {word} | {b} | {interval_text(*more)} {unit} | {interval_text(*rounded)} {unit} |"
        assert line in page("docs/small-studies.md")
    most = dict.fromkeys(("points", "%"), 0.0)
    for (task, (_, unit)), b in itertools.product(TASKS.items(), (3, 4, 5, 6, 8)):
        most[unit] = max(most[unit], abs(minus(task, (b, "float"), (b, "8"))[0]))
    assert f"changes at most {most['points']:.1f} points, or {most['%']:.2f} %" in page(
        "docs/small-studies.md"
    )


def test_small_studies_page_states_bits_of_roles():
    found = kept("roles")
    quality = {
        (row["task"], row["arm"], row["seed"]): row["quality"] for row in found["rows"]
    }
    assert len(quality) == 4 * 3 * 12
    gains = {
        (task, other): [
            quality[task, "allocated", s] - quality[task, other, s] for s in roles.SEEDS
        ]
        for task, other in itertools.product(roles.TASKS, ("3/8", "4/5"))
    }
    assert standing(gains) == {(task, "3/8") for task in roles.TASKS}
    for task, (word, unit) in TASKS.items():
        measured, steps = (
            Sensitivity.from_dict(found["measured"][task]),
            roles.CASES[task].recipe.steps,
        )
        spent = roles.arms(measured, steps)["allocated"][0]
        parts = (
            sorted(set(s.bits().tolist()))
            for s in (spent.weight, spent.activation, spent.error)
        )
        bits = ", ".join(" to ".join(map(str, part)) for part in parts)
        cells = [
            f"{interval_text(*interval(gains[task, other]))} {unit}"
            for other in ("3/8", "4/5")
        ]
        assert f"| {word} | {bits} | **{cells[0]}** | {cells[1]} |" in page(
            "docs/small-studies.md"
        )


def standing(gains):
    """Return the keys of the differences that a two-sided t test finds significant, by Holm's rule."""
    adjusted = holm([ttest_1samp(x, 0).pvalue for x in gains.values()])
    return {key for key, p in zip(gains, adjusted, strict=True) if p < 0.05}


def test_small_studies_page_states_order_of_bits():
    found = {
        (row["task"], row["arm"], row["seed"]): row["quality"]
        for row in kept("order_of_bits")["rows"]
    }
    assert (len(found), {seed for *_, seed in found}) == (
        7 * 4 * 12,
        set(rising_vs_falling.SEEDS),
    )
    gains = {
        (task, pair): [
            found[task, pair[0], s] - found[task, pair[1], s]
            for s in rising_vs_falling.SEEDS
        ]
        for task in rising_vs_falling.RECIPES
        for pair in (
            ("rising", "even"),
            ("rising", "falling"),
            ("rising", "static"),
            ("even", "static"),
        )
    }
    bold = standing({key: x for key, x in gains.items() if key[1][1] != "static"})
    for task in rising_vs_falling.RECIPES:
        cells = {
            key: f"{interval_text(*interval(x))} %"
            for key, x in gains.items()
            if key[0] == task
        }
        line = " | ".join(
            f"**{cell}**" if key in bold else cell for key, cell in cells.items()
        )
        assert f"| {task} | {line} |" in page("docs/small-studies.md")


def test_sweeps_page_states_gains_of_batched_runs():
    for name, of in kept("together")["recipes"].items():
        ratios = " | ".join(f"{of[column]:.1f}" for column in ("R=2", "R=11"))
        line = f"| {name} | {of['alone_s']:.1f} s | {ratios} | {of['sweep_s']:.0f} s | {of['sweep']:.1f} |"
        assert line in page("docs/sweeps.md")


def test_pages_state_gpu_step_times():
    found = kept("gpu")
    kinds = (
        "float32",
        "quantised",
        "per operation",
        "float32 captured",
        "quantised captured",
        "quantised integer captured",
        "quantised integer shared steps captured",
    )
    told, ratios = page("docs/int8.md"), {"": [], " captured": []}
    for name, word in {
        "PTB LSTM": "LSTM 800, Penn Treebank",
        "ResNet-74": "ResNet-74, CIFAR-10",
    }.items():
        ms = {kind: found["steps"][f"{name}, {kind}"]["ms"] for kind in kinds}
        assert (
            f"| {word} | {' | '.join(f'{each:.1f}' for each in ms.values())} |" in told
        )
        for kind, of in ratios.items():
            of.append(ms[f"quantised{kind}"] / ms[f"float32{kind}"])
    eager, captured = (sorted(f"{ratio:.1f}" for ratio in of) for of in ratios.values())
    assert f"took {captured[1]} and {captured[0]}\n  captured" in told
    assert f"took {eager[1]} and {eager[0]} float32" in told
    wanted = f"took {eager[0]} to {eager[1]} float32 steps; captured as a CUDA graph, {captured[0]} to {captured[1]}."
    assert wanted in page("docs/should-i-use-it.md")
    alone, five, shared = (
        f"{found['packing'][n]['steps_per_second']:.0f}" for n in ("1", "5", "5, MPS")
    )
    whole = [
        json.loads(line)
        for line in page("data/results/language_paper.jsonl").splitlines()
    ]
    minutes, took = (
        {f"{row['seconds'] / 60:.0f}" for row in whole},
        found["evaluation_seconds"],
    )
    now, before = (
        statistics.median(took[kind])
        for kind in ("captured", "one operation at a time")
    )
    wanted = (
        f"{alone} steps a second, five together {five}, five with MPS {shared}. Three whole runs side by side with MPS "
        f"took {minutes.pop()} minutes. An evaluation took {now:.2f} seconds, and {before:.0f} before evaluations were"
    )
    assert wanted in page("docs/sweeps.md").replace("\n  ", " ")
    assert len(whole) == 3
    assert "Apart from three Penn Treebank runs, everything" in page("README.md")


def test_sweeps_page_states_cost_of_paper_runs():
    told, rows = page("docs/sweeps.md"), pd.DataFrame(kept("paper_scale")["rows"])
    of_paper = [
        (n, grid.make("paper"))
        for n, grid in grids.find_grids(None).items()
        if "paper" in grid.scales
    ]
    keys = {
        spec.key: name for name, made in reversed(of_paper) for spec in made
    }  # a run counts in its first grid
    assert dict(zip(rows.grid, rows.runs, strict=True)) == Counter(keys.values())
    priced = paper_scale.add_prices(rows, 10, 2)
    names = {
        "CIFAR-10 and CIFAR-100": "cifar",
        "ImageNet": "imagenet",
        "Pascal VOC 2012": "voc",
        "OGBN-Arxiv and OGBN-Products": "ogbn",
        "Penn Treebank": "ptb",
        "XNLI": "xnli",
        "all": "",
    }
    hours = {}
    for title, start in names.items():
        of = priced[priced.grid.str.startswith(start)]
        sums, hours[title] = (
            of[["exaops", "hours", "money", "store_mb"]].sum(),
            of.hours.sum(),
        )
        spent = f"{sums.exaops:.1f} | {sums.hours:,.0f} | {sums.money:,.0f}"
        stored = f"{sums.store_mb:,.0f} MB | {of.checkpoint_mb.max():,.0f} MB"
        assert f"| {title} | {of.runs.sum():,} | {spent} | {stored} |" in told
    assert f"ImageNet is {100 * hours['ImageNet'] / hours['all']:.0f} % of it" in told
    assert (
        round((hours["all"] - hours["ImageNet"] - hours["Pascal VOC 2012"]) / 24) == 24
    )  # "24 days"


OUTCOMES = {  # the words of the rows; README and report.HEADLINE rest on those of H2 and H7a
    "H1": "at one cost, noisier schedules are worse",
    "H2": "no schedule beats static by the margin; static is better in 3 of 6; alike within the margin in 3",
    "H3": "open",
    "H4a": "open",
    "H4b": "no difference worth naming",
    "H5": "bits here, not there; mixed, as what wins here loses elsewhere; worse than static",
    "H6a": "open; dearer schedules are better in 3 of 6",
    "H6b": "open; static is better in 1 of 6",
    "H6c": "open; static is better in 1 of 6",
    "H7a": "open; the pair gains in 4 of 6",
    "H7b": (
        "gradients should keep their bits (Facebook GCN, 5/5 minus 4/8; Facebook GraphSAGE, 5/5 minus 4/8); the "
        "pair gains in 1 of 6"
    ),
    "H7c": (
        "gradients should keep their bits (Facebook GCN, 6/5 minus 5/8; Facebook GraphSAGE, 6/5 minus 5/8); the "
        "pair gains in 0 of 6"
    ),
    "H8a": "no cycle beats static by the margin; static is better in 2 of 6",
    "H8b": "open; static is better in 2 of 6",
    "H10a": (
        "the forward switch wins in 1 of 5 (digits, MX formats, forward late minus 4/6); the other is better in 3 of 5"
    ),
    "H10b": "the forward switch beats it nowhere by the margin; the other is better in 3 of 5",
    "H10c": "open; the other is better in 0 of 5",
}


@pytest.mark.parametrize("question", OUTCOMES)
def test_questions_page_has_outcomes_cited_in_readme(question):
    answers = page("docs/reproducing/questions.md")
    outcome, *_ = re.findall(rf"^\| {question} \| [^|]* \| ([^|]*) \|", answers, re.M)
    assert re.sub("^(confirmed|contradicted): ", "", outcome) == OUTCOMES[question]
    if question == "H5":
        assert re.search(
            r"^\| over both \|.*\| \+[^|]*wins[^|]*\| -[^|]*loses[^|]*\|$",
            answers,
            re.M,
        )


def test_readme_states_findings_in_one_sentence():
    learnt = " ".join(
        page("README.md").split("## What we learnt")[1].split("## ")[0].split()
    )
    tasks = re.search(r"the pair gains in (\d of \d)", OUTCOMES["H7a"])[1]
    comparisons = {"6": "six"}[
        re.search(r"static is better in \d of (\d)", OUTCOMES["H2"])[1]
    ]
    assert (
        f"In {comparisons} comparisons of equal cost no cyclic schedule beat static bits by the margin"
        in learnt
    )
    assert "inconclusive if all models are evaluated at 8 bits" in learnt
    assert f"improved {tasks} tasks at the cost of 3 static bits" in learnt
    assert learnt.count(". ") == 0
    assert "(docs/reproducing/questions.md)" in learnt
    assert (
        "no cyclic schedule beat static bits of equal cost by the margin"
        in report.HEADLINE
    )
    assert not re.search(r"\bH\d", page("README.md"))


def test_readme_first_screen_has_three_commands():
    text = page("README.md")
    for words in (
        "JupyterLab",
        "papermill",
        "make image",
        "environment.yml",
        "jupyter lab notebooks",
    ):
        assert words in text
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["data/results/figure_3.png"]
    assert (ROOT / "data/results/figure_3.png").read_bytes().startswith(b"\x89PNG")
    command = re.search(r"papermill notebooks/(03_\w+\.ipynb) (.*?)```", text, re.S)
    cells = json.loads((ROOT / "notebooks" / command[1]).read_text())["cells"]
    parameters = next(
        "".join(c["source"])
        for c in cells
        if "parameters" in c["metadata"].get("tags", ())
    )
    given = re.findall(r"-p (\w+)|-y \"(\w+):", command[2])
    names = ["".join(pair) for pair in given]
    assert names == ["scale", "schedules", "static_bits", "seeds"]
    assert [
        name for name in names if not re.search(rf"^{name}\b", parameters, re.M)
    ] == []


def test_readme_names_the_extra_of_jupyter():
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    assert any(line.startswith("jupyterlab") for line in extras["notebooks"])
    assert not any(
        line.startswith(("jupyter", "papermill"))
        for line in (*extras["lab"], *extras["vision"])
    )
    assert (
        '`pip install -e ".[notebooks,vision,text]"` | the library, `cpt`, JupyterLab and papermill'
        in page("README.md")
    )


def test_readme_figure_states_claims_of_paper():
    known = {claim.id: claim.claim for claim in claims.claims()}
    assert "exceed" in known[readme_figure.STATED["small"][0]]
    assert (
        "similar to static q_max or worse" in known[readme_figure.STATED["medium"][0]]
    )
    assert "nearly all" in known[readme_figure.CIFAR_STATED[0]]
    drawn = readme_figure.paper_beside_ours()
    paper, ours = drawn.axes
    words = " ".join(text.get_text() for text in paper.texts)
    (number,) = [
        n
        for n in paper_numbers.numbers().itertuples()
        if n.artefact == "figure_3" and n.unit == "points"
    ]
    assert f"{number.value:g} to {number.to:g}" in words
    arms = readme_figure.differences(figure_data.best_rows("figure_3"))
    assert drawn.get_suptitle() == readme_figure.finding(arms)
    assert {text.get_text() for text in ours.texts} >= set(cpt_core.SUITE)
    assert "static 8 reaches" in drawn._supxlabel.get_text()


def test_should_i_use_it_states_schedule_comparisons():
    schedules = "|".join(cpt_core.SUITE)
    table = re.findall(
        rf"^\| (?:{schedules}) \|(.*)\|$", page("docs/reproducing/schedules.md"), re.M
    )
    cells = [cell.strip() for row in table for cell in row.split("|")]
    worse, better = (
        sum(cell.startswith(sign) for cell in cells) for sign in ("**-", "**+")
    )
    assert (len(cells), worse, better) == (30, 10, 0)
    said = "static was better in ten of thirty comparisons, a schedule in none"
    assert said in " ".join(page("docs/should-i-use-it.md").split())


def test_questions_page_states_h5_winner():
    answers = " ".join(page("docs/reproducing/questions.md").split())
    won = next(
        spec.schedule
        for spec in allocated("characters", [0])
        if spec.arm.startswith("over layers")
    )
    bits = {names: set(schedule.bits()) for names, schedule, _ in won.parts}
    assert bits == {("lstm",): {2, 3}, ("decoder",): {6}}
    assert "6 bits for the output layer, 2 and 3 bits in turn for the LSTM" in answers
    shares = []
    for words, width, hidden in ((102, 64, 128), (2_000, 64, 128), (10_000, 800, 800)):
        with torch.device("meta"):
            model = cpt_core.quantize_(LanguageModel(words, width, hidden))
            inputs = (torch.empty(35, 20, dtype=torch.int64), None)
        macs = cpt_core.count_bitops(model, inputs, cpt_core.StaticSchedule(8, 1)).macs
        shares.append(round(100 * macs["decoder"] / (macs["lstm"] + macs["decoder"])))
    told = "{} % of the multiplications there, {} % on the small Penn Treebank and {} % at the paper's size"
    assert told.format(*shares) in answers


def test_pages_have_short_lines():
    for path in [README, *(ROOT / "docs").rglob("*.md")]:
        table = (
            1500 if path.parent == results.PAGES else 300
        )  # the cell of a claim has all of its effects
        wide = [
            line
            for line in path.read_text().splitlines()
            if len(line) > (table if line[:1] == "|" else 120)
        ]
        if path.name != "preregistration.md":  # its words stay as they were written
            assert wide == [], path.name
        assert not re.search(r"^ *%", path.read_text(), re.M), (
            f"{path.name}: the site takes that line for a comment"
        )


README, *MORE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(example, id=f"{page.stem} {i}")
    for page in (README, *MORE)
    for i, example in enumerate(page.read_text().split("<!-- example -->")[1:])
]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_page_examples_run(example, tmp_path, monkeypatch):
    """Run the marked examples of the pages as written; an example has one or more code blocks."""
    blocks = [b.split("```")[0] for b in example.split("```python")[1:]]
    code = "\n".join(b for b in blocks if "PrecisionCallback" not in b)
    assert code.count("cpt.") >= 3
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})


def test_readme_three_lines_run():
    assert [page.values[0].count("```python") for page in EXAMPLES] == [3, 1, 1, 3, 2]
    lines = README.read_text().split("```python\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 3
    names = {"cpt": cpt_core, "model": torch.nn.Sequential(torch.nn.Linear(4, 4))}
    exec(lines, names)
    assert names["model"][0].precision.bits == names["schedule"](0)


def test_page_links_lead_somewhere():
    seen = 0
    folders = (
        "*.md",
        "docs/**/*.md",
        "data/**/*.md",
        "notebooks/*.md",
        "notebooks/*.ipynb",
    )
    for path in [path for folder in folders for path in ROOT.glob(folder)]:
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", markdown(path), flags=re.M | re.S)
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
            if not link.startswith(("http", "mailto")):
                target = path.parent / link if link else path
                assert target.exists(), f"{path.name}: {link}"
                assert not anchor or anchor in anchors(target), (
                    f"{path.name}: {link}#{anchor}"
                )
                seen += 1
    assert seen > 300


def markdown(path):
    """Return the text of a page, or of a notebook without its code."""
    cells = json.loads(path.read_text())["cells"] if path.suffix == ".ipynb" else []
    parts = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    ]
    return "\n\n".join(parts) if cells else path.read_text()


def anchors(page):
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)$", markdown(page), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def test_teaching_page_states_study_times():
    """Compare with the notebooks; 03 to 08, which follow the paper, state none."""
    texts = {
        path.name[:2]: markdown(path)
        for path in ROOT.glob("notebooks/*.ipynb")
        if path.name[:2] not in PAPER
    }
    stated = {
        n: int(re.search(r"\*\*Study time\*\* (\d+) minutes", text)[1])
        for n, text in texts.items()
    }
    rows = re.findall(r"^\| ([\d, ]+) \| ([\d, ]+) \|", page("docs/teaching.md"), re.M)
    told = {
        number: int(m)
        for n, t in rows
        for number, m in zip(n.split(", "), t.split(", "), strict=True)
    }
    assert told == stated
