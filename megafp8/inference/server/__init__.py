"""An OpenAI-compatible HTTP server over `megafp8.inference.Generator`: `python -m megafp8.inference.server`."""
