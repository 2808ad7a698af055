"""What else is done with a model whose levels are other formats: nothing may take them for bits."""

import pytest
import torch
from torch import nn

import cpt_core as cpt
from cpt_core.formats.ladder import LADDERS
from cpt_core.quantization.convert import layer_precisions
from cpt_core.schedules.schedule import StaticSchedule, TableSchedule

MX = LADDERS["mx"]
ROTATED = {
    "weight": {3: "e2m1:hadamard=8"},
    "activation": {3: "e2m1:hadamard=8"},
    "gradient": {3: "e4m3", 4: "mxfp4"},
}
CYCLE = TableSchedule(((1, 1), (3, 1)))


def net(ladder=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return cpt.quantize_(model, cpt.QuantConfig(ladder=ladder, **options))


def inputs():
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


ROLES = {"weight": {1: "e2m1"}, "activation": {3: "e4m3"}, "gradient": None}


@pytest.mark.parametrize(
    ("ladder", "schedule"),
    [
        (MX, CYCLE),
        (ROTATED, StaticSchedule(3, 2)),
        (ROLES, cpt.RoleSchedules(weight=1, activation=StaticSchedule(3, 2), gradient=3)),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_check_runs_on_every_ladder_and_leaves_it(ladder, schedule, training):
    model = net(ladder)
    cpt.PrecisionScheduler(model, schedule)
    model(inputs())
    before = layer_precisions(model)["0"].formats_in_force
    expected = model.train(training)(inputs())
    assert cpt.check(model, (inputs(),)).ok
    assert layer_precisions(model)["0"].formats_in_force == before
    assert torch.equal(model(inputs()), expected)


def test_a_program_holds_no_weights_of_other_formats():
    model = net({1: "affine4", 3: "e4m3"})
    with cpt.precision(model, 3, 3):
        model(inputs())
    model.eval()
    with pytest.raises(ValueError, match="layer '0' would have weights in e4m3, and a program holds codes of the"):
        cpt.export(model, (inputs(),), bits=3)
    program = cpt.export(model, (inputs(),), bits=1)
    with cpt.precision(model, 1):
        assert torch.equal(program.module()(inputs()), model(inputs()))


def test_inputs_of_a_program_may_have_another_format():
    model = net({"weight": None, "activation": {8: "e4m3"}, "gradient": None})
    with cpt.precision(model, 8, 8):
        model(inputs())
    program = cpt.export(model.eval(), (inputs(),), bits=8)
    with cpt.precision(model, 8):
        assert torch.equal(program.module()(inputs()), model(inputs()))


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        (MX, "on codes: none (forward simulated: at level 1 the activation is in mxfp4:partial=1"),
        ({1: "affine4", 3: "nvfp4"}, "on codes: none (forward simulated: at level 3 the activation is in nvfp4"),
        ({"weight": None, "activation": None, "gradient": {8: "e4m3"}},
         "on codes: forward (error simulated: at level 8 the error is in e4m3"),
        ({1: "affine4", 2: "affine8"}, "on codes: forward, error, weight"),
    ],
)  # fmt: skip
def test_summary_calls_products_in_other_formats_simulated(ladder, said):
    torch.manual_seed(0)
    config = cpt.QuantConfig(ladder=ladder, execution="integer").with_shared_steps()
    assert said in str(cpt.summary(cpt.quantize_(nn.Sequential(nn.Linear(32, 32)), config)))
