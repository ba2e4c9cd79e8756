"""From text to micro-batches: tokenizers, Megatron's .bin/.idx files, packed samples, blends, the stateless sampler."""

from megafp8.data.errors import DataError

__all__ = ["DataError"]
