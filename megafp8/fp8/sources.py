"""What is quantized: a tensor as it lies in memory, or one that a kernel computes on the way.

A norm, an activation, or an activation's gradient is read once more only to be cast. So quantizers take a `Source`: the
inputs of the computation and its definition in plain PyTorch (`values`). On CUDA one kernel computes a tile of it and
casts the tile; elsewhere `values` is computed and cast. In both the value that is cast is fp32: there is no bf16
rounding in between, and no bf16 copy in memory.

The arithmetic is spelt out, operation by operation, because the kernels must give the same bits: exponentials are
powers of two, nothing is contracted into a multiply-add, and a sigmoid is one division.

Shapes: r rows, c columns of the matrix; f width of an activation (half of c where a source has two parts); s sequence,
b micro-batch, a query heads, g key and g value heads of width d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715 * GELU_SLOPE


class Source(Protocol):
    """A matrix `[r, c]` that can be computed from tensors of `dtype` on `device`."""

    kind: ClassVar[str]

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def values(self) -> Tensor:
        """The matrix `[r, c]`, fp32 or wider."""
        ...


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + 2^(-x·log2 e))`, the form that the kernels compute; fp32 or wider.

    Below x = -87 it stays at 2^-126, the least normal number: the kernels can divide without a branch then.
    """
    exponent = (x * -LOG2_E).clamp(max=126.0)
    if x.is_cuda:
        power = torch.exp2(exponent)
    else:  # by way of float64: the last bit of a CPU's fp32 result depends on where in the tensor the element stands
        power = torch.exp2(exponent.double()).to(x.dtype)
    return torch.ones_like(x) / (1.0 + power)


def _gelu_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU's factor of x, `sigmoid(z)` with z = 2·√(2/π)·(x + 0.044715·x³), and dz/dx; fp32 or wider."""
    square = x * x
    return sigmoid(x * (GELU_SLOPE + GELU_CUBE * square)), GELU_SLOPE + 3 * GELU_CUBE * square


def rotate(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of `x_sbad`; cos and sin `[s, 1 or b, 1, d/2]`. In fp32, or x's dtype if wider."""
    first, second = _wide(x_sbad).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class _OfOneTensor:
    x_rc: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.x_rc.dtype

    @property
    def device(self) -> torch.device:
        return self.x_rc.device


@dataclass(frozen=True)
class Plain(_OfOneTensor):
    """`x` itself, `[r, c]`, contiguous."""

    kind: ClassVar[str] = "plain"

    @property
    def shape(self) -> tuple[int, int]:
        return self.x_rc.shape[0], self.x_rc.shape[1]

    def values(self) -> Tensor:
        return _wide(self.x_rc)


@dataclass(frozen=True)
class ScaledColumns(Plain):
    """`x` with each column multiplied by its own factor: `scale_c` `[c]`, fp32."""

    scale_c: Tensor
    kind: ClassVar[str] = "scaled_columns"

    def values(self) -> Tensor:
        return _wide(self.x_rc) * self.scale_c


@dataclass(frozen=True)
class Normalized(Plain):
    """`(x - mean) · rstd · weight + bias` of rows: x `[r, c]`, statistics `[r]` in fp32 or wider, weight and bias
    `[c]`.

    Without `mean_r` and `bias_c` it is RMSNorm.
    """

    rstd_r: Tensor
    weight_c: Tensor
    mean_r: Tensor | None = None
    bias_c: Tensor | None = None
    kind: ClassVar[str] = "normalized"

    def values(self) -> Tensor:
        x = _wide(self.x_rc)
        if self.mean_r is not None:
            x = x - self.mean_r.unsqueeze(-1)
        y = x * self.rstd_r.unsqueeze(-1) * _wide(self.weight_c)
        return y if self.bias_c is None else y + _wide(self.bias_c)


@dataclass(frozen=True)
class SwiGLU(_OfOneTensor):
    """`silu(gate) · up` `[r, f]` of `[gate | up]` `[r, 2f]` (Shazeer 2020, arXiv:2002.05202).

    `scale_f`, fp32 powers of two `[f]`: what each channel is multiplied by, see `megafp8.fp8.smoothing`.
    """

    scale_f: Tensor | None = None
    kind: ClassVar[str] = "swiglu"

    @property
    def shape(self) -> tuple[int, int]:
        return self.x_rc.shape[0], self.x_rc.shape[1] // 2

    def values(self) -> Tensor:
        gate, up = _wide(self.x_rc).chunk(2, dim=-1)
        y = gate * sigmoid(gate) * up
        return y if self.scale_f is None else y * self.scale_f


@dataclass(frozen=True)
class SwiGLUGrad(_OfOneTensor):
    """The gradient `[r, 2f]` of `[gate | up]`, `x_rc` `[r, 2f]`, from dy `[r, f]`; `scale_f` as for `SwiGLU`."""

    dy_rf: Tensor
    scale_f: Tensor | None = None
    kind: ClassVar[str] = "swiglu_grad"

    @property
    def shape(self) -> tuple[int, int]:
        return self.x_rc.shape[0], self.x_rc.shape[1]

    def values(self) -> Tensor:
        gate, up = _wide(self.x_rc).chunk(2, dim=-1)
        dy, s = _wide(self.dy_rf), sigmoid(gate)
        if self.scale_f is not None:
            dy = dy * self.scale_f
        silu = gate * s
        return torch.cat([dy * up * (s + silu * (1.0 - s)), dy * silu], dim=-1)


@dataclass(frozen=True)
class GELU(Plain):
    """`gelu(x + bias)` `[r, c]` in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415); bias `[c]`.

    As a sigmoid's form, which it equals: `0.5·(1 + tanh(z/2)) = sigmoid(z)`.
    """

    bias_c: Tensor | None = None
    kind: ClassVar[str] = "gelu"

    def biased(self) -> Tensor:
        """`x + bias`, fp32 or wider."""
        return _wide(self.x_rc) if self.bias_c is None else _wide(self.x_rc) + _wide(self.bias_c)

    def values(self) -> Tensor:
        x = self.biased()
        return x * _gelu_gate(x)[0]


@dataclass(frozen=True, kw_only=True)
class GELUGrad(GELU):
    """The gradient `[r, c]` of `x + bias`, from dy `[r, c]`."""

    dy_rc: Tensor
    kind: ClassVar[str] = "gelu_grad"

    def values(self) -> Tensor:
        x = self.biased()
        s, slope = _gelu_gate(x)
        return _wide(self.dy_rc) * (s + x * s * (1.0 - s) * slope)


@dataclass(frozen=True)
class QKVGrad:
    """The gradient `[r, c]` of the packed [q | k | v] heads of r = s·b tokens, before q and k were turned.

    dq `[s, b, a, d]`, dk and dv `[s, b, g, d]` are contiguous, as attention's backward gives them; cos and sin, fp32 or
    wider, `[s, 1 or b, 1, d/2]`.
    """

    dq_sbad: Tensor
    dk_sbgd: Tensor
    dv_sbgd: Tensor
    cos: Tensor
    sin: Tensor
    kind: ClassVar[str] = "qkv_grad"

    @property
    def shape(self) -> tuple[int, int]:
        s, b, a, d = self.dq_sbad.shape
        return s * b, (a + 2 * self.dk_sbgd.shape[2]) * d

    @property
    def dtype(self) -> torch.dtype:
        return self.dq_sbad.dtype

    @property
    def device(self) -> torch.device:
        return self.dq_sbad.device

    def values(self) -> Tensor:
        dq, dk = (rotate(x, self.cos, -self.sin) for x in (self.dq_sbad, self.dk_sbgd))
        return torch.cat([dq, dk, _wide(self.dv_sbgd)], dim=2).flatten(2).flatten(0, 1)
