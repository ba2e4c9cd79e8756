"""Inputs of a quantizer: a tensor, or a norm, activation or gradient that is computed while it is quantized.

The output of a norm or an activation is read once more only to be quantized. So quantizers take a `MatrixSource`: the
inputs of the computation, and its definition in PyTorch (`values`), which is the reference of the kernels. On CUDA one
kernel computes a tile and quantizes it; elsewhere `values` is computed and quantized. In both cases the value that is
quantized is fp32: it is not rounded to bf16 first, and no bf16 copy is stored.

The arithmetic is written out, operation by operation, because kernels must give the same bits: exponentials are powers
of two, nothing is contracted into a multiply-add, and a sigmoid is one division.

Shapes: r rows, c columns of the matrix; f width of an activation (c = 2f for [gate | up]); s sequence, b micro-batch,
a query heads, g key and g value heads of width d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715 * GELU_SLOPE


class MatrixSource(Protocol):
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


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or in its dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_factor(weight_c: Tensor, zero_centered: bool) -> Tensor:
    """What a norm multiplies by: its weight, or 1 + weight; fp32 or wider."""
    return 1.0 + wide(weight_c) if zero_centered else wide(weight_c)


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + 2^(-x·log2 e))`, the form that the kernels compute; fp32 or wider.

    Below x = -87 it stays at 2^-126, the least normal number, so that kernels can divide without a branch.
    """
    exponent = (x * -LOG2_E).clamp(max=126.0)
    if x.is_cuda:
        power = torch.exp2(exponent)
    else:  # through float64: the last bit of a CPU's fp32 result depends on the element's position in the tensor
        power = torch.exp2(exponent.double()).to(x.dtype)
    return torch.ones_like(x) / (1.0 + power)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    y = x * s
    return y, s + y * (1.0 - s)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """x·sigmoid(z), z = 2·√(2/π)·(x + 0.044715·x³), since 0.5·(1 + tanh(z/2)) = sigmoid(z) (Hendrycks & Gimpel,
    arXiv:1606.08415)."""
    square = x * x
    s = sigmoid(x * (GELU_SLOPE + GELU_CUBE * square))
    y = x * s
    return y, s + y * (1.0 - s) * (GELU_SLOPE + 3 * GELU_CUBE * square)


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(x <= 0, 0.0, x), torch.where(x <= 0, 0.0, torch.ones_like(x))


def _squared_relu(x: Tensor) -> tuple[Tensor, Tensor]:
    y, _ = _relu(x)
    return y * y, 2.0 * y


CLAMPED_SLOPE = 1.702
"""Of clamped SwiGLU: factor of the gate in the sigmoid (gpt-oss, arXiv:2508.10925)."""
LIMITS = {"clamped_silu": 7.0, "limited_silu": 10.0}
"""Bound of gate and up, by function: of clamped SwiGLU, and of limited SwiGLU (DeepSeek-V4)."""


def _clamped_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    limit = LIMITS["clamped_silu"]
    clamped = x.clamp(max=limit)
    s = sigmoid(clamped * CLAMPED_SLOPE)
    y = clamped * s
    return y, torch.where(x <= limit, s + y * (1.0 - s) * CLAMPED_SLOPE, 0.0)


def _limited_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    limit = LIMITS["limited_silu"]
    y, derivative = _silu(x.clamp(max=limit))
    return y, torch.where(x <= limit, derivative, 0.0)


FUNCTIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "squared_relu": _squared_relu,
    "clamped_silu": _clamped_silu,
    "limited_silu": _limited_silu,
}
"""Activation functions, by their name in the kernels: f(x) and f'(x), fp32 or wider."""


def _factor(function: str, up: Tensor) -> Tensor:
    """What a gated activation multiplies f(gate) by."""
    if function not in LIMITS:
        return up
    limited = up.clamp(-LIMITS[function], LIMITS[function])
    return limited + 1.0 if function == "clamped_silu" else limited


def rotate(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of `x_sbad`; cos, sin `[s, 1 or b, 1, d/2]`. In fp32, or x's dtype if wider."""
    first, second = wide(x_sbad).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class Plain:
    """`x` itself, `[r, c]`, contiguous."""

    x_rc: Tensor
    kind: ClassVar[str] = "plain"

    @property
    def shape(self) -> tuple[int, int]:
        return self.x_rc.shape[0], self.x_rc.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.x_rc.dtype

    @property
    def device(self) -> torch.device:
        return self.x_rc.device

    def values(self) -> Tensor:
        return wide(self.x_rc)


@dataclass(frozen=True)
class Gathered(Plain):
    """Rows `rows_r`, int64, of `x` `[n, c]`, each times its `factor_r`, fp32 or wider, if there are any.

    Where a quantizer is told how many rows there are, the others may be any of x.
    """

    rows_r: Tensor
    factor_r: Tensor | None = None
    kind: ClassVar[str] = "gathered"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows_r), self.x_rc.shape[1]

    def values(self) -> Tensor:
        rows = wide(self.x_rc[self.rows_r])
        return rows if self.factor_r is None else rows * self.factor_r.unsqueeze(-1)


@dataclass(frozen=True)
class Normalized(Plain):
    """`(x - mean) · rstd · weight + bias` of rows: x `[r, c]`, statistics `[r]` fp32 or wider, weight, bias `[c]`.

    Without `mean_r` and `bias_c` it is RMSNorm.
    """

    rstd_r: Tensor
    weight_c: Tensor
    mean_r: Tensor | None = None
    bias_c: Tensor | None = None
    kind: ClassVar[str] = "normalized"
    zero_centered: ClassVar[bool] = False

    def values(self) -> Tensor:
        x = wide(self.x_rc)
        if self.mean_r is not None:
            x = x - self.mean_r.unsqueeze(-1)
        y = x * self.rstd_r.unsqueeze(-1) * norm_factor(self.weight_c, self.zero_centered)
        return y if self.bias_c is None else y + wide(self.bias_c)


class ZeroCenteredNormalized(Normalized):
    """With 1 + weight instead of weight."""

    zero_centered = True


class ActivationSource(Plain):
    """The output or the gradient of an activation `function`; the config's name of the activation is its `kind`."""

    function: ClassVar[str]


def _biased(x_rf: Tensor, bias_f: Tensor | None) -> Tensor:
    return wide(x_rf) if bias_f is None else wide(x_rf) + wide(bias_f)


@dataclass(frozen=True)
class Ungated(ActivationSource):
    """`f(x + bias)` `[r, f]`, x `[r, f]`, bias `[f]`."""

    bias_f: Tensor | None = None

    def values(self) -> Tensor:
        return FUNCTIONS[self.function](_biased(self.x_rc, self.bias_f))[0]


@dataclass(frozen=True)
class UngatedGrad(ActivationSource):
    """The gradient `[r, f]` of `x + bias`, from dy `[r, f]`."""

    dy_rf: Tensor
    bias_f: Tensor | None = None

    def values(self) -> Tensor:
        return wide(self.dy_rf) * FUNCTIONS[self.function](_biased(self.x_rc, self.bias_f))[1]


class GELU(Ungated):
    """In its tanh form."""

    kind = "gelu_tanh"
    function = "gelu_tanh"


class GELUGrad(UngatedGrad):
    kind = "gelu_tanh_grad"
    function = "gelu_tanh"


class ReLU(Ungated):
    kind = "relu"
    function = "relu"


class ReLUGrad(UngatedGrad):
    kind = "relu_grad"
    function = "relu"


class SquaredReLU(Ungated):
    """So et al. 2021, arXiv:2109.08668."""

    kind = "squared_relu"
    function = "squared_relu"


class SquaredReLUGrad(UngatedGrad):
    kind = "squared_relu_grad"
    function = "squared_relu"


@dataclass(frozen=True)
class Gated(ActivationSource):
    """`f(gate) · up` `[r, f]` of x = [gate | up] `[r, 2f]` (Shazeer 2020, arXiv:2002.05202)."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.x_rc.shape[0], self.x_rc.shape[1] // 2

    def values(self) -> Tensor:
        gate, up = wide(self.x_rc).chunk(2, dim=-1)
        return FUNCTIONS[self.function](gate)[0] * _factor(self.function, up)


@dataclass(frozen=True)
class GatedGrad(ActivationSource):
    """The gradient `[r, 2f]` of [gate | up], `x_rc` `[r, 2f]`, from dy `[r, f]`."""

    dy_rf: Tensor

    def values(self) -> Tensor:
        gate, up = wide(self.x_rc).chunk(2, dim=-1)
        dy = wide(self.dy_rf)
        y, derivative = FUNCTIONS[self.function](gate)
        dup = dy * y
        if self.function in LIMITS:
            dup = torch.where(up.abs() <= LIMITS[self.function], dup, 0.0)
        return torch.cat([dy * _factor(self.function, up) * derivative, dup], dim=-1)


class SwiGLU(Gated):
    kind = "swiglu"
    function = "silu"


class SwiGLUGrad(GatedGrad):
    kind = "swiglu_grad"
    function = "silu"


class ClampedSwiGLU(Gated):
    """gpt-oss's: gate and up are clamped, and up + 1 is multiplied."""

    kind = "clamped_swiglu"
    function = "clamped_silu"


class ClampedSwiGLUGrad(GatedGrad):
    kind = "clamped_swiglu_grad"
    function = "clamped_silu"


class LimitedSwiGLU(Gated):
    """DeepSeek-V4's: gate and up are clamped."""

    kind = "limited_swiglu"
    function = "limited_silu"


class LimitedSwiGLUGrad(GatedGrad):
    kind = "limited_swiglu_grad"
    function = "limited_silu"


class GeGLU(Gated):
    """With GELU's tanh form."""

    kind = "geglu_tanh"
    function = "gelu_tanh"


class GeGLUGrad(GatedGrad):
    kind = "geglu_tanh_grad"
    function = "gelu_tanh"


_ActivationSources = tuple[type[Ungated] | type[Gated], type[UngatedGrad] | type[GatedGrad]]
_OF_ACTIVATIONS: tuple[_ActivationSources, ...] = (
    (SwiGLU, SwiGLUGrad),
    (ClampedSwiGLU, ClampedSwiGLUGrad),
    (LimitedSwiGLU, LimitedSwiGLUGrad),
    (GeGLU, GeGLUGrad),
    (GELU, GELUGrad),
    (ReLU, ReLUGrad),
    (SquaredReLU, SquaredReLUGrad),
)
ACTIVATION_SOURCES = {output.kind: (output, gradient) for output, gradient in _OF_ACTIVATIONS}
"""Sources of the output and of the gradient, by the config's name of the activation."""


class HeadNorms(NamedTuple):
    """Inputs of the gradient of the RMSNorm of q and k heads, h = a + g.

    `x_rc`: the packed heads before it. `statistics_2rh`, fp32 or wider: the reciprocal root mean square of each head's
    norm, and the mean of `scaled · normalized`, where `scaled` is the gradient times the weight. `weight_hd`: that of
    each head; None: one.
    """

    x_rc: Tensor
    statistics_2rh: Tensor
    weight_hd: Tensor | None
    zero_centered: bool

    def gradient(self, dy_rhd: Tensor) -> Tensor:
        """The gradient of q and k heads before their norm, fp32 or wider."""
        h, d = dy_rhd.shape[1:]
        rstd, along = self.statistics_2rh.unsqueeze(-1)
        normalized = wide(self.x_rc[:, : h * d]).unflatten(-1, (h, d)) * rstd
        scaled = dy_rhd if self.weight_hd is None else dy_rhd * norm_factor(self.weight_hd, self.zero_centered)
        return (scaled - normalized * along) * rstd


@dataclass(frozen=True)
class QKVGrad:
    """The gradient `[r, c]` of the packed [q | k | v] heads of r = s·b tokens, before q and k were rotated.

    dq `[s, b, a, d]`, dk and dv `[s, b, g, d]` are contiguous, as attention's backward gives them; cos and sin, fp32 or
    wider, `[s, 1 or b, 1, d/2]`. `norms`: of q and k before their rotation; None: they have none.
    """

    dq_sbad: Tensor
    dk_sbgd: Tensor
    dv_sbgd: Tensor
    cos: Tensor
    sin: Tensor
    norms: HeadNorms | None = None
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
        dqk = torch.cat([rotate(x, self.cos, -self.sin) for x in (self.dq_sbad, self.dk_sbgd)], dim=2).flatten(0, 1)
        dqk = dqk if self.norms is None else self.norms.gradient(dqk)
        return torch.cat([dqk, wide(self.dv_sbgd).flatten(0, 1)], dim=1).flatten(1)
