"""Per-layer embeddings (Gemma 3n and 4) and layer scalars."""
