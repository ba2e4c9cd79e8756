"""Tensor and sequence parallelism: linears, embedding and loss whose weights are cut over a group of ranks."""
