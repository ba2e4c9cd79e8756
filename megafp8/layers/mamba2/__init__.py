"""Mamba-2 (arXiv:2405.21060)."""
