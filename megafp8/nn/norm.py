"""`LayerNorm` and `RMSNorm`, and the norm at the input of a module, fused with the cast of its output.

A zero-centred weight is stored less 1, so that weight decay pulls it to 1; 1 is added in fp32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.nn.arguments import require
from megafp8.nn.base import Module, autocast_input, opaque
from megafp8.ops.norm import norm
from megafp8.plan import Neighbor

NORMS = ("LayerNorm", "RMSNorm")


def _effective(weight: Tensor, zero_centered: bool) -> Tensor:
    """What the normalized channels are multiplied by."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1 if zero_centered else weight


class InputNorm:
    """The norm of a module's input, with its parameters `layer_norm_weight` and, of LayerNorm, `layer_norm_bias`."""

    def __init__(self, module: Module, size: int, normalization: str, eps: float, zero_centered_gamma: bool) -> None:
        require(module, "normalization", normalization, NORMS)
        self.module, self.normalization, self.eps, self.zero_centered_gamma = (
            module,
            normalization,
            eps,
            zero_centered_gamma,
        )
        sequence_parallel = module.sequence_parallel
        first = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        module.new_parameters({"layer_norm_weight": (size,)}, first, sequence_parallel=sequence_parallel)
        if normalization == "LayerNorm":
            module.new_parameters({"layer_norm_bias": (size,)}, nn.init.zeros_, sequence_parallel=sequence_parallel)
        else:
            module.register_parameter("layer_norm_bias", None)

    def neighbor(self, *, values_needed: bool) -> Neighbor:
        """What the layer after it is told."""
        if values_needed:
            return Neighbor(self.normalization, "none", "the norm's output is returned")
        return Neighbor(self.normalization, "any")

    def __call__(self, x: Tensor, form: InputFormat | None) -> Tensor | LinearInput:
        """The norm of x as the layer after it takes its input (`form`)."""
        module: Any = self.module
        weight = _effective(module.layer_norm_weight, self.zero_centered_gamma)
        return norm(x, None, weight, module.layer_norm_bias, self.eps, form)[1]


class _Norm(Module):
    """A norm over the last dims, `normalized_shape`, in the input's dtype with statistics in fp32 or wider."""

    centered: bool

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        kind = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(f"{kind}: give normalized_shape; hidden_size is its old name, and one of them is needed")
        if params_dtype is not None and dtype is not None:
            raise ValueError(f"{kind}: give dtype; params_dtype is its old name")
        if sm_margin != 0:
            raise ValueError(f"{kind}: sm_margin is {sm_margin!r}; kernels use all SMs, so it must be 0")
        super().__init__(params_dtype=params_dtype or dtype, device=device)
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape or ())
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        first = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        marked = bool(sequence_parallel)
        self.new_parameters({"weight": self.normalized_shape}, first, sequence_parallel=marked)
        if self.centered:
            self.new_parameters({"bias": self.normalized_shape}, nn.init.zeros_, sequence_parallel=marked)
        else:
            self.register_parameter("bias", None)
        self.finish()

    @opaque
    def forward(self, input: Tensor) -> Tensor:
        """Any leading dims, then `normalized_shape`."""
        normalized, lead = self.normalized_shape, input.shape[: input.dim() - len(self.normalized_shape)]
        if (*lead, *normalized) != tuple(input.shape):
            raise ValueError(
                f"{type(self).__name__}: the input is {list(input.shape)}; it must end with {list(normalized)}"
            )
        module: Any = self
        weight = _effective(module.weight, self.zero_centered_gamma).flatten()
        bias = module.bias.flatten() if self.centered else None
        with autocast_input(input) as x:
            _, y = norm(x.reshape(*lead, math.prod(normalized)), None, weight, bias, self.eps, None)
            assert isinstance(y, Tensor)
            return y.view(x.shape)

    def extra_repr(self) -> str:
        """As nn.LayerNorm's."""
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """`(x - mean) / √(variance + eps) · weight + bias`; weight + 1 with `zero_centered_gamma`."""

    centered = True


class RMSNorm(_Norm):
    """`x / √(mean of squares + eps) · weight`; weight + 1 with `zero_centered_gamma`."""

    centered = False
