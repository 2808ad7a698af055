"""Parents that use a child's weight, models traced by torch.fx, and arguments passed by keyword."""

import copy

import pytest
import torch
from helpers import normal, refused, reported_operations
from torch import nn
from torch.nn import functional
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions

# --- weights that a parent uses -------------------------------------------------------------------


def swin(block=SwinTransformerBlock, **how):
    torch.manual_seed(0)
    return SwinTransformer(
        [4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=5, block=block, **how
    )


class UsesWeight(nn.Module):
    """Module that multiplies by the weight of a child it never calls."""

    def __init__(self, child, product):
        super().__init__()
        self.child, self.product, self.out = child, product, nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.product(x, self.child.weight))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


CHILDREN = {  # model, shape of its inputs, end of the names that are selected, number of operations
    "Swin": (swin, (1, 3, 32, 32), "attn.qkv", 2),
    "Swin v2": (
        lambda: swin(SwinTransformerBlockV2, downsample_layer=PatchMergingV2),
        (1, 3, 32, 32),
        "attn.proj",
        2,
    ),
    "multi-head attention": (Attends, (2, 3, 8), "out_proj", 1),
    "linear": (
        lambda: UsesWeight(nn.Linear(8, 8), functional.linear),
        (3, 8),
        "child",
        1,
    ),
    "matmul": (
        lambda: UsesWeight(nn.Linear(8, 8), lambda x, w: x @ w.t()),
        (3, 8),
        "child",
        1,
    ),
    "convolution": (
        lambda: UsesWeight(nn.Conv1d(2, 2, 1), functional.conv1d),
        (3, 2, 8),
        "child",
        1,
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(CHILDREN))
def test_quantize_filter_selects_children_used_by_parent(name, training):
    make, shape, selected, count = CHILDREN[name]
    model, x = make().train(training), normal(*shape)
    plain = copy.deepcopy(model)
    cpt.quantize_(model, filter_fn=lambda module, path: path.endswith(selected))
    names = list(layer_precisions(model))
    assert len(names) == count
    with cpt.precision(model.train(), 2):
        torch.manual_seed(1)
        model(x)
    model.train(training)
    with cpt.precision(model, 2), torch.no_grad():
        torch.manual_seed(1)
        quantized = [
            operation
            for operation in reported_operations(model, x)
            if operation.precision is not None
        ]
        torch.manual_seed(1)
        y = model(x)
    assert [operation.layer for operation in quantized] == names
    torch.manual_seed(1)
    assert not torch.allclose(plain(x), y, atol=1e-4)
    found = cpt.check(model, (x,))
    assert {e.layer for e in found.operations if e.quantized and not e.backward} == set(
        names
    )
    plan = cpt.count_bitops(model, (x,), cpt.StaticSchedule(2, total_steps=1), q_grad=2)
    in_float32 = cpt.count_bitops(
        model, (x,), cpt.StaticSchedule(32, total_steps=1), q_grad=32
    )
    macs = sum(operation.macs for operation in quantized)
    assert in_float32.total - plan.total == pytest.approx(
        3 * macs * (1 - 4 / 1024), rel=0.35
    )


class Normalised(nn.Module):
    """Module that multiplies by a weight computed from a child's weight."""

    def __init__(self):
        super().__init__()
        self.head, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(functional.linear(x, functional.normalize(self.head.weight)))


def test_check_names_child_with_computed_float32_weight():
    model = cpt.quantize_(
        Normalised(), filter_fn=lambda module, path: isinstance(module, nn.Linear)
    )
    found = cpt.check(model, (normal(3, 8),))
    assert found.bypassed == ("head",)
    assert "listed as quantised, but used in float32: head" in str(found)
    assert cpt.check(cpt.quantize_(Normalised()), (normal(3, 8),)).bypassed == ()


# --- torch.fx -------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class First(nn.Module):
    """Module that returns the first element of a layer's output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y[0]


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.matmul(y, y.transpose(-1, -2))


TRACED = {  # model, shape of its inputs, and whether all of its products are those of layers of torch
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 8)), (3, 8), True),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3)), (2, 2, 8), True),
    "ConvTranspose1d": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3)),
        (2, 2, 8),
        True,
    ),
    "nested": (lambda: First(nn.Sequential(nn.Linear(8, 4))), (3, 8), True),
    "LSTM": (lambda: First(nn.LSTM(8, 4)), (3, 2, 8), True),
    "GRU": (lambda: First(nn.GRU(8, 4)), (3, 2, 8), True),
    "subclass": (lambda: nn.Sequential(Doubled(8, 8)), (3, 8), False),
    "code": (Scores, (2, 3, 8), False),
}


@pytest.mark.parametrize("name", list(TRACED))
def test_traced_before_conversion_runs_quantized(name):
    make, shape, _ = TRACED[name]
    torch.manual_seed(0)
    model, x = make(), normal(*shape)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    with cpt.precision(cpt.quantize_(model), 3):
        expected = model(x)
    with cpt.precision(cpt.quantize_(traced), 3):
        assert all(
            operation.precision is not None
            for operation in reported_operations(traced, x)
        )
        if name != "subclass":  # whose operation is that of the graph
            assert torch.equal(traced(x), expected)
    with cpt.precision(traced, "float"):
        assert not torch.allclose(traced(x), expected, atol=1e-3)


@pytest.mark.parametrize("name", list(TRACED))
def test_traced_after_conversion_runs_quantized_or_warns(name):
    make, shape, is_of_layers = TRACED[name]
    torch.manual_seed(0)
    model, x = cpt.quantize_(make()), normal(*shape)
    with cpt.precision(model, 3):
        expected, traced = model(x), torch.fx.symbolic_trace(model)
        if is_of_layers:
            with cpt.precision(traced, 3):
                assert torch.equal(traced(x), expected)
    if name == "subclass":  # nothing is left of it
        refused("the model has no quantised layers", cpt.precision(traced, 3).__enter__)
    elif not is_of_layers:
        with pytest.warns(
            cpt.QuantizationWarning, match="traced by torch.fx after quantize_"
        ):
            cpt.precision(traced, 3).__enter__()


@pytest.mark.parametrize("is_traced_first", [True, False])
def test_feature_extractor_runs_quantized(is_traced_first):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 1)),
        normal(2, 2, 8),
    )
    expected = copy.deepcopy(model)
    if not is_traced_first:
        cpt.quantize_(model)
    extractor = create_feature_extractor(model, ["1", "2"])
    if is_traced_first:
        cpt.quantize_(extractor)
    with cpt.precision(cpt.quantize_(expected), 3), cpt.precision(extractor, 3):
        assert torch.equal(extractor(x)["2"], expected(x))


# --- arguments by name ----------------------------------------------------------------------------

BY_NAME = {
    "Linear": (nn.Linear(4, 3), {"input": (2, 4)}),
    "Conv1d": (nn.Conv1d(2, 3, 3), {"input": (1, 2, 5)}),
    "Conv2d": (
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        {"input": (1, 2, 5, 5)},
    ),
    "Conv3d": (nn.Conv3d(2, 3, 3), {"input": (2, 5, 5, 5)}),
    "ConvTranspose1d": (nn.ConvTranspose1d(2, 3, 3), {"input": (1, 2, 5)}),
    "ConvTranspose2d": (nn.ConvTranspose2d(2, 3, 3), {"input": (1, 2, 5, 5)}),
    "ConvTranspose3d": (nn.ConvTranspose3d(2, 3, 3), {"input": (1, 2, 5, 5, 5)}),
    "Bilinear": (nn.Bilinear(4, 3, 5), {"input1": (2, 4), "input2": (2, 3)}),
    "RNN": (nn.RNN(4, 3), {"input": (2, 1, 4), "hx": (1, 1, 3)}),
    "LSTM": (nn.LSTM(4, 3), {"input": (2, 1, 4)}),
    "GRU": (nn.GRU(4, 3), {"input": (2, 1, 4), "hx": (1, 1, 3)}),
    "RNNCell": (nn.RNNCell(4, 3), {"input": (2, 4), "hx": (2, 3)}),
    "LSTMCell": (nn.LSTMCell(4, 3), {"input": (2, 4)}),
    "GRUCell": (nn.GRUCell(4, 3), {"input": (2, 4), "hx": (2, 3)}),
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2),
        {"query": (2, 1, 4), "key": (3, 1, 4), "value": (3, 1, 4)},
    ),
}


@pytest.mark.parametrize("name", list(BY_NAME))
def test_layers_accept_keyword_arguments(name):
    layer, shapes = BY_NAME[name]
    model = cpt.quantize_(nn.Sequential(copy.deepcopy(layer)))
    inputs = {argument: normal(*shape) for argument, shape in shapes.items()}
    with cpt.precision(model, 3):
        by_name = model[0](**inputs)
        by_position = model[0](*inputs.values())
    plain = layer(**inputs)
    torch.testing.assert_close(by_name, by_position, atol=0, rtol=0)
    first, expected = (y[0] if isinstance(y, tuple) else y for y in (by_name, plain))
    assert not torch.allclose(first, expected, atol=1e-3)
