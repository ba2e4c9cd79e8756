"""Quantizers, and their casts in plain PyTorch: what every fused kernel must reproduce bit for bit.

A cast is `x · scale` in fp32, clamped to the format's finite range, rounded to nearest even. Clamping comes first
because torch's own casts differ: E5M2 overflows to infinity, and E4M3 saturates or gives NaN depending on the release.
After it, an infinity saturates like any large value while a NaN stays a NaN, so a broken step stays visible.

Two quantizers say where the scale comes from. `CurrentQuantizer` takes it from the tensor at hand: exact, one pass more
over the data, and a reduction over the group wherever ranks hold slices, since a slice has another maximum than the
whole. `DelayedQuantizer` uses a scale made from earlier steps and only notes the amax for later ones: one pass, no
communication in the layer, at the risk of saturating a tensor that grew since.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.collectives import all_reduce
from megafp8.fp8.formats import Format
from megafp8.fp8.scaling import scale_from_amax


class Fp8Matrix(NamedTuple):
    """`data · scale_inv`: FP8 `[r, c]`, row-major, and an fp32 scalar `[]`; `transposed` `[c, r]` where it was made."""

    data: Tensor
    scale_inv: Tensor
    transposed: Tensor | None = None

    def t(self) -> Fp8Matrix:
        """The transposed matrix `[c, r]`, row-major again: a copy, unless the cast has written it already."""
        if self.transposed is not None:
            return Fp8Matrix(self.transposed, self.scale_inv, self.data)
        # As bytes: a copy of FP8 is a copy of bytes, and every backend has a kernel for those.
        data = self.data.view(torch.uint8).t().contiguous().view(self.data.dtype)
        return Fp8Matrix(data, self.scale_inv, self.data)


class Quantizer(Protocol):
    """Casts one operand of a linear layer: a matrix `[r, c]` of any float dtype to FP8.

    `transpose` says that the transposed copy will be wanted too: a fused kernel writes it in the same pass.
    """

    def __call__(self, x_rc: Tensor, *, transpose: bool = False) -> Fp8Matrix: ...


def amax(x: Tensor) -> Tensor:
    """Largest magnitude in `x`, fp32 `[]`. It is inf where x holds an inf **or a NaN**.

    One value for "not finite" because backends disagree on the maximum of a NaN and a number, and a reduction over
    ranks must not lose it.
    """
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """`x · scale` in `fmt`: saturating, to nearest even; NaN stays NaN. Any shape; `scale` is fp32, broadcast."""
    return (x.float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x8: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 of any shape to fp32: `x8 · scale_inv`."""
    return x8.float() * scale_inv


def _fused(x: Tensor) -> bool:
    """Whether the fused kernels take `x`."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)


def _cast(
    x_rc: Tensor, scale: Tensor, fmt: Format, *, transpose: bool, newest_amax: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rows, and columns if a kernel makes them; `newest_amax`, where given, is raised to x's amax."""
    if _fused(x_rc):
        from megafp8.fp8.kernels import cast as kernels  # needs Triton, which comes with torch's CUDA builds

        return kernels.cast(x_rc.contiguous(), scale, fmt, transpose=transpose, newest_amax=newest_amax)
    if newest_amax is not None:
        torch.maximum(newest_amax, amax(x_rc), out=newest_amax)
    return quantize(x_rc, scale, fmt), None


def _amax(x: Tensor) -> Tensor:
    if _fused(x):
        from megafp8.fp8.kernels import cast as kernels

        return kernels.amax(x)
    return amax(x)


class CurrentQuantizer:
    """Scales a tensor by its own amax, over `group` where this rank holds only a slice of it."""

    def __init__(self, fmt: Format, group: ProcessGroup | None, *, eps: float, power_of_two: bool) -> None:
        self.fmt, self.group, self.eps, self.power_of_two = fmt, group, eps, power_of_two

    def __call__(self, x_rc: Tensor, *, transpose: bool = False) -> Fp8Matrix:
        whole_amax = all_reduce(_amax(x_rc), self.group, "max")
        scale = scale_from_amax(whole_amax, self.fmt.max, eps=self.eps, power_of_two=self.power_of_two)
        rows, columns = _cast(x_rc, scale, self.fmt, transpose=transpose)
        return Fp8Matrix(rows, scale.reciprocal(), columns)


class DelayedQuantizer:
    """Scales by `scale` as it stands and notes the amax in `newest_amax`; both fp32 `[]`, views of the shared state.

    Noting is a maximum, so micro-batches add up and a recomputed forward changes nothing. `recording` is switched off
    during evaluation.
    """

    def __init__(self, fmt: Format, scale: Tensor, newest_amax: Tensor) -> None:
        self.fmt, self.scale, self.newest_amax = fmt, scale, newest_amax
        self.recording = True

    def __call__(self, x_rc: Tensor, *, transpose: bool = False) -> Fp8Matrix:
        newest = self.newest_amax if self.recording else None
        rows, columns = _cast(x_rc, self.scale, self.fmt, transpose=transpose, newest_amax=newest)
        return Fp8Matrix(rows, self.scale.reciprocal(), columns)
