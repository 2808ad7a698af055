import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cpt_core.schedules.cost import relative_cost
from cpt_lab.analysis import aggregation, figures, metrics, predictors, quality_cost, statistics, style
from cpt_lab.analysis.runs import OtherDataWarning, committed, load, table, tuned
from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import key_of
from cpt_lab.paths import paper_dir
from cpt_lab.sweeps import stores
from tests.helpers import PROVENANCE, kept_row, quietly, refused, row_of, written


def made_up(accuracy, seeds=(0, 1, 2), statics=(2, 5, 8)):
    """A table of ``rows_of``."""
    return table(rows_of(accuracy, seeds, statics))


def rows_of(accuracy, seeds=(0, 1, 2), statics=(2, 5, 8)):
    """Rows as a grid would leave them, with accuracies that are a known function of (arm, seed, cost)."""
    specs = designs.quality_cost("demo", static_bits=statics, seeds=seeds)
    return [kept_row(s, accuracy(s.arm, s.seed, relative_cost(s.schedule.bits(), 8))) for s in specs]


def changed(rows, recipe=None, **spec):
    """The same rows with other values in their specs."""
    return [{**r, "spec": {**r["spec"], **spec, "recipe": {**r["spec"]["recipe"], **(recipe or {})}}} for r in rows]


def as_perplexity(rows):
    out = changed(rows, {"task": "language_model"})
    for row in out:
        row["metrics"] = [{**m, "name": "perplexity"} for m in row["metrics"]]
    return out


def test_mean_and_deviation_by_arm():
    arms = quality_cost.by_arm(made_up(lambda arm, seed, cost: 0.5 + 0.1 * seed)).set_index("arm")
    assert arms.loc["CR", "mean"] == pytest.approx(0.6)
    assert arms.loc["CR", "std"] == pytest.approx(0.1)  # n - 1
    assert arms.loc["CR", "n"] == 3
    assert arms.loc["RR", "savings"] == "large"
    assert arms.loc["static 5", "relative_cost"] == pytest.approx(105 / 192)


def test_runs_that_diverged_enter_the_mean_as_chance_and_those_that_failed_do_not():
    rows = rows_of(lambda arm, seed, cost: 0.5)
    rows[0] |= {"status": "diverged", "metrics": []}
    rows[1] |= {"status": "failed", "metrics": [], "error": "took longer than 60 s"}
    runs = table(rows)
    first = quality_cost.by_arm(runs).iloc[0]
    assert (first["n"], first["diverged"], first["failed"], first["mean"]) == (2, 1, 1, pytest.approx(0.3))
    assert "2 runs diverged or failed" in quality_cost.figure_3(runs).get_suptitle()


def cost_line(runs, **options):
    """What the rank correlation says of cost."""
    return predictors.rank_correlation(runs, **options).set_index("predictor").loc["relative_cost"]


def test_alike_values_share_their_rank():
    x, ys = np.array([1.0, 2, 2, 3, 4, 4]), np.array([[5.0, 5, 1, 2, 2, 7], [3, 1, 1, 1, 2, 2]])
    expected = [stats.spearmanr(x, y).statistic for y in ys]
    assert statistics.spearman(x, ys).tolist() == pytest.approx(expected)


def test_seeds_that_disagree_leave_the_correlation_open():
    """A seed in which quality rises with cost, and one in which it falls a little less steeply."""
    line = cost_line(made_up(lambda arm, seed, cost: 0.5 + (0.1, -0.09)[seed] * cost, seeds=(0, 1)))
    assert (line.strength, line.low, line.high) == pytest.approx((1, -1, 1))


def test_correlation_of_little():
    one = made_up(lambda arm, seed, cost: cost, seeds=(0,))
    assert cost_line(one).strength == pytest.approx(1)
    assert np.isnan(cost_line(one)[["low", "high"]].to_list()).all()
    alike = cost_line(made_up(lambda arm, seed, cost: 0.5))
    assert np.isnan([alike.strength, alike.low, alike.high]).all()
    apart = table(
        r for r in rows_of(lambda arm, seed, cost: cost) if (r["spec"]["arm"] == "CR") == (r["spec"]["seed"] == 0)
    )
    assert cost_line(apart).strength == pytest.approx(1)  # no seed that all arms have: of what there is
    assert np.isnan(cost_line(apart).low)


def test_mixed_experiments_are_refused():
    rows = rows_of(lambda arm, seed, cost: 0.5)
    refused("rows mix scales: demo, paper", quality_cost.by_arm, table([*changed(rows[:1], scale="paper"), *rows[1:]]))
    refused("rows mix q_mins: 3, 4", quality_cost.by_arm, table([*changed(rows[:1], {"q_min": 4}), *rows[1:]]))
    refused("there are no rows", quality_cost.by_arm, table([]))
    refused("rows mix tasks: image, language_model", quality_cost.by_arm, table(rows + as_perplexity(rows)))
    refused("at least three arms", predictors.rank_correlation, table(r for r in rows if r["spec"]["arm"] == "CR"))


def test_comparison_puts_the_papers_number_beside_ours(tmp_path, monkeypatch):
    same = {"artefact": "figure_3", "dataset": "digits", "model": "mlp6", "arm": "CR", "q_max": 8, "metric": "accuracy"}
    made_up_line = {**same, "value": 61.5, "unit": "%", "place": "made up for this test"}
    against = {**same, "minus": "static", "value": 2.0, "unit": "points", "place": "no accuracy, but a difference"}
    lines = [pd.read_csv(paper_dir() / "numbers.csv"), pd.DataFrame([against, made_up_line])]
    pd.concat(lines).to_csv(tmp_path / "numbers.csv", index=False)
    monkeypatch.setattr("cpt_lab.analysis.printed.paper_dir", lambda: tmp_path)
    rows = rows_of(lambda arm, seed, cost: 0.6)
    small = quality_cost.summary(table(rows))
    assert set(small["paper"]) == {"not in the paper"}  # a small run is never put beside a number of the paper
    shown = quality_cost.summary(table(changed(rows, scale="paper"))).set_index("arm")
    assert shown.loc["CR", ["accuracy %", "paper"]].to_list() == ["60.0", "61.5 (made up for this test)"]
    assert shown.loc["RR", "paper"] == "drawn, no number printed"


def test_columns_that_say_the_same_of_all_arms_are_left_out(monkeypatch):
    monkeypatch.setattr(quality_cost, "figure_3", lambda *_, **__: None)
    (section,) = quality_cost.sections(made_up(lambda arm, seed, cost: 0.6, seeds=(0,)))
    assert not {"q_max", "std", "failed", "paper"} & set(section.table)
    rows = rows_of(lambda arm, seed, cost: 0.6 + 0.1 * seed)
    (section,) = quality_cost.sections(table(rows))
    assert {"std", "n", "diverged"} < set(section.table)  # also where no run did
    for error, again in (("", False), ("took longer than 60 s", True)):  # the second is to be run again
        rows[0] |= {"status": "failed", "metrics": [], "error": error}
        (section,) = quality_cost.sections(table(rows))
        assert ("failed" in section.table) == again


def test_a_precision_that_fails_is_named_below_the_axis():
    rows = made_up(lambda arm, seed, cost: 0.1 if arm == "static 2" else 0.9)
    figure = quality_cost.figure_3(rows)
    assert figure.axes[0].get_title(loc="right") == "below the axis: static 2 bits 10 %"
    assert figure.axes[0].get_ylim()[0] > 10
    assert "not a result" not in figure.get_suptitle()
    smoke = table(changed(rows_of(lambda arm, seed, cost: 0.5), scale="smoke"))
    assert quality_cost.figure_3(smoke).get_suptitle().startswith("smoke scale: not a result")


def test_means_are_compared_on_the_seeds_that_all_arms_have():
    """Seeds that only some arms have, and that are lucky, lift no point and put no arm on the front."""

    def accuracy(arm, seed, cost):
        return 0.5 + 0.1 * cost + 0.3 * (seed > 1)

    few = rows_of(accuracy, seeds=(0, 1), statics=(5, 8))
    more = [r for r in rows_of(accuracy, seeds=(2, 3), statics=(5, 8)) if not r["spec"]["arm"].startswith("static 5")]
    runs = table(few + more)
    assert sorted(quality_cost.on_common_seeds(runs)["seed"].unique()) == [0, 1]
    front = quality_cost.summary(runs).set_index("arm")
    assert front["n"].to_dict()["static 5"] == 2
    assert front["n"].to_dict()["CR"] == 4
    assert front.loc["static 5", "Pareto front"] == "yes"  # 80 % of RR with all its seeds would beat its 55 %
    figure = quality_cost.figure_3(runs)
    assert figure.get_suptitle().endswith(", 2 seeds")
    drawn = np.concatenate([line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata())])
    assert drawn.max() < 61
    apart = table([r for r in few if r["spec"]["arm"] != "CR"] + [r for r in more if r["spec"]["arm"] == "CR"])
    assert len(quality_cost.on_common_seeds(apart)) == len(apart)  # no such seed
    uneven = table(few + [r for r in more if r["spec"]["arm"] == "CR"][:1])
    assert style.title(uneven).endswith(", 2 to 3 seeds")
    failed = [
        {**r, "status": "failed", "metrics": [], "error": "MemoryError"} if r["spec"]["arm"] == "CR" else r for r in few
    ]
    assert len(quality_cost.on_common_seeds(table(failed))) == len(few)


def test_correlation_takes_the_seeds_that_all_arms_have():
    """An arm with more seeds than the others must not bring its own seeds into the comparison."""

    def accuracy(arm, seed, cost):
        return cost + 0.1 * seed + 0.2 * (len(arm) * (seed + 1) % 3)

    few, more = rows_of(accuracy, seeds=(0, 1)), rows_of(accuracy, seeds=(0, 1, 2, 3))
    extra = [r for r in more if r["spec"]["arm"] == "RR" and r["spec"]["seed"] > 1]
    for r in extra:
        r["metrics"][0]["value"] = 99.0
    assert cost_line(table(few + extra)).equals(cost_line(table(few)))


def both_aggregations(gap=0.01, seeds=(0, 1, 2)):
    """Runs of both aggregations; Q-Agg is ``gap`` better, whatever the seed."""
    rows = []
    for spec in designs.aggregation("demo", bits=(2, 8), seeds=seeds):
        value = 0.8 + 0.02 * spec.seed + gap * (spec.recipe.aggregation == "quantized")
        curve = [{"step": s, "precision": "q_max", "valid": {"accuracy": value - 0.1 / s}, "test": {}} for s in (1, 2)]
        rows.append(row_of(spec, value) | {"title": "GCN (FP-Agg) on made up", "evaluations": curve})
    return table(rows)


def test_aggregations_are_compared_seed_by_seed():
    found = aggregation.aggregation_difference(both_aggregations())
    assert found["difference"].to_numpy() == pytest.approx(np.full(6, 0.01))
    assert sorted(found["arm"].unique()) == ["static 2", "static 8"]
    with pytest.raises(ValueError, match="rows of both aggregations are needed, there are: fp"):
        aggregation.aggregation_difference(both_aggregations().query("aggregation == 'fp'"))
    shown = aggregation.summary(both_aggregations())
    assert shown["Q-Agg minus FP-Agg, points"].to_list() == ["+1.00", "+1.00"]
    assert shown["seeds"].to_list() == [3, 3]


def test_figure_5_shows_curves_and_paired_differences():
    figure = aggregation.figure_5(both_aggregations())
    left, right = figure.axes
    curves = {line.get_label(): line.get_ydata() for line in left.lines}
    assert curves["FP-Agg, static 8 bits"] == pytest.approx([72, 77])  # mean over seeds of 80, 82, 84 minus 10 and 5
    assert curves["Q-Agg, static 8 bits"] == pytest.approx([73, 78])
    assert [t.get_text() for t in right.get_xticklabels()] == ["static 2", "static 8"]
    dots = [line.get_ydata() for line in right.lines if line.get_marker() == "o"]
    assert all(d == pytest.approx([1.0] * 3) for d in dots)
    assert figure.get_suptitle() == "GCN on made up, 3 seeds"
    (legend,) = figure.legends  # below both panels: it hides no curve
    assert [t.get_text() for t in legend.get_texts()] == ["FP-Agg, static 8 bits", "Q-Agg, static 8 bits"]
    assert left.get_legend() is None
    refused("no finished run of static 4 with FP-Agg", aggregation.figure_5, both_aggregations(), bits=4)


# --- perplexity: less is better -------------------------------------------------------------------


def test_quality_is_minus_perplexity():
    runs = table(as_perplexity(rows_of(lambda arm, seed, cost: 100 - 10 * cost + seed)))
    assert metrics.metric_of(runs) == "perplexity"
    assert cost_line(runs).strength == pytest.approx(1)  # what costs more is better
    arms = quality_cost.by_arm(runs)
    assert quality_cost.pareto(arms, better=-1).all()
    assert quality_cost.pareto(arms, better=1).sum() == 1  # the cheapest is the largest
    assert quality_cost.summary(runs).set_index("arm").loc["static 8", "perplexity"] == "91.0"
    assert quality_cost.paired_difference(runs, "static 8", "static 2").to_list() == pytest.approx([-8.125] * 3)


def test_the_front_at_equal_cost_and_at_equal_quality():
    means = [0.8, 0.7, 0.8, 0.8, 0.9, float("nan")]
    arms = pd.DataFrame({"relative_cost": [0.5, 0.5, 0.5, 0.6, 0.7, 0.2], "mean": means})
    # beaten: as cheap but worse; dearer and no better; without a result. Two alike do not beat each other
    assert quality_cost.pareto(arms).tolist() == [True, False, True, False, True, False]


def test_figure_7_turns_the_axis():
    rows = as_perplexity(rows_of(lambda arm, seed, cost: 9e3 if arm == "static 2" else 100 - 10 * cost + seed))
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
    """Rows at several learning rates: accuracies are functions of (arm, rate)."""
    out = []
    for rate in rates:
        part = changed(rows_of(lambda *_: 0, seeds=(0, 1)), {"lr": rate, "learning_rates": list(rates)})
        for row in part:
            arm = row["spec"]["arm"]
            pairs = (("valid", valid(arm, rate)), ("test", test(arm, rate)))
            base = {"name": "accuracy", "when": "final", "precision": "q_max", "bits": 8}
            row["metrics"] = [{**base, "split": split, "value": value} for split, value in pairs]
        out += part
    return out


def test_the_rate_is_chosen_per_arm_on_validation_data():
    rows = at_rates(
        valid=lambda arm, rate: 0.9 if rate == (0.1 if arm == "CR" else 0.3) else 0.5,
        test=lambda arm, rate: 1 - rate,  # would choose 0.1 for all
    )
    kept = tuned(table(rows))
    assert set(zip(kept.arm == "CR", kept.lr, strict=True)) == {(True, 0.1), (False, 0.3)}
    arms = quality_cost.by_arm(kept).set_index("arm")
    assert (arms.loc["CR", "mean"], arms.loc["CR", "n"]) == (pytest.approx(0.9), 2)
    assert arms.loc["RR", "mean"] == pytest.approx(0.7)
    assert quality_cost.paired_difference(kept, "CR", "RR").to_list() == pytest.approx([0.2, 0.2])
    assert "2 seeds" in quality_cost.figure_3(kept).get_suptitle()


def test_what_is_loaded_is_tuned(tmp_path):
    rows = at_rates(valid=lambda arm, rate: rate, test=lambda arm, rate: rate)
    store = tmp_path / "x.jsonl"
    for row in rows:
        stores.append_row(store, {**row, "key": key_of(row["spec"])})
    assert len(load(store, every_rate=True)) == 3 * len(load(store)) == len(rows)
    assert set(load(store).lr) == {0.3}
    assert set(load(store).store) == {f"{tmp_path.name}/x.jsonl"}


def test_the_rate_is_chosen_where_less_is_better():
    rows = as_perplexity(at_rates(valid=lambda arm, rate: rate, test=lambda arm, rate: rate))
    assert set(tuned(table(rows)).lr) == {0.1}


def at(rows, rate, seeds, status="diverged", error=""):
    """The rows, of which those at a rate and some seeds ended without a result."""
    return [
        {**r, "status": status, "metrics": [], "error": error}
        if r["spec"]["recipe"]["lr"] == rate and r["spec"]["seed"] in seeds else r for r in rows
    ]  # fmt: skip


def test_a_rate_at_which_runs_diverged_is_not_preferred():
    rows = at_rates(valid=lambda arm, rate: {0.1: 0.3, 0.2: 0.5, 0.3: 0.99}[rate], test=lambda arm, rate: 0.5)

    def chosen(*lost):
        found = rows
        for which in lost:
            found = at(found, *which)
        return set(tuned(table(found)).lr)

    assert chosen() == {0.3}
    assert chosen((0.3, [1])) == {0.2}  # 0.55 on average, and one run lost
    assert chosen((0.3, [0, 1]), (0.2, [0]), (0.1, [0, 1])) == {0.2}  # the fewest
    assert chosen((0.3, [1], "failed", "torch.OutOfMemoryError: CUDA out of memory")) == {0.3}
    assert chosen(*((rate, [0, 1], "failed") for rate in (0.1, 0.2, 0.3))) == {0.1}  # nothing to choose by
    runs = made_up(lambda arm, seed, cost: 0.5)
    assert tuned(runs).equals(runs)  # one rate is never dropped


def test_a_run_that_lies_in_two_stores_is_the_same_one_whichever_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt_lab.analysis.runs.results_dir", lambda: tmp_path)
    spec, other = designs.quality_cost("demo", "digits", "mlp6", schedules=["CR", "RR"], static_bits=[], seeds=[0])

    early, late = (
        kept_row(spec, value, provenance={**PROVENANCE, "started": day})
        for value, day in ((0.5, "2026-01-01"), (0.7, "2026-01-02"))
    )
    for first, second in ((early, late), (late, early)):
        a, b = written(tmp_path / "a.jsonl", first), written(tmp_path / "b.jsonl", second, kept_row(other, 0.6))
        for names, arms in ((["a"], ["CR"]), (["b"], ["CR", "RR"]), (["b", "a"], ["CR", "RR"]), ([], ["CR", "RR"])):
            found = committed(*names)
            assert found.arm.tolist() == arms
            assert found.accuracy[0] == 0.7
        assert load(a, b).accuracy[0] == load(b, a).accuracy[0] == 0.7


def test_an_interval_holds_the_middle_95_percent_of_the_resamples():
    low, high = predictors._bounds(np.arange(101.0)[None])
    assert (low.tolist(), high.tolist()) == ([2.5], [97.5])


def test_runs_on_other_data_are_left_out_and_said(tmp_path):
    specs = designs.quality_cost("demo", "digits", "mlp6", schedules=["CR"], static_bits=[], seeds=range(5))
    (elsewhere,) = designs.quality_cost("demo", "digits", "resnet8_w8", schedules=["CR"], static_bits=[], seeds=[0])
    rows = [kept_row(spec, 0.5, data_checksum="aa") for spec in specs]
    rows += [kept_row(elsewhere, 0.5, data_checksum="cc")]  # a recipe that takes another part
    old, new = written(tmp_path / "old.jsonl", *rows), tmp_path / "new.jsonl"
    assert len(load(old)) == 6

    def add(count, started="2026-02-01"):
        later = {"data_checksum": "bb", "provenance": {**PROVENANCE, "started": started}}
        written(new, *(row | later for row in rows[:count]))

    add(2)
    said = (
        r"2 runs on digits in .*new.jsonl are left out: their data \(checksum bb\) are not those of the other 5 \(aa\)"
    )
    with pytest.warns(OtherDataWarning, match=said):
        found = load(old, new)
    assert sorted(found.data_checksum) == ["aa"] * 5 + ["cc"]  # also the rows of the same keys
    for started, kept in (("2026-02-01", "bb"), ("2025-12-31", "aa")):
        add(5, started)
        with pytest.warns(OtherDataWarning, match="5 runs on digits"):
            assert sorted(load(old, new).data_checksum) == [kept] * 5 + ["cc"]


@pytest.mark.slow
def test_every_q_max_and_aggregation_has_a_row_of_panels():
    """The paper draws q_max 6 and 8, and of graphs both aggregations."""
    both = [*designs.quality_cost("paper", "ogbn-arxiv", seeds=[0]), *designs.q_agg("paper", "ogbn-arxiv", seeds=[0])]
    rows = [row_of(s, 0.7 if s.recipe.aggregation == "fp" else 0.6) for s in both]
    figure = figures.figure_6(table(rows), xs=("relative_cost", "noise_exposure"))
    named = [ax.get_title() for ax in figure.axes[::2]]
    assert named == ["q_max 8, FP-Agg", "q_max 8, Q-Agg", "q_max 6, FP-Agg", "q_max 6, Q-Agg"]
    drawn = [
        {round(y, 6) for line in ax.lines if line.get_marker() == "o" for y in line.get_ydata()} for ax in figure.axes
    ]
    assert drawn == [{70.0}, {70.0}, {60.0}, {60.0}] * 2
    (alone,) = figures.figure_3(table(rows[:11])).axes
    assert alone.get_title() == ""
    other = [row_of(s, 0.5) for s in quietly(designs.quality_cost, "demo", "digits-graph", seeds=[0])]
    refused("rows mix datasets: digits-graph, ogbn-arxiv", figures.figure_6, table([*rows, *other]))
