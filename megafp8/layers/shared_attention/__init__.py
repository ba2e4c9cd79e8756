"""Mamba-2 after a transformer that several layers share (Zamba2)."""
