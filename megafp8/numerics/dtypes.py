"""Dtypes by their names in configs, and dtypes of gradients and optimizer state."""

from __future__ import annotations

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients, masters and moments of a weight in `dtype`: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def in_bf16(x: float) -> float:
    """Return `x` rounded to bf16."""
    return float(torch.tensor(x, dtype=torch.bfloat16))


def state_dtype(name: str, weight: torch.dtype) -> torch.dtype:
    """Return the dtype that `name` in a config means for gradients or state of a weight with the dtype `weight`.

    "fp32" means `sum_dtype(weight)`; other names have their usual meaning.
    """
    return sum_dtype(weight) if name == "fp32" else DTYPES[name]
