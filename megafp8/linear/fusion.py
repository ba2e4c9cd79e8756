"""Fusion interface between a linear layer and the operation before it: quantized inputs and their recomputation.

*Quantized inputs.* A norm or an activation before an FP8 layer quantizes its own output in the layer's `InputFormat`,
and the high-precision values are never stored. Autograd sees a placeholder of the right shape without storage. In
backward, an activation quantizes the gradient of its input and leaves it in the `QuantizedGradHandoff` of the layer
that produced that input.

*Recomputed inputs.* For wgrad, a layer saves its input, as columnwise FP8 data or as values. The operation that
computed the input saves its own inputs anyway: a norm the residual stream, an activation the preceding product. The
layer may therefore keep references to these tensors, and compute and quantize its input again in backward. This trades
memory for one more pass over the tensors. The result is bitwise equal: scales do not change within a step, recording an
amax is a maximum, and inputs are rounded to nearest. `current` scaling computes the amax a second time.

If ranks hold slices of the tokens, each rank recomputes its slice, and the slices are gathered while dgrad runs.
Columnwise data with a scale per block or row is gathered in backward in any case. With one scale per tensor, and for
values, recomputation adds a second gather.

Shapes: m tokens (all leading dims), k channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.quantizers import Quantizer, casts
from megafp8.numerics.sources import MatrixSource, Plain
from megafp8.numerics.tensor import QuantizedTensor, ScaledTensor
from megafp8.parallel.collectives import all_gather_async


@dataclass(frozen=True)
class Recompute:
    """Recipe to recompute a layer's input from saved tensors.

    Attributes:
        source: Builds the matrix source from the tensors.
        quantizer: Quantizes the input as in forward; None if the layer's input was high-precision values.
        group: Ranks whose slices of the tokens are concatenated; None if this rank recomputes all tokens.
    """

    source: Callable[..., MatrixSource]
    quantizer: Quantizer | None
    group: ProcessGroup | None

    def columnwise(
        self, tensors: Sequence[Tensor | None], layer_quantizer: Quantizer
    ) -> tuple[ScaledTensor, ProcessGroup | None]:
        """Return the columnwise input `[k, m]` and None, or this rank's slice and the group to gather it over.

        `layer_quantizer` quantizes the input if it was high-precision values.
        """
        if self.quantizer is None:
            quantized = layer_quantizer(Plain(self.values(tensors)()), rowwise=False, columnwise=True)
            return quantized.required_columnwise, None
        quantized = self.quantizer(self.source(*tensors), rowwise=False, columnwise=True)
        return quantized.required_columnwise, self.group

    def values(self, tensors: Sequence[Tensor | None]) -> Callable[[], Tensor]:
        """Start to gather the values, and return a function that waits for them and returns `[m, k]`."""
        source = self.source(*tensors)
        values = source.x_rc if type(source) is Plain else casts(source).materialize(source)
        alive = [values]  # keep the tensor until it has been sent
        (whole,), work = all_gather_async(alive, self.group)

        def wait() -> Tensor:
            work.wait()
            alive.clear()
            return whole

        return wait


class RecomputedInput(NamedTuple):
    """Layer input that is recomputed from `tensors`, which other operations save for backward anyway."""

    tensors: tuple[Tensor | None, ...]
    how: Recompute


class LinearInput(NamedTuple):
    """Input `[..., k]` of a linear layer, from an operation that is fused with the layer.

    Attributes:
        tensor: Values of the input; if `quantized` is set, a placeholder that represents them in autograd's graph.
        quantized: Quantized input, or None.
        recompute: Saved by the layer in place of its input; `quantized` then has no columnwise copy.
    """

    tensor: Tensor
    quantized: QuantizedTensor | None
    recompute: RecomputedInput | None


def placeholder(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of `shape` without values or memory for autograd's graph, with the dtype and device of `like`."""
    return _element(like.dtype, like.device).expand(shape)


@cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the element that all placeholders of a dtype and device are views of. Its value is never read."""
    return torch.empty(1, dtype=dtype, device=device)


def as_matrix(x: Tensor) -> Tensor:
    """Reshape `[..., c]` to a row-major matrix `[r, c]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def runs_unfused(x: Tensor) -> bool:
    """Return whether PyTorch's own ops compute an operation on x: on a CPU, in torch.inference_mode.

    Training on a CPU runs the references of the GPU kernels instead, with the same steps and the same order of
    roundings.
    """
    return not x.is_cuda and torch.is_inference_mode_enabled()


@dataclass
class FusedOutput:
    """Output of an operation for the next linear layer, made within the operation's autograd Function.

    Attributes:
        format: Format in which the layer takes its input; None for high-precision values.
        grad_enabled: torch.is_grad_enabled() outside the Function. Within a Function, torch reports that gradients are
            needed even under no_grad.
        quantized: Quantized output, set by `compute`.
        recompute: Recipe to recompute the output, set by `compute`.
    """

    format: InputFormat | None
    grad_enabled: bool
    quantized: QuantizedTensor | None = None
    recompute: RecomputedInput | None = None

    def compute(self, source: MatrixSource, lead: Sequence[int], like: Tensor) -> Tensor:
        """Return the source's values with leading dims `lead`, or quantize them and return a placeholder.

        In the second case `quantized` is set, and the placeholder has the dtype of `like`.

        Raises:
            ValueError: If the number of rows is not a multiple of the format's alignment.
        """
        rows, columns = source.shape
        shape, form = (*lead, columns), self.format
        if form is None:
            return casts(source).materialize(source).view(shape)
        recompute = form.recompute and self.grad_enabled
        if recompute:
            tensors = tuple(getattr(source, field.name) for field in fields(source))  # type: ignore[arg-type]
            self.recompute = RecomputedInput(tensors, Recompute(type(source), form.quantizer, form.group))
        if form.quantizer is None:
            return casts(source).materialize(source).view(shape)
        if form.alignment > 1:
            check_alignment(rows, form.alignment)
        columnwise = form.columnwise and self.grad_enabled and not recompute
        self.quantized = form.quantizer(source, rowwise=True, columnwise=columnwise)
        return placeholder(like, shape)

    def result(self, y: Tensor) -> Tensor | LinearInput:
        """Return the layer's input for `y`, the tensor that the autograd Function returned."""
        if self.quantized is None and self.recompute is None:
            return y
        return LinearInput(y, self.quantized, self.recompute)


def check_alignment(tokens: int, alignment: int) -> None:
    """Raise ValueError unless slices of `tokens` tokens can be quantized separately."""
    if tokens % alignment:
        raise ValueError(
            f"{tokens} tokens per rank, but the layer gathers slices in FP8, which must be multiples of {alignment}; "
            "build the model with the number of tokens that it will run on (BuildContext.tokens)"
        )


def fused_gradient(
    source: MatrixSource, lead: Sequence[int], like: Tensor, handoff: QuantizedGradHandoff | None
) -> Tensor:
    """Return the source's values with leading dims `lead`, or quantize them and return a placeholder.

    In the second case `handoff.grad` is set, and the placeholder has the dtype of `like`.
    """
    shape = (*lead, source.shape[1])
    if handoff is None:
        return casts(source).materialize(source).view(shape)
    handoff.grad = handoff.quantizer(source, rowwise=True, columnwise=True)
    return placeholder(like, shape)
