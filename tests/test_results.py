"""Files of ``data/results`` that ``bench`` completes: parts are merged, and rows of other commits stay apart."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench import (
    batched_runs,
    compat,
    gemm_shapes,
    paper_scale,
    rising_vs_falling,
    roles,
    zoo,
)
from bench.third_party import __main__ as third_party
from bench.third_party import invariances, known_failures, suites
from bench.third_party.invariances import Answer, relative_difference
from book import zoo as zoo_page


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Return a function that stores content as the result of a module, and one that reads it again."""

    def write(module, name, content):
        monkeypatch.setattr(module, "results_dir", lambda: tmp_path)
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return lambda: json.loads(path.read_text())

    return write


def zoo_row(name, **values):
    return {"library": "torch", "model": name, "outcome": "whole", **values}


def test_zoo_keeps_rows_of_other_models(stored, tmp_path, monkeypatch):
    """Keep rows of models that were not tried, with their commit, and drop those that are gone."""
    first, second = list(zoo.MODELS["torch"])[:2]
    rows = [zoo_row(first, share=0.5), zoo_row(second), zoo_row("no such model")]
    read = stored(zoo, "zoo.json", {"commit": "old", "models": rows})
    monkeypatch.setattr(zoo, "source", lambda: {"commit": "new"})
    monkeypatch.setattr(zoo, "try_in_process", lambda _, name: zoo_row(name, share=1.0))
    options = ["--only", f"torch {first}", "--out", str(tmp_path / "zoo.json")]
    monkeypatch.setattr("sys.argv", ["zoo", *options])
    zoo.main()
    content = read()
    assert content["commit"] == "new"
    assert content["models"] == [
        zoo_row(first, share=1.0, commit="new"),
        zoo_row(second, commit="old"),
    ]


WHOLE = {"share": 1.0, "undecided": 0.0, "unknown": [], "finite": True}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "whole"),
        ({"share": 0.995, "outcome": "in part"}, "whole"),
        ({"share": 0.95, "outcome": "in part"}, "in part"),
        ({"undecided": 0.18}, "undecided"),
        ({"share": 0.995, "undecided": 0.006, "outcome": "in part"}, "in part"),
        ({"unknown": ["mkldnn_rnn_layer"]}, "undecided"),
        ({"finite": False}, "not finite"),
    ],
)
def test_zoo_page_counts_what_was_seen(change, outcome):
    row = zoo_row("a", **WHOLE) | change
    assert zoo_page.outcome_of(row) == outcome
    assert zoo_page.is_whole(row) == (outcome == "whole")


def test_zoo_page_has_column_of_undecided_shares():
    page = zoo_page.page()
    mamba = next(line for line in page.splitlines() if "| MambaModel |" in line)
    assert "| 100% | 18.1% |" in mamba
    assert page.startswith("# 137 of 146 models")


def test_zoo_watcher_leaves_outputs_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4))
    with zoo.Watcher(model, looks=False):
        assert isinstance(model(torch.ones(2, 4)), torch.Tensor)


def test_batched_runs_keep_recipes_not_measured(stored, monkeypatch):
    before = {"provenance": {"commit": "old"}, "recipes": {"a": {"R=2": 1.5}}}
    read = stored(batched_runs, "together.json", before)
    for name in batched_runs.ALLOCATOR:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(batched_runs, "measure_recipe", lambda name: {"R=2": 2.0})
    monkeypatch.setattr(batched_runs, "source", lambda: {"commit": "new"})
    batched_runs.main(["b"])
    recipes = read()["recipes"]
    assert recipes["a"] == {"R=2": 1.5, "provenance": {"commit": "old"}}
    assert recipes["b"]["R=2"] == 2.0
    assert recipes["b"]["provenance"]["commit"] == "new"


def test_batched_runs_time_same_arms(monkeypatch):
    """Divide the time of runs that train alone by that of the same runs in a batch."""
    alone, together, counts = [], [], []
    monkeypatch.setattr(batched_runs, "REPEATS", 1)
    monkeypatch.setattr(batched_runs, "load_task_class", lambda spec: None)
    monkeypatch.setattr(batched_runs, "train", lambda _, spec: alone.append(spec.arm))
    monkeypatch.setattr(batched_runs, "training_steps", lambda _, spec: spec.arm)
    monkeypatch.setattr(batched_runs, "run_batched", together.append)
    monkeypatch.setattr(batched_runs, "run_grid", lambda *_, **options: None)

    def median_seconds(clock, *functions):
        for function in functions:
            alone.clear()
            function()
            counts.append(list(alone))
        return [float(i + 1) for i in range(len(functions))]

    monkeypatch.setattr(batched_runs, "median_seconds", median_seconds)
    batched_runs.measure_recipe("digits/mlp6")
    assert counts[: len(together)] == together


@pytest.mark.parametrize(
    ("module", "file"),
    [(roles, "roles.json"), (rising_vs_falling, "rising_vs_falling.json")],
)
def test_measurements_of_other_commit_are_not_continued(module, file, stored):
    content = {"measured": {}, "rows": [], "provenance": {"commit": "old"}}
    read = stored(module, file, content)
    with pytest.raises(SystemExit, match=r"has rows with another .*commit.*machine"):
        module.main()
    assert read() == content


def test_third_party_keeps_counts_of_skipped_part(stored, monkeypatch):
    read = stored(third_party, third_party.FILE, {"suites": {"counts": {"plain": 1}}})
    monkeypatch.setattr(suites, "run", lambda: ({"skipped": "no tests"}, []))
    monkeypatch.setattr("sys.argv", ["third_party", "--only", "suites", "--update"])
    third_party.main()
    assert read()["suites"] == {"counts": {"plain": 1}}


def answer(outcome, model="mamba, eager", question="left padding"):
    return Answer("decoders", model, question, outcome, {})


@pytest.mark.parametrize(
    ("outcomes", "unexpected", "outdated"),
    [
        (["broken", "holds"], 0, 0),
        (["crashed"], 1, 0),
        (["holds", "does not apply"], 0, 1),
        (["holds in float64"], 0, 1),
        ([], 0, 0),
    ],
)
def test_known_failures_hide_no_crash(outcomes, unexpected, outdated):
    """Report crashes of models with a known failure, and known failures that are none any more."""
    answers = [answer(outcome) for outcome in outcomes]
    assert len(known_failures.unexpected_answers(answers)) == unexpected
    assert len(known_failures.outdated_answers(answers)) == outdated


@pytest.mark.parametrize(
    ("outcome", "known"), [("FAILED", True), ("ERROR", False), ("", False)]
)
def test_suite_errors_are_not_known_failures(outcome, known):
    test = f"BertModelTest::{next(iter(suites.KNOWN_FAILURES))}"
    assert suites.is_known(test, "8", outcome) == known


def test_invariance_of_nan_outputs_is_failure():
    nan = torch.full((2, 3), torch.nan)
    with pytest.raises(ArithmeticError, match="the outputs are not finite"):
        relative_difference(nan, nan)
    partly = torch.tensor([1.0, torch.nan])
    assert relative_difference(partly, partly) == 0.0
    assert relative_difference(partly, nan[0, :2]) == float("inf")

    class Nan(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * torch.nan

    inputs = torch.randn(3, 4)
    questions = {"one sample": lambda run: [(run(inputs)[:1], run(inputs[:1]))]}
    case = invariances.Case("test", "nan", Nan, lambda run: run(inputs), questions)
    (found,) = invariances.answers(case)
    assert (found.outcome, found.error) == (
        "crashed",
        "ArithmeticError: the outputs are not finite",
    )


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["passed: 9 parts", "skipped: no Python"], 0),
        (["passed: 9 parts", "FAILED: import"], 1),
        (["skipped: no Python", "skipped: no torch"], 1),
    ],
)
def test_compat_needs_one_passed_combination(outcomes, status):
    assert compat.summarise(outcomes) == status


@pytest.mark.parametrize(
    ("has_torch", "outcome"),
    [
        (True, "FAILED: the wheel cannot be installed (requires 3.14)"),
        (False, "skipped: torch==2.6.0 cannot be installed (no index)"),
    ],
)
def test_compat_blames_wheel_if_torch_installs(has_torch, outcome, monkeypatch):
    def call(*words, cwd):
        if "--dry-run" in words:
            return has_torch, "no index"
        return "install" not in words, "requires 3.14"

    monkeypatch.setattr(compat, "_call", call)
    found = compat.check_combination("uv", "a.whl", "3.13", "2.6.0", "cpu", [])
    assert found.outcome == outcome


def test_paper_scale_weighs_recipes_of_grid(monkeypatch):
    """Count every fanout of the grid, each with its steps; rates and steps of a recipe share a count."""
    (grid,) = [
        grid
        for name, grid in paper_scale.find_grids(None).items()
        if name == "ogbn-products/fanout"
    ]
    counted = []

    def measure(spec):
        counted.append(spec.recipe.fanout)
        macs = 10**9 * spec.recipe.fanout
        return SimpleNamespace(macs=macs, checkpoint=10**6)

    monkeypatch.setattr(paper_scale, "find_grids", lambda name: {"fanout": grid})
    monkeypatch.setattr(paper_scale, "cached_timing", lambda spec: None)
    monkeypatch.setattr(paper_scale, "measure", measure)
    fanouts = [spec.recipe.fanout for spec in grid.make("paper")]
    (row,) = paper_scale.count_grids().to_dict("records")
    assert row["gigamacs"] == pytest.approx(sum(fanouts) / len(fanouts))
    assert set(counted) == set(fanouts)
    assert len(counted) < len(fanouts)


def test_gemm_shapes_name_gradient_matmuls():
    assert gemm_shapes.PASSES == ("forward", "dgrad", "wgrad")
