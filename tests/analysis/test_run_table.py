"""Tables of runs: loading, lost runs, learning rates per arm, and statistics of effects."""

import math
from functools import partial

import numpy as np
import pytest
from helpers import PROVENANCE, row_of, stored_row, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpt_lab.analysis import predictors, quality_cost, statistics
from cpt_lab.analysis.estimates import Estimate, holm
from cpt_lab.analysis.metrics import METRICS
from cpt_lab.analysis.run_table import OtherDataWarning, committed, load, table, tuned
from cpt_lab.experiments import designs, stand_ins
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe
from cpt_lab.experiments.spec import key_of
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.sweeps import stores
from tests.analysis.synthetic import by_arm, changed, lost, rows_of, runs_of

demo = partial(designs.quality_cost, "demo", static_bits=[8], seeds=range(3))

# --- statistics -----------------------------------------------------------------------------------

VALUES = st.lists(st.floats(-9, 9).map(lambda x: round(x, 3)), min_size=3, max_size=8)


@pytest.mark.slow
@given(VALUES.filter(lambda values: len(set(values)) > 1))
@settings(max_examples=20)
def test_interval_and_estimate_match_student_t(values):
    mean, low, high = statistics.interval(values)
    expected = stats.ttest_1samp(values, 0)
    assert mean == pytest.approx(np.mean(values))
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    estimate = Estimate("a", "points", np.array(values))
    assert estimate.interval() == pytest.approx((low, high))
    assert estimate.p() == pytest.approx(expected.pvalue)
    for side in ("greater", "less"):
        one_sided = stats.ttest_1samp(values, 0.3, alternative=side).pvalue
        assert estimate.p(0.3, side) == pytest.approx(one_sided)


def test_interval_of_few_or_equal_values():
    assert statistics.interval([0.3])[0] == 0.3
    assert np.isnan(statistics.interval([0.3])[1:]).all()
    assert np.isnan(statistics.interval([])).all()
    same = Estimate("a", "points", np.ones(3))
    sides = (same.p(), same.p(1.0), same.p(0, "greater"), same.p(0, "less"))
    assert sides == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("pvalues", "adjusted"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.04, math.nan, 0.01], [0.08, math.nan, 0.03]),  # a missing test counts
        ([0.9, 0.8], [1.0, 1.0]),
    ],
)
def test_holm_steps_down_and_counts_missing_tests(pvalues, adjusted):
    assert holm(pvalues) == pytest.approx(adjusted, nan_ok=True)


def test_spearman_averages_tied_ranks():
    x = np.array([1.0, 2, 2, 3, 4, 4])
    ys = np.array([[5.0, 5, 1, 2, 2, 7], [3, 1, 1, 1, 2, 2]])
    expected = [stats.spearmanr(x, y).statistic for y in ys]
    assert statistics.spearman(x, ys).tolist() == pytest.approx(expected)


def test_predictor_bounds_hold_middle_95_percent():
    low, high = predictors._bounds(np.arange(101.0)[None])
    assert (low.tolist(), high.tolist()) == ([2.5], [97.5])


def test_rank_correlation_spans_disagreeing_seeds():
    """Widen the interval if quality rises with cost in one seed and falls in the next."""
    slopes = (0.1, -0.09)
    specs = demo(seeds=[0, 1])
    runs = runs_of(specs, lambda s: 0.5 + slopes[s.seed] * s.relative_cost)
    line = predictors.rank_correlation(runs).set_index("predictor").loc["relative_cost"]
    assert (line.strength, line.low, line.high) == pytest.approx((1, -1, 1))


def test_predictor_strength_matches_spearman():
    rng = np.random.default_rng(3)
    specs = demo(static_bits=range(2, 9))
    runs = runs_of(specs, lambda s: 0.1 * s.relative_cost + rng.normal(0, 0.02))
    found = predictors.predictors(runs).set_index("predictor")
    static = predictors.predictors(runs, static=True)
    assert (static.arms == 10 + 6).all()  # 3 to 8 bits; 2 is below q_min
    runs = runs[~runs.arm.isin([f"static {bits}" for bits in range(2, 8)])]
    means = runs.groupby("arm").accuracy.mean()
    signs = {"relative_cost": 1, "noise_exposure": -1, "share_at_q_min": -1}
    for name, sign in signs.items():
        x = runs.groupby("arm")[name].first()
        expected = sign * stats.spearmanr(x, means).statistic
        assert found.strength[name] == pytest.approx(expected)
        assert found.low[name] <= found.strength[name] <= found.high[name]


# --- loading --------------------------------------------------------------------------------------


def test_share_at_q_min_of_static_arms():
    rows = rows_of(
        demo(schedules=["RR"], static_bits=[2, 3, 8], seeds=[0]), lambda s: 0.5
    )
    shares = table(rows).set_index("arm").share_at_q_min
    assert shares[["static 2", "static 3", "static 8"]].tolist() == [0, 1, 0]
    assert 0.3 < shares["RR"] < 0.8
    assert table(changed(rows[:1], arm="my curve")).savings.tolist() == ["own"]


@pytest.mark.slow
def test_load_deduplicates_runs_across_stores(tmp_path, monkeypatch):
    """Load a run of two stores once, whatever the order of the stores."""
    monkeypatch.setattr("cpt_lab.analysis.run_table.results_dir", lambda: tmp_path)
    spec, other = demo(schedules=["CR", "RR"], static_bits=[], seeds=[0])
    early, late = (
        stored_row(spec, value, provenance={**PROVENANCE, "started": day})
        for value, day in ((0.5, "2026-01-01"), (0.7, "2026-01-02"))
    )
    for first, second in ((early, late), (late, early)):
        a = write_rows(tmp_path / "a.jsonl", first)
        b = write_rows(tmp_path / "b.jsonl", second, stored_row(other, 0.6))
        for names in (["a"], ["b"], ["b", "a"], []):
            found = committed(*names)
            assert found.arm.tolist() == (["CR"] if names == ["a"] else ["CR", "RR"])
            assert found.accuracy[0] == 0.7
        assert load(a, b).accuracy[0] == load(b, a).accuracy[0] == 0.7


def test_committed_table_is_copy_of_current_files(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt_lab.analysis.run_table.results_dir", lambda: tmp_path)
    (spec,) = demo(schedules=["CR"], static_bits=[], seeds=[0])
    for value in (0.5, 0.75):
        write_rows(tmp_path / "a.jsonl", stored_row(spec, value))
        found = committed("a")
        assert found.accuracy.tolist() == [value]
        found["accuracy"] = 0.0
        assert committed("a").accuracy.tolist() == [value]


def test_load_warns_of_different_data(tmp_path):
    """Exclude runs on data with a different checksum, and warn."""
    one_arm = {"schedules": ["CR"], "static_bits": []}
    rows = [
        stored_row(spec, 0.5, data_checksum="aa")
        for spec in demo("digits", "mlp6", **one_arm, seeds=range(5))
    ]
    (elsewhere,) = demo("digits", "resnet8_w8", **one_arm, seeds=[0])
    rows.append(stored_row(elsewhere, 0.5, data_checksum="cc"))  # another part of it
    old, new = write_rows(tmp_path / "old.jsonl", *rows), tmp_path / "new.jsonl"
    assert len(load(old)) == 6

    def add(count, started="2026-02-01"):
        later = {
            "data_checksum": "bb",
            "provenance": {**PROVENANCE, "started": started},
        }
        write_rows(new, *(row | later for row in rows[:count]))

    add(2)
    message = (
        r"2 runs on digits in .*new.jsonl are left out: their data \(checksum bb\) "
        r"are not those of the other 5 \(aa\)"
    )
    with pytest.warns(OtherDataWarning, match=message):
        found = load(old, new)
    assert sorted(found.data_checksum) == ["aa"] * 5 + ["cc"]
    for started, checksum in (("2026-02-01", "bb"), ("2025-12-31", "aa")):
        add(5, started)
        with pytest.warns(OtherDataWarning, match="5 runs on digits"):
            assert sorted(load(old, new).data_checksum) == [checksum] * 5 + ["cc"]


# --- a learning rate per arm ----------------------------------------------------------------------


def at_rates(
    valid, test=lambda arm, rate: 0.5, rates=(0.1, 0.2, 0.3), metric="accuracy"
):
    """Return rows at several learning rates, with qualities by arm and rate."""
    rows = []
    for rate in rates:
        specs = demo(seeds=[0, 1])
        fields = {"lr": rate, "learning_rates": list(rates)}
        for row in changed(rows_of(specs, lambda s: 0.5, metric), fields):
            (m,) = row["metrics"]
            arm = row["spec"]["arm"]
            qualities = {"valid": valid(arm, rate), "test": test(arm, rate)}
            row["metrics"] = [
                {**m, "split": s, "value": v} for s, v in qualities.items()
            ]
            rows.append({**row, "key": key_of(row["spec"])})
    return rows


def test_tuned_selects_rate_on_validation():
    """Choose the learning rate of each arm by its validation accuracy."""

    def valid(arm, rate):
        return 0.9 if rate == (0.1 if arm == "CR" else 0.3) else 0.5

    kept = tuned(table(at_rates(valid, test=lambda arm, rate: 1 - rate)))
    rates = set(zip(kept.arm == "CR", kept.lr, strict=True))
    assert rates == {(True, 0.1), (False, 0.3)}
    arms = quality_cost.by_arm(kept).set_index("arm")
    assert (arms.loc["CR", "mean"], arms.loc["CR", "n"]) == (pytest.approx(0.9), 2)
    assert arms.loc["RR", "mean"] == pytest.approx(0.7)
    difference = quality_cost.paired_difference(kept, "CR", "RR")
    assert difference.to_list() == pytest.approx([0.2, 0.2])


def test_tuned_selects_rate_of_lowest_perplexity():
    rows = changed(
        at_rates(lambda arm, rate: rate, metric="perplexity"),
        {"task": "language_model"},
    )
    assert set(tuned(table(rows)).lr) == {0.1}


MEMORY = "torch.OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([], 0.3),
        ([(0.3, [1], "diverged", "")], 0.2),  # 0.55 on average, and one run lost
        (
            [
                (rate, seeds, "diverged", "")
                for rate, seeds in ((0.3, [0, 1]), (0.2, [0]), (0.1, [0, 1]))
            ],
            0.2,  # the fewest
        ),
        ([(0.3, [1], "failed", MEMORY)], 0.3),
        ([(rate, [0, 1], "failed", "") for rate in (0.1, 0.2, 0.3)], 0.1),
    ],
)
def test_tuned_avoids_diverged_learning_rates(losses, rate):
    rows = at_rates(lambda arm, rate: {0.1: 0.3, 0.2: 0.5, 0.3: 0.99}[rate])
    for lost_rate, seeds, status, error in losses:
        for row in rows:
            spec = row["spec"]
            if spec["recipe"]["lr"] == lost_rate and spec["seed"] in seeds:
                row |= {"status": status, "metrics": [], "error": error}
    assert set(tuned(table(rows)).lr) == {rate}


@pytest.mark.slow
def test_load_tunes_learning_rates(tmp_path):
    rows = at_rates(lambda arm, rate: rate)
    store = tmp_path / "x.jsonl"
    for row in rows:
        other = {"schema": 1, "seconds": 1.0, "device": "cpu"}
        stores.append_row(store, {**row, **other})
    assert len(load(store, every_rate=True)) == 3 * len(load(store)) == len(rows)
    assert set(load(store).lr) == {0.3}
    assert set(load(store).store) == {f"{tmp_path.name}/x.jsonl"}
    runs = runs_of(demo())
    assert tuned(runs).equals(runs)  # one rate is never dropped


# --- lost runs ------------------------------------------------------------------------------------

ERRORS = {  # error of a failed run -> whether it counts as diverged
    "Traceback\n  File ...\nValueError: found NaN in the boxes": True,
    "Traceback\n  File ...\nRuntimeError: expected scalar type Float but found Double": True,
    f"Traceback\n  File ...\n{MEMORY}": False,
    "Traceback\n  File ...\nRuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory": False,
    "Traceback\n  File ...\ncpt_core.data.files.DataNotFoundError: CIFAR-10 is not in data": False,
    "Traceback\n  File ...\ncpt_core.sweeps.stores.StoreError: cannot write rows.jsonl": False,
    "Traceback\n  File ...\nModuleNotFoundError: No module named 'dgl'": False,
    "Traceback\n  File ...\nurllib.error.URLError: <urlopen error timed out>": False,
    "took longer than 60 s\n": False,
    "the process of the run was ended by SIGKILL\n": False,
    "the process of the run ended with status 1 and no result\nImportError: no kernels": False,
}


@pytest.mark.parametrize("error", ERRORS)
def test_run_table_counts_training_errors_as_diverged(error):
    """Count errors raised by the training as divergence, and skip failures of the machine."""
    rows = by_arm(demo(schedules=["CR"]), {})
    runs = table(lost(rows, lambda arm, seed: arm == "CR", "failed", error))
    failed = runs[runs["arm"] == "CR"]
    assert failed["diverged"].tolist() == [ERRORS[error]] * 3
    assert failed["accuracy"].isna().tolist() == [not ERRORS[error]] * 3
    assert not runs["diverged"][runs["arm"] != "CR"].any()


TASKS_OF_FOLDERS = {
    "my/pictures": "image",
    stand_ins.CIFAR_COPIES: "image",
    stand_ins.FACEBOOK: "graph",
    stand_ins.CORA: "graph",
    "my-graph/": "graph",
    "my-pairs/": "entailment",
}


@pytest.mark.parametrize(
    ("dataset", "changes", "name", "worst"),
    [
        ("digits", {}, "accuracy", 0.1),
        ("cifar100", {}, "accuracy", 0.01),
        ("templates", {}, "accuracy", 1 / 3),
        ("my/pictures", {}, "accuracy", 0.0),  # how many classes is not known here
        (stand_ins.CIFAR_COPIES, {}, "accuracy", 0.1),
        (stand_ins.FACEBOOK, {}, "accuracy", 1 / 4),
        (stand_ins.CORA, {}, "accuracy", 1 / 7),
        ("my-pairs/", {}, "accuracy", 1 / 3),
        ("my-graph/", {}, "accuracy", 0.0),
        ("ptb", {}, "perplexity", 10_000),
        ("ptb", {"vocabulary": 2_000}, "perplexity", 2_000),
        ("pydoc", {}, "perplexity", 100),
        ("digit-scenes", {}, "map50", 0.0),
    ],
)
def test_task_worst_metric_is_chance_level(dataset, changes, name, worst):
    scale = "paper" if dataset in ("cifar100", "ptb") else "demo"
    task = TASKS_OF_FOLDERS.get(dataset, "image")
    r = recipe(scale, dataset, task=task).to_dict() | changes
    experiment = EXPERIMENTS[r["task"]]
    assert experiment.worst(METRICS[name], r) == pytest.approx(worst)
    assert np.isnan(experiment.worst(METRICS["loss"], r))


def test_diverged_runs_count_as_in_studies():
    """Count a run that diverged in tables as the studies count it."""
    for dataset in (stand_ins.CIFAR_COPIES, stand_ins.FACEBOOK, "digits"):
        r = recipe(
            "demo", dataset, task=TASKS_OF_FOLDERS.get(dataset, "image")
        ).to_dict()
        worst = EXPERIMENTS[r["task"]].worst(METRICS["accuracy"], r)
        assert worst == 1 / NUM_OUTPUTS[dataset]


def test_datasets_declare_number_of_classes():
    for name, data in DATASETS.items():
        assert "classes" in data.sizes or name in ("ptb", "pydoc"), name
    for experiment in EXPERIMENTS.values():
        assert all(metric.worst is not None for metric in experiment.metrics)


def test_diverged_runs_get_chance_metrics():
    """Fill in the chance level for every metric that the data set has."""
    specs = demo("templates", schedules=["CR"], seeds=[0])
    rows = [row_of(s, 0.8) for s in specs]
    (metric,) = rows[0]["metrics"]
    rows[0]["metrics"] += [
        {**metric, "name": "accuracy_es"},
        {**metric, "when": "best_valid"},
    ]
    digits = rows_of(demo(schedules=["CR"], static_bits=[], seeds=[0]), lambda s: 0.8)
    rows = lost(rows, lambda arm, seed: arm == "static 8")
    rows += lost(digits, lambda arm, seed: True)
    runs = table(rows).set_index(["dataset", "arm"])
    templates, other = runs.loc["templates", "static 8"], runs.loc["digits", "CR"]
    for name in ("accuracy", "accuracy_es", "accuracy_best_valid", "valid"):
        assert templates[name] == pytest.approx(1 / 3)
    assert np.isnan(templates["perplexity"])
    assert other["accuracy"] == pytest.approx(0.1)
    assert np.isnan(other["accuracy_es"])  # no such test set
