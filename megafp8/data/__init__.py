"""From text to micro-batches: tokenizers, Megatron's .bin/.idx files, packed samples, blends, the stateless sampler."""


class DataError(ValueError):
    """A data set that is missing, damaged, or does not fit the model. The message is for the user."""
