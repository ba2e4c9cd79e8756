"""Rowwise scaling: one scale for each row of each GEMM operand: for each token, input channel or output channel.

With one scale per tensor, a single outlier pushes small values of the whole tensor below FP8's range. With one scale
per row, it affects only its row. The cost is that scales must be stored and multiplied in the GEMM, and that a second
cast is needed: the rows of the transposed matrix contain other elements, so columnwise data is computed from the
original values, never from rowwise data.

Under tensor parallelism, some operands are sharded along the summed dim: in forward the input and the weight of
row-parallel layers, and others in backward. A row of such an operand has one scale for each rank's shard, as in torchao
and Transformer Engine. Losses therefore differ between tensor-parallel sizes by FP8's rounding.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import block_amax, quantize_blocks
from megafp8.numerics.quantizers import Cast, implementation
from megafp8.numerics.recipes.base import (
    AmaxOptions,
    Capabilities,
    Fp8Tensor,
    PerOperand,
    fast_accumulation,
    format_option,
)
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import ROW, QuantizedTensor
from megafp8.parallel.collectives import all_reduce


def amaxes(source: MatrixSource) -> tuple[Tensor, Tensor]:
    """Return the amaxes of the rows, `[r]`, and of the columns, `[c]`, fp32; inf for rows that are not finite."""
    x_rc = source.values()
    return block_amax(x_rc, ROW).squeeze(-1), block_amax(x_rc.t(), ROW).squeeze(-1)


def cast_rows(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float,
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Cast with one scale per row, and columnwise with one scale per column.

    If the source is a shard of a tensor, `amaxes` contains the amaxes of the tensor's rows and columns.
    """
    x_rc = source.values()
    amax_r, amax_c = (None, None) if amaxes is None else (amax.unsqueeze(-1) for amax in amaxes)
    cast = partial(quantize_blocks, fmt=fmt, granularity=ROW, power_of_two=power_of_two, eps=eps)
    return QuantizedTensor(
        cast(x_rc, amax=amax_r) if rowwise else None,
        cast(x_rc.t().contiguous(), amax=amax_c) if columnwise else None,
    )


@dataclass(frozen=True, kw_only=True)
class RowwiseScaling(AmaxOptions):
    """Recipe with one scale for each row of each GEMM operand.

    All operands are E4M3 by default: with one scale per row, gradients do not need E5M2's range. The weight gradient
    sums over tokens; set `override_linear_precision` to keep it in high precision.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(ROW, ROW, ROW), shard_alignment=1, cast_passes=2
    )

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")
    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`."""
        fmt, options = self.format_of(tensor.operand), {"power_of_two": self.power_of_two, "eps": self.amax_epsilon}
        cast = partial(implementation(cast_rows, device), fmt=fmt, **options)
        if tensor.token_group is None:
            return cast
        return partial(_cast_shard, amaxes=implementation(amaxes, device), cast=cast, group=tensor.token_group)


def _cast_shard(
    source: MatrixSource, *, rowwise: bool, columnwise: bool, amaxes: Callable[[MatrixSource], tuple[Tensor, Tensor]],
    cast: Callable[..., QuantizedTensor], group: ProcessGroup,
) -> QuantizedTensor:  # fmt: skip
    """Cast a shard of the tokens. The amax of a column covers the tokens of all ranks of `group`."""
    whole_amaxes = None
    if columnwise:
        whole_amaxes = amaxes(source)
        all_reduce(whole_amaxes[1], group, "max")
    return cast(source, rowwise=rowwise, columnwise=columnwise, amaxes=whole_amaxes)
