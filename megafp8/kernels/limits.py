"""Limits of kernels, for decisions that are made before kernels can be imported. Needs neither torch nor Triton."""

LARGEST_HEAD = 256
"""Largest head width that the attention kernels of megafp8 and cuDNN support."""
LENGTH_EPS = 1e-6
"""Number added to the squared length of a head's query or key before it is divided by its length."""
