"""Kimi Delta Attention, a mixer with linear attention (arXiv:2510.26692)."""
