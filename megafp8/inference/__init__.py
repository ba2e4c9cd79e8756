"""Text from a model: a paged cache of keys and values, continuous batching, sampling, from any checkpoint."""

from megafp8.inference.generator import Completion, Generator, Piece
from megafp8.inference.sampling import SamplingOptions

__all__ = ["Completion", "Generator", "Piece", "SamplingOptions"]
