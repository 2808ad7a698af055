"""README and docs: examples run, and numbers on pages are those of the stored results."""

import doctest
import importlib
import json
import re
import statistics
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch

import cpt_core as cpt
from bench import paper_scale
from book import figures, results
from cpt_core.models.lstm_lm import LanguageModel
from cpt_lab.analysis import (
    claims,
    deficit_dates,
    figure_data,
    paper_numbers,
    preregistered,
    report,
    run_table,
)
from cpt_lab.experiments import grids
from cpt_lab.paths import results_dir
from cpt_lab.studies.h5.arms import allocated
from cpt_lab.studies.h11 import outcome as h11
from cpt_lab.studies.h12 import outcome as h12

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def read(name):
    """Return the text of a page in one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def stored(name):
    """Return the content of a file in data/results."""
    return json.loads((results_dir() / f"{name}.json").read_text())


# --- examples -------------------------------------------------------------------------------------

SOURCES = {
    path: path.read_text(encoding="utf-8") for path in ROOT.glob("cpt_*/**/*.py")
}
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path, text in SOURCES.items()
    if ">>>" in text
)
EXAMPLES = [
    pytest.param(example, id=f"{page.stem} {i}")
    for page in PAGES
    for i, example in enumerate(page.read_text().split("<!-- example -->")[1:])
]
NUMBER_OF_SEEDS = re.compile(r"apart takes about (\d+) seeds")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_page_examples_run(example, tmp_path, monkeypatch, capsys):
    """Run the code blocks of an example, without those of a trainer that is not installed.

    The number of seeds of a search is about that of the page.
    """
    blocks = [block.split("```")[0] for block in example.split("```python")[1:]]
    code = "\n".join(block for block in blocks if "PrecisionCallback" not in block)
    assert code.count("cpt.") >= 3
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    printed = NUMBER_OF_SEEDS.findall(" ".join(capsys.readouterr().out.split()))
    stated = NUMBER_OF_SEEDS.findall(" ".join(example.split()))
    assert [int(n) for n in printed] == pytest.approx([int(n) for n in stated], abs=3)


def test_page_examples_are_marked():
    assert [page.values[0].count("```python") for page in EXAMPLES] == [
        3,
        1,
        1,
        1,
        3,
        2,
    ]


def test_readme_three_lines_run():
    lines = README.read_text().split("```python\n")[1].split("```")[0]
    assert re.findall(r"# (\d): ", lines) == ["1", "2", "3"]
    names = {"cpt": cpt}
    before_step = lines.rpartition("...\n")[0]
    for text, step in ((before_step, 0), (lines, 1)):
        names["model"] = torch.nn.Sequential(torch.nn.Linear(4, 4))
        exec(text, names)
        assert names["model"][0].precision.bits == names["schedule"](step)


# --- generated pages ------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_pages_are_up_to_date():
    pages = results.pages()
    paths = [*results.PAGES.iterdir(), ROOT / "data/paper/claims.txt"]
    assert {path: path.read_text() for path in paths} == pages, (
        "run: python -m book.results"
    )
    text = "\n".join(pages.values())
    for claim in claims.claims():
        assert text.count(f"\n| {claim.claim} ({claim.place}) | **") == 1, claim.id


# --- numbers that pages state ---------------------------------------------------------------------


def batched_runs():
    """State the gains of runs that train together."""
    for name, times in stored("together")["recipes"].items():
        ratios = " | ".join(f"{times[column]:.1f}" for column in ("R=2", "R=11"))
        sweep = f"{times['sweep_s']:.0f} s | {times['sweep']:.1f}"
        yield (
            "docs/sweeps.md",
            f"| {name} | {times['alone_s']:.1f} s | {ratios} | {sweep} |",
        )


def gpu_times():
    """State the times of steps, runs and evaluations on a GPU."""
    measured = stored("gpu")
    kinds = (
        "float32",
        "quantised",
        "per operation",
        "float32 captured",
        "quantised captured",
        "quantised integer captured",
        "quantised integer shared steps captured",
    )
    eager, captured = [], []
    rows = {"PTB LSTM": "LSTM 800, Penn Treebank", "ResNet-74": "ResNet-74, CIFAR-10"}
    for model, name in rows.items():
        ms = {kind: measured["steps"][f"{model}, {kind}"]["ms"] for kind in kinds}
        yield (
            "docs/int8.md",
            f"| {name} | {' | '.join(f'{each:.1f}' for each in ms.values())} |",
        )
        eager.append(f"{ms['quantised'] / ms['float32']:.1f}")
        captured.append(f"{ms['quantised captured'] / ms['float32 captured']:.1f}")
    eager, captured = sorted(eager), sorted(captured)
    yield "docs/int8.md", f"took {captured[1]} and {captured[0]} captured"
    yield "docs/int8.md", f"took {eager[1]} and {eager[0]} float32"
    ranges = f"{eager[0]} to {eager[1]} float32 steps; captured as a CUDA graph, {captured[0]} to {captured[1]}."
    yield "docs/should-i-use-it.md", f"took {ranges}"

    alone, five, shared = (
        f"{measured['packing'][n]['steps_per_second']:.0f}"
        for n in ("1", "5", "5, MPS")
    )
    store = (results_dir() / "language_paper.jsonl").read_text().splitlines()
    (minutes,) = {f"{json.loads(line)['seconds'] / 60:.0f}" for line in store}
    seconds = measured["evaluation_seconds"]
    now, before = (
        statistics.median(seconds[kind])
        for kind in ("captured", "one operation at a time")
    )
    assert len(store) == 3
    yield "README.md", "Apart from three Penn Treebank runs, everything"
    yield (
        "docs/sweeps.md",
        (
            f"{alone} steps a second, five together {five}, five with MPS {shared}. Three whole runs side by side with "
            f"MPS took {minutes} minutes. An evaluation took {now:.2f} seconds, and {before:.0f} before evaluations"
        ),
    )


def cpu_step_times():
    """State the ranges of step times in the tables of docs/int8.md."""
    page = (ROOT / "docs/int8.md").read_text(encoding="utf-8")
    _, simulated, beside, _ = re.split(r"^\|---.*$", page, flags=re.MULTILINE)

    def column(table, at, names=""):
        rows = [
            line.split("|")
            for line in table.splitlines()
            if re.match(rf"\| (?!tiny).*({names})", line)
        ]
        values = [float(n) for row in rows for n in re.findall(r"\d\.\d+", row[at])]
        assert len(values) > 5
        return f"{min(values):g} to {max(values):g}"

    models = "ResNet|RetinaNet|BERT"
    page = "docs/should-i-use-it.md"
    yield page, f"{column(simulated, 2, models)} float32 steps with the C++"
    yield page, f"{column(simulated, 3, models)} in plain torch"
    yield page, f"bfloat16 autocast takes {column(beside, 5)} of a float32 step"


def cost_of_paper_runs():
    """State the plan of all runs at paper scale; a run counts in the first of its grids."""
    rows = pd.DataFrame(stored("paper_scale")["rows"])
    plans = {
        name: grid.make("paper")
        for name, grid in grids.find_grids(None).items()
        if "paper" in grid.scales
    }
    first_grids = {
        spec.key: name for name, specs in reversed(plans.items()) for spec in specs
    }
    assert dict(zip(rows.grid, rows.runs, strict=True)) == Counter(first_grids.values())
    priced = paper_scale.add_prices(rows, 10, 2)
    titles = {
        "CIFAR-10 and CIFAR-100": "cifar",
        "ImageNet": "imagenet",
        "Pascal VOC 2012": "voc",
        "OGBN-Arxiv and OGBN-Products": "ogbn",
        "Penn Treebank": "ptb",
        "XNLI": "xnli",
        "all": "",
    }
    hours = {}
    for title, start in titles.items():
        part = priced[priced.grid.str.startswith(start)]
        sums = part[["exaops", "hours", "money", "store_mb"]].sum()
        hours[title] = part.hours.sum()
        costs = f"{sums.exaops:.1f} | {sums.hours:,.0f} | {sums.money:,.0f}"
        sizes = f"{sums.store_mb:,.0f} MB | {part.checkpoint_mb.max():,.0f} MB"
        yield "docs/sweeps.md", f"| {title} | {part.runs.sum():,} | {costs} | {sizes} |"
    yield (
        "docs/sweeps.md",
        f"ImageNet is {100 * hours['ImageNet'] / hours['all']:.0f} % of it",
    )


def schedule_comparisons():
    """State how many schedules were worse or better than static bits."""
    page = (ROOT / "docs/reproducing/schedules.md").read_text()
    rows = re.findall(rf"^\| (?:{'|'.join(cpt.SUITE)}) \|(.*)\|$", page, re.MULTILINE)
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    worse, better = (
        sum(cell.startswith(sign) for cell in cells) for sign in ("**-", "**+")
    )
    assert (len(cells), worse, better) == (30, 10, 0)
    yield (
        "docs/should-i-use-it.md",
        "static was better in ten of thirty comparisons, a schedule in none",
    )


def allocated_bits():
    """State the bits of the best arm of H5, and the share of its output layer."""
    specs = allocated("characters", [0])
    schedule = next(s.schedule for s in specs if s.arm.startswith("over layers"))
    bits = {names: set(part.bits()) for names, part, _ in schedule.parts}
    assert bits == {("lstm",): {2, 3}, ("decoder",): {6}}
    page = "docs/reproducing/earlier-questions.md"
    yield page, "6 bits for the output layer, 2 and 3 bits in turn for the LSTM"
    shares = []
    for words, width, hidden in ((102, 64, 128), (2_000, 64, 128), (10_000, 800, 800)):
        with torch.device("meta"):
            model = cpt.quantize_(LanguageModel(words, width, hidden))
            inputs = (torch.empty(35, 20, dtype=torch.int64), None)
        macs = cpt.count_bitops(model, inputs, cpt.StaticSchedule(8, 1)).macs
        shares.append(
            f"{100 * macs['decoder'] / (macs['lstm'] + macs['decoder']):.0f} %"
        )
    here, small, paper = shares
    yield (
        page,
        f"{here} of the multiplications there, {small} on the small Penn Treebank and {paper} at the paper's size",
    )


def preregistered_outcomes():
    """State the outcomes on which README.md and the headline of the report rest."""
    page = "docs/reproducing/earlier-questions.md"
    text = (ROOT / page).read_text()
    rows = re.findall(r"^\| (H\w+) \| [^|]* \| ([^|]*) \|", text, re.MULTILINE)
    outcomes = dict(reversed(rows))  # the first table is that of the outcomes
    lines = dict(re.findall(r"^\| (H\w+) (\|.*)$", text, re.MULTILINE)[::-1])
    assert "no schedule beats static by the margin" in outcomes["H2"]
    assert re.search(r"better in \d of 6", outcomes["H2"])  # three tasks at two costs
    n = re.search(r"n = (10 to 20) \| inconclusive", lines["H2"])[1]
    never = "never beat static bits of its cost by the margin set beforehand"
    yield "README.md", f"a text model, at two costs and with {n} seeds, the cyclic"
    yield "README.md", f"with the least rounding noise {never}"
    yield "README.md", "at 8 bits alone the result is inconclusive"
    gains = re.search(r"the pair gains in (\d of \d)", outcomes["H7a"])[1]
    at_8_bits = re.findall(r"the pair gains in (\d of \d)", lines["H7a"])[1]
    yield "README.md", f"improved {gains} tasks at the cost of 3 static bits"
    assert outcomes["H7a"].startswith("inconclusive")
    inconclusive = "the preregistered test over all six is inconclusive"
    yield "README.md", f"({at_8_bits} if all are evaluated at 8 bits); {inconclusive}"
    assert re.search(
        r"^\| over both \|.*\| \+[^|]*wins[^|]*\| -[^|]*loses[^|]*\|$",
        text,
        re.MULTILINE,
    )
    robust = re.search(r"any of the three prices: ([^.]*)\.", text)[1].split()
    winners = "static 3 against cycle (H2), 4/5 against 3/8 (H7), 4/5 against cycle at 4/5 (H8)"
    assert " ".join(robust) == winners
    counts = {
        (arm, other): (better, worse, float(price))
        for arm, other, better, worse, price in re.findall(
            r"^\| H\w+ \| ([^|]*) \| ([^|]*) \| better in (\d), worse in (\d) of \d \| ([\d.]+)",
            text,
            re.MULTILINE,
        )
    }
    assert counts["cycle", "static 3"][:2] == ("0", "3")
    assert counts["4/5", "3/8"][:2] == (gains[0], "0")
    assert counts["cycle at 4/5", "4/5"][:2] == ("0", "2")
    yield (
        "README.md",
        "static 3 bits beats a cycle on 3 of 3 tasks, 4/5 beats 3 bits with 8-bit "
        "gradients on 4 of 6, and a cycle of its cost on 2 of 6.",
    )
    assert counts["5/5", "4/8"] == ("1", "2", 0.94)
    assert counts["6/5", "5/8"] == ("0", "2", 0.91)
    yield (
        "README.md",
        "At the cost of 4 static bits it improved 1 of 6 tasks and made 2 worse, at "
        "the cost of 5 none and 2 (the pairs cost 6 and 9 % less there)",
    )
    questions = (ROOT / "docs/reproducing/questions.md").read_text()
    assert re.search(r"^\| H11b \|.*static is better in 4 of 4 \|", questions, re.M)
    yield "README.md", "on four of four small tasks"
    wins = "no cyclic schedule beat static bits"
    assert f"{wins} of equal cost by the margin" in report.HEADLINE
    yield "README.md", "(docs/reproducing/earlier-questions.md)"
    assert not re.search(r"\bH\d", README.read_text())


def size_with_interval(effect):
    """Return an effect as lessons write it, such as "3.3 points [1.0, 5.7]"."""
    size, low, high = (f"{x:.1f}" for x in (effect.mean, effect.low, effect.high))
    return f"{size} points [{low}, {high}]"


def effects_in_notebooks():
    """State the effects of our questions that the texts of notebooks 07, 08, 14 and 18 name."""
    runs = run_table.committed()
    answers = preregistered.all_answers(runs)
    again = [one.replication for one in results.replicated_effects(answers)]
    damages, _ = h12.damages(runs)
    stated = results.stated_effects(
        answers, {"H11": h11.tasks(runs)[0]}, damages, again
    )
    find, select = stated.find, stated.select

    by_decay = "{}, early minus late, under decay minus constant"
    early = ".*, (step|cosine), equal recovery: early minus late"
    constant = "digits, constant, equal recovery: early minus late"
    digits, graph = (
        find("H12", by_decay.format(task)) for task in ("digits", "Facebook GCN")
    )
    page = "notebooks/07_critical_periods.ipynb"
    dates = deficit_dates.outcome(run_table.committed("h3"))
    by_rates = deficit_dates.difference_table(dates).set_index("learning rates")
    loss = float(by_rates.loc["step minus constant"].iloc[0].split()[0])
    yield page, f"costs {loss:.1f} points more with step decay than at a constant"
    interval = f"{graph.mean:.2f} [{graph.low:.2f}, {graph.high:.2f}]"
    yield page, f"by {size_with_interval(digits)} on digits and {interval} on the graph"
    points = select("H12", early.replace(".*", "digits")).sizes()
    graph_points = select("H12", early.replace(".*", "Facebook GCN")).sizes(2)
    yield page, f"by {points} points on digits and {graph_points} on the graph, where"
    designs = select("H12", ".*, the paper's design: early minus late")
    assert (designs.num_below, len(designs)) == (5, 6)
    yield page, "in five of six rows the late deficit costs more"
    repeated = find("fresh seeds", "digits, early minus late under decay")
    yield (
        page,
        f"fresh seeds on digits**, the result under decay is the same: {size_with_interval(repeated)}",
    )
    more, less = find("fresh seeds", constant), -find("H12", constant).mean
    yield page, f"costs {size_with_interval(more)} more instead of {less:.1f} less"

    gain = {
        task: find("H11", f"{task}, constant, rising minus static 4")
        for task in ("characters", "Facebook GCN", "CIFAR-10 copies", "digits")
    }
    page = "notebooks/08_choosing_a_schedule.ipynb"
    yield page, f"gain {gain['characters'].mean:.1f} % on characters"
    yield page, f"and {gain['Facebook GCN'].mean:.1f} points on the graph"
    loss = -gain["CIFAR-10 copies"].mean
    yield page, f"lose {loss:.1f} points on copies of CIFAR-10"
    yield page, f"inconclusive ({size_with_interval(gain['digits'])})"
    static = select("H11", ".*, rising minus static 4 under decay")
    assert static.num_below == len(static) == 4
    yield page, "static 4 bits are better than rising bits on all four tasks"

    noise = [
        find("H1", f"{task}, a doubling of the noise")
        for task in ("characters", "Facebook")
    ]
    page = "notebooks/14_preregistered_questions.ipynb"
    assert find("fresh seeds", "Facebook, a doubling of the noise").high > 0
    yield (
        page,
        f"by {-noise[0].mean:.1f} % a doubling. On the graph hardly:** by {-noise[1].mean:.2f} points",
    )

    latest = find("H3", "loss, latest minus earliest, at equal learning rate")
    interval = f"an interval from {-latest.low:.2f} less to {latest.high:.2f} more"
    page = "notebooks/18_damage_or_lost_time.ipynb"
    yield (
        page,
        f"loses {-latest.mean:.2f} points less than the earliest, with {interval} ({latest.n} seeds)".replace(
            "(10 seeds)", "(ten seeds)"
        ),
    )


@pytest.mark.parametrize(
    "stated_texts",
    [
        batched_runs,
        gpu_times,
        cpu_step_times,
        cost_of_paper_runs,
        schedule_comparisons,
        pytest.param(allocated_bits, marks=pytest.mark.slow),
        pytest.param(effects_in_notebooks, marks=pytest.mark.slow),
        preregistered_outcomes,
    ],
)
def test_pages_state_stored_numbers(stated_texts):
    pairs = list(stated_texts())
    assert pairs
    assert [(page, text) for page, text in pairs if text not in read(page)] == []


@pytest.mark.slow
def test_readme_figure_states_claims_of_paper():
    known = {claim.id: claim.claim for claim in claims.claims()}
    assert "exceed" in known[figures.STATED["small"][0]]
    assert "similar to static q_max or worse" in known[figures.STATED["medium"][0]]
    assert "nearly all" in known[figures.CIFAR_STATED[0]]
    figure = figures.paper_beside_ours()
    paper, ours = figure.axes
    points = [n for n in paper_numbers.numbers().itertuples() if n.unit == "points"]
    (number,) = [n for n in points if n.artefact == "figure_3"]
    labels = " ".join(text.get_text() for text in paper.texts)
    assert f"{number.value:g} to {number.to:g}" in labels
    arms = figures.differences(figure_data.best_rows("figure_3"))
    assert figure.get_suptitle() == figures.finding(arms)
    assert {text.get_text() for text in ours.texts} >= set(cpt.SUITE)
    assert "static 8 reaches" in figure._supxlabel.get_text()
