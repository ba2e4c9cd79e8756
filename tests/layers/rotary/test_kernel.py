"""Rotating the packed qkv in place or after norms, and heads, against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.kernels.quantize import materialize
from megafp8.layers.norm import reference
from megafp8.layers.rotary import op as ops
from megafp8.layers.rotary.kernel import head_gradients, norm_and_rotate, rotate_heads, rotate_qkv_, square_means
from megafp8.layers.rotary.module import inverse_frequencies, rotary_table
from megafp8.numerics.sources import HeadNorms, QKVGrad, rotate
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


NORM_SHAPES = [  # s, b, a, g, d, rotated pairs, whether each sample has its own angles
    (5, 2, 4, 2, 16, 8, True), (3, 1, 3, 1, 80, 20, False), (67, 1, 5, 3, 6, 3, False), (0, 2, 4, 2, 64, 32, False),
    (9, 2, 6, 2, 128, 64, False), (130, 1, 8, 8, 64, 32, True), (4, 2, 3, 1, 256, 32, False),
]  # fmt: skip


def some_heads(
    shape: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Packed heads, weights of each, dq and dk; angles, of which only the first pairs are rotated."""
    s, b, a, g, d, pairs, own_angles = shape
    qkv, dq, dk = (noise(s, b, n * d, dtype=dtype, seed=i) for i, n in enumerate((a + 2 * g, a, g)))
    weight_hd = noise(a + g, d, dtype=dtype, seed=3)
    angles = noise(s, b if own_angles else 1, 1, d // 2, seed=4)
    angles[..., pairs:] = 0
    return qkv, weight_hd, dq.view(s, b, a, d), dk.view(s, b, g, d), angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *slow_but(
            [(shape, torch.float32) for shape in NORM_SHAPES], *((NORM_SHAPES[i], torch.float32) for i in (0, 1, 3))
        ),
        *(pytest.param(shape, torch.bfloat16, marks=pytest.mark.gpu) for shape in NORM_SHAPES),
    ],
    ids=str,
)
def test_norms_before_rotation(shape: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype) -> None:
    """Bit for bit the reference, but for sums over tokens; weights or none, statistics computed or given."""
    (qkv, weight, dq, dk, cos, sin), (_, _, a, g, d, *_) = some_heads(shape, dtype), shape
    x_sbhd = qkv[..., : (a + g) * d].unflatten(-1, (-1, d))
    for weight_hd, zero_centered in ((weight, False), (weight, True), (None, False)):
        form = {"zero_centered": zero_centered}
        means_rh = reference.square_means(x_sbhd.flatten(0, 1), d)
        rstd_rh = reference.reciprocal_deviation(means_rh, 1e-5)
        for given in (None, rstd_rh * 1.25):
            y, rstd = norm_and_rotate(qkv, a + g, cos, sin, weight_hd, 1e-5, given, **form)
            used = rstd_rh if given is None else given
            assert torch.equal(rstd, used)
            assert torch.equal(y, reference.normalized_and_rotated(x_sbhd, used, weight_hd, cos, sin, **form))
        assert torch.equal(square_means(qkv, a + g, d, 3), reference.square_means(x_sbhd.flatten(0, 1), 3))
        dqk = torch.cat([dq, dk], dim=2)
        statistics, dweight_hd = reference.head_gradients(dqk, x_sbhd, rstd_rh, weight_hd, cos, sin, d, **form)
        for shared in (False, True):
            found, *sums = head_gradients(dq, dk, qkv, rstd_rh, weight_hd, cos, sin, d, shared=shared, **form)
            assert torch.equal(found, statistics)
            parts = zip(sums, dweight_hd.split([a, g]), strict=True)
            for partials, exact in parts if weight_hd is not None else ():
                # products are rounded to fp32, and so is each of the additions to a program's sums
                total = partials.sum(dim=0 if shared else 1).float()
                torch.testing.assert_close(total, exact.sum(dim=0) if shared else exact, rtol=1e-5, atol=1e-5)


def exact_heads(
    qkv: Tensor, weight_hd: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int], eps: float, *, together: bool
) -> tuple[Tensor, ...]:
    """q, k and v in float64, written for autograd: complex numbers, torch's own norm."""
    a, g = sizes
    q, k, v = qkv.unflatten(-1, (-1, weight_hd.shape[1])).split([a, g, g], dim=2)
    turned = []
    for x, weight in ((q, weight_hd[:a]), (k, weight_hd[a:])):
        shape = x.shape[2:] if together else x.shape[3:]
        pairs = (F.rms_norm(x, shape, eps=eps) * weight).chunk(2, dim=-1)
        z = torch.complex(*(half.contiguous() for half in pairs)) * torch.complex(cos.double(), sin.double())
        turned.append(torch.cat([z.real, z.imag], dim=-1))
    return *turned, v


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(
    ("shape", "together"),
    slow_but([(x, y) for x in NORM_SHAPES for y in (False, True)], *((NORM_SHAPES[i], i > 0) for i in (0, 1, 2))),
    ids=str,
)
def test_norms_against_autograd_in_float64(
    shape: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype, together: bool
) -> None:
    """Outputs, gradients of the packed heads, and of weights.

    Relative to the largest value: an output is rounded once, by up to half a unit in the last place of its dtype, 2^-8
    of a number in bf16; what is computed before, in fp32, and the sums over tokens are off by some 2^-20.
    """
    (qkv, weight, dq, dk, cos, sin), (s, b, a, g, d, *_) = some_heads(shape, dtype), shape
    dv = noise(s, b, g, d, dtype=dtype, seed=9)
    exact_qkv, exact_weight = qkv.double().requires_grad_(), weight.double().requires_grad_()
    expected = exact_heads(exact_qkv, exact_weight, cos, sin, (a, g), 1e-3, together=together)
    torch.autograd.backward(expected, [x.double() for x in (dq, dk, dv)])
    rstd_rh, count = None, d

    def means(sums_rh: Tensor) -> Tensor:
        parts = sums_rh.split_with_sizes([a, g], dim=1)
        return torch.cat([(x.sum(1, keepdim=True) / (x.shape[1] * d)).expand_as(x) for x in parts], dim=1)

    if together:
        rstd_rh, count = (means(square_means(qkv, a + g, d, 1)) + 1e-3).rsqrt(), 1
    qk, rstd_rh = norm_and_rotate(qkv, a + g, cos, sin, weight, 1e-3, rstd_rh)
    form = {"shared": False, "zero_centered": False}
    statistics, *partials = head_gradients(dq, dk, qkv, rstd_rh, weight, cos, sin, count, **form)
    dweight = torch.cat(partials).sum(dim=1)
    if together:
        statistics[1] = means(statistics[1])
    norms = HeadNorms(qkv.flatten(0, 1), statistics, weight, zero_centered=False)
    dqkv = materialize(QKVGrad(dq, dk, dv, cos, sin, norms)).view_as(qkv)
    assert exact_qkv.grad is not None
    assert exact_weight.grad is not None
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 0.0
    for found, exact in (
        (qk, torch.cat(expected[:2], dim=2)),
        (dqkv, exact_qkv.grad),
        (dweight, exact_weight.grad),
    ):
        bound = 2.0**-20 + (rounding if found.dtype is dtype else 0.0)
        assert ((found - exact).abs() <= bound * exact.abs().amax()).all() if s else found.shape == exact.shape


@pytest.mark.parametrize("kind", ["heads", "projection", "weightless"])
def test_split_with_norms_by_kernels_and_by_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention reads and all gradients, with the gradient of the packed heads as values."""
    shape = NORM_SHAPES[1]
    qkv, weight_hd, dq, dk, cos, sin = some_heads(shape)
    a, g, d = shape[2:5]
    dv = torch.randn_like(dk)
    weights: tuple[Tensor | None, Tensor | None] = weight_hd[0], weight_hd[a]
    if kind == "projection":
        weights = weight_hd[:a].flatten(), weight_hd[a:].flatten()
    elif kind == "weightless":
        weights = None, None
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(ops, "_has_kernel", lambda x, cos, there=by_kernels: there)
        x = qkv.clone().requires_grad_()
        given = [None if w is None else w.clone().requires_grad_() for w in weights]
        norms = ops.QKNorms(*given, 1e-3, kind == "heads", (a * d, g * d) if kind == "projection" else None)
        y = ops.rotate_and_split(x, a, g, cos, sin, None, norms)
        inputs = [x, *(w for w in given if w is not None)]
        found.append([*y, *torch.autograd.grad(y, inputs, (dq, dk, dv))])
    for by_reference, by_kernel in zip(*found, strict=True):
        torch.testing.assert_close(by_kernel, by_reference, rtol=1e-5, atol=1e-5)
