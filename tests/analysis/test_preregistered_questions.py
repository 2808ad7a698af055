"""Critical periods, equal cost and predictors, from synthetic rows with known effects."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cpt_core.schedules import cost
from cpt_lab.analysis import (
    critical_periods,
    equal_cost,
    predictors,
    quality_cost,
    run_groups,
    statistics,
)
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.paths import paper_dir
from tests.helpers import refused, row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


# --- intervals ------------------------------------------------------------------------------------


def test_interval_matches_student_t():
    values = [0.1, 0.4, 0.2, 0.7]
    mean, low, high = statistics.interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((0.35, expected.low, expected.high))
    assert statistics.interval([0.3])[0] == 0.3
    assert np.isnan(statistics.interval([0.3])[1:]).all()
    assert np.isnan(statistics.interval([])).all()


def test_group_difference_uses_common_seeds():
    specs = designs.quality_cost(
        "demo", schedules=["RR", "RTH"], static_bits=[8], seeds=[0, 1]
    )
    rows = [row_of(s, {"RR": 0.5, "RTH": 0.7, "static 8": 0.9}[s.arm]) for s in specs]
    runs = table(r for r in rows if (r["spec"]["arm"], r["spec"]["seed"]) != ("RTH", 1))

    def by_seed(name):
        return statistics.by_seed(quality_cost.runs_of(runs, name), "accuracy")[
            "accuracy"
        ].to_dict()

    assert by_seed("large") == {0: pytest.approx(0.6)}
    assert by_seed("RR") == {0: 0.5, 1: 0.5}
    assert quality_cost.paired_difference(runs, "static 8", "large").to_dict() == {
        0: pytest.approx(0.3)
    }
    refused("no rows for 'small'; there are RR, RTH, static 8", by_seed, "small")


def test_share_at_q_min_of_static_arms():
    rows = [
        row_of(s, 0.5)
        for s in designs.quality_cost(
            "demo", schedules=["RR"], static_bits=[2, 3, 8], seeds=[0]
        )
    ]
    runs = table(rows).set_index("arm")
    assert runs.share_at_q_min[["static 2", "static 3", "static 8"]].tolist() == [
        0,
        1,
        0,
    ]  # q_min is 3
    assert 0.3 < runs.share_at_q_min["RR"] < 0.8
    own = dict(rows[0], spec=dict(rows[0]["spec"], arm="my curve"))
    assert table([own]).savings.tolist() == ["own"]


# --- critical periods -----------------------------------------------------------------------------


def harm(spec, seed_noise=0.0):
    """Return 0.9 minus L / 1000 for a deficit of L steps, or twice that at the end."""
    windows = spec.schedule.windows
    if not windows:
        return 0.9 + seed_noise
    ((start, stop),) = windows
    return (
        0.9
        + seed_noise
        - (stop - start) / 1000 * (2 if stop == spec.recipe.steps else 1)
    )


@pytest.fixture(scope="module")
def deficit_rows():
    specs = designs.deficit_scan("demo", "digits", seeds=[0, 1, 2])
    return [row_of(s, harm(s, 0.01 * s.seed)) for s in specs]


@pytest.fixture(scope="module")
def deficits(deficit_rows):
    return table(deficit_rows)


def test_deficits_compare_with_controls(deficits):
    found = critical_periods.deficits(deficits)
    assert len(found) == 13 + 6
    length, window = (found[found.experiment == name] for name in ("length", "window"))
    assert length.total.unique().tolist() == [400, 450, 500, 600, 800]
    assert window.total.unique().tolist() == [600]
    assert (length.place == "none").sum() == 5
    assert (window.place == "none").sum() == 1
    assert window[window.place == "inside"].start.tolist() == [100, 200, 300]
    for r in found.itertuples():
        assert r.n == 3
        assert r.std == pytest.approx(0.01)
        if r.place == "none":
            assert r.mean == pytest.approx(0.91)
            assert np.isnan(r.difference)
            assert r.worse == 0
        else:
            lost = (r.stop - r.start) / 1000 * (2 if r.place == "end" else 1)
            assert (r.difference, r.low, r.high) == (
                pytest.approx(-lost),
            ) * 3  # all seeds alike
            assert r.worse == 3


def test_deficits_treat_lower_perplexity_as_better():
    specs = designs.deficit_scan("demo", "pydoc", seeds=[0, 1])
    runs = table(row_of(s, 10 + len(s.schedule.windows), "perplexity") for s in specs)
    found = critical_periods.deficits(runs)
    assert (found[found.place != "none"].worse == 2).all()
    assert found[found.place != "none"].difference.tolist() == [1.0] * int(
        (found.place != "none").sum()
    )
    left, right = critical_periods.figure_8(runs).axes
    assert left.yaxis_inverted()
    assert left.get_ylim() == right.get_ylim()


def test_deficits_share_control_between_experiments():
    specs = designs.deficit_scan(
        "demo", "digits-graph", seeds=[0]
    )  # N = 100 steps, windows within 100 steps
    found = critical_periods.deficits(table(row_of(s, harm(s)) for s in specs))
    shared = found[found.arm == "no deficit, 100"]
    assert sorted(shared.experiment) == ["length", "window"]
    assert found[found.experiment == "length"].groupby("place").size().to_dict() == {
        "none": 4,
        "start": 3,
        "end": 3,
    }


@pytest.mark.parametrize("dataset", ["digits", "digits-graph"])
def test_deficits_separate_length_and_window_experiments(dataset):
    """Assign deficits at the start to the length or to the window experiment."""
    specs = designs.deficit_scan("smoke", dataset, seeds=[0])
    found = critical_periods.deficits(table(row_of(s, harm(s)) for s in specs))
    n = min(found.total)
    assert found[found.experiment == "length"].arm.tolist() == [
        f"no deficit, {n}",
        f"no deficit, {n + n // 2}",
        f"[0, {n // 2}) of {n + n // 2}",
        f"[{n}, {n + n // 2}) of {n + n // 2}",
    ]
    assert set(found[found.experiment == "window"].arm) == {
        f"no deficit, {n}",
        f"[0, {n // 2}) of {n}",
        f"[{n // 2}, {n}) of {n}",
    }


def test_deficits_reject_unrelated_rows(deficit_rows):
    (other,) = designs.quality_cost("demo", schedules=["CR"], static_bits=[], seeds=[0])
    assert run_groups.deficit_groups(table([row_of(other, 0.9)])) == []
    mixed = table([*deficit_rows, row_of(other, 0.9)])
    refused(
        "rows of deficits with at most one window", critical_periods.deficits, mixed
    )
    (group,) = run_groups.deficit_groups(mixed)
    assert len(group) == len(deficit_rows)
    twice = {**deficit_rows[0], "spec": {**deficit_rows[0]["spec"]}}
    twice["spec"]["schedule"] = {
        **twice["spec"]["schedule"],
        "windows": [[0, 10], [20, 30]],
    }
    refused(
        "rows of deficits with at most one window",
        critical_periods.deficits,
        table([*deficit_rows, twice]),
    )


@pytest.mark.parametrize(("dataset", "arms"), [("cifar10", 9), ("imagenet", 3)])
def test_table_1_lists_every_paper_number(dataset, arms):
    specs = designs.deficit_scan("paper", dataset, seeds=[0])
    found = critical_periods.table_1(table(row_of(s, 0.9) for s in specs))
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    paper = (
        paper[(paper.artefact == "table_1") & (paper.dataset == dataset)]
        .set_index("arm")
        .value
    )
    known = found[found.paper.notna()]
    assert dict(zip(known.paper_arm, known.paper, strict=True)) == paper.to_dict()
    assert len(known) == len(paper) == arms
    assert (known["mean"] == 90).all()
    for r in known.itertuples():  # the arm really is what the table's name says
        assert r.paper_arm == "no deficit" or r.arm.startswith(f"{r.paper_arm} of")
    demo = table(
        row_of(s, 0.9) for s in designs.deficit_scan("demo", "cifar10", seeds=[0])
    )
    assert critical_periods.table_1(demo).paper.isna().all()


def test_figure_8_draws_every_seed(deficits):
    left, right = critical_periods.figure_8(deficits).axes

    def dots(ax):
        return sum(
            len(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None"
        )

    assert dots(left) == 3 * 13
    assert dots(right) == 3 * 5  # windows; the control is a band
    curves = [
        line
        for ax in (left, right)
        for line in ax.lines
        if line.get_label().startswith("learning curve")
    ]
    assert len(curves) == 2
    assert left.get_ylim() == right.get_ylim()
    longest = [line for line in left.lines if line.get_label() == "low precision first"]
    assert list(longest[0].get_xdata()) == [50, 100, 200, 400]
    assert list(longest[0].get_ydata()) == pytest.approx([86, 81, 71, 51])
    last = [line for line in left.lines if line.get_label() == "low precision last"]
    assert list(last[0].get_ydata()) == pytest.approx([81, 71, 51, 11])
    lengths = {
        spec.key for spec in designs.deficit_length("demo", "digits", seeds=[0, 1, 2])
    }
    only = deficits[deficits.key.isin(lengths)]
    assert len(critical_periods.figure_8(only).axes) == 1  # the length alone


# --- table 1 without controls -----------------------------------------------------------------------


def uncontrolled(loss, seeds=range(4)):
    """Return runs of the nine arms of table 1 at 90 % minus a loss by start and length of the window."""
    specs = designs.deficit_scan(
        "background",
        "cifar10-jpeg/",
        deficit_starts=(244, 488, 975),
        controls=False,
        seeds=list(seeds),
    )
    rows = []
    for spec in specs:
        lost = sum(
            loss(start / 3900, (stop - start) / 3900)
            for start, stop in spec.schedule.windows
        )
        rows.append(row_of(spec, 0.9 + 0.01 * spec.seed - lost))
    return table(rows)


def test_deficits_without_controls_use_clean_training():
    """Compare deficits that lack a control with training without a deficit."""
    runs = uncontrolled(lambda start, length: 0.02 * length)
    assert len(runs) == 9 * 4
    assert not critical_periods.has_controls(critical_periods.deficits(runs))
    found = critical_periods.minus_no_deficit(runs)
    low = found[found.place != "none"]
    assert low.difference.to_numpy() == pytest.approx(
        -0.02 * (low.stop - low.start).to_numpy() / 3900
    )
    assert (low.worse == 4).all()
    assert found[found.place == "none"].difference.isna().all()
    shown = critical_periods.summary(runs)
    assert "minus no deficit [95 %]" in shown
    assert (
        shown.set_index("low precision")
        .loc["[0, 3900) of 7800", "minus no deficit [95 %]"]
        .startswith("-2.0 [")
    )


def test_deficit_summary_names_controls(deficits):
    assert critical_periods.has_controls(critical_periods.deficits(deficits))
    assert "minus control of equal length [95 %]" in critical_periods.summary(deficits)


def test_figure_8_without_controls_has_panels():
    runs = uncontrolled(lambda start, length: 0.02 * length)
    left, right = critical_periods.figure_8(runs).axes
    labels = [line.get_label() for line in left.lines]
    assert "no deficit, normal length" in labels
    assert "low precision last" not in labels
    first = next(
        line for line in left.lines if line.get_label() == "low precision first"
    )
    assert list(first.get_xdata()) == [195, 390, 975, 1950, 3900]
    windows = next(
        line for line in right.lines if line.get_label() == "window of low precision"
    )
    assert list(windows.get_xdata()) == [244, 488, 975]


def test_table_1_comparison_selects_nearest_arms():
    shown = critical_periods.table_1_beside_paper(
        uncontrolled(lambda start, length: 0.02 * length)
    )
    ours = shown.set_index("low precision (paper)")
    assert len(shown) == 9
    assert list(shown) == [
        "low precision (paper)",
        "paper, CIFAR-10 ResNet-74, %",
        "low precision (this run)",
        "this run (mean +- std, n), %",
        "minus no deficit [95 %]",
    ]
    name = "low precision (this run)"
    assert ours.loc["no deficit", name] == "no deficit, 3900"
    assert (
        ours.loc["[0, 16K)", name]
        == "[0, 195) of 4095: 5 % of the normal training (paper: 6 %)"
    )
    assert ours.loc["[0, 256K)", name].startswith("[0, 3900) of 7800: 100 %")
    assert ours.loc["[64K, 192K)", name].startswith(
        "[975, 2925) of 3900: begins after 25 %"
    )
    assert ours.loc["no deficit"].to_list()[0::2] == [
        "92.23 +- 0.09",
        "91.50 +- 1.29 (n = 4)",
    ]
    assert ours.loc["[0, 256K)", "minus no deficit [95 %]"] == "-2.00 [-2.00, -2.00]"
    lengths = uncontrolled(lambda start, length: 0.0).query("start == 0")
    assert (
        critical_periods.table_1_beside_paper(lengths)[name].to_list()[-3:]
        == ["not run"] * 3
    )


def test_table_1_comparison_at_paper_scale():
    """Select the arms of the paper at paper scale."""
    specs = designs.deficit_scan("paper", "imagenet", seeds=[0])
    shown = critical_periods.table_1_beside_paper(table(row_of(s, 0.9) for s in specs))
    assert shown.iloc[:, :2].to_numpy().tolist() == [
        ["no deficit", "67.44 +- 0.12"],
        ["[0, 25)", "66.93 +- 0.06"],
        ["[0, 100)", "66.65 +- 0.10"],
    ]
    assert (
        shown["low precision (this run)"]
        .str.startswith(("no deficit", "[0, 25)", "[0, 100)"))
        .all()
    )


def test_critical_period_finding_follows_intervals(deficits):
    def finding(loss, seeds=range(4)):
        return critical_periods.finding(uncontrolled(loss, seeds))

    early = finding(lambda start, length: 0.02 * length * (1 - start)).split("; ")
    assert early == [
        "3,900 steps of low precision first cost 2.0 points against no deficit",
        "an early window harms more than a late one",
    ]
    late = finding(lambda start, length: -0.02 * length * (1 - start)).split("; ")
    assert late == [
        "3,900 steps of low precision first gain 2.0 points against no deficit",
        "a late window harms more than an early one",
    ]
    assert finding(lambda start, length: 0.0) == (
        "No clear damage by 3,900 steps of low precision first; no clear difference between early and late windows"
    )
    assert finding(lambda start, length: 0.1, range(2)) == "2 seeds: no comparison"
    assert (
        "cost 40.0 points against training of equal length"
        in critical_periods.finding(deficits)
    )
    figure = critical_periods.figure_8(deficits)
    assert figure.get_suptitle().startswith("400 steps of low precision first cost")
    assert "2 bits in a deficit, else 8" in " ".join(figure.texts[1].get_text().split())
    assert critical_periods.figure_8(deficits, heading="so").get_suptitle() == "so"


# --- equal cost -----------------------------------------------------------------------------------


def equal_rows(seeds=range(4), **changes):
    gain = {
        "RR": 0.0,
        "RR delayed 10 %": -0.02,
        "ER": -0.05,
        "static 8": 0.1,
        "static 4": 0.03,
    }
    out = []
    for s in designs.equal_cost("demo", "digits", seeds=seeds, **changes):
        name = s.arm.split(",")[0].replace(" at 0.547", "").replace("20 %", "10 %")
        out.append(row_of(s, 0.8 + gain.get(name, 0.07) + 0.01 * s.seed))
    return out


def equal_runs(**changes):
    return table(equal_rows(**changes))


def test_equal_cost_compares_equally_costly_arms():
    found = equal_cost.equal_cost(equal_runs()).set_index("arm")
    assert found.index.tolist() == [
        "RR",
        "RR delayed 10 %",
        "ER, 290 of 600 steps",
        "static 8, 238 of 600 steps",
        "static 4, 571 of 600 steps",
    ]
    assert found.spent.between(0.99, 1.001).all()
    assert found.difference["RR delayed 10 %"] == pytest.approx(-0.02)
    assert found.better.tolist() == [0, 0, 0, 4, 4]
    assert np.isnan(found.difference["RR"])


@pytest.mark.parametrize(
    ("spent", "compared"), [(0.94, False), (0.96, True), (1.04, True), (1.06, False)]
)
def test_equal_cost_allows_five_percent(spent, compared):
    runs = equal_runs()
    rr = runs.bitops[runs.arm == "RR"].iloc[0]
    runs.loc[runs.arm == "static 8", "bitops"] = spent * rr
    assert ("static 8" in set(equal_cost.equal_cost(runs).arm)) == compared


def test_equal_cost_separates_budgets():
    runs = table(equal_rows() + equal_rows(budget=0.546875, delay=0.2))
    found = equal_cost.equal_cost(runs)
    second = found[found.base == "RR at 0.547"].set_index("arm")
    assert second.index.tolist() == [
        "RR at 0.547",
        "RR at 0.547 delayed 20 %",
        "ER, 400 of 600 steps",
        "static 8, 328 of 600 steps",
        "static 5",
    ]
    assert second.spent.between(0.99, 1.001).all()
    assert len(found[found.base == "RR"]) == 5
    refused(
        "no rows of RR", equal_cost.equal_cost, runs[~runs.arm.str.startswith("RR")]
    )


def test_equal_cost_inverts_perplexity_difference():
    specs = designs.equal_cost("demo", "pydoc", seeds=[0, 1])
    found = equal_cost.equal_cost(
        table(row_of(s, 12.0 if s.arm == "RR" else 10.0, "perplexity") for s in specs)
    )
    assert (found[found.arm != "RR"].difference == 2.0).all()


def test_quality_cost_groups_exclude_equal_cost_runs(deficit_rows):
    runs = table([*deficit_rows, *equal_rows()])
    (group,) = run_groups.quality_cost_groups(runs)
    assert set(group.arm) == {"RR", "static 8"}
    assert len(run_groups.equal_cost_groups(runs)) == 1
    assert run_groups.equal_cost_groups(group) == []


def test_run_groups_put_paper_scale_first():
    small = [
        row_of(s, 0.5)
        for s in designs.quality_cost(
            "demo", schedules=["CR"], static_bits=[8], seeds=[0]
        )
    ]
    large = [
        row_of(s, 0.5)
        for s in designs.quality_cost(
            "paper", "cifar10", schedules=["CR"], q_max=[8], seeds=[0]
        )
    ]
    assert [
        g.scale.iloc[0] for g in run_groups.quality_cost_groups(table(small + large))
    ] == ["paper", "demo"]
    (top,) = run_groups.top_groups(table(small))
    assert top.arm.to_list() == ["static 8"]


# --- predictors -----------------------------------------------------------------------------------


def quality_runs(quality, seeds=range(3), **changes):
    """Return runs whose accuracy is a function of the schedule, equal for all seeds."""
    specs = designs.quality_cost("demo", "digits", seeds=seeds, **changes)
    return table(row_of(s, 0.5 + quality(s) + 1e-4 * s.seed) for s in specs)


def by_cost(spec):
    return 0.1 * cost.relative_cost(spec.schedule.bits(), 8)


def by_noise(spec):
    return -1e-4 * cost.noise_exposure(spec.schedule.bits(), 8)


def test_predictors_identify_deciding_feature():
    one, two = (predictors.predictors(quality_runs(by)) for by in (by_cost, by_noise))
    cheap, noisy = one.set_index("predictor"), two.set_index("predictor")
    assert cheap.strength["relative_cost"] == pytest.approx(1)
    assert noisy.strength["noise_exposure"] == pytest.approx(1)
    assert cheap.verdict["noise_exposure"] == "worse"
    assert noisy.verdict["noise_exposure"] == "better"
    assert (cheap.arms == 11).all()
    assert (noisy.seeds == 3).all()
    reverse = predictors.predictors(quality_runs(lambda s: -by_cost(s))).set_index(
        "predictor"
    )
    assert reverse.strength["relative_cost"] == pytest.approx(-1)


def test_predictor_strength_matches_spearman():
    rng = np.random.default_rng(3)
    noise = {
        s.key: rng.normal(0, 0.02)
        for s in designs.quality_cost("demo", "digits", seeds=range(3))
    }
    runs = quality_runs(lambda s: by_cost(s) + noise[s.key])
    found = predictors.predictors(runs).set_index("predictor")
    static = predictors.predictors(runs, static=True)
    assert (static.arms == 10 + 6).all()  # 3 to 8 bits; 2 is below q_min
    runs = runs[~runs.arm.isin([f"static {b}" for b in range(2, 8)])]
    means = runs.groupby("arm").accuracy.mean()
    for name, sign in (
        ("relative_cost", 1),
        ("noise_exposure", -1),
        ("share_at_q_min", -1),
    ):
        x = runs.groupby("arm")[name].first()
        assert found.strength[name] == pytest.approx(
            sign * stats.spearmanr(x, means).statistic
        )
        assert found.low[name] <= found.strength[name] <= found.high[name]


def test_predictors_reject_too_few_arms():
    with pytest.raises(
        ValueError, match="ten arms and two seeds are needed, there are 11 and 1"
    ):
        predictors.predictors(quality_runs(by_cost, seeds=[0]))
    few = quality_runs(by_cost, schedules=["CR", "RR"])
    refused("there are 3 and 3", predictors.predictors, few)
    alike = table(
        row_of(s, 0.5) for s in designs.quality_cost("demo", "digits", seeds=[0, 1])
    )
    refused(
        "all arms have the same accuracy; there is nothing to rank",
        predictors.predictors,
        alike,
    )
    rows = [
        row_of(s, 0.5)
        for s in designs.quality_cost(
            "demo", "digits", schedules=["CR", "RR"], seeds=[0]
        )
    ]
    rows += [
        row_of(s, 0.5 + by_cost(s))
        for s in designs.quality_cost("demo", "digits-graph", seeds=[0, 1])
    ]
    assert list(predictors.predictors_by_title(table(rows))) == ["made up, demo scale"]
    assert (
        predictors.summary(
            predictors.predictors_by_title(table(rows))
        ).experiment.to_list()
        == ["made up"] * 3
    )
    assert predictors.predictors_by_title(few) == {}
    assert predictors.summary({}).empty


def test_run_groups_separate_deficits_per_q_max():
    """Group finished runs by aggregation, and deficits by q_max."""
    specs = designs.aggregation("demo", static_bits=(8,), seeds=[0, 1])
    rows = [
        row_of(s, 0.8, status="failed" if s.seed == 0 else "ok")
        | {"error": "took longer than 9 s"}
        for s in specs
    ]
    (group,) = run_groups.aggregation_groups(table(rows))
    assert set(group["seed"]) == {1}
    runs = table(
        row_of(s, 0.9) for s in designs.deficit_scan("smoke", "digits", seeds=[0])
    )
    found = run_groups.deficit_groups(pd.concat([runs, runs.assign(q_max=6)]))
    assert sorted(group["q_max"].unique().tolist() for group in found) == [[6], [8]]
