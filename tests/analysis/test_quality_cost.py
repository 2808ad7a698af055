import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cpt_core.schedules.cost import relative_cost
from cpt_lab.analysis import (
    aggregation,
    captions,
    figures,
    metrics,
    paper_numbers,
    predictors,
    quality_cost,
    statistics,
    style,
)
from cpt_lab.analysis.run_table import OtherDataWarning, committed, load, table, tuned
from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import key_of
from cpt_lab.paths import paper_dir
from cpt_lab.sweeps import stores
from tests.helpers import PROVENANCE, quietly, refused, row_of, stored_row, write_rows


def made_up(accuracy, seeds=(0, 1, 2), statics=(2, 5, 8)):
    """Return a table of ``rows_of``."""
    return table(rows_of(accuracy, seeds, statics))


def rows_of(accuracy, seeds=(0, 1, 2), statics=(2, 5, 8)):
    """Return rows of a grid whose accuracies are a function of arm, seed and cost."""
    specs = designs.quality_cost("demo", static_bits=statics, seeds=seeds)
    return [
        stored_row(s, accuracy(s.arm, s.seed, relative_cost(s.schedule.bits(), 8)))
        for s in specs
    ]


def changed(rows, recipe=None, **spec):
    """Return the rows with some fields of their specs replaced."""
    return [
        {
            **r,
            "spec": {
                **r["spec"],
                **spec,
                "recipe": {**r["spec"]["recipe"], **(recipe or {})},
            },
        }
        for r in rows
    ]


def as_perplexity(rows):
    out = changed(rows, {"task": "language_model"})
    for row in out:
        row["metrics"] = [{**m, "name": "perplexity"} for m in row["metrics"]]
    return out


def caption_of(figure):
    """Return the caption of a figure as one line."""
    (caption,) = (
        text.get_text() for text in figure.texts if text is not figure._suptitle
    )
    return " ".join(caption.split())


def test_by_arm_returns_mean_and_deviation():
    arms = quality_cost.by_arm(
        made_up(lambda arm, seed, cost: 0.5 + 0.1 * seed)
    ).set_index("arm")
    assert arms.loc["CR", "mean"] == pytest.approx(0.6)
    assert arms.loc["CR", "std"] == pytest.approx(0.1)  # n - 1
    assert arms.loc["CR", "n"] == 3
    assert arms.loc["RR", "savings"] == "large"
    assert arms.loc["static 5", "relative_cost"] == pytest.approx(105 / 192)


def test_by_arm_scores_diverged_runs_as_chance():
    """Count diverged runs at chance level, and exclude failed runs."""
    rows = rows_of(lambda arm, seed, cost: 0.5)
    rows[0] |= {"status": "diverged", "metrics": []}
    rows[1] |= {"status": "failed", "metrics": [], "error": "took longer than 60 s"}
    runs = table(rows)
    first = quality_cost.by_arm(runs).iloc[0]
    assert (first["n"], first["diverged"], first["failed"], first["mean"]) == (
        2,
        1,
        1,
        pytest.approx(0.3),
    )
    assert "2 runs diverged or failed" in caption_of(quality_cost.figure_3(runs))


def cost_line(runs, **options):
    """Return the rank correlation of quality with relative cost."""
    return (
        predictors.rank_correlation(runs, **options)
        .set_index("predictor")
        .loc["relative_cost"]
    )


def test_spearman_averages_tied_ranks():
    x, ys = (
        np.array([1.0, 2, 2, 3, 4, 4]),
        np.array([[5.0, 5, 1, 2, 2, 7], [3, 1, 1, 1, 2, 2]]),
    )
    expected = [stats.spearmanr(x, y).statistic for y in ys]
    assert statistics.spearman(x, ys).tolist() == pytest.approx(expected)


def test_rank_correlation_spans_disagreeing_seeds():
    """Widen the interval if quality rises with cost in one seed and falls in the next."""
    line = cost_line(
        made_up(lambda arm, seed, cost: 0.5 + (0.1, -0.09)[seed] * cost, seeds=(0, 1))
    )
    assert (line.strength, line.low, line.high) == pytest.approx((1, -1, 1))


def test_rank_correlation_of_few_seeds():
    one = made_up(lambda arm, seed, cost: cost, seeds=(0,))
    assert cost_line(one).strength == pytest.approx(1)
    assert np.isnan(cost_line(one)[["low", "high"]].to_list()).all()
    alike = cost_line(made_up(lambda arm, seed, cost: 0.5))
    assert np.isnan([alike.strength, alike.low, alike.high]).all()
    apart = table(
        r
        for r in rows_of(lambda arm, seed, cost: cost)
        if (r["spec"]["arm"] == "CR") == (r["spec"]["seed"] == 0)
    )
    assert cost_line(apart).strength == pytest.approx(
        1
    )  # no seed that all arms have: of what there is
    assert np.isnan(cost_line(apart).low)


def test_quality_cost_rejects_mixed_experiments():
    rows = rows_of(lambda arm, seed, cost: 0.5)
    refused(
        "rows mix scales: demo, paper",
        quality_cost.by_arm,
        table([*changed(rows[:1], scale="paper"), *rows[1:]]),
    )
    refused(
        "rows mix q_mins: 3, 4",
        quality_cost.by_arm,
        table([*changed(rows[:1], {"q_min": 4}), *rows[1:]]),
    )
    refused("there are no rows", quality_cost.by_arm, table([]))
    refused(
        "rows mix tasks: image, language_model",
        quality_cost.by_arm,
        table(rows + as_perplexity(rows)),
    )
    refused(
        "at least three arms",
        predictors.rank_correlation,
        table(r for r in rows if r["spec"]["arm"] == "CR"),
    )


def test_comparison_shows_paper_numbers(tmp_path, monkeypatch):
    same = {
        "artefact": "figure_3",
        "dataset": "digits",
        "model": "mlp6",
        "arm": "CR",
        "q_max": 8,
        "metric": "accuracy",
    }
    made_up_line = {
        **same,
        "value": 61.5,
        "unit": "%",
        "place": "made up for this test",
    }
    against = {
        **same,
        "minus": "static",
        "value": 2.0,
        "unit": "points",
        "place": "no accuracy, but a difference",
    }
    lines = [
        pd.read_csv(paper_dir() / "numbers.csv"),
        pd.DataFrame([against, made_up_line]),
    ]
    pd.concat(lines).to_csv(tmp_path / "numbers.csv", index=False)
    monkeypatch.setattr("cpt_lab.analysis.paper_numbers.paper_dir", lambda: tmp_path)
    rows = rows_of(lambda arm, seed, cost: 0.6)
    small = quality_cost.summary(table(rows))
    assert set(small["paper"]) == {
        "not in the paper"
    }  # a small run is never put beside a number of the paper
    shown = quality_cost.summary(table(changed(rows, scale="paper"))).set_index("arm")
    assert shown.loc["CR", ["accuracy %", "paper"]].to_list() == [
        "60.0",
        "61.5 (made up for this test)",
    ]
    assert shown.loc["RR", "paper"] == "drawn, no number printed"


def test_sections_drop_uninformative_columns(monkeypatch):
    monkeypatch.setattr(quality_cost, "figure_3", lambda *_, **__: None)
    (section,) = quality_cost.sections(made_up(lambda arm, seed, cost: 0.6, seeds=(0,)))
    assert not {"q_max", "std", "failed", "paper"} & set(section.table)
    rows = rows_of(lambda arm, seed, cost: 0.6 + 0.1 * seed)
    (section,) = quality_cost.sections(table(rows))
    assert {"std", "n", "diverged"} < set(section.table)  # also where no run did
    for error, again in (
        ("", False),
        ("took longer than 60 s", True),
    ):  # the second is to be run again
        rows[0] |= {"status": "failed", "metrics": [], "error": error}
        (section,) = quality_cost.sections(table(rows))
        assert ("failed" in section.table) == again


def test_figure_3_names_failed_static_precision():
    """Name a precision whose accuracy lies below the axis."""
    rows = made_up(lambda arm, seed, cost: 0.1 if arm == "static 2" else 0.9)
    figure = quality_cost.figure_3(rows)
    assert figure.axes[0].get_title(loc="right") == "below the axis: static 2 bits 10 %"
    assert figure.axes[0].get_ylim()[0] > 10
    assert "not a result" not in figure.get_suptitle()
    smoke = table(changed(rows_of(lambda arm, seed, cost: 0.5), scale="smoke"))
    assert (
        quality_cost.figure_3(smoke)
        .get_suptitle()
        .startswith("smoke scale: not a result")
    )


def test_on_common_seeds_removes_partial_seeds():
    """Compare means only on seeds that all arms have."""

    def accuracy(arm, seed, cost):
        return 0.5 + 0.1 * cost + 0.3 * (seed > 1)

    few = rows_of(accuracy, seeds=(0, 1), statics=(5, 8))
    more = [
        r
        for r in rows_of(accuracy, seeds=(2, 3), statics=(5, 8))
        if not r["spec"]["arm"].startswith("static 5")
    ]
    runs = table(few + more)
    assert sorted(quality_cost.on_common_seeds(runs)["seed"].unique()) == [0, 1]
    front = quality_cost.summary(runs).set_index("arm")
    assert front["n"].to_dict()["static 5"] == 2
    assert front["n"].to_dict()["CR"] == 4
    assert (
        front.loc["static 5", "Pareto front"] == "yes"
    )  # 80 % of RR with all its seeds would beat its 55 %
    figure = quality_cost.figure_3(runs)
    assert "; 2 seeds, demo scale;" in caption_of(figure)
    drawn = np.concatenate(
        [line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata())]
    )
    assert drawn.max() < 61
    apart = table(
        [r for r in few if r["spec"]["arm"] != "CR"]
        + [r for r in more if r["spec"]["arm"] == "CR"]
    )
    assert len(quality_cost.on_common_seeds(apart)) == len(apart)  # no such seed
    uneven = table(few + [r for r in more if r["spec"]["arm"] == "CR"][:1])
    assert captions.seeds_text(uneven) == "2 to 3 seeds"
    failed = [
        {**r, "status": "failed", "metrics": [], "error": "MemoryError"}
        if r["spec"]["arm"] == "CR"
        else r
        for r in few
    ]
    assert len(quality_cost.on_common_seeds(table(failed))) == len(few)


def test_rank_correlation_uses_common_seeds():
    """Exclude seeds that only one arm has from the rank correlation."""

    def accuracy(arm, seed, cost):
        return cost + 0.1 * seed + 0.2 * (len(arm) * (seed + 1) % 3)

    few, more = rows_of(accuracy, seeds=(0, 1)), rows_of(accuracy, seeds=(0, 1, 2, 3))
    extra = [r for r in more if r["spec"]["arm"] == "RR" and r["spec"]["seed"] > 1]
    for r in extra:
        r["metrics"][0]["value"] = 99.0
    assert cost_line(table(few + extra)).equals(cost_line(table(few)))


def both_aggregations(gap=0.01, seeds=(0, 1, 2)):
    """Return runs of both aggregations, with Q-Agg better by ``gap`` for every seed."""
    rows = []
    for spec in designs.aggregation("demo", static_bits=(2, 8), seeds=seeds):
        value = 0.8 + 0.02 * spec.seed + gap * (spec.recipe.aggregation == "quantized")
        curve = [
            {
                "step": s,
                "precision": "q_max",
                "valid": {"accuracy": value - 0.1 / s},
                "test": {},
            }
            for s in (1, 2)
        ]
        rows.append(
            row_of(spec, value)
            | {"title": "GCN (FP-Agg) on made up", "evaluations": curve}
        )
    return table(rows)


def test_aggregation_difference_pairs_by_seed():
    found = aggregation.aggregation_difference(both_aggregations())
    assert found["difference"].to_numpy() == pytest.approx(np.full(6, 0.01))
    assert sorted(found["arm"].unique()) == ["static 2", "static 8"]
    with pytest.raises(
        ValueError, match="rows of both aggregations are needed, there are: fp"
    ):
        aggregation.aggregation_difference(
            both_aggregations().query("aggregation == 'fp'")
        )
    shown = aggregation.summary(both_aggregations())
    assert shown["Q-Agg minus FP-Agg, points"].to_list() == ["+1.00", "+1.00"]
    assert shown["seeds"].to_list() == [3, 3]


def test_figure_5_shows_paired_differences():
    figure = aggregation.figure_5(both_aggregations())
    left, right = figure.axes
    curves = {line.get_label(): line.get_ydata() for line in left.lines}
    assert curves["FP-Agg, static 8 bits"] == pytest.approx(
        [72, 77]
    )  # mean over seeds of 80, 82, 84 minus 10 and 5
    assert curves["Q-Agg, static 8 bits"] == pytest.approx([73, 78])
    assert [t.get_text() for t in right.get_xticklabels()] == ["static 2", "static 8"]
    dots = [line.get_ydata() for line in right.lines if line.get_marker() == "o"]
    assert all(d == pytest.approx([1.0] * 3) for d in dots)
    assert figure.get_suptitle() == "Q-Agg gains 1.0 points against FP-Agg at 8 bits"
    assert caption_of(figure).startswith(
        "GCN on made up: 100 steps (100 epochs); 3 seeds, demo scale; static 8 reaches"
    )
    (legend,) = figure.legends  # below both panels: it hides no curve
    assert [t.get_text() for t in legend.get_texts()] == [
        "FP-Agg, static 8 bits",
        "Q-Agg, static 8 bits",
    ]
    assert left.get_legend() is None
    refused(
        "no finished run of static 4 with FP-Agg",
        aggregation.figure_5,
        both_aggregations(),
        bits=4,
    )


# --- perplexity: less is better -------------------------------------------------------------------


def test_quality_cost_negates_perplexity():
    runs = table(as_perplexity(rows_of(lambda arm, seed, cost: 100 - 10 * cost + seed)))
    assert metrics.metric_of(runs) == "perplexity"
    assert cost_line(runs).strength == pytest.approx(1)  # what costs more is better
    arms = quality_cost.by_arm(runs)
    assert quality_cost.pareto(arms, better=-1).all()
    assert quality_cost.pareto(arms, better=1).sum() == 1  # the cheapest is the largest
    assert (
        quality_cost.summary(runs).set_index("arm").loc["static 8", "perplexity"]
        == "91.0"
    )
    assert quality_cost.paired_difference(
        runs, "static 8", "static 2"
    ).to_list() == pytest.approx([-8.125] * 3)


def test_pareto_front_keeps_ties():
    means = [0.8, 0.7, 0.8, 0.8, 0.9, float("nan")]
    arms = pd.DataFrame(
        {"relative_cost": [0.5, 0.5, 0.5, 0.6, 0.7, 0.2], "mean": means}
    )
    # beaten: as cheap but worse; dearer and no better; without a result. Two alike do not beat each other
    assert quality_cost.pareto(arms).tolist() == [True, False, True, False, True, False]


def test_figure_7_inverts_perplexity_axis():
    rows = as_perplexity(
        rows_of(
            lambda arm, seed, cost: 9e3 if arm == "static 2" else 100 - 10 * cost + seed
        )
    )
    ax = figures.figure_7(table(rows), front=True).axes[0]
    low, high = ax.get_ylim()
    assert 200 > low > high > 80  # turned, and the arm that fails is not drawn
    assert ax.get_title(loc="right") == "below the axis: static 2 bits 9000"
    assert ax.get_ylabel().startswith("test perplexity")
    front = next(line for line in ax.lines if line.get_label() == "Pareto front")
    assert (np.diff(front.get_ydata()) <= 0).all()
    assert len(front.get_ydata()) > 3


# --- a learning rate per arm ----------------------------------------------------------------------


def at_rates(valid, test, rates=(0.1, 0.2, 0.3)):
    """Return rows at several learning rates, with accuracies by arm and rate."""
    out = []
    for rate in rates:
        part = changed(
            rows_of(lambda *_: 0, seeds=(0, 1)),
            {"lr": rate, "learning_rates": list(rates)},
        )
        for row in part:
            arm = row["spec"]["arm"]
            pairs = (("valid", valid(arm, rate)), ("test", test(arm, rate)))
            base = {
                "name": "accuracy",
                "when": "final",
                "precision": "q_max",
                "bits": 8,
            }
            row["metrics"] = [
                {**base, "split": split, "value": value} for split, value in pairs
            ]
        out += part
    return out


def test_tuned_selects_rate_on_validation():
    """Choose the learning rate of each arm by its validation accuracy."""
    rows = at_rates(
        valid=lambda arm, rate: 0.9 if rate == (0.1 if arm == "CR" else 0.3) else 0.5,
        test=lambda arm, rate: 1 - rate,  # would choose 0.1 for all
    )
    kept = tuned(table(rows))
    assert set(zip(kept.arm == "CR", kept.lr, strict=True)) == {
        (True, 0.1),
        (False, 0.3),
    }
    arms = quality_cost.by_arm(kept).set_index("arm")
    assert (arms.loc["CR", "mean"], arms.loc["CR", "n"]) == (pytest.approx(0.9), 2)
    assert arms.loc["RR", "mean"] == pytest.approx(0.7)
    assert quality_cost.paired_difference(kept, "CR", "RR").to_list() == pytest.approx(
        [0.2, 0.2]
    )
    assert "2 seeds" in caption_of(quality_cost.figure_3(kept))


def test_load_tunes_learning_rates(tmp_path):
    rows = at_rates(valid=lambda arm, rate: rate, test=lambda arm, rate: rate)
    store = tmp_path / "x.jsonl"
    for row in rows:
        stores.append_row(store, {**row, "key": key_of(row["spec"])})
    assert len(load(store, every_rate=True)) == 3 * len(load(store)) == len(rows)
    assert set(load(store).lr) == {0.3}
    assert set(load(store).store) == {f"{tmp_path.name}/x.jsonl"}


def test_tuned_selects_rate_of_lowest_perplexity():
    rows = as_perplexity(
        at_rates(valid=lambda arm, rate: rate, test=lambda arm, rate: rate)
    )
    assert set(tuned(table(rows)).lr) == {0.1}


def at(rows, rate, seeds, status="diverged", error=""):
    """Return the rows with the runs at one rate and some seeds ended without a result."""
    return [
        {**r, "status": status, "metrics": [], "error": error}
        if r["spec"]["recipe"]["lr"] == rate and r["spec"]["seed"] in seeds
        else r
        for r in rows
    ]


def test_tuned_avoids_diverged_learning_rates():
    rows = at_rates(
        valid=lambda arm, rate: {0.1: 0.3, 0.2: 0.5, 0.3: 0.99}[rate],
        test=lambda arm, rate: 0.5,
    )

    def chosen(*lost):
        found = rows
        for which in lost:
            found = at(found, *which)
        return set(tuned(table(found)).lr)

    assert chosen() == {0.3}
    assert chosen((0.3, [1])) == {0.2}  # 0.55 on average, and one run lost
    assert chosen((0.3, [0, 1]), (0.2, [0]), (0.1, [0, 1])) == {0.2}  # the fewest
    assert chosen(
        (0.3, [1], "failed", "torch.OutOfMemoryError: CUDA out of memory")
    ) == {0.3}
    assert chosen(*((rate, [0, 1], "failed") for rate in (0.1, 0.2, 0.3))) == {
        0.1
    }  # nothing to choose by
    runs = made_up(lambda arm, seed, cost: 0.5)
    assert tuned(runs).equals(runs)  # one rate is never dropped


def test_load_deduplicates_runs_across_stores(tmp_path, monkeypatch):
    """Load a run of two stores once, whatever the order of the stores."""
    monkeypatch.setattr("cpt_lab.analysis.run_table.results_dir", lambda: tmp_path)
    spec, other = designs.quality_cost(
        "demo", "digits", "mlp6", schedules=["CR", "RR"], static_bits=[], seeds=[0]
    )

    early, late = (
        stored_row(spec, value, provenance={**PROVENANCE, "started": day})
        for value, day in ((0.5, "2026-01-01"), (0.7, "2026-01-02"))
    )
    for first, second in ((early, late), (late, early)):
        a, b = (
            write_rows(tmp_path / "a.jsonl", first),
            write_rows(tmp_path / "b.jsonl", second, stored_row(other, 0.6)),
        )
        for names, arms in (
            (["a"], ["CR"]),
            (["b"], ["CR", "RR"]),
            (["b", "a"], ["CR", "RR"]),
            ([], ["CR", "RR"]),
        ):
            found = committed(*names)
            assert found.arm.tolist() == arms
            assert found.accuracy[0] == 0.7
        assert load(a, b).accuracy[0] == load(b, a).accuracy[0] == 0.7


def test_predictor_bounds_hold_middle_95_percent():
    low, high = predictors._bounds(np.arange(101.0)[None])
    assert (low.tolist(), high.tolist()) == ([2.5], [97.5])


def test_load_warns_of_different_data(tmp_path):
    """Exclude runs on data with a different checksum, and warn."""
    specs = designs.quality_cost(
        "demo", "digits", "mlp6", schedules=["CR"], static_bits=[], seeds=range(5)
    )
    (elsewhere,) = designs.quality_cost(
        "demo", "digits", "resnet8_w8", schedules=["CR"], static_bits=[], seeds=[0]
    )
    rows = [stored_row(spec, 0.5, data_checksum="aa") for spec in specs]
    rows += [
        stored_row(elsewhere, 0.5, data_checksum="cc")
    ]  # a recipe that takes another part
    old, new = write_rows(tmp_path / "old.jsonl", *rows), tmp_path / "new.jsonl"
    assert len(load(old)) == 6

    def add(count, started="2026-02-01"):
        later = {
            "data_checksum": "bb",
            "provenance": {**PROVENANCE, "started": started},
        }
        write_rows(new, *(row | later for row in rows[:count]))

    add(2)
    said = (
        r"2 runs on digits in .*new.jsonl are left out: their data \(checksum bb\) "
        r"are not those of the other 5 \(aa\)"
    )
    with pytest.warns(OtherDataWarning, match=said):
        found = load(old, new)
    assert sorted(found.data_checksum) == ["aa"] * 5 + [
        "cc"
    ]  # also the rows of the same keys
    for started, kept in (("2026-02-01", "bb"), ("2025-12-31", "aa")):
        add(5, started)
        with pytest.warns(OtherDataWarning, match="5 runs on digits"):
            assert sorted(load(old, new).data_checksum) == [kept] * 5 + ["cc"]


# --- figures 3, 4, 6 and 7 ------------------------------------------------------------------------


def points_of(ax):
    """Return the coordinates of all markers in axes by marker, colour and edge colour."""
    found = {}
    for line in ax.lines:
        if line.get_marker() in ("o", "^", "v", "D", "s") and len(line.get_xdata()):
            look = (line.get_marker(), line.get_color(), line.get_markeredgecolor())
            found.setdefault(look, []).extend(np.round(line.get_xydata(), 6).tolist())
    return found


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.slow
def test_figure_6_has_panel_per_aggregation():
    """Draw q_max 6 and 8 into one panel per aggregation."""
    both = [
        *designs.quality_cost("paper", "ogbn-arxiv", seeds=[0]),
        *designs.q_agg("paper", "ogbn-arxiv", seeds=[0]),
    ]
    rows = [row_of(s, 0.7 if s.recipe.aggregation == "fp" else 0.6) for s in both]
    figure = figures.figure_6(table(rows))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["FP-Agg", "Q-Agg"]
    drawn = [
        {y for points in points_of(ax).values() for _, y in points}
        for ax in figure.axes
    ]
    assert drawn == [{70.0}, {60.0}]
    for ax in figure.axes:
        assert sum(len(points) for points in points_of(ax).values()) == 2 * 11
    wide = figures.figure_6(table(rows), xs=("relative_cost", "noise_exposure"))
    assert [ax.get_title(loc="left").split("\n")[0] for ax in wide.axes] == [
        "FP-Agg",
        "FP-Agg",
        "Q-Agg",
        "Q-Agg",
    ]
    (alone,) = figures.figure_3(table(rows[:11])).axes
    assert alone.get_title(loc="left") == ""
    other = [
        row_of(s, 0.5)
        for s in quietly(designs.quality_cost, "demo", "digits-graph", seeds=[0])
    ]
    refused(
        "rows mix datasets: digits-graph, ogbn-arxiv",
        figures.figure_6,
        table([*rows, *other]),
    )


def test_figure_3_marks_profile_and_q_max():
    specs = designs.quality_cost("demo", static_bits=[], seeds=[0], q_max=[6, 8])
    figure = quality_cost.figure_3(table(row_of(s, 0.5) for s in specs))
    points = points_of(figure.axes[0])
    dark, rex = style.COLORS["static"], style.PROFILE_COLORS["rex"]
    assert (
        len(points["o", rex, dark])
        == len(points["v", rex, dark])
        == len(points["^", rex, dark])
        == 1
    )
    assert len(points["o", rex, rex]) == 1  # q_max 6
    linear = style.PROFILE_COLORS["linear"]
    assert ("^", linear, dark) in points
    assert ("v", linear, dark) not in points  # linear is its own mirror image
    shown = legend_of(figure)
    assert {
        "linear",
        "cosine",
        "REX",
        "exponential",
        "repeated",
        "q_max 8: dark outline",
    } < set(shown)
    assert "q_max 6: no outline" in shown


def test_relative_cost_shares_scale_across_q_max():
    specs = designs.quality_cost(
        "demo", schedules=["CR"], static_bits=[6], seeds=[0, 1], q_max=[6, 8]
    )
    runs = table(row_of(s, 0.5) for s in specs)
    converted = (
        quality_cost.relative_to_largest(runs)
        .drop_duplicates(["q_max", "arm"])
        .set_index(["q_max", "arm"])
    )
    assert converted.loc[(6, "static 6"), "relative_cost"] == pytest.approx(
        36 / 64
    )  # all of 6 bits
    assert converted.loc[(8, "static 6"), "relative_cost"] == pytest.approx(
        (36 + 2 * 48) / 192
    )  # gradients of 8
    assert converted.loc[(6, "static 6"), "noise_exposure"] == pytest.approx(16)
    uncounted = quality_cost.relative_to_largest(runs.assign(bitops=float("nan")))
    assert uncounted["relative_cost"].to_list() == pytest.approx(
        quality_cost.relative_to_largest(runs).relative_cost
    )
    shown = quality_cost.summary(runs).set_index(["q_max", "arm"])
    assert shown.loc[(6, "static 6"), "cost relative to static 8"] == "0.562"
    one = runs[runs["q_max"] == 6]
    assert quality_cost.relative_to_largest(one)["relative_cost"].equals(
        one["relative_cost"]
    )


def top_axis(figure):
    (axis,) = figure.axes[0].child_axes
    figure.draw_without_rendering()
    return axis


def test_figure_3_shows_gbitops_on_top():
    figure = quality_cost.figure_3(
        made_up(lambda arm, seed, cost: cost).assign(
            bitops=lambda r: 3e9 * r.relative_cost
        )
    )
    axis = top_axis(figure)
    assert axis.get_xlabel() == "training cost in GBitOps"
    assert np.array(axis.get_xlim()) == pytest.approx(
        3 * np.array(figure.axes[0].get_xlim())
    )
    uncounted = made_up(lambda arm, seed, cost: cost).assign(bitops=float("nan"))
    assert quality_cost.figure_3(uncounted).axes[0].child_axes == []


def test_figure_3_uses_paper_cost_unit():
    specs = designs.quality_cost(
        "paper", "ptb", schedules=["CR", "RR"], static_bits=[8], q_max=[8], seeds=[0]
    )
    runs = table(row_of(s, 90.0, "perplexity") for s in specs)
    runs = runs.assign(bitops=9.16e13 * runs["relative_cost"])
    figure = quality_cost.figure_3(runs)
    assert top_axis(figure).get_xlabel().startswith("training cost in 10^13 BitOps")
    (costs,) = (
        line
        for line in figure.axes[0].lines
        if line.get_label() == "paper: printed costs"
    )
    assert list(costs.get_xdata()) == pytest.approx([5.5 / 9.16, 7 / 9.16, 9 / 9.16])


def bars_of(figure):
    """Return printed differences by label: (x, low, high)."""
    found = {}
    for line in figure.axes[0].lines:
        if str(line.get_label()).startswith("paper"):
            (x, *_), ys = line.get_xdata(), line.get_ydata()
            found[line.get_label()] = (x, min(ys), max(ys))
    return found


def test_figure_3_places_printed_difference():
    """Draw the difference printed in the paper at the level of our static arm."""
    runs = made_up(lambda arm, seed, cost: 0.8 if arm == "static 8" else 0.6)
    cost = (
        runs[runs["savings"] == "large"].drop_duplicates("arm")["relative_cost"].mean()
    )
    ((label, bar),) = bars_of(quality_cost.figure_3(runs)).items()
    assert label == "paper, on its own data (ImageNet): large savings minus static 8"
    assert bar == pytest.approx((cost, 78.5, 79.5))
    assert bars_of(quality_cost.figure_3(runs[runs["savings"] != "large"])) == {}
    assert bars_of(quality_cost.figure_3(runs[runs["arm"] != "static 8"])) == {}


def test_printed_numbers_match_task():
    graph = table(
        row_of(s, 0.7)
        for s in designs.quality_cost("paper", "ogbn-arxiv", seeds=[0], q_max=[8])
    )
    assert set(paper_numbers.figure_numbers(graph)["dataset"]) == {"ogbn-arxiv"}
    assert not paper_numbers.figure_numbers(graph)["own_data"].any()
    assert bars_of(quality_cost.figure_3(graph)).keys() == {
        "paper: large savings minus static 8"
    }
    small = table(
        row_of(s, 0.7)
        for s in quietly(designs.quality_cost, "demo", "digits-graph", seeds=[0])
    )
    lines = paper_numbers.figure_numbers(small)
    assert set(lines["model"]) == {"gcn"}
    assert lines["own_data"].all()


def bars_of_spread(figure):
    return sum(
        len(segment) > 0
        for c in figure.axes[0].collections
        for segment in c.get_segments()
    )


def test_figure_3_error_bars_need_two_seeds():
    one, two = (
        made_up(lambda arm, seed, cost: cost + 0.1 * seed, seeds=range(n), statics=(8,))
        for n in (1, 2)
    )
    schedules = len(designs.quality_cost("demo", static_bits=[], seeds=[0]))
    lone = [
        c
        for c in quality_cost.figure_3(one).axes[0].collections
        if any(map(len, c.get_segments()))
    ]
    assert all(
        np.ptp(np.array(c.get_segments())[..., 1]) == 0 for c in lone
    )  # of static precision: no length
    assert bars_of_spread(quality_cost.figure_3(two)) == schedules + 1


def test_pareto_front_needs_three_seeds():
    for seeds, drawn in ((2, False), (3, True)):
        runs = made_up(lambda arm, seed, cost: cost, seeds=range(seeds))
        assert (
            "Pareto front" in legend_of(quality_cost.figure_3(runs, front=True))
        ) == drawn


def test_sections_combine_q_max_in_figure():
    specs = designs.quality_cost(
        "demo", schedules=["CR", "RR"], static_bits=[6], seeds=[0], q_max=[6, 8]
    )
    (section,) = quality_cost.sections(table(row_of(s, 0.5) for s in specs))
    assert "q_min 3, q_max 8 and 6, demo scale" in section.title
    assert set(section.table["q_max"]) == {6, 8}


# --- findings -------------------------------------------------------------------------------------


def found_of(accuracy, seeds=(0, 1, 2, 3)):
    return quality_cost.finding(made_up(accuracy, seeds))


def noise(arm, seed):
    return 0.002 * ((7 * seed + 3 * len(arm) + ord(arm[-1])) % 5)


def test_finding_relates_quality_to_cost():
    rises = found_of(lambda arm, seed, cost: 0.5 + 0.1 * cost + noise(arm, seed) / 10)
    assert (
        rises
        == "Of these schedules the costlier are better; 0 of 10 schedules exceed static 8, 10 fall below"
    )
    falls = found_of(lambda arm, seed, cost: 0.9 - 0.1 * cost + noise(arm, seed) / 10)
    assert (
        falls
        == "Of these schedules the costlier are worse; 10 of 10 schedules exceed static 8, 0 fall below"
    )
    unclear = found_of(
        lambda arm, seed, cost: 0.5 + (0.1, -0.1, 0.1, -0.1)[seed] * cost
    )
    assert (
        unclear
        == "No clear relation between cost and quality; 0 of 10 schedules exceed static 8, 0 fall below"
    )
    alike = found_of(lambda arm, seed, cost: 0.5)
    assert alike.startswith("No clear relation between cost and quality; 0 of 10")


def test_finding_uses_corrected_intervals():
    """Count a schedule only if its interval, corrected for all comparisons, excludes zero."""
    gains = (0.01, 0.02, 0.03, 0.04)  # t of 3.9 at 3 degrees of freedom: p .03
    text = found_of(lambda arm, seed, cost: 0.5 + gains[seed] * (arm == "CR"))
    assert text.endswith("0 of 10 schedules exceed static 8, 0 fall below")
    runs = made_up(
        lambda arm, seed, cost: 0.5 + gains[seed] * (arm == "CR"), (0, 1, 2, 3)
    )
    alone = runs[runs["arm"].isin(["CR", "static 8"])]
    assert (
        quality_cost.finding(alone) == "1 of 1 schedule exceeds static 8, 0 fall below"
    )


def test_finding_counts_lower_perplexity_as_better():
    runs = table(
        as_perplexity(
            rows_of(lambda arm, seed, cost: 100 - 10 * cost + noise(arm, seed))
        )
    )
    assert quality_cost.finding(runs).startswith(
        "Of these schedules the costlier are better; 0 of 10 schedules exceed static 8, 10 fall"
    )


def test_finding_needs_three_seeds():
    for seeds, text in (
        ((0,), "1 seed: no comparison"),
        ((0, 1), "2 seeds: no comparison"),
    ):
        assert found_of(lambda arm, seed, cost: cost, seeds) == text
    runs = made_up(lambda arm, seed, cost: cost)
    more = designs.quality_cost(
        "demo", schedules=["CR"], static_bits=[6], seeds=range(2), q_max=[6]
    )
    both = pd.concat([runs, table(row_of(s, 0.5) for s in more)])
    assert quality_cost.finding(both).endswith("; static 6: 2 seeds, no comparison")
    static = runs["savings"] == "static"
    assert quality_cost.finding(runs[static]) == "Static precision alone ran at q_max 8"
    assert (
        quality_cost.finding(runs[~static])
        == "Of these schedules the costlier are better; static 8 did not run"
    )
    assert (
        quality_cost.figure_3(runs[runs["seed"] == 0]).get_suptitle()
        == "1 seed: no comparison"
    )


def test_finding_names_q_max_and_aggregation():
    specs = designs.quality_cost("demo", static_bits=[6], seeds=range(3), q_max=[6, 8])
    top = {6: "static 6", 8: "static 8"}
    specs += designs.quality_cost("demo", schedules=[], static_bits=[8], seeds=range(3))
    runs = table(row_of(s, 0.5 + 0.1 * (s.arm == top[s.q_max])) for s in specs)
    text = quality_cost.finding(runs)
    assert text.endswith(
        "0 of 10 schedules exceed static 8, 10 fall below; 0 of 10 schedules exceed static 6, 10 fall below"
    )
    specs = quietly(
        designs.quality_cost,
        "demo",
        "digits-graph",
        schedules=["CR"],
        static_bits=[8],
        seeds=range(3),
    )
    specs += quietly(
        designs.q_agg,
        "demo",
        "digits-graph",
        schedules=["CR"],
        static_bits=[8],
        seeds=range(3),
    )
    gain = {"fp": 0.1, "quantized": -0.1}
    runs = table(
        row_of(s, 0.5 + gain[s.recipe.aggregation] * (s.arm == "CR")) for s in specs
    )
    assert quality_cost.finding(runs).split("\n") == [
        "FP-Agg: 1 of 1 schedule exceeds static 8, 0 fall below",
        "Q-Agg: 0 of 1 schedule exceed static 8, 1 falls below",
    ]


def test_figure_5_finding_needs_significant_difference():
    runs = both_aggregations(-0.01)
    assert (
        aggregation.finding(runs) == "Q-Agg loses 1.0 points against FP-Agg at 8 bits"
    )
    lucky = (runs["aggregation"] == "quantized") & (runs["seed"] == 1)
    unclear = runs.assign(
        accuracy=runs["accuracy"].where(~lucky, runs["accuracy"] + 0.02)
    )
    assert (
        aggregation.finding(unclear)
        == "No clear difference between Q-Agg and FP-Agg at 8 bits"
    )
    assert (
        aggregation.finding(both_aggregations(seeds=(0, 1))) == "2 seeds: no comparison"
    )


# --- captions -------------------------------------------------------------------------------------


def test_caption_states_epochs_of_recipe():
    specs = designs.quality_cost(
        "demo", static_bits=[8], schedules=["CR"], seeds=[0, 1]
    )
    runs = table(row_of(s, 0.754) for s in specs)
    assert (
        captions.caption(runs)
        == "made up: 600 steps (43 epochs); 2 seeds, demo scale; static 8 reaches 75.4 %"
    )
    longer = designs.quality_cost(
        "demo", static_bits=[8], schedules=["CR"], seeds=[0], steps=1200
    )
    assert (
        captions.training_length(table(row_of(s, 0.5) for s in longer))
        == "1,200 steps (86 epochs)"
    )
    changed_batch = designs.quality_cost(
        "demo", static_bits=[8], schedules=["CR"], seeds=[0], batch=32
    )
    assert (
        captions.training_length(table(row_of(s, 0.5) for s in changed_batch))
        == "600 steps"
    )
    cifar = designs.quality_cost(
        "paper",
        "cifar10",
        "resnet74",
        schedules=["CR"],
        static_bits=[],
        q_max=[8],
        seeds=[0],
    )
    assert captions.training_length(table(row_of(s, 0.5) for s in cifar)).startswith(
        "64,000 steps (16"
    )
    assert captions.with_smoke_warning("x", runs) == "x"
    assert (
        captions.with_smoke_warning("x", runs.assign(scale="smoke"))
        == "smoke scale: not a result. x"
    )


def test_caption_states_level_per_aggregation():
    text = captions.caption(both_aggregations())
    assert (
        "static 8 reaches 82.0 % with FP-Agg; static 8 reaches 83.0 % with Q-Agg"
        in text
    )
