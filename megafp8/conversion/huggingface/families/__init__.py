"""Hugging Face's families of models (`model_type`), one per file; similar families share a file.

To add a family, add a file to this folder that defines `FAMILIES`, a tuple of records. `huggingface.config` finds it. A
record defines how config.json is translated to our model and back, and what is refused (by traits, from `keys`, and
from `huggingface.traits` for properties that several families share). It also has the names of the tensors, as far as
they differ from Llama's (`huggingface.names`). `python docs/site/families.py` then updates the list of families, and
`tests/conversion/huggingface/drawn.py` compares random models of the family with `transformers`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megafp8.conversion.huggingface.names import TensorNames, like_llama
from megafp8.conversion.keys import Trait

LLAMA_NAMES = like_llama()
LACKING: Mapping[str, str] = {
    "axk2": "norms with a low-rank gate, and latent attention with an output gate",
    "bitnet": "norms between attention or activation and the output projection",
    "dots3_note": "latent attention with an output gate, a norm of the rotated key and scaled latents",
    "falcon_h1": "Mamba-2 and attention in parallel in a layer, and multipliers of their projections",
    "hy_v4": "hyper-connections without a mixing matrix, and latent attention with an output gate and sinks",
    "longcat_flash": "layers whose experts are added after a second attention, and scaled latents",
    "mimo_v2_flash": "softmax attention with values that are narrower than keys",
    "modernbert_decoder": "a decoder whose output layer begins with a dense layer, an activation and a norm",
    "phimoe": "the sparsemixer router, which samples experts and scores the second one without the first",
    "qwen4_exp": "hyper-connections with low-rank input gates, embeddings of n-grams and keys selected in blocks",
}
"""Parts that megafp8 lacks for some families of transformers, by model_type. These families are refused."""


class Family(NamedTuple):
    """Family of models, which is one model_type in `transformers`.

    Attributes:
        model_type: Name of the family in config.json.
        architecture: Class of `transformers` that holds the weights.
        traits: Traits that translate config.json to flat keys and back.
        names: Names of the tensors.
        also: Another name of the class, or None.
        moe: Whether its models have experts; None if they may or may not have them.
        latent: Whether layers have latent attention.
        sparse: Whether attention is restricted to tokens that an indexer selects.
        hyper: Whether layers have hyper-connections.
        kind: `ModelSpec.architecture` of its models.
        rank: Preference among the families that can express a model; the lowest rank is written.
        about: Models and options that are supported, for docs/huggingface.md.
    """

    model_type: str
    architecture: str
    traits: tuple[Trait, ...]
    names: TensorNames = LLAMA_NAMES
    also: str | None = None
    moe: bool | None = False
    latent: bool = False
    sparse: bool = False
    hyper: bool = False
    kind: str = "gpt"
    rank: int = 3
    about: str = ""
