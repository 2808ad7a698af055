"""Quantised models under torch.compile: one graph for all bits, bit for bit as eager.

In float32 also under autocast, and with the same noise.
"""

import copy
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    NEAREST,
    RING,
    WITH_CUDA,
    FunctionModule,
    OnRing,
    OpRecorder,
    identical,
)
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import precision

MATMULS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
MATMULS += ("cpt::lstm_forward", "cpt::lstm_backward")
HADAMARD = {6: "affine6:hadamard=8"}
LADDERS = {"activation": HADAMARD, "weight": HADAMARD, "gradient": None}
HALF = torch.bfloat16  # the type is a parameter of the same code
Q_AGG = QuantConfig(aggregation="quantized")
ATTENTION = BertConfig(
    hidden_size=12,
    num_attention_heads=3,
    attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)


def first_output(m, x):
    return m.layer(x)[0]


def block():
    first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    last = nn.Conv2d(4, 4, 3, groups=2)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(inplace=True), last)


def called_twice():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer)


KINDS = {  # name -> module, shape of its input
    "sequences": (lambda: nn.Linear(8, 6, bias=False), (2, 5, 8)),
    "rotated": (lambda: nn.Linear(8, 6), (5, 8)),
    "block": (block, (4, 3, 6, 6)),
    "lstm": (
        lambda: FunctionModule(first_output, layer=nn.LSTM(5, 4, bidirectional=True)),
        (3, 3, 5),
    ),
    "attention": (
        lambda: FunctionModule(first_output, layer=BertSelfAttention(ATTENTION)),
        (2, 6, 12),
    ),
    # eager code counts its degrees, or torch would compile twice
    "gcn": (lambda: OnRing(GraphConv(3, 4)), (6, 3)),
    "sage": (lambda: OnRing(SAGEConv(4, 3)), (6, 4)),
    "called twice": (called_twice, (5, 8)),
}


class Parts(nn.Module):
    """Layers of several kinds that are compiled together."""

    def __init__(self, kinds, config):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict()
        for kind in kinds:
            is_rotated = kind == "rotated"
            own_config = replace(config, ladder=LADDERS) if is_rotated else config
            self.parts[kind] = quantize_(nn.Sequential(KINDS[kind][0]()), own_config)

    def forward(self, inputs):
        return {kind: part(inputs[kind]) for kind, part in self.parts.items()}


@pytest.fixture(autouse=True)
def reset_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    RING.set_constant(None)


@pytest.fixture
def compiled():
    """Return a function that compiles a model and returns it with a counter of graphs."""
    from torch._dynamo import config
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    counter = CompileCounterWithBackend("aot_eager")
    # else it takes any ``nn.LSTM`` for one that it cannot trace
    with config.patch(allow_rnn=True):
        yield lambda model: (
            torch.compile(model, fullgraph=True, backend=counter),
            counter,
        )


def layer_state(model):
    layers = layer_precisions(model).values()
    return [value for p in layers for value in p.get_running().values()]


def train_parts(model, run, inputs, is_half):
    """Return results of every kind after a step, and dtypes of backward matmuls."""
    model.zero_grad()
    with torch.autocast("cpu", HALF, enabled=is_half):
        outputs = run(inputs)
    with OpRecorder() as recorder:
        sum(y.float().cos().sum() for y in outputs.values()).backward()
    results = {
        kind: [
            outputs[kind].detach(),
            *(p.grad for p in part.parameters()),
            *layer_state(part),
        ]
        for kind, part in model.parts.items()
    }
    operands = [
        x for name, tensors in recorder.calls if name in MATMULS for x in tensors
    ]
    return results, {x.dtype for x in operands if x.is_floating_point()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "is_half", "device"),
    [
        (KINDS, True, "cpu"),
        (("block", "lstm"), False, "cpu"),
        pytest.param(("block",), False, "cuda", marks=WITH_CUDA),
    ],
    ids=["autocast", "float32", "cuda"],
)
def test_compiled_graph_serves_all_bits_as_eager(kinds, is_half, device, compiled):
    is_exact = device == "cpu" and fake_quantize.COMPILED_KEYS_COUNT
    config = Q_AGG if is_exact else Q_AGG.with_gradient_rounding("nearest")
    eager = Parts(kinds, config).to(device)
    other = copy.deepcopy(eager)
    run, counter = compiled(other)
    inputs = {
        kind: torch.randn(KINDS[kind][1], device=device, requires_grad=kind != "gcn")
        for kind in kinds
    }
    RING.set_constant(inputs.get("gcn"))
    for bits in (3, 8):
        levels = {"*rotated*": 6, "*": bits} if "rotated" in kinds else bits
        with precision(eager, levels, q_grad=4), precision(other, levels, q_grad=4):
            expected, _ = train_parts(eager, eager, inputs, is_half)
            found, dtypes = train_parts(other, run, inputs, is_half)
        assert dtypes == {torch.float32}
        assert found["block"][0].dtype == (HALF if is_half else torch.float32)
        for kind, tensors in found.items():
            if is_exact:
                assert identical(tensors, expected[kind]), (kind, bits)
            else:
                torch.testing.assert_close(tensors, expected[kind])
    assert counter.frame_count == 1

    graphs = [m for g in counter.graphs for m in g.modules() if hasattr(m, "graph")]
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    # a layer in one direction is one node
    recurrences = sum("lstm_forward" in target for target in nodes)
    assert recurrences == (2 if "lstm" in kinds else 0)
    if not is_half:
        with precision(eager.eval(), 8), precision(other.eval(), 8), torch.no_grad():
            torch.testing.assert_close(run(inputs), eager(inputs))


@pytest.mark.slow
@pytest.mark.skipif(
    not fake_quantize.COMPILED_KEYS_COUNT,
    reason="compilers of this release take other noise",
)
def test_compiled_pending_backward_passes_draw_eager_noise(compiled):
    eager = quantize_(nn.Sequential(nn.Linear(8, 8)))
    other = copy.deepcopy(eager)
    for model, run in ((eager, eager), (other, compiled(other)[0])):
        with precision(model, 8, q_grad=2):
            first = run(torch.linspace(0, 1, 8)).cos().sum()
            (first + run(torch.linspace(-1, 2, 8)).cos().sum()).backward()
    gradients = ([p.grad for p in model.parameters()] for model in (eager, other))
    assert identical(*gradients)


@pytest.mark.slow
def test_compiled_noise_of_old_compilers(compiled, monkeypatch):
    """Draw noise keys in the forward pass under old releases of torch."""
    monkeypatch.setattr(fake_quantize, "COMPILED_KEYS_COUNT", False)
    model = quantize_(nn.Linear(8, 8))
    key = int(model.precision.noise_key)
    with precision(model, 8, q_grad=2):
        y = compiled(model)[0](torch.linspace(0, 1, 8))
        assert int(model.precision.noise_key) == key + 1
        y.cos().sum().backward()
        assert int(model.precision.noise_key) == key + 1


class Mixing(nn.Module):
    """Attention over the outputs of a layer."""

    def __init__(self, has_break):
        super().__init__()
        self.qkv, self.has_break = nn.Linear(8, 24), has_break

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.has_break:
            torch._dynamo.graph_break()
        return F.layer_norm((q @ k.mT).softmax(-1) @ v, (8,))


class Root(nn.Module):
    """Child, matmuls of activations and parameters, and one with a child's weight."""

    def __init__(self, has_break=False):
        super().__init__()
        torch.manual_seed(0)
        self.child = Mixing(has_break)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = self.child(x) @ self.w
        return F.linear(y @ y.mT @ x, self.child.qkv.weight)


def train_root(model, run, bits):
    """Return the output, the gradients and the state of the layers of a step."""
    torch.manual_seed(5)
    x = torch.randn(2, 5, 8, requires_grad=True)
    model.zero_grad()
    with precision(model, bits, 4):
        y = run(x)
        y.cos().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), *gradients, *layer_state(model)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, behind breaks
@pytest.mark.parametrize(
    ("part", "has_break", "backend"),
    [
        ("model", False, "aot_eager"),
        ("model", True, "eager"),
        ("child", True, "aot_eager"),
    ],
)
def test_compiled_code_is_quantized_once(part, has_break, backend):
    """Quantise once, although the mode of eager modules stays on around graphs.

    Compilers run the hooks of the root uncompiled.
    """
    eager, model = quantize_(Root(has_break)), quantize_(Root(has_break))
    run = model
    if part == "child":
        model.child.compile(backend=backend)
    else:
        run = torch.compile(model, backend=backend, fullgraph=not has_break)
    expected = train_root(eager, eager, 3)
    assert identical(train_root(model, run, 3), expected)
    is_whole = part == "model" and not has_break
    with torch._dynamo.config.patch(error_on_recompile=is_whole):
        expected = train_root(eager, eager, 8)
        assert identical(train_root(model, run, 8), expected)


class Teacher(nn.Module):
    """A model that runs inside of another one, perhaps with a graph break in its forward."""

    def __init__(self, has_break):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.has_break = has_break

    def forward(self, x):
        h = self.first(x).relu()
        if self.has_break:
            torch._dynamo.graph_break()
        return self.last(h @ h.mT @ h)


class Student(nn.Module):
    """A model that runs its teacher between operations of its own."""

    def __init__(self, teacher):
        super().__init__()
        self.first, self.teachers = nn.Linear(4, 4), [teacher]

    def forward(self, x):
        h = self.first(x)
        target = None if self.teachers[0] is None else self.teachers[0](x)
        return self.first(h @ h.mT @ h), target


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, behind breaks
@pytest.mark.parametrize("teacher_bits", ["float", 3])
@pytest.mark.parametrize("has_break", [False, True])
def test_compiled_student_leaves_teacher_its_bits(has_break, teacher_bits):
    """Cover a teacher with a layer in float32, and the operations of the student after it, as without a teacher."""
    torch.manual_seed(0)
    teacher = quantize_(Teacher(has_break), QuantConfig(float32=("first",)))
    students = [quantize_(Student(t), NEAREST) for t in (None, teacher, teacher)]
    weights = students[0].state_dict()
    for student in students:
        student.load_state_dict(weights)
    backend = "eager" if has_break else "aot_eager"
    compiled = torch.compile(students[1], backend=backend, fullgraph=not has_break)
    alone = torch.compile(students[0], backend=backend, fullgraph=True)
    x = torch.randn(3, 4)
    with ExitStack() as stack:
        for student in students:
            stack.enter_context(precision(student, 2, q_grad=8))
        stack.enter_context(precision(teacher, teacher_bits))
        expected, no_target = train_student(students[0], alone, x)
        assert no_target is None
        for student, run in ((students[1], compiled), (students[2], students[2])):
            results, target = train_student(student, run, x)
            assert identical(results, expected)
            assert torch.equal(target, teacher(x))
        assert not torch.equal(target, students[0](x)[0])


def train_student(student, run, x):
    y, target = run(x)
    return [
        y,
        *torch.autograd.grad(y.square().sum(), list(student.parameters())),
    ], target


class ViewsAcrossBreak(nn.Module):
    """Tensor and views of it on both sides of a graph break."""

    def __init__(self, is_in_place):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_in_place = is_in_place

    def forward(self, x):
        h = self.first(x)
        if self.is_in_place:
            h.relu_()
            views = [h[0]]
        else:
            views = [h.mT, h[..., :5], h.flatten()]
        torch._dynamo.graph_break()
        return self.second(h).square().sum() + sum(v.square().sum() for v in views)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, behind breaks
@pytest.mark.parametrize("is_in_place", [False, True])
def test_compiled_view_across_graph_break_has_gradients(is_in_place):
    torch.manual_seed(0)
    model = quantize_(ViewsAcrossBreak(is_in_place), NEAREST)
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(2, 5, 8)
    with precision(model, 4, q_grad=8):
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
    assert identical(found, expected)


class Attributes(nn.Module):
    """Attributes of a tensor, read by code that the compiler leaves alone."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        y = F.linear(x, self.w)
        y = y.to(x.dtype) + torch.zeros(y.shape[-1:], dtype=y.dtype, device=y.device)
        return y.mT if y.requires_grad and y.ndim == 3 and not y.is_sparse else y


class Called(nn.Module):
    """Recurrent layer, at which compilers break the graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(4, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, behind breaks
@pytest.mark.parametrize(
    "make",
    [Attributes, *(partial(Called, layer) for layer in (nn.RNN, nn.GRU, nn.LSTM))],
    ids=["attributes", "RNN", "GRU", "LSTM"],
)
def test_compiled_model_runs_behind_graph_break(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU())
    quantize_(model, NEAREST)
    compiled, x = torch.compile(model, backend="eager"), torch.randn(2, 5, 4)
    with precision(model, 4, q_grad=8):
        expected = train_step(model, model, x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert identical(train_step(model, compiled, x), expected)


def train_step(model, run, x):
    y = run(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.mark.slow
def test_compiled_attention_takes_changing_shapes():
    model = quantize_(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True))
    run = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with precision(model, 4):
        for length in (5, 6):
            x = torch.randn(2, length, 8)
            assert run(x, x, x, need_weights=False)[0].shape == x.shape
