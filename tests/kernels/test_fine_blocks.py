"""Casts by blocks of 16 and 32 to bf16, against the reference, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.numerics import sources
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.philox import philox_of_words
from megafp8.numerics.recipes import mxfp8, nvfp4
from megafp8.numerics.sources import MatrixSource, Plain
from megafp8.numerics.stochastic_rounding import NoiseClock, TensorNoise
from megafp8.numerics.tensor import QuantizedTensor
from tests.kernels import DEVICE, every_bf16, noise
from tests.kernels.test_quantize import BOTH, ORIENTATIONS, SOURCES
from tests.marks import slow_but

kernels = pytest.importorskip("megafp8.kernels.fine_blocks")


def made_noise() -> TensorNoise:
    """In step 5, of the second micro-batch of rank 1 of 2."""
    clock = NoiseClock(1, 1, 2, torch.device(DEVICE))
    clock.step += 5
    made = clock.tensor("layer.grad_output", None)
    made.advance()
    return made


def bits(x: Tensor) -> Tensor:
    """Bits of bf16 values as integers: one for every NaN, and one for zeros of either sign."""
    return torch.where(x.isnan(), -1, torch.where(x == 0, 0, x.contiguous().view(torch.int16).int()))


def check_same(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.granularity is theirs.granularity
            assert ours.data.stride() == theirs.data.stride() or not ours.data.numel()
            assert torch.equal(ours.scale_inv, theirs.scale_inv)
            assert torch.equal(bits(ours.data), bits(theirs.data))


def check_mxfp8(source: MatrixSource, fmt: Format, wanted: dict[str, bool] = BOTH) -> None:
    check_same(kernels.cast_mxfp8(source, fmt, **wanted), mxfp8.cast_mxfp8(source, fmt, **wanted))


def check_nvfp4(source: MatrixSource, kind: str, wanted: dict[str, bool] = BOTH) -> None:
    """`kind`: input, weight or grad_output."""
    transformed = wanted["columnwise"] and kind != "weight"
    amaxes = nvfp4.nvfp4_amaxes(source, transformed=transformed)
    assert torch.equal(kernels.nvfp4_amaxes(source, transformed=transformed), amaxes)
    options: dict[str, Any] = {"weight": kind == "weight", **wanted}
    given = made_noise() if kind == "grad_output" else None
    check_same(kernels.cast_nvfp4(source, amaxes, given, **options), nvfp4.cast_nvfp4(source, amaxes, given, **options))


def spread(r: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, and in each block of 16 neighbours too."""
    rows, blocks = noise(r, 1, scale=8, seed=1).round().exp2(), noise(1, -(-c // 16), scale=4, seed=2).round().exp2()
    return (noise(r, c) * rows * blocks.repeat_interleave(16, dim=1)[:, :c]).to(dtype)


SHAPES = [(1, 1), (37, 70), (34, 300), (16, 520), (0, 16), (16, 0)]
# Noise is drawn for eight neighbours at once where a size is a multiple of eight. The last shape is of whole tiles.
NV_CASES = [*itertools.product([*SHAPES, (16, 40), (24, 68), (64, 128)], ("input", "weight", "grad_output"))]


@pytest.mark.parametrize(
    ("shape", "fmt"),
    slow_but(itertools.product(SHAPES, [E4M3, E5M2]), ((37, 70), E4M3), ((37, 70), E5M2), ((0, 16), E4M3)),
    ids=str,
)
def test_mxfp8(shape: tuple[int, int], fmt: Format) -> None:
    check_mxfp8(Plain(spread(*shape)), fmt)


@pytest.mark.parametrize(
    ("shape", "kind"),
    slow_but(NV_CASES, ((16, 40), "grad_output"), ((16, 0), "grad_output")),  # each takes seconds in the interpreter
    ids=str,
)
def test_nvfp4(shape: tuple[int, int], kind: str) -> None:
    check_nvfp4(Plain(spread(*shape)), kind)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(
        [*itertools.product(SOURCES, [torch.bfloat16]), ("plain", torch.float16)], ("swiglu_grad", torch.bfloat16)
    ),
    ids=str,
)
def test_every_source(kind: str, dtype: torch.dtype) -> None:
    """Gradients' casts of each kind of source: whole tiles too, on a GPU several, and where two parts share a block."""
    check_mxfp8(SOURCES[kind](20, 64, dtype), E4M3)
    check_nvfp4(SOURCES[kind](128, 128, dtype), "grad_output")
    if DEVICE == "cuda":
        check_nvfp4(SOURCES[kind](36, 1088, dtype), "grad_output")
        check_nvfp4(SOURCES[kind](70, 40, dtype), "input")


@pytest.mark.slow
@pytest.mark.parametrize("d", [6, 32, 64, 128])
def test_gradient_of_qkv(d: int) -> None:
    dq, dk, dv = (noise(9, 2, heads, d, seed=i) for i, heads in enumerate((3, 1, 1)))
    angles = noise(9, 1, 1, d // 2, seed=3)
    norms = sources.HeadNorms(noise(18, 5 * d), noise(2, 18, 4), noise(4, d), zero_centered=True)
    for source in (sources.QKVGrad(dq, dk, dv, angles.cos(), angles.sin(), x) for x in (None, norms)):
        check_mxfp8(source, E4M3)
        check_nvfp4(source, "grad_output")


@pytest.mark.slow
def test_gradient_of_qkv_of_whole_tiles() -> None:
    """The gradient of q, k and v of 16 samples: a number that is a power of two is a constant of the kernels."""
    dq, dk, dv = (noise(8, 16, heads, 64, seed=i) for i, heads in enumerate((3, 1, 1)))
    angles = noise(8, 1, 1, 32, seed=3)
    check_nvfp4(sources.QKVGrad(dq, dk, dv, angles.cos(), angles.sin()), "grad_output")


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ORIENTATIONS)
def test_one_orientation(wanted: dict[str, bool]) -> None:
    x = Plain(spread(37, 70))
    check_mxfp8(x, E4M3, wanted)
    for kind in ("input", "weight", "grad_output"):
        check_nvfp4(x, kind, wanted)


@pytest.mark.slow
def test_every_bf16_value() -> None:
    """All alone in their blocks of both, and next to each other."""
    x = every_bf16()
    alone = torch.zeros(32, 65536 * 32, device=DEVICE, dtype=torch.bfloat16) if DEVICE == "cuda" else None
    finite = torch.where(x.float().isfinite(), x, torch.zeros_like(x))
    for values in (x, finite, finite * 2.0**-60):
        for fmt in (E4M3, E5M2):
            check_mxfp8(Plain(values), fmt)
        for kind in ("input", "grad_output"):
            check_nvfp4(Plain(values), kind)
    if alone is not None:
        alone[0, ::32] = x.flatten()
        check_mxfp8(Plain(alone), E4M3)


EDGES = [448 * 2.0**-127, 2.0**-140, 2688.0, 6 * 2.0**-10, torch.inf, torch.nan, -0.0, 3.4e38]


@pytest.mark.parametrize("value", slow_but(EDGES, 448 * 2.0**-127, torch.nan))
def test_blocks_of_special_values(value: float) -> None:
    """Alone in its block, beside zeros, and the numbers next to it, which round to other scales."""
    x = torch.zeros(32, 128, device=DEVICE)
    x[0, 0] = value
    for column, end in ((32, torch.inf), (64, 0.0)):
        x[0, column] = torch.nextafter(x[0, 0], torch.tensor(end, device=DEVICE))
    check_mxfp8(Plain(x), E4M3)
    if DEVICE == "cuda":
        check_mxfp8(Plain(x), E5M2)
        x[17, 5] = 1.0
        for kind in ("input", "weight", "grad_output"):
            check_nvfp4(Plain(x), kind)


@pytest.mark.gpu
def test_a_large_tensor() -> None:
    """With more elements than 2^31: the last rows against a reference that computes these alone."""
    x = torch.zeros(65536, 32784, dtype=torch.bfloat16, device=DEVICE)
    x[-64:] = spread(64, x.shape[1], torch.bfloat16)
    given, amaxes = made_noise(), kernels.nvfp4_amaxes(Plain(x), transformed=True)
    made = kernels.cast_nvfp4(Plain(x), amaxes, given, weight=False, rowwise=True, columnwise=False).required_rowwise
    key, step, microbatch = given.rowwise
    group = torch.arange(64 * x.shape[1] // 8, device=DEVICE) + (len(x) - 64) * x.shape[1] // 8
    words = torch.stack(philox_of_words(group & 0xFFFFFFFF, group >> 32, step, microbatch, key, rounds=7), dim=1)
    uniform = torch.stack([words & 0xFFFF, words >> 16], dim=2).view(64, -1).float().mul_(2.0**-16)
    tail, scale = x[-64:].float(), torch.full((), 2688.0, device=DEVICE) / amaxes[0]
    block = tail.abs().view(64, -1, 16).amax(2) * (scale / torch.full((), 6.0, device=DEVICE))
    b = block.clamp(max=448.0).to(E4M3.dtype).float().repeat_interleave(16, dim=1)
    values = tail * torch.where(b == 0, 0.0, b.reciprocal() * scale)
    assert torch.equal(bits(made.data[-64:]), bits((nvfp4.round_to_e2m1(values, uniform) * b).bfloat16()))
