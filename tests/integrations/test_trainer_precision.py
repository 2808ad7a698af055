"""What both callbacks log, whatever the levels mean."""

import pytest
from torch import nn

import cpt_core as cpt
from cpt_core.formats.ladder import LADDERS
from cpt_core.integrations._common import TrainerPrecision
from tests.helpers import quietly


@pytest.mark.parametrize(("name", "q_min", "q_max"), [("affine", 3, 8), ("minifloat", 4, 8), ("mx", 1, 4)])
def test_the_cost_on_a_ladder_is_that_of_its_formats(name, q_min, q_max):
    schedule = quietly(cpt.make_schedule, "CR", q_min=q_min, q_max=q_max, total_steps=40, n_cycles=2)
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4)), cpt.QuantConfig(ladder=LADDERS[name]))
    logs = TrainerPrecision(model, schedule, None).logs(40)
    assert logs["bits"] == schedule(39)
    assert logs["relative_cost"] == pytest.approx(schedule.relative_cost(ladder=LADDERS[name]), rel=1e-12)
    assert (logs["relative_cost"] == schedule.relative_cost()) == (name in ("affine", "minifloat"))


def test_the_cost_of_roles_apart_is_theirs():
    cycle = quietly(cpt.make_schedule, "CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)
    roles = cpt.RoleSchedules(weight=cycle, activation=8, gradient="float32")
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4)))
    assert TrainerPrecision(model, roles, None).logs(40)["relative_cost"] == pytest.approx(roles.relative_cost())
