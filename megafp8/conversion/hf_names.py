"""Hugging Face's names: in which tensor of theirs each of ours lies, and in which of its rows.

q, k and v may be parts of one tensor, side by side or by head, and gate and up, too. The linear layers of GPT-2 store
the transpose, `[k, n]` for our `[n, k]`. Experts mostly have tensors of their own, as in ours (transformers 5 fuses
them in memory only); gpt-oss and GraniteMoE store those of all experts in one.

Channels of a head: ours rotates the first half of a head against the second, and so does Llama. Where they rotate
neighbouring channels (GLM), or a part of a head (GPT-NeoX), our q and k have the rows of each head in another order:
first the first channel of each pair, then the second ones, pairs that are rotated before those that are not. As both
have the same order, scores do not depend on it. In latent attention both rotate neighbouring channels.

Shapes: n rows of a tensor of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.conversion.hf_config import ROBERTA_OFFSET
from megafp8.distributed.sharding import Shape

_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=decoder\.)\d+")


class Location(NamedTuple):
    """Where a tensor of ours lies: in the tensor of theirs that is called `name`, of `shape`.

    `rows`: int64 `[n]`, which of their rows each of ours is. `transposed`: theirs is stored as `[k, n]`. `expert`:
    theirs has a first dim more, and ours is there.
    """

    name: str
    shape: Shape
    rows: Tensor
    transposed: bool
    expert: int | None


Rows = Callable[[ModelConfig, int], tuple[Tensor, int]]
"""From a model and n: the rows `[n]` of theirs, and their number."""


def _part(part: int, parts: int) -> Rows:
    """Of tensors of equal size, one below the other."""
    return lambda model, n: (part * n + torch.arange(n), parts * n)


_whole = _part(0, 1)


def _qkv(part: int) -> Rows:
    """Queries, keys and values of all heads, one below the other."""

    def rows(model: ModelConfig, n: int) -> tuple[Tensor, int]:
        sizes = [heads * model.channels for heads in (model.num_attention_heads, *[model.query_groups] * 2)]
        return sum(sizes[:part]) + torch.arange(n), sum(sizes)

    return rows


def _qkv_by_head(part: int) -> Rows:
    """Query, key and value of a head, then those of the next head."""

    def rows(model: ModelConfig, n: int) -> tuple[Tensor, int]:
        d = model.channels
        heads, channels = torch.arange(n // d), torch.arange(d)
        return ((3 * heads + part).unsqueeze(1) * d + channels).flatten(), 3 * n

    return rows


def _every(part: int, parts: int) -> Rows:
    """Rows of all parts alternate."""
    return lambda model, n: (part + parts * torch.arange(n), parts * n)


def _after(first: int) -> Rows:
    """After rows that are not read."""
    return lambda model, n: (first + torch.arange(n), first + n)


class Place(NamedTuple):
    """A tensor of theirs, with the numbers of layer and expert left open, and which `rows` of it are ours.

    `transposed`: weights are stored as `[k, n]`. `stacked`: it holds those of all experts. `parameters`: their names of
    parameters that are not ours, with the dot if there is one.
    """

    name: str
    rows: Rows = _whole
    transposed: bool = False
    stacked: bool = False
    parameters: Mapping[str, str] = {}


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
    "layers.*.attention.q": Place("transformer.h.*.attn.c_attn", _part(0, 3), transposed=True),
    "layers.*.attention.k": Place("transformer.h.*.attn.c_attn", _part(1, 3), transposed=True),
    "layers.*.attention.v": Place("transformer.h.*.attn.c_attn", _part(2, 3), transposed=True),
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
    "layers.*.mlp.router": Place("model.layers.*.mlp.gate", parameters={"bias": ".e_score_correction_bias"}),
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
_OLMO2 = _LLAMA | {
    "layers.*.attention_output_norm": Place("model.layers.*.post_attention_layernorm"),
    "layers.*.mlp_output_norm": Place("model.layers.*.post_feedforward_layernorm"),
}
_PHI3 = _LLAMA | {
    **{f"layers.*.attention.{x}": Place("model.layers.*.self_attn.qkv_proj", _qkv(i)) for i, x in enumerate("qkv")},
    "layers.*.mlp.gate": Place("model.layers.*.mlp.gate_up_proj", _part(0, 2)),
    "layers.*.mlp.up": Place("model.layers.*.mlp.gate_up_proj", _part(1, 2)),
}
_GLM = _LLAMA | {key: _PHI3[key] for key in ("layers.*.mlp.gate", "layers.*.mlp.up")}
_GLM4 = _GLM | {
    "layers.*.attention_output_norm": Place("model.layers.*.post_self_attn_layernorm"),
    "layers.*.mlp_output_norm": Place("model.layers.*.post_mlp_layernorm"),
}
_BAICHUAN = _LLAMA | {
    f"layers.*.attention.{x}": Place("model.layers.*.self_attn.W_pack", _part(i, 3)) for i, x in enumerate("qkv")
}
_GRANITE_EXPERTS = "model.layers.*.block_sparse_moe"
_GRANITE_MOE = _LLAMA | {
    "layers.*.mlp.router": Place(f"{_GRANITE_EXPERTS}.router.layer"),
    "layers.*.mlp.experts.*.gate": Place(f"{_GRANITE_EXPERTS}.input_linear", _part(0, 2), stacked=True),
    "layers.*.mlp.experts.*.up": Place(f"{_GRANITE_EXPERTS}.input_linear", _part(1, 2), stacked=True),
    "layers.*.mlp.experts.*.down": Place(f"{_GRANITE_EXPERTS}.output_linear", stacked=True),
}
_NEOX = {
    "embedding.word": Place("gpt_neox.embed_in"),
    "layers.*.attention_norm": Place("gpt_neox.layers.*.input_layernorm"),
    **{
        f"layers.*.attention.{x}": Place("gpt_neox.layers.*.attention.query_key_value", _qkv_by_head(i))
        for i, x in enumerate("qkv")
    },
    "layers.*.attention.proj": Place("gpt_neox.layers.*.attention.dense"),
    "layers.*.mlp_norm": Place("gpt_neox.layers.*.post_attention_layernorm"),
    "layers.*.mlp.up": Place("gpt_neox.layers.*.mlp.dense_h_to_4h"),
    "layers.*.mlp.down": Place("gpt_neox.layers.*.mlp.dense_4h_to_h"),
    "final_norm": Place("gpt_neox.final_layer_norm"),
    "output": Place("embed_out"),
}
_BLOOM = {
    "embedding.word": Place("transformer.word_embeddings"),
    "embedding_norm": Place("transformer.word_embeddings_layernorm"),
    "layers.*.attention_norm": Place("transformer.h.*.input_layernorm"),
    **{
        f"layers.*.attention.{x}": Place("transformer.h.*.self_attention.query_key_value", _qkv_by_head(i))
        for i, x in enumerate("qkv")
    },
    "layers.*.attention.proj": Place("transformer.h.*.self_attention.dense"),
    "layers.*.mlp_norm": Place("transformer.h.*.post_attention_layernorm"),
    "layers.*.mlp.up": Place("transformer.h.*.mlp.dense_h_to_4h"),
    "layers.*.mlp.down": Place("transformer.h.*.mlp.dense_4h_to_h"),
    "final_norm": Place("transformer.ln_f"),
    "output": Place("lm_head"),
}
_OPT = {
    "embedding.word": Place("model.decoder.embed_tokens"),
    "embedding.position": Place("model.decoder.embed_positions", _after(2)),
    "layers.*.attention_norm": Place("model.decoder.layers.*.self_attn_layer_norm"),
    **{f"layers.*.attention.{x}": Place(f"model.decoder.layers.*.self_attn.{x}_proj") for x in "qkv"},
    "layers.*.attention.proj": Place("model.decoder.layers.*.self_attn.out_proj"),
    "layers.*.mlp_norm": Place("model.decoder.layers.*.final_layer_norm"),
    "layers.*.mlp.up": Place("model.decoder.layers.*.fc1"),
    "layers.*.mlp.down": Place("model.decoder.layers.*.fc2"),
    "final_norm": Place("model.decoder.final_layer_norm"),
    "output": Place("lm_head"),
}
_GPT_OSS_EXPERTS: dict[str, Any] = {
    "transposed": True,
    "stacked": True,
    "parameters": {"weight": "", "bias": "_bias"},
}
_GPT_OSS = _LLAMA | {
    "layers.*.attention.sink": Place("model.layers.*.self_attn.sinks", parameters={"weight": ""}),
    "layers.*.mlp.router": Place("model.layers.*.mlp.router", parameters={"logit_bias": ".bias"}),
    "layers.*.mlp.experts.*.gate": Place("model.layers.*.mlp.experts.gate_up_proj", _every(0, 2), **_GPT_OSS_EXPERTS),
    "layers.*.mlp.experts.*.up": Place("model.layers.*.mlp.experts.gate_up_proj", _every(1, 2), **_GPT_OSS_EXPERTS),
    "layers.*.mlp.experts.*.down": Place("model.layers.*.mlp.experts.down_proj", **_GPT_OSS_EXPERTS),
}
_GEMMA = _OLMO2 | {"layers.*.mlp_norm": Place("model.layers.*.pre_feedforward_layernorm")}
_BERT_BLOCKS = {
    "embedding.word": "embeddings.word_embeddings",
    "embedding.position": "embeddings.position_embeddings",
    "embedding.token_type": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers.*.attention.q": "encoder.layer.*.attention.self.query",
    "layers.*.attention.k": "encoder.layer.*.attention.self.key",
    "layers.*.attention.v": "encoder.layer.*.attention.self.value",
    "layers.*.attention.proj": "encoder.layer.*.attention.output.dense",
    "layers.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
    "layers.*.mlp.up": "encoder.layer.*.intermediate.dense",
    "layers.*.mlp.down": "encoder.layer.*.output.dense",
    "layers.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
}
_OUTPUT_OF_BERT = {"weight": ".decoder.weight", "bias": ".bias"}
_BERT = {ours: Place(f"bert.{theirs}") for ours, theirs in _BERT_BLOCKS.items()} | {
    "transform": Place("cls.predictions.transform.dense"),
    "transform_norm": Place("cls.predictions.transform.LayerNorm"),
    "output": Place("cls.predictions", parameters=_OUTPUT_OF_BERT),
    "pooler": Place("bert.pooler.dense"),
    "binary_head": Place("cls.seq_relationship"),
}
_ROBERTA = {ours: Place(f"roberta.{theirs}") for ours, theirs in _BERT_BLOCKS.items()} | {
    "embedding.position": Place("roberta.embeddings.position_embeddings", _after(ROBERTA_OFFSET)),
    "transform": Place("lm_head.dense"),
    "transform_norm": Place("lm_head.layer_norm"),
    "output": Place("lm_head", parameters=_OUTPUT_OF_BERT),
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


_T5_WITHOUT_GATES = _t5(gated=False)
_MODULES: Mapping[str, Mapping[str, Place]] = {
    "baichuan": _BAICHUAN,
    "bert": _BERT,
    "bloom": _BLOOM,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm": _GLM,
    "glm4": _GLM4,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "mixtral": _MIXTRAL,
    "olmo2": _OLMO2,
    "olmoe": _LLAMA_EXPERTS,
    "opt": _OPT,
    "phi3": _PHI3,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "roberta": _ROBERTA,
    "t5": _t5(gated=True),
}
_NEIGHBORS = frozenset({"glm", "glm4"})
"""Families that rotate neighbouring channels."""

_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|embeddings\.(position|token_type)_ids"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"  # of T5's first release, which nothing reads
)
"""Constants that older releases of `transformers` saved with the weights."""


def locate(model_type: str, model: ModelConfig, name: str, shape: Shape) -> Location:
    """Where the tensor `name` (`model.layers.3.attention.q.weight`) of `shape` lies; without padding of the vocabulary.

    `model` is one of `model_type`.
    """
    module, _, parameter = _of_stack(model, name.removeprefix("model.")).rpartition(".")
    numbers = _NUMBER.findall(module)
    ungated = model_type == "t5" and not ACTIVATIONS[model.activation].gated
    there = (_T5_WITHOUT_GATES if ungated else _places(model_type))[_NUMBER.sub("*", module)]
    expert = int(numbers.pop()) if there.stacked else None
    left = iter(numbers)
    theirs = re.sub(r"\*", lambda _: next(left), there.name) + there.parameters.get(parameter, f".{parameter}")
    rows, count = there.rows(model, shape[0])
    if re.search(r"attention\.[qk](_norm)?$", module) and model.latent_attention is None:
        rows = rows.unflatten(0, (-1, model.channels))[:, _channels(model_type, model)].flatten()
    transposed, stored = there.transposed and parameter == "weight", (count, *shape[1:])
    stored = stored[::-1] if transposed else stored
    if expert is not None:
        assert model.moe is not None
        stored = (model.moe.num_experts, *stored)
    return Location(theirs, stored, rows, transposed, expert)


def _of_stack(model: ModelConfig, name: str) -> str:
    """The name of a tensor of T5's decoder with the layer counted from the decoder's first; of others as it is."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is None or not model.is_decoder(int(layer[1])):
        return name
    return f"decoder.{int(layer[1]) - model.num_layers}.{name[layer.end() :]}"


def _channels(model_type: str, model: ModelConfig) -> Tensor:
    """Which channel of a head of theirs each of ours is, `[d]`."""
    d, rotated = model.channels, model.rotary_channels
    channels = torch.arange(d)
    if model_type in _NEIGHBORS:
        pairs = channels[:rotated].view(-1, 2).t()
    else:
        pairs = channels[:rotated].view(2, -1)
    return torch.cat([pairs, channels[rotated:].view(2, -1)], dim=1).flatten()


def _places(model_type: str) -> Mapping[str, Place]:
    return _MODULES.get(model_type, _LLAMA)


def base_prefix(model_type: str) -> str:
    """Prefix of all weights but the output layer's; files saved without an output layer lack it."""
    return _places(model_type)["embedding.word"].name.partition(".")[0] + "."


def output_name(model_type: str) -> str:
    """Name of the output layer's weight, which files of a tied model may lack."""
    there = _places(model_type)["output"]
    return there.name + there.parameters.get("weight", ".weight")


def is_of_head(model_type: str, name: str) -> bool:
    """Whether a tensor of theirs belongs to the output layer and what is beside it."""
    return name.partition(".")[0] == output_name(model_type).partition(".")[0]


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
