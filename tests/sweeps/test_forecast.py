"""Forecasts of runs: measured steps, their cache, and plans of what is missing."""

import math
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch
from helpers import refused, specs_of

from cpt_lab.experiments import grids
from cpt_lab.experiments.grids import GRIDS
from cpt_lab.sweeps import forecast, step_timing, stores
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.step_timing import Calibration, cached_timing, measure, runs_per_gpu
from cpt_lab.tasks.image import ImageTask

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
MLP6_MACS = 64 * 32 + 5 * 32 * 32 + 32 * 10


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Return the folder of runs, which does not exist yet."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def quick(monkeypatch):
    """Measure for a moment, and in this process."""
    monkeypatch.setattr(step_timing, "MEASURING_SECONDS", 0.1)
    monkeypatch.setattr(
        "cpt_lab.sweeps.process.supervise",
        lambda job, work: work(job, lambda: False, lambda key: None),
    )


def store_first_run(seconds):
    spec = grids.grid_specs("digits/mlp6", "smoke")[0]
    row = {"status": "ok", "seconds": seconds, "device": "cpu"}
    stores.append_row(stores.store_path("smoke", "image"), stores.describe(spec) | row)


# --- measured steps -------------------------------------------------------------------------------


def test_step_timing_is_cached_and_plausible(quick, runs):
    (spec,) = specs_of("CR")
    assert cached_timing(spec) is None
    runs.mkdir()
    (runs / "calibration.json").write_text("{damaged")
    assert cached_timing(spec) is None
    timing = measure(spec)
    assert timing.macs == 64 * MLP6_MACS
    assert timing.seconds_per_step > 0
    assert timing.peak_memory > 10**8
    assert timing.checkpoint > 4 * MLP6_MACS * 2  # weights and their momentum
    assert cached_timing(spec) == timing


def test_step_timing_names_model_that_fails(quick):
    (spec,) = specs_of("CR")
    spec = replace(spec, recipe=replace(spec.recipe, model="vgg"))
    message = "vgg on digits does not run here: KeyError: 'vgg'"
    refused(message, measure, spec, error=RuntimeError)


def test_step_timing_warns_of_unwritable_folder(quick, runs):
    runs.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=f"cannot be kept in {runs}: File exists"):
        assert measure(*specs_of("CR")).seconds_per_step > 0


def test_step_timing_measures_training_steps(quick, monkeypatch):
    """Time steps that clip gradients and set the learning rate, as in a run."""
    (spec,) = specs_of("CR", clip=0.001, lr=0.5)
    norms, rates = [], set()

    class Watched(ImageTask):
        def optimizer(self, model):
            optimizer, _ = super().optimizer(model)

            def look(optimizer, *_):
                rates.update(group["lr"] for group in optimizer.param_groups)
                gradients = [p.grad for p in model.parameters()]
                norms.append(float(torch.nn.utils.get_total_norm(gradients)))

            optimizer.register_step_pre_hook(look)
            return optimizer, lambda step, evaluations: 0.0125

    monkeypatch.setattr("cpt_lab.tasks.base.load_task_class", lambda spec: Watched)
    step_timing._steps(spec, "cpu")
    assert len(norms) > 1
    assert norms == [pytest.approx(0.001, rel=1e-3)] * len(norms)
    assert rates == {0.0125}


def test_step_timing_rejects_diverging_random_data():
    (spec,) = specs_of("CR", clip=None, lr=1e30)
    message = "the loss of random data is not finite"
    refused(message, step_timing._steps, spec, "cpu", error=ArithmeticError)


def test_step_timing_key_covers_machine_and_recipe(monkeypatch):
    (spec,) = specs_of("CR")
    key = step_timing._key(spec, "cpu")
    assert step_timing._key(replace(spec, seed=1), "cpu") == key
    larger = replace(spec, recipe=replace(spec.recipe, batch=32))
    assert step_timing._key(larger, "cpu") != key
    changes = {
        "VERSION": step_timing.VERSION + 1,
        "cpu": lambda: {"cpu": "another", "instructions": []},
        "torch.__version__": "1.0",
        "SweepOptions": lambda: SweepOptions(threads=2),
    }
    for name, value in changes.items():
        with monkeypatch.context() as changed:
            changed.setattr(f"cpt_lab.sweeps.step_timing.{name}", value)
            assert step_timing._key(spec, "cpu") != key, name


@pytest.mark.parametrize(
    ("gpu_gigabytes", "host_gigabytes", "cores", "runs"),
    [
        (30, 1, 16, 1),  # it may not fit, but one is tried
        (1, 90, 16, 1),
        (1, 1, 4, 4),  # no more than cores
        (4, 1, 16, 4),
        (1, 10, 16, 5),  # nine tenths of the machine's memory
    ],
)
def test_runs_per_gpu_is_limited_by_memory(gpu_gigabytes, host_gigabytes, cores, runs):
    on_gpu, on_host = gpu_gigabytes * 2**30, host_gigabytes * 2**30
    assert runs_per_gpu(on_gpu, 24 * 2**30, on_host, 64 * 2**30, cores) == runs


# --- plans ----------------------------------------------------------------------------------------


def test_plan_estimates_cost_from_cached_timing(monkeypatch):
    three_days_ago = time.time() - 3 * 86400
    timing = Calibration(0.5, 1, 1, 10**6, macs=1024 * 1000, measured=three_days_ago)
    monkeypatch.setattr(forecast, "cached_timing", lambda spec, device: timing)
    (line,) = forecast.plan("digits/mlp6", "smoke").itertuples()
    specs = grids.grid_specs("digits/mlp6", "smoke")
    bits = [q for spec in specs for q in spec.schedule.bits().tolist()]
    assert line.bitops == 1000 * sum(q * q + 16 * q for q in bits)
    assert line.hours == pytest.approx(12 * 190 * 0.5 / 3600)
    store_first_run(7.0)  # counts more than measured steps
    frame = forecast.plan("digits/mlp6", "smoke")
    assert frame.hours[0] == pytest.approx(11 * 7.0 / 3600)
    text = "disk for 1 of 1 grids: 3 MB; their steps were measured here, the oldest 3.0 days"
    assert text in forecast.text(frame)


def test_plan_measures_only_on_request(monkeypatch):
    measured = []

    def fail(spec, device):
        measured.append(spec.recipe.model)
        raise RuntimeError("no luck")

    monkeypatch.setattr(forecast, "measure", fail)
    frame = forecast.plan("digits/mlp6", "smoke")
    (line,) = frame.itertuples()
    numbers = (line.bitops, line.hours, line.disk, line.age)
    assert all(math.isnan(value) for value in numbers)
    text = forecast.text(frame)
    assert "grids never measured here: 1; plan --measure finds their" in text
    assert "hours (" not in text

    store_first_run(7.0)  # stored runs give hours without a measurement
    frame = forecast.plan("digits/mlp6", "smoke")
    assert frame.hours.tolist() == [pytest.approx(11 * 7.0 / 3600)]
    text = forecast.text(frame)
    words = "one after the other here: 0.0 hours"
    assert f"11 missing runs of 1 of 1 grids {words} (" in text
    both = pd.concat([frame, frame.assign(hours=math.nan)])
    both.attrs = frame.attrs
    words = f"11 missing runs of 1 of 2 grids {words}, without 11 that have no times ("
    assert words in forecast.text(both)
    assert "MB" not in text
    assert measured == []

    text = forecast.text(forecast.plan("digits/mlp6", "smoke", measured=True))
    assert measured == ["mlp6"]
    assert "no luck" in text


@pytest.mark.slow
def test_plan_covers_every_figure_and_table():
    figures = {f"figure_{i}" for i in range(3, 9)}
    others = {"table_1", "section_4.3", "section_4.4", "section_5"}
    assert {grid.artefact for grid in GRIDS.values()} == figures | others
    for name, grid in GRIDS.items():  # test_docs has the counts at paper scale
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
