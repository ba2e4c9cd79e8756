"""Dtypes by the names that a config has for them, and those of what is summed."""

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
    """The dtype of gradients, masters and moments of a weight in `dtype`: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def state_dtype(name: str, weight: torch.dtype) -> torch.dtype:
    """The dtype that a config's `name` stands for in gradients or state of a weight in `weight`: fp32 is `sum_dtype`,
    others are what they say."""
    return sum_dtype(weight) if name == "fp32" else DTYPES[name]
