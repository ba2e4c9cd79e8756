"""`LayerNorm` and `RMSNorm`, and the norm at the input of a module, fused with the quantization of its output.

A zero-centered weight stores the factor minus 1, so that weight decay pulls the factor to 1. The 1 is added in fp32 or
wider, outside the norm's kernel: then the sum is not rounded in `torch.inference_mode` on a CPU either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.layers.norm.op import norm
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.nn.arguments import require
from megafp8.nn.base import Module, autocast_input, opaque
from megafp8.numerics.sources import norm_factor
from megafp8.parallel.tensor.mappings import gather_from_sequence_parallel
from megafp8.plan import LinearSite, Neighbor

NORMS = ("LayerNorm", "RMSNorm")


def _new_parameters(
    module: Module, prefix: str, shape: tuple[int, ...], *, bias: bool, zero_centered: bool, sequence_parallel: bool
) -> None:
    """Register the weight and the bias of a norm. Without `bias`, the bias is registered as None."""
    first = nn.init.zeros_ if zero_centered else nn.init.ones_
    module.new_parameters({f"{prefix}weight": shape}, first, sequence_parallel=sequence_parallel)
    if bias:
        module.new_parameters({f"{prefix}bias": shape}, nn.init.zeros_, sequence_parallel=sequence_parallel)
    else:
        module.register_parameter(f"{prefix}bias", None)


class InputNorm:
    """Norm at the input of a module.

    The module owns the parameters: `layer_norm_weight`, and for LayerNorm `layer_norm_bias`.

    Args:
        module: Module that the norm belongs to.
        size: Size of the normalized dim.
        kind: "LayerNorm" or "RMSNorm".
        eps: Added to the variance.
        zero_centered: Multiply by `1 + weight` instead of `weight`.
        returned: Whether the module also returns the norm's output.
        gathered: Whether the returned output is gathered over the tensor-parallel ranks under sequence parallelism.
    """

    def __init__(
        self, module: Module, size: int, kind: str, eps: float, *, zero_centered: bool, returned: bool, gathered: bool
    ) -> None:
        require(module, "normalization", kind, NORMS)
        self.module, self.eps, self.zero_centered = module, eps, zero_centered
        self.returned, self.gathered = returned, gathered
        self.neighbor = Neighbor(kind, "none", "the norm's output is returned") if returned else Neighbor(kind, "any")
        _new_parameters(
            module, "layer_norm_", (size,), bias=kind == "LayerNorm", zero_centered=zero_centered,
            sequence_parallel=module.sequence_parallel,
        )  # fmt: skip

    def __call__(self, x: Tensor, form: InputFormat | None) -> Tensor | LinearInput:
        """Normalize x, and quantize the result into `form`, the input format of the next linear layer."""
        module: Any = self.module
        weight, bias = module.layer_norm_weight, module.layer_norm_bias
        return norm(x, None, norm_factor(weight, True) if self.zero_centered else weight, bias, self.eps, form)[1]

    def results(self, y: Tensor, bias: Tensor | None, normed: Tensor | LinearInput, site: LinearSite) -> Any:
        """Return the results of the module.

        Args:
            y: Output of the linear layers.
            bias: Bias that the module returns instead of adding it, or None.
            normed: Output of this norm.
            site: Linear layer that reads `normed`.

        Returns:
            y, or a tuple of y, the bias unless it is None, and `normed` if the module returns it.
        """
        results = [y] if bias is None else [y, bias.to(y.dtype)]
        if self.returned:
            assert isinstance(normed, Tensor)
            if self.gathered and site.parallel == "column" and site.sequence_parallel:
                normed = gather_from_sequence_parallel(normed, self.module.required_group())
            results.append(normed)
        return y if len(results) == 1 else tuple(results)


class _Norm(Module):
    """Norm over the last dims, `normalized_shape`, in the input's dtype with statistics in fp32 or wider."""

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
        _new_parameters(
            self, "", self.normalized_shape, bias=self.centered, zero_centered=zero_centered_gamma,
            sequence_parallel=bool(sequence_parallel),
        )  # fmt: skip
        self.finish()

    @opaque
    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, `[..., *normalized_shape]`, and return the result in the same shape and dtype."""
        normalized, lead = self.normalized_shape, input.shape[: input.dim() - len(self.normalized_shape)]
        if (*lead, *normalized) != tuple(input.shape):
            raise ValueError(
                f"{type(self).__name__}: the input is {list(input.shape)}; it must end with {list(normalized)}"
            )
        module: Any = self
        weight = norm_factor(module.weight, True) if self.zero_centered_gamma else module.weight
        bias = module.bias.flatten() if self.centered else None
        with autocast_input(input) as x:
            _, y = norm(x.reshape(*lead, math.prod(normalized)), None, weight.flatten(), bias, self.eps, None)
            assert isinstance(y, Tensor)
            return y.view(x.shape)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`, like `nn.LayerNorm`."""
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """Layer normalization, `(x - mean) / √(variance + eps) · weight + bias` (arXiv:1607.06450).

    With `zero_centered_gamma` the factor is `1 + weight`.
    """

    centered = True


class RMSNorm(_Norm):
    """Root-mean-square normalization, `x / √(mean of squares + eps) · weight` (arXiv:1910.07467).

    With `zero_centered_gamma` the factor is `1 + weight`.
    """

    centered = False
