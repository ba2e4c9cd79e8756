"""Formats, quantized tensors, quantizers and recipes: the specification, in plain PyTorch."""
