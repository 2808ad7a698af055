"""Common base of both callbacks: training bits, evaluation bits and logged values."""

import math

import pytest
import torch
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.formats.ladder import LADDERS
from cpt_extras.integrations.trainer_precision import TrainerPrecision
from cpt_extras.search.custom_schedules import FunctionSchedule
from tests.helpers import quietly


@pytest.mark.parametrize(
    ("name", "q_min", "q_max"), [("affine", 3, 8), ("minifloat", 4, 8), ("mx", 1, 4)]
)
def test_trainer_precision_logs_cost_of_ladder(name, q_min, q_max):
    schedule = quietly(
        cpt.make_schedule, "CR", q_min=q_min, q_max=q_max, total_steps=40, n_cycles=2
    )
    model = cpt.quantize_(
        nn.Sequential(nn.Linear(4, 4)), cpt.QuantConfig(ladder=LADDERS[name])
    )
    logs = TrainerPrecision(model, schedule, None, eval_bits="q_max").logs(40)
    assert logs["bits"] == schedule(39)
    assert logs["relative_cost"] == pytest.approx(
        schedule.relative_cost(ladder=LADDERS[name]), rel=1e-12
    )
    assert (logs["relative_cost"] == schedule.relative_cost()) == (
        name in ("affine", "minifloat")
    )
    roles = cpt.RoleSchedules(weight=schedule, activation=q_max, gradient="float32")
    logs = TrainerPrecision(model, roles, None, eval_bits="q_max").logs(40)
    assert logs["relative_cost"] == pytest.approx(
        roles.relative_cost(ladder=LADDERS[name])
    )


def test_trainer_precision_sets_evaluation_bits():
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4)))
    falling = FunctionSchedule(lambda u: 7 - 3 * u, total_steps=12)
    trained = TrainerPrecision(model, falling, None, eval_bits="q_max")
    for _ in range(12):  # to 4 bits
        trained.step()
    for chosen, bits, logged in (
        ("q_max", 7, 7),
        ("current", 4, 4),
        ("float", None, 32),
        (2, 2, 2),
    ):
        trained.eval_bits = chosen
        model.eval()
        assert (layer_precisions(model)["0"].bits, trained.eval_logs()) == (
            bits,
            {"eval_bits": logged},
        )
    model.train()
    assert (layer_precisions(model)["0"].bits, trained.eval_logs()) == (4, {})


def test_trainer_precision_logs_each_layer_schedule():
    first, rest = (
        cpt.make_schedule(n, q_min=3, q_max=q, total_steps=12, n_cycles=2)
        for n, q in (("ER", 6), ("CR", 8))
    )
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    trained, logs = (
        TrainerPrecision(model, {"0": first, "*": rest}, None, eval_bits="q_max"),
        [],
    )
    for step in range(1, 13):
        trained.step()
        logs.append(trained.logs(step))
    assert [e["bits/0"] for e in logs] == first.bits().tolist()
    assert [e["bits/*"] for e in logs] == rest.bits().tolist()
    assert logs[-1]["relative_cost/*"] == rest.relative_cost()
    model.eval()
    assert trained.eval_logs() == {"eval_bits/0": 6, "eval_bits/*": 8}


def test_trainer_precision_omits_infinite_values():
    """Omit values that are not finite, since the state of a trainer is JSON."""
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4)))
    nn.init.zeros_(model[0].bias)
    trained = TrainerPrecision(model, cpt.StaticSchedule(4, 9), None)
    trained.start_recording(1, 0)
    model(torch.randn(8, 4)).square().sum().backward()
    trained.stop_recording()
    assert math.isinf(trained.recording.scalars()["0/bias/snr_db"])
    logged = trained.recorded()
    assert "bias/snr_db" not in logged
    assert {"weight/snr_db", "bias/level"} <= set(logged)
    assert all(map(math.isfinite, logged.values()))
