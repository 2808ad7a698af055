import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cpt_core
from cpt_core.checks import check_bits
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.backend import reference
from cpt_core.kernels.operators import range_of
from cpt_core.kernels.reference import GRANULARITIES
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.fake_quantize import levels_of, quantize, quantize_gradient
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.quantizers import QUANTIZERS
from cpt_core.quantization.scheduler import precision

EVERY = sorted(GRANULARITIES)
STOCHASTIC = Quantizer("per_tensor", rounding="stochastic")


def image(dtype=torch.float32, seed=0):
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(upstream, bits=3, quantizer="conv_grad", seed=0):
    x = torch.zeros_like(upstream, requires_grad=True)
    kind = QUANTIZERS.get(quantizer, quantizer) if isinstance(quantizer, str) else quantizer
    levels = torch.tensor(levels_of(bits), dtype=torch.float32, device=upstream.device)
    quantize_gradient(x, levels, kind, torch.tensor(seed, device=upstream.device)).backward(upstream)
    return x.grad


# --- edges of the grid ----------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", EVERY)
@pytest.mark.parametrize("value", [0.0, 0.1, -3e-9, 7e30])
@pytest.mark.parametrize("bits", [1, 4])
def test_constant_tensors_come_back(granularity, value, bits):
    x = torch.full((3, 4, 2), value)
    assert torch.equal(quantize(x, bits, Quantizer(granularity)), x)
    assert torch.equal(gradient_of(x, bits, Quantizer(granularity, rounding="stochastic")), x)


@pytest.mark.parametrize("granularity", EVERY)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4, 4)])
def test_empty_tensors_come_back(granularity, shape):
    x = torch.empty(shape, requires_grad=True)
    y = quantize(x, 4, Quantizer(granularity))
    assert y.shape == x.shape
    assert gradient_of(x.detach(), 4, Quantizer(granularity, rounding="stochastic")).shape == x.shape


def test_ties_go_to_the_even_level():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 7.0])
    assert quantize(x, 3, "bias").tolist() == [0, 0, 2, 2, 4, 7]


def test_23_bits_still_round():
    y = quantize(image(), 23)
    assert torch.allclose(y, image(), rtol=0, atol=1e-6)
    assert not torch.equal(y, image())


def test_tiny_ranges_have_a_least_step():
    x = torch.tensor([0.0, 0.4e-8, 0.6e-8, 2.1e-8])
    assert torch.allclose(quantize(x, 8, "bias"), torch.tensor([0.0, 0.0, 1e-8, 2e-8]), rtol=1e-6, atol=0)
    upstream = torch.tensor([1e-9, 2e-9, 4e-9])
    nearest = Quantizer("per_tensor")
    assert torch.equal(gradient_of(upstream, 8, nearest), torch.full((3,), 1e-9))  # a bias, not a zero


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("granularity", EVERY)
def test_what_is_not_finite_propagates(bad, granularity, device):
    x = image().to(device)
    x[1, 2, 3, 0] = bad
    assert not quantize(x, 4, Quantizer(granularity))[1, 2, 3, 0].isfinite()
    for rounding in ("nearest", "stochastic"):
        found = gradient_of(x, 4, Quantizer(granularity, rounding=rounding))
        assert not found[1, 2, 3, 0].isfinite()


def test_what_is_not_finite_stays_in_its_channel():
    x = image()
    x[0, 0, 0, 0] = math.inf
    y = quantize(x, 4, "conv_weight")
    assert not y[0].isfinite().any()
    assert torch.equal(y[1], quantize(x[1:], 4, "conv_weight")[0])


# --- dtypes and memory formats --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("granularity", EVERY)
def test_other_dtypes_are_computed_in_float32(dtype, granularity, device):
    x = image(dtype).to(device)
    y = quantize(x, 8, Quantizer(granularity))
    assert y.dtype == dtype
    low, width = range_of(x, granularity)
    assert low.dtype == width.dtype == torch.float32
    assert torch.equal(y, quantize(x.float(), 8, Quantizer(granularity)).to(dtype))
    upstream = gradient_of(x, 8, Quantizer(granularity))
    assert upstream.dtype == dtype
    assert torch.equal(upstream, y)


def test_half_precision_extremes_do_not_overflow():
    x = torch.tensor([-65504.0, 1.0, 65504.0], dtype=torch.float16)
    assert torch.equal(quantize(x, 8, "bias")[[0, 2]], x[[0, 2]])


FORMATS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "sliced": lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "one pixel": lambda x: x[:, :, :1, :1],
}


@pytest.mark.parametrize("layout", list(FORMATS))
@pytest.mark.parametrize("granularity", EVERY)
def test_memory_formats_give_the_same_values(layout, granularity, device):
    x = FORMATS[layout](image().to(device))
    plain = x.clone(memory_format=torch.contiguous_format)
    y = quantize(x, 3, Quantizer(granularity))
    assert torch.equal(y, quantize(plain, 3, Quantizer(granularity)))
    if layout == "channels_last":
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert gradient_of(x, 3).is_contiguous(memory_format=torch.channels_last)
    nearest = Quantizer(granularity)
    assert torch.equal(gradient_of(x, 3, nearest), gradient_of(plain, 3, nearest))
    assert torch.equal(x, FORMATS[layout](image().to(device)))  # not changed


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_stochastic_rounding_differs_from_call_to_call_and_repeats_from_a_state(layout):
    upstream, key = FORMATS.get(layout, torch.clone)(image()), torch.tensor(4)

    def draw():
        x = torch.zeros_like(upstream, requires_grad=True)
        quantize_gradient(x, torch.tensor(3.0), STOCHASTIC, key).backward(upstream)
        return x.grad

    first, second = draw(), draw()
    assert not torch.equal(first, second)
    assert key == 6
    key.fill_(4)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)


@pytest.mark.parametrize("bits", [2, 8, 16, 20])
def test_no_noise_moves_the_ends_of_the_range(bits):
    x = torch.tensor([-1.0, 1.0]).repeat_interleave(2500)
    for seed in range(40):  # the largest of 100,000 numbers is 0.49999
        found = gradient_of(x, bits, STOCHASTIC, seed)
        assert torch.equal(found[:2500], x[:2500])
        assert found.max() <= 1 + 2.0**-22
        if bits <= 8:  # more steps are rounded so that the last of the noise counts
            assert (found[2500:] - 1).abs().le(2.0**-22).float().mean() > 0.999


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("bits", [2, 24])
def test_what_has_no_fractions_or_no_order_is_refused(dtype, bits):
    x = torch.ones(2, 3, 4, dtype=dtype)
    lstm = quantize_(nn.LSTM(4, 3))
    lstm.precision.set_bits(4, 8)
    message = f"only floating tensors can be quantised, got {dtype}"
    for call in (
        lambda: quantize(x, bits),
        lambda: quantize(x[:0], bits),
        lambda: running_layer().operand("input", x),
        lambda: lstm(x),
        lambda: lstm(torch.ones(2, 3, 4), (torch.zeros(1, 3, 3, dtype=dtype),) * 2),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("bits", [8, 8.0, np.int64(8), np.float64(8), torch.tensor(8)])
def test_whole_numbers_of_any_kind_are_bits(bits):
    found = check_bits("bits", bits)
    assert found == 8
    assert type(found) is int


def test_unknown_names_list_the_choices():
    with pytest.raises(
        ValueError, match=f"unknown quantizer 'weight'; the nearest of {len(QUANTIZERS)} are lstm_weight, "
    ):
        quantize(image(), 4, "weight")
    with pytest.raises(ValueError, match="unknown rounding 'up'; choose from nearest, stochastic"):
        Quantizer("per_row", rounding="up")
    for name, choices in {"running_start": "corrected, zero", "execution": "simulated, integer, auto"}.items():
        with pytest.raises(ValueError, match=f"unknown {name} 'one'; choose from {choices}"):
            QuantConfig(**{name: "one"})


@pytest.mark.parametrize("granularity", sorted(set(EVERY) - {"per_tensor"}))
def test_running_ranges_are_those_of_whole_tensors(granularity):
    with pytest.raises(ValueError, match="needs granularity 'per_tensor'"):
        Quantizer(granularity, running=True)


# --- running ranges -------------------------------------------------------------------------------


def running_layer(start="corrected"):
    layer = LayerPrecision({"input": Quantizer("per_tensor", running=True)}, running_start=start)
    layer.set_bits(4, 8)
    return layer


def expected_range(batches, corrected):
    low = width = weight = 0.0
    for x in batches:
        low = 0.9 * low + 0.1 * x.min().item()
        width = 0.9 * width + 0.1 * (x.max() - x.min()).item()
        weight = 0.9 * weight + 0.1
    return (low / weight, width / weight) if corrected else (low, width)


@pytest.mark.parametrize("start", ["corrected", "zero"])
def test_evaluation_uses_the_running_range_and_clips(start):
    layer = running_layer(start)
    batches = [image(seed=s) for s in range(3)]
    for x in batches:
        assert torch.equal(layer.operand("input", x), quantize(x, 4, "conv_input"))
    layer.eval()
    low, width = expected_range(batches, start == "corrected")
    x = image(seed=9) * 3
    levels = np.clip(np.rint((x.numpy() - low) / (width / 15)), 0, 15)
    np.testing.assert_allclose(layer.operand("input", x).numpy(), levels * width / 15 + low, atol=1e-5)
    before = layer.running_input.clone()
    layer.operand("input", x * 100)
    assert torch.equal(layer.running_input, before)  # evaluation does not move it


def test_evaluation_before_any_training():
    x = image()
    layer = running_layer().eval()
    assert torch.equal(layer.operand("input", x), quantize(x, 4, "conv_input"))
    assert layer.running_input.count_nonzero() == 0
    layer = running_layer("zero").eval()
    assert layer.operand("input", x).abs().max() < 15 * 1.01e-8  # the authors' rule: everything collapses


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("good_first", [True, False])
def test_what_is_not_finite_never_enters_the_running_range(bad, good_first):
    layer, x = running_layer(), image()
    poisoned = x.clone()
    poisoned[0, 0, 0, 0] = bad
    if good_first:
        layer.operand("input", x)
    before = layer.running_input.clone()
    assert not layer.operand("input", poisoned).isfinite().all()
    assert torch.equal(layer.running_input, before)
    layer.eval()
    torch.testing.assert_close(layer.operand("input", x), quantize(x, 4, "conv_input"))
    assert layer.operand("input", poisoned * math.nan).isnan().all()


def files_entered(call):
    """The files of cpt_core whose functions run."""
    root, found = Path(cpt_core.__file__).parent, set()

    def seen(frame, event, _):
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(root):
            found.add(path.relative_to(root).as_posix())

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_rounding_is_walked_in_four_files():
    """What a reader of the method holds at once: a weight on its way to its grid, in plain torch."""
    layer = quantize_(nn.Linear(4, 3))
    with reference(), precision(layer, 4):
        own = layer.precision.operand("weight", layer.weight)
        entered = files_entered(lambda: layer.precision.operand("weight", layer.weight))
    assert own.unique().numel() > 3
    kernels = {f"kernels/{name}.py" for name in ("operators", "grids", "reference")}
    assert entered == {"quantization/precision.py", *kernels}
