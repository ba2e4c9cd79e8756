"""Whether a forward is exported to ONNX, whose operators cannot express all that PyTorch's do."""

from __future__ import annotations

import torch


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` traces what runs."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
