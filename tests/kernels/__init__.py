"""Kernels against their references: natively on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    import numpy as np
    from triton.runtime import interpreter

    def _exp2(x: np.ndarray) -> np.ndarray:
        return np.exp2(x.astype(np.float64)).astype(x.dtype)

    # NumPy's fp32 exponential differs from torch's in the last bit; through float64 both are right. On a GPU both are
    # the hardware's.
    interpreter.InterpreterBuilder.create_exp2 = lambda self, x: self.unary_op(x, _exp2)


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def every_bf16() -> Tensor:
    """All 65,536 numbers `[256, 256]`: zeros, subnormals, infinities and NaNs among them."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)
