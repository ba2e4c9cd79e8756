"""Current scaling: one scale per tensor, from the tensor's own amax.

Exact, at the cost of one pass more over the data, and of a reduction wherever ranks hold shards of a tensor, since a
shard has another maximum than the whole.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import ScaleRule
from megafp8.fp8.quantizers import Capabilities, PerOperand, PerTensorQuantizer, casts
from megafp8.fp8.recipes.base import AmaxOptions, Fp8Tensor, fast_accumulation
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import TENSOR, QuantizedTensor

CAPABILITIES = Capabilities(granularity=PerOperand(TENSOR, TENSOR, TENSOR), shard_alignment=1, cast_passes=2)


@dataclass(frozen=True)
class CurrentQuantizer(PerTensorQuantizer):
    """Scales a tensor by its own amax, over `group` where this rank holds only a shard of it."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    fmt: Format
    group: ProcessGroup | None
    _: KW_ONLY
    eps: float
    power_of_two: bool

    @property
    def rule(self) -> ScaleRule:
        return ScaleRule(self.fmt.max, eps=self.eps, power_of_two=self.power_of_two)

    def for_sharded_input(self, group: ProcessGroup) -> CurrentQuantizer:
        return replace(self, group=group)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        implementation = casts(source)
        whole_amax = all_reduce(implementation.amax(source), self.group, "max")
        return implementation.cast_current(
            source, whole_amax, self.fmt, rowwise=rowwise, columnwise=columnwise, power_of_two=self.power_of_two,
            eps=self.eps,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(AmaxOptions):
    """Per tensor, scaled by the tensor's own amax."""

    name: ClassVar[str] = "current"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def quantizer(self, tensor: Fp8Tensor) -> CurrentQuantizer:
        fmt = self.format_of(tensor.operand)
        return CurrentQuantizer(fmt, tensor.group, eps=self.amax_epsilon, power_of_two=self.power_of_two)
