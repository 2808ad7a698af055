"""What else is done with a model whose levels are other formats: nothing may take them for bits."""

import pytest
import torch
from choosing.test_trials import problem
from helpers import OnRing
from torch import nn

import cpt_core as cpt
from cpt_core.formats.ladder import LADDERS
from cpt_core.integrations._common import TrainerPrecision
from cpt_core.quantization.convert import layer_precisions
from cpt_core.schedules.schedule import Levels, StaticSchedule, TableSchedule

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
RISING = cpt.RoleSchedules(weight=TableSchedule(((1, 1), (2, 1))), activation=6, gradient="float32")
BY_ROLE = {"weight": {1: "e2m1", 2: "e3m2"}, "activation": {6: "e4m3"}, "gradient": None}


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
    before = layer_precisions(model)["0"].now.formats
    expected = model.train(training)(inputs())
    assert cpt.check(model, (inputs(),)).ok
    assert layer_precisions(model)["0"].now.formats == before
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


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_picture_without_a_batch_has_its_blocks_along_channels(kind):
    config = cpt.QuantConfig(ladder={8: "mx(e2m1,8)"}).with_gradient_rounding("nearest")
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(kind(16, 8, 1)), config)
    dims = int(kind.__name__[-2])
    x = torch.randn(16, *[8] * dims, requires_grad=True)
    with cpt.precision(model, 8, 8):
        y, batched = model(x), model(x.unsqueeze(0)).squeeze(0)
        weight = torch.randn_like(y)
        of_y, of_batched = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (y, batched))
    assert torch.equal(y, batched)
    assert torch.equal(of_y, of_batched)


@pytest.mark.parametrize("name", ["e4m3", "affine4:clipping=rms", "nvfp4:partial=1"])
def test_steps_of_an_lstm_have_ranges_of_their_own_whatever_granularity_a_format_names(name):
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.LSTM(8, 4)), cpt.QuantConfig(ladder={8: f"{name}:granularity=per_tensor"}))
    x = torch.randn(3, 2, 8) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    with cpt.precision(model, 8, 8):
        steps = model[0]._input("l0", x.flatten(0, 1), (3, ())).unflatten(0, (3, 2))
    for step, rounded in zip(x, steps, strict=True):
        assert torch.equal(rounded, cpt.quantize(step, format=f"{name}:granularity=per_tensor"))


def test_gradients_of_graph_layers_on_a_ladder_keep_to_their_format():
    for ladder, expected in (({8: "e4m3"}, 0), ({8: "affine4:granularity=per_tensor"}, 1), (None, 1)):
        ladders = {"weight": None, "activation": None, "gradient": ladder}
        model = cpt.quantize_(OnRing(cpt.GraphConv(4, 8)), cpt.QuantConfig(ladder=ladders))
        with cpt.precision(model, 8, 8), torch.profiler.profile() as ran:
            model(torch.randn(6, 4, requires_grad=True)).sum().backward()
        assert [event.name for event in ran.events()].count("cpt::round_scale_round") == expected


def test_a_recorded_step_serves_no_other_split_of_gradients():
    layer = layer_precisions(net())["0"]
    found = set()
    for levels in (Levels(8, 8, 8, 8), Levels(8, 8, 8, 4), Levels(8, 8, None, 8), Levels(8, 8, 8, None)):
        layer.set_levels(levels)
        found.add(layer.now.constants())
    assert len(found) == 4
    layer.set_levels(Levels(6, 5, 7, 3))
    assert layer.now.constants() in found  # only numbers differ from the second


def test_a_checkpoint_of_another_ladder_is_refused():
    state = cpt.PrecisionScheduler(net(MX), CYCLE).state_dict()
    cpt.PrecisionScheduler(net(MX), CYCLE).load_state_dict(state)
    for other in (None, {1: "e2m1", 3: "e4m3"}, {"weight": MX, "activation": MX, "gradient": None}):
        with pytest.raises(ValueError, match=r"the checkpoint has ladders .*mxfp4:partial=1.*, this scheduler"):
            cpt.PrecisionScheduler(net(other), CYCLE).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the checkpoint has ladders \{\}, this scheduler"):
        cpt.PrecisionScheduler(net(MX), CYCLE).load_state_dict(cpt.PrecisionScheduler(net(), CYCLE).state_dict())
    old = cpt.PrecisionScheduler(net(), CYCLE).state_dict()
    del old["ladders"]  # as it was written before there were any
    cpt.PrecisionScheduler(net(), CYCLE).load_state_dict(old)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_ranges_of_rows_take_the_place_of_running_ones(kind):
    torch.manual_seed(0)
    config = cpt.QuantConfig(ladder={1: "e2m1", 2: "e4m3:granularity=per_row"})
    model = cpt.quantize_(nn.Sequential(kind(8, 8)), config)
    scheduler = cpt.PrecisionScheduler(model, TableSchedule(((2, 1), (1, 1), (2, 1))))
    x = torch.randn(3, 2, 8) * torch.tensor([[1.0], [100.0]])
    for _ in range(3):
        y = model(x)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.sum().backward()
        scheduler.step()
    evaluated = model.eval()(x)
    assert torch.equal(evaluated if isinstance(evaluated, torch.Tensor) else evaluated[0], y)
    role = next(r for r in model[0].precision.quantizers if r.startswith("input"))
    assert torch.equal(model[0].precision.operand(role, x), cpt.quantize(x, format="e4m3:granularity=per_row"))


@pytest.mark.parametrize("ladder", [LADDERS["minifloat"], {4: "e2m1", 6: "e3m2", 8: "e4m3"}])
def test_plan_and_ledger_agree_where_roles_are_in_float32(ladder):
    model = net(ladder)
    schedule = cpt.RoleSchedules(weight=TableSchedule(((4, 1), (8, 2))), activation="float32", gradient=6)
    plan = cpt.count_bitops(model, (inputs(),), schedule)
    scheduler = cpt.PrecisionScheduler(model, schedule)
    with cpt.BitOpsLedger(model) as ledger:
        for _ in range(3):
            model(inputs()).sum().backward()
            scheduler.step()
    assert plan.total == ledger.total() > 0
    assert plan.costs == pytest.approx(ledger.costs())
    of_weights = cpt.count_bitops(model, (inputs(),), schedule).by_pass["weight"]
    assert of_weights == 3 * 2 * 4 * 32 * 32 * 6 * 32 / 32**2  # MACs of 6 and 32 bits


def test_a_delay_in_float32_is_priced_on_a_ladder():
    schedule = cpt.make_schedule("CR", q_min=4, q_max=8, total_steps=80, n_cycles=2, delay=0.25, delay_at="float32")
    plan = cpt.count_bitops(net(LADDERS["minifloat"]), (inputs(),), schedule, convention="paper")
    static = cpt.count_bitops(net(), (inputs(),), StaticSchedule(8, 80), convention="paper")
    assert plan.total / static.total == pytest.approx(schedule.relative_cost(ladder=LADDERS["minifloat"]))


def test_q_max_is_that_of_every_role():
    model = net(BY_ROLE)
    cpt.PrecisionScheduler(model, RISING)
    layer = layer_precisions(model)["0"]
    with cpt.precision(model, "q_max"):
        assert layer.in_force == (6, 2, 32, 32)
        assert str(layer.now.formats.weight) == "e3m2"
    with cpt.precision(model, "q_max", q_grad=8):
        assert layer.in_force == (6, 2, 8, 8)


@pytest.mark.parametrize(("asked", "expected"), [("q_max", (6, 2)), ("current", (6, 1)), ("float", (None, None))])
def test_callbacks_evaluate_every_role_at_its_own_level(asked, expected):
    model = net(BY_ROLE)
    precision = TrainerPrecision(model, RISING, None, eval_bits=asked)
    model.eval()
    assert layer_precisions(model)["0"].in_force[:2] == expected
    assert precision.eval_logs() == {"eval_bits": expected[0] or 32}
    model.train()
    assert layer_precisions(model)["0"].in_force == (6, 1, 32, 32)


@pytest.mark.parametrize("cost", cpt.formats.COSTS)
def test_costs_take_the_ladders_of_a_configuration(cost):
    ladders = cpt.QuantConfig(ladder=MX).ladder
    assert CYCLE.relative_cost(cost=cost, ladder=ladders) == pytest.approx(CYCLE.relative_cost(cost=cost, ladder=MX))
    schedule = cpt.solve_schedule(0.9, 1, 4, 400, cost=cost, ladder=ladders)
    assert schedule.relative_cost(cost=cost, ladder=ladders) == pytest.approx(0.9, rel=2e-3)
    both = {1: "e2m1", 3: "e4m3"}, {1: "e4m3", 3: "e4m3"}
    apart = cpt.QuantConfig(ladder={"weight": both[0], "activation": both[1], "gradient": both[1]}).ladder
    per_mac = cpt.formats.COSTS[cost].per_mac(cpt.FORMATS["e2m1"], cpt.FORMATS["e4m3"])
    if per_mac:  # else a price of elements
        full = cpt.formats.COSTS[cost].per_mac(cpt.FORMATS["e4m3"], cpt.FORMATS["e4m3"])
        assert StaticSchedule(1, 2).relative_cost(3, 3, cost, apart) == pytest.approx((2 * per_mac + full) / (3 * full))
        roles = cpt.RoleSchedules(weight=StaticSchedule(1, 2), activation=3, gradient=3)
        assert roles.relative_cost(cost=cost, ladder=apart) == 1  # its own highest levels


def test_measured_costs_are_of_one_level_for_all_roles():
    with pytest.raises(ValueError, match="one schedule for all layers and roles, or bits=; got RoleSchedules"):
        cpt.inspecting.measure_cost(net(BY_ROLE), (inputs(),), RISING)


def test_the_sensitivity_of_a_ladder_is_measured_on_its_levels():
    model, step, optimizer, _ = problem()
    config = cpt.QuantConfig(ladder=MX)
    options = {"base": 2, "q_max": 4, "windows": 2, "steps": 8, "seeds": (0,), "estimate": False}
    found = cpt.choosing.sensitivity(model, step, optimizer, config=config, **options)
    assert (found.base, found.groups) == (2, (("0",), ("4",)))
