"""Torch functions that multiply: every property is a test over ``OPERATIONS``."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    NAN,
    NEAREST,
    FunctionModule,
    identical,
    refused,
    reported_operations,
)
from operation_samples import OPERATIONS, round_along
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.roles import QUANTIZERS
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.ledger import BitOpsLedger
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.operations import contractions
from cpt_extras.search.role_schedules import RoleSchedules

all_operations = pytest.mark.parametrize("name", OPERATIONS)


def outputs_and_gradients(module, inputs, run=None, upstream=None):
    """Return the output and the gradients by inputs and parameters."""
    y = (module if run is None else run)(*inputs)
    gradients = torch.autograd.grad(
        y,
        [*inputs, *module.parameters()],
        torch.ones_like(y) if upstream is None else upstream.to(y),
        allow_unused=True,
    )
    return [y, *(g for g in gradients if g is not None)]


@all_operations
def test_operation_equals_float64_formula(name):
    """Round operands to 3 bits; 20 bits for gradients are fine enough to be exact."""
    sample = OPERATIONS[name]
    module, inputs = sample.build(NEAREST)
    plain = partial(sample.function, module)
    with precision(module, "float"):
        torch.testing.assert_close(module(*inputs), plain(*inputs))
    with precision(module, 3, 20):
        operations = reported_operations(module, *inputs)
        y = module(*inputs)
        upstream = torch.randn_like(y)
        found = outputs_and_gradients(module, inputs, upstream=upstream)
    expected = outputs_and_gradients(
        module, inputs, lambda *xs: sample.expected(module, xs, 3), upstream
    )
    for actual, value in zip(found, expected, strict=True):
        error = (actual - value).norm()
        assert error <= 1e-5 * value.norm()
    assert not torch.allclose(y, plain(*inputs))
    assert [operation.macs for operation in operations] == sample.macs
    layer = layer_precisions(module)[""]
    assert all(operation.precision is layer for operation in operations)
    with precision(module, 3, 2):
        coarse = outputs_and_gradients(module, inputs, upstream=upstream)
    assert torch.equal(coarse[0], y)
    is_product = name == "dot"  # whose output gradient is one number
    assert is_product or not torch.allclose(coarse[1], found[1], rtol=1e-3)


@all_operations
def test_operation_price_equals_executed_macs(name):
    """Compare plan, ledger, check and torch's FLOP counter."""
    sample = OPERATIONS[name]
    module, inputs = sample.build()
    with FlopCounterMode(display=False) as flops:
        sample.function(module, *inputs)
    assert (flops.get_total_flops() == 2 * sum(sample.macs)) == sample.has_flops

    report = check(module, inputs, invariances=False)
    # torch computes the backward pass of a bilinear map in another order
    assert report.ok or "bilinear" in name, report
    assert report.quantized_share == 1

    schedule = StaticSchedule(4, 1)
    plan = count_bitops(module, inputs, schedule)
    assert plan.float32 == {}
    assert plan.forward_macs == sum(sample.macs)
    assert plan.relative_to_float32 == 4 * 4 / 32**2
    PrecisionScheduler(module, schedule)
    with BitOpsLedger(module) as ledger:
        module(*inputs).sum().backward()
    assert ledger.total() == plan.total


@all_operations
def test_operation_gradient_macs_follow_trained_operands(name):
    """Train one operand at a time, and compare executed, planned and counted MACs."""
    module, inputs = OPERATIONS[name].build()
    operands = [*inputs, module.w, module.b]
    num_trained = 0
    for trained in operands:
        for x in operands:
            x.requires_grad_(x is trained)
        with precision(module, "float"):
            y = module(*inputs)
            if not y.requires_grad:  # the function does not use this operand
                continue
            with BitOpsLedger(module) as ledger:
                module(*inputs).square().sum().backward()
        num_trained += 1
        plan = count_bitops(module, inputs, convention="per_op")
        assert ledger.by_pass("per_op") == plan.by_pass
        report = check(module, inputs, invariances=False)
        assert report.ok or "bilinear" in name, report
    assert num_trained >= len(inputs)


@all_operations
def test_operation_passes_nan_on(name):
    sample = OPERATIONS[name]
    module, (x, *others) = sample.build()
    with torch.no_grad(), precision(module, 4):
        x.view(-1)[0] = NAN
        with sdpa_kernel(SDPBackend.MATH):  # some fused kernels hide it
            is_nan = sample.function(module, x, *others).isnan()
        assert is_nan.any()
        assert module(x, *others).isnan()[is_nan].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_operations
def test_operation_in_half_precision(name, dtype):
    if name.startswith("experts") and dtype == torch.float16:
        pytest.skip("torch has no such matmul")
    module, inputs = OPERATIONS[name].build(NEAREST)
    results = []
    for is_half in (False, True):
        with precision(module, 6), torch.autocast("cpu", dtype, enabled=is_half):
            y = module(*inputs)
        # autocast does not change the dtype of a bilinear map
        is_changed = is_half and not name.startswith("bilinear")
        assert y.dtype == (dtype if is_changed else torch.float32)
        gradients = torch.autograd.grad(y.float().square().sum(), inputs)
        results.append([y, *gradients])
    for full, half in zip(*results, strict=True):
        assert (full - half.float()).norm() < 0.05 * full.norm()
    model = module.to(dtype)
    with precision(model, 6):
        assert model(*(x.to(dtype) for x in inputs)).dtype == dtype


# at least one of every handler
COMPILED = [
    "matmul",
    "weight first",
    "keys",
    "addmm",
    "baddbmm",
    "linear",
    "conv_transpose2d",
    "bilinear",
    "einsum, three",
    "inner",
    "multi_dot",
    "attention, causal",
    "attention, grouped queries",
    "experts, transformers",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_operation_equals_eager(name):
    """Compile once for all bits."""
    module, inputs = OPERATIONS[name].build(NEAREST)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for bits in (3, 5):
            with precision(module, bits, 6):
                expected = outputs_and_gradients(module, inputs)
                found = outputs_and_gradients(module, inputs, compiled)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- bits of roles ------------------------------------------------------------------


@pytest.mark.parametrize("is_ladder", [False, True], ids=["bits", "ladder"])
def test_role_schedules_reach_operations(is_ladder):
    """Quantise an input at 3 bits and a weight, also a view of one, at 6."""
    formats = {3: "e2m1", 6: "e4m3"}
    config = QuantConfig(ladder=FormatLadder(formats)) if is_ladder else None
    steps = {
        role: StaticSchedule(bits, 4)
        for role, bits in (("activation", 3), ("weight", 6), ("gradient", 6))
    }

    def rounded(x, bits, role):
        grid = {"format": formats[bits]} if is_ladder else {"bits": bits}
        quantizer = replace(QUANTIZERS[role], zero_point=True)
        return quantize(x, quantizer=quantizer, **grid)

    for name in ("addmm", "weight transposed"):
        module, (x,) = OPERATIONS[name].build(config)
        PrecisionScheduler(module, RoleSchedules(**steps))
        weight = module.w.mT.contiguous() if name == "addmm" else module.w
        expected = (
            rounded(x, 3, "attention_query") @ rounded(weight, 6, "linear_weight").mT
        )
        if name == "addmm":
            expected = expected + rounded(module.b, 6, "bias")
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_split_gradients_of_operation():
    """Round the output gradient to 2 bits for the weight gradient alone."""
    module, (x,) = OPERATIONS["weight first"].build(NEAREST)
    schedules = dict.fromkeys(("activation", "weight", "error"), StaticSchedule(20, 4))
    PrecisionScheduler(
        module, RoleSchedules(**schedules, weight_gradient=StaticSchedule(2, 4))
    )
    y = module(x)
    upstream = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, module.w], upstream)
    torch.testing.assert_close(dx, module.w.mT @ upstream, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(dw, upstream @ x.mT, atol=0.05)


@all_operations
def test_split_gradients_reach_all_operands(name):
    """Refuse bilinear maps of two inputs with gradients, and compute all others."""
    module, inputs = OPERATIONS[name].build(NEAREST)
    bits = StaticSchedule(20, 4)
    schedules = dict.fromkeys(("activation", "weight", "error"), bits)
    finer = StaticSchedule(21, 4)
    PrecisionScheduler(module, RoleSchedules(**schedules, weight_gradient=finer))
    if "bilinear" in name:
        refused("a further tensor that needs a gradient", module, *inputs)
        with torch.no_grad():
            module(*inputs)
        inputs = [inputs[0], inputs[1].detach()]
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    y = module(*inputs)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
    plain = OPERATIONS[name].function(module, *inputs)
    expected = torch.autograd.grad(plain, leaves, upstream, allow_unused=True)
    for actual, gradient in zip(found, expected, strict=True):
        assert (actual is None) == (gradient is None)
        if gradient is not None:
            near = 1e-3 * float(gradient.abs().max())
            torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=near)


SQUARE = nn.Parameter(torch.randn(16, 16))
ROTATED = {  # module, and the shapes of its inputs
    "addmm": (
        lambda: FunctionModule(lambda m, x: torch.addmm(m.w[0], x, m.w), w=SQUARE),
        [(8, 16)],
    ),
    "einsum": (
        lambda: FunctionModule(
            lambda m, x: torch.einsum("bi,oi->bo", x, m.w), w=SQUARE
        ),
        [(8, 16)],
    ),
    "transposed convolution": (lambda: nn.ConvTranspose1d(16, 4, 3), [(8, 16, 6)]),
    "bilinear layer": (lambda: nn.Bilinear(16, 16, 4), [(8, 16), (8, 16)]),
    "bilinear map": (
        lambda: FunctionModule(
            lambda m, x, y: F.bilinear(x, y, m.w.view(4, 16, 16)),
            w=nn.Parameter(torch.randn(4, 256)),
        ),
        [(8, 16), (8, 16)],
    ),
}


@pytest.mark.parametrize("name", ROTATED)
def test_hadamard_rotation_cancels_or_is_refused(name):
    torch.manual_seed(0)
    make, shapes = ROTATED[name]
    inputs = [torch.randn(shape) for shape in shapes]
    plain = make()
    rotated = {8: "affine20:hadamard=16"}
    ladder = {"activation": rotated, "weight": rotated, "gradient": None}
    model = quantize_(copy.deepcopy(plain), QuantConfig(ladder=ladder))
    with precision(model, 8):
        if "bilinear" in name:
            refused("cannot have a Hadamard rotation .got 16.", model, *inputs)
        else:
            near = {"rtol": 1e-3, "atol": 1e-3}
            torch.testing.assert_close(model(*inputs), plain(*inputs), **near)


# --- groups of transposed convolutions ----------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("is_layer", [True, False])
def test_transposed_convolution_groups_equal_separate_weights(dims, groups, is_layer):
    """Round every output channel of every group on its own range."""
    torch.manual_seed(0)
    layer = getattr(nn, f"ConvTranspose{dims}d")(4, 8, 2, groups=groups, bias=False)
    with torch.no_grad():
        layer.weight.copy_(10 ** torch.randint_like(layer.weight, -3, 3))
    function = getattr(F, f"conv_transpose{dims}d")
    if not is_layer:
        layer = FunctionModule(
            lambda m, x: function(x, m.weight, None, 1, 0, 0, groups),
            weight=layer.weight,
        )
    model = quantize_(nn.Sequential(layer), QuantConfig().with_zero_points())
    x = torch.randn(3, 4, *[3] * dims)
    roles = RoleSchedules(
        activation="float32", weight=StaticSchedule(4, 4), gradient="float32"
    )
    PrecisionScheduler(model, roles)
    weights = []
    for part in layer.weight.detach().chunk(groups):
        kernel_dims = [0, *range(2, dims + 2)]
        weights.append(round_along(part, kernel_dims, 4).to(x.dtype))
    expected = function(x, torch.cat(weights), groups=groups)
    torch.testing.assert_close(model(x), expected)


def test_transposed_convolution_blocks_stay_in_group():
    config = QuantConfig(ladder=FormatLadder({4: "mx(e2m1,4)"}))
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(8, 4, 1, groups=2, bias=False)
    x = torch.randn(1, 8, 3)
    ys = []
    for factor in (1, 1000):
        with torch.no_grad():
            layer.weight[4:] *= factor
        model = quantize_(nn.Sequential(copy.deepcopy(layer)), config)
        with precision(model, 4):
            ys.append(model(x)[:, :2])
    assert torch.equal(*ys)


# --- MACs of contractions -----------------------------------------------------------

EQUATIONS = [
    ("ij,jk->ik", (3, 5), (5, 7)),
    # letters that are summed in one operand
    ("bij,jk->bk", (2, 16, 8), (8, 4)),
    ("ij,jk->k", (3, 5), (5, 7)),
    ("ijm,jkn->ik", (3, 5, 2), (5, 7, 6)),
    ("...ij,jk->k", (2, 3, 5), (5, 7)),
    ("b...i,ij->bj", (2, 3, 5), (5, 7)),
    # sizes of 1, of summed letters and of others
    ("ij,ij->", (1, 5), (3, 5)),
    ("bij,bij->b", (4, 5, 6), (4, 1, 6)),
    ("bij,bjk->ik", (2, 3, 5), (1, 5, 7)),
    ("aij,ajk->ak", (1, 3, 5), (4, 5, 7)),
    ("bij,bjk->bik", (2, 3, 5), (1, 5, 7)),
    # letters of a batch
    ("bij,bjk->bik", (2, 3, 5), (2, 5, 7)),
    ("bij,bjk->bk", (2, 3, 5), (2, 5, 7)),
    ("...ij,...jk->...ik", (2, 3, 5), (2, 5, 7)),
    # three operands
    ("bij,jk,kl->bl", (2, 3, 5), (5, 7), (7, 4)),
]


@pytest.mark.parametrize(
    ("equation", "first", "weight", "others"),
    [
        (equation, first, weight, others)
        for equation, first, weight, *others in EQUATIONS
    ],
)
@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "activations"])
def test_einsum_macs_equal_torch_flops(equation, first, weight, others, is_weight):
    """Sum the letters of one operand before the matmul, as torch does."""
    w = torch.randn(weight)
    w = nn.Parameter(w) if is_weight else w
    operands = [torch.randn(first), w, *map(torch.randn, others)]
    with FlopCounterMode(display=False) as flops:
        torch.einsum(equation, *operands)
    tail = operands[2:]
    einsum = FunctionModule(lambda m, x: torch.einsum(equation, x, w, *tail), w=w)
    model = quantize_(nn.Sequential(einsum))
    with precision(model, 8):
        counted = reported_operations(model, operands[0])
    assert 2 * sum(operation.macs for operation in counted) == flops.get_total_flops()


def test_tensordot_macs_equal_torch_flops():
    x, w = torch.randn(2, 3, 5), nn.Parameter(torch.randn(1, 5, 7))
    dims = [0, 2], [0, 1]
    with FlopCounterMode(display=False) as flops:
        torch.tensordot(x, w, dims)
    contraction = FunctionModule(lambda m, x: torch.tensordot(x, m.w, dims), w=w)
    model = quantize_(nn.Sequential(contraction))
    with precision(model, 8):
        (counted,) = reported_operations(model, x)
    assert 2 * counted.macs == flops.get_total_flops() == 2 * 3 * 5 * 7


# --- matmuls that stay in float32 ---------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* of the weights were not quantised")
def test_einsum_without_sum_is_no_matmul():
    weight = nn.Parameter(torch.randn(4, 3))
    outer = FunctionModule(lambda m, x: torch.einsum("bd,dn->bdn", x, m.w), w=weight)
    model = quantize_(nn.Sequential(nn.Linear(4, 4), outer))
    with precision(model, 3):
        x = model[0](torch.randn(5, 4))
        assert torch.equal(model[1](x), x.unsqueeze(-1) * weight)
        operations = reported_operations(model, torch.randn(5, 4))
        assert [operation.function for operation in operations] == ["linear"]


# --- functions with a path of their own ---------------------------------------------


def test_grouped_mm_by_expert_equals_torch():
    """Cover what CUDA runs, with a bias and with an expert without rows."""
    a, b = torch.randn(9, 16), torch.randn(3, 16, 8)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    bias = torch.randn(3, 8)
    expected = torch._grouped_mm(a, b, offs=ends)
    y = contractions._grouped_matmul_by_expert(a, b, offs=ends)
    torch.testing.assert_close(y, expected)
    y = contractions._grouped_matmul_by_expert(a, b, ends, bias)
    torch.testing.assert_close(y - expected, bias[[0] * 4 + [2] * 5])


@pytest.mark.filterwarnings("error")
def test_graph_operators_are_quantized():
    """Call operators as graphs of torch.export and fx do."""
    torch.manual_seed(0)
    aten = torch.ops.aten

    def by_operators(m, x):
        y = aten.linear.default(x, m.w)
        y = aten.conv1d.padding(y.unsqueeze(1), m.k, None, [1], "valid")
        y = aten.conv_transpose2d.input(y.unsqueeze(2), m.t).flatten(1)
        return aten.mm(y, y.t())

    sizes = {"w": (6, 4), "k": (2, 1, 3), "t": (2, 1, 1, 2)}
    weights = {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    plain = FunctionModule(by_operators, **weights)
    model, x = quantize_(copy.deepcopy(plain)), torch.randn(5, 4)
    with precision(model, 4):
        macs = [operation.macs for operation in reported_operations(model, x)]
        assert macs == [5 * 6 * 4, 5 * 2 * 4 * 3, 5 * 2 * 4 * 2, 5 * 5 * 5]
    with precision(model, 32, 32):
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    "options", [None, nn.LinearCrossEntropyOptions()], ids=["whole", "in parts"]
)
def test_linear_cross_entropy_equals_two_functions(options):
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(5, (32,))
    weight = torch.randn(5, 6)
    results = []
    for loss_function in (
        lambda m, x, y: F.linear_cross_entropy(x, m.head.weight, y, options=options),
        lambda m, x, y: F.cross_entropy(F.linear(x, m.head.weight), y),
    ):
        model = FunctionModule(loss_function, head=nn.Linear(6, 5, bias=False))
        model.head.weight.data.copy_(weight)
        quantize_(model, NEAREST)
        with precision(model, 3, 3):
            operations = reported_operations(model, x, y)
            assert [operation.function for operation in operations] == ["linear"]
            loss = model(x, y)
            loss.backward()
        results.append((loss.detach(), model.head.weight.grad))
    assert identical(*results)
