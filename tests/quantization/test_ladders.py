"""Format ladders and per-role schedules in layers, schedulers, checkpoints, costs and exports."""

import pytest
import torch
from helpers import OnRing, losses_of, refused
from search.test_restartable import problem
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.schedules.schedule import RoleLevels, StaticSchedule
from cpt_extras.formats.format_rounding import rotate
from cpt_extras.formats.ladder import AFFINE, LADDERS
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.int8.execution import runs_int8
from cpt_extras.integrations.trainer_precision import TrainerPrecision
from cpt_extras.kernels.lstm_layer import rounded_input
from cpt_extras.kernels.operators import fake_quantize
from cpt_extras.operations.recurrences import LSTMDirection
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_lab.training.session import layer_constants

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
    """Return a quantised layer and its input."""
    model, x = made(kind)
    cpt.quantize_(
        nn.Sequential(model), cpt.QuantConfig(**config).with_gradient_rounding(rounding)
    )
    return model, x


def of_operands(ladder):
    return {"activation": ladder, "weight": ladder, "gradient": None}


def output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def trained(model, x, schedule):
    """Return losses and the last gradients of four training steps under a schedule."""
    model = nn.Sequential(model)
    losses = losses_of(
        model, schedule, lambda step: output(model, x).square().mean(), 4
    )
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [*((k, "fp") for k in KINDS), ("gcn", "quantized"), ("sage", "quantized")],
)
def test_ladder_of_affine_formats_equals_paper(kind, aggregation):
    written = cpt.FormatLadder({q: f"affine{q}" for q in range(1, 9)})
    roles = cpt.RoleSchedules(weight=CYCLE, activation=CYCLE, gradient=8)
    same = {"activation": None, "weight": written, "gradient": AFFINE}
    runs = [(None, CYCLE), (None, roles), (written, CYCLE), (same, CYCLE)]
    (expected, of_expected), *others = (
        trained(*converted(kind, ladder=ladder, aggregation=aggregation), schedule)
        for ladder, schedule in runs
    )
    for losses, gradients in others:
        assert losses == expected
        assert all(map(torch.equal, gradients, of_expected))


@pytest.mark.parametrize("kind", KINDS)
def test_ladder_trains_and_evaluates_every_layer(kind):
    model, x = converted(kind, ladder=LADDER)
    losses, gradients = trained(model, x, CYCLE)
    plain, _ = trained(*converted(kind), CYCLE)
    assert all(g.isfinite().all() for g in gradients)
    assert losses != plain
    model.eval()
    assert output(model, x).isfinite().all()


def test_ladder_linear_multiplies_operands_in_their_formats():
    model, x = converted("linear", ladder=LADDER)
    x.requires_grad_()
    for level, format in ((3, "mxfp4"), (4, "nvfp4"), (6, "e3m2"), (8, "e4m3")):
        x.grad = None
        model.precision.set_bits(level, None)
        y = model(x)
        of_input = fake_quantize(x.detach(), NINE, f"per_tensor|{format}")[0]
        rows = "per_tensor" if format == "nvfp4" else "per_row"
        of_weight = fake_quantize(model.weight.detach(), NINE, f"{rows}|{format}")[0]
        bias = (
            f"per_tensor|{format}:partial=1"
            if "mx" in format
            else f"per_tensor|{format}"
        )
        of_bias = fake_quantize(model.bias.detach(), NINE, bias)[0]
        assert torch.equal(y, nn.functional.linear(of_input, of_weight, of_bias))
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(y) @ of_weight)  # straight through


def test_ladder_convolution_blocks_lie_along_channels():
    model, x = converted("convolution", ladder={8: "mxfp4"})
    model.precision.set_bits(8, None)
    by_channels = fake_quantize(
        x.movedim(1, -1).contiguous(), NINE, "per_tensor|mxfp4"
    )[0].movedim(-1, 1)
    weight = fake_quantize(
        model.weight.detach().movedim(1, -1), NINE, "per_channel|mxfp4"
    )[0].movedim(-1, 1)
    expected = nn.functional.conv2d(by_channels, weight)
    bias = fake_quantize(model.bias.detach(), NINE, "per_tensor|mxfp4")[0]
    assert torch.allclose(model(x), expected + bias[:, None, None], atol=1e-5)


def test_ladder_gradient_has_format_of_its_level():
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
def test_role_levels_split_input_and_weight_gradients(kind, ladder):
    results = {}
    for name, levels in {
        "error": RoleLevels(None, None, 3, None),
        "weight": RoleLevels(None, None, None, 3),
        "both": RoleLevels(None, None, 3, 3),
        "none": RoleLevels(None, None, None, None),
    }.items():
        model, x = converted(kind, "nearest", ladder=ladder)
        model.precision.set_levels(levels)
        x.requires_grad_()
        y = model(x)
        gradients = torch.autograd.grad(
            y,
            [x, model.weight, model.bias],
            torch.linspace(-1, 2, y.numel()).view_as(y),
        )
        results[name] = [y.detach(), *gradients]
    none, both = results["none"], results["both"]
    assert not torch.equal(both[1], none[1])
    assert not torch.equal(both[2], none[2])
    for name, (of_input, of_weight) in {
        "error": (both, none),
        "weight": (none, both),
    }.items():
        y, dx, dw, db = results[name]
        assert torch.equal(y, none[0])
        assert torch.allclose(dx, of_input[1], atol=1e-6)
        assert torch.allclose(dw, of_weight[2], atol=1e-5)
        assert torch.allclose(db, of_weight[3], atol=1e-5)


def test_split_gradients_draw_two_noise_keys():
    model, x = converted("linear")
    model.precision.set_levels(RoleLevels(8, 8, 3, 4))
    before = int(model.precision.noise_key)
    model(x.requires_grad_()).sum().backward()
    assert int(model.precision.noise_key) == before + 2


def test_split_gradients_equal_noise_of_layer_keys():
    model, x = converted("linear")
    model.precision.set_levels(RoleLevels(None, None, 3, 4))
    key = model.precision.noise_key.clone()
    y = model(x.requires_grad_())
    gradient = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, model.weight], gradient)
    for_input = fake_quantize(gradient, torch.tensor(7.0), "per_position", key)[0]
    for_weight = fake_quantize(gradient, torch.tensor(15.0), "per_position", key + 1)[0]
    assert torch.equal(dx, for_input @ model.weight)
    assert torch.equal(dw, for_weight.t() @ x)


def test_hadamard_rotation_of_both_operands_cancels():
    model, x = converted("sequence", ladder=of_operands({8: "affine20:hadamard=16"}))
    plain = nn.functional.linear(x, model.weight, model.bias)
    model.precision.set_bits(8, None)
    x.requires_grad_()
    y = model(x)
    assert torch.allclose(y, plain, atol=1e-4)
    gradient = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, model.weight], gradient)
    assert torch.allclose(dx, gradient @ model.weight, atol=1e-4)
    assert torch.allclose(
        dw, gradient.flatten(0, 1).t() @ x.detach().flatten(0, 1), atol=1e-3
    )


def test_hadamard_rotation_spreads_outlier_over_block():
    errors = []
    for hadamard in (0, 32):
        ladder = {4: FormatQuantizer(format=cpt.Format.affine(4), hadamard=hadamard)}
        model, x = converted("linear", ladder=of_operands(ladder))
        x[:, 0] = 100.0
        model.precision.set_bits(4, None)
        found = model.precision.quantize_operand("input", x)
        back = (
            rotate(found, 32, model.precision.key, inverse=True) if hadamard else found
        )
        errors.append(float((back - x)[:, 1:].square().mean()))
    assert errors[1] < errors[0]


def test_role_schedules_set_levels_per_role():
    model, x = converted("linear")
    roles = cpt.RoleSchedules(
        weight=CYCLE, activation=8, error=6, weight_gradient="float32"
    )
    scheduler = cpt.PrecisionScheduler(nn.Sequential(model), roles)
    seen = []
    for step in range(4):
        seen.append(model.precision.active_levels)
        if step < 3:
            scheduler.step()
    assert seen == [(8, q, 6, 32) for q in (3, 4, 6, 8)]
    twin, _ = converted("linear")
    other = cpt.PrecisionScheduler(nn.Sequential(twin), roles)
    other.load_state_dict(scheduler.state_dict())
    assert twin.precision.active_levels == model.precision.active_levels
    with cpt.precision(model, bits=2):
        assert model.precision.active_levels == (2, 2, 6, 32)
    assert model.precision.active_levels == (8, 8, 6, 32)
    assert model(x).isfinite().all()


def test_role_schedules_bounds_cover_weight_and_activation():
    roles = cpt.RoleSchedules(weight=CYCLE, activation=4, error=2, weight_gradient=16)
    assert (roles.q_min, roles.q_max) == (3, 8)
    assert (
        cpt.RoleSchedules(weight=4, activation=CYCLE, gradient=8).q_max,
        roles.highest.weight_gradient,
    ) == (8, 16)


ROLES = {"weight": CYCLE, "activation": 8, "gradient": 8}
LAYERED = cpt.LayeredSchedule(
    ((("0",), StaticSchedule(3, 2), 1), (("*",), StaticSchedule(8, 2), 1))
)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda: cpt.RoleSchedules(**ROLES).levels(4),
            "schedules of their own here; leave q_grad out, got 4",
        ),
        (
            lambda: cpt.RoleSchedules(**ROLES).levels_at(0, 4),
            "schedules of their own here; leave q_grad out, got 4",
        ),
        (
            lambda: cpt.RoleSchedules(**ROLES, error=8),
            "give gradient, or error and weight_gradient, not both",
        ),
        (
            lambda: cpt.RoleSchedules(**ROLES, weight_gradient=8),
            "give gradient, or error and weight_gradient, not",
        ),
        (
            lambda: cpt.RoleSchedules(**ROLES | {"weight": LAYERED}),
            "weight has one schedule, the same in all layers;",
        ),
        (
            lambda: cpt.QuantConfig(ladder={"weight": None}),
            "roles missing: activation, error, weight_gradient",
        ),
        (lambda: cpt.QuantConfig(ladder={"weights": None}), "unknown role 'weights'"),
        (
            lambda: cpt.QuantConfig(
                ladder=dict.fromkeys(("weight", "activation", "gradient", "error"))
            ),
            "not both",
        ),
    ],
)
def test_role_schedules_and_ladders_reject_conflicts(ask, said):
    """Reject a schedule or ladder that is given twice for a role."""
    refused(said, ask)


@pytest.mark.parametrize("ladder", [None, LADDER.filled()])
def test_delayed_schedule_hold_runs_in_float32(ladder):
    (model, x), (plain, _) = converted("linear", ladder=ladder), made("linear")
    cycle = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=36, n_cycles=1)
    schedule = cpt.DelayedSchedule(cycle, hold=4, level=32)
    scheduler = cpt.PrecisionScheduler(nn.Sequential(model), schedule)
    outputs = model(x), plain(x)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(model.weight.grad, plain.weight.grad)
    for _ in range(4):
        scheduler.step()
    assert model.precision.active_levels == (3, 3, 8, 8)
    assert not torch.equal(model(x), plain(x))


ONCE = cpt.RoleSchedules(weight=CYCLE, activation=8, error=8, weight_gradient=4)


@pytest.mark.parametrize(
    ("kind", "ladder", "schedule", "said"),
    [
        (
            "linear",
            {3: "mxfp4", 8: "e4m3"},
            TableSchedule(((3, 1), (5, 1), (8, 1))),
            "hole at level 5",
        ),
        (
            "linear",
            {8: "mx(e2m1,24)"},
            StaticSchedule(8, 4),
            "blocks of 24 .* '0'.* 32 features|'0'",
        ),
        (
            "linear",
            {8: "e4m3:rounding=stochastic"},
            StaticSchedule(8, 4),
            "operands are rounded to nearest",
        ),
        (
            "linear",
            {8: "affine8:hadamard=16"},
            StaticSchedule(8, 4),
            "one size; got 16 for activation",
        ),
        *(
            (kind, None, ONCE, "once for both backward products")
            for kind in ("lstm", "gcn", "sage")
        ),
    ],
)
def test_scheduler_rejects_levels_missing_in_ladder(kind, ladder, schedule, said):
    model, _ = converted(kind, ladder=ladder)
    refused(said, cpt.PrecisionScheduler, nn.Sequential(model), schedule)
    assert all(
        p.active_levels is None for p in layer_precisions(nn.Sequential(model)).values()
    )


@pytest.mark.slow
def test_compiled_model_follows_ladder():
    model, x = converted("linear", ladder=LADDERS["minifloat"])
    compiled = torch.compile(model, backend="aot_eager")
    for mode, level in ((True, 4), (False, 8)):  # every format is compiled anew
        with cpt.precision(model.train(mode), bits=level):
            assert torch.equal(compiled(x), model(x)), (mode, level)


def test_int8_runs_affine_ladder_levels_only():
    model, x = converted(
        "linear", ladder={4: "e2m1", 8: "affine8"}, execution="integer"
    )
    for level, on_codes in ((8, True), (4, False)):
        model.precision.set_bits(level, 8)
        assert runs_int8(model.precision, x) is on_codes


@pytest.mark.parametrize(
    ("kind", "gradient", "levels"),
    [
        ("linear", AFFINE, (8, 3, 6, 6)),
        ("convolution", {8: "mx(e2m1,4)"}, (8, 8, 8, 8)),
    ],  # blocks along channels
)
def test_int8_ladder_equals_simulation(kind, gradient, levels):
    results = []
    for execution in ("simulated", "integer"):
        ladder = {"weight": None, "activation": None, "gradient": gradient}
        model, x = converted(kind, "nearest", ladder=ladder, execution=execution)
        model.precision.set_levels(RoleLevels(*levels))
        y = model(x.requires_grad_())
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        results.append([y, *torch.autograd.grad(y, [x, model.weight], upstream)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- what else is done with a model whose levels are other formats: nothing may take them for bits ----

MX = LADDERS["mx"]
ROTATED = {
    "weight": {3: "e2m1:hadamard=8"},
    "activation": {3: "e2m1:hadamard=8"},
    "gradient": {3: "e4m3", 4: "mxfp4"},
}
OF_MX = TableSchedule(((1, 1), (3, 1)))


def net(ladder=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return cpt.quantize_(model, cpt.QuantConfig(ladder=ladder, **options))


def inputs():
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


OWN_LEVELS = {"weight": {1: "e2m1"}, "activation": {3: "e4m3"}, "gradient": None}
RISING = cpt.RoleSchedules(
    weight=TableSchedule(((1, 1), (2, 1))), activation=6, gradient="float32"
)
BY_ROLE = {
    "weight": {1: "e2m1", 2: "e3m2"},
    "activation": {6: "e4m3"},
    "gradient": None,
}


@pytest.mark.parametrize(
    ("ladder", "schedule"),
    [
        (MX, OF_MX),
        (ROTATED, StaticSchedule(3, 2)),
        (
            OWN_LEVELS,
            cpt.RoleSchedules(weight=1, activation=StaticSchedule(3, 2), gradient=3),
        ),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_check_runs_on_ladders_and_restores_them(ladder, schedule, training):
    model = net(ladder)
    cpt.PrecisionScheduler(model, schedule)
    model(inputs())
    before = layer_precisions(model)["0"].active_bits.formats
    expected = model.train(training)(inputs())
    assert cpt.check(model, (inputs(),)).ok
    assert layer_precisions(model)["0"].active_bits.formats == before
    assert torch.equal(model(inputs()), expected)


@pytest.mark.parametrize(
    ("ladder", "trained", "exported"),
    [
        ({1: "affine4", 3: "e4m3"}, 3, 1),
        ({"weight": None, "activation": {8: "e4m3"}, "gradient": None}, 8, 8),
    ],
)
def test_export_accepts_input_formats_not_weight_formats(ladder, trained, exported):
    model = net(ladder)
    with cpt.precision(model, trained, trained):
        model(inputs())
    model.eval()
    if trained != exported:
        said = "layer '0' would have weights in e4m3, and a program holds codes of the"
        refused(said, cpt.export, model, (inputs(),), bits=trained)
    program = cpt.export(model, (inputs(),), bits=exported)
    with cpt.precision(model, exported):
        assert torch.equal(program.module()(inputs()), model(inputs()))


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        (
            MX,
            "int8 matmuls: none (forward simulated: at level 1 the activation is in mxfp4:partial=1",
        ),
        (
            {1: "affine4", 3: "nvfp4"},
            "int8 matmuls: none (forward simulated: at level 3 the activation is in nvfp4",
        ),
        (
            {"weight": None, "activation": None, "gradient": {8: "e4m3"}},
            "int8 matmuls: forward (error simulated: at level 8 the error is in e4m3",
        ),
        ({1: "affine4", 2: "affine8"}, "int8 matmuls: forward, error, weight"),
    ],
)
def test_summary_calls_non_affine_matmuls_simulated(ladder, said):
    torch.manual_seed(0)
    config = cpt.QuantConfig(ladder=ladder, execution="integer").with_shared_steps()
    assert said in str(
        cpt.summary(cpt.quantize_(nn.Sequential(nn.Linear(32, 32)), config))
    )


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_ladder_blocks_of_unbatched_image(kind):
    config = cpt.QuantConfig(ladder={8: "mx(e2m1,8)"}).with_gradient_rounding("nearest")
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(kind(16, 8, 1)), config)
    dims = int(kind.__name__[-2])
    x = torch.randn(16, *[8] * dims, requires_grad=True)
    with cpt.precision(model, 8, 8):
        y, batched = model(x), model(x.unsqueeze(0)).squeeze(0)
        weight = torch.randn_like(y)
        of_y, of_batched = (
            torch.autograd.grad((out * weight).sum(), x)[0] for out in (y, batched)
        )
    assert torch.equal(y, batched)
    assert torch.equal(of_y, of_batched)


@pytest.mark.parametrize("name", ["e4m3", "affine4:saturate=0", "nvfp4:partial=1"])
def test_lstm_ladder_has_one_range_per_step(
    name,
):
    """Quantise every LSTM step on its range, whatever granularity the format has."""
    torch.manual_seed(0)
    model = cpt.quantize_(
        nn.Sequential(nn.LSTM(8, 4)),
        cpt.QuantConfig(ladder={8: f"{name}:granularity=per_tensor"}),
    )
    x = torch.randn(3, 2, 8) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    with cpt.precision(model, 8, 8):
        direction = LSTMDirection(
            model[0].precision, "l0", *[None] * 4, steps=3, sizes=()
        )
        alike = rounded_input(direction, x.flatten(0, 1)).split(2)
        packed = rounded_input(
            direction._replace(sizes=(3, 2, 1)), x.flatten(0, 1)
        ).split((3, 2, 1))
    for steps in (alike, packed):
        for step, rounded in zip(
            x.flatten(0, 1).split([len(s) for s in steps]), steps, strict=True
        ):
            assert torch.equal(
                rounded, cpt.quantize(step, format=f"{name}:granularity=per_tensor")
            )


def test_graph_gradient_ladder_keeps_its_format():
    for ladder, expected in (
        ({8: "e4m3"}, 0),
        ({8: "affine4:granularity=per_tensor"}, 1),
        (None, 1),
    ):
        ladders = {"weight": None, "activation": None, "gradient": ladder}
        model = cpt.quantize_(
            OnRing(cpt.GraphConv(4, 8)), cpt.QuantConfig(ladder=ladders)
        )
        with cpt.precision(model, 8, 8), torch.profiler.profile() as ran:
            model(torch.randn(6, 4, requires_grad=True)).sum().backward()
        assert [event.name for event in ran.events()].count(
            "cpt::round_scale_round"
        ) == expected


def test_recorded_step_constants_distinguish_split_gradients():
    layer = layer_precisions(net())["0"]
    found = set()
    for levels in (
        RoleLevels(8, 8, 8, 8),
        RoleLevels(8, 8, 8, 4),
        RoleLevels(8, 8, None, 8),
        RoleLevels(8, 8, 8, None),
    ):
        layer.set_levels(levels)
        found.add(layer_constants(layer))
    assert len(found) == 4
    layer.set_levels(RoleLevels(6, 5, 7, 3))
    assert layer_constants(layer) in found  # only numbers differ from the second


def test_scheduler_rejects_checkpoint_with_different_ladder():
    state = cpt.PrecisionScheduler(net(MX), OF_MX).state_dict()
    cpt.PrecisionScheduler(net(MX), OF_MX).load_state_dict(state)
    for other in (
        None,
        {1: "e2m1", 3: "e4m3"},
        {"weight": MX, "activation": MX, "gradient": None},
    ):
        with pytest.raises(
            ValueError,
            match=r"the checkpoint has ladders .*mxfp4:partial=1.*, this scheduler",
        ):
            cpt.PrecisionScheduler(net(other), OF_MX).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"the checkpoint has ladders \{\}, this scheduler"
    ):
        cpt.PrecisionScheduler(net(MX), OF_MX).load_state_dict(
            cpt.PrecisionScheduler(net(), OF_MX).state_dict()
        )
    old = cpt.PrecisionScheduler(net(), OF_MX).state_dict()
    del old["ladders"]  # as it was written before there were any
    cpt.PrecisionScheduler(net(), OF_MX).load_state_dict(old)


def test_scheduler_state_of_paper_ladder_is_empty():
    """Treat every spelling of the paper's grids as no ladder, also in per-role states."""
    asked = cpt.PrecisionScheduler(net(AFFINE), OF_MX)
    plain = cpt.PrecisionScheduler(net(), OF_MX)
    assert asked.state_dict()["ladders"] == {}
    asked.load_state_dict(plain.state_dict())
    by_role = {
        name: {"activation": {}, "weight": {}} for name in asked.state_dict()["layers"]
    }
    for scheduler in (asked, plain):
        scheduler.load_state_dict({**plain.state_dict(), "ladders": by_role})


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_ladder_row_ranges_replace_running_ranges(kind):
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
    assert torch.equal(
        evaluated if isinstance(evaluated, torch.Tensor) else evaluated[0], y
    )
    role = next(r for r in model[0].precision.quantizers if r.startswith("input"))
    assert torch.equal(
        model[0].precision.quantize_operand(role, x),
        cpt.quantize(x, format="e4m3:granularity=per_row"),
    )


def test_precision_q_max_applies_to_every_role():
    model = net(BY_ROLE)
    cpt.PrecisionScheduler(model, RISING)
    layer = layer_precisions(model)["0"]
    with cpt.precision(model, "q_max"):
        assert layer.active_levels == (6, 2, 32, 32)
        assert str(layer.active_bits.formats.weight) == "e3m2"
    with cpt.precision(model, "q_max", q_grad=8):
        assert layer.active_levels == (6, 2, 8, 8)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("q_max", (6, 2)), ("current", (6, 1)), ("float", (None, None))],
)
def test_trainer_precision_evaluates_roles_at_their_levels(asked, expected):
    model = net(BY_ROLE)
    precision = TrainerPrecision(model, RISING, None, eval_bits=asked)
    model.eval()
    assert layer_precisions(model)["0"].active_levels[:2] == expected
    assert precision.eval_logs() == {"eval_bits": expected[0] or 32}
    model.train()
    assert layer_precisions(model)["0"].active_levels == (6, 1, 32, 32)


@pytest.mark.parametrize("cost", cpt.formats.COSTS)
def test_relative_cost_accepts_ladders_of_config(cost):
    ladders = cpt.QuantConfig(ladder=MX).ladder
    assert OF_MX.relative_cost(cost=cost, ladder=ladders) == pytest.approx(
        OF_MX.relative_cost(cost=cost, ladder=MX)
    )
    schedule = cpt.solve_schedule(0.9, 1, 4, 400, cost=cost, ladder=ladders)
    assert schedule.relative_cost(cost=cost, ladder=ladders) == pytest.approx(
        0.9, rel=2e-3
    )
    both = {1: "e2m1", 3: "e4m3"}, {1: "e4m3", 3: "e4m3"}
    apart = cpt.QuantConfig(
        ladder={"weight": both[0], "activation": both[1], "gradient": both[1]}
    ).ladder
    per_mac = cpt.formats.COSTS[cost].per_mac(cpt.FORMATS["e2m1"], cpt.FORMATS["e4m3"])
    if per_mac:  # else a price of elements
        full = cpt.formats.COSTS[cost].per_mac(cpt.FORMATS["e4m3"], cpt.FORMATS["e4m3"])
        assert StaticSchedule(1, 2).relative_cost(3, 3, cost, apart) == pytest.approx(
            (2 * per_mac + full) / (3 * full)
        )
        roles = cpt.RoleSchedules(weight=StaticSchedule(1, 2), activation=3, gradient=3)
        assert (
            roles.relative_cost(cost=cost, ladder=apart) == 1
        )  # its own highest levels


def test_sensitivity_of_ladder_uses_its_levels():
    model, step, optimizer, _ = problem()
    config = cpt.QuantConfig(ladder=MX)
    options = {
        "base": 2,
        "q_max": 4,
        "windows": 2,
        "steps": 8,
        "seeds": (0,),
        "estimate": False,
    }
    found = cpt.search.sensitivity(model, step, optimizer, config=config, **options)
    assert (found.base, found.groups) == (2, (("0",), ("4",)))
