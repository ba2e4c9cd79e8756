"""Kernels that several kinds of layers or optimizers share: casts, GEMMs of experts, random numbers.

Each file names the PyTorch reference that specifies its results. A kernel for only one kind of layer is in
`megafp8.layers`.
"""

from importlib import import_module

from megafp8.numerics.implementations import set_kernels

set_kernels(lambda name: import_module(f"{__name__}.{name}"))
