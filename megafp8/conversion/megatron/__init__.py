"""Conversion of Megatron-LM checkpoints, in both of its formats."""
