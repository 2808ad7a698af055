"""Format ladders and per-role schedules in layers, schedulers, checkpoints, costs and exports."""

from functools import partial

import pytest
import torch
from helpers import OnRing, losses_of, refused
from torch import nn
from torch.nn.functional import conv2d, linear

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.schedules.schedule import RoleLevels, StaticSchedule
from cpt_extras.formats.format_rounding import rotate
from cpt_extras.formats.ladder import AFFINE, LADDERS
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.int8.execution import runs_int8
from cpt_extras.integrations.trainer_precision import TrainerPrecision
from cpt_extras.kernels import operators
from cpt_extras.kernels.lstm_layer import rounded_input
from cpt_extras.operations.recurrences import LSTMDirection
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_lab.training.session import layer_constants

LADDER = cpt.FormatLadder({3: "mxfp4", 4: "nvfp4", 6: "e3m2", 8: "e4m3"})
MX = LADDERS["mx"]
CYCLE = TableSchedule(((3, 1), (4, 1), (6, 1), (8, 1)))
MX_CYCLE = TableSchedule(((1, 1), (3, 1)))

LAYERS = {
    "linear": (lambda: nn.Linear(32, 64), (4, 32)),
    "sequence": (lambda: nn.Linear(32, 64), (4, 3, 32)),
    "convolution": (lambda: nn.Conv2d(32, 64, 3), (2, 32, 6, 6)),
    "lstm": (lambda: nn.LSTM(32, 32), (5, 4, 32)),
    "gcn": (lambda: OnRing(cpt.GraphConv(32, 64)), (6, 32)),
    "sage": (lambda: OnRing(cpt.SAGEConv(32, 64)), (6, 32)),
}


def make_layer(name):
    """Return a layer and its input."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    return make(), torch.randn(shape)


def quantised(name, rounding="stochastic", **config):
    """Return a quantised layer and its input."""
    layer, x = make_layer(name)
    config = cpt.QuantConfig(**config).with_gradient_rounding(rounding)
    cpt.quantize_(nn.Sequential(layer), config)
    return layer, x


def by_role(activation, weight, gradient):
    return {"activation": activation, "weight": weight, "gradient": gradient}


def output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def train(layer, x, schedule):
    """Return losses and the last gradients of four training steps under a schedule."""
    model = nn.Sequential(layer)
    losses = losses_of(model, schedule, lambda _: output(model, x).square().mean(), 4)
    return losses, [p.grad for p in model.parameters()]


def rounded(x, grid, steps=9, key=None):
    """Return a tensor rounded to a grid; formats ignore the number of steps."""
    steps = torch.tensor(float(steps))
    return operators.fake_quantize(x.detach(), steps, grid, key)[0]


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [*((n, "fp") for n in LAYERS), ("gcn", "quantized"), ("sage", "quantized")],
)
def test_ladder_of_affine_formats_equals_paper(name, aggregation):
    affine = cpt.FormatLadder({q: f"affine{q}" for q in range(1, 9)})
    roles = cpt.RoleSchedules(weight=CYCLE, activation=CYCLE, gradient=8)
    losses, gradients = train(*quantised(name, aggregation=aggregation), CYCLE)
    for ladder, schedule in (
        (None, roles),
        (affine, CYCLE),
        (by_role(None, affine, AFFINE), CYCLE),
    ):
        layer, x = quantised(name, ladder=ladder, aggregation=aggregation)
        other_losses, other_gradients = train(layer, x, schedule)
        assert other_losses == losses
        assert all(map(torch.equal, other_gradients, gradients))


@pytest.mark.parametrize("name", LAYERS)
def test_ladder_trains_and_evaluates_every_layer(name):
    layer, x = quantised(name, ladder=LADDER)
    losses, gradients = train(layer, x, CYCLE)
    assert all(g.isfinite().all() for g in gradients)
    assert losses != train(*quantised(name), CYCLE)[0]
    assert output(layer.eval(), x).isfinite().all()


@pytest.mark.parametrize(
    ("level", "grids"),  # of input, weight and bias
    [
        (3, ("per_tensor|mxfp4", "per_row|mxfp4", "per_tensor|mxfp4:partial=1")),
        (4, ("per_tensor|nvfp4", "per_tensor|nvfp4", "per_tensor|nvfp4")),
        (6, ("per_tensor|e3m2", "per_row|e3m2", "per_tensor|e3m2")),
        (8, ("per_tensor|e4m3", "per_row|e4m3", "per_tensor|e4m3")),
    ],
)
def test_ladder_linear_multiplies_operands_in_their_formats(level, grids):
    layer, x = quantised("linear", ladder=LADDER)
    layer.precision.set_bits(level, None)
    y = layer(x.requires_grad_())
    operands = map(rounded, (x, layer.weight, layer.bias), grids)
    x_rounded, weight, bias = operands
    assert torch.equal(y, linear(x_rounded, weight, bias))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ weight)  # straight through


def test_ladder_convolution_blocks_lie_along_channels():
    layer, x = quantised("convolution", ladder={8: "mxfp4"})
    layer.precision.set_bits(8, None)

    def rounded_along_channels(x, granularity):
        channels_last = x.movedim(1, -1).contiguous()
        return rounded(channels_last, f"{granularity}|mxfp4").movedim(-1, 1)

    operands = (
        rounded_along_channels(x, "per_tensor"),
        rounded_along_channels(layer.weight, "per_channel"),
    )
    bias = rounded(layer.bias, "per_tensor|mxfp4")
    expected = conv2d(*operands) + bias[:, None, None]
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_ladder_blocks_of_unbatched_image(kind):
    config = cpt.QuantConfig(ladder={8: "mx(e2m1,8)"}).with_gradient_rounding("nearest")
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(kind(16, 8, 1)), config)
    x = torch.randn(16, *[8] * int(kind.__name__[-2]), requires_grad=True)
    with cpt.precision(model, 8, 8):
        y, batched = model(x), model(x.unsqueeze(0)).squeeze(0)
        weight = torch.randn_like(y)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
        (of_batched,) = torch.autograd.grad((batched * weight).sum(), x)
    assert torch.equal(y, batched)
    assert torch.equal(gradient, of_batched)


@pytest.mark.parametrize("name", ["e4m3", "affine4:saturate=0", "nvfp4:partial=1"])
def test_lstm_ladder_has_one_range_per_step(name):
    """Quantise every LSTM step on its range, whatever granularity the format has."""
    format = f"{name}:granularity=per_tensor"
    torch.manual_seed(0)
    config = cpt.QuantConfig(ladder={8: format})
    model = cpt.quantize_(nn.Sequential(nn.LSTM(8, 4)), config)
    scales = torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    x = (torch.randn(3, 2, 8) * scales).flatten(0, 1)
    direction = LSTMDirection(model[0].precision, "l0", *[None] * 4, steps=3, sizes=())
    for packed_sizes, step_sizes in (((), (2, 2, 2)), ((3, 2, 1), (3, 2, 1))):
        with cpt.precision(model, 8, 8):
            found = rounded_input(direction._replace(sizes=packed_sizes), x)
        steps = [cpt.quantize(step, format=format) for step in x.split(step_sizes)]
        assert torch.equal(found, torch.cat(steps))


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_ladder_row_ranges_replace_running_ranges(kind):
    torch.manual_seed(0)
    format = "e4m3:granularity=per_row"
    config = cpt.QuantConfig(ladder={1: "e2m1", 2: format})
    model = cpt.quantize_(nn.Sequential(kind(8, 8)), config)
    scheduler = cpt.PrecisionScheduler(model, TableSchedule(((2, 1), (1, 1), (2, 1))))
    x = torch.randn(3, 2, 8) * torch.tensor([[1.0], [100.0]])
    for _ in range(3):
        y = output(model, x)
        y.sum().backward()
        scheduler.step()
    assert torch.equal(output(model.eval(), x), y)
    layer = model[0].precision
    role = next(role for role in layer.quantizers if role.startswith("input"))
    by_row = cpt.quantize(x, format=format)
    assert torch.equal(layer.quantize_operand(role, x), by_row)


# --- gradients ----------------------------------------------------------------------------------


def test_ladder_gradient_has_format_of_its_level():
    layer, x = quantised("linear", "nearest", ladder=LADDER)
    layer.precision.set_bits(None, 3)
    gradient = torch.randn(4, 64)
    layer(x.requires_grad_()).backward(gradient)
    in_format = rounded(gradient, "per_position|mxfp4")
    assert torch.allclose(x.grad, in_format @ layer.weight, atol=1e-6)
    assert torch.allclose(layer.weight.grad, in_format.t() @ x, atol=1e-6)


@pytest.mark.parametrize("ladder", [AFFINE, LADDER], ids=["affine", "formats"])
@pytest.mark.parametrize("name", ["linear", "sequence", "convolution"])
def test_role_levels_split_input_and_weight_gradients(name, ladder):
    def run(error, weight_gradient):
        layer, x = quantised(name, "nearest", ladder=ladder)
        layer.precision.set_levels(RoleLevels(None, None, error, weight_gradient))
        y = layer(x.requires_grad_())
        upstream = torch.linspace(-1, 2, y.numel()).view_as(y)
        leaves = x, layer.weight, layer.bias
        return y.detach(), *torch.autograd.grad(y, leaves, upstream)

    (y, *exact), (_, *low) = run(None, None), run(3, 3)
    assert not torch.equal(low[0], exact[0])
    assert not torch.equal(low[1], exact[1])
    y_low, *found = run(3, None)
    assert torch.equal(y_low, y)
    torch.testing.assert_close(found, [low[0], *exact[1:]], rtol=0, atol=1e-5)
    y_low, *found = run(None, 3)
    assert torch.equal(y_low, y)
    torch.testing.assert_close(found, [exact[0], *low[1:]], rtol=0, atol=1e-5)


def test_split_gradients_equal_noise_of_layer_keys():
    layer, x = quantised("linear")
    layer.precision.set_levels(RoleLevels(None, None, 3, 4))
    key = layer.precision.noise_key.clone()
    y = layer(x.requires_grad_())
    gradient = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, layer.weight], gradient)
    for_input = rounded(gradient, "per_position", 7, key)
    for_weight = rounded(gradient, "per_position", 15, key + 1)
    assert torch.equal(dx, for_input @ layer.weight)
    assert torch.equal(dw, for_weight.t() @ x)
    assert int(layer.precision.noise_key) == int(key) + 2


@pytest.mark.parametrize(
    ("ladder", "fused"),
    [({8: "e4m3"}, 0), ({8: "affine4:granularity=per_tensor"}, 1), (None, 1)],
)
def test_graph_gradient_ladder_keeps_its_format(ladder, fused):
    config = cpt.QuantConfig(ladder=by_role(None, None, ladder))
    model = cpt.quantize_(OnRing(cpt.GraphConv(4, 8)), config)
    with cpt.precision(model, 8, 8), torch.profiler.profile() as profile:
        model(torch.randn(6, 4, requires_grad=True)).sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("cpt::round_scale_round") == fused


# --- rotation -----------------------------------------------------------------------------------


def test_hadamard_rotation_of_both_operands_cancels():
    ladder = {8: "affine20:hadamard=16"}
    layer, x = quantised("sequence", ladder=by_role(ladder, ladder, None))
    layer.precision.set_bits(8, None)
    y = layer(x.requires_grad_())
    plain = linear(x, layer.weight, layer.bias)
    gradient, leaves = torch.randn_like(y), (x, layer.weight)
    found = torch.autograd.grad(y, leaves, gradient)
    expected = torch.autograd.grad(plain, leaves, gradient)
    torch.testing.assert_close((y, *found), (plain, *expected), rtol=1e-5, atol=1e-3)


def test_hadamard_rotation_spreads_outlier_over_block():
    errors = []
    for hadamard in (0, 32):
        ladder = {4: FormatQuantizer(format=cpt.Format.affine(4), hadamard=hadamard)}
        layer, x = quantised("linear", ladder=by_role(ladder, ladder, None))
        x[:, 0] = 100.0
        layer.precision.set_bits(4, None)
        found = layer.precision.quantize_operand("input", x)
        if hadamard:
            found = rotate(found, 32, layer.precision.key, inverse=True)
        errors.append(float((found - x)[:, 1:].square().mean()))
    assert errors[1] < errors[0]


# --- schedules of roles -------------------------------------------------------------------------


def test_role_schedules_set_levels_per_role():
    layer, x = quantised("linear")
    roles = cpt.RoleSchedules(
        weight=CYCLE, activation=8, error=6, weight_gradient="float32"
    )
    scheduler = cpt.PrecisionScheduler(nn.Sequential(layer), roles)
    for weight_bits in (3, 4, 6, 8):
        assert layer.precision.active_levels == (8, weight_bits, 6, 32)
        if weight_bits < 8:
            scheduler.step()
    twin, _ = quantised("linear")
    other = cpt.PrecisionScheduler(nn.Sequential(twin), roles)
    other.load_state_dict(scheduler.state_dict())
    assert twin.precision.active_levels == (8, 8, 6, 32)
    with cpt.precision(layer, bits=2):
        assert layer.precision.active_levels == (2, 2, 6, 32)
    assert layer.precision.active_levels == (8, 8, 6, 32)
    assert layer(x).isfinite().all()


def test_role_schedules_bounds_cover_weight_and_activation():
    roles = cpt.RoleSchedules(weight=CYCLE, activation=4, error=2, weight_gradient=16)
    assert (roles.q_min, roles.q_max) == (3, 8)
    assert roles.highest.weight_gradient == 16
    assert cpt.RoleSchedules(weight=4, activation=CYCLE, gradient=8).q_max == 8


ROLES = {"weight": CYCLE, "activation": 8, "gradient": 8}
GROUPS = (("0",), StaticSchedule(3, 2), 1), (("*",), StaticSchedule(8, 2), 1)
LAYERED = cpt.LayeredSchedule(GROUPS)
OWN_GRADIENTS = "schedules of their own here; leave q_grad out, got 4"
TWICE = "give gradient, or error and weight_gradient, not both"


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (cpt.RoleSchedules(**ROLES).levels, {"q_grad": 4}, OWN_GRADIENTS),
        (cpt.RoleSchedules(**ROLES).levels_at, {"step": 0, "q_grad": 4}, OWN_GRADIENTS),
        (partial(cpt.RoleSchedules, error=8), ROLES, TWICE),
        (cpt.RoleSchedules, ROLES | {"weight_gradient": 8}, TWICE),
        (
            cpt.RoleSchedules,
            ROLES | {"weight": LAYERED},
            "weight has one schedule, the same in all layers;",
        ),
        (
            cpt.QuantConfig,
            {"ladder": {"weight": None}},
            "roles missing: activation, error, weight_gradient",
        ),
        (cpt.QuantConfig, {"ladder": {"weights": None}}, "unknown role 'weights'"),
        (cpt.QuantConfig, {"ladder": by_role(*[None] * 3) | {"error": None}}, "both"),
    ],
)
def test_role_schedules_and_ladders_reject_conflicts(call, arguments, message):
    """Reject a schedule or ladder that is given twice for a role."""
    refused(message, call, **arguments)


SPLIT = cpt.RoleSchedules(weight=CYCLE, activation=8, error=8, weight_gradient=4)
ONCE = "once for both backward products"
EIGHT = StaticSchedule(8, 4)


@pytest.mark.parametrize(
    ("name", "ladder", "schedule", "message"),
    [
        (
            "linear",
            {3: "mxfp4", 8: "e4m3"},
            TableSchedule(((3, 1), (5, 1), (8, 1))),
            "hole at level 5",
        ),
        ("linear", {8: "mx(e2m1,24)"}, EIGHT, "blocks of 24 .* 32 features|'0'"),
        ("linear", {8: "e4m3:rounding=stochastic"}, EIGHT, "are rounded to nearest"),
        ("linear", {8: "affine8:hadamard=16"}, EIGHT, "size; got 16 for activation"),
        ("lstm", None, SPLIT, ONCE),
        ("gcn", None, SPLIT, ONCE),
        ("sage", None, SPLIT, ONCE),
    ],
)
def test_scheduler_rejects_levels_missing_in_ladder(name, ladder, schedule, message):
    model = nn.Sequential(quantised(name, ladder=ladder)[0])
    refused(message, cpt.PrecisionScheduler, model, schedule)
    levels = {p.active_levels for p in layer_precisions(model).values()}
    assert levels == {None}


# --- int8, check, export, summary ---------------------------------------------------------------


@pytest.mark.parametrize(("level", "is_affine"), [(8, True), (4, False)])
def test_int8_runs_affine_ladder_levels_only(level, is_affine):
    ladder = {4: "e2m1", 8: "affine8"}
    layer, x = quantised("linear", ladder=ladder, execution="integer")
    layer.precision.set_bits(level, 8)
    assert runs_int8(layer.precision, x) is is_affine


@pytest.mark.parametrize(
    ("name", "gradient", "levels"),
    [
        ("linear", AFFINE, (8, 3, 6, 6)),
        ("convolution", {8: "mx(e2m1,4)"}, (8, 8, 8, 8)),  # blocks along channels
    ],
)
def test_int8_ladder_equals_simulation(name, gradient, levels):
    results = []
    for execution in ("simulated", "integer"):
        ladder = by_role(None, None, gradient)
        layer, x = quantised(name, "nearest", ladder=ladder, execution=execution)
        layer.precision.set_levels(RoleLevels(*levels))
        y = layer(x.requires_grad_())
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        results.append([y, *torch.autograd.grad(y, [x, layer.weight], upstream)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def two_layers(ladder=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return cpt.quantize_(model, cpt.QuantConfig(ladder=ladder, **options))


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ladder", "trained_level", "exported_level"),
    [({1: "affine4", 3: "e4m3"}, 3, 1), (by_role({8: "e4m3"}, None, None), 8, 8)],
)
def test_export_accepts_input_formats_not_weight_formats(
    ladder, trained_level, exported_level
):
    model = two_layers(ladder)
    with cpt.precision(model, trained_level, trained_level):
        model(X)
    model.eval()
    if trained_level != exported_level:
        message = "layer '0' would have weights in e4m3, and a program holds codes of"
        refused(message, cpt.export, model, (X,), bits=trained_level)
    program = cpt.export(model, (X,), bits=exported_level)
    with cpt.precision(model, exported_level):
        assert torch.equal(program.module()(X), model(X))


@pytest.mark.parametrize(
    ("ladder", "text"),
    [
        (
            MX,
            "none (forward simulated: at level 1 the activation is in mxfp4:partial=1",
        ),
        (
            {1: "affine4", 3: "nvfp4"},
            "none (forward simulated: at level 3 the activation is in nvfp4",
        ),
        (
            by_role(None, None, {8: "e4m3"}),
            "forward (error simulated: at level 8 the error is in e4m3",
        ),
        ({1: "affine4", 2: "affine8"}, "forward, error, weight"),
    ],
)
def test_summary_calls_non_affine_matmuls_simulated(ladder, text):
    config = cpt.QuantConfig(ladder=ladder, execution="integer").with_shared_steps()
    model = cpt.quantize_(nn.Sequential(nn.Linear(32, 32)), config)
    assert f"int8 matmuls: {text}" in str(cpt.summary(model))


def test_recorded_step_constants_distinguish_split_gradients():
    layer = layer_precisions(two_layers())["0"]
    constants = []
    for levels in ((8, 8, 8, 8), (8, 8, 8, 4), (8, 8, None, 8), (8, 8, 8, None)):
        layer.set_levels(RoleLevels(*levels))
        constants.append(layer_constants(layer))
    assert len(set(constants)) == 4
    layer.set_levels(RoleLevels(6, 5, 7, 3))
    assert layer_constants(layer) == constants[1]  # only numbers differ


# --- checkpoints and evaluation -----------------------------------------------------------------


def scheduler_of(ladder):
    return cpt.PrecisionScheduler(two_layers(ladder), MX_CYCLE)


def test_scheduler_rejects_checkpoint_with_different_ladder():
    state = scheduler_of(MX).state_dict()
    scheduler_of(MX).load_state_dict(state)
    message = r"the checkpoint has ladders .*mxfp4:partial=1.*, this scheduler"
    for other in (None, {1: "e2m1", 3: "e4m3"}, by_role(MX, MX, None)):
        refused(message, scheduler_of(other).load_state_dict, state)
    plain_state = scheduler_of(None).state_dict()
    message = r"the checkpoint has ladders \{\}, this scheduler"
    refused(message, scheduler_of(MX).load_state_dict, plain_state)
    del plain_state["ladders"]  # as it was written before there were any
    scheduler_of(None).load_state_dict(plain_state)


def test_scheduler_state_of_paper_ladder_is_empty():
    """Treat every spelling of the paper's grids as no ladder, also in per-role states."""
    affine, plain = scheduler_of(AFFINE), scheduler_of(None)
    state = affine.state_dict()
    assert state["ladders"] == {}
    affine.load_state_dict(plain.state_dict())
    roles = {name: {"activation": {}, "weight": {}} for name in state["layers"]}
    for scheduler in (affine, plain):
        scheduler.load_state_dict({**plain.state_dict(), "ladders": roles})


RISING = cpt.RoleSchedules(
    weight=TableSchedule(((1, 1), (2, 1))), activation=6, gradient="float32"
)
RISING_LADDER = by_role({6: "e4m3"}, {1: "e2m1", 2: "e3m2"}, None)


def test_precision_q_max_applies_to_every_role():
    model = two_layers(RISING_LADDER)
    cpt.PrecisionScheduler(model, RISING)
    layer = layer_precisions(model)["0"]
    with cpt.precision(model, "q_max"):
        assert layer.active_levels == (6, 2, 32, 32)
        assert str(layer.active_bits.formats.weight) == "e3m2"
    with cpt.precision(model, "q_max", q_grad=8):
        assert layer.active_levels == (6, 2, 8, 8)


@pytest.mark.parametrize(
    ("eval_bits", "expected"),
    [("q_max", (6, 2)), ("current", (6, 1)), ("float", (None, None))],
)
def test_trainer_precision_evaluates_roles_at_their_levels(eval_bits, expected):
    model = two_layers(RISING_LADDER)
    precision = TrainerPrecision(model, RISING, None, eval_bits=eval_bits)
    layer = layer_precisions(model)["0"]
    model.eval()
    assert layer.active_levels[:2] == expected
    assert precision.eval_logs() == {"eval_bits": expected[0] or 32}
    model.train()
    assert layer.active_levels == (6, 1, 32, 32)


# --- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["bitops", "ace", "multiplier", "energy"])
def test_relative_cost_prices_ladders_by_role(cost):
    high = {1: "e4m3", 3: "e4m3"}
    ladders = by_role(high, {1: "e2m1", 3: "e4m3"}, high)
    ladder = cpt.QuantConfig(ladder=ladders).ladder
    e2m1, e4m3 = cpt.FORMATS["e2m1"], cpt.FORMATS["e4m3"]
    per_mac, one = cpt.formats.COSTS[cost].per_mac, StaticSchedule(1, 2)
    mixed, full = per_mac(e2m1, e4m3), per_mac(e4m3, e4m3)
    found = one.relative_cost(3, 3, cost, ladder)
    assert found == pytest.approx((2 * mixed + full) / (3 * full))
    # of role schedules, the baseline has their own highest levels
    roles = cpt.RoleSchedules(weight=one, activation=3, gradient=3)
    assert roles.relative_cost(cost=cost, ladder=ladder) == 1
