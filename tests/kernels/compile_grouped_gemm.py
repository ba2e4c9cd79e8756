"""Compiles an FP8 grouped GEMM for sm_90, which needs no GPU: prints its name and shared memory.

Run by a test in a process without Triton's interpreter, with variables that make Triton print the assembler's log.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megafp8.kernels import grouped_gemm_hopper as kernels

_SUMS = {"FAST": False, "STAGES": 5, "ACCUMULATE": True, "PAIR": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums": ("sums", _SUMS),
    "pairs": ("sums", _SUMS | {"PAIR": True}),
    "pairs-fast": ("sums", _SUMS | {"PAIR": True, "FAST": True}),
    "rows": ("precise_rows", {"STAGES": 4}),
    "rows-fast": ("fast_rows", {"STAGES": 6}),
}
"""By name: the kernel and its constants."""
_TILES = {"sums": (64, 128), "precise_rows": (128, 256), "fast_rows": (128, 128)}
"""Rows of a and of b that are copied at once."""
DIVISIBLE = {"n", "k", "p", "q", "row_step", "column_step"}


def compiled(variant: str, **options: Any) -> Any:
    """The compiled kernel. `options`: in place of the variant's own."""
    name, constants = VARIANTS[variant]
    kernel, given = getattr(kernels, f"{name}_kernel"), constants | options
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in given:
            signature[argument], values[index,] = "constexpr", given[argument]
        elif argument in ("a", "b", "earlier_a", "earlier_b"):
            rows = _TILES[name][argument.endswith("b")]
            signature[argument] = f"tensordesc<fp8e4nv[{rows}, 128],{kernels._DATA!r}>"
        elif argument == "out":
            signature[argument] = f"tensordesc<fp32[64, 128],{gl.NVMMASharedLayout(128, 32, 2)!r}>"
        elif argument.endswith("_scale_inv"):  # those of an expert may begin anywhere
            signature[argument] = "*fp32"
        elif argument in ("out_mn", "ends_e", "earlier_ends_e"):
            signature[argument] = "*bf16" if argument == "out_mn" else "*i32"
            aligned[index,] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
            if argument in DIVISIBLE:
                aligned[index,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    print(sys.argv[1], compiled(sys.argv[1]).metadata.shared)
