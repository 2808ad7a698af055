"""Command line: plans, runs, results, reports, and messages for invalid input."""

import math
import os
import re
import shutil
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch
from helpers import refused, run_command, specs_of

from cpt_extras.optional_libraries import install_hint
from cpt_lab.analysis import data_reports, precision_search_report, rendering
from cpt_lab.analysis.claims import judge_claims
from cpt_lab.analysis.preregistered import Answer
from cpt_lab.analysis.run_table import COLUMN_TYPES, load, table
from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.grids import GRIDS
from cpt_lab.experiments.registry import recipe
from cpt_lab.paths import paper_dir, results_dir
from cpt_lab.sweeps import forecast, step_timing, stores, sweep
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.step_timing import Calibration, cached_timing, measure, runs_per_gpu
from cpt_lab.tasks.image import ImageTask
from cpt_lessons.parameters import parse

DIGITS = results_dir() / "image_digits.jsonl"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path


def keep(spec, status="ok", **more):
    """Store a row of a run, as if it had finished."""
    row = {**stores.describe(spec), "status": status, "error": "x\ny", **more}
    stores.append_row(stores.store_path(spec.scale, spec.recipe.task), row)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "figure_33"], "no grid 'figure_33'; the nearest of "),
        (
            ["plan", "digits/mlp6", "--scale", "paper"],
            "of digits/mlp6 has scale 'paper'; choose from smoke, demo",
        ),
        (
            ["plan", "--scale", "big"],
            "no grid has scale 'big'; choose from smoke, demo, background, paper",
        ),
        (["plan", "digits/mlp6", "--device", "tpu"], "unknown device 'tpu'"),
        (["run"], "Missing argument 'grid'"),
        (["run", "figure_3", "--device", "cpu"], "python -m cpt_lab download cifar10"),
        (
            ["run", "ogbn-arxiv/deficit_length", "--device", "cpu"],
            "python -m cpt_lab download ogbn-arxiv",
        ),
        (["range-test", "digitz"], "no demo recipe for dataset 'digitz'"),
        (["range-test", "digits", "--q-max", "1"], "Invalid value for '--q-max'"),
        (
            ["range-test", "digits", "--q-max", "2"],
            "q_max must be at least 3, as 2 to q_max - 1 are tried; got 2",
        ),
        (
            ["range-test", "digits", "--task", "graph"],
            "--task graph is for data of your own; digits has its task",
        ),
        (
            ["range-test", "digits", "--bits", "2", "9"],
            "bits must name precisions below q_max = 8",
        ),
        (
            ["range-test", "digits", "--figure", "no/such/folder.png"],
            "an existing folder, such as answer.png; got",
        ),
        (
            ["range-test", "digits", "--figure", "answer.foo"],
            "unknown type of --figure 'foo'",
        ),
        (
            ["run", "digits/mlp6", "--scale", "smoke", "--seeds", "²"],
            "seeds must be a list of whole numbers from 0",
        ),
        (["run", "nope"], "; `plan` lists them all"),
        (
            ["run", "digits/mlp6", "--scale", "huge"],
            "has no scale 'huge'; choose from demo, smoke",
        ),
        (
            ["run", "digits/mlp6", "--arms", "XR"],
            "no arm 'XR' in this grid; choose from LR, LT",
        ),
        (
            ["run", "digits/mlp6", "--savings", "larg"],
            "no savings 'larg' in this grid; choose from",
        ),
        (
            ["run", "digits/mlp6", "--arms", "CR", "--savings", "large"],
            "no run has one of the arms CR and savings",
        ),
        (
            ["run", "digits/mlp6", "--schedules", "XR"],
            "schedules must be a list of LR, LT",
        ),
        (
            ["run", "digits/mlp6", "--q-max", "six"],
            "q_max must be a list of whole numbers from 1 to 32; got 'six'",
        ),
        (
            ["run", "digits/mlp6", "--q-min", "9"],
            "q_min: expected an integer from 1 to q_max = 8, got 9",
        ),
        (
            ["run", "digits/mlp6", "--q-max", "6", "--static-bits", "8"],
            "expected precisions up to q_max = 6, got 8",
        ),
        (
            ["run", "digits/mlp6", "--steps", "0"],
            "steps must be a whole number from 1 to 10000000, or None; got 0",
        ),
        (
            ["run", "digits/mlp6", "--learning-rate", "-1"],
            "learning_rate must be a number above 0",
        ),
        (
            ["run", "digits/mlp6", "--seeds", "none"],
            "seeds must be a list of at least one of whole numbers",
        ),
        (
            ["run", "digits/mlp6", "--schedules", "none", "--static-bits", "none"],
            "has no runs with these options",
        ),
        (
            ["run", "digits/mlp6", "--decay", "step"],
            "grid 'digits/mlp6' takes no decay; it takes dataset, model",
        ),
        (
            ["run", "digits/deficit_length", "--schedules", "CR"],
            "takes no schedules; it takes dataset, model",
        ),
        (
            ["run", "h4/gradients", "--steps", "9"],
            "grid 'h4/gradients' takes no steps; it takes seeds",
        ),
        (
            ["run", "figure_7", "--dataset", "my-text/"],
            "dataset 'my-text/' is for one grid, and these are",
        ),
        (
            ["plan", "digits/deficit_length", "--deficit-lengths", "-1"],
            "deficit_lengths must be a list of whole",
        ),
        (
            ["plan", "digits/deficit_window", "--deficit-starts", "500"],
            "windows of 200 steps within 600 steps, from 0",
        ),
        (
            ["plan", "digits/deficit_length", "--decay", "linear"],
            "decay must be a list of recipe, constant, step",
        ),
        (
            ["rows", "digits/mlp6", "--csv", "no/such/folder.csv"],
            "an existing folder, such as rows.csv; got no",
        ),
        (["rows", "nope"], "; `plan` lists them all"),
        (
            ["run", "digits/mlp6", "--seeds", "0,1"],
            "0 to 2147483647, or None; got (0, 1)",
        ),
        (
            ["run", "digits/mlp6", "--workers", "-3"],
            "of at least 0 and at most 1024, got -3",
        ),
        (["run", "digits/mlp6", "--scheduler", "tcp://x:1"], "is for executor 'dask'"),
        (["run", "digits/mlp6", "--retry"], "No such option"),
        *(
            (
                ["run", "digits/mlp6", "--seeds", "0", "--shard", part],
                "--shard takes I/N, such as 1/4, with I <= N <= 17",
            )
            for part in ("0/2", "3/2", "1/18", "2")
        ),
        (["report", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["report", __file__], "line 1 is no JSON"),
        (["explorer", "."], ". is a folder; name a file"),
        (["explorer", "no/such/page.html"], "there is no folder no/such"),
        (["reproduce", "--notebook", "99"], "no notebook '99'; choose from 00"),
        (
            ["reproduce", "--scale", "big"],
            "scale must be one of smoke, demo, background, paper; got 'big'",
        ),
        (
            ["reproduce", "-p", "seeds"],
            "a parameter is written NAME=VALUE; got 'seeds'",
        ),
        (
            ["reproduce", "-p", "shedules=[CR]"],
            "unknown parameter 'shedules'; did you mean 'schedules'?",
        ),
        (["reproduce", "-p", "schedules=[XR]"], "schedules must be a list of LR"),
        (["reproduce", "-p", "schedules=CR"], "schedules must be a list of LR"),
        (["reproduce", "-p", "seeds=[zero]"], "seeds must be a list of whole numbers"),
        (
            ["reproduce", "-p", "workers=many"],
            "workers must be a whole number from 0 to 1024; got 'many'",
        ),
        (
            ["reproduce", "-p", "workers=2", "workers=3"],
            "parameter 'workers' is given twice",
        ),
        (
            ["reproduce", "--notebook", "00", "-p", "workers=2"],
            "no chosen notebook has a parameter 'workers'",
        ),
        (
            ["reproduce", "--notebook", "03", "--dataset", "cifar10"],
            "python -m cpt_lab download cifar10",
        ),
        (["try", "nothere/"], "there is no file or folder"),
        (
            ["try", "cpt_lab/data/"],
            "data is not laid out as any task needs it; found __init__.py, ",
        ),
        (
            ["try", "digits", "--task", "graph"],
            "--task graph is for data of your own; digits has its task",
        ),
        (["try", "digits", "--margin", "0"], "Invalid value for '--margin'"),
        (["try", "nothing/", "--minutes", "0"], "Invalid value for '--minutes'"),
        (
            ["try", "digits", "--workers", "-1"],
            "workers must be a whole number of at least 0",
        ),
        (
            ["range-test", "cpt_lab/data/", "--task", "graph"],
            "is no data for this task (graph)",
        ),
        (["reproduce", "--notebook", "01", "-p", "q_min=9"], "1 <= q_min <= q_max"),
        (
            ["reproduce", "--notebook", "01", "-p", "total_steps=6 n_cycles=8"],
            "n_cycles must lie in 1..total_steps",
        ),
        (["download", "mnist"], "mnist"),
        (["verify"], "give files of rows, or a preregistered grid with --verdict"),
        (
            ["verify", "rows.jsonl", "--verdict", "h3/facebook"],
            "give files of rows, or a preregistered grid with",
        ),
        (["conquer"], "No such command 'conquer'"),
    ],
)
def test_command_reports_invalid_input_in_one_line(
    words, message, command, place, monkeypatch
):
    """Report invalid input in one line before any work starts."""
    monkeypatch.setenv("CPT_DATA_DIR", str(place / "data"))
    status, _, said = command(*words)
    said = re.sub(r"[\s│╭╰─╮╯]+", " ", said)
    assert status == 2, said
    assert message in said
    assert "Traceback" not in said
    assert len(said) < 500
    assert [p for p in (place / "runs").rglob("*.jsonl") if p.read_text()] == []


def test_command_names_extra_of_missing_import(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "cpt_lab.sweeps.forecast")
    said = f"error: pandas cannot be imported; {install_hint('lab')}"
    status, _, err = command("plan")
    assert (status, err.splitlines()[-1]) == (2, said)


def test_range_test_command_reports_empty_archive(command, place):
    (place / "empty.npz").touch()
    status, _, said = command("range-test", f"{place}/empty.npz", "--task", "graph")
    assert status == 2
    assert "empty.npz cannot be read: " in said
    assert "Aborted" not in said


def test_run_command_runs_all_grids_of_study(command, monkeypatch):
    """Run all grids of a figure or study, and store the rows of each task in its store."""
    asked = []
    monkeypatch.setattr(
        sweep,
        "run_grid",
        lambda specs, store, options: asked.append((store.name, len(specs))) or [],
    )
    status, said, _ = command("run", "h4")
    assert (status, asked) == (0, [("language_model.jsonl", 52), ("graph.jsonl", 120)])
    assert "h4 at demo scale: 120 runs, rows in " in said
    asked.clear()
    assert command("run", "h4", "--seeds", "7", "--shard", "1/2")[0] == 0
    assert asked == [("language_model.jsonl", 2), ("graph.jsonl", 3)]


def test_run_command_overrides_grid_parameters(command, monkeypatch):
    asked = []
    monkeypatch.setattr(
        sweep, "run_grid", lambda specs, store, options: asked.extend(specs) or []
    )
    words = [
        "run",
        "digits/mlp6",
        "--scale",
        "smoke",
        "--schedules",
        "CR",
        "RR",
        "--static-bits",
        "none",
    ]
    assert command(*words, "--seeds", "0", "1")[0] == 0
    assert [(s.arm, s.seed) for s in asked] == [
        ("CR", 0),
        ("CR", 1),
        ("RR", 0),
        ("RR", 1),
    ]
    asked.clear()
    settings = [
        "--q-max",
        "6",
        "8",
        "--q-min",
        "4",
        "--q-grad",
        "7",
        "--n-cycles",
        "3",
        "--steps",
        "60",
    ]
    assert command(*words, *settings, "--learning-rate", "0.5")[0] == 0
    assert {
        (
            s.q_max,
            s.q_grad,
            s.recipe.q_min,
            s.recipe.n_cycles,
            s.recipe.steps,
            s.recipe.lr,
        )
        for s in asked
    } == {(top, 7, 4, 3, 60, 0.5) for top in (6, 8)}
    asked.clear()
    assert (
        command(
            "run",
            "digits/mlp6",
            "--scale",
            "smoke",
            "--dataset",
            "cifar10",
            "--arms",
            "CR",
        )[0]
        == 0
    )
    assert [(s.recipe.dataset, s.recipe.model) for s in asked] == [
        ("cifar10", "resnet8_w8")
    ]


def test_run_command_overrides_deficits(command, monkeypatch):
    asked = []
    monkeypatch.setattr(
        sweep, "run_grid", lambda specs, store, options: asked.extend(specs) or []
    )
    words = [
        "run",
        "digits/deficit_window",
        "--scale",
        "smoke",
        "--seeds",
        "0",
        "--no-controls",
    ]
    given = [
        "--deficit-starts",
        "5",
        "9",
        "--deficit-window",
        "7",
        "--deficit-bits",
        "3",
        "--decay",
        "constant",
    ]
    assert command(*words, *given)[0] == 0
    assert [
        (s.schedule.windows, s.schedule.q_low, s.recipe.lr_rule) for s in asked
    ] == [(((5, 12),), 3, "constant"), (((9, 16),), 3, "constant")]


def test_run_command_filters_by_arms_and_savings(command, monkeypatch):
    asked = []
    monkeypatch.setattr(
        sweep, "run_grid", lambda specs, store, options: asked.extend(specs) or []
    )
    assert (
        command("run", "figure_8", "--arms", "no deficit, 400")[0] == 0
    )  # of one of its grids
    assert {(s.recipe.dataset, s.arm) for s in asked} == {("digits", "no deficit, 400")}
    asked.clear()
    command("run", "pydoc/lstm", "--savings", "small", "--seeds", "0")
    assert [s.arm for s in asked] == ["ER", "ETH"]


def test_plan_command_counts_selected_runs(command):
    words = [
        "digits/mlp6",
        "--scale",
        "smoke",
        "--schedules",
        "CR",
        "RR",
        "--static-bits",
        "8",
        "--q-max",
        "6",
        "8",
    ]
    _, out, _ = command("plan", *words[:3], "--arms", "CR", "static 8")
    assert "\ngrids: 1; 2 runs: 0 done" in out
    _, out, _ = command("plan", *words, "--seeds", "0", "1")
    assert (
        "\ngrids: 1; 10 runs: 0 done" in out
    )  # two schedules twice and static 8 once, with two seeds
    keep(
        grids.grid_specs("digits/mlp6", "smoke", [1], schedules=["CR"], q_max=[6])[0],
        seconds=1.0,
    )
    assert (
        "10 runs: 1 done, 0 failed, 9 missing"
        in command("plan", *words, "--seeds", "0", "1")[1]
    )


def test_rows_command_prints_and_writes_csv(command, place):
    words = [
        "rows",
        "digits/mlp6",
        "--arms",
        "CR",
        "static 8",
        "--seeds",
        "0",
        "1",
        "77",
    ]
    status, out, _ = command(*words, "--csv", str(place / "rows.csv"))
    assert (status, out.splitlines()[-2:]) == (
        0,
        ["4 of 6 runs stored", f"written to {place / 'rows.csv'}"],
    )
    shown = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    expected = (
        100
        * load(DIGITS)
        .query("model == 'mlp6' and q_min == 3 and arm == 'CR' and seed < 2")
        .accuracy.mean()
    )
    assert shown["CR"][1:4] == ["2", "0.631", f"{expected:.1f}"]
    frame = pd.read_csv(place / "rows.csv")
    assert set(COLUMN_TYPES) <= set(frame)
    assert (frame.arm.tolist(), frame.seed.tolist()) == (
        ["CR", "CR", "static 8", "static 8"],
        [0, 1, 0, 1],
    )
    specs = grids.grid_specs("digits/mlp6", "demo", [77])
    keep(next(s for s in specs if s.arm == "CR"), "failed")
    assert command(*words)[1].splitlines()[-1] == "5 of 6 runs stored, 1 of them failed"


def test_rows_command_without_stored_rows(command):
    assert command("rows", "digits/mlp6", "--scale", "smoke")[:2] == (
        0,
        "0 of 12 runs stored\n",
    )
    keep(grids.grid_specs("digits/mlp6", "smoke")[0], seconds=1.0)
    assert command("rows", "digits/mlp6", "--scale", "smoke")[1].endswith(
        "\n1 of 12 runs stored\n"
    )


def test_help_lists_every_command(command):
    _, out, _ = command("--help")
    listed = set(re.findall(r"^\W*([a-z][a-z-]+)  ", out, re.MULTILINE))
    assert {"plan", "run", "notebooks", "claims"} < listed
    for name in ("run", "plan", "rows"):
        status, out, _ = command(name, "--help")
        assert (status, "Usage" in out) == (0, True)


def test_plan_command_counts_done_failed_and_missing(command):
    for spec, status in zip(
        grids.grid_specs("digits/mlp6", "smoke"),
        ["ok", "diverged", "failed"],
        strict=False,
    ):
        keep(spec, status, seconds=1.0)
    status, out, _ = command("plan", "digits/mlp6", "--scale", "smoke")
    assert status == 0
    assert "12 runs: 2 done, 1 failed, 9 missing" in out


def test_plan_command_counts_shared_runs_once(command):
    out = command("plan", "table_1", "--scale", "paper")[1]
    assert "; 87 runs: " in out
    assert "\n3 of them are runs of another grid, too; each is done once" in out
    said = command("run", "table_1", "--scale", "paper", "--shard", "1/85")[2]
    assert "with I <= N <= 84, the runs" in " ".join(said.split())


def test_plan_estimates_cost_from_cached_timing(monkeypatch):
    known = Calibration(
        seconds_per_step=0.5,
        peak_memory=1,
        host_memory=1,
        checkpoint=10**6,
        macs=1024 * 1000,
        measured=time.time() - 3 * 86400,
    )
    monkeypatch.setattr(forecast, "cached_timing", lambda spec, device: known)
    (line,) = forecast.plan("digits/mlp6", "smoke").itertuples()
    specs = grids.grid_specs("digits/mlp6", "smoke")
    squares = sum(int(q * q + 16 * q) for spec in specs for q in spec.schedule.bits())
    assert line.bitops == 1000 * squares
    assert line.hours == pytest.approx(12 * 190 * 0.5 / 3600)
    keep(specs[0], seconds=7.0, device="cpu")
    frame = forecast.plan("digits/mlp6", "smoke")
    assert frame.hours[0] == pytest.approx(
        11 * 7.0 / 3600
    )  # what runs really took counts more than measured steps
    said = "disk for 1 grids: 3 MB; their steps were measured here, the oldest 3.0 days ago"
    assert said in forecast.text(frame)


def test_plan_command_measures_only_on_request(command, monkeypatch, place):
    def measured(spec, device):
        asked.append(spec.recipe.model)
        raise RuntimeError("no luck")

    asked = []
    monkeypatch.setattr(forecast, "measure", measured)
    status, out, _ = command("plan", "digits/mlp6", "--scale", "smoke")
    assert (status, asked) == (0, [])
    assert (
        "grids never measured here: 1; plan --measure finds their bit operations, hours and disk"
        in out
    )
    assert "hours (" not in out
    (line,) = forecast.plan("digits/mlp6", "smoke").itertuples()
    assert [
        math.isnan(value) for value in (line.bitops, line.hours, line.disk, line.age)
    ] == [True] * 4
    keep(grids.grid_specs("digits/mlp6", "smoke")[0], seconds=7.0, device="cpu")
    frame = forecast.plan("digits/mlp6", "smoke")  # but stored runs tell hours
    assert frame.hours.tolist() == [pytest.approx(11 * 7.0 / 3600)]
    assert (
        "missing runs of 1 grids one after the other here: 0.0 hours ("
        in forecast.text(frame)
    )
    assert "MB" not in forecast.text(frame)
    status, out, _ = command("plan", "digits/mlp6", "--scale", "smoke", "--measure")
    assert (status, asked) == (0, ["mlp6"])
    assert "no luck" in out


def test_grids_cover_every_figure_and_table():
    artefacts = {grid.artefact for grid in GRIDS.values()}
    assert artefacts == {
        "table_1",
        "section_4.3",
        "section_4.4",
        "section_5",
        *(f"figure_{i}" for i in range(3, 9)),
    }
    for (
        name,
        grid,
    ) in GRIDS.items():  # how many there are at paper scale, test_docs says
        for scale in grid.scales:
            specs = grids.grid_specs(name, scale)
            assert len({s.key for s in specs}) == len(specs)
            if grid.artefact == "figure_5":  # two aggregations at static q_max
                assert len(specs) == {"paper": 6, "demo": 6, "smoke": 2}[scale]
            else:
                assert len(specs) >= 3  # a window, and both controls
    frame = forecast.plan(measured=False)
    assert list(frame["grid"]) == [*GRIDS, *grids.QUESTIONS]
    assert f"grids: {len(frame)};" in forecast.text(frame)


@pytest.mark.slow
def test_step_timing_is_cached_and_plausible(place):
    (spec,) = specs_of("CR")
    assert cached_timing(spec) is None
    (place / "runs").mkdir()
    (place / "runs" / "calibration.json").write_text("{damaged")
    assert cached_timing(spec) is None
    found = measure(spec)
    assert found.macs * 1024 == 64 * (64 * 32 + 5 * 32 * 32 + 32 * 10) * 1024
    assert found.seconds_per_step > 0
    assert found.peak_memory > 10**8
    assert (
        found.checkpoint > 4 * (64 * 32 + 5 * 32 * 32 + 32 * 10) * 2
    )  # weights and their momentum
    assert cached_timing(spec) == found
    bad = designs.quality_cost(
        "paper",
        "cifar100",
        "resnet74",
        schedules=["CR"],
        static_bits=[],
        seeds=[0],
        q_max=[8],
    )[0]
    bad = replace(bad, recipe=replace(bad.recipe, model="vgg"))
    refused(
        "vgg on cifar100 does not run here: KeyError: 'vgg'",
        measure,
        bad,
        error=RuntimeError,
    )


def test_step_timing_measures_training_steps(monkeypatch):
    """Time steps that clip gradients and set the learning rate, as in a run."""
    (spec,) = specs_of("CR", clip=0.001, lr=0.5)
    seen = []

    class Watched(ImageTask):
        def optimizer(self, model):
            optimizer, _ = super().optimizer(model)

            def look(optimizer, *_):
                gradients = torch.cat(
                    [
                        p.grad.flatten()
                        for group in optimizer.param_groups
                        for p in group["params"]
                    ]
                )
                seen.append(
                    (
                        gradients.norm().item(),
                        {group["lr"] for group in optimizer.param_groups},
                    )
                )

            optimizer.register_step_pre_hook(look)
            return optimizer, lambda step, evaluations: 0.0125

    monkeypatch.setattr("cpt_lab.tasks.base.load_task_class", lambda spec: Watched)
    monkeypatch.setattr(step_timing, "MEASURING_SECONDS", 0.1)
    step_timing._steps(spec, "cpu")
    assert len(seen) > 1
    assert all(norm == pytest.approx(0.001, rel=1e-3) for norm, _ in seen)
    assert all(rates == {0.0125} for _, rates in seen)


@pytest.mark.filterwarnings("default:measurements cannot be kept")
def test_plan_command_works_without_writable_folder(command, place):
    (place / "runs").write_text("a file where the folder should be")
    status, out, said = command("plan", "digits/mlp6", "--scale", "smoke", "--measure")
    first, why = said.splitlines()
    assert (status, first) == (0, "reading grids and stored rows")
    assert (
        why == f"warning: measurements cannot be kept in {place / 'runs'}: File exists"
    )
    assert "missing runs of 1 grids one after the other here" in out


def test_step_timing_key_covers_machine_and_recipe(
    monkeypatch,
):
    (spec,) = specs_of("CR")
    former = step_timing._key(spec, "cpu")
    assert step_timing._key(replace(spec, seed=1), "cpu") == former
    assert (
        step_timing._key(replace(spec, recipe=replace(spec.recipe, batch=32)), "cpu")
        != former
    )
    changes = {
        "VERSION": step_timing.VERSION + 1,
        "cpu": lambda: {"cpu": "another", "instructions": []},
        "torch.__version__": "1.0",
        "SweepOptions": lambda: SweepOptions(threads=2),
    }
    for name, value in changes.items():
        with monkeypatch.context() as changed:
            changed.setattr(f"cpt_lab.sweeps.step_timing.{name}", value)
            assert step_timing._key(spec, "cpu") != former, name


def test_step_timing_rejects_diverging_random_data():
    (spec,) = specs_of("CR", clip=None, lr=1e30)
    refused(
        "the loss of random data is not finite",
        step_timing._steps,
        spec,
        "cpu",
        error=ArithmeticError,
    )


def test_runs_per_gpu_is_limited_by_memory():
    gigabyte = 2**30

    def packed(on_gpu, on_host, cores=16):
        return runs_per_gpu(
            on_gpu * gigabyte, 24 * gigabyte, on_host * gigabyte, 64 * gigabyte, cores
        )

    assert packed(30, 1) == packed(1, 90) == 1  # it may not fit, but one is tried
    assert packed(1, 1, cores=4) == 4  # no more than cores
    assert packed(4, 1) == 4
    assert packed(1, 10) == 5  # nine tenths of the machine's memory


@pytest.mark.slow
def test_run_command_then_report(command, place, monkeypatch):
    words = [
        "run",
        "digits/mlp6",
        "--scale",
        "smoke",
        "--arms",
        "CR",
        "--seeds",
        "0",
        "1",
    ]
    status, out, said = command(*words, "--workers", "0")
    assert (status, said) == (0, "")
    assert "2 runs" in out
    assert "2 ok" in out
    few = results_dir() / "cycles_digits.jsonl"
    shutil.copy(few, place)
    monkeypatch.setattr("cpt_lab.paths.results_dir", lambda: place)
    status, out, _ = command("report")
    page = (place / "runs" / "report.html").read_text()
    count = str(len(few.read_text().splitlines()))
    assert re.findall(r"(\w+\.jsonl)</td><td>(\d+)</td>", page) == [
        (few.name, count)
    ]  # of no smoke run
    assert "smoke scale" not in page


def test_run_command_shards_merge_into_one_store(command, monkeypatch, tmp_path):
    words, files, keys = (
        ["run", "digits/mlp6", "--scale", "smoke", "--arms", "CR", "RR", "static 8"],
        [],
        [],
    )
    for part in ("1/2", "2/2"):
        monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / part[0]))
        assert command(*words, "--workers", "0", "--shard", part)[0] == 0
        files.append(tmp_path / part[0] / "smoke" / "image.jsonl")
        keys.append({row["key"] for row in stores.load_rows(files[-1])})
    assert [len(of) for of in keys] == [2, 1]
    assert not keys[0] & keys[1]
    with files[0].open("ab") as file:
        file.write(files[1].read_bytes())
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "1"))
    status, out, said = command(*words, "--workers", "0")
    assert (status, said, len(stores.load_rows(files[0]))) == (
        0,
        "",
        3,
    )  # nothing is left to run
    assert "3 ok" in out


def test_run_command_prints_reason_of_failed_runs(command, monkeypatch):
    errors = {
        "CR": "Traceback\nValueError: no luck",
        "RR": "took longer than 5 s\nthe end of its log",
    }

    def fail(job, should_stop):
        yield from ()
        return {
            **stores.describe(job.spec),
            "status": "failed",
            "error": errors[job.spec.arm],
        }

    monkeypatch.setattr("cpt_lab.sweeps.worker._trained_row", fail)
    words = [
        "digits/mlp6",
        "--scale",
        "smoke",
        "--arms",
        "CR",
        "RR",
        "--seeds",
        "0",
        "0",
        "--workers",
        "0",
    ]
    status, out, said = command("run", *words)
    assert status == 1
    assert "2 failed" in out
    assert "failed: CR seed 0: ValueError: no luck (log: " in said
    assert "failed: RR seed 0: took longer than 5 s (log: " in said
    assert "--retry-failed" in said


def test_result_table_has_typed_columns(tmp_path):
    assert load(tmp_path / "none.jsonl").dtypes.to_dict() == table([]).dtypes.to_dict()
    runs = load(DIGITS)
    assert (
        runs.dtypes.drop([c for c in runs if c not in COLUMN_TYPES]).to_dict().keys()
        == COLUMN_TYPES.keys()
    )
    assert {str(runs[c].dtype) for c in ("seed", "q_max", "steps")} == {"Int64"}
    assert runs.accuracy.between(0, 1).all()
    assert len(runs) == len(set(runs.key)) == len(DIGITS.read_text().splitlines())


def test_parse_notebook_parameters_from_words():
    assert parse(["schedules=[]", "scale=paper", "n_cycles=4"]) == {
        "schedules": [],
        "scale": "paper",
        "n_cycles": 4,
    }
    assert parse(["schedules=['CR', \"RR\"]"]) == {"schedules": ["CR", "RR"]}


def test_range_test_command_prints_result_and_figure(command, place):
    words = [
        "range-test",
        "digits",
        "--scale",
        "smoke",
        "--bits",
        "2",
        "3",
        "--dwell",
        "8",
        "--seeds",
        "0",
        "1",
    ]
    status, said, _ = command(*words, "--figure", str(place / "f.png"))
    assert status == (0 if "q_min = " in said else 1)
    assert said.startswith("mlp6 on scikit-learn digits")
    assert "mean +- std, 2 seeds, 8 steps each" in said
    assert [
        line.split()[0] for line in said.splitlines() if line[:4].strip().isdigit()
    ] == ["2", "3", "8"]
    assert (place / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_try_command_warns_of_hours_for_detection(command, monkeypatch):
    def stopped(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("cpt_lab.analysis.precision_search_report.try_recipe", stopped)
    status, _, said = command("try", "digit-scenes")
    assert status == 130
    assert "a training takes minutes, an answer hours (--minutes 300)" in said
    assert "hours" not in command("try", "digits")[2]


@pytest.mark.slow
def test_try_command_prints_answer_and_writes_page(command, place):
    words = ["try", "digits", "--scale", "smoke", "--seeds", "1", "--workers", "0"]
    status, said, _ = command(*words)
    assert status == 0, said
    assert said.startswith("mlp6 on scikit-learn digits, 8 x 8")
    for told in (
        ": 12 trainings, 1 seed; nothing is clear with so few; plus is better, 1 point of accuracy is too little "
        "to matter\n",
        "\nBits:      With ",
        " bits, with gradients of 8, do 0.",
        "\nTime:      None is saved, as low precision is simulated",
    ):
        assert told in said
    rows = place / "runs/try/digits-mlp6-smoke/rows.jsonl"
    page = (rows.parent / "index.html").read_text()
    assert "bits are perhaps enough" in page  # one seed
    assert "plus is better, 1 point of accuracy is too little to matter" in page
    assert "points" in page
    trainings, _, data = page.rpartition(f">{data_reports.TITLE} digits</h2>")
    assert trainings.count("<tr>") == 1 + 11  # all but float32
    assert data.count("<tr>") > 1
    assert (rows.parent / "answer.txt").read_text().startswith("digits\n")
    (told,) = precision_search_report.answer_sections("digits", "smoke")
    shown = rendering.render("page.html.j2", title="", notes=[], sections=[told])
    (figure,) = re.findall("<img[^>]* src='([^']*)' width='480'", shown)
    index = place / "runs/reproduce/smoke"  # from where it is seen
    index.mkdir(parents=True)
    assert (index / figure).read_bytes().startswith(b"\x89PNG")
    before = rows.read_bytes()
    assert command(*words)[1].splitlines()[0] == said.splitlines()[0]
    assert rows.read_bytes() == before  # nothing is trained twice


def test_try_command_separates_similar_folder_names(place):
    stores = set()

    def run(specs, store):
        stores.add(store)
        raise RuntimeError("enough")

    for dataset in ("a-b/", "a/b/"):
        own = replace(recipe("smoke"), dataset=dataset)
        refused(
            "enough",
            precision_search_report.try_recipe,
            own,
            "smoke",
            run,
            at_once=1,
            error=RuntimeError,
        )
    assert len(stores) == 2


def test_try_command_prints_reason_of_failed_training(command, monkeypatch):
    monkeypatch.setattr(
        "cpt_lab.sweeps.sweep.run_grid",
        lambda specs, store, options: [
            {
                "status": "failed",
                "error": "Traceback\nMemoryError: none left",
                "spec": spec.to_dict(),
            }
            for spec in specs
        ],
    )
    status, _, said = command("try", "digits", "--scale", "smoke")
    assert status == 1
    assert (
        "a training failed: float32, seed 0: MemoryError: none left; rows and logs: "
        in said
    )


@pytest.mark.slow
def test_claims_command_prints_summary_or_all(command, monkeypatch, tmp_path):
    entries, store, asked = (
        judge_claims(load(results_dir() / "language_pydoc.jsonl")),
        tmp_path / "own" / "mine.jsonl",
        [],
    )
    monkeypatch.setattr(
        "cpt_lab.analysis.claims.judge_claims",
        lambda runs: asked.append(runs) or entries,
    )
    monkeypatch.setattr("cpt_lab.analysis.run_table.load", lambda *stores: stores)
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(
        "cpt_lab.analysis.preregistered.all_answers",
        lambda runs: [Answer("H9", "Why?", outcome="open")],
    )
    committed_words = (paper_dir() / "claims.txt").read_text().splitlines()[1:]
    assert command("claims")[1:] == ("\n".join(committed_words) + "\n", "")
    store.parent.mkdir()
    store.touch()
    shown = command("claims")[1:]  # at once, also where there are rows of one's own
    assert shown[0].splitlines() == committed_words
    assert (
        shown[1] == f"by the committed rows; --all judges those under {tmp_path}, too\n"
    )
    assert asked == []
    said = command("claims", "--all")[1].splitlines()
    at_paper = sum(not e.verdicts()[0].startswith("open") for e in entries)
    words = rf"{len(entries)} claims, exactly or at the paper's scale: (.*); at smaller ones: .*"
    counts = re.fullmatch(words, said[0])
    assert sum(map(int, re.findall(r"\d+", counts[1]))) == at_paper
    assert said[-3:] == [
        "our own questions (docs/preregistration.md):",
        "H9: Why?",
        "  open",
    ]
    assert len(said) == 4 + 4 * len(entries)
    assert (
        command("claims", "--all")[2] == "judging all rows, for about half a minute\n"
    )
    assert asked == [(*sorted(results_dir().glob("*.jsonl")), store)] * 2
    monkeypatch.setattr(
        "cpt_lab.commands.results_dir", lambda: tmp_path
    )  # other rows than those that were judged
    assert command("claims")[1].splitlines() == [*said[:1], *said[-3:]]
    assert len(asked) == 3


@pytest.mark.slow
def test_claims_command_works_without_utf_8_locale(place):
    """Print UTF-8 and accept any file name in the C locale; test_architecture checks written files."""
    script = """if True:
        import sys
        from pathlib import Path
        from cpt_lab import commands
        from cpt_lab.data.files import fingerprint_paths
        from cpt_lab.paths import results_dir

        here = Path(sys.argv.pop())
        Path(here / "b\\udcc3\\udcb6x").mkdir()  # as a file system of UTF-8 shows it here
        (here / "b\\udcc3\\udcb6x" / "a").write_bytes(b"1")
        assert fingerprint_paths([here / "b\\udcc3\\udcb6x"]) != fingerprint_paths([here / "none"])
        commands.all_stores = lambda: [results_dir() / "cycles_digits.jsonl"]
        commands.main()
    """
    words = [sys.executable, "-c", script, "claims", "--evidence", place]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = run_command(*words, env={**os.environ, **locale}, encoding="utf-8")
    assert "open: mlp6 on scikit-learn digits, 8 x 8, 3 to 8 bits" in said
    assert "paper scale: confirmed, exact\n  smaller scales: –\n  rule of 2" in said


def test_try_command_names_model_and_trainings(command, place, monkeypatch):
    words = [
        "try",
        "digits",
        "--scale",
        "smoke",
        "--seeds",
        "1",
        "--workers",
        "0",
        "--minutes",
        "0.01",
    ]
    status, _, said = command(*words)
    assert status == 0
    assert "The model is mlp6, the first for such data; --model names another." in said
    assert re.search(r"^trained .+, seed 0: ok, \d+ s$", said, re.MULTILINE)
    page = (place / "runs/try/digits-mlp6-smoke/index.html").read_text()
    assert "The model is mlp6, the first for such data" in page
    assert "The model is mlp6." in command(*words, "--model", "mlp6")[2]


@pytest.mark.parametrize(
    "dataset", ["./<img src=x onerror=alert(1)>/", "../../mine/", ".hidden/"]
)
def test_try_command_writes_into_visible_folder(dataset, place):
    made = replace(recipe("smoke"), dataset=dataset)
    folder = precision_search_report._folder(made, "smoke")
    assert folder.name[0].isalnum()
    assert folder.parent == place / "runs/try"
    former = folder.with_name(
        re.sub(r"[^\w.-]+", "-", f"{dataset.strip('/')}-{made.model}")
    )
    assert former.name[0] == "."


def test_notebooks_command_lists_parameters(command):
    status, out, _ = command("notebooks", "--parameters", "03")
    assert status == 0
    assert out.startswith("03_image_classification.ipynb\nscale")
    assert re.search(r"^q_max +list +default \[8\]; .+", out, re.MULTILINE)
    assert re.search(
        r"^total_steps +int +default 64000; .+",
        command("notebooks", "--parameters", "01")[1],
        re.MULTILINE,
    )
    for words in ([], ["--copy", "x", "--parameters", "03"]):
        assert (
            "give either --copy FOLDER or --parameters NOTEBOOK"
            in command("notebooks", *words)[2]
        )
    assert "no notebook '77'" in command("notebooks", "--parameters", "77")[2]
