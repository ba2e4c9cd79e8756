"""The path of text to micro-batches: tokenizers, Megatron's .bin/.idx files, packing, blends, the stateless sampler."""


class DataError(ValueError):
    """A missing or damaged data set, or one that does not fit the model. The message is for the user."""
