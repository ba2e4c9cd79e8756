"""Current scaling: one scale per tensor, from the tensor's own amax.

Exact, at the cost of one pass more over the data, and of a reduction wherever ranks hold shards of a tensor, since a
shard has another maximum than the whole.

A token's scale then depends on the other tokens. In batch-invariant models
(`megafp8.numerics.batch_invariance`) each token of a layer's input has a scale of its own in fprop; all other casts
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import reference
from megafp8.numerics.quantizers import Cast, implementation
from megafp8.numerics.recipes.base import PER_TENSOR, AmaxOptions, Capabilities, Fp8Tensor, fast_accumulation
from megafp8.numerics.recipes.rowwise import cast_rows
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import QuantizedTensor
from megafp8.parallel.collectives import all_reduce


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(AmaxOptions):
    """Per tensor, scaled by the tensor's own amax, over the ranks that hold shards of it."""

    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1, cast_passes=2)

    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        rule, fmt = self.scale_rule(self.format_of(tensor.operand)), self.format_of(tensor.operand)
        amax, cast = implementation(reference.amax, device), implementation(reference.cast_current, device)
        options: dict[str, Any] = {"fmt": fmt, "power_of_two": rule.power_of_two, "eps": rule.eps}
        by_amax = partial(_cast_by_amax, amax=amax, cast=partial(cast, **options), group=tensor.group)
        if not tensor.token_scales:
            return by_amax
        return partial(_cast_by_token, by_amax=by_amax, cast=partial(implementation(cast_rows, device), **options))


def _cast_by_amax(
    source: MatrixSource, *, rowwise: bool, columnwise: bool, amax: Callable[[MatrixSource], Tensor],
    cast: Callable[..., QuantizedTensor], group: ProcessGroup | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast by the amax of the tensor, of which the ranks of `group` hold shards."""
    whole_amax = all_reduce(amax(source), group, "max")
    return cast(source, whole_amax, rowwise=rowwise, columnwise=columnwise)


def _cast_by_token(
    source: MatrixSource, *, rowwise: bool, columnwise: bool, by_amax: Cast, cast: Cast
) -> QuantizedTensor:  # fmt: skip
    """Cast rowwise by a scale of each token, and columnwise by the amax of the tensor."""
    made = cast(source, rowwise=True, columnwise=False) if rowwise else None
    if made is not None and not columnwise:
        return made
    by_tensor = by_amax(source, rowwise=False, columnwise=columnwise)
    return by_tensor if made is None else made._replace(columnwise=by_tensor.columnwise)
