"""Mamba-2, a state space mixer (arXiv:2405.21060)."""
