"""Gated DeltaNet, a mixer with linear attention (arXiv:2412.06464)."""
