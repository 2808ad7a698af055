"""Quantised models under torch.compile: one graph for all bits, results equal to eager ones bit for bit.

In float32 also under autocast, and with the same noise.
"""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import RING, WITH_CUDA, FunctionModule, OnRing, OpRecorder, identical
from quantization.test_int8 import attention, first
from torch import nn

from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
PRODUCTS += ("cpt::lstm_forward", "cpt::lstm_backward")
LADDERS = {
    "activation": {6: "affine6:hadamard=8"},
    "weight": {6: "affine6:hadamard=8"},
    "gradient": None,
}
Q_AGG = QuantConfig(aggregation="quantized")
needs_order = pytest.mark.skipif(
    not fake_quantize.COMPILED_KEYS_COUNT,
    reason="compilers of this release take other noise",
)


def block():
    first, last = (
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 4, 3, groups=2),
    )
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(inplace=True), last)


KINDS = {
    "sequences": (lambda: nn.Linear(8, 6, bias=False), (2, 5, 8)),
    "rotated": (lambda: nn.Linear(8, 6), (5, 8)),
    "block": (block, (4, 3, 6, 6)),
    "lstm": (
        lambda: FunctionModule(first, layer=nn.LSTM(5, 4, bidirectional=True)),
        (3, 3, 5),
    ),
    "attention": (lambda: FunctionModule(first, layer=attention()), (2, 6, 12)),
    "gcn": (
        lambda: OnRing(GraphConv(3, 4)),
        (6, 3),
    ),  # eager code counts its degrees: else torch compiles twice
    "sage": (lambda: OnRing(SAGEConv(4, 3)), (6, 4)),
    "called twice": (
        lambda: nn.Sequential(layer := nn.Linear(8, 8), nn.Tanh(), layer),
        (5, 8),
    ),
}
HALF = torch.bfloat16  # the type is a parameter of the same code


class Side(nn.Module):
    """Layers of several kinds that are compiled together."""

    def __init__(self, kinds, config):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict()
        for kind in kinds:
            own = replace(config, ladder=LADDERS) if kind == "rotated" else config
            self.parts[kind] = quantize_(nn.Sequential(KINDS[kind][0]()), own)

    def forward(self, inputs):
        return {kind: part(inputs[kind]) for kind, part in self.parts.items()}


@pytest.fixture
def compiled():
    from torch._dynamo import config, reset
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    reset()
    counter = CompileCounterWithBackend("aot_eager")
    with config.patch(
        allow_rnn=True
    ):  # else it takes any ``nn.LSTM`` for one that it cannot trace
        yield lambda model: (
            torch.compile(model, fullgraph=True, backend=counter),
            counter,
        )
    reset()
    RING.set_constant(None)


def left_by_a_step(model, call, inputs, half):
    """Return the outputs and gradients of every layer kind after a step, and the dtypes of its backward matmuls."""
    model.zero_grad()
    with torch.autocast("cpu", HALF, enabled=half):
        outputs = call(inputs)
    with OpRecorder() as ran:
        sum(y.float().cos().sum() for y in outputs.values()).backward()
    return {
        kind: [
            outputs[kind].detach(),
            *(p.grad for p in part.parameters()),
            *(
                value
                for p in layer_precisions(part).values()
                for value in p.get_running().values()
            ),
        ]
        for kind, part in model.parts.items()
    }, {
        t.dtype
        for name, given in ran.calls
        if name in PRODUCTS
        for t in given
        if t.is_floating_point()
    }


NO_HALF = (
    "block",
    "lstm",
    "gcn",
)  # of graph layers one: autocast alone tells them apart; the others: test_operations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "half", "device"),
    [
        (KINDS, True, "cpu"),
        (NO_HALF, False, "cpu"),
        pytest.param(("block",), False, "cuda", marks=WITH_CUDA),
    ],
    ids=["autocast", "float32", "cuda"],
)
def test_compiled_graph_serves_all_bits_as_eager(kinds, half, device, compiled):
    exact = device == "cpu" and fake_quantize.COMPILED_KEYS_COUNT
    eager = Side(kinds, Q_AGG if exact else Q_AGG.with_gradient_rounding("nearest")).to(
        device
    )
    other = copy.deepcopy(eager)
    call, counter = compiled(other)
    inputs = {
        kind: torch.randn(KINDS[kind][1], device=device, requires_grad=kind != "gcn")
        for kind in kinds
    }
    RING.set_constant(inputs.get("gcn"))
    for bits in (3, 8, 5):
        levels = {"*rotated*": 6, "*": bits} if "rotated" in kinds else bits
        with precision(eager, levels, q_grad=4), precision(other, levels, q_grad=4):
            (expected, _), (found, types) = (
                left_by_a_step(*m, inputs, half)
                for m in ((eager, eager), (other, call))
            )
        assert types == {torch.float32}
        assert found["block"][0].dtype == (HALF if half else torch.float32)
        for kind, tensors in found.items():
            if exact:
                assert identical(tensors, expected[kind]), (kind, bits)
            else:
                torch.testing.assert_close(
                    tensors,
                    expected[kind],
                    msg=lambda said, kind=kind: f"{kind}: {said}",
                )
    assert counter.frame_count == 1
    parts = [
        part
        for graph in counter.graphs
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
    ]
    recurrences = [
        n for part in parts for n in part.graph.nodes if "lstm_forward" in str(n.target)
    ]
    assert len(recurrences) == (
        2 if "lstm" in kinds else 0
    )  # a layer in one direction is one node
    if not half:
        with precision(eager.eval(), 8), precision(other.eval(), 8), torch.no_grad():
            torch.testing.assert_close(call(inputs), eager(inputs))


def test_compiled_and_eager_scheduler_states_are_interchangeable(
    compiled,
):
    eager = quantize_(nn.Sequential(nn.Linear(8, 8)))
    schedulers = [
        PrecisionScheduler(m, StaticSchedule(4, 4))
        for m in (eager, compiled(copy.deepcopy(eager))[0])
    ]
    for one, other in (schedulers, schedulers[::-1]):
        one.step()
        other.load_state_dict(one.state_dict())
        assert other.last_step == one.last_step


@pytest.mark.slow
def test_compiled_graph_serves_bits_cached_by_models(compiled):
    """Reuse a graph for bits with formats already cached by a second model."""
    other = quantize_(block(), Q_AGG)
    (call, counter), x = (
        compiled(model := copy.deepcopy(other)),
        torch.randn(KINDS["block"][1]),
    )
    with precision(other, 5, 7):
        other(x)
    for bits in (3, 5, 7):
        with precision(model, bits, 7):
            call(x)
    assert counter.frame_count == 1


@needs_order
def test_compiled_pending_backward_passes_draw_eager_noise(
    compiled,
):
    eager = quantize_(nn.Sequential(nn.Linear(8, 8)))
    other = copy.deepcopy(eager)
    for model, call in ((eager, eager), (other, compiled(other)[0])):
        with precision(model, 8, q_grad=2):
            (
                call(torch.linspace(0, 1, 8)).cos().sum()
                + call(torch.linspace(-1, 2, 8)).cos().sum()
            ).backward()
    assert identical(
        [p.grad for p in eager.parameters()], [p.grad for p in other.parameters()]
    )


def test_compiled_noise_of_old_compilers(compiled, monkeypatch):
    """Draw noise keys in the forward pass of compiled models under old torch releases."""
    monkeypatch.setattr(fake_quantize, "COMPILED_KEYS_COUNT", False)
    model = quantize_(nn.Linear(8, 8))
    key = int(model.precision.noise_key)
    with precision(model, 8, q_grad=2):
        y = compiled(model)[0](torch.linspace(0, 1, 8))
        assert int(model.precision.noise_key) == key + 1
        y.cos().sum().backward()
        assert int(model.precision.noise_key) == key + 1


class CustomRoot(nn.Module):
    """Module that multiplies in its own forward, optionally with a graph break."""

    def __init__(self, breaks):
        super().__init__()
        self.linear, self.conv, self.breaks = (
            nn.Linear(8, 8),
            nn.Conv1d(8, 8, 3, padding=1),
            breaks,
        )
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        h = self.mix(self.conv(torch.relu(self.linear(x)).mT).mT)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(h @ h.mT @ x)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # of torch, behind a break of the graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
def test_compiled_root_with_custom_forward_equals_eager(backend, breaks):
    """Compilers run the hooks of the root uncompiled, so the mode is on while the graph runs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = quantize_(
        CustomRoot(breaks), QuantConfig().with_gradient_rounding("nearest")
    )
    compiled, x, found = (
        torch.compile(model, backend=backend, fullgraph=not breaks),
        torch.randn(6, 5, 8),
        [],
    )
    with precision(model, 4, q_grad=8):
        for run in (model, compiled):
            y = run(x)
            gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
            found.append([y, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class ViewAcrossBreak(nn.Module):
    """Module with a tensor and a view of it on both sides of a graph break."""

    def __init__(self, view):
        super().__init__()
        self.first, self.second, self.view = nn.Linear(8, 8), nn.Linear(8, 8), view

    def forward(self, x):
        h = self.first(x)
        if self.view == "in-place":
            h.relu_()
        seen = {
            "transpose": h.mT,
            "slice": h[..., :5],
            "reshape": h.flatten(),
            "in-place": h[0],
        }[self.view]
        torch._dynamo.graph_break()
        return self.second(h).square().sum() + seen.square().sum()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # of torch, behind a break of the graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("view", ["transpose", "slice", "reshape", "in-place"])
def test_compiled_view_across_graph_break_has_gradients(backend, view):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = quantize_(
        ViewAcrossBreak(view), QuantConfig().with_gradient_rounding("nearest")
    )
    compiled, x, found = torch.compile(model, backend=backend), torch.randn(2, 5, 8), []
    with precision(model, 4, q_grad=8):
        for run in (model, compiled):
            found.append(torch.autograd.grad(run(x), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
