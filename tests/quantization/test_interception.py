"""Interception mode of a converted model: active only while its modules run, and aware of the running layer."""

import copy
import gc
import io
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import (
    ForeignCheckpoint,
    FunctionModule,
    identical,
    mode_of,
    reported_operations,
    running_ranges,
)
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.op_interception import QuantizedOpsMode
from cpt_core.quantization.scheduler import precision
from cpt_extras.formats.tensor_rounding import quantize


def modes_on():
    """Return how many modes of converted models are on in this thread."""
    return sum(
        isinstance(mode, QuantizedOpsMode)
        for mode in _get_current_function_mode_stack()
    )


def layers_of(model, *inputs):
    """Return the layer name of every operation of a forward pass, None for float32."""
    return [
        op.layer if op.precision is not None else None
        for op in reported_operations(model, *inputs)
    ]


def stored(model):
    """Return the model after saving and loading it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "the model": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": stored,
}


# --- whose operation it is --------------------------------------------------------------------------------------------


class Past(nn.Module):
    """Module that uses a child's weight without calling the child, as Swin's attention does."""

    def __init__(self, in_list):
        super().__init__()
        self.in_list, self.first = in_list, nn.Linear(4, 4)
        self.inner = nn.ModuleList([nn.Linear(4, 4)]) if in_list else nn.Linear(4, 4)

    def forward(self, x):
        inner = self.inner[0] if self.in_list else self.inner
        return F.linear(self.first(x), inner.weight, inner.bias)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(("in_list", "name"), [(False, "1.inner"), (True, "1.inner.0")])
def test_interception_assigns_parent_matmul_to_weight_owner(in_list, name, copied):
    torch.manual_seed(0)
    model, x = (
        COPIES[copied](quantize_(nn.Sequential(nn.Linear(4, 4), Past(in_list)))),
        torch.randn(8, 4),
    )
    layer = model.get_submodule(name)
    with precision(model, 2):
        y = model[1](x)
        expected = F.linear(
            quantize(model[1].first(x), 2, "linear_input"),
            quantize(layer.weight, 2, "linear_weight"),
            quantize(layer.bias, 2, "bias"),
        )
        assert torch.equal(y, expected)
        assert layers_of(model, x) == ["0", "1.first", name]
    assert layer.precision.running_input[2] > 0
    restore_(model)(x)


class Own(nn.Module):
    """Module that multiplies by its parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.w


def two(forward, **parts):
    return FunctionModule(
        forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4), **parts
    )


def tie(model):
    model.second.weight = model.first.weight
    return model


def in_a_hook(model):
    model.first.register_forward_hook(lambda m, args, y: y @ m.weight)
    return model


FOREIGN = nn.Parameter(torch.randn(4, 4))
OWNERS = {  # what -> model, the layers of its operations
    "tied weights": (
        lambda: tie(two(lambda m, x: m.second(m.first(x)))),
        ["first", "second"],
    ),
    "tied weight, transposed": (
        lambda: two(lambda m, x: m.first(x) @ m.first.weight),
        ["first", "first"],
    ),
    "slice of a weight": (
        lambda: two(lambda m, x: F.linear(x, m.second.weight[:2])),
        ["second"],
    ),
    "shared module": (
        lambda: two(lambda m, x: m.first(m.first(x))),
        ["first", "first"],
    ),
    "activations": (lambda: two(lambda m, x: m.first(x) @ x.mT), ["first", ""]),
    "computed weight": (
        lambda: two(lambda m, x: F.linear(x, 2 * m.first.weight)),
        [""],
    ),
    "weight of nobody": (lambda: two(lambda m, x: F.linear(x, FOREIGN)), [""]),
    "list of parameters": (
        lambda: FunctionModule(
            lambda m, x: x @ m.held[0], held=nn.ParameterList([torch.ones(4, 4)])
        ),
        [""],
    ),
    "container of a weight": (
        lambda: FunctionModule(lambda m, x: x @ m.part.w, part=nn.Module()),
        ["part"],
    ),
    "forward called directly": (
        lambda: two(lambda m, x: m.first.forward(x)),
        ["first"],
    ),
    "hook of a user": (
        lambda: in_a_hook(two(lambda m, x: m.first(x))),
        ["first", "first"],
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [""]),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
        [""],
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)).eval(), [""]),
}


@pytest.mark.parametrize("name", OWNERS)
def test_interception_assigns_operation_to_weight_owner(name):
    make, expected = OWNERS[name]
    model = make()
    if name == "container of a weight":
        model.part.w = nn.Parameter(torch.randn(4, 4))
    quantize_(model)
    with precision(model, 4):
        found = layers_of(model, torch.randn(3, 4))
        assert layers_of(copy.deepcopy(model), torch.randn(3, 4)) == found
    in_float32 = [layer for layer in found if layer is None]  # what computes a weight
    assert [*in_float32, *expected] == found
    assert not in_float32 or parametrize.is_parametrized(model)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(
    ("left_out", "layers"), [("first", [None, "inner"]), ("inner", ["first", None])]
)
def test_interception_keeps_excluded_modules_in_float32(left_out, layers, copied):
    """Keep an excluded module in float32 even if a quantised parent uses its weight."""
    model, x = (
        COPIES[copied](quantize_(Past(False), QuantConfig(float32=(left_out,)))),
        torch.randn(5, 4),
    )
    with precision(model, 2):
        assert layers_of(model, x) == layers
        layer = model.get_submodule(left_out)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_functional_call_equals_module_call():
    model, x = (
        quantize_(two(lambda m, x: m.own(m.first(x)) @ m.second.weight, own=Own())),
        torch.randn(3, 4),
    )
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with precision(model, 3, 8):
        expected, layers = model(x), layers_of(model, x)
        assert torch.equal(torch.func.functional_call(model, values, (x,)), expected)
        around = FunctionModule(
            lambda m, x: torch.func.functional_call(m.model, values, (x,)), model=model
        )
        assert layers_of(around, x) == layers == ["first", "own", "second"]


def test_interception_runs_later_added_module_in_float32():
    model = quantize_(
        FunctionModule(lambda m, x: m.late(m.first(x)), first=nn.Linear(4, 4))
    )
    model.late = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with precision(model, 2):
        y = model(x)
    assert y.isfinite().all()


class Listed(nn.Module):
    """Module that multiplies by weights of a ParameterList."""

    def __init__(self):
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), nn.ParameterList([torch.randn(4, 4)])

    def forward(self, x):
        return self.layer(x).relu() @ self.held[0]


GRAPHS = {
    "plain": lambda model: model,
    "fx": fx.symbolic_trace,
    "export": lambda model: torch.export.export(model, (torch.ones(8, 4),)).module(),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_interception_quantizes_graph_modules(graph):
    plain, x = Listed(), torch.randn(8, 4)
    model = quantize_(GRAPHS[graph](copy.deepcopy(plain)))
    copied = copy.deepcopy(model)
    with precision(model, 3), precision(copied, 3):
        assert torch.equal(copied(x), model(x))
        assert not torch.equal(model(x), plain(x))
        assert None not in layers_of(model, x)
    assert torch.equal(restore_(copied)(x), plain(x))


def test_copied_submodule_does_not_hold_the_model():
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(1000, 1000)))
    with precision(model, 4):
        model[0](torch.randn(2, 4))
        assert len(pickle.dumps(model[0])) < 1e5
    copied = copy.deepcopy(model[0])
    with precision(copied, 2):
        assert layers_of(copied, torch.randn(2, 4)) == ["0"]
        assert mode_of(copied) is not mode_of(model)


def test_interception_frees_parameters_made_in_forward():
    seen = []

    def forward(m, x):
        made = nn.Parameter(torch.randn(4, 4))
        seen.append(weakref.ref(made))
        return F.linear(x, made)

    model = quantize_(two(forward))
    with precision(model, 4):
        model(torch.randn(2, 4)).sum()
    gc.collect()
    assert seen[0]() is None


# --- when the mode is on ----------------------------------------------------------------------------------------------


class Stopped(nn.Module):
    """Module that calls a function between two layers."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def unchanged(model, x):
    return x


def raising(error):
    def between(model, x):
        raise error

    return between


@pytest.mark.parametrize(
    "error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit]
)
def test_interception_ends_after_failed_forward(error):
    model, x = quantize_(nn.Sequential(Stopped(raising(error)))), torch.randn(2, 4)
    cell = nn.GRUCell(4, 4)
    expected = cell(x)
    with precision(model, 4), pytest.raises(error):
        model(x)
    with precision(model, 4):
        assert torch.equal(cell(x), expected)
    w = nn.Parameter(torch.randn(4, 4))
    assert torch.equal(
        F.linear(x, w), x @ w.detach().T
    )  # after an interrupt the mode is on, and idle
    model[0].between = unchanged
    with precision(model, 4):
        assert layers_of(model, x) == ["0.first", "0.last"]
    assert modes_on() == 0
    assert not mode_of(model).running.stack


def test_interception_ends_after_interrupts_of_two_models():
    models, x = (
        [quantize_(Stopped(raising(KeyboardInterrupt))) for _ in range(2)],
        torch.ones(2, 4),
    )
    for model in models:
        with precision(model, 4), pytest.raises(KeyboardInterrupt):
            model(x)
    for model in models:
        model.between = unchanged
        with precision(model, 4):
            model(x)
    assert modes_on() == 0


def test_interception_interrupt_keeps_user_modes():
    model, x = quantize_(Stopped(raising(KeyboardInterrupt))), torch.ones(2, 4)
    with precision(model, 4):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.between = unchanged
        with torch.device("meta"):
            model(x)
            assert modes_on() == 0
            assert torch.empty(1).is_meta


def test_interception_survives_interrupt_caught_by_parent():
    def caught(m, x):
        with pytest.raises(KeyboardInterrupt):
            m.part(x)
        return m.first(x) @ x.mT

    part = Stopped(raising(KeyboardInterrupt))
    model = quantize_(FunctionModule(caught, part=part, first=nn.Linear(4, 4)))
    with precision(model, 4):
        assert layers_of(model, torch.randn(2, 4)) == ["part.first", "first", ""]
    assert modes_on() == 0


def test_interception_ends_after_failing_user_hook():
    model, x = quantize_(Stopped(unchanged)), torch.randn(2, 4)
    handles = [
        model.last.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True),
        model.last.register_forward_hook(lambda *_: 1 / 0),
    ]
    with precision(model, 4):
        for handle in handles:
            with pytest.raises(ZeroDivisionError):
                model(x)
            handle.remove()
            assert modes_on() == 0
        assert layers_of(model, x) == ["first", "last"]


def test_interception_of_nested_converted_models():
    inner = quantize_(Stopped(unchanged))
    seen = []

    def run(m, x):
        y = inner(x)
        seen.append(modes_on())
        return y @ y.mT

    outer = quantize_(FunctionModule(run, first=nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    with precision(inner, 4), precision(outer, 4):
        assert layers_of(outer, x) == [""]
        assert layers_of(inner, x) == ["first", "last"]
    assert seen == [1]
    assert modes_on() == 0


def test_interception_of_recursive_model():
    def forward(m, x, depth=2):
        y = m.first(x)
        return m(y, depth - 1) @ y.mT if depth else y

    model = quantize_(
        FunctionModule(
            lambda m, x, depth=2: forward(m, x, depth), first=nn.Linear(4, 4)
        )
    )
    with precision(model, 4):
        assert layers_of(model, torch.randn(4, 4)) == ["first"] * 3 + ["", ""]
    assert modes_on() == 0


def test_interception_ends_between_generator_steps():
    def parts(m, x):
        yield m.first(x)
        yield m.second(x)

    model, x = quantize_(two(lambda m, x: parts(m, x))), torch.randn(2, 4)
    with precision(model, 4):
        generator = model(x)
        next(generator)
        assert modes_on() == 0
        next(generator)
        generator.close()
        assert modes_on() == 0


def test_interception_of_concurrent_threads():
    meeting = threading.Barrier(3, timeout=60)

    def between(model, x):
        meeting.wait()
        return x @ x.mT @ x

    model, inputs = quantize_(Stopped(between)).eval(), torch.randn(3, 5, 4)

    def run(x):
        with torch.no_grad():
            y = model(x)
        return y, modes_on()

    with precision(model, 3):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(run, inputs))
        meeting = threading.Barrier(1)
        for x, (y, modes) in zip(inputs, found, strict=True):
            assert torch.equal(run(x)[0], y)
            assert modes == 0


def test_interception_of_data_parallel_replicas():
    model, x = quantize_(nn.Linear(4, 4)), torch.randn(3, 4)
    with precision(model, 3):
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = (
            model.weight.detach().clone(),
            model.bias.detach().clone(),
        )
        replica._former_parameters = {
            "weight": replica.weight,
            "bias": replica.bias,
        }  # as ``DataParallel`` does
        replica._modules["precision"] = model.precision._replicate_for_data_parallel()
        vars(replica.precision).update(
            {name: x.clone() for name, x in model.precision.ranges().items()}
        )
        assert torch.equal(replica(x), model(x))
        assert float(replica.precision.running_input[2]) > 0


def test_interception_keeps_user_torch_function_modes():
    def forward(m, x):
        with torch.device("cpu"):
            return m.second(m.first(x)) + torch.zeros(4)

    model, x = quantize_(two(forward)), torch.randn(2, 4)
    with precision(model, 4), torch.device("meta"):
        assert model(x).device.type == "cpu"
        assert torch.empty(1).is_meta
        assert modes_on() == 0


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning",
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
)
def test_traced_and_exported_programs_equal_the_model():
    model, x = (
        quantize_(two(lambda m, x: m.second(m.first(x) @ x.mT @ x))).eval(),
        torch.randn(3, 4),
    )
    with precision(model, 4), torch.no_grad():
        expected = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
        assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), expected)
        assert torch.equal(
            torch.export.export(model, (x,), strict=False).module()(x), expected
        )
        assert model.to("meta")(x.to("meta")).is_meta
    assert modes_on() == 0


# --- checkpoints and graphs -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, optionally with a checkpointed function."""

    def __init__(self, fused=False):
        super().__init__()
        self.qkv, self.out, self.fused, self.how = (
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            fused,
            HOW["none"],
        )

    def attend(self, q, k, v):
        return (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else (q @ k.mT).softmax(-1) @ v
        )

    def forward(self, x):
        return self.out(self.how(self.attend, *self.qkv(x).chunk(3, -1)))


HOW = {"none": lambda run, *xs: run(*xs), "own": ForeignCheckpoint.apply}
HOW |= {f"torch's, {r}": partial(checkpoint, use_reentrant=r) for r in (False, True)}
HOW["torch's, True in False"] = lambda run, *xs: HOW["torch's, False"](
    partial(HOW["torch's, True"], run), *xs
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", [*HOW][1:])
def test_checkpointed_function_is_quantized_on_recomputation(fused, how):
    model, x = quantize_(Attention(fused)), torch.randn(2, 5, 8)
    found = []
    for way in ("none", how, how):
        model.how = HOW[way]
        model.zero_grad()
        with precision(model, 3, 32):
            y = model(x)
            y.square().sum().backward()
        found.append((y.detach(), model.qkv.weight.grad))
    for y, gradient in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(gradient, found[0][1])
    assert modes_on() == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpointed_module_equals_plain_module(whole, reentrant):
    model, x, found = (
        quantize_(nn.Sequential(Attention(), Attention())),
        torch.randn(2, 5, 8, requires_grad=True),
        [],
    )
    first, second = (model, nn.Identity()) if whole else model
    for run in (
        lambda module, x: module(x),
        partial(checkpoint, use_reentrant=reentrant),
    ):
        with precision(model, 3, 32):
            y = run(second, run(first, x))
            y.square().sum().backward()
        ranges = [x.clone() for x in running_ranges(model)]
        found.append((y.detach(), x.grad, *ranges))
        x.grad = None
        for running in running_ranges(model):
            running.zero_()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert modes_on() == 0


class Keeps(torch.autograd.Function):
    """Autograd function that calls a saved function in its backward pass, without a checkpoint."""

    @staticmethod
    def forward(ctx, x, w, back):
        ctx.back = back
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        assert ctx.back is torch.matmul
        return ctx.back(gradient, w.t()), ctx.back(x.t(), gradient), None


def test_interception_ignores_functions_saved_for_backward():
    model = quantize_(
        FunctionModule(
            lambda m, x: Keeps.apply(x, m.w, torch.matmul),
            w=nn.Parameter(torch.randn(4, 4)),
        )
    )
    x = torch.randn(3, 4, requires_grad=True)
    with precision(model, 2, 8):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4) @ model.w.t())


# --- compiled code ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a parameter, optionally with a graph break."""

    def __init__(self, breaks):
        super().__init__()
        self.qkv, self.w, self.breaks = (
            nn.Linear(8, 24),
            nn.Parameter(torch.randn(8, 8)),
            breaks,
        )

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.layer_norm((q @ k.mT).softmax(-1) @ v @ self.w, (8,))


class Blocks(nn.Module):
    """Two blocks, a matmul of activations, and one with a child's weight."""

    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(breaks), Block(breaks)

    def forward(self, x):
        y = self.second(self.first(x))
        return F.linear(y @ y.mT @ x, self.second.qkv.weight)


def step(model, run, size, bits):
    """Return the output, the gradients and the layer state of a step."""
    torch.manual_seed(size)
    x = torch.randn(2, size, 8, requires_grad=True)
    model.zero_grad()
    with precision(model, bits, 4):
        y = run(x)
        y.cos().sum().backward()
    states = (
        value
        for p in layer_precisions(model).values()
        for value in p.get_running().values()
    )
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *states]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "what", ["model", "child", "model with breaks", "child with breaks"]
)
def test_compiled_code_is_quantized_once(what, backend):
    """Quantise once, although the interception mode stays on in compiled code inside eager modules."""
    torch._dynamo.reset()
    eager, model = (quantize_(Blocks("breaks" in what)) for _ in range(2))
    if "child" in what:
        model.first.compile(backend=backend)
        run = model
    else:
        run = torch.compile(model, backend=backend, fullgraph=what == "model")
    for bits in (3, 5, 8):
        expected, found = step(eager, eager, 5, bits), step(model, run, 5, bits)
        assert identical(found, expected)
    assert modes_on() == 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_model_has_one_graph_for_bits():
    torch._dynamo.reset()
    eager, model = quantize_(Blocks()), quantize_(Blocks())
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert identical(step(model, run, 5, 3), step(eager, eager, 5, 3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for bits in (3, 8, 2):
            expected, found = step(eager, eager, 5, bits), step(model, run, 5, bits)
            assert identical(found, expected)
    torch._dynamo.reset()
