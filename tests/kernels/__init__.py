"""Kernels against their plain twins: natively on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

    import numpy as np
    from triton.runtime import interpreter

    def _exp2(x: np.ndarray) -> np.ndarray:
        return np.exp2(x.astype(np.float64)).astype(x.dtype)

    # NumPy's fp32 exponential differs from torch's in the last bit; by way of float64 both are right. On a GPU both are
    # the hardware's.
    interpreter.InterpreterBuilder.create_exp2 = lambda self, x: self.unary_op(x, _exp2)
