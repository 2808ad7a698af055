"""Runs with different bits per layer: training, evaluation, BitOps and rows."""

import json
from dataclasses import replace

import pytest
import torch

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.search.custom_schedules import FunctionSchedule, TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.worker import Job, SweepOptions, run_all
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train

RECIPE = replace(recipe("smoke", "digits"), steps=6)
LOW = TableSchedule(((3, 4), (5, 2)))
LAYERED = LayeredSchedule(
    ((("body.0", "body.2"), LOW, 196_608), (("body.*",), StaticSchedule(6, 6), 262_144))
)


def spec(schedule=LAYERED):
    return RunSpec(RECIPE, schedule, 8, 8, 0, "by layer", "smoke")


BY_LAYER = LayeredSchedule(
    ((("0",), TableSchedule(((2, 1), (4, 1))), 12), (("2",), StaticSchedule(7, 2), 6))
)


def net():
    return quantize_(
        torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        )
    )


def test_precision_takes_bits_by_pattern():
    model = net()
    PrecisionScheduler(model, StaticSchedule(8, 1))
    layers = layer_precisions(model)
    with precision(model, {"0": 3, "*": 5}):
        assert (layers["0"].bits, layers["2"].bits) == (3, 5)
        assert layers["0"].q_grad == 8
    assert (layers["0"].bits, layers["2"].bits) == (8, 8)
    with (
        pytest.raises(
            ValueError, match="layer '2' matches none of the patterns of bits, 0; add"
        ),
        precision(model, {"0": 3}),
    ):
        pass
    with (
        pytest.raises(ValueError, match="bits must be an integer from 1 to 32"),
        precision(model, {"*": 0}),
    ):
        pass


def test_count_bitops_of_layered_schedule():
    model = net()
    plan = count_bitops(
        model, (torch.ones(1, 4),), BY_LAYER, q_grad=8, convention="paper"
    )
    first, second = 12 * (2 * 2 + 4 * 4 + 2 * 8 * (2 + 4)), 6 * 2 * (49 + 2 * 8 * 7)
    assert plan.total == (first + second) / 32**2
    static = count_bitops(
        model, (torch.ones(1, 4),), StaticSchedule(8, 2), convention="paper"
    ).total
    assert BY_LAYER.relative_cost(8, q_max=8) == pytest.approx(plan.total / static)


def test_layered_schedule_of_equal_parts_trains_identically():
    one = train(load_task_class(spec()), spec(LOW))
    other = train(
        load_task_class(spec()), spec(LayeredSchedule(((("body.*",), LOW, 1),)))
    )
    assert one.history["loss"] == other.history["loss"]
    assert one.metrics == other.metrics
    assert one.bitops == other.bitops
    different = train(load_task_class(spec()), spec())
    assert different.history["loss"] != one.history["loss"]


def test_layered_run_evaluates_at_bits_per_layer():
    run = train(load_task_class(spec()), spec())
    model = run.model.eval()
    task = load_task_class(spec())(spec(), torch.device("cpu"))
    with precision(model, {"body.0": 5, "body.2": 5, "*": 6}):
        expected = task.evaluate(model)["test"]
    with precision(model, 6):
        other = task.evaluate(model)["test"]
    assert run.metric("loss", precision="current") == expected["loss"]
    assert other["loss"] != expected["loss"]
    assert run.history["bits"] == [6] * 6  # the highest of any layer


def test_layered_run_row_states_its_cost(tmp_path):
    row = run_all(Job(spec(), tmp_path / "image.jsonl", SweepOptions(device="cpu")))[
        0
    ].row
    assert row["status"] == "ok"
    low = 196_608 * (4 * (9 + 48) + 2 * (25 + 80)) / 6
    high = 262_144 * (36 + 96)
    assert row["relative_cost"] == pytest.approx((low + high) / (458_752 * 192))
    noise = (196_608 * (4 * 4.0**5 + 2 * 4.0**3) / 6 + 262_144 * 4.0**2) / 458_752
    assert row["noise_exposure"] == pytest.approx(noise)
    assert row["share_at_q_min"] == pytest.approx(4 / 6 * 196_608 / 458_752)
    assert (
        row["key"]
        == spec().key
        == RunSpec.from_dict(json.loads(json.dumps(row["spec"]))).key
    )
    (line,) = table([row]).itertuples()
    assert (line.kind, line.arm, line.savings) == ("layered", "by layer", "own")
    assert line.relative_cost == row["relative_cost"]


def test_plain_schedule_rows_keep_their_cost():
    plain = run_spec(recipe("smoke", "digits"), "CR", q_max=8, seed=0, scale="smoke")
    row = stores.describe(plain)
    assert row["relative_cost"] == plain.schedule.relative_cost(8)
    assert row["noise_exposure"] == plain.schedule.noise_exposure()
    static = stores.describe(
        run_spec(recipe("smoke", "digits"), "static 5", q_max=8, seed=0, scale="smoke")
    )
    assert (
        static["relative_cost"] == (25 + 80) / 192
    )  # relative to static 8, not to itself
    assert static["noise_exposure"] == 64


def test_layered_schedule_stores_functions_as_tables():
    own = spec(
        LayeredSchedule(((("*",), FunctionSchedule(lambda u: 3 + 2 * u, 6), 1),))
    )
    assert own.schedule.parts[0][1] == TableSchedule(((3, 2), (4, 2), (5, 2)))
    with pytest.raises(ValueError, match="the schedule has 7 steps, the recipe 6"):
        spec(LayeredSchedule(((("*",), StaticSchedule(4, 7), 1),)))
