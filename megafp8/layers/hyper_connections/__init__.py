"""Hyper-connections: several residual streams."""
