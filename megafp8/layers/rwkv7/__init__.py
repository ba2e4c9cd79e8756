"""Time mix of RWKV-7, a recurrent mixer (arXiv:2503.14456)."""
