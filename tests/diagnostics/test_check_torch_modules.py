"""``check`` on every module of torch.nn: no crash, and executed operations equal priced ones."""

import inspect

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

# class -> (its arguments, shapes of its inputs); what a loss, an index or a mask is, is made below
GIVEN = {
    **{f"Conv{n}d": ((4, 6, 3), [(2, 4, *(5,) * n)]) for n in (1, 2, 3)},
    **{f"LazyConv{n}d": ((6, 3), [(2, 4, *(5,) * n)]) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": ((4, 6, 3, 2), [(2, 4, *(5,) * n)]) for n in (1, 2, 3)},
    **{f"LazyConvTranspose{n}d": ((6, 3), [(2, 4, *(5,) * n)]) for n in (1, 2, 3)},
    "Linear": ((4, 6), [(3, 4)]),
    "LazyLinear": ((6,), [(3, 4)]),
    "Bilinear": ((4, 5, 6), [(3, 4), (3, 5)]),
    **dict.fromkeys(("RNN", "LSTM", "GRU"), ((4, 6, 2), [(5, 3, 4)])),
    **dict.fromkeys(("RNNCell", "LSTMCell", "GRUCell"), ((4, 6), [(3, 4)])),
    "MultiheadAttention": ((4, 2), [(5, 3, 4)] * 3),
    "Transformer": ((4, 2, 1, 1, 6), [(5, 3, 4), (6, 3, 4)]),
    "TransformerEncoderLayer": ((4, 2, 6), [(5, 3, 4)]),
    "TransformerDecoderLayer": ((4, 2, 6), [(5, 3, 4), (6, 3, 4)]),
    "TransformerEncoder": ((nn.TransformerEncoderLayer(4, 2, 6), 2), [(5, 3, 4)]),
    "TransformerDecoder": (
        (nn.TransformerDecoderLayer(4, 2, 6), 2),
        [(5, 3, 4), (6, 3, 4)],
    ),
    "PairwiseDistance": ((), [(3, 4), (3, 4)]),
    "CosineSimilarity": ((), [(3, 4), (3, 4)]),
    "CircularPad3d": ((1,), [(2, 4, 3, 3, 3)]),
    "LinearCrossEntropyLoss": None,  # not tried
}


class Around(nn.Module):
    """Module between two layers, so that its input needs a gradient."""

    def __init__(self, module, width):
        super().__init__()
        self.first, self.module, self.last = (
            nn.Linear(width, width),
            module,
            nn.LazyLinear(2),
        )

    def forward(self, x, *others):
        y = self.module(self.first(x) if x.is_floating_point() else x, *others)
        while not isinstance(y, torch.Tensor):
            y = y[0]
        return self.last(y.reshape(len(y), -1) if y.dim() else y.reshape(1, 1))


def beside(m, *inputs):
    """Run several models, each on its inputs."""
    return [model(*given) for model, given in zip(m.each.values(), inputs, strict=True)]


def modules():
    """Yield every class of torch.nn with the arguments and shapes of ``GIVEN``, or a few shapes."""
    for name, kind in vars(nn).items():
        if (
            not (inspect.isclass(kind) and issubclass(kind, nn.Module))
            or GIVEN.get(name, ()) is None
        ):
            continue
        for arguments, shapes in [GIVEN[name]] if name in GIVEN else tried():
            try:
                model, inputs = (
                    kind(*arguments),
                    [torch.rand(shape) for shape in shapes],
                )
                y = Around(model, shapes[0][-1])
                y(*inputs)
            except (
                TypeError,
                ValueError,
                RuntimeError,
                IndexError,
                AssertionError,
            ):  # not called like this
                continue
            yield name, y, tuple(inputs)
            break
        else:
            assert name not in GIVEN, name


def tried():
    for arguments in ((), (2,), (4,), (2, 4), (1, 4)):
        for shapes in (
            [(4, 4)],
            [(2, 4, 4, 4)],
            [(2, 4, 4, 4, 4)],
            [(4, 4, 4)],
            [(4, 4)] * 2,
            [(4, 4)] * 3,
        ):
            yield arguments, shapes


def test_check_handles_every_torch_module():
    torch.manual_seed(0)
    tested = {name: (model, inputs) for name, model, inputs in modules()}
    assert len(tested) > 100
    products = set()
    # the gradients of torch's product of three factors have nothing in common, and take more than is priced
    for group in (
        {"Bilinear"},
        GIVEN.keys() - {"Bilinear"},
        tested.keys() - GIVEN.keys(),
    ):
        models = {name: model for name, (model, _) in tested.items() if name in group}
        found = check(
            quantize_(FunctionModule(beside, each=nn.ModuleDict(models))),
            tuple(tested[name][1] for name in models),
            invariances=False,
        )
        assert found.ok, str(found)
        layers = [e.layer.split(".") for e in found.operations if not e.backward]
        products |= {name for _, name, part, *_ in layers if part == "module"}
    without = {
        "PairwiseDistance",
        "CosineSimilarity",
        "CircularPad3d",
        "LinearCrossEntropyLoss",
    }
    assert products == GIVEN.keys() - without
