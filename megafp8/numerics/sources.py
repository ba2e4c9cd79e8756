"""Inputs of quantizers: a tensor, or a norm, activation or gradient that is computed while it is quantized.

The output of a norm or an activation is often needed only to be quantized. Quantizers therefore take a `MatrixSource`:
the inputs of the computation, and its definition in PyTorch (`values`), which is the reference for the kernels. On
CUDA, one kernel computes a tile and quantizes it. On other devices, `values` is computed and quantized. In both cases
the quantized values are fp32: they are not rounded to bf16 first, and no bf16 copy is stored.

The arithmetic is written out, operation by operation, because the kernels must compute equal bits: exponentials are
powers of two, nothing is contracted into a multiply-add, and a sigmoid is one division.

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
    """Matrix `[r, c]` that is computed from tensors of `dtype` on `device`.

    `kind` identifies the computation to the kernels.
    """

    kind: ClassVar[str]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the matrix."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that the matrix is computed from."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of these tensors."""
        ...

    def values(self) -> Tensor:
        """Compute the matrix, `[r, c]`, in fp32 or wider."""
        ...


def wide(x: Tensor) -> Tensor:
    """Cast `x` to fp32, or return it if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_factor(weight_c: Tensor, zero_centered: bool) -> Tensor:
    """Return the factor of a norm, `weight` or `1 + weight`, in fp32 or wider."""
    return 1.0 + wide(weight_c) if zero_centered else wide(weight_c)


def sigmoid(x: Tensor) -> Tensor:
    """Compute `1 / (1 + 2^(-x·log2 e))`, the form that the kernels use, in fp32 or wider.

    Below x = -87 the result stays at 2^-126, the smallest normal number, so that kernels can divide without a branch.
    """
    exponent = (x * -LOG2_E).clamp(max=126.0)
    if x.is_cuda:
        power = torch.exp2(exponent)
    else:  # use float64: the last bit of a CPU's fp32 result depends on the element's position in the tensor
        power = torch.exp2(exponent.double()).to(x.dtype)
    return torch.ones_like(x) / (1.0 + power)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    y = x * s
    return y, s + y * (1.0 - s)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute GELU's tanh approximation and its derivative (Hendrycks & Gimpel, arXiv:1606.08415).

    It is x·sigmoid(z) with z = 2·√(2/π)·(x + 0.044715·x³), because 0.5·(1 + tanh(z/2)) = sigmoid(z).
    """
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
"""Factor of the gate in the sigmoid of clamped SwiGLU (gpt-oss, arXiv:2508.10925)."""
LIMITS = {"clamped_silu": 7.0, "limited_silu": 10.0}
"""Bound of gate and up, for clamped SwiGLU (gpt-oss) and limited SwiGLU (DeepSeek-V4)."""


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
"""Activation functions by their names in the kernels. Each returns f(x) and f'(x), in fp32 or wider."""


def _factor(function: str, up: Tensor) -> Tensor:
    """Return the factor that a gated activation multiplies f(gate) by."""
    if function not in LIMITS:
        return up
    limited = up.clamp(-LIMITS[function], LIMITS[function])
    return limited + 1.0 if function == "clamped_silu" else limited


def rotate(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of `x_sbad` in fp32 or wider; cos and sin are `[s, 1 or b, 1, d/2]`."""
    first, second = wide(x_sbad).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class Plain:
    """Matrix `x` itself, `[r, c]`, contiguous."""

    x_rc: Tensor
    kind: ClassVar[str] = "plain"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the matrix."""
        return self.x_rc.shape[0], self.x_rc.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of x."""
        return self.x_rc.dtype

    @property
    def device(self) -> torch.device:
        """Device of x."""
        return self.x_rc.device

    def values(self) -> Tensor:
        """Return x, `[r, c]`, in fp32 or wider."""
        return wide(self.x_rc)


@dataclass(frozen=True)
class Gathered(Plain):
    """Selected rows of `x` `[n, c]`, each multiplied by a factor if `factor_r` is not None.

    Attributes:
        rows_r: Indices of the rows, int64 `[r]`. If a quantizer is told the number of valid rows, the rest may be
            arbitrary valid indices.
        factor_r: Factor of each row, fp32 or wider, `[r]`.
    """

    rows_r: Tensor
    factor_r: Tensor | None = None
    kind: ClassVar[str] = "gathered"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of selected rows, and of columns."""
        return len(self.rows_r), self.x_rc.shape[1]

    def values(self) -> Tensor:
        """Gather the rows and multiply them by their factors, `[r, c]`."""
        rows = wide(self.x_rc[self.rows_r])
        return rows if self.factor_r is None else rows * self.factor_r.unsqueeze(-1)


@dataclass(frozen=True)
class Normalized(Plain):
    """Normalized rows, `(x - mean) · rstd · weight + bias`.

    x is `[r, c]`, the statistics are `[r]` in fp32 or wider, and weight and bias are `[c]`. Without `mean_r` and
    `bias_c` this is RMSNorm.
    """

    rstd_r: Tensor
    weight_c: Tensor
    mean_r: Tensor | None = None
    bias_c: Tensor | None = None
    kind: ClassVar[str] = "normalized"
    zero_centered: ClassVar[bool] = False

    def values(self) -> Tensor:
        """Compute the output of the norm, `[r, c]`."""
        x = wide(self.x_rc)
        if self.mean_r is not None:
            x = x - self.mean_r.unsqueeze(-1)
        y = x * self.rstd_r.unsqueeze(-1) * norm_factor(self.weight_c, self.zero_centered)
        return y if self.bias_c is None else y + wide(self.bias_c)


class ZeroCenteredNormalized(Normalized):
    """Normalized rows with the factor 1 + weight instead of weight."""

    zero_centered = True


class ActivationSource(Plain):
    """Output or gradient of the activation `function`. `kind` is the activation's name in configs."""

    function: ClassVar[str]


def _biased(x_rf: Tensor, bias_f: Tensor | None) -> Tensor:
    return wide(x_rf) if bias_f is None else wide(x_rf) + wide(bias_f)


@dataclass(frozen=True)
class Ungated(ActivationSource):
    """Output of an activation, `f(x + bias)` `[r, f]`; x is `[r, f]`, bias `[f]`."""

    bias_f: Tensor | None = None

    def values(self) -> Tensor:
        """Compute `f(x + bias)`, `[r, f]`."""
        return FUNCTIONS[self.function](_biased(self.x_rc, self.bias_f))[0]


@dataclass(frozen=True)
class UngatedGrad(ActivationSource):
    """Gradient of `x + bias`, `[r, f]`, computed from dy, `[r, f]`."""

    dy_rf: Tensor
    bias_f: Tensor | None = None

    def values(self) -> Tensor:
        """Compute `dy · f'(x + bias)`, `[r, f]`."""
        return wide(self.dy_rf) * FUNCTIONS[self.function](_biased(self.x_rc, self.bias_f))[1]


class GELU(Ungated):
    """Output of GELU in its tanh approximation."""

    kind = "gelu_tanh"
    function = "gelu_tanh"


class GELUGrad(UngatedGrad):
    """Gradient of GELU's input."""

    kind = "gelu_tanh_grad"
    function = "gelu_tanh"


class ReLU(Ungated):
    """Output of ReLU."""

    kind = "relu"
    function = "relu"


class ReLUGrad(UngatedGrad):
    """Gradient of ReLU's input."""

    kind = "relu_grad"
    function = "relu"


class SquaredReLU(Ungated):
    """Output of squared ReLU (So et al. 2021, arXiv:2109.08668)."""

    kind = "squared_relu"
    function = "squared_relu"


class SquaredReLUGrad(UngatedGrad):
    """Gradient of squared ReLU's input."""

    kind = "squared_relu_grad"
    function = "squared_relu"


@dataclass(frozen=True)
class Gated(ActivationSource):
    """Output of a gated activation, `f(gate) · up` `[r, f]`; x is [gate | up], `[r, 2f]`.

    Shazeer 2020, arXiv:2002.05202.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and width of the activation."""
        return self.x_rc.shape[0], self.x_rc.shape[1] // 2

    def values(self) -> Tensor:
        """Compute `f(gate) · up`, `[r, f]`."""
        gate, up = wide(self.x_rc).chunk(2, dim=-1)
        return FUNCTIONS[self.function](gate)[0] * _factor(self.function, up)


@dataclass(frozen=True)
class GatedGrad(ActivationSource):
    """Gradient of [gate | up], `[r, 2f]`, computed from dy, `[r, f]`; x is [gate | up], `[r, 2f]`."""

    dy_rf: Tensor

    def values(self) -> Tensor:
        """Compute the gradients of gate and up, `[r, 2f]`."""
        gate, up = wide(self.x_rc).chunk(2, dim=-1)
        dy = wide(self.dy_rf)
        y, derivative = FUNCTIONS[self.function](gate)
        dup = dy * y
        if self.function in LIMITS:
            dup = torch.where(up.abs() <= LIMITS[self.function], dup, 0.0)
        return torch.cat([dy * _factor(self.function, up) * derivative, dup], dim=-1)


class SwiGLU(Gated):
    """Output of SwiGLU."""

    kind = "swiglu"
    function = "silu"


class SwiGLUGrad(GatedGrad):
    """Gradient of SwiGLU's input."""

    kind = "swiglu_grad"
    function = "silu"


class ClampedSwiGLU(Gated):
    """Output of gpt-oss's SwiGLU: gate and up are clamped, and the factor is up + 1."""

    kind = "clamped_swiglu"
    function = "clamped_silu"


class ClampedSwiGLUGrad(GatedGrad):
    """Gradient of the input of gpt-oss's SwiGLU."""

    kind = "clamped_swiglu_grad"
    function = "clamped_silu"


class LimitedSwiGLU(Gated):
    """Output of DeepSeek-V4's SwiGLU: gate and up are clamped."""

    kind = "limited_swiglu"
    function = "limited_silu"


class LimitedSwiGLUGrad(GatedGrad):
    """Gradient of the input of DeepSeek-V4's SwiGLU."""

    kind = "limited_swiglu_grad"
    function = "limited_silu"


class GeGLU(Gated):
    """Output of GeGLU with GELU's tanh approximation."""

    kind = "geglu_tanh"
    function = "gelu_tanh"


class GeGLUGrad(GatedGrad):
    """Gradient of GeGLU's input."""

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
"""Source classes of the output and of the gradient, by the activation's name in configs."""


class HeadNorms(NamedTuple):
    """Inputs for the gradient of the RMSNorms of the h = a + g query and key heads.

    Attributes:
        x_rc: Packed heads before the norms.
        statistics_2rh: For each head, the reciprocal root mean square, and the mean of `scaled · normalized`, where
            `scaled` is the gradient multiplied by the weight. fp32 or wider.
        weight_hd: Weight of each head's norm, or None for weights of one.
        zero_centered: Whether the norms multiply by 1 + weight.
    """

    x_rc: Tensor
    statistics_2rh: Tensor
    weight_hd: Tensor | None
    zero_centered: bool

    def gradient(self, dy_rhd: Tensor) -> Tensor:
        """Return the gradient of the q and k heads before their norms, `[r, h, d]`, fp32 or wider."""
        h, d = dy_rhd.shape[1:]
        rstd, along = self.statistics_2rh.unsqueeze(-1)
        normalized = wide(self.x_rc[:, : h * d]).unflatten(-1, (h, d)) * rstd
        scaled = dy_rhd if self.weight_hd is None else dy_rhd * norm_factor(self.weight_hd, self.zero_centered)
        return (scaled - normalized * along) * rstd


@dataclass(frozen=True)
class QKVGrad:
    """Gradient of the packed [q | k | v] heads of r = s·b tokens before the rotation of q and k, `[r, c]`.

    The gradients dq `[s, b, a, d]`, dk and dv `[s, b, g, d]` are contiguous, as attention's backward returns them. cos
    and sin are `[s, 1 or b, 1, d/2]` in fp32 or wider. `norms` describes the norms of q and k before the rotation; None
    means that there are no norms.
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
        """Number of tokens, and width of the packed heads."""
        s, b, a, d = self.dq_sbad.shape
        return s * b, (a + 2 * self.dk_sbgd.shape[2]) * d

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of dq."""
        return self.dq_sbad.dtype

    @property
    def device(self) -> torch.device:
        """Device of dq."""
        return self.dq_sbad.device

    def values(self) -> Tensor:
        """Rotate dq and dk back, apply the gradients of the norms, and pack the heads, `[r, c]`."""
        dqk = torch.cat([rotate(x, self.cos, -self.sin) for x in (self.dq_sbad, self.dk_sbgd)], dim=2).flatten(0, 1)
        dqk = dqk if self.norms is None else self.norms.gradient(dqk)
        return torch.cat([dqk, wide(self.dv_sbgd).flatten(0, 1)], dim=1).flatten(1)
