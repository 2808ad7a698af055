"""Tables, captions and findings of analyses on synthetic runs, as golden files."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from helpers import quietly, refused, row_of

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import (
    aggregation,
    captions,
    cifar_tests,
    claims,
    critical_periods,
    deficit_dates,
    equal_cost,
    figure_data,
    int8_comparison,
    paper_comparison,
    paper_numbers,
    predictors,
    quality_cost,
    report,
    row_tables,
    run_groups,
    statistics,
)
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.experiments.spec import key_of as spec_key
from cpt_lab.paths import paper_dir
from tests.analysis.synthetic import changed, lost, rows_of, runs_of, text_of

pytestmark = [
    pytest.mark.usefixtures("few_preregistered"),
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]

demo = partial(designs.quality_cost, "demo", static_bits=[2, 5, 8], seeds=range(3))
paper = partial(designs.quality_cost, "paper", seeds=[0])
by_seed = partial(rows_of, noise=0.0)


def compare(golden, name, texts):
    """Compare titled texts and tables with a golden file."""
    parts = [f"=== {title}\n{text_of(result)}\n" for title, result in texts]
    golden(f"tables/{name}.txt", "\n".join(parts))


def noise(arm, seed):
    return 0.002 * ((7 * seed + 3 * len(arm) + ord(arm[-1])) % 5)


def rising(sign, start=0.5, scale=0.1):
    """Return a quality that rises with cost, with noise by arm and seed."""

    def value(spec):
        gain = scale * spec.relative_cost + noise(spec.arm, spec.seed) / 10
        return start + sign * gain

    return value


# --- quality against cost -------------------------------------------------------------------------


def quality_cost_tables():
    rows = by_seed(demo(), lambda s: 0.5 + 0.1 * s.seed)
    runs = table(rows)
    yield "by arm, 10 points more per seed", quality_cost.by_arm(runs)
    rows[0] |= {"status": "diverged", "metrics": []}
    rows[1] |= {"status": "failed", "metrics": [], "error": "took longer than 60 s"}
    yield "one run diverged, one failed", quality_cost.summary(table(rows))
    text = table(by_seed(demo("pydoc"), rising(-1, 100, 10), "perplexity"))
    yield "perplexity that falls with cost", quality_cost.summary(text)
    two = demo(schedules=["CR"], static_bits=[6], q_max=[6, 8])
    yield "two q_max", quality_cost.summary(runs_of(two))
    columns = ["q_max", "arm", "relative_cost", "noise_exposure"]
    converted = quality_cost.relative_to_largest(runs_of(two))
    yield "relative to q_max 8", converted[columns].drop_duplicates()
    large = runs_of(paper("cifar10", q_max=[8]), lambda s: 0.6)
    yield "paper scale", quality_cost.summary(large)
    uneven = [s for s in demo(seeds=range(4)) if s.seed < 2 or s.arm != "static 5"]

    def value(spec):
        return 0.5 + 0.1 * spec.relative_cost + 0.3 * (spec.seed > 1)

    yield "static 5 has two of four seeds", quality_cost.summary(runs_of(uneven, value))
    (section,) = quality_cost.sections(runs_of(demo(seeds=[0])))
    yield f"section of one seed: {section.title}", section.table


def findings():
    four = partial(demo, static_bits=[8], seeds=range(4))
    yield "rises with cost", runs_of(four(), rising(1))
    yield "falls with cost", runs_of(four(), rising(-1))
    signs = (0.1, -0.1, 0.1, -0.1)
    yield "no relation", runs_of(four(), lambda s: signs[s.seed] * s.relative_cost)
    yield "all alike", runs_of(four())
    gains = (0.01, 0.02, 0.03, 0.04)  # t of 3.9 at 3 degrees of freedom: p .03
    runs = runs_of(four(), lambda s: 0.5 + gains[s.seed] * (s.arm == "CR"))
    yield "CR gains at p .03, of ten", runs
    yield "CR gains at p .03, alone", runs[runs["arm"].isin(["CR", "static 8"])]
    text = runs_of(four("pydoc"), rising(-1, 100, 10), "perplexity")
    yield "perplexity falls with cost", text
    rises = runs_of(demo(), rising(1))
    yield "one seed", rises[rises["seed"] == 0]
    yield "two seeds", rises[rises["seed"] < 2]
    more = runs_of(demo(schedules=["CR"], static_bits=[6], seeds=[0, 1], q_max=[6]))
    yield "two seeds at q_max 6", pd.concat([rises, more])
    yield "static alone", rises[rises["savings"] == "static"]
    yield "schedules alone", rises[rises["savings"] != "static"]
    specs = demo(static_bits=[6], q_max=[6, 8]) + demo(schedules=[], static_bits=[8])
    top = {6: "static 6", 8: "static 8"}
    yield "two q_max", runs_of(specs, lambda s: 0.5 + 0.1 * (s.arm == top[s.q_max]))
    graph = {"schedules": ["CR"], "static_bits": [8], "seeds": range(3)}
    both = quietly(designs.quality_cost, "demo", "digits-graph", **graph)
    both += quietly(designs.q_agg, "demo", "digits-graph", **graph)
    gain = {"fp": 0.1, "quantized": -0.1}

    def value(spec):
        return 0.5 + gain[spec.recipe.aggregation] * (spec.arm == "CR")

    yield "both aggregations", runs_of(both, value)


def caption_texts():
    one = {"schedules": ["CR"], "static_bits": [8]}
    runs = runs_of(demo(**one, seeds=[0, 1]), lambda s: 0.754)
    yield "recipe", captions.caption(runs)
    smoke = runs.assign(scale="smoke")
    yield "demo finding", captions.with_smoke_warning("x", runs)
    yield "smoke finding", captions.with_smoke_warning("x", smoke)
    for given in ({"steps": 1200}, {"batch": 32}):
        longer = runs_of(demo(**one, **given, seeds=[0]))
        yield str(given), captions.training_length(longer)
    cifar = runs_of(paper("cifar10", schedules=["CR"], static_bits=[], q_max=[8]))
    yield "CIFAR-10", captions.training_length(cifar)
    yield "both aggregations", captions.caption(both_aggregations())
    short = {"steps": 64, "n_cycles": 4, "q_min": 2, "seeds": [0], "static_bits": None}
    for q_max in ([8], [6, 8]):
        runs = runs_of(demo(q_max=q_max, **short))
        yield f"short cycles, q_max {q_max}", captions.caption(runs)
    uneven = [s for s in demo() if s.seed < 2 or s.arm == "CR"]
    yield "uneven seeds", captions.seeds_text(runs_of(uneven))


@pytest.mark.slow
def test_quality_cost_tables_have_listed_numbers(golden):
    compare(golden, "quality_cost", quality_cost_tables())


@pytest.mark.slow
def test_quality_cost_findings_follow_runs(golden):
    texts = [(title, quality_cost.finding(runs)) for title, runs in findings()]
    compare(golden, "findings", texts)


def test_captions_state_length_seeds_and_levels(golden):
    compare(golden, "captions", caption_texts())


def test_quality_cost_rejects_mixed_experiments():
    rows = by_seed(demo(seeds=[0]), lambda s: 0.5)
    text = changed(rows, {"task": "language_model"})
    mixtures = {
        "rows mix scales: demo, paper": [*changed(rows[:1], scale="paper"), *rows[1:]],
        "rows mix q_mins: 3, 4": [*changed(rows[:1], {"q_min": 4}), *rows[1:]],
        "rows mix tasks: image, language_model": rows + text,
        "there are no rows": [],
    }
    for message, mixed in mixtures.items():
        refused(message, quality_cost.by_arm, table(mixed))
    one = table(row for row in rows if row["spec"]["arm"] == "CR")
    refused("at least three arms", predictors.rank_correlation, one)


@pytest.mark.slow
def test_sections_drop_uninformative_columns(monkeypatch):
    monkeypatch.setattr(quality_cost, "figure_3", lambda *_, **__: None)

    def columns(rows):
        (section,) = quality_cost.sections(table(rows))
        return set(section.table)

    one_seed = columns(by_seed(demo(seeds=[0]), lambda s: 0.6))
    assert not {"q_max", "std", "failed", "paper"} & one_seed
    rows = by_seed(demo(), lambda s: 0.6 + 0.1 * s.seed)
    assert {"std", "n", "diverged"} < columns(rows)  # also where no run did
    rows[0] |= {"status": "failed", "metrics": [], "error": ""}
    assert "failed" not in columns(rows)
    rows[0] |= {"error": "took longer than 60 s"}  # to be run again
    assert "failed" in columns(rows)
    every = lost(rows, lambda arm, seed: True)
    (section,) = quality_cost.sections(table(every))
    assert (section.table.diverged == 3).all()
    two = runs_of(demo(schedules=["CR"], static_bits=[6], seeds=[0], q_max=[6, 8]))
    (section,) = quality_cost.sections(two)
    assert "q_min 3, q_max 8 and 6, demo scale" in section.title
    assert set(section.table["q_max"]) == {6, 8}


def test_pareto_front_keeps_ties():
    means = [0.8, 0.7, 0.8, 0.8, 0.9, float("nan")]
    costs = [0.5, 0.5, 0.5, 0.6, 0.7, 0.2]
    arms = pd.DataFrame({"relative_cost": costs, "mean": means})
    # beaten: as cheap but worse; dearer and no better; without a result. Two alike do not beat each other
    front = [True, False, True, False, True, False]
    assert quality_cost.pareto(arms).tolist() == front
    assert quality_cost.pareto(arms.assign(mean=-arms["mean"]), -1).tolist() == front


def test_paired_difference_uses_common_seeds():
    specs = demo(schedules=["RR", "RTH"], static_bits=[8], seeds=[0, 1])
    specs = [s for s in specs if (s.arm, s.seed) != ("RTH", 1)]
    quality = {"RR": 0.5, "RTH": 0.7, "static 8": 0.9}
    runs = runs_of(specs, lambda s: quality[s.arm])

    def values(name):
        part = quality_cost.runs_of(runs, name)
        return statistics.by_seed(part, "accuracy")["accuracy"].to_dict()

    assert values("large") == {0: pytest.approx(0.6)}
    assert values("RR") == {0: 0.5, 1: 0.5}
    difference = quality_cost.paired_difference(runs, "static 8", "large")
    assert difference.to_dict() == {0: pytest.approx(0.3)}
    refused("no rows for 'small'; there are RR, RTH, static 8", values, "small")


def test_on_common_seeds_removes_partial_seeds():
    """Keep the seeds that all arms have, and all of them if there is no such seed."""
    specs = [s for s in demo(seeds=range(4)) if s.seed < 2 or s.arm != "static 5"]
    runs = runs_of(specs)
    assert {*quality_cost.on_common_seeds(runs)["seed"]} == {0, 1}
    apart = runs_of(
        [s for s in demo(seeds=range(4)) if (s.seed < 2) == (s.arm != "CR")]
    )
    assert len(quality_cost.on_common_seeds(apart)) == len(apart)
    rows = lost(
        by_seed(demo(seeds=[0]), lambda s: 0.5), lambda arm, _: arm == "CR", "failed"
    )
    for row in rows:
        row["error"] = "MemoryError"
    assert len(quality_cost.on_common_seeds(table(rows))) == len(rows)


# --- aggregation, execution, equal cost, predictors -----------------------------------------------


def both_aggregations(
    gap=0.01, seeds=(0, 1, 2), test_gap=None, splits=("valid", "test")
):
    """Return runs of both aggregations with learning curves, with Q-Agg better by ``gap``.

    ``test_gap`` is that on test nodes; None takes ``gap``.
    """
    gaps = {"valid": gap, "test": gap if test_gap is None else test_gap}
    rows = []
    for spec in designs.aggregation("demo", static_bits=(2, 8), seeds=seeds):
        is_quantized = spec.recipe.aggregation == "quantized"
        values = {
            split: 0.8 + 0.02 * spec.seed + gaps[split] * is_quantized
            for split in splits
        }
        row = row_of(spec, values["test"])
        (metric,) = row["metrics"]
        metrics = [
            {**metric, "split": split, "value": value}
            for split, value in values.items()
        ]
        curve = [
            {"step": t, "precision": "q_max"}
            | {split: {"accuracy": value - 0.1 / t} for split, value in values.items()}
            for t in (1, 2)
        ]
        title = "GCN (FP-Agg) on made up"
        rows.append(row | {"metrics": metrics, "evaluations": curve, "title": title})
    return table(rows)


def aggregation_tables():
    runs = both_aggregations()
    yield "Q-Agg gains 1 point", aggregation.aggregation_difference(runs)
    yield "summary", aggregation.summary(runs)
    yield "finding", aggregation.finding(runs)
    yield "Q-Agg loses 1 point", aggregation.finding(both_aggregations(-0.01))
    lucky = (runs["aggregation"] == "quantized") & (runs["seed"] == 1)
    noisy = runs["valid"].where(~lucky, runs["valid"] - 0.02)
    yield "one seed differs", aggregation.finding(runs.assign(valid=noisy))
    yield "two seeds", aggregation.finding(both_aggregations(seeds=(0, 1)))
    diverged = runs["aggregation"] == "quantized"
    none = runs.assign(diverged=diverged, valid=runs["valid"].where(~diverged, 0.1))
    yield "Q-Agg diverges", aggregation.summary(none)


@pytest.mark.slow
def test_aggregation_tables_pair_runs_by_seed(golden):
    compare(golden, "aggregation", aggregation_tables())
    one = both_aggregations().query("aggregation == 'fp'")
    message = "rows of both aggregations are needed, there are: fp"
    refused(message, aggregation.aggregation_difference, one)


@pytest.mark.parametrize(
    ("splits", "name", "gain"),
    [(("valid", "test"), "validation", 1.0), (("test",), "test", -2.0)],
)
def test_aggregation_figure_and_table_compare_one_accuracy(splits, name, gain):
    """Curves, points, title and table are of validation nodes where there are some."""
    runs = both_aggregations(gap=0.01, test_gap=-0.02, splits=splits)
    shown = aggregation.summary(runs)
    header = f"Q-Agg minus FP-Agg, points of {name} accuracy"
    assert shown[header].tolist() == [f"{gain:+.2f}"] * 2
    verb = "gains" if gain > 0 else "loses"
    assert aggregation.finding(runs).startswith(f"Q-Agg {verb} {abs(gain)} points")

    curves, points = aggregation.figure_5(runs).axes
    assert curves.get_ylabel() == f"{name} accuracy (%)"
    assert points.get_ylabel() == f"Q-Agg minus FP-Agg ({name}, points)"
    ends = {
        line.get_label().split(",")[0]: line.get_ydata()[-1] for line in curves.lines
    }
    assert ends["Q-Agg"] - ends["FP-Agg"] == pytest.approx(gain)
    assert points.lines[0].get_ydata() == pytest.approx([gain] * 3)

    (section,) = aggregation.sections(runs)
    assert section.alt == f"{name} accuracy with FP-Agg and Q-Agg"


EXECUTIONS = {
    ("simulated", False): 0.80,
    ("integer", False): 0.81,
    ("simulated", True): 0.70,
    ("integer", True): 0.70,
}


def execution_rows():
    """Return rows with accuracies by execution, noise by seed and a test loss of twice the error."""
    rows = []
    for spec in designs.execution("demo", "digits", seeds=range(6)):
        noise = np.random.default_rng(spec.seed).normal(0, 0.02)
        value = EXECUTIONS[spec.recipe.execution, spec.recipe.shared_steps] + noise
        row = row_of(spec, value)
        loss = {"name": "loss", "value": 2 * (1 - value)}
        row["metrics"].append({**row["metrics"][0], **loss})
        rows.append({**row, "seconds": 1.0 + spec.recipe.shared_steps})
    return rows


def execution_tables():
    rows = execution_rows()
    (runs,) = int8_comparison.executions(table(rows))
    yield "all", int8_comparison.execution_difference(runs, "accuracy")
    yield "summary", int8_comparison.summary(runs)
    own = [row for row in rows if not row["spec"]["recipe"].get("shared_steps")]
    (runs,) = int8_comparison.executions(table(own))
    yield "own steps", int8_comparison.execution_difference(runs, "accuracy")
    for row in rows:
        if row["spec"]["seed"] == 2 and "execution" in row["spec"]["recipe"]:
            row |= {"status": "diverged", "metrics": [], "evaluations": []}
    (runs,) = int8_comparison.executions(table(rows))
    yield "int8 diverges once", int8_comparison.execution_difference(runs, "accuracy")


@pytest.mark.slow
def test_execution_tables_pair_runs_by_seed(golden):
    compare(golden, "execution", execution_tables())
    rows = execution_rows() + by_seed(demo(seeds=[0]), lambda s: 0.8)
    (rest,) = run_groups.quality_cost_groups(table(rows))
    assert len(rest) == 13
    assert int8_comparison.executions(rest) == []
    assert int8_comparison in report.RESULT_MODULES
    (section,) = int8_comparison.sections(table(rows))
    assert section.title.startswith("Int8 matmuls compared with simulated ones:")


def equal_cost_rows(**given):
    gain = {"RR": 0.0, "ER": -0.05, "static 8": 0.1, "static 4": 0.03}
    gain["RR delayed 10 %"] = -0.02

    def value(spec):
        name = spec.arm.split(",")[0].replace(" at 0.547", "").replace("20 %", "10 %")
        return 0.8 + gain.get(name, 0.07) + 0.01 * spec.seed

    return by_seed(designs.equal_cost("demo", "digits", seeds=range(4), **given), value)


def equal_cost_tables():
    rows = equal_cost_rows()
    yield "effects", equal_cost.equal_cost(table(rows))
    yield "summary", equal_cost.summary(table(rows))
    second = equal_cost_rows(budget=0.546875, delay=0.2)
    yield "two budgets", equal_cost.equal_cost(table(rows + second))
    yield "summary of two budgets", equal_cost.summary(table(rows + second))
    text = designs.equal_cost("demo", "pydoc", seeds=[0, 1])
    runs = runs_of(text, lambda s: 12.0 if s.arm == "RR" else 10.0, "perplexity")
    yield "perplexity", equal_cost.equal_cost(runs)

    def is_lost(arm, seed):
        return arm.startswith("static 4") or (arm, seed) == ("RR", 0)

    yield (
        "static 4 and an RR diverge",
        equal_cost.equal_cost(table(lost(rows, is_lost))),
    )


@pytest.mark.slow
def test_equal_cost_summary_names_base_of_every_line():
    runs = table(equal_cost_rows() + equal_cost_rows(budget=0.546875, delay=0.2))
    effects, shown = equal_cost.equal_cost(runs), equal_cost.summary(runs)
    assert shown["base"].tolist() == effects["base"].tolist()
    assert shown["base"].nunique() == 2
    assert not any("RR" in column for column in shown)


def test_equal_cost_tables_compare_equally_costly_arms(golden):
    compare(golden, "equal_cost", equal_cost_tables())
    runs = table(equal_cost_rows())
    others = runs[~runs.arm.str.startswith("RR")]
    refused("no rows of RR", equal_cost.equal_cost, others)
    (group,) = run_groups.quality_cost_groups(runs)
    assert set(group.arm) == {"RR", "static 8"}
    assert run_groups.equal_cost_groups(group) == []


@pytest.mark.parametrize(
    ("spent", "compared"), [(0.94, False), (0.96, True), (1.04, True), (1.06, False)]
)
def test_equal_cost_allows_five_percent(spent, compared):
    runs = table(equal_cost_rows())
    rr = runs.bitops[runs.arm == "RR"].iloc[0]
    runs.loc[runs.arm == "static 8", "bitops"] = spent * rr
    assert ("static 8" in set(equal_cost.equal_cost(runs).arm)) == compared


def by_cost(spec):
    return 0.5 + 0.1 * spec.relative_cost + 1e-4 * spec.seed


def by_noise(spec):
    return 0.5 - 1e-4 * spec.schedule.noise_exposure() + 1e-4 * spec.seed


def predictor_tables():
    yield "cost decides", predictors.predictors(runs_of(demo(), by_cost))
    yield "noise decides", predictors.predictors(runs_of(demo(), by_noise))
    runs = runs_of(demo(), lambda s: -by_cost(s))
    yield "cheap is better", predictors.predictors(runs)
    rows = by_seed(demo(schedules=["CR", "RR"], seeds=[0]), lambda s: 0.5)
    rows += by_seed(demo("digits-graph", seeds=[0, 1]), by_cost)
    found = predictors.predictors_by_title(table(rows))
    yield "one experiment has too few arms", predictors.summary(found)
    rows = lost(by_seed(demo(), by_cost), lambda arm, seed: (arm, seed) == ("RR", 1))
    found = predictors.predictors_by_title(table(rows))
    yield "an RR diverges", predictors.summary(found)
    signs = (0.1, -0.09)
    runs = runs_of(demo(seeds=[0, 1]), lambda s: 0.5 + signs[s.seed] * s.relative_cost)
    yield "seeds disagree", predictors.rank_correlation(runs)
    yield "one seed", predictors.rank_correlation(runs[runs["seed"] == 0])
    yield "all alike", predictors.rank_correlation(runs_of(demo()))
    apart = runs_of([s for s in demo() if (s.arm == "CR") == (s.seed == 0)], by_cost)
    yield "no common seed", predictors.rank_correlation(apart)
    text = runs_of(demo("pydoc"), lambda s: 100 - 10 * s.relative_cost, "perplexity")
    yield "perplexity", predictors.rank_correlation(text)


@pytest.mark.slow
def test_predictor_tables_identify_deciding_feature(golden):
    compare(golden, "predictors", predictor_tables())
    few = runs_of(demo(schedules=["CR", "RR"]), by_cost)
    refused("there are 3 and 3", predictors.predictors, few)
    assert predictors.predictors_by_title(few) == {}
    assert predictors.summary({}).empty
    one = runs_of(demo(seeds=[0]), by_cost)
    message = "ten arms and two seeds are needed, there are 11 and 1"
    refused(message, predictors.predictors, one)
    message = "all arms have the same accuracy; there is nothing to rank"
    refused(message, predictors.predictors, runs_of(demo()))


# --- critical periods and the preregistered tests of CIFAR ----------------------------------------


def harm(spec):
    """Return 0.9 minus L / 1000 for a deficit of L steps, or twice that at the end."""
    ((start, stop),) = spec.schedule.windows or ((0, 0),)
    factor = 2 if stop == spec.recipe.steps else 1
    return 0.9 + 0.01 * spec.seed - (stop - start) / 1000 * factor


def uncontrolled(loss, seeds=range(4)):
    """Return runs of the nine arms of table 1 with a loss by start and length of the window."""
    specs = designs.deficit_scan(
        "background",
        "cifar10-jpeg/",
        deficit_starts=(244, 488, 975),
        controls=False,
        seeds=list(seeds),
    )

    def value(spec):
        ((start, stop),) = spec.schedule.windows or ((0, 0),)
        lost = loss(start / 3900, (stop - start) / 3900) if stop else 0
        return 0.9 + 0.01 * spec.seed - lost

    return runs_of(specs, value)


def early_is_worse(start, length):
    return 0.02 * length * (1 - start)


def deficit_tables():
    specs = designs.deficit_scan("demo", "digits", seeds=[0, 1, 2])
    runs = runs_of(specs, harm)
    yield "deficits with controls", critical_periods.deficits(runs)
    yield "summary", critical_periods.summary(runs)
    yield "finding", critical_periods.finding(runs)
    rows = lost(
        by_seed(specs, harm), lambda arm, seed: arm == "[0, 200) of 600" and seed == 1
    )
    diverged = critical_periods.summary(table(rows))
    yield "a deficit diverges", diverged[["low precision", "diverged"]]
    columns = [
        "experiment",
        "arm",
        "total",
        "start",
        "stop",
        "place",
        "difference",
        "worse",
    ]
    for scale, dataset in (
        ("demo", "digits-graph"),
        ("smoke", "digits"),
        ("smoke", "digits-graph"),
    ):
        shared = runs_of(designs.deficit_scan(scale, dataset, seeds=[0]), harm)
        yield f"{scale} {dataset}", critical_periods.deficits(shared)[columns]
    text = designs.deficit_scan("demo", "pydoc", seeds=[0, 1])
    runs = runs_of(text, lambda s: 10 + len(s.schedule.windows), "perplexity")
    yield "perplexity", critical_periods.deficits(runs)[columns]
    runs = uncontrolled(early_is_worse)
    yield "without controls", critical_periods.minus_no_deficit(runs)[columns]
    yield "summary without controls", critical_periods.summary(runs)
    yield "table 1 of copies", critical_periods.table_1_beside_paper(runs)
    lengths = critical_periods.table_1_beside_paper(runs.query("start == 0"))
    yield "table 1 without windows", lengths
    losses = {
        "early is worse": early_is_worse,
        "late is worse": lambda start, length: -early_is_worse(start, length),
        "no damage": lambda start, length: 0.0,
    }
    for title, loss in losses.items():
        yield title, critical_periods.finding(uncontrolled(loss))
    two = uncontrolled(lambda start, length: 0.1, range(2))
    yield "two seeds", critical_periods.finding(two)
    large = runs_of(designs.deficit_scan("paper", "imagenet", seeds=[0]))
    yield "table 1 of ImageNet", critical_periods.table_1_beside_paper(large)


@pytest.mark.slow
def test_deficit_tables_compare_with_controls(golden):
    compare(golden, "deficits", deficit_tables())


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "arms"), [("cifar10", 9), ("imagenet", 3)])
def test_table_1_lists_every_paper_number(dataset, arms):
    specs = designs.deficit_scan("paper", dataset, seeds=[0])
    found = critical_periods.table_1(runs_of(specs))
    printed = pd.read_csv(paper_dir() / "numbers.csv")
    printed = printed[(printed.artefact == "table_1") & (printed.dataset == dataset)]
    known = found[found.paper.notna()].set_index("paper_arm")
    assert known.paper.to_dict() == printed.set_index("arm").value.to_dict()
    assert len(known) == len(printed) == arms
    for name, arm in known.arm.items():  # the arm really is what the table's name says
        assert arm.startswith("no deficit" if name == "no deficit" else f"{name} of")
    demo_runs = runs_of(designs.deficit_scan("demo", dataset="cifar10", seeds=[0]))
    assert critical_periods.table_1(demo_runs).paper.isna().all()


@pytest.mark.parametrize("pairs", [0, 1, 2])
@pytest.mark.parametrize("has_controls", [True, False])
def test_deficits_of_few_pairs_are_not_compared(has_controls, pairs):
    """Keep all seeds of the longest deficit, and few of the training that it is compared with."""
    if has_controls:
        specs = designs.deficit_length("demo", "digits", seeds=range(4))
        runs = runs_of(specs, harm)
        longest = max(runs["total_steps"])
    else:
        runs = uncontrolled(early_is_worse)
        longest = min(runs["total_steps"])
    is_baseline = (runs["stop"] == 0) & (runs["total_steps"] == longest)
    is_lost = is_baseline & (runs["seed"] >= pairs)
    runs.loc[is_lost, "accuracy"] = float("nan")

    start_finding = critical_periods.finding(runs).partition(";")[0]
    assert (
        start_finding
        == {
            0: "0 seeds: no comparison",
            1: "1 seed: no comparison",
            2: "2 seeds: no comparison",
        }[pairs]
    )
    arms, _ = critical_periods.compare_deficits(runs)
    last = arms[(arms.experiment == "length") & (arms.place == "start")].iloc[-1]
    assert (last.n, last.pairs) == (4, pairs)
    summary = critical_periods.summary(runs).set_index(["experiment", "low precision"])
    assert summary.loc[("length", last.arm), "worse"] == f"{pairs} of {pairs}"


def test_deficits_reject_unrelated_rows():
    rows = by_seed(designs.deficit_scan("demo", "digits", seeds=[0]), harm)
    other = by_seed(demo(schedules=["CR"], static_bits=[], seeds=[0]), lambda s: 0.9)
    assert run_groups.deficit_groups(table(other)) == []
    (group,) = run_groups.deficit_groups(table(rows + other))
    assert len(group) == len(rows)
    windows = {**rows[0]["spec"]["schedule"], "windows": [[0, 10], [20, 30]]}
    message = "rows of deficits with at most one window"
    for more in (other, changed(rows[:1], schedule=windows)):
        refused(message, critical_periods.deficits, table(rows + more))


def cifar_runs(quality, damage=None):
    """Return runs of figure 3 and, with damages by arm, of table 1; accuracies in percent."""
    specs = grid_specs(cifar_tests.FIGURE_3)
    rows = by_seed(specs, lambda s: quality(s.arm, s.relative_cost, s.seed) / 100)
    if damage is not None:
        specs = grid_specs(cifar_tests.TABLE_1)
        rows += by_seed(
            specs, lambda s: 0.75 + damage.get(s.arm, 0) / 100 + s.seed / 1e5
        )
    return table(rows)


@pytest.mark.slow
def test_cifar_outcomes_follow_preregistered_rules():
    noise = {10: -0.02, 11: 0.01, 12: 0.02, 13: -0.01}
    damage = {cifar_tests.LONGEST_DEFICIT: -1.0, cifar_tests.EARLY_WINDOW: 0.2}
    outcomes_by_slope = {
        3: "as the paper says",
        0: "no difference worth naming",
    }
    for slope, outcome in outcomes_by_slope.items():

        def quality(arm, cost, seed, slope=slope):
            return 70 + (slope + noise[seed]) * np.log2(cost)

        runs = cifar_runs(quality, damage)
        found = cifar_tests.preregistered_tests(runs)
        words = cifar_tests.outcomes(found)
        assert words[0] == outcome
        assert words[2:] == ["as the paper says", "against the paper"]
        assert found[2].estimate.mean == pytest.approx(1.0)
        slopes = cifar_tests.slopes(runs).values
        assert slopes == pytest.approx([slope + noise[seed] for seed in range(10, 14)])
    few = cifar_tests.outcomes(cifar_tests.preregistered_tests(runs.iloc[:7]))
    assert (
        few == ["not complete: 7 of 60 runs"] * 2 + ["not complete: 0 of 36 runs"] * 2
    )


def test_cifar_gains_over_static_subtract_static_line():
    """Measure gains against the line through the static precisions."""
    runs = cifar_runs(lambda arm, cost, seed: 70 + 5 * cost + 1.5 * (arm in SUITE))
    gains = cifar_tests.gains_over_static(runs)
    assert list(gains) == list(SUITE)
    assert gains.to_numpy() == pytest.approx(1.5, abs=1e-6)
    few = runs[runs["arm"].isin(["static 8", *SUITE])]
    message = "at least two static precisions are needed, got 1"
    refused(message, cifar_tests.gains_over_static, few)


# --- numbers printed in the paper -----------------------------------------------------------------


@pytest.mark.slow
def test_paper_comparison_shows_runs_in_paper_units(golden):
    """Compare costs, differences, validation nodes, best epochs and lost runs with printed numbers."""
    specs = paper(
        "ptb", schedules=["CR", "RR"], static_bits=[8], q_max=[8], seeds=[0, 1]
    )
    rows = by_seed(specs, lambda s: 100.0, "perplexity")
    for row, spec in zip(rows, specs, strict=True):
        cost = {"static 8": 9.1555e13, "CR": 7e13, "RR": 5.5e13}[spec.arm]
        row["bitops"] = {"paper": cost + 1e11 * spec.seed}
    rows = lost(rows, lambda arm, seed: (arm, seed) == ("CR", 1))
    specs = paper("voc2012", schedules=["ETV"], seeds=[0, 1, 2])
    rows += by_seed(specs, lambda s: 0.6 + 0.0102 * (s.arm == "ETV"), "map50")
    specs = paper("ogbn-products", schedules=["RR", "RTH"], q_max=[6], seeds=range(3))
    rows += by_seed(specs, lambda s: 0.7 + 0.01 * (s.arm == "RTH"))
    specs = designs.aggregation("paper", "ogbn-arxiv")
    for row, spec in zip(by_seed(specs, lambda s: 0.5), specs, strict=True):
        valid = {
            "split": "valid",
            "value": 0.6 + 0.004 * (spec.recipe.aggregation == "fp"),
        }
        row["metrics"].append({**row["metrics"][0], **valid})
        rows.append(row)
    rows += by_seed(demo("ogbn-arxiv", schedules=["RR", "RTH"]), lambda s: 0.1)
    (spec,) = designs.deficit_length(
        "paper", "imagenet", deficit_lengths=[0], seeds=[0]
    )
    row = row_of(spec, 0.67)
    row["metrics"].append({**row["metrics"][0], "when": "best_test", "value": 0.68})
    compare(golden, "paper", [("all", paper_comparison.summary(table([*rows, row])))])


def shown_for(runs, **selected):
    """Return the comparison of some printed numbers with runs, one line per number."""
    numbers = paper_numbers.numbers()
    for name, value in selected.items():
        numbers = numbers[numbers[name] == value]
    return paper_comparison.summary(runs, numbers)


@pytest.mark.parametrize(
    ("changes", "is_left_out"),
    [
        ({"preset": "authors", "recipe": {"n_cycles": 8}}, True),
        ({"preset": "authors"}, True),
        ({"q_grad": 4}, True),
        ({"recipe": {"n_cycles": 9}}, False),
        ({"recipe": {"steps": 100}}, False),
        ({"recipe": {"evaluate_every": 3}}, False),
    ],
)
def test_paper_comparison_pools_one_recipe_alone(changes, is_left_out):
    """Show a value per recipe, and none of the authors' preset or of other bits of gradients."""
    specs = paper("ptb", schedules=["RR"], static_bits=[8], q_max=[8])
    rows = by_seed(specs, lambda s: 100.0, "perplexity")
    for row in rows:
        row["bitops"] = {"paper": 6e13}
    others = changed(rows, **changes)
    others = [
        {**row, "key": spec_key(row["spec"]), "bitops": {"paper": 9e13}}
        for row in others
    ]

    def measured(all_rows):
        shown = shown_for(table(all_rows), dataset="ptb", metric="bitops", arm="RR")
        (value,) = set(shown["ours (+- std, or [95 %])"])
        return value

    assert measured(rows) == "6.00 (n = 1)"
    both = {measured([*rows, *others]), measured([*others, *rows])}
    assert len(both) == 1
    if is_left_out:
        assert both == {"6.00 (n = 1)"}
        return
    parts = both.pop().split("; ")
    assert sorted(part.rpartition(": ")[2] for part in parts) == [
        "6.00 (n = 1)",
        "9.00 (n = 1)",
    ]
    assert len({part.rpartition(": ")[0] for part in parts}) == 2


@pytest.mark.parametrize("newest_first", [False, True])
def test_paper_comparison_orders_stand_ins(newest_first):
    """Show FP-Agg at the largest q_max, and name it, in any order of rows."""
    arguments = {"schedules": ["RR", "RTH"], "static_bits": [6, 8], "q_max": [6, 8]}
    rows = by_seed(demo("digits-graph", **arguments), lambda s: 0.5)
    quantized = demo("digits-graph", aggregation="quantized", **arguments)
    rows = [*by_seed(quantized, lambda s: 0.7 + 0.1 * (s.arm == "RR")), *rows]
    for row in rows:
        name = run_groups.AGGREGATION_NAMES[row["spec"]["recipe"]["aggregation"]]
        row["title"] = f"GCN ({name})"
    shown = shown_for(
        table(rows[::-1] if newest_first else rows),
        artefact="figure_6",
        dataset="ogbn-arxiv",
        minus="static",
    )
    shown = shown[shown["data and scale"].str.startswith("stand-in")]
    assert len(shown)
    assert set(shown["ours (+- std, or [95 %])"]) == {"+0.00 [+0.00, +0.00] (n = 3)"}
    assert set(shown["data and scale"]) == {
        "stand-in: GCN (FP-Agg), q_max 8, 100 steps, demo scale"
    }


def test_printed_numbers_match_task():
    """Select the numbers of the data set at paper scale, and of the task at others."""
    large = runs_of(paper("ogbn-arxiv", q_max=[8]))
    lines = paper_numbers.figure_numbers(large)
    assert set(lines["dataset"]) == {"ogbn-arxiv"}
    assert not lines["own_data"].any()
    small = runs_of(quietly(designs.quality_cost, "demo", "digits-graph", seeds=[0]))
    lines = paper_numbers.figure_numbers(small)
    assert set(lines["model"]) == {"gcn"}
    assert lines["own_data"].all()


def test_quality_cost_shows_printed_accuracies(tmp_path, monkeypatch):
    """Show a printed accuracy at paper scale alone, and no printed difference."""
    line = {"artefact": "figure_3", "dataset": "digits", "model": "mlp6", "arm": "CR"}
    line |= {"q_max": 8, "metric": "accuracy", "value": 61.5, "unit": "%"}
    difference = {**line, "minus": "static", "value": 2.0, "unit": "points"}
    more = pd.DataFrame([difference, {**line, "place": "made up for this test"}])
    numbers = pd.concat([pd.read_csv(paper_dir() / "numbers.csv"), more])
    numbers.to_csv(tmp_path / "numbers.csv", index=False)
    monkeypatch.setattr(paper_numbers, "paper_dir", lambda: tmp_path)
    rows = by_seed(demo(), lambda s: 0.6)
    small = quality_cost.summary(table(rows))
    assert set(small["paper"]) == {"not in the paper"}
    shown = quality_cost.summary(table(changed(rows, scale="paper"))).set_index("arm")
    assert shown.loc["CR", "accuracy %"] == "60.0"
    assert shown.loc["CR", "paper"] == "61.5 (made up for this test)"
    assert shown.loc["RR", "paper"] == "drawn, no number printed"


# --- tables of stored rows ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "column", "cells"),
    [
        ({"ladder": "mx"}, "ladder", ["affine", "mx"]),
        ({"execution": "integer"}, "execution", ["simulated", "integer"]),
        ({"shared_steps": True}, "shared_steps", [False, True]),
        ({"autocast": "bfloat16"}, "autocast", ["", "bfloat16"]),
        ({"milestones": (0.3, 2 / 3)}, "milestones", ["0.5 0.75", "0.3 0.666667"]),
        ({"evaluate_every": 7}, "evaluate_every", [None, 7]),
        ({"n_cycles": 2}, "n_cycles", [None, 2]),
    ],
)
def test_row_table_separates_recipes(changes, column, cells):
    specs = demo(schedules=["CR"], static_bits=[])
    others = demo(schedules=["CR"], static_bits=[], **changes)
    cells = [getattr(specs[0].recipe, column) if c is None else c for c in cells]
    rows = by_seed(specs, lambda s: 0.5) + by_seed(others, lambda s: 0.7)
    recipes = {spec.key: spec.recipe for spec in [*specs, *others]}
    (shown,) = row_tables.by_arm(table(rows), recipes).values()
    assert list(shown) == ["arm", column, "seeds", "relative cost", "accuracy", "std"]
    assert shown[column].to_list() == cells
    assert shown["accuracy"].to_list() == ["50.0", "70.0"]
    assert shown["seeds"].to_list() == [3, 3]


@pytest.mark.parametrize(("column", "value"), [("preset", "authors"), ("q_grad", 4)])
def test_row_table_separates_specs(column, value):
    specs = demo(schedules=["CR"], static_bits=[])
    others = [replace(spec, **{column: value}) for spec in specs]
    rows = by_seed(specs, lambda s: 0.5) + by_seed(others, lambda s: 0.7)
    recipes = {spec.key: spec.recipe for spec in [*specs, *others]}
    (shown,) = row_tables.by_arm(table(rows), recipes).values()
    assert shown[column].to_list() == [getattr(specs[0], column), value]
    assert shown["accuracy"].to_list() == ["50.0", "70.0"]


def test_row_table_counts_runs_of_one_seed():
    """Show the number of runs where schedules of one name are one arm."""
    specs = demo(schedules=["CR", "RR"], static_bits=[])
    renamed = [replace(s, arm="own") for s in specs]
    rows = by_seed([*specs, *renamed], lambda s: 0.5)
    recipes = {spec.key: spec.recipe for spec in [*specs, *renamed]}
    (shown,) = row_tables.by_arm(table(rows), recipes).values()
    assert shown["arm"].to_list() == ["CR", "RR", "own"]
    assert shown["seeds"].to_list() == [3, 3, 3]
    assert shown["runs"].to_list() == [3, 3, 6]


# --- groups of runs -------------------------------------------------------------------------------


def test_run_groups_separate_scales_aggregations_and_deficits():
    small = by_seed(demo(schedules=["CR"], static_bits=[8], seeds=[0]), lambda s: 0.5)
    large = by_seed(paper("cifar10", schedules=["CR"], q_max=[8]), lambda s: 0.5)
    groups = run_groups.quality_cost_groups(table(small + large))
    assert [group.scale.iloc[0] for group in groups] == ["paper", "demo"]
    (top,) = run_groups.top_groups(table(small))
    assert top.arm.to_list() == ["static 8"]
    specs = designs.aggregation("demo", static_bits=(8,), seeds=[0, 1])
    rows = lost(
        by_seed(specs, lambda s: 0.8),
        lambda _, seed: seed == 0,
        "failed",
        "took longer than 9 s",
    )
    (group,) = run_groups.aggregation_groups(table(rows))
    assert set(group["seed"]) == {1}
    runs = runs_of(designs.deficit_scan("smoke", "digits", seeds=[0]), harm)
    found = run_groups.deficit_groups(pd.concat([runs, runs.assign(q_max=6)]))
    assert sorted(group["q_max"].unique().tolist() for group in found) == [[6], [8]]


def with_gradients(rows, bits, gain=0.1, arms=()):
    """Return rows, and rows of some arms, or of all, with gradients of other bits and a higher accuracy."""
    more = []
    for row in changed(rows, q_grad=bits):
        if not arms or row["spec"]["arm"] in arms:
            key = spec_key(row["spec"])
            metrics = [{**m, "value": m["value"] + gain} for m in row["metrics"]]
            more.append({**row, "key": key, "metrics": metrics})
    return [*rows, *more]


def specs_of_graphs():
    """Return runs of both aggregations, of two fanouts and of two numbers of cycles."""
    specs = list(grid_specs("ogbn-products/fanout"))
    for n in (2, 4):
        specs += demo("digits-graph", schedules=["CR"], n_cycles=n)
    return specs


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    ("split", "specs_of"),
    [
        (run_groups.quality_cost_groups, lambda: demo(schedules=["CR"])),
        (quality_cost.recipe_groups, lambda: demo(schedules=["CR"], q_max=[6, 8])),
        (run_groups.top_groups, lambda: demo(q_max=[6, 8], schedules=["CR"])),
        (run_groups.aggregation_groups, specs_of_graphs),
        (run_groups.cycle_groups, specs_of_graphs),
        (run_groups.fanout_groups, specs_of_graphs),
        (
            partial(run_groups.fanout_groups, aggregations=True),
            specs_of_graphs,
        ),
        (
            run_groups.deficit_groups,
            lambda: designs.deficit_scan("demo", "digits", seeds=[0, 1]),
        ),
        (
            deficit_dates.dated_groups,
            lambda: designs.deficit_scan("demo", "digits", seeds=[0, 1]),
        ),
        (
            run_groups.equal_cost_groups,
            lambda: designs.equal_cost("demo", "digits", seeds=[0, 1]),
        ),
        (
            partial(figure_data.experiments, "figure_3"),
            lambda: demo(schedules=["CR"], q_max=[6, 8]),
        ),
    ],
)
def test_run_groups_separate_bits_of_gradients(split, specs_of, newest_first):
    rows = by_seed(specs_of(), lambda s: 0.5)
    groups_of_rows = split(table(rows))
    assert groups_of_rows
    both = with_gradients(rows, 4)
    groups = split(table(both[::-1] if newest_first else both))
    assert len(groups) == 2 * len(groups_of_rows)
    for group in groups:
        has_4_bits = group["q_grad"] == 4
        assert has_4_bits.all() or not has_4_bits.any()
        name = run_groups.experiment_name(group)
        assert ("gradients of 4 bits" in name) == has_4_bits.all()
        assert ("gradients of 4 bits" in captions.caption(group)) == has_4_bits.all()


def test_gradient_groups_are_evaluated_at_gradient_bits():
    """Leave out static 6 with 6-bit gradients that is evaluated at 8 bits."""
    specs = demo(schedules=[], static_bits=[6], q_max=[6, 8])
    rows = by_seed(specs, lambda s: 0.5)
    is_eight = [row["spec"]["q_max"] == 8 for row in rows]
    eight = [
        row for row, is_at_eight in zip(rows, is_eight, strict=True) if is_at_eight
    ]
    more = with_gradients(eight, 6)[len(eight) :]
    (group,) = run_groups.gradient_groups(table(rows + more), "static 6")
    assert sorted(zip(group["q_max"], group["q_grad"], strict=True)) == (
        [(6, 6)] * 3 + [(8, 8)] * 3
    )


@pytest.mark.parametrize("newest_first", [False, True])
def test_claims_separate_bits_of_gradients(newest_first):
    """Compare no schedule with 4-bit gradients with static precision with 8-bit gradients."""
    rows = rows_of(demo(schedules=["CR"], static_bits=[8]), lambda s: 0.5)
    both = with_gradients(rows, 4, arms=["CR"])
    ordered = both[::-1] if newest_first else both
    entries = [
        claims.judge_claims(table(of_rows), ["cpt_improves"])[0]
        for of_rows in (rows, ordered)
    ]
    assert entries[1].evidence() == entries[0].evidence()
    assert len(entries[0].evidence()) == 1

    (entry,) = claims.judge_claims(table(with_gradients(rows, 4)), ["cpt_improves"])
    assert [effect.n for effect, _ in entry.effects] == [3, 3]
    assert "gradients of 4 bits, 3 to 8 bits" in entry.evidence()[1]


def test_equal_cost_groups_separate_lengths():
    """Keep arms that stop early with the training whose budget they have."""
    specs = designs.equal_cost("demo", "digits", seeds=[0])
    longer = designs.equal_cost("demo", "digits", seeds=[0], steps=900)
    groups = run_groups.equal_cost_groups(runs_of([*specs, *longer]))
    assert [set(group["arm"]) for group in groups] == [
        {spec.arm for spec in specs},
        {spec.arm for spec in longer},
    ]


def test_run_groups_separate_presets():
    runs = runs_of(designs.aggregation("demo", static_bits=(8,), seeds=[0, 1]))
    both = pd.concat([runs, runs.assign(preset="authors")], ignore_index=True)
    groups = run_groups.aggregation_groups(both)
    assert [set(group["preset"]) for group in groups] == [{"ours"}, {"authors"}]


@pytest.mark.parametrize(
    "analysis",
    [
        quality_cost.by_arm,
        quality_cost.finding,
        quality_cost.figure_3,
        lambda runs: quality_cost.paired_difference(runs, "CR", "static 8"),
        predictors.rank_correlation,
        lambda runs: list(quality_cost.sections(runs)),
        lambda runs: claims.judge_claims(runs, ["cpt_improves"]),
    ],
)
def test_analyses_reject_two_runs_of_one_seed(analysis):
    """Refuse a schedule of the same name with other settings, instead of taking one or the mean of both."""
    rows = by_seed(demo(), by_cost)
    other = [row for row in rows if row["spec"]["arm"] == "CR"][:1]
    (again,) = with_gradients(other, 8)[1:]
    message = "expected one run per arm and seed, got another run of 'CR' with seed 0"
    refused(message, analysis, table([*rows, {**again, "key": "other schedule"}]))


@pytest.mark.parametrize(
    ("specs_of", "analysis"),
    [
        (
            lambda: designs.deficit_length("demo", "digits", seeds=[0, 1]),
            lambda runs: list(critical_periods.sections(runs)),
        ),
        (
            lambda: designs.equal_cost("demo", "digits", seeds=[0, 1]),
            lambda runs: list(equal_cost.sections(runs)),
        ),
        (
            lambda: designs.aggregation("demo", seeds=[0, 1]),
            lambda runs: list(aggregation.sections(runs)),
        ),
    ],
)
def test_sections_reject_two_runs_of_one_seed(specs_of, analysis):
    rows = by_seed(specs_of(), lambda s: 0.5)
    message = "expected one run per arm and seed, got another run of"
    refused(message, analysis, table([*rows, {**rows[-1], "key": "other settings"}]))


def test_quality_cost_rejects_several_gradient_bits():
    """Refuse gradients of several bits at one q_max, also where no seed is repeated."""
    rows = by_seed(demo(), lambda s: 0.5)
    mixed = [
        *rows[:-1],
        *changed(rows[-1:], q_grad=4),
    ]
    refused("rows of q_max 8 mix q_grads: 4, 8", quality_cost.by_arm, table(mixed))


def test_figure_data_prefers_scale_and_seeds():
    """Put larger scales first, and last those with few schedules or a single seed."""
    demo_rows = by_seed(demo(), lambda s: 0.8)
    background = by_seed(grid_specs("cifar10-jpeg/figure_3"), lambda s: 0.7)
    few = by_seed(paper("cifar10", schedules=["CR"], q_max=[8]), lambda s: 0.9)

    def scales(rows):
        found = figure_data.experiments("figure_3", table(rows))
        return [part["scale"].iloc[0] for part in found]

    rows = [*demo_rows, *background, *few]
    assert scales(rows) == ["background", "demo", "paper"]
    best = figure_data.best_rows("figure_3", table(rows))
    assert set(best["scale"]) == {"background"}
    assert set(SUITE) <= set(best["arm"])
    one_seed = [row for row in background if row["spec"]["seed"] == 10]
    assert scales([*demo_rows, *one_seed]) == ["demo", "background"]
    two = runs_of(demo(q_max=[6, 8]))
    (found,) = figure_data.experiments("figure_3", two)
    assert set(found["q_max"]) == {6, 8}
