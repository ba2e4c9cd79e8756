"""The gated short convolution (LFM2), and causal convolutions of a few tokens."""
