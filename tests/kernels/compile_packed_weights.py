"""Compiles the kernels of quantized weights for sm_90, which needs no GPU: prints kind, kernel and shared memory.

Run by a test in a process without Triton's interpreter, which neither reads nor checks their assembly.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megafp8.kernels import packed_weights

DATA = {"bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "vector": (packed_weights._vector, 4, 3, {"ROWS": 4, "T": 128, "V": 16}),
    "split": (packed_weights._tile, 4, 4, {"M": 16, "N": 32, "K": 64, "SPLIT": 4, "STEP": 256}),
    "tile": (packed_weights._tile, 4, 3, {"M": 64, "N": 64, "K": 64, "SPLIT": 0, "STEP": 64}),
    "dequantize": (packed_weights._dequantize, 4, 3, {"N": 16, "K": 64}),
}
"""Kernel, warps, stages, constants."""


def compiled(case: str, kind: str) -> Any:
    kernel, warps, stages, constants = CASES[case]
    constants = constants | {"KIND": kind, "HALF": 64, "INTERPRETED": False, "EVEN": True, "bias_n": None}
    if kind == "bf16":
        constants["scale_inv_gn"] = None
    if kind != "int4":
        constants["zero_gn"] = None
    pointers = {"data": DATA[kind], "scale_inv_gn": "*bf16" if kind == "int4" else "*fp32", "zero_gn": "*u8"}
    signature, values, aligned = {}, {}, {}
    for index, name in enumerate(kernel.jit.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name in ("m", "n", "k"):
            signature[name] = "i32"
        else:
            signature[name], aligned[index,] = pointers.get(name, "*bf16"), [["tt.divisibility", 16]]
    source = ASTSource(kernel.jit, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


if __name__ == "__main__":
    for kind in DATA:
        for case in CASES:
            if kind != "bf16" or case != "dequantize":
                print(kind, case, compiled(case, kind).metadata.shared, flush=True)
