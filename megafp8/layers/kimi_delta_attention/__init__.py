"""Kimi Delta Attention (arXiv:2510.26692)."""
