"""Hyper-connections: several residual streams instead of one."""
