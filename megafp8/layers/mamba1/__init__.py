"""Mamba-1, a selective state space mixer (arXiv:2312.00752)."""
