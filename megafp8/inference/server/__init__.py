"""An OpenAI-compatible HTTP server over `megafp8.inference.Generator`: `megafp8 serve`."""
