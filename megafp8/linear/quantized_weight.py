"""Linear layer weights in 8 or 4 bits, for products with a high-precision operand.

    int8, fp8    w[n, k] = scale_inv[n] · data[n, k]                                    one scale per row (output)
    int4         w[n, k] = scale_inv[k / group, n] · (data[n, k] - zero[k / group, n])  one scale per group of columns

Rounding to the nearest number of the format leaves the choice of the scale open. A scale from the largest magnitude
spends most of the format's range on a few weights. `quantize_weight` tries several scales for each row or group, and
takes the scale with the smallest squared error. This needs only the weight; methods that look at activations (GPTQ,
AWQ) need text as well. int4 has zero points, integers from 0 to 15, because 128 weights are rarely distributed evenly
around zero. A least-squares fit of the scale (`_refitted`) corrects each trial, similar to the alternating minimization
in Half-Quadratic Quantization (Badri and Shaji, Mobius Labs 2023), which uses another norm of the error.

Scales of rows are float32. Scales of groups are bfloat16; they are rounded before the weights are, so this adds no
error.

Two int4 values share a byte. Byte j of a group holds column j of the group in its low half, and column j + group / 2 in
its high half, so kernels unpack a tile of bytes to two tiles of neighboring columns.

Shapes: m tokens, n outputs, k inputs, g groups of a row; w columns of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.gemm.dispatch import gemm
from megafp8.linear.weight_format_names import WeightFormatName
from megafp8.numerics.formats import E4M3
from megafp8.numerics.implementations import triton_module
from megafp8.parallel.collectives import all_reduce

_kernels = triton_module("megafp8.kernels.packed_weights")


class QuantizedWeightFormat(NamedTuple):
    """Format of quantized weights. `group` is the number of columns that share a scale; None means a whole row."""

    name: WeightFormatName
    kind: Literal["int8", "fp8", "int4"]
    group: int | None
    dtype: torch.dtype


WEIGHT_FORMATS: dict[WeightFormatName, QuantizedWeightFormat] = {
    "int8": QuantizedWeightFormat("int8", "int8", None, torch.int8),
    "fp8": QuantizedWeightFormat("fp8", "fp8", None, E4M3.dtype),
    "int4": QuantizedWeightFormat("int4", "int4", 128, torch.uint8),
    "int4-64": QuantizedWeightFormat("int4-64", "int4", 64, torch.uint8),
    "int4-32": QuantizedWeightFormat("int4-32", "int4", 32, torch.uint8),
}

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Number of weights quantized at a time: few enough for a CPU's cache, and for little extra memory on a GPU."""
_INT8_TRIALS = tuple(1 + 0.004 * i for i in range(8))
_FP8_TRIALS = tuple(2 ** (i / 8) for i in range(8))
_INT4_TRIALS = tuple(1 - 0.05 * i for i in range(9))
"""Scales to try, relative to the naive scale, at which the largest magnitude (int4: the range) is just representable.

With eight bits nothing is clipped: clipping would lower a row's squared error by a few percent but lose the largest
weights, which meet the largest activations more often than other weights.
"""


@dataclass(frozen=True)
class QuantizedWeight:
    """Quantized weight `[n, k]` in a format described above; implements `PackedWeight`.

    Attributes:
        format: Format of the weight.
        data: `[n, k]` int8 or E4M3, or `[n, k/2]` uint8 for int4.
        scale_inv_gn: `[1, n]` float32; for int4 `[k/group, n]` bfloat16.
        zero_gn: Zero points for int4, `[k/group, n]` uint8.
    """

    format: QuantizedWeightFormat
    data: Tensor
    scale_inv_gn: Tensor
    zero_gn: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns k of the weight."""
        n, width = self.data.shape
        return n, 2 * width if self.format.kind == "int4" else width

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // len(self.scale_inv_gn)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight `[n, k]`, computed in float32 and rounded once to `dtype`."""
        if self.zero_gn is None:
            return (self.data.float() * self.scale_inv_gn.t()).to(dtype)
        groups, n = self.scale_inv_gn.shape
        bytes_ngw = self.data.view(n, groups, -1)
        q_ngw = torch.cat([bytes_ngw & 15, bytes_ngw >> 4], dim=2).float()
        centered = q_ngw - self.zero_gn.t().unsqueeze(2)
        return (centered * self.scale_inv_gn.t().unsqueeze(2)).to(dtype).view(self.shape)

    @property
    def packed_data(self) -> Any:
        """Weight in the form that the kernels of `megafp8.kernels.packed_weights` take."""
        group = 0 if self.format.group is None else self.format.group
        form = self.format.kind
        return _kernels().PackedData(form, self.data, self.shape[1], self.scale_inv_gn, self.zero_gn, group)

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """Return `x wᵀ + bias`, `[m, n]` in x's dtype. Kernels compute it for bf16 on a GPU."""
        if not x_mk.is_cuda or x_mk.dtype != torch.bfloat16:
            w_nk = self.dequantize(x_mk.dtype)
        elif len(x_mk) <= _kernels().MOST_TOKENS:
            y_mn: Tensor = _kernels().multiply(x_mk.contiguous(), self.packed_data, bias_n)
            return y_mn
        else:
            w_nk = _kernels().dequantize(self.packed_data, x_mk.dtype)
        return gemm(x_mk, w_nk.t(), x_mk.dtype, bias=None if bias_n is None else bias_n.to(x_mk.dtype))


def check_columns(name: str, k: int, ranks: int, form: QuantizedWeightFormat) -> None:
    """Raise ValueError unless each rank's share of a weight's k columns is a whole number of groups."""
    if form.group is None or k % (form.group * ranks) == 0:
        return
    fitting = [x.name for x in WEIGHT_FORMATS.values() if x.group is None or k % (x.group * ranks) == 0]
    divided = f"{k} columns" if ranks == 1 else f"{k} columns, {k // ranks} on each of {ranks} tensor-parallel ranks"
    raise ValueError(
        f"weights = {form.name}: {name} has {divided}, but each scale covers {form.group} columns; "
        f"try {', '.join(fitting)}"
    )


@torch.no_grad()
def quantize_weight(
    w_nk: Tensor, form: QuantizedWeightFormat, sharded_over: ProcessGroup | None = None
) -> QuantizedWeight:
    """Quantize `w_nk` to `form`, with the scales (and zero points) that give the smallest squared error.

    `sharded_over` are the ranks that hold the other columns of the same rows; the result then equals this rank's part
    of the whole quantized weight. k must be a multiple of the group. A row or group that is not finite becomes NaN.
    """
    n, k = w_nk.shape
    group = form.group or k
    assert k % group == 0
    data = w_nk.new_empty(n, k // 2 if form.kind == "int4" else k, dtype=form.dtype)
    scale_inv_gn = w_nk.new_empty(k // group, n, dtype=torch.bfloat16 if form.kind == "int4" else torch.float32)
    zero_gn = torch.empty_like(scale_inv_gn, dtype=torch.uint8) if form.kind == "int4" else None
    for rows in _chunks(n, k, w_nk.device.type):
        w_rgw = w_nk[rows].float().view(-1, k // group, group)
        if zero_gn is None:
            w_rk = w_rgw.flatten(1)
            scale_inv_r = _row_scales(w_rk, form, sharded_over)
            data[rows], scale_inv_gn[0, rows] = _rounded(w_rk, scale_inv_r, form).to(form.dtype), scale_inv_r[:, 0]
        else:
            q_rgw, scale_inv_rg, zero_rg = _int4(w_rgw)
            low, high = q_rgw.to(torch.uint8).chunk(2, dim=2)
            data[rows] = (low | (high << 4)).flatten(1)
            scale_inv_gn[:, rows], zero_gn[:, rows] = scale_inv_rg.t().to(torch.bfloat16), zero_rg.t().to(torch.uint8)
    return QuantizedWeight(form, data, scale_inv_gn, zero_gn)


def _chunks(n: int, k: int, device: str) -> Iterator[slice]:
    """Yield slices of rows with at most `_CHUNK` weights."""
    step = max(1, _CHUNK[device] // k)
    return (slice(first, min(first + step, n)) for first in range(0, n, step))


def _rounded(w_rk: Tensor, scale_inv_r: Tensor, form: QuantizedWeightFormat) -> Tensor:
    """Round `w / scale_inv` to numbers of the format, float32."""
    scaled = w_rk / scale_inv_r
    if form.kind == "int8":
        return scaled.round_().clamp_(-127, 127)
    return scaled.clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype).float()


def _row_scales(w_rk: Tensor, form: QuantizedWeightFormat, sharded_over: ProcessGroup | None) -> Tensor:
    """Return the `scale_inv` `[r, 1]` with the smallest squared error for each row.

    Errors are summed in float64 and only the trial scales are candidates, so the result does not depend on the number
    of ranks.
    """
    limit, trials = (127.0, _INT8_TRIALS) if form.kind == "int8" else (E4M3.max, _FP8_TRIALS)
    amax_r = all_reduce(w_rk.abs().amax(1, keepdim=True), sharded_over, "max")
    scales = [_usable(amax_r * trial / limit) for trial in trials]
    errors = [(_rounded(w_rk, s, form) * s - w_rk).square_().sum(1, dtype=torch.float64) for s in scales]
    errors_tr = all_reduce(torch.stack(errors), sharded_over)
    return torch.stack(scales).gather(0, errors_tr.argmin(0)[None, :, None])[0]


def _usable(scale_inv: Tensor) -> Tensor:
    """Replace zero scales, which rows of zeros have, by 1, so that nothing is divided by zero."""
    return torch.where(scale_inv == 0, 1.0, scale_inv)


def _int4(w_rgw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values from 0 to 15 `[r, g, w]`, and scale_inv and zero `[r, g]`, with each group's smallest error.

    All are float32.
    """
    low = w_rgw.amin(dim=2, keepdim=True).clamp(max=0)
    high = w_rgw.amax(dim=2, keepdim=True).clamp(min=0)
    best = torch.stack([low, low]).fill_(torch.nan)  # stays NaN if no error is finite
    least = torch.full_like(low, torch.inf)
    for width in _INT4_TRIALS:
        scale_inv = _usable(_as_bfloat16((high - low) * (width / 15)))
        zero = (7.5 - (high + low) / (2 * scale_inv)).round_().clamp_(0, 15)
        refitted = _usable(_as_bfloat16(_refitted(w_rgw, _centered(w_rgw, scale_inv, zero))))
        for trial in (scale_inv, refitted):
            error = (_centered(w_rgw, trial, zero) * trial).sub_(w_rgw).square_().sum(dim=2, keepdim=True)
            best = torch.where(error < least, torch.stack([trial, zero]), best)
            least = torch.fmin(error, least)
    scale_inv, zero = best
    return _centered(w_rgw, scale_inv, zero) + zero, scale_inv[..., 0], zero[..., 0]


def _centered(w_rgw: Tensor, scale_inv: Tensor, zero: Tensor) -> Tensor:
    """Return the rounded values minus their zero point."""
    return torch.minimum(torch.maximum((w_rgw / scale_inv).round_(), -zero), 15 - zero)


def _refitted(w_rgw: Tensor, centered: Tensor) -> Tensor:
    """Return the scale that fits the rounded values to the weights by least squares; 0 if all of them are zero."""
    squares = centered.square().sum(dim=2, keepdim=True)
    return (w_rgw * centered).sum(dim=2, keepdim=True) / squares.clamp_(min=1)


def _as_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16, in float32."""
    return x.to(torch.bfloat16).float()
