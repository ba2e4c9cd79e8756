"""Compiles the kernels of hyper-connections for sm_90, which needs no GPU: prints names, shared memory and spills.

Run by a test in a process without Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megafp8.layers.hyper_connections import kernel as kernels

CONSTANTS: dict[str, int | str] = {"N": 4, "P": 24, "M": 32, "ITERATIONS": 20, "PRECISION": "tf32"}
OPTIONS: dict[str, dict[str, Any]] = {
    "_project": kernels.PROJECT,
    "_weights": kernels.WEIGHTS,
    "_weights_backward": kernels.WEIGHTS,
    "_read": kernels.STREAMS,
    "_read_backward": kernels.STREAMS,
    "_mixed": kernels.STREAMS,
    "_mixed_backward": kernels.STREAMS,
    "_streams_backward": kernels.STREAMS_BACKWARD,
}
BF16, NUMBERS, FLOATS = {"x", "y", "d", "dx", "dy", "out", "fn", "passed", "base", "scale"}, "rhk", ("eps", "norm_eps")


def compiled(name: str) -> Any:
    """A kernel for four streams of a multiple of 16 channels."""
    kernel, options = getattr(kernels, name).jit, dict(OPTIONS[name])
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        given = {**CONSTANTS, **options}
        if argument in given:
            signature[argument], values[index,] = "constexpr", given[argument]
        elif argument in FLOATS:
            signature[argument] = "fp32"
        else:
            pointer = "*bf16" if argument in BF16 else "*fp32"
            signature[argument] = "i32" if argument in (*NUMBERS, "tokens") else pointer
            aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", 90, 32), options=launch
    )


if __name__ == "__main__":
    for name in OPTIONS:
        print(name, compiled(name).metadata.shared)
