"""Levels of schedules as number formats, and roles with schedules of their own, in layers that train."""

import pytest
import torch
from helpers import OnRing, losses_of
from torch import nn

import cpt_core as cpt
from cpt_core.formats.ladder import AFFINE, LADDERS
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.operators import fake_quantize
from cpt_core.kernels.rotation import rotate
from cpt_core.schedules.schedule import Levels, StaticSchedule, TableSchedule

LADDER = cpt.FormatLadder({3: "mxfp4", 4: "nvfp4", 6: "e3m2", 8: "e4m3"})
NINE = torch.tensor(9.0)
CYCLE = TableSchedule(((3, 1), (4, 1), (6, 1), (8, 1)))


KINDS = {
    "linear": (lambda: nn.Linear(32, 64), (4, 32)),
    "sequence": (lambda: nn.Linear(32, 64), (4, 3, 32)),
    "convolution": (lambda: nn.Conv2d(32, 64, 3), (2, 32, 6, 6)),
    "lstm": (lambda: nn.LSTM(32, 32), (5, 4, 32)),
    "gcn": (lambda: OnRing(cpt.GraphConv(32, 64)), (6, 32)),
    "sage": (lambda: OnRing(cpt.SAGEConv(32, 64)), (6, 32)),
}


def made(kind):
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    return make(), torch.randn(shape)


def converted(kind, rounding="stochastic", **config):
    """A quantised layer and its input."""
    model, x = made(kind)
    cpt.quantize_(nn.Sequential(model), cpt.QuantConfig(**config).with_gradient_rounding(rounding))
    return model, x


def of_operands(ladder):
    return {"activation": ladder, "weight": ladder, "gradient": None}


def output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def trained(model, x, schedule):
    """Losses and the last gradients of four steps of training over a schedule."""
    model = nn.Sequential(model)
    losses = losses_of(model, schedule, lambda step: output(model, x).square().mean(), 4)
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "aggregation"), [*((k, "fp") for k in KINDS), ("gcn", "quantized"), ("sage", "quantized")]
)
def test_the_papers_ladder_written_out_is_the_paper(kind, aggregation):
    written = cpt.FormatLadder({q: f"affine{q}" for q in range(1, 9)})
    roles = cpt.RoleSchedules(weight=CYCLE, activation=CYCLE, gradient=8)
    same = {"activation": None, "weight": written, "gradient": AFFINE}
    runs = [(None, CYCLE), (None, roles), (written, CYCLE), (same, CYCLE)]
    (expected, of_expected), *others = (
        trained(*converted(kind, ladder=ladder, aggregation=aggregation), schedule) for ladder, schedule in runs
    )
    for losses, gradients in others:
        assert losses == expected
        assert all(map(torch.equal, gradients, of_expected))


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_trains_and_is_evaluated_on_a_ladder(kind):
    model, x = converted(kind, ladder=LADDER)
    losses, gradients = trained(model, x, CYCLE)
    plain, _ = trained(*converted(kind), CYCLE)
    assert all(g.isfinite().all() for g in gradients)
    assert losses != plain
    model.eval()
    assert output(model, x).isfinite().all()


def test_a_linear_layer_multiplies_what_the_formats_make_of_its_operands():
    model, x = converted("linear", ladder=LADDER)
    x.requires_grad_()
    for level, format in ((3, "mxfp4"), (4, "nvfp4"), (6, "e3m2"), (8, "e4m3")):
        x.grad = None
        model.precision.set_bits(level, None)
        y = model(x)
        of_input = fake_quantize(x.detach(), NINE, f"per_tensor|{format}")[0]
        rows = "per_tensor" if format == "nvfp4" else "per_row"
        of_weight = fake_quantize(model.weight.detach(), NINE, f"{rows}|{format}")[0]
        bias = f"per_tensor|{format}:partial=1" if "mx" in format else f"per_tensor|{format}"
        of_bias = fake_quantize(model.bias.detach(), NINE, bias)[0]
        assert torch.equal(y, nn.functional.linear(of_input, of_weight, of_bias))
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(y) @ of_weight)  # straight through


def test_blocks_of_convolutions_lie_along_the_channels():
    model, x = converted("convolution", ladder={8: "mxfp4"})
    model.precision.set_bits(8, None)
    by_channels = fake_quantize(x.movedim(1, -1).contiguous(), NINE, "per_tensor|mxfp4")[0].movedim(-1, 1)
    weight = fake_quantize(model.weight.detach().movedim(1, -1), NINE, "per_channel|mxfp4")[0].movedim(-1, 1)
    expected = nn.functional.conv2d(by_channels, weight)
    bias = fake_quantize(model.bias.detach(), NINE, "per_tensor|mxfp4")[0]
    assert torch.allclose(model(x), expected + bias[:, None, None], atol=1e-5)


def test_gradients_have_the_format_of_their_level():
    model, x = converted("linear", "nearest", ladder=LADDER)
    model.precision.set_bits(None, 3)
    gradient = torch.randn(4, 64)
    x.requires_grad_()
    model(x).backward(gradient)
    rounded = fake_quantize(gradient, NINE, "per_position|mxfp4")[0]
    assert torch.allclose(x.grad, rounded @ model.weight.detach(), atol=1e-6)
    assert torch.allclose(model.weight.grad, rounded.t() @ x.detach(), atol=1e-6)


@pytest.mark.parametrize("ladder", [AFFINE, LADDER])
@pytest.mark.parametrize("kind", ["linear", "sequence", "convolution"])
def test_both_backward_products_have_a_precision_of_their_own(kind, ladder):
    results = {}
    for name, levels in {
        "error": Levels(None, None, 3, None),
        "weight": Levels(None, None, None, 3),
        "both": Levels(None, None, 3, 3),
        "none": Levels(None, None, None, None),
    }.items():
        model, x = converted(kind, "nearest", ladder=ladder)
        model.precision.set_levels(levels)
        x.requires_grad_()
        y = model(x)
        gradients = torch.autograd.grad(y, [x, model.weight, model.bias], torch.linspace(-1, 2, y.numel()).view_as(y))
        results[name] = [y.detach(), *gradients]
    none, both = results["none"], results["both"]
    assert not torch.equal(both[1], none[1])
    assert not torch.equal(both[2], none[2])
    for name, (of_input, of_weight) in {"error": (both, none), "weight": (none, both)}.items():
        y, dx, dw, db = results[name]
        assert torch.equal(y, none[0])
        assert torch.allclose(dx, of_input[1], atol=1e-6)
        assert torch.allclose(dw, of_weight[2], atol=1e-5)
        assert torch.allclose(db, of_weight[3], atol=1e-5)


def test_stochastic_gradients_apart_draw_noise_of_their_own():
    model, x = converted("linear")
    model.precision.set_levels(Levels(8, 8, 3, 4))
    before = int(model.precision.noise_key)
    model(x.requires_grad_()).sum().backward()
    assert int(model.precision.noise_key) == before + 2


def test_a_rotation_of_both_operands_leaves_the_product_alone():
    model, x = converted("sequence", ladder=of_operands({8: "affine20:hadamard=16"}))
    plain = nn.functional.linear(x, model.weight, model.bias)
    model.precision.set_bits(8, None)
    x.requires_grad_()
    y = model(x)
    assert torch.allclose(y, plain, atol=1e-4)
    gradient = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, model.weight], gradient)
    assert torch.allclose(dx, gradient @ model.weight, atol=1e-4)
    assert torch.allclose(dw, gradient.flatten(0, 1).t() @ x.detach().flatten(0, 1), atol=1e-3)


def test_a_rotation_spreads_an_outlier_over_its_block():
    errors = []
    for hadamard in (0, 32):
        ladder = {4: Quantizer(format=cpt.Format.affine(4), hadamard=hadamard)}
        model, x = converted("linear", ladder=of_operands(ladder))
        x[:, 0] = 100.0
        model.precision.set_bits(4, None)
        found = model.precision.operand("input", x)
        back = rotate(found, 32, model.precision.key, inverse=True) if hadamard else found
        errors.append(float((back - x)[:, 1:].square().mean()))
    assert errors[1] < errors[0]


def test_roles_have_schedules_of_their_own():
    model, x = converted("linear")
    roles = cpt.RoleSchedules(weight=CYCLE, activation=8, error=6, weight_gradient="float32")
    scheduler = cpt.PrecisionScheduler(nn.Sequential(model), roles)
    seen = []
    for step in range(4):
        seen.append(model.precision.in_force)
        if step < 3:
            scheduler.step()
    assert seen == [(8, q, 6, 32) for q in (3, 4, 6, 8)]
    twin, _ = converted("linear")
    other = cpt.PrecisionScheduler(nn.Sequential(twin), roles)
    other.load_state_dict(scheduler.state_dict())
    assert twin.precision.in_force == model.precision.in_force
    with cpt.precision(model, bits=2):
        assert model.precision.in_force == (2, 2, 6, 32)
    assert model.precision.in_force == (8, 8, 6, 32)
    assert model(x).isfinite().all()


def test_the_bounds_of_roles_are_those_of_weights_and_activations_together():
    roles = cpt.RoleSchedules(weight=CYCLE, activation=4, error=2, weight_gradient=16)
    assert (roles.q_min, roles.q_max) == (3, 8)
    assert (cpt.RoleSchedules(weight=4, activation=CYCLE, gradient=8).q_max, roles.highest.weight_gradient) == (8, 16)


ROLES = {"weight": CYCLE, "activation": 8, "gradient": 8}
LAYERED = cpt.LayeredSchedule(((("0",), StaticSchedule(3, 2), 1), (("*",), StaticSchedule(8, 2), 1)))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: cpt.RoleSchedules(**ROLES).levels(4), "schedules of their own here; leave q_grad out, got 4"),
        (lambda: cpt.RoleSchedules(**ROLES).levels_at(0, 4), "schedules of their own here; leave q_grad out, got 4"),
        (lambda: cpt.RoleSchedules(**ROLES, error=8), "give gradient, or error and weight_gradient, not both"),
        (lambda: cpt.RoleSchedules(**ROLES, weight_gradient=8), "give gradient, or error and weight_gradient, not"),
        (
            lambda: cpt.RoleSchedules(**ROLES | {"weight": LAYERED}),
            "weight has one schedule, the same in all layers; got",
        ),
    ],
)
def test_a_role_has_one_schedule_given_once(ask, said):
    with pytest.raises(ValueError, match=said):
        ask()


@pytest.mark.parametrize("ladder", [None, LADDER])
def test_a_float_phase_quantises_nothing(ladder):
    (model, x), (plain, _) = converted("linear", ladder=ladder), made("linear")
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=1, delay=0.1, delay_at="float32")
    scheduler = cpt.PrecisionScheduler(nn.Sequential(model), schedule)
    outputs = model(x), plain(x)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(model.weight.grad, plain.weight.grad)
    for _ in range(4):
        scheduler.step()
    assert model.precision.in_force == (3, 3, 8, 8)
    assert not torch.equal(model(x), plain(x))


@pytest.mark.parametrize(
    ("config", "schedule", "said"),
    [
        ({"ladder": {3: "mxfp4", 8: "e4m3"}}, TableSchedule(((3, 1), (5, 1), (8, 1))), "hole at level 5"),
        (
            {"ladder": {8: cpt.Format.mx("e2m1", block=24)}},
            StaticSchedule(8, 4),
            "blocks of 24 .* '0'.* 32 features|'0'",
        ),
        ({"ladder": {8: "e4m3:rounding=stochastic"}}, StaticSchedule(8, 4), "operands are rounded to nearest"),
        ({"ladder": {8: "affine8:hadamard=16"}}, StaticSchedule(8, 4), "one size; got 16 for activation"),
    ],
)
def test_what_a_layer_cannot_take_is_refused_before_training(config, schedule, said):
    model, _ = converted("linear", **config)
    with pytest.raises(ValueError, match=said):
        cpt.PrecisionScheduler(nn.Sequential(model), schedule)
    assert model.precision.in_force is None


@pytest.mark.parametrize("kind", ["lstm", "gcn", "sage"])
def test_layers_with_one_gradient_say_so(kind):
    model, _ = converted(kind)
    with pytest.raises(ValueError, match="once for both backward products"):
        cpt.PrecisionScheduler(
            nn.Sequential(model), cpt.RoleSchedules(weight=CYCLE, activation=8, error=8, weight_gradient=4)
        )


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        ({"weight": None}, "roles missing: activation, error, weight_gradient"),
        ({"weights": None}, "unknown role 'weights'"),
        ({"weight": None, "activation": None, "gradient": None, "error": None}, "not both"),
    ],
)
def test_bad_ladders_of_a_configuration_are_refused(ladder, said):
    with pytest.raises(ValueError, match=said):
        cpt.QuantConfig(ladder=ladder)


@pytest.mark.slow
def test_compiled_models_follow_a_ladder():
    model, x = converted("linear", ladder=LADDERS["minifloat"])
    compiled = torch.compile(model, backend="aot_eager")
    for mode, level in ((True, 4), (False, 8)):  # every format is compiled anew
        with cpt.precision(model.train(mode), bits=level):
            assert torch.equal(compiled(x), model(x)), (mode, level)


def test_products_on_codes_are_those_of_the_affine_levels_alone():
    model, x = converted("linear", ladder={4: "e2m1", 8: "affine8"}, execution="integer")
    for level, on_codes in ((8, True), (4, False)):
        model.precision.set_bits(level, 8)
        assert model.precision.on_codes(x) is on_codes


@pytest.mark.parametrize(
    ("kind", "gradient", "levels"),
    [("linear", AFFINE, (8, 3, 6, 6)), ("convolution", {8: "mx(e2m1,4)"}, (8, 8, 8, 8))],  # blocks along channels
)
def test_products_on_codes_are_the_simulated_ones(kind, gradient, levels):
    results = []
    for execution in ("simulated", "integer"):
        ladder = {"weight": None, "activation": None, "gradient": gradient}
        model, x = converted(kind, "nearest", ladder=ladder, execution=execution)
        model.precision.set_levels(Levels(*levels))
        y = model(x.requires_grad_())
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        results.append([y, *torch.autograd.grad(y, [x, model.weight], upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
