"""Turning the packed qkv in place against `apply_rotary` on its parts, bit for bit, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.kernels import rotary as kernels
from megafp8.models.rotary import apply_rotary, inverse_frequencies, rotary_table
from tests.kernels import DEVICE

# s, b, query heads, groups, head width, own positions for each sample
SHAPES = [
    (5, 2, 4, 2, 128, False),
    (5, 2, 4, 2, 128, True),
    (3, 1, 1, 1, 2, False),
    (4, 3, 6, 2, 80, True),
    (33, 2, 5, 5, 64, False),
    (2, 2, 3, 1, 256, True),
    (2, 1, 1, 1, 6000, False),
    (0, 2, 4, 2, 64, False),
]
DTYPES = [torch.bfloat16, torch.float32]

Table = tuple[Tensor, Tensor]


def bits(x: Tensor) -> Tensor:
    """The codes as integers, every NaN as one value."""
    codes = x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).int()
    return torch.where(x.isnan(), -(2**31), codes).cpu()


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def table(s: int, b: int, d: int, own: bool) -> Table:
    """cos and sin as the model has them, `[s, 1 or b, 1, d/2]`, at positions far enough out to be any angle."""
    positions = torch.arange(s * b).view(b, s) * 977 if own else torch.arange(s) * 977
    frequencies = inverse_frequencies(d, 1e4, None, torch.device(DEVICE))
    return rotary_table(positions.to(DEVICE), frequencies, torch.float32)


def twin(qkv_sbc: Tensor, heads: int, d: int, angles: Table) -> Tensor:
    groups = (qkv_sbc.shape[-1] // d - heads) // 2
    q, k, v = qkv_sbc.split([heads * d, groups * d, groups * d], dim=-1)
    turned = [apply_rotary(x.unflatten(-1, (-1, d)), angles).flatten(-2) for x in (q, k)]
    return torch.cat([*turned, v], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("s", "b", "a", "g", "d", "own"), SHAPES)
def test_qkv_is_turned_where_it_lies(s: int, b: int, a: int, g: int, d: int, own: bool, dtype: torch.dtype) -> None:
    cos, sin = table(s, b, d, own)
    qkv = random(s, b, (a + 2 * g) * d, seed=1, dtype=dtype)
    expected = twin(qkv, a, d, (cos, sin))
    assert kernels.rotate_qkv_(qkv, a, cos.squeeze(2), sin.squeeze(2)) is qkv
    assert torch.equal(bits(qkv), bits(expected))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of an infinity times 0
def test_every_bf16_value_beside_others() -> None:
    """Subnormals, infinities and NaNs in q, k and v: v is kept as it is."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    mixed = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    qkv = torch.cat([every, mixed]).view(32, 4, 16 * 64).to(DEVICE)
    cos, sin = table(32, 4, 64, own=False)
    expected = twin(qkv, 10, 64, (cos, sin))
    kernels.rotate_qkv_(qkv, 10, cos.squeeze(2), sin.squeeze(2))
    assert torch.equal(bits(qkv), bits(expected))


def test_signs_of_zeros() -> None:
    """At position 0, where the sine is a zero itself, and where it is not."""
    cos, sin = table(2, 1, 4, own=False)
    zeros = torch.tensor([0.0, -0.0])
    signs = torch.cartesian_prod(zeros, zeros, torch.tensor([0.0, -0.0, 1.0, -1.0]), zeros).flatten()
    qkv = signs.expand(2, 1, -1).contiguous().to(DEVICE)
    expected = twin(qkv, 6, 4, (cos, sin))
    kernels.rotate_qkv_(qkv, 6, cos.squeeze(2), sin.squeeze(2))
    assert torch.equal(bits(qkv), bits(expected))
