"""Runs with different bits per layer: training, evaluation, BitOps and rows."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import refused

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
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.worker import Job, run_all
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training.train import train

RECIPE = replace(recipe("smoke", "digits"), steps=6)
LOW = TableSchedule(((3, 4), (5, 2)))  # (bits, steps)
# Patterns of layers, their schedule and their MACs.
LAYERED = LayeredSchedule(
    ((("body.0", "body.2"), LOW, 196_608), (("body.*",), StaticSchedule(6, 6), 262_144))
)


def spec_of(schedule=LAYERED):
    return RunSpec(RECIPE, schedule, 8, 8, 0, "by layer", "smoke")


@pytest.fixture
def net():
    layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
    return quantize_(torch.nn.Sequential(*layers))


@pytest.fixture(scope="session")
def layered_run():
    return train(ImageTask, spec_of())


def test_precision_takes_bits_by_pattern(net):
    PrecisionScheduler(net, StaticSchedule(8, 1))
    layers = layer_precisions(net)
    with precision(net, {"0": 3, "*": 5}):
        assert (layers["0"].bits, layers["2"].bits) == (3, 5)
        assert layers["0"].q_grad == 8
    assert (layers["0"].bits, layers["2"].bits) == (8, 8)
    messages = {
        "layer '2' matches none of the patterns of bits, 0; add": {"0": 3},
        "bits must be an integer from 1 to 32": {"*": 0},
    }
    for message, bits in messages.items():
        with pytest.raises(ValueError, match=message), precision(net, bits):
            pass


def test_count_bitops_of_layered_schedule(net):
    parts = (
        (("0",), TableSchedule(((2, 1), (4, 1))), 12),
        (("2",), StaticSchedule(7, 2), 6),
    )
    schedule = LayeredSchedule(parts)
    x, options = (torch.ones(1, 4),), {"convention": "paper"}
    total = count_bitops(net, x, schedule, q_grad=8, **options).total
    first = 12 * (2 * 2 + 4 * 4 + 2 * 8 * (2 + 4))
    second = 6 * 2 * (49 + 2 * 8 * 7)
    assert total == (first + second) / 32**2
    static = count_bitops(net, x, StaticSchedule(8, 2), **options).total
    assert schedule.relative_cost(8, q_max=8) == pytest.approx(total / static)


@pytest.mark.slow
def test_layered_schedule_of_equal_parts_trains_identically(layered_run):
    one, other = (
        train(ImageTask, spec_of(schedule))
        for schedule in (LOW, LayeredSchedule(((("body.*",), LOW, 1),)))
    )
    assert one.history["loss"] == other.history["loss"]
    assert one.metrics == other.metrics
    assert one.bitops == other.bitops
    assert layered_run.history["loss"] != one.history["loss"]


def test_layered_run_evaluates_at_bits_per_layer(layered_run):
    model = layered_run.model.eval()
    task = ImageTask(spec_of(), torch.device("cpu"))
    with precision(model, {"body.0": 5, "body.2": 5, "*": 6}):
        loss = task.evaluate(model)["test"]["loss"]
    with precision(model, 6):
        assert task.evaluate(model)["test"]["loss"] != loss
    assert layered_run.metric("loss", precision="current") == loss
    assert layered_run.history["bits"] == [6] * 6  # the highest of any layer


def test_layered_run_row_states_its_cost(tmp_path):
    job = Job(spec_of(), tmp_path / "image.jsonl", SweepOptions(device="cpu"))
    row = run_all(job)[0].row
    assert row["status"] == "ok"
    macs = 458_752
    low = 196_608 * (4 * (9 + 48) + 2 * (25 + 80)) / 6
    high = 262_144 * (36 + 96)
    assert row["relative_cost"] == pytest.approx((low + high) / (macs * 192))
    noise = 196_608 * (4 * 4.0**5 + 2 * 4.0**3) / 6 + 262_144 * 4.0**2
    assert row["noise_exposure"] == pytest.approx(noise / macs)
    assert row["share_at_q_min"] == pytest.approx(4 / 6 * 196_608 / macs)
    stored_spec = RunSpec.from_dict(json.loads(json.dumps(row["spec"])))
    assert row["key"] == spec_of().key == stored_spec.key
    (line,) = table([row]).itertuples()
    assert (line.kind, line.arm, line.savings) == ("layered", "by layer", "own")
    assert line.relative_cost == row["relative_cost"]


def test_plain_schedule_rows_keep_their_cost():
    smoke = recipe("smoke", "digits")
    cyclic, static = (
        run_spec(smoke, arm, q_max=8, seed=0, scale="smoke")
        for arm in ("CR", "static 5")
    )
    row = stores.describe(cyclic)
    assert row["relative_cost"] == cyclic.schedule.relative_cost(8)
    assert row["noise_exposure"] == cyclic.schedule.noise_exposure()
    row = stores.describe(static)
    # Relative to static 8, not to itself.
    assert (row["relative_cost"], row["noise_exposure"]) == ((25 + 80) / 192, 64)


def test_layered_schedule_stores_functions_as_tables():
    function = FunctionSchedule(lambda u: 3 + 2 * u, 6)
    own = spec_of(LayeredSchedule(((("*",), function, 1),)))
    assert own.schedule.parts[0][1] == TableSchedule(((3, 2), (4, 2), (5, 2)))
    longer = LayeredSchedule(((("*",), StaticSchedule(4, 7), 1),))
    refused("the schedule has 7 steps, the recipe 6", spec_of, longer)
