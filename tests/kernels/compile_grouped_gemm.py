"""Compiles a block-scaled grouped GEMM for sm_90, which needs no GPU: prints its name, shared memory and stack.

Run by a test in a process without Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megafp8.kernels import grouped_gemm_hopper as kernels

CONSTANTS: dict[str, dict[str, Any]] = {
    "sums": {"STAGES": 4, "ACCUMULATE": True, "PAIR": False},
}
DIVISIBLE = {"n", "k", "p", "q", "row_step", "column_step"}


def compiled(name: str, **options: Any) -> Any:
    """The compiled kernel `name`. `options`: in place of its own."""
    kernel, given = getattr(kernels, f"{name}_kernel"), CONSTANTS[name] | options
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        rows = 64 if argument in ("a", "earlier_a") else 128
        if argument in given:
            signature[argument], values[index,] = "constexpr", given[argument]
        elif argument in ("a", "b", "earlier_a", "earlier_b"):
            signature[argument] = f"tensordesc<fp8e4nv[{rows}, 128],{kernels._DATA!r}>"
        elif argument.endswith("a_scale_inv") or (argument.endswith("b_scale_inv") and name == "sums"):
            signature[argument] = f"tensordesc<fp32[1, 128],{kernels._SCALES!r}>"
        elif argument == "out":
            signature[argument] = f"tensordesc<fp32[64, 128],{gl.NVMMASharedLayout(128, 32, 2)!r}>"
        elif argument in ("out_mn", "b_scale_inv", "ends_e", "earlier_ends_e"):
            pointer = {"out_mn": "*bf16", "ends_e": "*i32", "earlier_ends_e": "*i32"}.get(argument, "*fp32")
            signature[argument], aligned[index,] = pointer, [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
            if argument in DIVISIBLE:
                aligned[index,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    kernel = compiled("sums", PAIR=True) if sys.argv[1] == "pairs" else compiled(sys.argv[1])
    print(sys.argv[1], kernel.metadata.shared)
