"""Attention over compressed keys and values (DeepSeek V4)."""
