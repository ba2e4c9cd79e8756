"""Conversion of Hugging Face folders: names and config keys of each family, quantized weights, and tokenizers."""
