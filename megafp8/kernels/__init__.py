"""Fused Triton kernels. Each has a twin in plain PyTorch that is its specification, and must equal it bit for bit."""
