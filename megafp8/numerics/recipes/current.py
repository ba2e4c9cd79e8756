"""Current scaling: one scale per tensor, from the tensor's own amax.

Exact, at the cost of one pass more over the data, and of a reduction wherever ranks hold shards of a tensor, since a
shard has another maximum than the whole.

A token's scale then depends on the other tokens. In batch-invariant models
(`megafp8.numerics.batch_invariance`) each token of a layer's input has a scale of its own in fprop; all other casts
stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megafp8.distributed.collectives import all_reduce
from megafp8.numerics.quantizers import casts, implementation
from megafp8.numerics.recipes.base import PER_TENSOR, AmaxOptions, Capabilities, Fp8Tensor, fast_accumulation
from megafp8.numerics.recipes.rowwise import cast_rows
from megafp8.numerics.sources import Source
from megafp8.numerics.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(AmaxOptions):
    """Per tensor, scaled by the tensor's own amax, over the ranks that hold shards of it."""

    name: ClassVar[str] = "current"
    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1, cast_passes=2)

    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def cast(self, source: Source, tensor: Fp8Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        if rowwise and tensor.token_scales:
            rule = self.scale_rule(self.format_of(tensor.operand))
            by_token = implementation(cast_rows, source)(
                source, self.format_of(tensor.operand), rowwise=True, columnwise=False,
                power_of_two=rule.power_of_two, eps=rule.eps,
            )  # fmt: skip
            if not columnwise:
                return by_token
            return by_token._replace(columnwise=self.cast(source, tensor, rowwise=False, columnwise=True).columnwise)
        module = casts(source)
        whole_amax = all_reduce(module.amax(source), tensor.group, "max")
        return module.cast_current(
            source, whole_amax, self.format_of(tensor.operand), rowwise=rowwise, columnwise=columnwise,
            power_of_two=self.power_of_two, eps=self.amax_epsilon,
        )  # fmt: skip
