"""Blackwell's `scaled_mm` as documented, element by element: what stands in for the GPU that is not here.

Written from the documentation of cuBLAS ("1D Block Scaling Factors Layout"), of torch.nn.functional.scaled_mm and from
the checks in torch's CUDA source, and from nothing in megafp8.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIGNATURE = inspect.signature(F.scaled_mm)
SWIZZLED, PLAIN = F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE


def offset(row: int, block: int, blocks: int) -> int:
    """Where the scale of a row's block lies, of `blocks` in the row."""
    tiles_across = -(-blocks // 4)
    tile = (row // 128) * tiles_across + block // 4
    outer, inner = row % 128, block % 4
    return tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner


def unswizzled(flat: Tensor, rows: int, blocks: int) -> Tensor:
    assert flat.is_contiguous()
    assert flat.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    values = flat.float().flatten().tolist()
    return torch.tensor([[values[offset(i, j, blocks)] for j in range(blocks)] for i in range(rows)]).double()


def unpacked(pairs: Tensor) -> Tensor:
    """Two values a byte, the first in the low four bits."""
    values = torch.tensor(E2M1_VALUES + [-v for v in E2M1_VALUES]).double()
    byte = pairs.view(torch.uint8).int()
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).flatten(1)


def operand(matrix: Tensor, scales: Any, recipes: Any, swizzles: Any) -> Tensor:
    """The numbers of an operand `[rows, k]`, scales included."""
    scales, recipes, swizzles = ([x] if not isinstance(x, list) else x for x in (scales, recipes, swizzles))
    assert len(scales) == len(recipes) == len(swizzles)
    assert matrix.stride(1) == 1 < matrix.stride(0)
    assert matrix.shape[1] % 16 == 0
    assert swizzles[0] == SWIZZLED
    if recipes == [F.ScalingType.BlockWise1x32]:
        assert scales[0].dtype == torch.float8_e8m0fnu
        values, block = matrix.double(), 32
    else:
        assert recipes == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        assert swizzles[1] == PLAIN
        assert matrix.dtype == torch.float4_e2m1fn_x2
        assert scales[0].dtype == torch.float8_e4m3fn
        assert scales[1].dtype == torch.float32
        assert scales[1].numel() == 1
        values, block = unpacked(matrix), 16
    r, k = values.shape
    scale_inv = unswizzled(scales[0], r, -(-k // block)).repeat_interleave(block, dim=1)[:, :k]
    return values * scale_inv * (scales[1].double() if len(scales) > 1 else 1.0)


def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    """What `torch.nn.functional.scaled_mm` is to return, summed in float64."""
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    call = given.arguments
    a, b = call["mat_a"], call["mat_b"]
    assert b.shape[1] % 16 == 0
    assert {a.dtype, b.dtype} != {torch.float8_e5m2}
    assert call["bias"] is None
    assert not call["contraction_dim"]
    assert not call["use_fast_accum"]
    a64 = operand(a, call["scale_a"], call["scale_recipe_a"], call["swizzle_a"])
    b64 = operand(b.t(), call["scale_b"], call["scale_recipe_b"], call["swizzle_b"])
    return (a64 @ b64.t()).to(call["output_dtype"])
