"""Measured costs: whose the time and the memory are, and a model that is left as it was. Time is a counter here."""

import copy
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import WITH_CUDA, Does, identical, make, refused
from torch import nn

import cpt_core as cpt
from cpt_core.inspecting import step
from cpt_core.inspecting.measure import measure_cost
from cpt_core.inspecting.measured import MeasuredCost
from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.roles import RoleSchedules
from cpt_core.schedules.schedule import StaticSchedule, TableSchedule


@pytest.fixture
def clock(monkeypatch):
    """A clock that only ``Busy`` moves."""
    now = SimpleNamespace(ticks=0)
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: float(now.ticks)))
    return now


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, there, back):
        ctx.clock, ctx.back = clock, back
        clock.ticks += there
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.ticks += ctx.back
        return gradient, None, None, None


ONES = (torch.ones(2, 4),)


def of(*modules):
    """A converted model of a linear layer and others."""
    return cpt.quantize_(nn.Sequential(nn.Linear(4, 4), *modules))


class Busy(nn.Module):
    """Takes some time forward and backward; listed by ``summary`` where it has a weight."""

    def __init__(self, clock, there, back, weight=True, inner=None):
        super().__init__()
        self.clock, self.there, self.back, self.inner = clock, there, back, inner
        self.weight = nn.Parameter(torch.ones(())) if weight else None

    def forward(self, x):
        x = Pass.apply(x, self.clock, self.there, self.back)
        if self.inner is not None:
            x = Pass.apply(self.inner(x), self.clock, self.there, self.back)
        return x if self.weight is None else x * self.weight


def network(**config):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)]
    return cpt.quantize_(nn.Sequential(*layers), cpt.QuantConfig(**config)), (torch.randn(6, 2, 4, 4),)


def test_time_belongs_to_the_innermost_module_forward_and_backward(clock):
    outer = Busy(clock, 3, 4, inner=Busy(clock, 5, 7))
    outer.idle = Busy(clock, 1, 1)  # which does not run, and has no line
    model = of(Busy(clock, 1, 2), Busy(clock, 10, 20, weight=False), outer)
    measured = measure_cost(model, ONES, bits=(3, 8), repeats=2)
    assert measured.seconds(3) == measured.seconds(8) == 3 + 30 + 2 * 7 + 12
    parts = {name: spent[8].seconds for name, spent in measured.layers.items()}
    assert parts == pytest.approx({"0": 0, "1": 3, "3": 2 * 7, "3.inner": 12})
    assert measured.other(8).seconds == pytest.approx(30)


def test_a_layer_whose_weights_are_in_its_parts_has_a_line():
    graph = cpt.Graph(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), 2)
    model = cpt.quantize_(cpt.SAGEConv(3, 4))
    measured = measure_cost(model, (graph, torch.randn(2, 3)), bits=[8], repeats=1)
    assert list(measured.layers) == [""]
    assert measured.other(8).bitops == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=WITH_CUDA)])
def test_parts_are_some_of_the_whole(device):
    model, (x,) = network()
    measured = measure_cost(model.to(device), (x.to(device),), bits=[4], repeats=3)
    assert list(measured.layers) == ["0", "1", "4"]
    assert all(0 < part[4].seconds < measured.seconds(4) for part in measured.layers.values())
    assert 0 < measured.other(4).seconds < measured.seconds(4)


def test_medians_count_and_the_first_round_does_not(clock):
    durations = iter([500, 900, 1, 4, 1, 100, 1, 6])  # warming up; then a step that is watched, and one that is not

    def slow(_, x):
        clock.ticks += 0 if x.is_meta else next(durations)
        return x

    assert measure_cost(of(Does(slow)), ONES, bits=[8], repeats=3).seconds(8) == 6
    assert next(durations, None) is None


def test_a_machine_that_gets_busy_meanwhile_changes_no_ratio(clock):
    passes = iter(range(24))  # six warm up, then there are six in each round, two at each width

    def busier(_, x):
        if not x.is_meta:  # three times slower from the second round's last width on
            clock.ticks += model[0].precision.bits * (1 if next(passes) < 16 else 3)
        return x

    model = of(Does(busier))
    measured = measure_cost(model, ONES, bits=(2, 4, 8), repeats=3)
    assert [measured.seconds(q) for q in (2, 4, 8)] == [2, 4, 8]
    assert next(passes, None) is None


def test_codes_are_what_is_saved():
    inputs = (torch.randn(16, 64),)
    operands = 16 * 64 + 16 * 32 + 32 * 8  # inputs of both, and the weight of the second: the first sends no error
    found = {}
    for execution in ("simulated", "integer"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))
        config = cpt.QuantConfig(execution=execution).with_shared_steps()
        found[execution] = measure_cost(cpt.quantize_(model, config), inputs, bits=(4, 8), repeats=1)
    assert found["simulated"].steps[4].saved_bytes == 4 * operands
    first, second = (found["integer"].layers[name][4].saved_bytes for name in "01")
    ranges = 6 * 4  # minimum, step and half of two operands
    assert (first, second) == (16 * 64 + 64 * 32 + ranges, 16 * 32 + 32 * 8 + ranges)  # a function saves both operands
    assert found["integer"].other(4).saved_bytes == 0


def test_what_is_dropped_in_the_forward_pass_is_not_held():
    def aside(_, x):
        (x * x).exp()  # a graph that nothing keeps
        return x.relu()

    other = measure_cost(of(Does(aside)), ONES, bits=[8], repeats=1).other(8)
    assert other.saved_bytes == 2 * 4 * 4  # the result of relu


def test_storages_count_once_and_parameters_buffers_and_inputs_never():
    def twice(m, x):
        y = x * m.scale  # saves the input and a parameter
        return (y * y.view(-1, 2, 2).view(-1, 4)) * m.mask  # saves one storage twice, and a buffer

    parts = {"scale": nn.Parameter(torch.ones(4)), "mask": nn.Buffer(torch.ones(4))}
    model = nn.Sequential(Does(twice, **parts), nn.Linear(4, 1))
    measured = measure_cost(cpt.quantize_(model), (torch.ones(3, 4),), bits=[8], repeats=1)
    assert measured.layers["0"][8].saved_bytes == 3 * 4 * 4


def test_bitops_are_those_of_the_plan_with_all_parts_of_a_layer_and_no_other():
    model = cpt.quantize_(Does(lambda m, x: m.fc1(m.fc(x))[0], fc=nn.Linear(4, 6), fc1=nn.LSTM(6, 5)))
    inputs = (torch.randn(3, 2, 4),)
    for convention in ("paper", "per_op"):
        measured = measure_cost(model, inputs, bits=(3, 8), q_grad=6, repeats=1, convention=convention)
        for q in (3, 8):
            plan = cpt.count_bitops(model, inputs, StaticSchedule(q, 1), q_grad=6, convention=convention)
            assert measured.steps[q].bitops == plan.total
            assert measured.layers["fc"][q].bitops == plan.by_layer["fc"]
            assert measured.layers["fc1"][q].bitops == pytest.approx(plan.total - plan.by_layer["fc"])
            assert measured.other(q).bitops == pytest.approx(0)


@pytest.mark.parametrize(
    ("look", "training"),
    [(partial(measure_cost, bits=(3, 8), repeats=1), True), (cpt.check, True), (cpt.check, False)],
)
def test_the_model_is_left_as_it_was(look, training):
    model, inputs = network(execution="integer")
    schedule = make("CR", total_steps=40, n_cycles=2)
    twins = model, copy.deepcopy(model)
    made = [(cpt.PrecisionScheduler(m, schedule), torch.optim.SGD(m.parameters(), lr=0.1)) for m in twins]

    def train(model, scheduler, optimizer):
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(6, 2, 4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    for twin, driven in zip(twins, made, strict=True):
        train(twin, *driven)
        twin[4](torch.randn(2, 64)).sum().backward()  # some gradients are there, others are None
        twin.train(training)
        twin[1].eval()  # frozen statistics
    before = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    look(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == before
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in twins[1].parameters()]
    assert identical(*([*m.parameters(), *m.buffers()] for m in twins))
    assert identical([model[4].weight.grad], [twins[1][4].weight.grad])
    for twin, driven in zip(twins, made, strict=True):
        train(twin, *driven)
    assert identical(*(m.parameters() for m in twins))


def test_bits_of_a_schedule_and_its_measured_cost(clock):
    def by_bits(_, x):
        clock.ticks += {3: 1, 5: 2, 8: 4}.get(model[0].precision.bits, 0)
        return x

    model = of(Does(by_bits))
    schedule = TableSchedule(((3, 10), (5, 20), (3, 10)))
    measured = measure_cost(model, ONES, schedule, repeats=1)
    assert (measured.bits, measured.q_grad) == ((3, 5), 5)
    assert measured.relative_cost(schedule) == pytest.approx((20 * 1 + 20 * 2) / 40 / 2)
    measured = measure_cost(model, ONES, bits=[8, 5, 3, 5], q_grad=6, repeats=1)
    assert (measured.bits, measured.q_grad) == ((3, 5, 8), 6)
    assert [measured.seconds(q) for q in measured.bits] == [1, 2, 4]
    assert measured.relative_cost(StaticSchedule(8, 10)) == 1
    assert measured.relative_cost(schedule) == (20 * 1 + 20 * 2) / 40 / 2  # relative to its own q_max, 5
    relative = measured.relative_cost
    refused(r"^4 bits were not measured; measured: 3, 5, 8$", relative, TableSchedule(((3, 10), (4, 10))))
    refused("a LayeredSchedule cannot be priced", relative, LayeredSchedule(((("*",), schedule, 1),)))
    apart = RoleSchedules(weight=schedule, activation=8, gradient=8)
    refused("a RoleSchedules cannot be priced", relative, apart)
    late = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=2, delay=0.25, delay_at="float32")
    refused("roles with levels of their own are priced by the name", relative, late)
    assert MeasuredCost.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_the_table_has_all_bits_layers_and_the_rest(clock):
    model = of(Busy(clock, 1, 2), Busy(clock, 1, 0, weight=False))
    lines = str(measure_cost(model, ONES, bits=(3, 8), repeats=1)).splitlines()
    assert lines[0].endswith("gradients of 8 bits")
    assert [line.split()[0] for line in lines[1:] if line] == ["bits", "3", "8", "layer", "0", "1", "(other)"]
    assert lines[2].split()[:3] == ["3", "4000.000", "1.000"]
    assert lines[-2].split()[1:3] == ["3000.000", "3000.000"]


def test_values_and_models_that_are_refused():
    one, layered = "give one schedule for all layers and roles, or bits=; got", LayeredSchedule(((("*",), make(), 1),))
    model, inputs = network()
    for message, given in (
        ("give a schedule, or the bits to measure", {}),
        ("bits must name at least one bit width", {"bits": ()}),
        (r"bits must be the widths to measure, such as \(3, 8\), got 8", {"bits": 8}),
        ("bits must", {"bits": (0, 8)}),
        (f"{one} dict", {"schedule": {"*": make()}}),
        (f"{one} LayeredSchedule", {"schedule": layered}),
    ):
        refused(message, measure_cost, model, inputs, **given)
    for message, other, x in (
        (r"the model is in evaluation mode; call model.train\(\)", network()[0].eval(), inputs),
        ("no output of Sequential needs a gradient", network()[0].requires_grad_(False), inputs),
        ("the model has no quantised layers", nn.Linear(2, 2), inputs),
        ("model to time 'meta'; choose from cpu, cuda", network()[0].to("meta"), (inputs[0].to("meta"),)),
    ):
        refused(message, measure_cost, other, x, bits=[8])


@pytest.mark.parametrize("ask", [cpt.check, cpt.count_bitops, cpt.summary, partial(measure_cost, bits=(3,))])
def test_a_tensor_is_not_taken_apart_for_its_rows(ask):
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3)))
    refused("inputs must be a tuple of the arguments of forward, got a Tensor", ask, model, torch.randn(1, 4))
