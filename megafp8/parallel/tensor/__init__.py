"""Tensor and sequence parallelism: linear layers, embedding and loss with weights sharded over a group of ranks."""
