"""Hugging Face folders: names and keys of each family, quantized weights, tokenizers."""
