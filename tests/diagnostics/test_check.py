"""Agreement of ``check`` with the operations that a model runs."""

import copy
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from helpers import FunctionModule, identical, make, refused, running_ranges
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torchvision.ops import deform_conv2d

from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.check import Executed, check


def rows_of(found):
    return [
        (e.layer, e.operation, e.backward, e.quantized, e.macs)
        for e in found.operations
    ]


@pytest.mark.parametrize(
    ("read", "layer"),
    [
        (lambda w: w, "1.passed"),
        (lambda w: w.T, "1.passed"),
        (lambda w: w - w.mean(), "1"),
        (lambda w: w.clone(), "1"),
    ],
)
def test_check_finds_weights_used_by_parent(read, layer):
    """Assign a weight to its own layer, and values computed from it to the running layer."""
    forward = lambda m, x: F.linear(m.called(x), read(m.passed.weight))  # noqa: E731
    used = FunctionModule(
        forward, called=nn.Linear(4, 4), passed=nn.Linear(4, 4, bias=False)
    )
    found = check(quantize_(nn.Sequential(nn.Linear(4, 4), used)), (torch.ones(3, 4),))
    assert (found.ok, found.bypassed, found.unused, found.float32) == (True, (), (), [])
    assert [e.layer for e in found.operations if not e.backward] == [
        "0",
        "1.called",
        layer,
    ]


def test_check_finds_weights_in_unintercepted_operations():
    parts = {"called": nn.Linear(4, 4), "passed": nn.Linear(4, 4, bias=False)}
    found = check(
        quantize_(
            FunctionModule(
                lambda m, x: torch.cdist(m.called(x), m.passed.weight), **parts
            )
        ),
        (torch.ones(3, 4),),
    )
    assert (found.ok, found.bypassed) == (False, ("passed",))
    assert [(e.layer, e.intercepted, e.macs) for e in found.float32] == [
        ("", False, 48)
    ]
    assert found.quantized_share == 1 / 2
    assert "listed as quantised, but used in float32: passed" in str(found)


def test_check_separates_unused_from_bypassed_layers():
    model = FunctionModule(
        lambda m, x: m.first(x), first=nn.Linear(4, 4), other=nn.Linear(4, 4)
    )
    found = check(quantize_(model), (torch.ones(3, 4),))
    assert (found.ok, found.bypassed, found.unused) == (True, (), ("other",))
    assert "took no part in the step: other" in str(found)


def test_check_lists_every_operation():
    model = quantize_(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",))
    )
    assert rows_of(check(model, (torch.ones(5, 4),))) == [
        ("0", "linear", False, True, 60),
        ("1", "linear", False, False, 30),
        ("1", "linear", True, False, 60),  # dx = dy w and dw = x dy
        ("0", "linear", True, True, 60),  # dw alone: the input needs no gradient
    ]


def test_check_assigns_hook_matmuls_to_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, inputs: inputs[0] @ torch.eye(4))
    assert [e.layer for e in check(quantize_(model), (torch.ones(3, 4),)).float32] == [
        "1"
    ]


def backward_of(found):
    return [
        (e.layer, e.operation, e.quantized, e.macs)
        for e in found.operations
        if e.backward
    ]


def test_check_finds_complex_matmuls():
    model = FunctionModule(
        lambda m, x: torch.einsum("nd,de->ne", m.layer(x) + 0j, m.w).real,
        layer=nn.Linear(4, 4),
    )
    model.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    found = check(quantize_(model), (torch.randn(3, 4),))
    assert not found.ok
    assert [e.quantized for e in found.operations if e.layer == ""] == [False] * 2


EDGES = torch.eye(4).to_sparse()
UNKNOWN = {  # a function -> what it computes of a weight and of four rows of four numbers, and its MACs
    "cdist": (lambda m, y: torch.cdist(y, m.w), 64),
    "cdist of many": (lambda m, y: torch.cdist(y.repeat(10, 1), m.w), 640),
    "cdist by absolute values": (lambda m, y: torch.cdist(y, m.w, 1.0), 64),
    "conv_tbc": (
        lambda m, y: torch.conv_tbc(y[:, None], m.w[None], y.new_zeros(4)),
        64,
    ),
    "matrix_exp": (lambda m, y: y + torch.matrix_exp(m.w)[0], 5 * 64),
    "cov": (lambda m, y: torch.cov(y), 64),
    "corrcoef": (lambda m, y: torch.corrcoef(y), 64),
    "linalg_matrix_power": (lambda m, y: torch.linalg.matrix_power(y, 2), 64),
    "sparse": (lambda m, y: EDGES @ y, 64),  # as of a dense one
    "_sparse_addmm": (lambda m, y: torch.sparse.addmm(y, EDGES, y), 4 * 4),
    "deform_conv2d": (
        lambda m, y: deform_conv2d(
            y[None, None], y.new_zeros(1, 2, 4, 4), m.w[None, None, :1, :1]
        ),
        16,
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_check_finds_unintercepted_operations(name):
    function, macs = UNKNOWN[name]
    model = FunctionModule(
        lambda m, x: function(m, m.layer(x)),
        layer=nn.Linear(4, 4),
        w=nn.Parameter(torch.randn(4, 4)),
    )
    found = check(quantize_(model), (torch.randn(4, 4),))
    assert [(e.layer, e.intercepted, e.macs) for e in found.float32] == [
        ("", False, macs)
    ]
    assert not found.ok


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    def __init__(self, loss):
        self.loss = loss


WRAPPED = {
    "dataclass": (Output, True),
    "dict": (lambda y: {"y": [y]}, True),
    "complex": (lambda y: y + 0j, True),
    "object": (Opaque, False),
    "detached": (lambda y: y.detach(), False),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_check_reports_missing_backward_pass(kind):
    wrap, seen = WRAPPED[kind]
    found = check(
        quantize_(FunctionModule(lambda m, x: wrap(m.layer(x)), layer=nn.Linear(4, 4))),
        (torch.randn(3, 4),),
    )
    assert len(backward_of(found)) == seen
    assert (
        found.ok,
        found.no_gradient,
        "no parameter got a gradient" in str(found),
    ) == (seen, not seen, not seen)


def test_check_computes_required_input_gradients():
    x = torch.randn(3, 4, requires_grad=True)
    for frozen, macs in ((True, 48), (False, 96)):
        found = check(quantize_(nn.Linear(4, 4).requires_grad_(not frozen)), (x,))
        assert found.ok, str(found)
        assert backward_of(found) == [("", "linear", True, macs)]
    assert x.grad is None


def test_check_runs_backward_outside_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        found = check(quantize_(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert backward_of(found) == [("", "linear", True, 48)]


def test_check_restores_parameters_written_by_forward():
    def forward(m, x):
        y = m.layer(x)
        with torch.no_grad():
            m.mean[0].mul_(0.9).add_(y.mean(0))
            torch.mul(m.layer.weight, 2, out=m.layer.weight)
        return y * m.mean

    model = FunctionModule(
        forward,
        layer=nn.Linear(4, 4),
        mean=nn.Parameter(torch.randn(2, 1, 4), requires_grad=False),
    )
    before = copy.deepcopy(model.state_dict())
    check(quantize_(model), (torch.randn(3, 4),))
    assert all(
        torch.equal(value, before[name])
        for name, value in model.state_dict().items()
        if name in before
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_check_counts_matmuls_recomputed_by_checkpoint(reentrant):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = FunctionModule(
        lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=reentrant),
        first=nn.Linear(4, 4),
        block=block,
    )
    x = torch.randn(3, 4)
    if reentrant:
        refused(
            "set use_reentrant=False", check, quantize_(model), (x,), error=RuntimeError
        )
        return
    found = check(quantize_(model), (x,))
    assert found.ok, str(found)
    plan = count_bitops(model, (x,), convention="paper")
    assert plan.forward_macs == 3 * 48  # the paper knows of no second time
    assert plan.unpriced == {"block.0": 48}
    assert count_bitops(model, (x,)).macs == {"first": 48, "block.0": 96, "block.2": 48}


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU], ids=lambda k: k.__name__)
def test_check_follows_direct_forward_calls(kind):
    x = torch.randn(4, 3, 8)
    found = []
    for call in (lambda m, x: m.inner(x), lambda m, x: m.inner.forward(x)):
        model = quantize_(FunctionModule(call, inner=kind(8, 8)))
        if found:
            model.inner.register_forward_hook(
                lambda *_: 1 / 0
            )  # which torch does not call either
        checked, plan = (
            check(model, (x,)),
            count_bitops(model, (x,), StaticSchedule(2, 1)),
        )
        assert (checked.ok, checked.quantized_share) == (True, 1)
        found.append((rows_of(checked), plan.bitops))
        assert "forward" not in vars(model.inner)
    assert found[0] == found[1]
    model.inner._forward_hooks.clear()
    model.forward = own = partial(type(model).forward, model)
    assert check(model, (x,)).ok
    assert model.forward is own


def test_check_handles_random_control_flow():
    def forward(m, x):
        for layer in m.layers:
            x = layer(x) if random.random() < 0.5 and np.random.rand() < 0.9 else x  # noqa: NPY002
        return m.last(x)

    model = quantize_(
        FunctionModule(
            forward,
            layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)),
            last=nn.Linear(4, 4),
        )
    )
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert all(check(model, (torch.randn(3, 4),)).ok for _ in range(3))
    drawn = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert drawn == (random.random(), np.random.rand())  # noqa: NPY002


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_check_finds_flex_attention():
    def forward(m, x):
        q, k, v = (
            y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.qkv(x).chunk(3, -1)
        )
        return m.out(flex_attention(q, k, v).transpose(1, 2).flatten(2))

    attention = FunctionModule(
        forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)
    ).requires_grad_(False)
    model, x = (
        quantize_(nn.Sequential(attention, nn.Linear(8, 4))),
        torch.randn(2, 5, 8),
    )
    found = check(model, (x,))
    assert (found.ok, [(e.layer, e.macs) for e in found.float32]) == (
        False,
        [("0", 2 * 2 * 2 * 5 * 5 * 4)],
    )


def test_check_omits_backward_without_gradient():
    model = FunctionModule(
        lambda m, x: m.head(m.encoder(x).detach()),
        encoder=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )
    x = torch.randn(3, 4)
    assert count_bitops(model, (x,)).bitops["encoder"] == {"forward": 48 * 32**2}
    found = check(quantize_(model), (x,))
    assert (found.ok, backward_of(found)) == (True, [("head", "linear", True, 24)])


def held_by(model):
    """Return the buffers and running ranges of a model."""
    return {**dict(model.named_buffers()), **dict(enumerate(running_ranges(model)))}


def test_check_restores_gradients_and_buffers():
    """Restore gradients and buffers even if a closure runs the model instead of its copy."""

    def forward(m, x):
        m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
        return m.layer(m.norm(x)) + m.mean

    model = quantize_(
        FunctionModule(forward, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    )
    model.register_buffer("mean", torch.zeros(4))
    inner, x = model.forward, torch.randn(3, 4)
    model.forward = lambda x: inner(x)
    scheduler = PrecisionScheduler(model, StaticSchedule(4, 1))
    model(x).sum().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()} | held_by(model)
    held = {name: value.clone() for name, value in before.items()}
    check(model, (2 * x,))
    count_bitops(model, (2 * x,))
    after = {n: p.grad for n, p in model.named_parameters()} | held_by(model)
    assert all(torch.equal(after[name], value) for name, value in held.items()), (
        scheduler
    )


@pytest.mark.parametrize("training", [True, False])
def test_check_leaves_model_unchanged(training):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
    ]
    model = quantize_(nn.Sequential(*layers), QuantConfig(execution="integer"))
    schedule = make("CR", total_steps=40, n_cycles=2)
    twins = model, copy.deepcopy(model)
    drivers = [
        (PrecisionScheduler(m, schedule), torch.optim.SGD(m.parameters(), lr=0.1))
        for m in twins
    ]

    def train(model, scheduler, optimizer):
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(6, 2, 4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    for twin, driver in zip(twins, drivers, strict=True):
        train(twin, *driver)
        twin[4](
            torch.randn(2, 64)
        ).sum().backward()  # some gradients are there, others are None
        twin.train(training)
        twin[1].eval()  # frozen statistics
    before = [(m.training, len(m._forward_pre_hooks)) for m in model.modules()]
    inputs, random_state = (torch.randn(6, 2, 4, 4),), torch.get_rng_state()
    check(model, inputs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [(m.training, len(m._forward_pre_hooks)) for m in model.modules()] == before
    assert [p.grad is None for p in model.parameters()] == [
        p.grad is None for p in twins[1].parameters()
    ]
    assert identical(*([*m.parameters(), *held_by(m).values()] for m in twins))
    assert identical([model[4].weight.grad], [twins[1][4].weight.grad])
    for twin, driver in zip(twins, drivers, strict=True):
        train(twin, *driver)
    assert identical(*(m.parameters() for m in twins))


@pytest.mark.parametrize("function", [check, count_bitops, summary])
def test_check_requires_tuple_of_inputs(function):
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    refused(
        "inputs must be a tuple of the arguments of forward, got a Tensor",
        function,
        model,
        torch.randn(1, 4),
    )


def test_check_restores_model_after_failure():
    class Fails(nn.Sequential):
        def forward(self, x):
            super().forward(x)
            raise KeyError("broken")

    model = quantize_(Fails(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before, hooks = (
        copy.deepcopy(model[1].running_mean),
        [len(m._forward_pre_hooks) for m in model.modules()],
    )
    refused("broken", check, model, (torch.randn(3, 4),), error=KeyError)
    assert torch.equal(model[1].running_mean, before)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model[0].precision.active_levels is None


def test_check_runs_compiled_model_eagerly():
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    found = check(torch.compile(model, backend="aot_eager"), (torch.ones(2, 4),))
    assert found.ok
    assert [e.layer for e in found.operations if not e.backward] == ["_orig_mod.0"]


class Recurrent(nn.LSTM):
    """Recurrent network that runs step by step in a custom forward method."""


def experts():
    """Return two experts, the first of which receives no token."""
    return FunctionModule(
        lambda m, x: torch.cat([m.first(x[:0]), m.second(x)]),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
    )


@pytest.mark.parametrize(
    "kind", [partial(Recurrent, 4, 3), partial(nn.LSTM, 4, 3), experts]
)
def test_check_skips_empty_matmuls(
    kind,
):
    """Skip matmuls without rows, and the state gradient of a first step."""
    model = quantize_(kind())
    assert check(model, (torch.randn(5, 4),)).ok
    if isinstance(model, nn.LSTM):
        assert check(model, (torch.randn(5, 0, 4),)).operations == ()


def test_check_lists_lstm_matmuls():
    first, second = 10 * 12 * 4, 10 * 12 * 3  # rows, gates, inputs or hidden
    assert rows_of(check(quantize_(nn.LSTM(4, 3)), (torch.ones(5, 2, 4),))) == [
        ("", "lstm", False, True, first + second),
        ("", "lstm", True, True, first + 2 * second),  # the input needs no gradient
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)),
            torch.randn(2, 3, 6, 6),
        ),
        lambda: (nn.LSTM(4, 3), torch.randn(5, 2, 4)),
    ],
)
def test_check_treats_int8_like_simulation(make):
    torch.manual_seed(0)
    model, x = make()
    wanted = check(quantize_(copy.deepcopy(model)), (x,))
    model = quantize_(model, QuantConfig(execution="integer").with_shared_steps())
    with precision(model, 5, 8):
        before = model(x)
        found = check(model, (x,))
        assert found.ok
        assert (found.operations, found.quantized_share) == (wanted.operations, 1)
        assert {p.execution for p in layer_precisions(model).values()} == {"integer"}
        after = model(x)
    for a, b in zip(
        *((y if isinstance(y, tuple) else (y,)) for y in (before, after)), strict=True
    ):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


class ByHand(torch.autograd.Function):
    """Linear layer as a custom autograd function, as in torch's documentation."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w.t())

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.mm(w), gradient.t().mm(x)


def test_check_finds_float32_backward_matmuls():
    own = FunctionModule(
        lambda m, x: ByHand.apply(x, m.w) @ m.w, w=nn.Parameter(torch.randn(4, 4))
    )
    found = check(quantize_(nn.Sequential(nn.Linear(4, 4), own)), (torch.randn(5, 4),))
    assert (found.ok, found.float32) == (False, [])
    assert [e for e in found.operations if not e.intercepted] == [
        Executed("1", "mm", True, False, False, 160)
    ]


def test_check_report_has_line_per_layer():
    parts = {"layer": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    model = FunctionModule(
        lambda m, x: m.head(torch.cdist(h := m.layer(x), m.layer.weight) + h @ h.T @ h),
        **parts,
    )
    model = quantize_(model, QuantConfig(float32=("head",)))
    found = check(model, (torch.randn(4, 4),), invariances=False)
    lines = [line.split() for line in str(found).splitlines()]
    assert lines[:4] == [
        ["layer", "operations", "forward", "MACs", "backward", "MACs", "precision"],
        ["layer", "linear", "64", "64", "quantised"],
        [
            "(model)",
            "matmul,",
            "_cdist_forward,",
            "_cdist_backward",
            "192",
            "384",
            "67%",
            "quantised",
            "(not",
            "intercepted:",
            "_cdist_forward,",
            "_cdist_backward)",
        ],
        ["head", "linear", "32", "64", "float32"],
    ]
    details = found.details().splitlines()
    assert len(details) == 1 + len(found.operations)
    assert str(check(model, (torch.randn(4, 4),), details=True)).startswith(
        found.details()
    )
    assert details[1].split() == ["layer", "linear", "forward", "64", "quantised"]
