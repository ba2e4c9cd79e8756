"""Kernels shared by kinds of layers and by optimizers: casts, GEMMs of experts, random numbers.

Each file names the PyTorch reference that specifies it. A kernel of one kind of layer is in `megafp8.layers`.
"""

from importlib import import_module

from megafp8.numerics.implementations import set_kernels

set_kernels(lambda name: import_module(f"{__name__}.{name}"))
