"""Attention with grouped queries to the blocks of tokens that an indexer chooses (MiniMax-M3)."""
