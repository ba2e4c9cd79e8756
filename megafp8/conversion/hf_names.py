"""Hugging Face's names: in which tensor of theirs each of ours lies.

Both rotate the first half of a head against the second, so q and k need no permutation (files in Meta's own format or
GGUF would); in latent attention both rotate neighbouring channels. The linear layers of GPT-2 store the transpose,
`[k, n]` for our `[n, k]`, and its q, k and v lie side by side in one tensor. Experts have tensors of their own, as in
ours; transformers 5 fuses them in memory only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.conversion.hf_config import ROBERTA_OFFSET
from megafp8.distributed.sharding import Shape

_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=decoder\.)\d+")


class Place(NamedTuple):
    """A tensor of theirs, and which of its `parts` along our dim 0 holds ours; `transposed`: stored as `[k, n]`.
    `skip`: rows of theirs before ours, which are zeros where we write them."""

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    skip: int = 0

    def stored_shape(self, shape: Shape) -> Shape:
        """Shape of the tensor of theirs that holds one of ours of `shape` (without padding of the vocabulary)."""
        whole = (self.skip + shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole


_LLAMA = {
    "embedding.word": Place("model.embed_tokens"),
    "layers.*.attention_norm": Place("model.layers.*.input_layernorm"),
    "layers.*.attention.q": Place("model.layers.*.self_attn.q_proj"),
    "layers.*.attention.k": Place("model.layers.*.self_attn.k_proj"),
    "layers.*.attention.v": Place("model.layers.*.self_attn.v_proj"),
    "layers.*.attention.q_norm": Place("model.layers.*.self_attn.q_norm"),
    "layers.*.attention.k_norm": Place("model.layers.*.self_attn.k_norm"),
    "layers.*.attention.proj": Place("model.layers.*.self_attn.o_proj"),
    "layers.*.mlp_norm": Place("model.layers.*.post_attention_layernorm"),
    "layers.*.mlp.gate": Place("model.layers.*.mlp.gate_proj"),
    "layers.*.mlp.up": Place("model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": Place("model.layers.*.mlp.down_proj"),
    "final_norm": Place("model.norm"),
    "output": Place("lm_head"),
}
_GPT2 = {
    "embedding.word": Place("transformer.wte"),
    "embedding.position": Place("transformer.wpe"),
    "layers.*.attention_norm": Place("transformer.h.*.ln_1"),
    "layers.*.attention.q": Place("transformer.h.*.attn.c_attn", 0, 3, transposed=True),
    "layers.*.attention.k": Place("transformer.h.*.attn.c_attn", 1, 3, transposed=True),
    "layers.*.attention.v": Place("transformer.h.*.attn.c_attn", 2, 3, transposed=True),
    "layers.*.attention.proj": Place("transformer.h.*.attn.c_proj", transposed=True),
    "layers.*.mlp_norm": Place("transformer.h.*.ln_2"),
    "layers.*.mlp.up": Place("transformer.h.*.mlp.c_fc", transposed=True),
    "layers.*.mlp.down": Place("transformer.h.*.mlp.c_proj", transposed=True),
    "final_norm": Place("transformer.ln_f"),
    "output": Place("lm_head"),
}
_MIXTRAL = _LLAMA | {
    "layers.*.mlp.router": Place("model.layers.*.block_sparse_moe.gate"),
    "layers.*.mlp.experts.*.gate": Place("model.layers.*.block_sparse_moe.experts.*.w1"),
    "layers.*.mlp.experts.*.up": Place("model.layers.*.block_sparse_moe.experts.*.w3"),
    "layers.*.mlp.experts.*.down": Place("model.layers.*.block_sparse_moe.experts.*.w2"),
}
_LLAMA_EXPERTS = _LLAMA | {
    "layers.*.mlp.router": Place("model.layers.*.mlp.gate"),
    "layers.*.mlp.experts.*.gate": Place("model.layers.*.mlp.experts.*.gate_proj"),
    "layers.*.mlp.experts.*.up": Place("model.layers.*.mlp.experts.*.up_proj"),
    "layers.*.mlp.experts.*.down": Place("model.layers.*.mlp.experts.*.down_proj"),
}
_QWEN_MOE = _LLAMA_EXPERTS | {
    "layers.*.mlp.shared.gate": Place("model.layers.*.mlp.shared_expert.gate_proj"),
    "layers.*.mlp.shared.up": Place("model.layers.*.mlp.shared_expert.up_proj"),
    "layers.*.mlp.shared.down": Place("model.layers.*.mlp.shared_expert.down_proj"),
    "layers.*.mlp.shared_gate": Place("model.layers.*.mlp.shared_expert_gate"),
}
_DEEPSEEK = _LLAMA_EXPERTS | {
    "layers.*.attention.q_down": Place("model.layers.*.self_attn.q_a_proj"),
    "layers.*.attention.q_norm": Place("model.layers.*.self_attn.q_a_layernorm"),
    "layers.*.attention.q_up": Place("model.layers.*.self_attn.q_b_proj"),
    "layers.*.attention.kv_down": Place("model.layers.*.self_attn.kv_a_proj_with_mqa"),
    "layers.*.attention.kv_norm": Place("model.layers.*.self_attn.kv_a_layernorm"),
    "layers.*.attention.kv_up": Place("model.layers.*.self_attn.kv_b_proj"),
    "layers.*.mlp.shared.gate": Place("model.layers.*.mlp.shared_experts.gate_proj"),
    "layers.*.mlp.shared.up": Place("model.layers.*.mlp.shared_experts.up_proj"),
    "layers.*.mlp.shared.down": Place("model.layers.*.mlp.shared_experts.down_proj"),
    "layers.*.embedding_norm": Place("model.layers.*.enorm"),  # of multi-token prediction
    "layers.*.hidden_norm": Place("model.layers.*.hnorm"),
    "layers.*.projection": Place("model.layers.*.eh_proj"),
    "layers.*.final_norm": Place("model.layers.*.shared_head.norm"),
}
_BERT_BLOCKS = {
    "embedding.word": Place("bert.embeddings.word_embeddings"),
    "embedding.position": Place("bert.embeddings.position_embeddings"),
    "embedding.token_type": Place("bert.embeddings.token_type_embeddings"),
    "embedding_norm": Place("bert.embeddings.LayerNorm"),
    "layers.*.attention.q": Place("bert.encoder.layer.*.attention.self.query"),
    "layers.*.attention.k": Place("bert.encoder.layer.*.attention.self.key"),
    "layers.*.attention.v": Place("bert.encoder.layer.*.attention.self.value"),
    "layers.*.attention.proj": Place("bert.encoder.layer.*.attention.output.dense"),
    "layers.*.attention_norm": Place("bert.encoder.layer.*.attention.output.LayerNorm"),
    "layers.*.mlp.up": Place("bert.encoder.layer.*.intermediate.dense"),
    "layers.*.mlp.down": Place("bert.encoder.layer.*.output.dense"),
    "layers.*.mlp_norm": Place("bert.encoder.layer.*.output.LayerNorm"),
}
_BERT = _BERT_BLOCKS | {
    "transform": Place("cls.predictions.transform.dense"),
    "transform_norm": Place("cls.predictions.transform.LayerNorm"),
    "output": Place("cls.predictions.decoder"),
    "output.bias": Place("cls.predictions.bias"),
    "pooler": Place("bert.pooler.dense"),
    "binary_head": Place("cls.seq_relationship"),
}
_ROBERTA = {ours: Place(f"roberta{theirs.name.removeprefix('bert')}") for ours, theirs in _BERT_BLOCKS.items()} | {
    "embedding.position": Place("roberta.embeddings.position_embeddings", skip=ROBERTA_OFFSET),
    "transform": Place("lm_head.dense"),
    "transform_norm": Place("lm_head.layer_norm"),
    "output": Place("lm_head.decoder"),
    "output.bias": Place("lm_head.bias"),
}
_T5_BLOCK = {
    "*.attention_norm": "block.*.layer.0.layer_norm",
    "*.attention.q": "block.*.layer.0.SelfAttention.q",
    "*.attention.k": "block.*.layer.0.SelfAttention.k",
    "*.attention.v": "block.*.layer.0.SelfAttention.v",
    "*.attention.proj": "block.*.layer.0.SelfAttention.o",
}


def _t5(gated: bool) -> dict[str, Place]:
    """The first linear layer of an MLP without a gate has a name of its own."""
    found = {
        "embedding.word": Place("shared"),
        "encoder.relative_bias": Place("encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
        "decoder.relative_bias": Place("decoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
        "encoder_norm": Place("encoder.final_layer_norm"),
        "final_norm": Place("decoder.final_layer_norm"),
        "output": Place("lm_head"),
        "decoder.*.cross_norm": Place("decoder.block.*.layer.1.layer_norm"),
    }
    for part, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "o")):
        found[f"decoder.*.cross_attention.{part}"] = Place(f"decoder.block.*.layer.1.EncDecAttention.{theirs}")
    for ours, stack, last in (("layers", "encoder", 1), ("decoder", "decoder", 2)):
        found |= {f"{ours}.{name}": Place(f"{stack}.{theirs}") for name, theirs in _T5_BLOCK.items()}
        mlp = f"{stack}.block.*.layer.{last}"
        found[f"{ours}.*.mlp_norm"] = Place(f"{mlp}.layer_norm")
        found[f"{ours}.*.mlp.gate"] = Place(f"{mlp}.DenseReluDense.wi_0")
        found[f"{ours}.*.mlp.up"] = Place(f"{mlp}.DenseReluDense.{'wi_1' if gated else 'wi'}")
        found[f"{ours}.*.mlp.down"] = Place(f"{mlp}.DenseReluDense.wo")
    return found


_MODULES: Mapping[str, Mapping[str, Place]] = {
    "bert": _BERT,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt2": _GPT2,
    "mixtral": _MIXTRAL,
    "olmoe": _LLAMA_EXPERTS,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "roberta": _ROBERTA,
    "t5": _t5(gated=True),
    "t5 without gates": _t5(gated=False),
}

_PARAMETERS = {"mlp.router.bias": "e_score_correction_bias"}
"""Their names of parameters that are not called weight or bias, by module and name of ours."""

_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|embeddings\.(position|token_type)_ids"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"  # of T5's first release, which nothing reads
)
"""Constants that older releases of `transformers` saved with the weights."""


def names_of(model_type: str, model: ModelConfig) -> Callable[[str], Place]:
    """`place` of the tensors of `model`, by our names."""
    gates = model.architecture != "t5" or ACTIVATIONS[model.activation].gated
    kind = model_type if gates else f"{model_type} without gates"
    return partial(place, kind, encoder_layers=model.num_layers if model.architecture == "t5" else None)


def place(model_type: str, name: str, encoder_layers: int | None = None) -> Place:
    """Where the tensor `name` (`model.layers.3.attention.q.weight`) of a model of `model_type` lies.

    `encoder_layers`: of T5, whose layers from this one on are the decoder's.
    """
    name = name.removeprefix("model.")
    layer = re.match(r"layers\.(\d+)\.", name)
    if encoder_layers is not None and layer is not None and int(layer[1]) >= encoder_layers:
        name = f"decoder.{int(layer[1]) - encoder_layers}.{name[layer.end() :]}"
    module, _, parameter = name.rpartition(".")
    modules, numbers = _MODULES.get(model_type, _LLAMA), iter(_NUMBER.findall(module))
    if name in modules:  # a parameter under a name of its own
        return modules[name]
    found = modules[_NUMBER.sub("*", module)]
    theirs = re.sub(r"\*", lambda _: next(numbers), found.name)
    its_name = next((theirs for ours, theirs in _PARAMETERS.items() if name.endswith(f".{ours}")), parameter)
    return found._replace(name=f"{theirs}.{its_name}", transposed=found.transposed and parameter == "weight")


def base_prefix(model_type: str) -> str:
    """Prefix of all weights but the output layer's; files saved without an output layer lack it."""
    return _MODULES.get(model_type, _LLAMA)["embedding.word"].name.partition(".")[0] + "."


def output_layer(model_type: str) -> str:
    """Name of the output layer's weight, which files of a tied model lack."""
    return place(model_type, "model.output.weight").name


def is_of_head(model_type: str, name: str) -> bool:
    """Whether a tensor of theirs belongs to the output layer and what is beside it."""
    return name.partition(".")[0] == output_layer(model_type).partition(".")[0]


def present_name(name: str) -> str:
    """The name of a tensor in present releases; BERT's first releases named parameters of norms as TensorFlow does."""
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


_OTHER_HEADS = re.compile(r"((ro)?bert\.pooler|cls\.seq_relationship)\..*")


def is_of_other_head(name: str) -> bool:
    """Whether a tensor of theirs belongs to the pooler and binary head, which a model may have without using them."""
    return _OTHER_HEADS.fullmatch(name) is not None


def is_buffer(name: str) -> bool:
    """Whether a tensor of theirs is no weight."""
    return _BUFFERS.search(name) is not None


def is_copy(name: str) -> bool:
    """Whether a tensor of theirs repeats the embedding or the output layer, for multi-token prediction."""
    return re.fullmatch(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", name) is not None


def copy_of(name: str) -> str | None:
    """The tensor of theirs that `name` must be a copy of, if it is there: of BERT's output bias, of T5's embedding."""
    known = {"cls.predictions.decoder.bias": "cls.predictions.bias", "lm_head.decoder.bias": "lm_head.bias"}
    known |= {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    return known.get(name)
