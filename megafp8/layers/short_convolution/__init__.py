"""Gated short convolution (LFM2), and causal convolutions over a few tokens."""
