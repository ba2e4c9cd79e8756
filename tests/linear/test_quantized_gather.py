"""Slices of the tokens cast on real ranks and gathered, against the whole tensor cast by the plain twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, group

from megafp8.gemm.cublaslt_problem import is_arranged
from megafp8.linear.quantized_gather import Rows, gather_columns
from megafp8.numerics.formats import E4M3, E5M2
from megafp8.numerics.quantize import amax, quantize, quantize_blocks, scale_from_amax
from megafp8.numerics.quantizers import Quantizer
from megafp8.numerics.recipes import (
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    StaticScaling,
)
from megafp8.numerics.recipes.base import OPERANDS, Fp8Tensor, RecipeQuantizer
from megafp8.numerics.recipes.delayed import DelayedQuantizer
from megafp8.numerics.recipes.mxfp8 import quantize_mxfp8
from megafp8.numerics.recipes.nvfp4 import NVFP4Quantizer
from megafp8.numerics.recipes.static import StaticQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_1X128, DEQUANTIZED, ROW, QuantizedTensor, ScaledTensor, on_hopper
from megafp8.parallel.tp_overlap import Collective, TPOverlap
from tests.fp8.reference import bytes_of
from tests.marks import slow_but
from tests.parallel.chunks import InChunks
from tests.world import World


def _one(x: Tensor) -> ScaledTensor:
    scale = scale_from_amax(amax(x), E5M2.max)
    return ScaledTensor(quantize(x, scale, E5M2), scale.reciprocal())


def _given(x: Tensor) -> ScaledTensor:
    return ScaledTensor(quantize(x, torch.tensor(3.0), E4M3), torch.tensor(3.0).reciprocal())


SCALE = (torch.tensor(3.0), torch.tensor(3.0).reciprocal(), torch.zeros(()))
CPU = torch.device("cpu")
INPUT, _, GRADIENT = (Fp8Tensor("layer", operand, None, None) for operand in OPERANDS)
KINDS: dict[str, tuple[Quantizer, Callable[[Tensor], ScaledTensor]]] = {
    "row": (
        RecipeQuantizer(RowwiseScaling(), INPUT, CPU),
        lambda x: quantize_blocks(x, E4M3, ROW, power_of_two=False, eps=0.0),
    ),
    "row-pow2": (
        RecipeQuantizer(RowwiseScaling(fp8_format="hybrid", amax_epsilon=1e-3, power_of_two=True), GRADIENT, CPU),
        lambda x: quantize_blocks(x, E5M2, ROW, power_of_two=True, eps=1e-3),
    ),
    "1x128": (
        RecipeQuantizer(BlockwiseScaling(), INPUT, CPU),
        lambda x: quantize_blocks(x, E4M3, BLOCK_1X128, power_of_two=True, eps=0.0),
    ),
    "dequantized": (RecipeQuantizer(MXFP8Scaling(), INPUT, CPU), lambda x: quantize_mxfp8(x).dequantized()),
    "current": (RecipeQuantizer(CurrentScaling(), GRADIENT, CPU), _one),
    "delayed": (DelayedQuantizer(DelayedScaling(), INPUT, CPU, *SCALE), _given),
    "static": (StaticQuantizer(StaticScaling(), INPUT, CPU, *SCALE), _given),
}


def _whole(r: int, c: int, dtype: torch.dtype) -> Tensor:
    """`[r, c]`, in which every slice of rows has other amaxes, some columns are zeros, and some are not finite."""
    x = torch.randn(r, c) * torch.arange(1, r + 1).unsqueeze(-1)
    x[:, 3], x[: r // 2, 4], x[-1, 5], x[0, 6] = 0, 0, torch.inf, torch.nan
    return x.to(dtype)


def _equal(actual: ScaledTensor, expected: ScaledTensor) -> None:
    assert actual.granularity is expected.granularity
    assert actual.data.is_contiguous() or actual.granularity is DEQUANTIZED
    assert actual.scale_inv.shape == expected.scale_inv.shape
    if actual.granularity is DEQUANTIZED:
        assert torch.equal(actual.data.nan_to_num(nan=7.0), expected.data.nan_to_num(nan=7.0))
    else:
        assert (bytes_of(actual.data) == bytes_of(expected.data)).all()
    assert torch.equal(actual.scale_inv, expected.scale_inv)


def _as_kernels_write(operand: QuantizedTensor) -> QuantizedTensor:
    """The same with blocks' factors in cuBLASLt's order."""
    parts = [x._replace(scale_inv=x.scale_inv.t().contiguous().t()) for x in operand[:2] if isinstance(x, ScaledTensor)]
    return QuantizedTensor(parts[0], parts[1])


def _cast(kind: str, r: int, c: int, dtype: torch.dtype, ordered: bool) -> None:
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    x = _whole(r * world.size(), c, dtype)
    if kind == "current":
        x[5:, :], x[:1, :] = 1, 2  # finite, and the amax is another rank's
        x.nan_to_num_(0, 0, 0)
    quantizer, reference = KINDS[kind]
    own = quantizer.for_sharded_input(world)
    assert own is not None
    assert r % own.shard_alignment == 0
    made = own(Plain(x.chunk(world.size())[world.rank()]), rowwise=True, columnwise=not own.per_tensor)
    made = _as_kernels_write(made) if ordered else made
    for tp_overlap in (Collective(world), InChunks(world)):
        _gathered(made, tp_overlap, own, x, reference)


def _gathered(
    made: QuantizedTensor, tp_overlap: TPOverlap, own: Quantizer, x: Tensor, reference: Callable[[Tensor], ScaledTensor]
) -> None:
    assert tp_overlap.group is not None
    rows, whole = Rows(made.required_rowwise, tp_overlap), reference(x)
    for part in rows.arriving:
        piece = rows.part(part)
        factors = whole.scale_inv if whole.scale_inv.dim() == 0 else whole.scale_inv[part]
        _equal(piece, whole._replace(data=whole.data[part], scale_inv=factors))
        if on_hopper(whole.granularity):
            assert is_arranged(piece)
    if own.per_tensor:
        columns = rows.columnwise()
    else:
        columns = gather_columns(made.required_columnwise, tp_overlap.group).wait()
    _equal(columns, reference(x.t().contiguous()))
    if on_hopper(whole.granularity):
        assert is_arranged(columns)


@pytest.mark.parametrize(
    ("kind", "r", "c", "dtype"),
    [
        *[(kind, 128, 144, torch.bfloat16) for kind in KINDS],
        ("row", 3, 16, torch.float32),  # neither words of eight tokens nor of four
        ("row-pow2", 24, 300, torch.float32),
        ("1x128", 256, 300, torch.float32),
        ("dequantized", 32, 40, torch.float32),
    ],
)
@pytest.mark.parametrize("ranks", slow_but([1, 2, 4], 4))
def test_gathered_casts_are_casts_of_the_whole(
    world4: World, kind: str, r: int, c: int, dtype: torch.dtype, ranks: int
) -> None:
    world4.run(_cast, kind, r, c=c, dtype=dtype, ordered=False, ranks=ranks)


def test_factors_as_the_kernels_write_them(world2: World) -> None:
    world2.run(_cast, "1x128", 256, c=300, dtype=torch.float32, ordered=True)


def _no_slices() -> None:
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    assert NVFP4Quantizer(NVFP4Scaling(), INPUT, CPU, None).for_sharded_input(world) is None


def test_four_bits_are_cast_whole(world2: World) -> None:
    world2.run(_no_slices)
