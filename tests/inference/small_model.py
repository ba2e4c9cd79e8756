"""Small Llamas of transformers: one over bytes with its tokenizer, and one with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.conversion.families import randomize


def save_small(folder: Path, *, bos: bool) -> None:
    """A Llama with random weights over bytes. `bos`: its tokenizer puts <s> before each text, as Llama's do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|endoftext|>")])
    roles = {"eos_token": "</s>"}
    if bos:
        library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
        roles["bos_token"] = "<s>"
    PreTrainedTokenizerFast(tokenizer_object=library, **roles).save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=258,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def llama_with_biases(*, tied: bool) -> Any:
    """A `LlamaForCausalLM` whose linear layers have biases, all random. `tied`: output layer and embedding are one."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    randomize(model)
    return model
