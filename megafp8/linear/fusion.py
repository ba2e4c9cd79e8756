"""Fusion interface between a linear layer and the operation before it: quantized inputs, and how to recompute them.

*Quantized instead of values.* A norm or an activation before an FP8 layer quantizes what it computes, as the layer's
`InputFormat` says, and the values are never stored: autograd carries a placeholder of the right shape without storage.
In backward, an activation leaves the gradient of its input quantized in the `QuantizedGradHandoff` of the layer that
made that input.

*Recomputed instead of kept.* For wgrad a layer keeps its input, FP8 columnwise or values. The operation that computed
the input keeps its own inputs anyway: a norm the residual stream, an activation the product before it. So the layer may
keep references to those, and compute and quantize them once more in backward: a pass over them instead of memory. The
result is the same bit for bit: scales do not change within a step, recording an amax is a maximum, and inputs are
rounded to nearest. `current` scaling computes the amax a second time.

Where ranks hold slices of the tokens, each recomputes its own, and the slices are gathered while dgrad runs. Columnwise
data with a scale per block or row is gathered in backward in any case; with one scale per tensor, and for values, that
is a second gather.

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
    """How a layer's input is recomputed from tensors.

    `quantizer`: quantizes it as in forward; None where the layer was given values. `group`: the ranks whose slices of
    the tokens follow each other; None where this rank computes all of them.
    """

    source: Callable[..., MatrixSource]
    quantizer: Quantizer | None
    group: ProcessGroup | None

    def columnwise(
        self, tensors: Sequence[Tensor | None], layer_quantizer: Quantizer
    ) -> tuple[ScaledTensor, ProcessGroup | None]:
        """The input columnwise `[k, m]` and None; or this rank's, and the group to gather it over.

        `layer_quantizer` quantizes values.
        """
        if self.quantizer is None:
            quantized = layer_quantizer(Plain(self.values(tensors)()), rowwise=False, columnwise=True)
            return quantized.required_columnwise, None
        quantized = self.quantizer(self.source(*tensors), rowwise=False, columnwise=True)
        return quantized.required_columnwise, self.group

    def values(self, tensors: Sequence[Tensor | None]) -> Callable[[], Tensor]:
        """Start gathering the values; what it returns waits for them, `[m, k]`."""
        source = self.source(*tensors)
        values = source.x_rc if type(source) is Plain else casts(source).materialize(source)
        alive = [values]  # until it has been sent
        (whole,), work = all_gather_async(alive, self.group)

        def wait() -> Tensor:
            work.wait()
            alive.clear()
            return whole

        return wait


class RecomputedInput(NamedTuple):
    """A layer's input, to be recomputed from `tensors`, which other operations keep for backward anyway."""

    tensors: tuple[Tensor | None, ...]
    how: Recompute


class LinearInput(NamedTuple):
    """A linear layer's input `[..., k]` from an operation that is fused with it.

    `tensor`: the values; or, with `quantized`, a placeholder that takes their place in autograd's graph. `recompute`:
    the layer keeps this instead of the input, and `quantized` has no columnwise copy.
    """

    tensor: Tensor
    quantized: QuantizedTensor | None
    recompute: RecomputedInput | None


def placeholder(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` in autograd's graph without values or memory, of the dtype and device of `like`."""
    return _element(like.dtype, like.device).expand(shape)


@cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The element that all placeholders are views of. Its value is never read."""
    return torch.empty(1, dtype=dtype, device=device)


def as_matrix(x: Tensor) -> Tensor:
    """`[..., c]` -> `[r, c]`, row-major."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def runs_unfused(x: Tensor) -> bool:
    """Whether an operation on x gives values by PyTorch's own ops: on a CPU, in torch.inference_mode.

    What is trained runs the references of the GPU's kernels on a CPU, step by step, in the same order of roundings.
    """
    return not x.is_cuda and torch.is_inference_mode_enabled()


@dataclass
class FusedOutput:
    """What an operation gives the linear layer after it: made within the operation's autograd Function.

    `format`: how the layer takes it, None for values. `grad_enabled`: torch.is_grad_enabled() outside the Function.
    """

    format: InputFormat | None
    grad_enabled: bool  # within a Function torch says that gradients are needed even under no_grad
    quantized: QuantizedTensor | None = None
    recompute: RecomputedInput | None = None

    def compute(self, source: MatrixSource, lead: Sequence[int], like: Tensor) -> Tensor:
        """The source's values, of leading dims `lead`; or a placeholder, of `like`'s dtype, and `quantized` is set.

        ValueError where the rows are no multiple of the format's alignment.
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
        """What the layer takes, `y` being what the Function returned."""
        if self.quantized is None and self.recompute is None:
            return y
        return LinearInput(y, self.quantized, self.recompute)


def check_alignment(tokens: int, alignment: int) -> None:
    """ValueError unless slices of `tokens` tokens can be quantized alone."""
    if tokens % alignment:
        raise ValueError(
            f"{tokens} tokens a rank, and the layer gathers in FP8 slices that must be multiples of {alignment}; build "
            "the model with the number of tokens it is to run on (BuildContext.tokens)"
        )


def fused_gradient(
    source: MatrixSource, lead: Sequence[int], like: Tensor, handoff: QuantizedGradHandoff | None
) -> Tensor:
    """The source's values, of leading dims `lead`; or a placeholder, of `like`'s dtype, and `handoff.grad` is set."""
    shape = (*lead, source.shape[1])
    if handoff is None:
        return casts(source).materialize(source).view(shape)
    handoff.grad = handoff.quantizer(source, rowwise=True, columnwise=True)
    return placeholder(like, shape)
