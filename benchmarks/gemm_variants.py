"""What `bench_gemm` measures: the three GEMMs of a linear layer, and every way there is to compute them here.

    fprop  y  = x · wᵀ          x [m, k], w [n, k], bf16 result
    dgrad  dx = dy · w          dy [m, n], bf16 result; E5M2 gradients with one factor a tensor, E4M3 with finer ones
    wgrad  dw += dyᵀ · x        added to an fp32 sum: in place by cuBLASLt (and by torch in bf16), else by `add_`

bf16 operands lie as they do in a layer, either way round; FP8 operands are quantized and transposed beforehand, and
that is not timed. All operands are random: what a GEMM draws in power, and so its clock, depends on them.

Shapes: m tokens, k inputs, n outputs of the layer; of a GEMM r, c the result's dims and s the dim summed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.fp8.gemm.cublaslt import CublasLt, available
from megafp8.fp8.gemm.dispatch import Fp8Gemm, GemmBackend, algorithm_file, gemm
from megafp8.fp8.recipes import BlockwiseScaling, CurrentScaling, RowwiseScaling
from megafp8.fp8.recipes.base import Fp8Tensor, OperandName
from megafp8.fp8.sources import Plain
from megafp8.fp8.speed_model import LinearSize
from megafp8.fp8.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor

GEMMS = ("fprop", "dgrad", "wgrad")
ALIGNMENT = 16
BASELINE = "bf16 torch"
#: Granularities of the two operands, and whether sums stay in the tensor cores' 14 bits.
SCALINGS: dict[str, tuple[Granularity, Granularity, bool]] = {
    "tensor fast": (TENSOR, TENSOR, True),
    "tensor split": (TENSOR, TENSOR, False),
    "row fast": (ROW, ROW, True),
    "1x128·128x128": (BLOCK_1X128, BLOCK_128X128, False),
    "1x128·1x128": (BLOCK_1X128, BLOCK_1X128, False),
}
_FP8_BACKENDS: dict[str, tuple[GemmBackend, bool]] = {  # and whether algorithms are timed
    "scaled_mm": ("scaled_mm", False),
    "cublaslt": ("cublaslt", False),
    "cublaslt tuned": ("cublaslt", True),
    "emulated": ("emulated", False),
}


@dataclass(frozen=True)
class Operands:
    """One GEMM's bf16 operands, `a [r, s]` and `b [s, c]`, as a layer has them."""

    gemm: str
    a_rs: Tensor
    b_sc: Tensor
    _cast: dict[tuple[str, Granularity], ScaledTensor] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        return self.gemm == "wgrad"

    @property
    def flops(self) -> float:
        return 2.0 * self.a_rs.shape[0] * self.a_rs.shape[1] * self.b_sc.shape[1]

    def quantized(self, which: str, granularity: Granularity) -> ScaledTensor:
        """Operand "a" as `[r, s]` or "b" as `[c, s]`, made once for all variants."""
        is_gradient = which == "a" and self.gemm != "fprop"
        operand: OperandName = "grad_output" if is_gradient else "weight" if granularity is BLOCK_128X128 else "input"
        key = (which, granularity)
        if key not in self._cast:
            values = self.a_rs if which == "a" else self.b_sc.t()
            tensor = Fp8Tensor(which, operand, None, None)
            made = _RECIPES[granularity].cast(Plain(values.contiguous()), tensor, rowwise=True, columnwise=False)
            self._cast[key] = made.required_rowwise
        return self._cast[key]

    def new_result(self) -> Tensor:
        dtype = torch.float32 if self.accumulates else torch.bfloat16
        return torch.zeros(self.a_rs.shape[0], self.b_sc.shape[1], dtype=dtype, device=self.a_rs.device)


_RECIPES = {
    TENSOR: CurrentScaling(),
    ROW: RowwiseScaling(),
    BLOCK_1X128: BlockwiseScaling(),
    BLOCK_128X128: BlockwiseScaling(),
}


def operands_of(size: LinearSize, device: torch.device) -> list[Operands]:
    """The three GEMMs of a layer of this size. ValueError where cuBLASLt would not take it as it is."""
    if any(dim % ALIGNMENT for dim in size):
        raise ValueError(f"{size}: FP8 GEMMs take multiples of {ALIGNMENT} as they are; others are padded first")
    m, k, n = size
    generator = torch.Generator(device).manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in ((m, k), (n, k), (m, n)))
    pairs = ((x, w.t()), (dy, w), (dy.t(), x))
    return [Operands(gemm, a, b) for gemm, (a, b) in zip(GEMMS, pairs, strict=True)]


Run = Callable[[], Tensor]  # one GEMM; gives back its result, which for wgrad is the sum so far
Variant = Callable[[Operands], Run]


def variants(device: torch.device) -> tuple[dict[str, Variant], list[str]]:
    """Every way to compute a GEMM on `device` by name, the baseline first; and a line for each that is left out."""
    found: dict[str, Variant] = {BASELINE: _torch_bf16}
    left_out = []
    if available(device):
        found["bf16 cublaslt tuned"] = _cublaslt_bf16(CublasLt(device, autotune=True, cache_file=algorithm_file()))
    else:
        left_out.append("bf16 cublaslt tuned: needs nvmath-python and a Hopper GPU")
    for name, (backend, autotune) in _FP8_BACKENDS.items():
        if backend == "emulated" and device.type == "cuda":
            continue  # for machines without FP8
        try:
            product = Fp8Gemm(backend, device, autotune=autotune)
        except ValueError as error:
            left_out.append(f"{name}: {error}")
            continue
        found |= {f"{name} {scaling}": _fp8(product, *SCALINGS[scaling]) for scaling in SCALINGS}
    return found, left_out


def _torch_bf16(operands: Operands) -> Run:
    a, b, total = operands.a_rs, operands.b_sc, operands.new_result()

    def accumulate() -> Tensor:
        if a.is_cuda:
            return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return total.add_(gemm(a, b, torch.float32))

    return accumulate if operands.accumulates else lambda: gemm(a, b, torch.bfloat16)


def _cublaslt_bf16(product: CublasLt) -> Variant:
    def prepare(operands: Operands) -> Run:
        result = operands.new_result()

        def run() -> Tensor:
            product.matmul(operands.a_rs, operands.b_sc, result, accumulate=operands.accumulates)
            return result

        return run

    return prepare


def _fp8(product: Fp8Gemm, a_granularity: Granularity, b_granularity: Granularity, fast: bool) -> Variant:
    def prepare(operands: Operands) -> Run:
        a, b = operands.quantized("a", a_granularity), operands.quantized("b", b_granularity)
        if not operands.accumulates:
            return lambda: product.tn(a, b, torch.bfloat16, use_fast_accum=fast)
        total = operands.new_result()

        def accumulate() -> Tensor:
            product.accumulate_tn(a, b, total, use_fast_accum=fast)
            return total

        return accumulate

    return prepare
