"""Time mix of RWKV-7 (arXiv:2503.14456)."""
