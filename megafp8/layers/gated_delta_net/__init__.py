"""Gated DeltaNet (arXiv:2412.06464)."""
