"""Int8 convolutions: input, weight and gradients are convolved as integers; the algebra is that of ``int8.matmul``.

With x = s (k - z) + r, a convolution is, at every position and for every output channel,

    s_a s_w sum (k_a - z_a)(k_w - z_w)  +  s_a r_w sum (k_a - z_a)  +  r_a sum w

summed over what a window contains of a. Padding is 0: it has the code k_a = z_a, and no r_a. The first sum is
sum k_a k_w, an integer convolution, less z_a sum k_w, one number per channel, and less z_w times the second sum, one
number per position.
The input gradient is the convolution of the output gradient, its pixels spaced out by the stride, with the weight
rotated by 180 degrees. The weight gradient is a sum over pixels, see ``pixel_products``.

On x86 processors with VNNI, oneDNN's quantised convolution computes the sums. It returns them in float32, exact below
2**24: channels beyond that are summed in parts, in int32. The sum over pixels has no library (``pixels.h``). Elsewhere
windows are copied to the rows of a matrix for ``int_mm``. All of these are exact and give the same result.

Shapes: N batch, C and O channels in and out, H and W height and width (of the output: P and Q), I and J of a kernel.
Operators take codes as (N, H, W, C).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input as float_conv2d_input

from cpt_extras.cpu_info import has_fast_int8
from cpt_extras.int8.matmul import int_mm, sum_codes
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

MAX_EXACT_FLOAT32 = 1 << 24  # all integers up to here are exact in float32
MAX_CODE_PRODUCT = 255 * 128  # of an unsigned and a signed byte
Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Stride, padding and dilation of a convolution, each of height and width; both sides have the same padding."""

    stride: Pair
    padding: Pair
    dilation: Pair


class CodeGrid(NamedTuple):
    """Grid of a tensor with one range: a code k has the value scale (k - zero_point) + zero_value.

    The fields are numbers on a CPU, where an operation takes longer than reading one, and 0-d tensors elsewhere.
    """

    zero_point: Any
    zero_value: Any
    scale: Any

    @classmethod
    def from_tensor(cls, x: QuantizedTensor) -> CodeGrid:
        """Return the grid of a quantised tensor."""
        if not x.low.is_cpu:
            fields = x.zero_point, x.zero_value, x.scale
            return cls(*(v.reshape(()) for v in fields))
        low, scale, code_offset = float(x.low), float(x.scale), float(x.code_offset)
        zero = -low / scale - code_offset
        zero_point = max(-128, min(127, round(zero))) if math.isfinite(zero) else 0
        return cls(zero_point, (zero_point + code_offset) * scale + low, scale)

    @property
    def may_miss_zero(self) -> bool:
        """Whether 0 may lie between two points of the grid; after a ReLU it does not."""
        return isinstance(self.zero_value, Tensor) or self.zero_value != 0


def conv2d(
    a: QuantizedTensor,
    w: QuantizedTensor,
    bias: Tensor | None,
    geometry: Geometry,
    channels_last: bool = False,
) -> Tensor:
    """Return the convolution (N, O, P, Q), float32.

    Args:
        a: (N, C, H, W), channels last in memory, with one range.
        w: (O, C, I, J), with one range or one per output channel.
        bias: (O,) or None.
        geometry: stride, padding and dilation.
        channels_last: the layout of the result in memory.
    """
    grid = CodeGrid.from_tensor(a)
    if bias is None:
        shifts = torch.zeros(1, len(w.codes), device=a.low.device)
    else:
        shifts = bias.float().view(1, -1)
    if grid.may_miss_zero:
        ones = torch.ones(1, 1, *a.codes.shape[2:], device=a.low.device)
        channel_sums = w.dequantize().sum(1, keepdim=True)
        # sum w over the part of every window that is not padding, (1, O, P, Q)
        weight_sums = nn.functional.conv2d(ones, channel_sums, None, *geometry)
        shifts = shifts + grid.zero_value * weight_sums[0].flatten(1).t()
    return _convolve(a, w, grid, shifts, geometry, channels_last)


def conv2d_input(
    g: QuantizedTensor,
    w: QuantizedTensor,
    shape: torch.Size,
    geometry: Geometry,
    channels_last: bool = False,
) -> Tensor:
    """Return the gradient of a convolution's input, (N, C, H, W), float32.

    Args:
        g: gradient of the output, (N, O, P, Q), channels last in memory, with one range.
        w: (O, C, I, J), with one range.
        shape: that of the input.
        geometry: stride, padding and dilation of the convolution.
        channels_last: the layout of the result in memory.
    """
    grid = CodeGrid.from_tensor(g)
    stride, padding, dilation = geometry
    kernel = w.codes.shape[2:]

    # padding of g before the convolution with the rotated weight; negative where g must be cropped
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    outer = [r - p for r, p in zip(reach, padding, strict=True)]
    size = [n + r - 2 * o for n, r, o in zip(shape[2:], reach, outer, strict=True)]
    crop = [max(0, -o) for o in outer]
    spaced = _space_out(g, grid, stride, size, crop)

    rotated = w.rearrange(_rotate_kernels)
    shifts = torch.zeros(1, shape[1], device=g.low.device)
    if grid.may_miss_zero:
        ones = torch.ones(1, 1, *g.codes.shape[2:], device=g.low.device)
        channel_sums = w.dequantize().sum(0, keepdim=True)
        weight_sums = float_conv2d_input((1, *shape[1:]), channel_sums, ones, *geometry)
        shifts = grid.zero_value * weight_sums[0].flatten(1).t()

    outer_padding = max(0, outer[0]), max(0, outer[1])
    spaced_geometry = Geometry((1, 1), outer_padding, dilation)
    return _convolve(spaced, rotated, grid, shifts, spaced_geometry, channels_last)


def _rotate_kernels(weight: Tensor) -> Tensor:
    """Return (C, O, I, J) of a weight (O, C, I, J), with kernels rotated by 180 degrees."""
    return weight.flip(2, 3).transpose(0, 1)


def _space_out(
    g: QuantizedTensor, grid: CodeGrid, stride: Pair, size: list[int], crop: list[int]
) -> QuantizedTensor:
    """Put zeros between the pixels of a gradient, as many as a stride skips.

    Args:
        g: gradient of the output, (N, O, P, Q).
        grid: that of g.
        stride: distance of two pixels in the result.
        size: height and width of the result before it is cropped.
        crop: rows and columns to remove at every side.
    """
    codes = g.codes.permute(0, 2, 3, 1)
    if size != list(codes.shape[1:3]):
        N, P, Q, outputs = codes.shape
        spaced = _filled(codes, (N, *size, outputs), grid.zero_point)
        pixels = spaced[:, : size[0] : stride[0], : size[1] : stride[1]]
        pixels[:, :P, :Q] = codes
        codes = spaced
    rows = slice(crop[0], size[0] - crop[0])
    columns = slice(crop[1], size[1] - crop[1])
    codes = codes[:, rows, columns].contiguous()
    return g._replace(codes=codes.permute(0, 3, 1, 2))


def conv2d_weight(
    g: QuantizedTensor, a: QuantizedTensor, kernel: torch.Size, geometry: Geometry
) -> Tensor:
    """Return the gradient of a convolution's weight, (O, C, I, J), float32.

    It is the sum of g a over pixels, at every tap of the kernel:

        s_g s_a sum (k_g - z_g)(k_a - z_a)  +  r_g s_a sum (k_a - z_a)  +  r_a sum g

    where the last sum leaves out padding.

    Args:
        g: gradient of the output, (N, O, P, Q), channels last in memory, with one range.
        a: the input, (N, C, H, W), channels last in memory, with one range.
        kernel: its size, (I, J).
        geometry: stride, padding and dilation of the convolution.
    """
    g_codes, a_codes = g.codes.permute(0, 2, 3, 1), a.codes.permute(0, 2, 3, 1)
    g_grid, a_grid = CodeGrid.from_tensor(g), CodeGrid.from_tensor(a)
    a_zero_point = _filled(a_codes, (), a_grid.zero_point)
    sums = operators.active.pixel_products(
        g_codes, a_codes, a_zero_point, kernel, *geometry
    ).double()

    products, a_sums = sums[:-1], sums[-1]  # sum k_g (k_a - z_a); sum (k_a - z_a)
    centred = products - g_grid.zero_point * a_sums
    y = (g_grid.scale * a_grid.scale) * centred + (
        g_grid.zero_value * a_grid.scale
    ) * a_sums
    y = y.view(len(y), *kernel, -1)
    if a_grid.may_miss_zero:
        g_sums = _sum_unpadded(g_codes, g_grid, a_codes.shape[1:3], kernel, geometry)
        y = y + a_grid.zero_value * g_sums.unsqueeze(-1)
    return y.permute(0, 3, 1, 2).to(
        torch.float32, memory_format=torch.contiguous_format
    )


def _sum_unpadded(
    g_codes: Tensor,
    grid: CodeGrid,
    size: torch.Size,
    kernel: torch.Size,
    geometry: Geometry,
) -> Tensor:
    """Return the sum of a gradient over the pixels at which a tap is not on padding, (O, I, J) float64.

    Args:
        g_codes: codes of the gradient, (N, P, Q, O).
        grid: grid of the gradient.
        size: height and width of the input.
        kernel: its size, (I, J).
        geometry: stride, padding and dilation of the convolution.
    """
    N, P, Q, _ = g_codes.shape
    axes = zip(size, (P, Q), kernel, *geometry, strict=True)
    rows, columns = (_taps_inside(g_codes, *axis) for axis in axes)
    code_sums = sum_codes(g_codes.reshape(N, -1), -2).view(P, Q, -1).double()
    batch_sums = grid.scale * (code_sums - N * grid.zero_point) + N * grid.zero_value
    return torch.einsum("pqo,pi,qj->oij", batch_sums, rows, columns)


def _taps_inside(
    like: Tensor,
    size: int,
    num_windows: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    """Return 1.0 where a tap is on the input and 0.0 on padding, (num_windows, kernel) float64; for one axis."""
    windows, taps = (torch.arange(n, device=like.device) for n in (num_windows, kernel))
    positions = (windows * stride - padding).unsqueeze(1) + taps * dilation
    return ((positions >= 0) & (positions < size)).double()


def _convolve(
    a: QuantizedTensor,
    w: QuantizedTensor,
    grid: CodeGrid,
    shifts: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> Tensor:
    """Return the convolution (N, O, P, Q), float32.

    Args:
        a: (N, C, H, W), channels last in memory.
        w: (O, C, I, J).
        grid: grid of a.
        shifts: terms without codes of a, (P * Q, O), or (1, O) where they are equal at all positions.
        geometry: stride, padding and dilation.
        channels_last: the layout of the result in memory.
    """
    outputs, C, *kernel = w.codes.shape
    if C * kernel[0] * kernel[1] > MAX_INT8_TERMS:
        if C == 1:
            raise ValueError(
                f"a kernel of {kernel[0]} x {kernel[1]}: its sums may overflow, at most {MAX_INT8_TERMS} codes"
            )
        first = _select_channels(a, w, slice(C // 2))
        second = _select_channels(a, w, slice(C // 2, C))
        no_shifts = torch.zeros_like(shifts[:1])
        y = _convolve(*first, grid, shifts, geometry, channels_last)
        return y.add_(_convolve(*second, grid, no_shifts, geometry, channels_last))

    sums, sums_zero_point = window_products(a.codes, grid.zero_point, w.codes, geometry)
    codes = a.codes.permute(0, 2, 3, 1)
    zero_point = _filled(codes, (), grid.zero_point)
    a_sums = operators.active.window_sums(codes, zero_point, kernel, *geometry)

    if w.has_one_scale:
        w_zero_point, w_zero_value, w_scale = CodeGrid.from_tensor(w)
    else:
        fields = w.zero_point, w.zero_value, w.scale
        w_zero_point, w_zero_value, w_scale = (v.view(-1) for v in fields)
    # float64, since a product beyond float32 is an error there, and infinite after the conversion
    scales = shifts.new_empty((2, outputs), dtype=torch.float64)
    scales[0] = grid.scale * w_scale
    scales[1] = grid.scale * w_zero_value
    scales = scales.float()
    zeros = _filled(a_sums, (2, outputs), w_zero_point)
    zeros[1] = sums_zero_point * sum_codes(w.codes.reshape(outputs, -1), -1)

    N, P, Q = a_sums.shape
    if channels_last:  # the values overwrite the sums
        y = sums.view(torch.float32).view(N, P, Q, outputs).permute(0, 3, 1, 2)
    else:
        y = torch.empty(N, outputs, P, Q, device=sums.device)
    operators.active.affine_windows(
        sums, a_sums.view(-1), zeros, scales, shifts.contiguous(), y
    )
    return y


def _select_channels(
    a: QuantizedTensor, w: QuantizedTensor, channels: slice
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return some input channels of both operands of a convolution."""
    codes = a.codes.permute(0, 2, 3, 1)[..., channels].contiguous()
    a_part = a._replace(codes=codes.permute(0, 3, 1, 2))
    return a_part, w._replace(codes=w.codes[:, channels])


def window_products(
    codes: Tensor, zero_point: Any, weight: Tensor, geometry: Geometry
) -> tuple[Tensor, Any]:
    """Return the sums of k_a k_w over windows, with padding as z_a, and the z_a that belongs to them.

    oneDNN takes unsigned bytes: there both k_a and z_a are the codes plus 128.

    Args:
        codes: k_a, (N, C, H, W), channels last in memory.
        zero_point: z_a.
        weight: k_w, (O, C, I, J).
        geometry: stride, padding and dilation.

    Returns:
        The sums, integers in int32 or float32, (N * P * Q, O), and their z_a.
    """
    x = codes.permute(0, 2, 3, 1)
    num_taps = weight[0, 0].numel()
    # channels can be summed in parts, the taps of one channel cannot
    is_exact = num_taps * MAX_CODE_PRODUCT < MAX_EXACT_FLOAT32
    has_kernels = operators.active is torch.ops.cpt
    if has_onednn_convolution(x.device) and has_kernels and is_exact:
        unsigned = x.view(torch.uint8) ^ 128
        padded = pad(unsigned, geometry.padding, zero_point + 128)
        return _onednn_window_products(padded, weight, geometry), zero_point + 128
    rows = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    windows = unfold_windows(x, weight.shape[2:], *geometry, fill=zero_point)
    return int_mm(windows.flatten(0, 2), rows.t()), zero_point


@lru_cache
def has_onednn_convolution(device: torch.device) -> bool:
    """Return whether oneDNN convolves codes exactly on a device: without VNNI, partial sums saturate at 16 bits."""
    return has_fast_int8(device) and torch.backends.mkldnn.is_available()


def _onednn_window_products(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the sums of k_a k_w over windows, (N * P * Q, O).

    Args:
        x: k_a as unsigned bytes with all padding, (N, H, W, C).
        weight: k_w, (O, C, I, J).
        geometry: stride and dilation; the padding is in x.
    """
    outputs, C, *kernel = weight.shape
    # the largest possible sum decides without a look at the weights
    may_exceed = MAX_CODE_PRODUCT * C * kernel[0] * kernel[1] >= MAX_EXACT_FLOAT32
    if may_exceed and _max_window_product(weight) >= MAX_EXACT_FLOAT32:
        first, second = (
            _onednn_window_products(
                x[..., half].contiguous(), weight[:, half], geometry
            )
            for half in (slice(C // 2), slice(C // 2, C))
        )
        return first.int() + second.int()

    # Zero points and padding are not left to oneDNN 3.13, nor is a stride where there is one position: it returns
    # wrong sums for a window of nothing but padding, and for a stride to a single column.
    stride, _, dilation = map(list, geometry)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    for i in range(2):
        if x.shape[i + 1] - reach[i] < stride[i]:
            x, stride[i] = x.narrow(i + 1, 0, reach[i]).contiguous(), 1
    scale, zero_points = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    packed = torch.ops.onednn.qconv_prepack(
        weight, scale, 1.0, 0, stride, [0, 0], dilation, 1
    )
    x = x.permute(0, 3, 1, 2)
    y = torch.ops.onednn.qconv2d_pointwise(
        x,
        1.0,
        0,
        packed,
        scale,
        zero_points,
        None,
        stride,
        [0, 0],
        dilation,
        1,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return y.permute(0, 2, 3, 1).reshape(-1, outputs)


def _max_window_product(weight: Tensor) -> Tensor:
    """Return the largest sum of k_a k_w that any window of unsigned bytes can have."""
    return 255 * weight.float().abs().flatten(1).sum(1).max()


def pad(x: Tensor, padding: Any, fill: Any) -> Tensor:
    """Return (N, H, W, C) with rows and columns of ``fill`` around every image."""
    if not any(padding):
        return x.contiguous()
    N, H, W, C = x.shape
    top, left = padding
    padded = _filled(x, (N, H + 2 * top, W + 2 * left, C), fill)
    padded[:, top : top + H, left : left + W] = x
    return padded


def unfold_windows(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, fill: Any = 0
) -> Tensor:
    """Return the window at every position of a kernel on (N, H, W, C), as (N, P, Q, I * J * C); pad by ``fill``."""
    x = pad(x, padding, fill)
    N, *size, C = x.shape
    axes = zip(size, kernel, stride, dilation, strict=True)
    positions = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes]
    image, row, column, _ = x.stride()
    strides = (
        image,
        row * stride[0],
        column * stride[1],
        row * dilation[0],
        column * dilation[1],
        1,
    )
    # Copy overlapping windows, also where reshape would find strides for a matrix of them: libraries refuse those.
    return x.as_strided((N, *positions, *kernel, C), strides).flatten(3).contiguous()


def _filled(like: Tensor, shape: tuple[int, ...], value: Any) -> Tensor:
    """Return a tensor of the type and device of ``like``, filled with a number or a 0-d tensor."""
    if isinstance(value, Tensor):
        return like.new_empty(shape).copy_(value)
    return like.new_full(shape, value)


# --- operators --------------------------------------------------------------------------------------------------------


def window_sums(
    codes: Tensor, zero: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Return the sums of k - z over the window at every position, (N, P, Q) int32; padding counts as z."""
    pixels = sum_codes(codes, -1) - codes.shape[3] * zero.int()
    windows = unfold_windows(pixels.unsqueeze(3), kernel, stride, padding, dilation)
    return windows.sum(3, dtype=torch.int32)


def affine_windows(
    product: Tensor,
    sums: Tensor,
    zeros: Tensor,
    scales: Tensor,
    shifts: Tensor,
    out: Tensor,
) -> None:
    """Convert the integer sums of windows to values.

    Args:
        product: sums of k_a k_w, integers in int32 or float32, (M, O) with M = N * P * Q.
        sums: sums of k_a - z_a, int32 (M,).
        zeros: z_w and z_a sum k_w, int32 (2, O).
        scales: s_a s_w and s_a r_w, float32 (2, O).
        shifts: terms to add, float32 (P * Q, O), or (1, O) where they are equal at all positions.
        out: the values, float32 (N, O, P, Q), channels first or last in memory; if last, it may share the memory of
            the sums.
    """
    w_zero_point, constant = zeros
    columns = sums.unsqueeze(1)
    centred = (product.int() - constant - w_zero_point * columns).float()
    y = scales[0] * centred + scales[1] * columns
    y = y + shifts.repeat(len(product) // max(1, len(shifts)), 1)
    N, _, P, Q = out.shape
    out.permute(0, 2, 3, 1).copy_(y.view(N, P, Q, -1))


def pixel_products(
    gradient: Tensor,
    x: Tensor,
    zero: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Tensor:
    """Return sums over all pixels for every tap, int64 (O + 1, I * J * C); padding counts as z_a.

    The first O rows are the sums of k_g (k_a - z_a) of every channel of the gradient, the last row those of k_a - z_a.
    """
    windows = unfold_windows(x, kernel, stride, padding, dilation, zero).flatten(0, 2)
    pixels = gradient.reshape(-1, gradient.shape[3])
    sums = torch.zeros(
        pixels.shape[1] + 1, windows.shape[1], dtype=torch.int64, device=x.device
    )
    zero_point = zero.int()
    for start in range(0, len(pixels), MAX_INT8_TERMS):
        part = slice(start, start + MAX_INT8_TERMS)
        g_part, a_part = pixels[part], windows[part]
        sums[:-1] += int_mm(g_part.t(), a_part)
        sums[:-1] -= (zero_point * sum_codes(g_part, -2)).unsqueeze(1)
        sums[-1] += sum_codes(a_part, -2) - len(g_part) * zero_point
    return sums


GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
SCHEMAS: dict[str, tuple[str, Any]] = {
    "window_sums": (f"(Tensor codes, Tensor zero, {GEOMETRY}) -> Tensor", window_sums),
    "affine_windows": (
        "(Tensor product, Tensor sums, Tensor zeros, Tensor scales, Tensor shifts, Tensor(a!) out) -> ()",
        affine_windows,
    ),
    "pixel_products": (
        f"(Tensor gradient, Tensor x, Tensor zero, {GEOMETRY}) -> Tensor",
        pixel_products,
    ),
}
for _library in operators.LIBRARIES.values():
    for _name, (_schema, _plain) in SCHEMAS.items():
        operators.define(_library, _name, _schema, _plain)
