"""Megatron-LM's checkpoints, of both formats."""
