"""Description of a GEMM for cuBLASLt: the layouts of its operands, and the limits of cuBLASLt.

These are pure functions, so they can be tested without cuBLASLt; `megafp8.gemm.cublaslt` calls it.

Block scales must have cuBLASLt's memory layout (`scale_inv_strides`), the same for both operands. 1×128: one block of k
after the other, with all rows of a block together, so `[r, blocks]` has strides (1, r). 128×128: rows of blocks, each
padded to a multiple of four. Rows: one after the other. All scales except per-tensor scales start at a multiple of 16
bytes. The casting kernels write this layout; `arranged` copies scales from other sources. (cuBLAS documentation,
"Narrow Precision Data Types Usage"; sizes and alignments found by trial, cuBLASLt 13.1.)

Shapes: m, n the result's dims, k the summed dim; r, c rows and columns of an operand.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, HOPPER_PAIRS, ROW, TENSOR, Granularity, ScaledTensor

ALIGNMENT = 16  # bytes of a pointer; elements of an FP8 row
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SCALINGS = [f"{a.name}·{b.name}" for a, b in HOPPER_PAIRS]


def scale_inv_strides(granularity: Granularity, r: int, c: int) -> tuple[int, int]:
    """Return the strides that scale_inv of an operand `[r, c]` must have.

    The shape of scale_inv is `granularity.grid(r, c)`. Per-tensor scales have no strides.
    """
    if granularity is BLOCK_1X128:
        return 1, r
    if granularity is BLOCK_128X128:
        blocks = -(-c // 128)
        return blocks + -blocks % 4, 1
    assert granularity is ROW
    return 1, 1


def is_arranged(x: ScaledTensor) -> bool:
    """Return whether scale_inv of `x` has cuBLASLt's memory layout. A dim of one element may have any stride."""
    if x.granularity is TENSOR:
        return True
    wanted = scale_inv_strides(x.granularity, *x.data.shape)
    return all(s == w or size == 1 for size, s, w in zip(x.scale_inv.shape, x.scale_inv.stride(), wanted))


def arranged(x: ScaledTensor) -> ScaledTensor:
    """Return `x` with scale_inv in cuBLASLt's memory layout: `x` itself, or with a copy of scale_inv."""
    if is_arranged(x):
        return x
    if x.granularity is BLOCK_128X128:
        down, across = x.scale_inv.shape
        padded = x.scale_inv.new_zeros(down, scale_inv_strides(x.granularity, *x.data.shape)[0])
        padded[:, :across] = x.scale_inv
        return x._replace(scale_inv=padded[:, :across])
    return x._replace(scale_inv=x.scale_inv.t().contiguous().t())


def adds_bias(a_scaling: str, b_scaling: str, out_dtype: torch.dtype) -> bool:
    """Return whether products with granularities of these names can add a bias of the result's dtype."""
    return a_scaling == b_scaling == TENSOR.name and out_dtype in (torch.bfloat16, torch.float16)


class GemmProblem(NamedTuple):
    """Properties of a GEMM that determine cuBLASLt's choice of an algorithm.

    Attributes:
        m, n, k: Sizes.
        a_dtype, b_dtype, out_dtype: Dtypes of the operands and the result.
        a_order, b_order: Dims of each operand, the contiguous one last.
        a_scaling, b_scaling: Name of each operand's granularity, or "none".
        accumulate: Whether the product is added to the result.
        fast: Whether sums are accumulated in the tensor cores' 14 bits.
        bias: Whether a vector `[n]` is added before the result is rounded.
        scaled: Whether sums of operands without scales are multiplied by a number on the device before they are
            rounded.
    """

    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    a_order: Literal["mk", "km"]
    a_scaling: str
    b_dtype: torch.dtype
    b_order: Literal["nk", "kn"]
    b_scaling: str
    out_dtype: torch.dtype
    accumulate: bool
    fast: bool
    bias: bool = False
    scaled: bool = False

    @staticmethod
    def from_scaled(
        a: ScaledTensor, b: ScaledTensor, out_mn: Tensor, *, accumulate: bool, use_fast_accum: bool, bias: bool = False
    ) -> GemmProblem:
        """Describe `out (+)= a · bᵀ` for quantized a `[m, k]` and b `[n, k]`.

        Sums of blocks are promoted at every block, so they are never fast.
        """
        (m, k), n = a.data.shape, b.data.shape[0]
        assert b.data.shape[1] == k
        assert out_mn.shape == (m, n)
        assert is_arranged(a)
        assert is_arranged(b)
        fast = use_fast_accum and a.granularity in (TENSOR, ROW)
        return GemmProblem(
            m, n, k, a.data.dtype, "mk", a.granularity.name, b.data.dtype, "nk", b.granularity.name, out_mn.dtype,
            accumulate, fast, bias,
        )  # fmt: skip

    @staticmethod
    def from_unscaled(a_mk: Tensor, b_kn: Tensor, out_mn: Tensor, *, accumulate: bool, scaled: bool) -> GemmProblem:
        """Describe `out (+)= a · b`, or a factor times the product, for row-major or transposed operands."""
        (m, k), n = a_mk.shape, b_kn.shape[1]
        assert b_kn.shape[0] == k
        assert out_mn.shape == (m, n)
        a_order: Literal["mk", "km"] = "mk" if a_mk.is_contiguous() else "km"
        b_order: Literal["nk", "kn"] = "kn" if b_kn.is_contiguous() else "nk"
        assert a_order == "mk" or a_mk.t().is_contiguous()
        assert b_order == "kn" or b_kn.t().is_contiguous()
        return GemmProblem(
            m, n, k, a_mk.dtype, a_order, "none", b_kn.dtype, b_order, "none", out_mn.dtype, accumulate, False,
            scaled=scaled,
        )  # fmt: skip

    def __str__(self) -> str:
        """Return the problem's name in the cache file and in messages."""
        a = f"{self.a_order}:{self.a_dtype}:{self.a_scaling}"
        b = f"{self.b_order}:{self.b_dtype}:{self.b_scaling}"
        size = f"m={self.m} n={self.n} k={self.k}"
        text = f"{size} {a} {b} {'+=' if self.accumulate else '='}:{self.out_dtype} {'fast' if self.fast else 'split'}"
        return text.replace("torch.", "") + (" bias" if self.bias else "") + (" scaled" if self.scaled else "")

    def require_supported(self) -> None:
        """Raise ValueError if cuBLASLt has no algorithm for the problem on Hopper."""
        dtypes = {self.a_dtype, self.b_dtype}
        scalings = f"{self.a_scaling}·{self.b_scaling}"
        rules = [
            (min(self[:3]) > 0, "every dim must be at least 1"),
            (self.out_dtype in (torch.bfloat16, torch.float16, torch.float32), "the result must be bf16, fp16 or fp32"),
        ]
        if scalings == "none·none":
            rules.append((dtypes == {torch.bfloat16}, "operands without scales must both be bf16"))
        else:
            aligned = self.n % ALIGNMENT == 0 == self.k % ALIGNMENT
            rules += [
                (dtypes <= {_E4M3, _E5M2}, "operands with scales must be FP8"),
                (dtypes != {_E5M2}, "one operand at least must be E4M3"),
                (scalings in _SCALINGS, f"granularities must be one of {' '.join(_SCALINGS)}"),
                (aligned, f"n and k must be multiples of {ALIGNMENT}; pad with zeros"),
                (self.a_scaling != "1x128" or self.m % 4 == 0, "m must be a multiple of 4; pad with zeros"),
                (
                    not self.bias or adds_bias(self.a_scaling, self.b_scaling, self.out_dtype),
                    "a bias needs per-tensor scales and 16 bits",
                ),
            ]
        for holds, rule in rules:
            if not holds:
                raise ValueError(f"cuBLASLt cannot compute {self}: {rule}")
