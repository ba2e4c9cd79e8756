"""All Triton kernels. Each names its reference in PyTorch, which specifies it and which it must equal bit for bit."""

from importlib import import_module

from megafp8.numerics.implementations import set_kernels

set_kernels(lambda name: import_module(f"{__name__}.{name}"))
