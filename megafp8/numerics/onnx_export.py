"""Detection of ONNX export: ONNX's operators cannot express everything that PyTorch's operators do."""

from __future__ import annotations

import torch


def in_onnx_export() -> bool:
    """Return whether the running code is traced by `torch.onnx.export`."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
