"""Intercepted operations: every matmul of torch is quantised, priced and reported, in any module."""

import copy
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # which registers an operator
from helpers import NAN, NEAREST, FunctionModule, reported_operations
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import bias

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.roles import QUANTIZERS, Quantizer
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.ledger import BitOpsLedger
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.operations import contractions
from cpt_extras.search.role_schedules import RoleSchedules


def weighted(function, *sizes):
    """Return a module with a weight and a bias that runs a given function of its inputs."""
    return FunctionModule(
        function,
        w=nn.Parameter(torch.randn(sizes)),
        b=nn.Parameter(torch.randn(sizes[-1])),
    )


X, Y = (5, 6), (2, 3, 6)  # (rows, features), (batch, tokens, features)
# name -> (what it computes, shape of the weight, shapes of the inputs, products in the forward pass)
PRODUCTS = {
    "matmul": (lambda m, x: x @ m.w, (6, 4), [Y], 1),
    "weight first": (lambda m, x: m.w @ x, (4, 5), [X], 1),
    "transposed": (lambda m, x: x.matmul(m.w.t()), (4, 6), [X], 1),
    "two inputs": (lambda m, x, y: x @ y, (1, 1), [(2, 3, 6), (2, 6, 3)], 1),
    "keys": (lambda m, x, y: x @ y.mT, (1, 1), [Y, Y], 1),
    "mm": (lambda m, x: torch.mm(x, m.w), (6, 4), [X], 1),
    "bmm": (lambda m, x, y: x.bmm(y.transpose(1, 2)), (1, 1), [Y, Y], 1),
    "mv": (lambda m, x: torch.mv(m.w, x[0]), (4, 6), [X], 1),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (6, 4), [X], 1),
    "addmm, scaled": (
        lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=0.5),
        (6, 4),
        [X],
        1,
    ),
    "baddbmm": (
        lambda m, x, y, z: torch.baddbmm(z, x, y.mT, alpha=0.5),
        (1, 1),
        [Y, Y, (2, 3, 3)],
        1,
    ),
    "linear": (lambda m, x: F.linear(x, 2 * m.w, m.b[:4]), (4, 6), [Y], 1),
    "conv1d": (lambda m, x: F.conv1d(x, m.w, padding=1), (4, 3, 3), [Y], 1),
    "conv2d, alone": (lambda m, x: F.conv2d(x, m.w), (4, 2, 2, 2), [Y], 1),
    "conv2d in groups": (
        lambda m, x: F.conv2d(x, m.w, groups=2, stride=2),
        (4, 1, 2, 2),
        [(3, 2, 5, 5)],
        1,
    ),
    "conv_transpose2d": (
        lambda m, x: F.conv_transpose2d(x, m.w, stride=2),
        (2, 4, 2, 2),
        [(3, 2, 5, 5)],
        1,
    ),
    "bilinear": (lambda m, x, y: F.bilinear(x, y, m.w), (4, 6, 6), [X, X], 1),
    "einsum, heads": (
        lambda m, x, y: torch.einsum("btd,bsd->bts", x, y),
        (1, 1),
        [Y, Y],
        1,
    ),
    "einsum, weight": (
        lambda m, x: torch.einsum("btd,dhk->bthk", x, m.w),
        (6, 2, 3),
        [Y],
        1,
    ),
    "einsum, weight first": (
        lambda m, x: torch.einsum("hkd,btd->bthk", m.w, x),
        (2, 3, 6),
        [Y],
        1,
    ),
    "einsum, three": (
        lambda m, x, y: torch.einsum("bd,de,be->b", x, m.w, y),
        (6, 6),
        [X, X],
        2,
    ),
    "einsum, dots summed": (
        lambda m, x, y: torch.einsum("b...,b...->b", x, y),
        (1, 1),
        [Y, Y],
        1,
    ),
    "einsum, implicit": (lambda m, x: torch.einsum("...d,dk", x, m.w), (6, 4), [Y], 1),
    "tensordot": (
        lambda m, x: torch.tensordot(x, m.w, ([1, 2], [1, 0])),
        (6, 3, 4),
        [Y],
        1,
    ),
    "inner": (lambda m, x: torch.inner(x, m.w), (4, 6), [X], 1),
    "multi_dot": (
        lambda m, x, y: torch.linalg.multi_dot([x, m.w, y]),
        (6, 5),
        [X, X],
        2,
    ),
    "attention": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        (1, 1),
        [(2, 2, 5, 6)],
        2,
    ),
    "causal": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=2.0),
        (1, 1),
        [Y],
        2,
    ),
    "masked": (
        lambda m, x: F.scaled_dot_product_attention(
            x, x, x, x.new_ones(3, 3).tril().bool()
        ),
        (1, 1),
        [Y],
        2,
    ),
    "added mask": (
        lambda m, x, y: F.scaled_dot_product_attention(x, x, x, y),
        (1, 1),
        [Y, (3, 3)],
        2,
    ),
    "grouped queries": (
        lambda m, x, y: F.scaled_dot_product_attention(x, y, y, enable_gqa=True),
        (1, 1),
        [(2, 4, 5, 6), (2, 2, 5, 6)],
        2,
    ),
    "experts": (
        lambda m, x: torch._grouped_mm(
            x, m.w, offs=torch.tensor([4, 8], dtype=torch.int32)
        ),
        (2, 16, 8),
        [(8, 16)],
        1,
    ),
    "experts, transformers": (
        lambda m, x: torch.ops.transformers.grouped_mm_fallback(
            x, m.w, offs=torch.tensor([4, 8], dtype=torch.int32)
        ),
        (2, 16, 8),
        [(8, 16)],
        1,
    ),
    "einsum, heads summed": (
        lambda m, x: torch.einsum("bthk,hkd->btd", x, m.w),
        (2, 3, 6),
        [(2, 5, 2, 3)],
        1,
    ),
    "linear by name": (lambda m, x: F.linear(input=x, weight=m.w), (4, 6), [Y], 1),
    "matmul by name": (lambda m, x: torch.matmul(x, other=m.w), (6, 4), [Y], 1),
    "mm by name": (lambda m, x: torch.mm(input=x, mat2=m.w), (6, 4), [X], 1),
    "baddbmm by name": (
        lambda m, x, y: torch.baddbmm(m.w, batch1=x, batch2=y.mT, beta=0.5, alpha=2),
        (1, 1, 1),
        [Y, Y],
        1,
    ),
    "bilinear by name": (
        lambda m, x, y: F.bilinear(x, input2=y, weight=m.w),
        (4, 6, 6),
        [X, X],
        1,
    ),
    "attention by name": (
        lambda m, x: F.scaled_dot_product_attention(query=x, value=x, key=x),
        (1, 1),
        [Y],
        2,
    ),
}
OF_EVERY_RULE = [  # one of every way through the rules that compilers know in float32
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
    "causal",
    "grouped queries",
    "experts, transformers",
]


def made(name, config=None):
    torch.manual_seed(0)
    function, size, shapes, count = PRODUCTS[name]
    inputs = tuple(torch.randn(s, requires_grad=True) for s in shapes)
    return quantize_(nn.Sequential(weighted(function, *size)), config)[0], inputs, count


@pytest.mark.parametrize("name", PRODUCTS)
def test_intercepted_matmul_is_quantized_and_reported(name):
    module, inputs, count = made(name)
    function = PRODUCTS[name][0]
    with precision(module, "float"):
        torch.testing.assert_close(
            module(*inputs), function(module, *inputs), rtol=1e-4, atol=1e-5
        )
    with precision(module, 18, "float"):
        torch.testing.assert_close(
            module(*inputs), function(module, *inputs), rtol=1e-3, atol=1e-3
        )
    with precision(module, 2):
        assert not torch.allclose(module(*inputs), function(module, *inputs))
        found = reported_operations(module, *inputs)
    assert len(found) == count
    assert all(
        operation.precision is layer_precisions(module)[""] for operation in found
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_intercepted_matmul_is_priced(name):
    module, inputs, _ = made(name)
    found = check(module, inputs, invariances=False)
    assert found.ok or "bilinear" in name, (
        found
    )  # whose backward pass torch computes in another order
    assert found.quantized_share == 1
    schedule = StaticSchedule(4, 1)
    plan = count_bitops(module, inputs, schedule)
    assert plan.float32 == {}
    assert plan.relative_to_float32 == 4 * 4 / 32**2
    PrecisionScheduler(module, schedule)
    with BitOpsLedger(module) as ledger:
        module(*inputs).sum().backward()
    assert ledger.total() == plan.total


def with_zero(role):
    """Return the quantiser of a role outside the paper's layers."""
    return replace(QUANTIZERS[role], zero_point=True)


@pytest.mark.parametrize(
    "name",
    ["matmul", "transposed", "addmm", "linear", "einsum, weight", "inner", "tensordot"],
)
def test_intercepted_matmul_ranges_per_output_and_row(name):
    """Give weights a range per output and inputs one per row."""
    module, (x,), _ = made(name)
    flat = {
        "tensordot": lambda w: w.transpose(0, 1).flatten(0, 1),
        "einsum, weight": lambda w: w.flatten(1),
    }
    weight = {"linear": 2 * module.w}.get(name, module.w).detach()
    matrix = flat.get(name, lambda w: w)(weight)
    outputs = matrix if name in ("transposed", "linear", "inner") else matrix.mT
    rows = x.detach().flatten(1) if name == "tensordot" else x.detach()
    own_range = (
        "per_tensor" if name == "linear" else "per_row"
    )  # of the input of a computed weight
    expected = (
        quantize(rows, 3, Quantizer(own_range, zero_point=True))
        @ quantize(outputs, 3, with_zero("linear_weight")).mT
    )
    if name in ("addmm", "linear"):
        expected = expected + quantize(
            module.b[: len(outputs)].detach(), 3, with_zero("bias")
        )
    with precision(module, 3), torch.no_grad():
        torch.testing.assert_close(
            module(x).reshape(expected.shape), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "name", [name for name in PRODUCTS if not name.endswith("by name")]
)
def test_intercepted_matmul_gradients_are_unbiased(name):
    module, inputs, _ = made(name)
    module.requires_grad_(True)
    with precision(module, 20, "float"):
        y = module(*inputs)
        upstream = torch.randn_like(y)
        exact = torch.autograd.grad(y, [*inputs, module.w], upstream, allow_unused=True)
    with precision(module, 20, 2):
        draws = [
            torch.autograd.grad(
                module(*inputs), [*inputs, module.w], upstream, allow_unused=True
            )
            for _ in range(100)
        ]
    for drawn, g in zip(zip(*draws, strict=True), exact, strict=True):
        if g is not None:  # the error of one pass is about twice as large as g itself
            assert (torch.stack(drawn).mean(0) - g).norm() < 0.4 * g.norm()
    assert layer_precisions(module)[""].noise_key % 2**20 >= 100


MASK = torch.ones(7, 7).tril().bool()


def shown(scores):
    return scores.masked_fill(~MASK, -1e9).softmax(-1)


CAUSAL = {
    "einsum": lambda m, x: torch.einsum(
        "bts,bsd->btd", shown(torch.einsum("btd,bsd->bts", x, x)), x
    ),
    "matmul": lambda m, x: shown(x @ x.mT) @ x,
    "sdpa": lambda m, x: F.scaled_dot_product_attention(x, x, x, MASK),
    "causal": lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "module": lambda m, x: m.layer(x, x, x, attn_mask=~MASK, need_weights=False)[0],
}


@pytest.mark.parametrize("implementation", CAUSAL)
def test_intercepted_attention_ignores_later_tokens(implementation):
    """Keep earlier outputs when a later token changes: no range spans tokens."""
    torch.manual_seed(0)
    attend, x = CAUSAL[implementation], torch.randn(2, 7, 8)
    model = quantize_(
        FunctionModule(attend, layer=nn.MultiheadAttention(8, 2, batch_first=True))
    )
    later = x.clone()
    later[:, 5] = 30 * torch.randn(2, 8)
    for mode in (True, False):
        model.train(mode)
        with precision(model, 3), torch.no_grad():
            a, b = model(x), model(later)
        if (
            mode and implementation == "module"
        ):  # whose output layer has one range for all tokens while it trains
            continue
        assert torch.equal(a[:, :5], b[:, :5])
        assert not torch.equal(a[:, 5:], b[:, 5:])


def test_intercepted_grouped_mm_by_expert_equals_torch():
    a, b, offs = (
        torch.randn(9, 16),
        torch.randn(3, 16, 8),
        torch.tensor([4, 4, 9], dtype=torch.int32),
    )
    torch.testing.assert_close(
        contractions._grouped_matmul_by_expert(a, b, offs=offs),
        torch._grouped_mm(a, b, offs=offs),
    )
    biased = contractions._grouped_matmul_by_expert(
        a, b, offs, bias := torch.randn(3, 8)
    )
    torch.testing.assert_close(
        biased - torch._grouped_mm(a, b, offs=offs), bias[[0] * 4 + [2] * 5]
    )


def test_intercepted_rotary_angles_stay_in_float32():
    @torch.no_grad()
    def angles(m, positions):
        return m.frequency @ positions.float()[None]

    rotary = FunctionModule(angles, frequency=nn.Buffer(torch.rand(4, 1)))
    model = quantize_(nn.ModuleDict({"rotary": rotary, "linear": nn.Linear(2, 2)}))
    with precision(model, 2):
        rotary = model["rotary"]
        assert torch.equal(
            rotary(torch.arange(9)), rotary.frequency @ torch.arange(9.0)[None]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "matmul",
        "addmm",
        "einsum, weight",
        "attention",
        "conv_transpose2d",
        "keys",
        "mm",
    ],
)
def test_intercepted_matmul_in_half_precision(name, dtype):
    module, inputs, _ = made(name, NEAREST)
    grads = []
    for half in (False, True):
        with precision(module, 6), torch.autocast("cpu", dtype, enabled=half):
            y = module(*inputs)
        assert y.dtype == (dtype if half else torch.float32)
        grads.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
    for a, b in zip(*grads, strict=True):
        assert (a - b.float()).norm() < 0.05 * a.norm()
    model = module.to(dtype)
    with precision(model, 6):
        assert model(*(x.to(dtype) for x in inputs)).dtype == dtype


@pytest.mark.slow
def test_compiled_attention_with_changing_shapes_and_dropout():
    model = quantize_(nn.MultiheadAttention(8, 2, batch_first=True))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with precision(model, 4):
        for length, model.dropout in ((5, 0.0), (6, 0.0), (7, 0.5)):
            x = torch.randn(2, length, 8)
            assert run(x, x, x, need_weights=False)[0].shape == x.shape


@pytest.mark.slow
def test_compiled_intercepted_operations_equal_eager():
    config = NEAREST
    modules, inputs, _ = zip(
        *(made(name, config) for name in OF_EVERY_RULE), strict=True
    )
    parts = nn.ModuleList(modules)  # compiled at once
    model = FunctionModule(
        lambda m, inputs: [part(*x) for part, x in zip(m.parts, inputs, strict=True)],
        parts=parts,
    )
    torch._dynamo.reset()
    compiled, found = torch.compile(model, backend="aot_eager", fullgraph=True), []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for bits in (3, 5):
            with precision(model, bits, 6):
                for run in (model, compiled):
                    outputs = run(inputs)
                    gradients = torch.autograd.grad(
                        sum(y.square().sum() for y in outputs), sum(inputs, ())
                    )
                    found.append([*outputs, *gradients])
    of_inputs = (
        name for name, given in zip(OF_EVERY_RULE, inputs, strict=True) for _ in given
    )
    labels = [*OF_EVERY_RULE, *of_inputs]
    for i in (0, 2):
        for name, a, b in zip(labels, found[i], found[i + 1], strict=True):
            torch.testing.assert_close(
                b,
                a,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda said, name=name: f"{name}: {said}",
            )


def test_quantized_module_keeps_signature_and_copies_match():
    plain, model, x = (
        nn.MultiheadAttention(8, 2),
        quantize_(nn.MultiheadAttention(8, 2)),
        torch.randn(5, 2, 8),
    )
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert isinstance(model, nn.MultiheadAttention)
    with precision(model, 4):
        assert torch.equal(
            pickle.loads(pickle.dumps(copy.deepcopy(model)))(x, x, x)[0],
            model(x, x, x)[0],
        )


@pytest.mark.parametrize("name", ["addmm", "transposed", "ladder"])
def test_role_schedules_reach_intercepted_matmuls(name):
    formats = {3: "e2m1", 6: "e4m3"}
    module, (x,), _ = (
        made("transposed", QuantConfig(ladder=FormatLadder(formats)))
        if name == "ladder"
        else made(name)
    )
    steps = {
        "activation": StaticSchedule(3, 4),
        "weight": StaticSchedule(6, 4),
        "gradient": StaticSchedule(6, 4),
    }
    PrecisionScheduler(module, RoleSchedules(**steps))

    def rounded(x, bits, role):
        how = {"format": formats[bits]} if name == "ladder" else {"bits": bits}
        return quantize(x, quantizer=with_zero(role), **how)

    outputs, bias = (
        (module.w.mT.contiguous(), module.b)
        if name == "addmm"
        else (module.w, torch.zeros(4))
    )
    expected = rounded(x, 3, "attention_query") @ rounded(
        outputs, 6, "linear_weight"
    ).mT + rounded(bias, 6, "bias")
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_split_gradients_of_intercepted_matmul():
    module, (x,), _ = made("weight first", NEAREST)
    PrecisionScheduler(
        module,
        RoleSchedules(
            **dict.fromkeys(("activation", "weight", "error"), StaticSchedule(20, 4)),
            weight_gradient=StaticSchedule(2, 4),
        ),
    )
    y = module(x)
    upstream = torch.randn_like(y)
    of_x, of_w = torch.autograd.grad(y, [x, module.w], upstream)
    torch.testing.assert_close(of_x, module.w.mT @ upstream, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(of_w, upstream @ x.mT, atol=0.05)


def test_schedule_patterns_cover_intercepted_modules():
    """Raise an error if a module without a matching pattern is run."""

    def block():
        attention = FunctionModule(lambda m, x: x @ x.mT)
        return quantize_(
            FunctionModule(
                lambda m, x: m.attention(m.first(x)),
                first=nn.Linear(6, 6),
                attention=attention,
            )
        )

    model, x = block(), torch.randn(2, 3, 6)
    schedules = {"first": StaticSchedule(3, 4), "atten*": StaticSchedule(5, 4)}
    assert PrecisionScheduler(model, schedules).get_last_bits() == [3, 5]
    model(x)
    other = block()
    PrecisionScheduler(other, {"first": StaticSchedule(3, 4)})
    with pytest.raises(RuntimeError, match="has no precision yet"):
        other(x)


def test_scheduler_state_fits_late_intercepted_modules():
    """Load states from before and after the first matmul of a module."""

    class Late(nn.Module):
        def forward(self, x):
            return x @ x.mT

    def converted(*others):
        torch.manual_seed(0)
        return quantize_(nn.Sequential(nn.Linear(4, 4), Late(), *others))

    schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=2)
    model, x = converted(), torch.randn(2, 4)
    scheduler = PrecisionScheduler(model, schedule)
    early = scheduler.state_dict()
    assert list(early["layers"]) == list(layer_precisions(model)) == ["0"]
    model(x)
    late = scheduler.state_dict()
    assert list(late["layers"]) == list(layer_precisions(model)) == ["0", "1"]
    scheduler.load_state_dict(early)
    PrecisionScheduler(converted(), schedule).load_state_dict(late)
    with pytest.raises(ValueError, match="layers differ from the model's: 2"):
        PrecisionScheduler(converted(nn.Linear(4, 4)), schedule).load_state_dict(late)


def by_operators(m, x):
    """Call operators as graphs of torch.export and fx do."""
    y = torch.ops.aten.linear.default(x, m.w)
    y = torch.ops.aten.conv1d.padding(y.unsqueeze(1), m.k, None, [1], "valid")
    y = torch.ops.aten.conv_transpose2d.input(y.unsqueeze(2), m.t).flatten(1)
    return torch.ops.aten.mm(y, y.t())


@pytest.mark.filterwarnings("error")
def test_intercepted_graph_operators_are_quantized():
    torch.manual_seed(0)
    sizes = {"w": (6, 4), "k": (2, 1, 3), "t": (2, 1, 1, 2)}
    plain = FunctionModule(
        by_operators,
        **{name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()},
    )
    model, x = quantize_(copy.deepcopy(plain)), torch.randn(5, 4)
    with precision(model, 4):
        assert sum(
            operation.macs for operation in reported_operations(model, x)
        ) == 5 * (6 * 4 + 2 * 4 * 3 + 2 * 4 * 2 + 5 * 5)
    with precision(model, 32, 32):
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    "options", [None, nn.LinearCrossEntropyOptions()], ids=["whole", "in parts"]
)
def test_intercepted_linear_cross_entropy_equals_two_functions(options):
    """Match a linear layer followed by cross_entropy."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(5, (32,))
    found = []
    for loss_of in (
        lambda m, x, y: F.linear_cross_entropy(x, m.head.weight, y, options=options),
        lambda m, x, y: F.cross_entropy(F.linear(x, m.head.weight), y),
    ):
        torch.manual_seed(1)
        head = FunctionModule(loss_of, head=nn.Linear(6, 5, bias=False))
        nn.init.normal_(head.head.weight)
        model = quantize_(head, NEAREST)
        with precision(model, 3, 3):
            assert [
                operation.function for operation in reported_operations(model, x, y)
            ] == ["linear"]
            loss = model(x, y)
            loss.backward()
        found.append((loss.detach(), head.head.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- attention, and sums over one element -----------------------------------------------------------------------------


def outer(m, x):
    """Compute fast weights: keys times values, then a read-out."""
    q, k, v = m.qkv(x).chunk(3, -1)
    m.product = k.unsqueeze(-1) @ v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ m.product).squeeze(-2)


def outer_by_einsum(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    m.product = torch.einsum("bi,bj->bij", k, v)
    return torch.einsum("bi,bij->bj", q, m.product)


@pytest.mark.parametrize("forward", [outer, outer_by_einsum])
def test_sum_over_one_element_is_not_quantized(forward):
    """Scale in float32, in training and evaluation, with and without gradients."""
    model, x = (
        quantize_(FunctionModule(forward, qkv=nn.Linear(8, 24))),
        torch.randn(4, 8),
    )
    with precision(model, 2, 8):
        assert [
            operation.layer
            for operation in reported_operations(model, x)
            if operation.precision is not None
        ] == ["qkv", ""]
        trained = model(x)
        _, k, v = model.qkv(x).chunk(3, -1)
        assert torch.equal(model.product, k.unsqueeze(-1) * v.unsqueeze(-2))
        with torch.no_grad():
            assert torch.equal(model(x), trained)


def test_intercepted_encoder_accepts_padding_at_evaluation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = quantize_(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with precision(model, 20, 20), torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
        alone = model(x[1:, :2])
    torch.testing.assert_close(y[1:, :2], alone, rtol=1e-3, atol=1e-3)


def masked():
    """Return a module that runs torch's attention with given arguments."""
    return quantize_(
        FunctionModule(
            lambda _, q, k, v, **given: F.scaled_dot_product_attention(q, k, v, **given)
        )
    )


def test_intercepted_baddbmm_ignores_nan_with_zero_beta():
    """Ignore the added tensor at beta=0, as attention scores without a mask do."""
    nothing, x = torch.full((2, 3, 3), NAN), torch.randn(2, 3, 4)
    model = quantize_(
        FunctionModule(lambda _, x: torch.baddbmm(nothing, x, x.mT, beta=0, alpha=0.5))
    )
    with precision(model, 20, 20):
        torch.testing.assert_close(model(x), 0.5 * x @ x.mT, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_intercepted_attention_of_fully_masked_token(kind):
    model, x = masked(), torch.randn(1, 3, 4, requires_grad=True)
    sees = torch.tensor(
        [[True, True, True], [False, False, False], [True, False, True]]
    )
    mask = (
        sees if kind == torch.bool else torch.zeros(3, 3).masked_fill(~sees, -torch.inf)
    )
    with precision(model, 20, 20):
        y = model(x, x, x, attn_mask=mask)
    y.sum().backward()
    torch.testing.assert_close(
        y, F.scaled_dot_product_attention(x, x, x, attn_mask=mask), rtol=1e-3, atol=1e-3
    )
    assert not y[0, 1].any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [bias.causal_lower_right, bias.causal_upper_left])
def test_intercepted_attention_reads_causal_bias_masks(causal):
    model, q, x = masked(), torch.randn(1, 2, 4), torch.randn(1, 3, 4)
    mask = torch.ones(2, 3).tril(1 if causal is bias.causal_lower_right else 0).bool()
    for bits in (4, "float"):
        with precision(model, bits):
            assert torch.equal(
                model(q, x, x, attn_mask=causal(2, 3)), model(q, x, x, attn_mask=mask)
            )


def test_intercepted_attention_repeats_heads():
    """Repeat grouped query heads, and reject a mask together with is_causal=True."""
    model = masked()
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    with precision(model, 20, 20):
        same = model(q, k, v.expand(1, 2, 3, 8), enable_gqa=True)
        assert torch.equal(model(q, k, v, enable_gqa=True), same)
        with pytest.raises(RuntimeError, match="a mask or is_causal=True"):
            model(q, q, q, attn_mask=torch.zeros(3, 3), is_causal=True)


def test_intercepted_einsum_without_sum_is_no_matmul():
    outer = FunctionModule(
        lambda m, x: torch.einsum("bd,dn->bdn", x, m.w),
        w=nn.Parameter(torch.randn(4, 3)),
    )
    model = quantize_(nn.Sequential(nn.Linear(4, 4), outer))
    with precision(model, 3):
        x = model[0](torch.randn(5, 4))
        assert torch.equal(model[1](x), x.unsqueeze(-1) * model[1].w)
        assert [
            operation.function
            for operation in reported_operations(model, torch.randn(5, 4))
        ] == ["linear"]
