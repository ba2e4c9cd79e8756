"""Current scaling: one scale per tensor, from the tensor's own amax.

Exact, at the cost of one pass more over the data, and of a reduction wherever ranks hold shards of a tensor, since a
shard has another maximum than the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megafp8.distributed.collectives import all_reduce
from megafp8.numerics.quantizers import casts
from megafp8.numerics.recipes.base import PER_TENSOR, AmaxOptions, Capabilities, Fp8Tensor, fast_accumulation
from megafp8.numerics.sources import Source
from megafp8.numerics.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(AmaxOptions):
    """Per tensor, scaled by the tensor's own amax, over the ranks that hold shards of it."""

    name: ClassVar[str] = "current"
    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1, cast_passes=2)

    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def cast(self, source: Source, tensor: Fp8Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        implementation = casts(source)
        whole_amax = all_reduce(implementation.amax(source), tensor.group, "max")
        return implementation.cast_current(
            source, whole_amax, self.format_of(tensor.operand), rowwise=rowwise, columnwise=columnwise,
            power_of_two=self.power_of_two, eps=self.amax_epsilon,
        )  # fmt: skip
