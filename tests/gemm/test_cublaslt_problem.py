"""What cuBLASLt is asked for: names, refusals and memory layouts."""

from __future__ import annotations

import pytest
import torch

from megafp8.gemm.cublaslt_problem import GemmProblem, arranged, is_arranged, scale_inv_strides
from megafp8.numerics.tensor import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
PROBLEM = GemmProblem(
    32, 48, 64, a_dtype=E4M3, a_order="mk", a_scaling="tensor", b_dtype=E4M3, b_order="nk", b_scaling="tensor",
    out_dtype=BF16, accumulate=False, fast=True,
)  # fmt: skip


def scaled(r: int, c: int, granularity: Granularity, dtype: torch.dtype = E4M3) -> ScaledTensor:
    """No two scales alike."""
    return ScaledTensor(torch.zeros(r, c).to(dtype), torch.rand(granularity.grid(r, c)) + 0.5, granularity)


def test_every_field_of_a_problem_tells_in_its_name() -> None:
    other = GemmProblem(
        1, 2, 3, a_dtype=E5M2, a_order="km", a_scaling="row", b_dtype=E5M2, b_order="kn", b_scaling="row",
        out_dtype=FP32, accumulate=True, fast=False, bias=True,
        scaled=True,
    )  # fmt: skip
    changed = [PROBLEM._replace(**{name: getattr(other, name)}) for name in GemmProblem._fields]
    assert len({str(p) for p in (PROBLEM, *changed)}) == 1 + len(GemmProblem._fields)
    assert str(PROBLEM) == "m=32 n=48 k=64 mk:float8_e4m3fn:tensor nk:float8_e4m3fn:tensor =:bfloat16 fast"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"n": 40}, "n and k must be multiples of 16; pad with zeros"),
        ({"k": 72}, "n and k must be multiples of 16; pad with zeros"),
        ({"m": 0}, "every dim must be at least 1"),
        ({"a_dtype": E5M2, "b_dtype": E5M2}, "one operand at least must be E4M3"),
        ({"a_dtype": BF16}, "must be FP8"),
        ({"a_scaling": "none", "b_scaling": "none"}, "must both be bf16"),
        ({"a_scaling": "none"}, "granularities must be one of"),
        ({"m": 6, "a_scaling": "1x128", "b_scaling": "1x128"}, "m must be a multiple of 4"),
        ({"a_scaling": "row"}, "granularities must be one of"),
        ({"a_scaling": "128x128", "b_scaling": "128x128"}, "granularities must be one of"),
        ({"out_dtype": torch.float64}, "the result must be bf16, fp16 or fp32"),
        ({"bias": True, "out_dtype": FP32}, "a bias needs per-tensor scales and 16 bits"),
        ({"bias": True, "a_scaling": "row", "b_scaling": "row"}, "a bias needs per-tensor scales and 16 bits"),
    ],
)
def test_problems_that_hopper_has_no_kernel_for(change: dict[str, object], rule: str) -> None:
    problem = PROBLEM._replace(**change)
    with pytest.raises(ValueError, match=rule) as error:
        problem.require_supported()
    assert str(problem) in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"m": 1},
        {"b_dtype": E5M2, "out_dtype": torch.float16},
        {"a_scaling": "1x128", "b_scaling": "128x128", "out_dtype": FP32},
        {"a_dtype": BF16, "b_dtype": BF16, "a_scaling": "none", "b_scaling": "none", "k": 7},
    ],
)
def test_problems_that_it_has_one_for(change: dict[str, object]) -> None:
    PROBLEM._replace(**change).require_supported()


@pytest.mark.parametrize(
    ("granularity", "fast"), [(TENSOR, True), (ROW, True), (BLOCK_1X128, False)], ids=lambda x: str(x)
)
def test_the_problem_of_quantized_operands(granularity: Granularity, fast: bool) -> None:
    a, b = arranged(scaled(32, 256, granularity, E5M2)), arranged(scaled(48, 256, granularity))
    name = granularity.name
    for use_fast_accum in (False, True):
        problem = GemmProblem.from_scaled(a, b, torch.zeros(32, 48), accumulate=True, use_fast_accum=use_fast_accum)
        expected = GemmProblem(
            32, 48, 256, a_dtype=E5M2, a_order="mk", a_scaling=name, b_dtype=E4M3, b_order="nk", b_scaling=name,
            out_dtype=FP32, accumulate=True, fast=fast and use_fast_accum,
        )  # fmt: skip
        assert problem == expected


def test_the_problem_of_operands_without_scales() -> None:
    """The orders of dy [t, m] and x [t, n] as a weight's gradient takes them, and of a row-major product."""
    dy, x = torch.zeros(8, 32, dtype=BF16), torch.zeros(8, 48, dtype=BF16)
    problem = GemmProblem.from_unscaled(dy.t(), x, torch.zeros(32, 48), accumulate=True, scaled=False)
    assert problem == GemmProblem(
        32,
        48,
        8,
        a_dtype=BF16,
        a_order="km",
        a_scaling="none",
        b_dtype=BF16,
        b_order="kn",
        b_scaling="none",
        out_dtype=FP32,
        accumulate=True,
        fast=False,
    )
    problem = GemmProblem.from_unscaled(
        dy, torch.zeros(48, 32, dtype=BF16).t(), torch.zeros(8, 48), accumulate=False, scaled=False
    )
    assert problem == GemmProblem(
        8,
        48,
        32,
        a_dtype=BF16,
        a_order="mk",
        a_scaling="none",
        b_dtype=BF16,
        b_order="nk",
        b_scaling="none",
        out_dtype=FP32,
        accumulate=False,
        fast=False,
    )


@pytest.mark.parametrize("wrong", ["k", "out", "scale_inv"])
def test_operands_that_do_not_fit(wrong: str) -> None:
    a = scaled(32, 256, BLOCK_1X128) if wrong == "scale_inv" else arranged(scaled(32, 256, BLOCK_1X128))
    b = arranged(scaled(48, 384 if wrong == "k" else 256, BLOCK_1X128))
    out = torch.zeros(32, 64 if wrong == "out" else 48)
    with pytest.raises(AssertionError):
        GemmProblem.from_scaled(a, b, out, accumulate=False, use_fast_accum=False)


def test_1x128_scales_lie_block_after_block() -> None:
    x = arranged(scaled(32, 300, BLOCK_1X128))
    expected = [x.scale_inv[i, j].item() for j in range(3) for i in range(32)]
    flat = x.scale_inv.as_strided((96,), (1,))
    assert flat.tolist() == expected


@pytest.mark.parametrize(("c", "padded"), [(16, 4), (512, 4), (513, 8), (1024, 8), (14336, 112)])
def test_128x128_scales_lie_in_rows_of_fours(c: int, padded: int) -> None:
    x = arranged(scaled(256, c, BLOCK_128X128))
    flat = x.scale_inv.as_strided((2 * padded,), (1,)) if c > 128 else None
    for i in range(2):
        for j in range(-(-c // 128)):
            assert flat is None or flat[i * padded + j] == x.scale_inv[i, j]
    assert scale_inv_strides(BLOCK_128X128, 256, c) == (padded, 1)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, BLOCK_1X128, BLOCK_128X128], ids=lambda g: g.name)
def test_arranging_moves_scales_and_changes_none(granularity: Granularity) -> None:
    x = scaled(256, 300, granularity)
    y = arranged(x)
    assert torch.equal(y.scale_inv, x.scale_inv)
    assert is_arranged(y)
    assert arranged(y) is y
    assert is_arranged(x) == (granularity in (TENSOR, ROW))


def test_one_block_is_arranged_however_it_is_strided() -> None:
    assert is_arranged(ScaledTensor(torch.zeros(16, 128).to(E4M3), torch.ones(16, 1), BLOCK_1X128))
    assert is_arranged(ScaledTensor(torch.zeros(16, 128).to(E4M3), torch.ones(1, 1), BLOCK_128X128))


def test_other_granularities_have_no_layout() -> None:
    with pytest.raises(AssertionError):
        scale_inv_strides(BLOCK_1X32, 16, 64)
