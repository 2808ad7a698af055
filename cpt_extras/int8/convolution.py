"""Convolutions of quantised operands, computed on their codes; the algebra is that of ``integer.py``.

With x = s (k - z) + r, a convolution is, at every position and for every output channel,

    s_a s_w sum (k_a - z_a)(k_w - z_w)  +  s_a r_w sum (k_a - z_a)  +  r_a sum w

summed over what a window holds of a; padding is 0, which k_a = z_a stands for, and has no r_a. The first sum is
sum k_a k_w, by an integer convolution, less z_a sum k_w, one number per channel, and less z_w times the second sum, one
number per position.
The gradient of the input is the convolution of the output's gradient, its pixels the stride apart, with the turned
weights; that of the weights is a product over pixels of its own.

On x86 processors with VNNI, oneDNN's quantised convolution computes the sums; it returns them in float32, exact below
2**24: more channels than that allows are added up in parts, in int32. The product over pixels has no library
(``pixels.h``). Elsewhere windows are laid out as rows of a matrix for ``int_mm``. All are exact: it makes no
difference to a result which of them runs.

Shapes: N batch, C and O channels in and out, H and W height and width (of the output: P and Q), I and J of a kernel.
Codes are (N, H, W, C) in all that is said of operators here.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input as conv2d_input_of

from cpt_extras.cpu_info import has_fast_int8
from cpt_extras.int8.matmul import int_mm, sum_codes
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

MAX_EXACT_FLOAT32 = 1 << 24  # whole numbers up to here are float32
MAX_CODE_PRODUCT = 255 * 128  # (k_a - z_a) k_w
Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Stride, padding (the same on both sides) and dilation of a convolution, each of height and width."""

    stride: Pair
    padding: Pair
    dilation: Pair


class CodeGrid(NamedTuple):
    """What codes of one range mean, see above: numbers on a CPU, where an operation takes longer, else 0-d tensors."""

    zero: Any
    rest: Any
    scale: Any

    @classmethod
    def from_tensor(cls, x: QuantizedTensor) -> CodeGrid:
        """Return z, r and s of a tensor."""
        if not x.low.is_cpu:
            return cls(*(v.reshape(()) for v in (x.zero, x.rest, x.scale)))
        low, scale, half = float(x.low), float(x.scale), float(x.half)
        zero = -low / scale - half
        zero = max(-128, min(127, round(zero))) if math.isfinite(zero) else 0
        return cls(zero, (zero + half) * scale + low, scale)

    @property
    def has_rest(self) -> bool:
        """Whether 0 may lie between two codes; after a ReLU it does not."""
        return isinstance(self.rest, Tensor) or self.rest != 0


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
        channels_last: the layout of the result in memory.
    """
    grid = CodeGrid.from_tensor(a)
    shifts = (
        torch.zeros(1, len(w.codes), device=a.low.device)
        if bias is None
        else bias.float().view(1, -1)
    )
    if grid.has_rest:
        ones = torch.ones(1, 1, *a.codes.shape[2:], device=a.low.device)
        inside = nn.functional.conv2d(
            ones, w.dequantize().sum(1, keepdim=True), None, *geometry
        )
        shifts = shifts + grid.rest * inside[0].flatten(1).t()
    return _convolve(a, w, grid, shifts, geometry, channels_last)


def conv2d_input(
    g: QuantizedTensor,
    w: QuantizedTensor,
    shape: torch.Size,
    geometry: Geometry,
    channels_last: bool = False,
) -> Tensor:
    """Return the gradient of a convolution's input, of ``shape`` (N, C, H, W), float32.

    Args:
        g: gradient of the output, (N, O, P, Q), channels last in memory, with one range.
        w: (O, C, I, J), with one range.
        channels_last: the layout of the result in memory.
    """
    grid, (stride, padding, dilation) = CodeGrid.from_tensor(g), geometry
    reach = [d * (k - 1) for d, k in zip(dilation, w.codes.shape[2:], strict=True)]
    before = [r - p for r, p in zip(reach, padding, strict=True)]
    size = [n + r - 2 * b for n, r, b in zip(shape[2:], reach, before, strict=True)]
    apart = _space_out(g, grid, stride, size, [max(0, -b) for b in before])
    turned = w.rearrange(lambda v: v.flip(2, 3).transpose(0, 1))
    shifts = torch.zeros(1, shape[1], device=g.low.device)
    if grid.has_rest:
        ones = torch.ones(1, 1, *g.codes.shape[2:], device=g.low.device)
        inside = conv2d_input_of(
            (1, *shape[1:]), w.dequantize().sum(0, keepdim=True), ones, *geometry
        )
        shifts = grid.rest * inside[0].flatten(1).t()
    around = Geometry((1, 1), (max(0, before[0]), max(0, before[1])), dilation)
    return _convolve(apart, turned, grid, shifts, around, channels_last)


def _space_out(
    g: QuantizedTensor, grid: CodeGrid, stride: Pair, size: list[int], cut: list[int]
) -> QuantizedTensor:
    """Return a tensor of ``size`` with the pixels of g ``stride`` apart, zeros between, less ``cut`` at every side."""
    codes = g.codes.permute(0, 2, 3, 1)
    if size != list(codes.shape[1:3]):
        spread = _filled(codes, (len(codes), *size, codes.shape[3]), grid.zero)
        spread[:, : size[0] : stride[0], : size[1] : stride[1]][
            :, : codes.shape[1], : codes.shape[2]
        ] = codes
        codes = spread
    codes = codes[:, cut[0] : size[0] - cut[0], cut[1] : size[1] - cut[1]].contiguous()
    return g._replace(codes=codes.permute(0, 3, 1, 2))


def conv2d_weight(
    g: QuantizedTensor, a: QuantizedTensor, kernel: torch.Size, geometry: Geometry
) -> Tensor:
    """Return the gradient of a convolution's weights, (O, C, I, J), float32.

    Args:
        g: gradient of the output, (N, O, P, Q), channels last in memory, with one range.
        a: the input, (N, C, H, W), likewise.
        kernel: its size, (I, J).
    """
    gradient, x = g.codes.permute(0, 2, 3, 1), a.codes.permute(0, 2, 3, 1)
    of_g, of_a = CodeGrid.from_tensor(g), CodeGrid.from_tensor(a)
    sums = operators.active.pixel_products(
        gradient, x, _filled(x, (), of_a.zero), kernel, *geometry
    ).double()
    products, seen = sums[:-1], sums[-1]
    y = (of_g.scale * of_a.scale) * (products - of_g.zero * seen) + (
        of_g.rest * of_a.scale
    ) * seen
    y = y.view(len(y), *kernel, -1)
    if of_a.has_rest:
        N, P, Q, _ = gradient.shape
        rows, columns = (
            _taps_inside(x, *sizes)
            for sizes in zip(x.shape[1:3], (P, Q), kernel, *geometry, strict=True)
        )
        batch = (
            sum_codes(gradient.reshape(N, -1), -2).view(P, Q, -1).double()
            - N * of_g.zero
        )
        unpadded = of_g.scale * batch + N * of_g.rest
        y = y + of_a.rest * torch.einsum(
            "pqo,pi,qj->oij", unpadded, rows, columns
        ).unsqueeze(-1)
    return y.permute(0, 3, 1, 2).to(
        torch.float32, memory_format=torch.contiguous_format
    )


def _taps_inside(
    like: Tensor,
    size: int,
    outer: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    """Return where a tap of a window stands on the tensor and not on padding, 0.0 or 1.0, (outer, kernel) float64."""
    places, taps = (torch.arange(n, device=like.device) for n in (outer, kernel))
    at = (places * stride - padding).unsqueeze(1) + taps * dilation
    return ((at >= 0) & (at < size)).double()


def _convolve(
    a: QuantizedTensor,
    w: QuantizedTensor,
    grid: CodeGrid,
    shifts: Tensor,
    geometry: Geometry,
    channels_last: bool,
) -> Tensor:
    """Return the convolution; ``shifts``: the terms without codes of a, (P * Q, O), or (1, O) where they are alike."""
    outputs, C, *kernel = w.codes.shape
    if C * kernel[0] * kernel[1] > MAX_INT8_TERMS:
        if C == 1:
            raise ValueError(
                f"a kernel of {kernel[0]} x {kernel[1]}: its sums may overflow, at most {MAX_INT8_TERMS} codes"
            )
        first, second = (
            _select_channels(a, w, half) for half in (slice(C // 2), slice(C // 2, C))
        )
        none = torch.zeros_like(shifts[:1])
        y = _convolve(*first, grid, shifts, geometry, channels_last)
        return y.add_(_convolve(*second, grid, none, geometry, channels_last))
    sums, least = window_products(a.codes, grid.zero, w.codes, geometry)
    codes = a.codes.permute(0, 2, 3, 1)
    seen = operators.active.window_sums(
        codes, _filled(codes, (), grid.zero), kernel, *geometry
    )
    zero, rest, scale = (
        CodeGrid.from_tensor(w)
        if w.has_one_scale
        else (v.view(-1) for v in (w.zero, w.rest, w.scale))
    )
    scales = shifts.new_empty(
        (2, outputs), dtype=torch.float64
    )  # what exceeds float32 is infinite there, no error
    scales[0], scales[1] = grid.scale * scale, grid.scale * rest
    scales = scales.float()
    zeros = _filled(seen, (2, outputs), zero)
    zeros[1] = least * sum_codes(w.codes.reshape(outputs, -1), -1)
    N, P, Q = seen.shape
    if channels_last:  # the values are written over the sums
        y = sums.view(torch.float32).view(N, P, Q, outputs).permute(0, 3, 1, 2)
    else:
        y = torch.empty(N, outputs, P, Q, device=sums.device)
    operators.active.affine_windows(
        sums, seen.view(-1), zeros, scales, shifts.contiguous(), y
    )
    return y


def _select_channels(
    a: QuantizedTensor, w: QuantizedTensor, part: slice
) -> tuple[QuantizedTensor, QuantizedTensor]:
    codes = a.codes.permute(0, 2, 3, 1)[..., part].contiguous().permute(0, 3, 1, 2)
    return a._replace(codes=codes), w._replace(codes=w.codes[:, part])


def window_products(
    codes: Tensor, zero: Any, weight: Tensor, geometry: Geometry
) -> tuple[Tensor, Any]:
    """Return sums of k_a k_w, whole numbers (N * P * Q, O) in int32 or float32, and the z_a that belongs to them.

    By a library, k_a and z_a are the codes plus 128. Padding counts as z_a.

    Args:
        codes: k_a, (N, C, H, W), channels last in memory.
        zero: z_a.
        weight: k_w, (O, C, I, J).
    """
    x, taps = (
        codes.permute(0, 2, 3, 1),
        weight[0, 0].numel(),
    )  # channels can be divided, a channel's taps cannot
    if (
        has_onednn_convolution(x.device)
        and operators.active is torch.ops.cpt
        and taps * MAX_CODE_PRODUCT < MAX_EXACT_FLOAT32
    ):
        around = padded(x.view(torch.uint8) ^ 128, geometry.padding, zero + 128)
        return _onednn_window_products(around, weight, geometry), zero + 128
    rows = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    return int_mm(
        windows(x, weight.shape[2:], *geometry, fill=zero).flatten(0, 2), rows.t()
    ), zero


@lru_cache
def has_onednn_convolution(device: torch.device) -> bool:
    """Whether oneDNN convolves codes on a device, exactly: without VNNI, sums of two products saturate at 16 bits."""
    return has_fast_int8(device) and torch.backends.mkldnn.is_available()


def _onednn_window_products(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return sums of k_a k_w as they are for (N, H, W, C) of unsigned bytes with all padding; k_w (O, C, I, J)."""
    outputs, C, *kernel = weight.shape
    may_exceed = (
        MAX_CODE_PRODUCT * C * kernel[0] * kernel[1] >= MAX_EXACT_FLOAT32
    )  # else the weights need not be looked at
    if (
        may_exceed
        and 255 * weight.float().abs().flatten(1).sum(1).max() >= MAX_EXACT_FLOAT32
    ):
        halves = slice(C // 2), slice(C // 2, C)
        first, second = (
            _onednn_window_products(x[..., h].contiguous(), weight[:, h], geometry)
            for h in halves
        )
        return first.int() + second.int()
    # Zero points and padding by hand, and no stride where there is one position: oneDNN 3.13 returns wrong sums where
    # a window sees nothing but padding, or with a stride to a single column.
    stride, _, dilation = map(list, geometry)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    for i in range(2):
        if x.shape[i + 1] - reach[i] < stride[i]:
            x, stride[i] = x.narrow(i + 1, 0, reach[i]).contiguous(), 1
    one, none = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    packed = torch.ops.onednn.qconv_prepack(
        weight, one, 1.0, 0, stride, [0, 0], dilation, 1
    )
    x = x.permute(0, 3, 1, 2)
    y = torch.ops.onednn.qconv2d_pointwise(
        x,
        1.0,
        0,
        packed,
        one,
        none,
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


def padded(x: Tensor, padding: Any, fill: Any) -> Tensor:
    """Return (N, H, W, C) with rows and columns of ``fill`` around."""
    if not any(padding):
        return x.contiguous()
    (N, H, W, C), (p, q) = x.shape, padding
    around = _filled(x, (N, H + 2 * p, W + 2 * q, C), fill)
    around[:, p : p + H, q : q + W] = x
    return around


def windows(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, fill: Any = 0
) -> Tensor:
    """Return what every position of a kernel sees of (N, H, W, C), (N, P, Q, I * J * C); ``fill``: the padding."""
    x = padded(x, padding, fill)
    N, *size, C = x.shape
    outer = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)
    ]
    image, row, column, _ = x.stride()
    strides = (
        image,
        row * stride[0],
        column * stride[1],
        row * dilation[0],
        column * dilation[1],
        1,
    )
    # a copy where windows overlap, also where reshape finds strides for a matrix of them, which libraries refuse
    return x.as_strided((N, *outer, *kernel, C), strides).flatten(3).contiguous()


def _filled(like: Tensor, shape: tuple[int, ...], value: Any) -> Tensor:
    return (
        like.new_empty(shape).copy_(value)
        if isinstance(value, Tensor)
        else like.new_full(shape, value)
    )


# --- operators --------------------------------------------------------------------------------------------------------


def window_sums(
    codes: Tensor, zero: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Return the sums of k - z over what every position of a kernel sees, (N, P, Q) int32; padding counts as z."""
    pixels = sum_codes(codes, -1) - codes.shape[3] * zero.int()
    return windows(pixels.unsqueeze(3), kernel, stride, padding, dilation).sum(
        3, dtype=torch.int32
    )


def affine_windows(
    product: Tensor,
    sums: Tensor,
    zeros: Tensor,
    scales: Tensor,
    shifts: Tensor,
    out: Tensor,
) -> None:
    """Turn sums of products of codes into values.

    Args:
        product: sums of k_a k_w, whole numbers in int32 or float32, (M, O) with M = N * P * Q.
        sums: those of k_a - z_a, int32 (M,).
        zeros: z_w and z_a sum k_w, int32 (2, O).
        scales: s_a s_w and s_a r_w, float32 (2, O).
        shifts: what is added, float32 (P * Q, O), or (1, O) where all positions are alike.
        out: the values, float32 (N, O, P, Q), channels first or last in memory; if last, it may lie where the sums do.
    """
    zero, least = zeros
    codes = (product.int() - least - zero * sums.unsqueeze(1)).float()
    y = scales[0] * codes + scales[1] * sums.unsqueeze(1)
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

    Those of k_g (k_a - z_a) for every channel of the gradient, and in the last row those of k_a - z_a.
    """
    columns = windows(x, kernel, stride, padding, dilation, zero).flatten(0, 2)
    rows = gradient.reshape(-1, gradient.shape[3])
    sums = torch.zeros(
        rows.shape[1] + 1, columns.shape[1], dtype=torch.int64, device=x.device
    )
    for start in range(0, len(rows), MAX_INT8_TERMS):
        part, seen = (
            rows[start : start + MAX_INT8_TERMS],
            columns[start : start + MAX_INT8_TERMS],
        )
        sums[:-1] += int_mm(part.t(), seen)
        sums[:-1] -= (zero.int() * sum_codes(part, -2)).unsqueeze(1)
        sums[-1] += sum_codes(seen, -2) - len(part) * zero.int()
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
