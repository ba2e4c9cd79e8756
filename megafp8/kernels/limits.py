"""Limits of kernels, for those who decide before a kernel can be imported; imports neither torch nor Triton."""

LARGEST_HEAD = 256
"""Widest head of attention, of our own kernels and of cuDNN's."""
