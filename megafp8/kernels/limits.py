"""Limits of kernels, for decisions that are made before a kernel can be imported; needs neither torch nor Triton."""

LARGEST_HEAD = 256
"""Widest head of attention, of our own kernels and of cuDNN's."""
LENGTH_EPS = 1e-6
"""Added to the squared length of a head's query or key where it is divided by its length."""
