"""Current scaling: one scale per tensor, computed from the amax of the tensor itself.

The scale always fits. It costs one more pass over the data, and a reduction if ranks hold shards of a tensor, because
the maximum of a shard differs from the maximum of the whole tensor.

With one scale per tensor, the quantization of a token depends on the other tokens. In batch-invariant models
(`megafp8.numerics.batch_invariance`), fprop therefore uses a separate scale for each token of a layer's input. All
other casts are unchanged.
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
    """Recipe with one scale per tensor, computed from the amax over all ranks that hold shards of the tensor."""

    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1, cast_passes=2)

    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`."""
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
    """Cast with a scale computed from the amax of the whole tensor, which is sharded over `group`."""
    whole_amax = all_reduce(amax(source), group, "max")
    return cast(source, whole_amax, rowwise=rowwise, columnwise=columnwise)


def _cast_by_token(
    source: MatrixSource, *, rowwise: bool, columnwise: bool, by_amax: Cast, cast: Cast
) -> QuantizedTensor:  # fmt: skip
    """Cast rowwise with one scale per token, and columnwise with one scale per tensor."""
    made = cast(source, rowwise=True, columnwise=False) if rowwise else None
    if made is not None and not columnwise:
        return made
    by_tensor = by_amax(source, rowwise=False, columnwise=columnwise)
    return by_tensor if made is None else made._replace(columnwise=by_tensor.columnwise)
