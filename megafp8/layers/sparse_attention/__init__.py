"""Latent attention to the keys that an indexer chooses (DeepSeek V3.2)."""
