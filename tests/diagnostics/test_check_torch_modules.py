"""``check`` on every module of torch.nn: no crash, executed equal priced operations."""

import inspect
import itertools

import pytest
import torch
from helpers import FunctionModule
from torch import nn

from cpt_core.quantization.convert import quantize_
from cpt_extras.diagnostics.check import check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]

DIMENSIONS = (1, 2, 3)
SEQUENCE, TARGETS = (5, 3, 4), (6, 3, 4)
ENCODER_LAYER = nn.TransformerEncoderLayer(4, 2, 6)
DECODER_LAYER = nn.TransformerDecoderLayer(4, 2, 6)
# class with a matmul -> arguments, shapes of inputs
WITH_MATMUL = {
    **{f"Conv{n}d": ((4, 6, 3), [(2, 4, *(5,) * n)]) for n in DIMENSIONS},
    **{f"LazyConv{n}d": ((6, 3), [(2, 4, *(5,) * n)]) for n in DIMENSIONS},
    **{f"ConvTranspose{n}d": ((4, 6, 3, 2), [(2, 4, *(5,) * n)]) for n in DIMENSIONS},
    **{f"LazyConvTranspose{n}d": ((6, 3), [(2, 4, *(5,) * n)]) for n in DIMENSIONS},
    "Linear": ((4, 6), [(3, 4)]),
    "LazyLinear": ((6,), [(3, 4)]),
    "Bilinear": ((4, 5, 6), [(3, 4), (3, 5)]),
    **dict.fromkeys(("RNN", "LSTM", "GRU"), ((4, 6, 2), [SEQUENCE])),
    **dict.fromkeys(("RNNCell", "LSTMCell", "GRUCell"), ((4, 6), [(3, 4)])),
    "MultiheadAttention": ((4, 2), [SEQUENCE] * 3),
    "Transformer": ((4, 2, 1, 1, 6), [SEQUENCE, TARGETS]),
    "TransformerEncoderLayer": ((4, 2, 6), [SEQUENCE]),
    "TransformerDecoderLayer": ((4, 2, 6), [SEQUENCE, TARGETS]),
    "TransformerEncoder": ((ENCODER_LAYER, 2), [SEQUENCE]),
    "TransformerDecoder": ((DECODER_LAYER, 2), [SEQUENCE, TARGETS]),
}
OTHERS = {
    "PairwiseDistance": ((), [(3, 4), (3, 4)]),
    "CosineSimilarity": ((), [(3, 4), (3, 4)]),
    "CircularPad3d": ((1,), [(2, 4, 3, 3, 3)]),
}
UNTESTED = {"LinearCrossEntropyLoss"}
# what all other classes are tried with, until a call succeeds
ARGUMENTS = [(), (2,), (4,), (2, 4), (1, 4)]
SHAPES = [[(4,) * 2], [(2, 4, 4, 4)], [(2, 4, 4, 4, 4)], [(4,) * 3]]
SHAPES += [[(4, 4)] * 2, [(4, 4)] * 3]


class Between(nn.Module):
    """Module between two layers, so that its input needs a gradient."""

    def __init__(self, module, width):
        super().__init__()
        self.first, self.module = nn.Linear(width, width), module
        self.last = nn.LazyLinear(2)

    def forward(self, x, *others):
        x = self.first(x) if x.is_floating_point() else x
        y = self.module(x, *others)
        while not isinstance(y, torch.Tensor):
            y = y[0]
        return self.last(y.reshape(len(y), -1) if y.dim() else y.reshape(1, 1))


def build(kind, arguments, shapes):
    """Return a model and inputs, or None if the class takes no such call."""
    try:
        inputs = tuple(torch.rand(shape) for shape in shapes)
        model = Between(kind(*arguments), shapes[0][-1])
        model(*inputs)
    except (TypeError, ValueError, RuntimeError, IndexError, AssertionError):
        return None
    return model, inputs


def build_every_module():
    """Return {name of a class of torch.nn: (model, inputs)}."""
    known, built = {**WITH_MATMUL, **OTHERS}, {}
    for name, kind in vars(nn).items():
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        calls = itertools.product(ARGUMENTS, SHAPES)
        for arguments, shapes in [known[name]] if name in known else calls:
            sample = build(kind, arguments, shapes)
            if sample is not None and name not in UNTESTED:
                built[name] = sample
                break
    return built


def run_all(m, *inputs):
    """Run several models, each on its inputs."""
    models = m.models.values()
    return [model(*xs) for model, xs in zip(models, inputs, strict=True)]


def test_check_handles_every_torch_module():
    torch.manual_seed(0)
    samples = build_every_module()
    assert len(samples) > 100
    assert samples.keys() >= WITH_MATMUL.keys() | OTHERS.keys()
    # the gradients of a bilinear map take more matmuls than are priced
    bilinear = {"Bilinear"}
    groups = [bilinear, WITH_MATMUL.keys() - bilinear, samples.keys() - WITH_MATMUL]
    with_matmul = set()
    for group in groups:
        names = [name for name in samples if name in group]
        models = nn.ModuleDict({name: samples[name][0] for name in names})
        model = quantize_(FunctionModule(run_all, models=models))
        inputs = tuple(samples[name][1] for name in names)
        report = check(model, inputs, invariances=False)
        assert report.ok, str(report)
        for operation in report.operations:
            _, name, part, *_ = operation.layer.split(".")
            if part == "module" and not operation.backward:
                with_matmul.add(name)
    assert with_matmul == WITH_MATMUL.keys()
