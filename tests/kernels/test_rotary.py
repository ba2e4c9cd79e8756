"""Rotating the packed qkv in place, and heads, against the reference on its parts, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.kernels.rotary import rotate_heads, rotate_qkv_
from megafp8.models.rotary import inverse_frequencies, rotary_table
from megafp8.numerics.sources import rotate
from tests.kernels import DEVICE, every_bf16, noise
from tests.marks import slow_but


def bits(x: Tensor) -> Tensor:
    """Numbers as integers, every NaN as one value."""
    integers = x.view(torch.int16 if x.element_size() == 2 else torch.int32).int()
    return torch.where(x.isnan(), -(2**31), integers).cpu()


def check(qkv: Tensor, heads: int, d: int, own_positions: bool = False) -> None:
    """At positions far enough out to be any angle."""
    s, b = qkv.shape[:2]
    positions = torch.arange(s * b).view(b, s) * 977 if own_positions else torch.arange(s) * 977
    frequencies = inverse_frequencies(d, 1e4, None, torch.device(DEVICE))
    cos, sin = rotary_table(positions.to(DEVICE), frequencies, torch.float32)
    groups = (qkv.shape[-1] // d - heads) // 2
    q, k, v = qkv.split([heads * d, groups * d, groups * d], dim=-1)
    of_heads = [x.unflatten(-1, (-1, d)).contiguous() for x in (q, k)]
    rotated = [rotate(x, cos, sin).to(qkv.dtype).flatten(-2) for x in of_heads]
    for x, y in zip(of_heads, rotated, strict=True):
        assert torch.equal(bits(rotate_heads(x, cos, sin).flatten(-2)), bits(y))
    expected = torch.cat([*rotated, v], dim=-1)
    assert rotate_qkv_(qkv, heads, cos, sin) is qkv
    assert torch.equal(bits(qkv), bits(expected))


SHAPES = [
    (5, 2, 4, 2, 128, False), (5, 2, 4, 2, 128, True), (3, 1, 1, 1, 2, False), (4, 3, 6, 2, 80, True),
    (33, 2, 5, 5, 64, False), (2, 2, 3, 1, 256, True), (2, 1, 1, 1, 6000, False), (0, 2, 4, 2, 64, False),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("s", "b", "a", "g", "d", "own_positions", "dtype"),
    slow_but(
        [(*shape, dtype) for shape in SHAPES for dtype in DTYPES],
        *((*shape, torch.bfloat16) for shape in SHAPES),
        (*SHAPES[1], torch.float16),
        (*SHAPES[3], torch.float32),
    ),
    ids=str,
)
def test_in_place(s: int, b: int, a: int, g: int, d: int, own_positions: bool, dtype: torch.dtype) -> None:
    check(noise(s, b, (a + 2 * g) * d, dtype=dtype), a, d, own_positions)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of an infinity times 0
def test_every_bf16_value_beside_others() -> None:
    """Subnormals, infinities and NaNs in q, k and v: v is unchanged."""
    every = every_bf16().flatten()
    mixed = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(DEVICE)]
    check(torch.cat([every, mixed]).view(32, 4, 16 * 64), 10, 64)


def test_signs_of_zeros() -> None:
    """At position 0, where the sine is a zero itself, and where it is not."""
    zeros = torch.tensor([0.0, -0.0])
    signs = torch.cartesian_prod(zeros, zeros, torch.tensor([0.0, -0.0, 1.0, -1.0]), zeros).flatten()
    check(signs.expand(2, 1, -1).contiguous().to(DEVICE), 6, 4)
