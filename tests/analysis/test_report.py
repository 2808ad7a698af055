"""The HTML report: order, headings, glossary, consistent numbers, user schedules and hostile names."""

import base64
import html
import re
from dataclasses import replace

import matplotlib.colors
import pandas as pd
import pytest
from matplotlib.figure import Figure

from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_lab.analysis import (
    claims,
    figures,
    predictors,
    report,
    reproduction,
    run_groups,
    run_table,
    style,
)
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.rendering import Section
from cpt_lab.experiments import designs
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import stores
from tests.helpers import row_of, smoke_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]


def plain(page):
    """Return a page as text without images and tags."""
    page = re.sub(r"src='data:[^']*'|<style>.*?</style>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def written(rows, folder):
    """Write a report of the rows, and return its HTML."""
    store = folder / "made_up.jsonl"
    for row in rows:
        stores.append_row(store, {"schema": stores.SCHEMA_VERSION, **row})
    return report.write_report([store], folder / "page.html").read_text()


def rows_of(specs, **changes):
    return [{**row_of(spec, 0.5 + 0.01 * i), **changes} for i, spec in enumerate(specs)]


# what stands before the figures of the paper
PREREGISTERED = (
    "Claims of the paper",
    "Preregistered questions",
    "H1 over schedules",
    "Bits where they matter",
)


# a store of every kind; of the others a page of all rows has more of the same
LEFT_OUT = (
    "at_found_q_min|cycles|deficit_facebook|equal_cost_(dig|face)|graph_(cora|q_agg|sage)|h(6|7|10)|"
    "language_p(tb|aper)|.*_q_max_6"
)
STORES = [
    path
    for path in sorted(results_dir().glob("*.jsonl"))
    if not re.match(LEFT_OUT, path.name)
]


@pytest.fixture(scope="module")
def stored():
    return run_table.load(*STORES, every_rate=True)


@pytest.fixture(scope="module")
def page(stored, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "load", lambda *files, every_rate: stored)  # read once
        return report.write_report(
            STORES, tmp_path_factory.mktemp("r") / "p.html"
        ).read_text()


@pytest.fixture
def quick(monkeypatch):
    """Skip the parts of a report that do not depend on rows, and all studies."""
    monkeypatch.setattr(report, "studies", lambda part: ())
    monkeypatch.setattr(report, "figure_2", Figure)
    monkeypatch.setattr(report, "differences", tuple)
    monkeypatch.setattr(report, "_versions", str)
    for name in ("ptb_costs", "cost_groups"):
        monkeypatch.setitem(MEASURES, name, lambda runs, claim: [])


# --- what stands where ----------------------------------------------------------------------------


def test_report_orders_results_before_missing_runs(page):
    """Put verdicts and figures first, and claims without runs last."""
    headings = [html.unescape(h) for h in re.findall(r"<h2[^>]*>([^<]*)</h2>", page)]
    assert headings[0].startswith(
        "GCN (FP-Agg) on Facebook's page-page graph, 64 steps, 4 cycles"
    )  # the most arms
    assert len(set(headings)) == len(headings) > 30
    place = {name: headings.index(name) for name in headings}
    assert place["Preregistered questions"] < place["Claims of the paper"]
    assert "How few bits can a network be trained with" in page.split("<h2")[0]
    assert (
        place["What predicts the quality of a schedule?"]
        < place["Numbers printed in the paper: not run"]
    )
    before, folded = page.split("Numbers printed in the paper: not run</h2>")
    assert "<td>not run</td>" not in before
    assert folded.lstrip().startswith("<details><summary>")
    links = dict(re.findall(r'<a href="#(part-\d+)">([^<]*)</a>', page))
    marks = dict(re.findall(r'<h2 id="(part-\d+)">([^<]*)', page))
    assert links.keys() == marks.keys()
    assert len(marks) == len(headings)
    assert all(
        words.removesuffix(", demo scale") in marks[mark]
        for mark, words in links.items()
    )


def test_report_is_self_contained_html(page):
    assert re.findall(r"(?:src|href)=['\"](?!data:|#)[^'\"]*", page) == []
    assert not re.search(r"https?://|<script|@import|url\(", page)
    images = re.findall(r"src='data:image/png;base64,([^']*)'", page)
    asked = sum(
        f"{name}</h2>" in page
        for name in PREREGISTERED
        if not name.startswith(("Claims", "H1"))
    )
    assert len(images) == asked + 19  # figure 2, and those of experiments
    assert len(images) == len(re.findall(r"<img alt='[^']{15,}'", page))
    assert all(base64.b64decode(i).startswith(b"\x89PNG") for i in images)
    digits = run_table.committed("image_digits")
    network = digits[
        (digits.model == "mlp6") & (digits.q_min == 3) & (digits.arm == "CR")
    ]
    assert f"<td>{100 * network.accuracy.mean():.1f}</td>" in page
    for words in (
        "Critical learning periods: mlp6 on scikit-learn digits",
        "Equal cost: ",
        "92.23 +- 0.09 %",
        "Claims of the paper",
        "opposite sign in ",
        "confirmed, exact",
        "Pareto front",
        "data/results/image_digits.jsonl",
        "keep the best one on the test set",
    ):
        assert words in page


def test_report_handles_empty_stores(quick, tmp_path):
    assert (
        "is stored yet; <code>cpt plan</code> lists the"
        in report.write_report([], tmp_path / "empty.html").read_text()
    )
    page = written([row_of(smoke_spec("digits"), 0.5)], tmp_path)
    assert ("1 run at smoke " in page, "<th>runs that count" in page) == (True, False)


def test_report_counts_failed_runs(quick, tmp_path):
    """Count failed runs if all runs of a network failed, or all but one."""
    arms, failed = (
        {"schedules": ["RR", "CR"], "static_bits": [8], "seeds": [0]},
        {"status": "failed", "error": "x"},
    )
    lost = rows_of(
        designs.quality_cost("demo", "digits", "mlp6", **arms),
        metrics=[],
        bitops={},
        **failed,
    )
    first, *others = rows_of(
        designs.quality_cost("demo", "digits", "resnet8_w8", **arms)
    )
    page = written(
        [
            *lost,
            first,
            *({**row, "metrics": [], "bitops": {}, **failed} for row in others),
        ],
        tmp_path,
    )
    assert page.count("<td>1</td>") >= 6  # runs, finished or failed


def test_report_counts_intact_rows_and_links_glossary(
    page,
):
    count, text = (
        sum(len(path.read_bytes().splitlines()) for path in STORES),
        plain(page),
    )
    assert f"{count} of {count} rows intact" in text
    said = dict(re.findall(r'<dt id="(word-\d+)">(.*?)</dt><dd>.{40,}?</dd>', page))
    links = [
        f"{mark} {word}"
        for mark, word in re.findall(
            r'<a class="word" href="#(word-\d+)">(.*?)</a>', page
        )
    ]
    assert [link.split()[0] for link in links] == list(said)
    assert {
        "arm",
        "relative cost",
        "savings",
        "noise exposure",
        "names of schedules",
    } <= set(said.values())
    assert not re.search(r"[$\\`*{]", " ".join(re.findall("<dd>(.*?)</dd>", page)))


def test_report_gives_experiments_unique_names():
    specs = [
        s
        for lr in (0.1, 0.2)
        for s in designs.quality_cost("demo", schedules=["CR"], static_bits=[8], lr=lr)
    ]
    names = [
        name
        for name, _ in run_groups.with_unique_names(
            run_groups.quality_cost_groups(run_table.table(rows_of(specs)))
        )
    ]
    assert len(set(names)) == 2
    assert all(re.search(r", demo scale, recipe [0-9a-f]{8}$", name) for name in names)
    specs = [
        s
        for n in (4, 8)
        for s in designs.quality_cost("demo", static_bits=[8], seeds=[0, 1], n_cycles=n)
    ]
    table = run_table.table(rows_of(specs))
    names = [
        name
        for name, _ in run_groups.with_unique_names(
            run_groups.quality_cost_groups(table)
        )
    ]
    assert [
        f"600 steps, {n} cycles, q_min 3" in name
        for n, name in zip((4, 8), names, strict=True)
    ] == [True, True]
    found = predictors.predictors_by_title(table)
    assert len(found) == len(set(predictors.summary(found).experiment)) == 2


def test_report_uses_singular_for_one(page, quick, tmp_path):
    """Write "1 run", and omit the deviation of a single seed."""
    specs = designs.quality_cost(
        "paper", "cifar10", q_max=[8], schedules=["CR"], seeds=[0]
    )
    cost = designs.quality_cost(
        "paper", "ptb", q_max=[8], schedules=["CR"], static_bits=[], seeds=[0]
    )
    rows = rows_of(specs) + [
        {**row_of(s, 90.0, "perplexity"), "bitops": {"paper": 7e13}} for s in cost
    ]
    one = written(rows, tmp_path)
    for text in (plain(page), plain(one)):
        assert not re.search(r"nan\b", text)
        assert not re.search(r"(?<![\d.,])1 (runs|effects|arms|seeds|lines)\b", text)
    assert "7.00 (n = 1)" in plain(one)


def test_report_drops_uninformative_columns(page):
    assert not re.search("(?<!ours, )(?<!one cost; )not in the paper", page)
    results = re.split(
        r"<h2[^>]*>mlp6 on scikit-learn digits, 8 x 8, 600 steps", page, maxsplit=1
    )[1]
    results = results.split("Preregistered questions</h2>")[0]
    assert "<th>failed</th>" not in results
    assert results.count("<th>diverged</th>") == results.count("<table") > 15


# --- the page of make reproduce -------------------------------------------------------------------

CLAIM = "CR matches static q_max (section 4.2)"
COMMITTED = pd.DataFrame(
    [
        (
            CLAIM,
            "CR minus static 8: -2.00, n = 8",
            "copies, demo scale",
            "static 8 reaches 75 %",
            "inconclusive",
        )
    ],
    columns=reproduction.CLAIM_COLUMNS,
)


def claims_here(measured, level="static 8 reaches 50 %"):
    return COMMITTED.assign(measured=measured, level=level)


@pytest.fixture
def reproduced(tmp_path, monkeypatch):
    """Write the page of a demo run with these rows and synthetic claims, and return its HTML."""
    monkeypatch.setattr(report, "runs_dir", lambda: tmp_path / "runs")
    monkeypatch.setattr(report, "_versions", str)

    def tables(runs=None):
        lines = (
            COMMITTED
            if runs is None
            else claims_here(f"CR minus static 8: -1.00, n = {runs['seed'].nunique()}")
        )
        return dict.fromkeys(reproduction.SECTIONS, lines)

    monkeypatch.setattr(reproduction, "claims_tables", tables)

    def write(rows, scale="demo", **sections):
        for row in rows:
            store = tmp_path / "runs" / scale / "rows.jsonl"
            stores.append_row(store, {"schema": stores.SCHEMA_VERSION, **row})
        return report.write(tmp_path, scale, [], **sections).read_text()

    return write


def quality_rows(*seeds):
    return rows_of(
        designs.quality_cost(
            "demo", "digits", schedules=["RR", "CR"], static_bits=[8], seeds=list(seeds)
        )
    )


def test_reproduce_page_compares_claims_with_rows(reproduced):
    text = " ".join(plain(reproduced(quality_rows(0, 1, 2))).split())
    assert text.startswith("Cyclic precision training: notebooks run at demo scale")
    assert "the paper says this run committed rows data and scale level verdict" in text
    assert (
        f"{CLAIM} CR minus static 8: -1.00, n = 3; static 8 reaches 50 % CR minus static 8: -2.00, n = 8"
        in text
    )
    assert "Image classification: the paper, this run, committed rows" in text
    assert "Language: the paper" not in text  # nothing of it was run
    assert "too few seeds" not in text


def test_reproduce_page_shows_figures_after_claims(reproduced):
    page = reproduced(quality_rows(0, 1, 2))
    assert page.count("data:image/png;base64,") == 1
    claims_table, figure = (
        page.split("data:image/png;base64,")[0],
        page.split("data:image/png;base64,")[1],
    )
    assert "matches static q_max" in " ".join(plain(claims_table).split())
    assert "<th>n</th>" in figure


def test_reproduce_page_omits_verdict_for_one_seed(reproduced):
    page = reproduced(quality_rows(0))
    text = " ".join(plain(page).split())
    assert "n = 1; static 8 reaches 50 %; too few seeds to decide" in text
    assert "1 seed: too few to compare." in text
    assert "Pareto" not in page
    assert "<td>yes</td>" not in page


def test_reproduce_page_marks_smoke_runs(reproduced):
    page = reproduced(quality_rows(0, 1, 2), scale="smoke")
    assert "nothing on this page is a result of it" in page.split("<h2")[0]
    assert "notebooks run at smoke scale</h1>" in page
    assert "matches static q_max" not in " ".join(plain(page).split())
    assert "data:image" not in page


def test_reproduce_page_introduces_user_data(reproduced):
    """Introduce the results on user data only if there are some."""
    part = [Section("3 bits are enough")]
    said = "What was found for your data comes first"
    assert said not in reproduced([], committed=part)
    page = reproduced([], own_data=part, committed=[Section("At equal cost")])
    assert said in page
    assert (
        page.index("3 bits are enough")
        < page.index("At equal cost")
        < page.index(">Notebooks<")
    )


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ("–", "not run"),
        (
            "RR minus CR: +1.00, n = 2",
            "RR minus CR: +1.00, n = 2; too few seeds to decide",
        ),
        (
            "RR minus CR: +1.00, n = 2; ER: +1.00, n = 3",
            "RR minus CR: +1.00, n = 2; ER: +1.00, n = 3",
        ),
    ],
)
def test_compare_claims_reports_run_status(measured, shown):
    lines = report.compare_claims(claims_here(measured, "–"), COMMITTED)
    assert lines["this run"].tolist() == [shown]
    assert lines["committed rows"].tolist() == COMMITTED["measured"].tolist()
    assert lines["verdict"].tolist() == ["inconclusive"]


# --- one number, one interval ---------------------------------------------------------------------


def test_report_and_ledger_share_correlation_intervals(page, stored):
    correlations = [
        claim for claim in claims.claims() if claim.measure == "correlation"
    ]
    text, shown = plain(page), run_table.tuned(stored)
    ledger = "\n".join(
        line for claim in correlations for line in claims.judge(claim, shown).evidence()
    )
    found = predictors.predictors_by_title(shown)
    assert len(found) == ledger.count("rank correlation") == 4
    for frame in found.values():
        r = frame.set_index("predictor").loc["relative_cost"]
        number = f"{r.strength:+.2f} [{r.low:+.2f}, {r.high:+.2f}]"
        assert f"over {r.arms} arms: {number}, n = {r.seeds}" in ledger
        assert text.count(number) >= 2  # in the ledger, in the table of predictors


# --- arms of one's own ----------------------------------------------------------------------------


def with_an_own_arm(specs):
    """Return the specs, and for every seed a user schedule called "mine"."""
    own = {}
    for spec in specs:
        curve = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=spec.recipe.steps)
        own[spec.recipe, spec.seed] = replace(spec, schedule=curve, arm="mine")
    return [*specs, *own.values()]


def test_figure_3_names_user_schedule():
    """Give a user's schedule a colour, a name and a legend entry."""
    specs = with_an_own_arm(
        designs.quality_cost("demo", static_bits=[2, 8], seeds=[0, 1])
    )
    figure = figures.figure_3(
        run_table.table(rows_of(specs)),
        xs=("relative_cost", "noise_exposure"),
        front=True,
    )
    assert "mine" in {t.get_text() for t in figure.axes[0].texts}
    assert "own schedule" in {t.get_text() for t in figure.legends[0].get_texts()}
    drawn = {
        matplotlib.colors.to_hex(line.get_color()).upper()
        for line in figure.axes[0].lines
    }
    assert set(style.COLORS.values()) <= drawn
    assert len(set(style.COLORS.values())) == len(style.COLORS)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()  # it lies over no point
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
    assert all(box.y1 <= ax.get_tightbbox().y0 for ax in figure.axes)  # labels and all


@pytest.mark.parametrize(
    ("specs", "draw"),
    [
        (lambda: designs.aggregation("demo", seeds=[0, 1]), figures.figure_5),
        (lambda: designs.deficit_scan("demo", seeds=[0, 1]), figures.figure_8),
    ],
)
def test_figures_accept_user_schedule(specs, draw):
    rows = rows_of(with_an_own_arm(specs()), title="made up")
    for row in rows:
        row["evaluations"] = [
            {"step": s, "valid": {"accuracy": 0.5}, "test": {"accuracy": 0.5}}
            for s in (1, 2)
        ]
    table = run_table.table(rows)
    drawn = draw(
        table[table["kind"] == "deficit"] if draw is figures.figure_8 else table
    )
    drawn.draw_without_rendering()
    assert drawn.get_suptitle() == "2 seeds: no comparison"
    assert "made up" in drawn.description()
    assert all(ax.lines for ax in drawn.axes)


# --- what others wrote ----------------------------------------------------------------------------

HOSTILE = "<script>alert('x')</script>&\""


def test_report_escapes_row_texts(quick, tmp_path):
    specs = [
        replace(s, arm=HOSTILE) if s.arm == "CR" else s
        for s in designs.quality_cost("demo", seeds=[0, 1, 2])
    ]
    bad = {"title": HOSTILE, "error": HOSTILE, "device": HOSTILE}
    rows = [{**row, **bad} for row in rows_of(specs)]
    for row in rows:
        row["provenance"] = {**row["provenance"], "versions": {"torch": HOSTILE}}
    shown = written(rows, tmp_path)
    assert HOSTILE not in shown
    assert "<script>" not in shown
    assert html.unescape(shown).count(HOSTILE) > 10  # headings, arms, evidence, stores
    evidence = re.search(
        r"<details><summary>1 effect</summary><ul><li>([^\n]*)</li>",
        shown.split("Claims of the paper</h2>")[1].split("trades quality")[1],
    )
    assert html.escape(HOSTILE, quote=False).split("&amp;")[0] in evidence[1].replace(
        "&#39;", "'"
    )
