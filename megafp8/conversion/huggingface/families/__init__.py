"""Hugging Face's families of models (`model_type`), one file each, or several in one where they differ in little.

To add a family, add a file here that defines `FAMILIES`, a tuple of records; `hf_config` finds it. A record says how
config.json maps to our model and back and what it refuses (`keys`, and `hf_traits` for what several families have),
and which names of tensors are not those of Llama (`hf_names`).
"""

from typing import NamedTuple

from megafp8.conversion.huggingface.names import TensorNames, like_llama
from megafp8.conversion.keys import Trait

LLAMA_NAMES = like_llama()


class Family(NamedTuple):
    """What `transformers` calls a model_type, with the class that holds its weights.

    `also`: another name of the class. `moe`: its layers have experts, None: or not; `latent`: they have latent
    attention. `sparse`: it is to tokens that an indexer chooses. `hyper`: they have hyper-connections. `kind`:
    `ModelSpec.architecture`. `rank`: of the families that can express a model, the one of lowest rank is written.
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
