"""What a linear layer and its neighbours hand each other: values, codes in their place, and what to make them of again.

Codes for values. A norm or an activation in front of an FP8 layer may cast what it makes (`InputCast` says how) and
hand over codes, `Quantized`; an activation behind it may cast the gradient and leave it in the layer's
`QuantizedGradHandoff`. Autograd then carries a tensor of the right shape without storage.

Made again instead of kept. What a layer keeps for wgrad is its input: FP8 columns, or values. Whoever made that input
keeps the tensors it was made of for its own backward: a norm the residual stream, an activation the product before it.
So the layer may keep references to those, and in backward compute and cast them once more (`Again`): a pass over them,
instead of memory. The cast is the same, bit for bit: scales do not move within a step, what a cast notes is a maximum,
inputs are rounded to nearest. `current` scaling takes the amax a second time.

Where ranks hold slices of the tokens, each makes its own slice again, and the slices are gathered while dgrad runs.
Blocks and rows gather their columns in backward in any case; columns with one factor for the tensor, and values, are
otherwise kept whole, and so gathered a second time.

Shapes: m tokens (all leading dims), k channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_gather_async
from megafp8.fp8.quantizers import Quantizer, casts
from megafp8.fp8.smoothing import ChannelScales
from megafp8.fp8.sources import Plain, Source
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor


@dataclass(frozen=True)
class Remake:
    """How a layer's input is made again of tensors.

    `quantizer`: casts it as it was cast before the layer; None where the layer has values. `group`: the ranks whose
    slices of the tokens follow each other; None where a rank makes all of them.
    """

    source: Callable[..., Source]
    quantizer: Quantizer | None = None
    group: ProcessGroup | None = None

    def columns(
        self, tensors: Sequence[Tensor | None], of_layer: Quantizer
    ) -> tuple[ScaledTensor, ProcessGroup | None]:
        """Columns `[k, m]` and None; or this rank's, and the group to gather them over. `of_layer` casts values."""
        if self.quantizer is None:
            made = of_layer(Plain(self.values(tensors)()), rowwise=False, columnwise=True)
            return made.required_columnwise, None
        made = self.quantizer(self.source(*tensors), rowwise=False, columnwise=True)
        return made.required_columnwise, self.group

    def values(self, tensors: Sequence[Tensor | None]) -> Callable[[], Tensor]:
        """Starts gathering the values; what it returns waits for them, `[m, k]`."""
        source = self.source(*tensors)
        own = source.x_rc if type(source) is Plain else casts(source).materialize(source)
        alive = [own]  # until it has been sent
        (whole,), work = all_gather_async(alive, self.group)

        def wait() -> Tensor:
            work.wait()
            alive.clear()
            return whole

        return wait


class Again(NamedTuple):
    """A layer's input as `how` makes it of `tensors`, which others keep for backward anyway."""

    tensors: tuple[Tensor | None, ...]
    how: Remake

    def over(self, group: ProcessGroup) -> Again:
        """The same where `tensors` are this rank's slice and the layer has the slices of all of `group`."""
        return Again(self.tensors, Remake(self.how.source, self.how.quantizer, group))


def again(source: Source, quantizer: Quantizer | None) -> Again:
    """What `source` has, to be made again."""
    return Again(
        tuple(getattr(source, field.name) for field in fields(source)),  # type: ignore[arg-type]
        Remake(type(source), quantizer),
    )


class Computed(NamedTuple):
    """Values `[..., k]` that need not be kept."""

    values: Tensor
    again: Again


class Quantized(NamedTuple):
    """A quantized activation: its operand, and a `carrier` of its shape `[..., k]` that has no values.

    The carrier is one element seen as many; it takes the activation's place in autograd's graph, and its gradient is
    the activation's. With `again` the operand has no columns.
    """

    carrier: Tensor
    operand: QuantizedTensor
    again: Again | None = None


Input = Tensor | Computed | Quantized


def carrier(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` without values or memory, of the dtype and device of `like`."""
    return like.new_empty(1).expand(shape)


class QuantizedGradHandoff:
    """Where the consumer of a layer's output leaves the output's gradient if it has quantized it itself."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.operand: QuantizedTensor | None = None

    def take(self) -> QuantizedTensor | None:
        operand, self.operand = self.operand, None
        return operand


class InputCast(NamedTuple):
    """How a layer wants its input quantized: rows, and columns too unless the layer makes them itself; but as values
    where the tokens are no multiple of `shard_alignment`.

    `smoothing`: by what its channels are to be multiplied before.
    """

    quantizer: Quantizer
    columnwise: bool = True
    shard_alignment: int = 1
    smoothing: ChannelScales | None = None


def as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@dataclass
class FusedOutput:
    """How the next layer wants what a Function computes, and what the Function hands over beside a tensor.

    `remade`: that layer is to make its input again in backward.
    """

    cast: InputCast | None
    grad_enabled: bool  # torch itself says that gradients are needed within no_grad too
    remade: bool
    operand: QuantizedTensor | None = None
    again: Again | None = None

    def hand_over(self, source: Source, like: Tensor) -> Tensor:
        """The source's values shaped like `like` but for the last dim; or a carrier, its operand put here."""
        shape, cast = (*like.shape[:-1], source.shape[1]), self.cast
        by_values = cast is None or source.shape[0] % cast.shard_alignment != 0
        if self.remade and self.grad_enabled:
            self.again = again(source, None if cast is None or by_values else cast.quantizer)
        if cast is None or by_values:
            return casts(source).materialize(source).view(shape)
        columns = cast.columnwise and self.grad_enabled and not self.remade
        self.operand = cast.quantizer(source, rowwise=True, columnwise=columns)
        return carrier(like, shape)

    def result(self, y: Tensor) -> Input:
        if self.operand is not None:
            return Quantized(y, self.operand, self.again)
        return y if self.again is None else Computed(y, self.again)


def fused_gradient(source: Source, like: Tensor, slot: QuantizedGradHandoff | None) -> Tensor:
    """The source's values shaped like `like` but for the last dim; or a carrier, its operand put into `slot`."""
    shape = (*like.shape[:-1], source.shape[1])
    if slot is None:
        return casts(source).materialize(source).view(shape)
    slot.operand = slot.quantizer(source, rowwise=True, columnwise=True)
    return carrier(like, shape)
