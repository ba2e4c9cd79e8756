"""Megatron-LM's tensor names, and the location of each of our tensors in its per-rank tensors.

Megatron core's GPTModel has these tensors, with layers counted from 0 on each pipeline stage:

    embedding.word_embeddings.weight                  [v/t, h]        first stage
    embedding.position_embeddings.weight              [positions, h]  first stage
    decoder.layers.0.input_layernorm.weight           [h]
    decoder.layers.0.self_attention.linear_qkv.weight [n/t, h]
    decoder.layers.0.self_attention.linear_proj.weight [h, a·d/t]
    decoder.layers.0.self_attention.q_layernorm.weight [d]
    decoder.layers.0.pre_mlp_layernorm.weight         [h]
    decoder.layers.0.mlp.linear_fc1.weight            [f/t or 2f/t, h]
    decoder.layers.0.mlp.linear_fc2.weight            [h, f/t]
    decoder.layers.0.mlp.router.weight                [e, h]
    decoder.layers.0.mlp.router.expert_bias           [e]
    decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight  like an MLP; experts count from 0 on each
                                                      expert-parallel rank
    decoder.layers.0.mlp.shared_experts.linear_fc1.weight           like an MLP
    decoder.layers.0.mlp.shared_experts.gate_weight   [1, h]
    decoder.final_layernorm.weight                    [h]             last stage
    output_layer.weight                               [v/t, h]        last stage; a copy if weights are tied

With Transformer Engine, norms belong to the layers after them (`linear_qkv.layer_norm_weight`), except before experts.
Its grouped GEMMs number the weights of the experts (`experts.linear_fc1.weight0`). Models from before Megatron core
have other names for the same tensors. BertModel has `encoder` instead of `decoder`, and in addition

    embedding.tokentype_embeddings.weight             [2, h]          first stage
    lm_head.dense.weight, lm_head.layer_norm.weight   [h, h], [h]     last stage, like all tensors below
    output_layer.bias                                 [v/t]
    pooler.dense.weight, binary_head.weight           [h, h], [2, h]

`canonical` translates all of these names to the names in the first table.

Three kinds of tensors are sharded along dim 0 and contain several of our tensors, or padding. In the concatenation of
all ranks' tensors along the sharded dim, each of our tensors consists of a few `RankSlice`s:

    linear_qkv   by query group: its query heads, its key head, its value head; then the next group
    linear_fc1   by tensor-parallel rank: the rank's rows of gate, then its rows of up
    vocabulary   one slice; the rows after it are padding

Shapes: v vocabulary, h hidden, a query heads, g query groups, d head width, f MLP width, e experts, t tensor-parallel
size, n = (a + 2g)·d.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from megafp8.config.parts import PARTS
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.parallel.sharding import Shape
from megafp8.spec import LayerSpec, ModelSpec

# Megatron-LM's names by our names of modules or parameters. Each mixer and feed-forward part has its own names.
EMBEDDING = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "embedding.token_type": "embedding.tokentype_embeddings",
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm"}
HEAD = {"final_norm": "decoder.final_layernorm", "output": "output_layer"}
PRETRAINING_HEAD = {
    "transform": "lm_head.dense",
    "transform_norm": "lm_head.layer_norm",
    "pooler": "pooler.dense",
    "binary_head": "binary_head",
}
_OUTER = EMBEDDING | HEAD | PRETRAINING_HEAD
_LAYER = NORMS | {f"{part.tensor_prefix}.{ours}": name for part in PARTS for ours, name in part.megatron.items()}
OUTPUT = "output_layer.weight"
_VOCABULARY = ("embedding.word_embeddings.weight", OUTPUT, "output_layer.bias")
_SINK = "core_attention.softmax_offset"
_SHARDED_ROWS = (*_VOCABULARY, "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", _SINK)
_SHARDED_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")

_TRANSFORMER_ENGINE = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_GROUPED = re.compile(r"\.experts\.(linear_fc\d)\.weight(\d+)$")
_SEQUENTIAL = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$")
_LEGACY = (
    (r"^encoder\.", "decoder."),  # BertModel
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.(encoder|transformer)\.", "decoder."),
    (r"^(language_model\.output_layer|word_embeddings_for_head)\.", "output_layer."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.(post_attention_norm|post_attention_layernorm)\.", ".pre_mlp_layernorm."),
    (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
)


class MegatronPlace(NamedTuple):
    """Megatron-LM tensor that holds one of our tensors.

    Attributes:
        layer: Number of the model's layer, or None outside the layers.
        key: Key of the tensor within its layer, or its full key outside the layers. `*` stands for the number of the
            expert on its rank.
        expert: Number of the expert in the layer, or None.
    """

    layer: int | None
    key: str
    expert: int | None = None

    def named(self, layer: int, expert: int) -> str:
        """Return the full key on a rank on which the layer has the number `layer`, and the expert `expert`."""
        key = self.key.replace("*", str(expert))
        return key if self.layer is None else f"decoder.layers.{layer}.{key}"

    @property
    def dim(self) -> int | None:
        """Dim along which tensor-parallel ranks shard the tensor, or None if it is replicated."""
        if self.key.endswith(_SHARDED_ROWS):
            return 0
        return 1 if self.key.endswith(_SHARDED_COLUMNS) else None


class RankSlice(NamedTuple):
    """Range of `length` rows or columns: from `ours` on in our tensor, and from `theirs` on in the tensor of `rank`."""

    rank: int
    ours: int
    theirs: int
    length: int


def place(name: str) -> MegatronPlace:
    """Return the Megatron-LM tensor that holds our tensor `name`, such as model.layers.3.attention.q.weight."""
    module, _, kind = name.removeprefix("model.").rpartition(".")
    if module in _OUTER:
        return MegatronPlace(None, f"{_OUTER[module]}.{kind}")
    _, index, module = module.split(".", 2)
    expert = re.search(r"(?<=^mlp\.experts\.)\d+", module)
    module = module if expert is None else f"mlp.experts.*.{module.rpartition('.')[2]}"
    key = _LAYER.get(f"{module}.{kind}") or f"{_LAYER[module]}.{kind}"
    return MegatronPlace(int(index), key, None if expert is None else int(expert[0]))


def _layer(at: MegatronPlace, model: ModelSpec) -> LayerSpec:
    """Return the config of the layer to which a tensor belongs."""
    assert at.layer is not None
    return model.layers[at.layer]


def canonical(key: str) -> str:
    """Translate a key to its name in a GPTModel with Megatron core's own layers.

    The key may come from Transformer Engine's layers, a model from before Megatron core, or BertModel.
    """
    for core, fused in _TRANSFORMER_ENGINE:
        key = key.replace(fused, core)
    for pattern, core in _LEGACY:
        key = re.sub(pattern, core, key)
    return _GROUPED.sub(r".experts.local_experts.\2.\1.weight", key)


def with_transformer_engine(key: str, sparse: bool) -> str:
    """Translate a canonical key to its name in Transformer Engine's layers.

    `sparse` states whether the layer has experts; the norm before experts keeps its name.
    """
    for core, fused in _TRANSFORMER_ENGINE:
        if not (sparse and core == "pre_mlp_layernorm."):
            key = key.replace(core, fused)
    return _SEQUENTIAL.sub(r".experts.\2.weight\1", key)


def their_shape(name: str, shape: Shape, model: ModelSpec, t: int, padded_vocab: int) -> Shape:
    """Return the shape of a rank's tensor that holds our tensor `name` of `shape`, or a part of it.

    `t` is the number of tensor-parallel ranks, and `padded_vocab` the number of rows of the padded vocabulary.
    """
    at = place(name)
    if at.dim is None:
        return shape
    if at.key in _VOCABULARY:
        size = padded_vocab
    elif "linear_qkv" in at.key:
        mixer = _layer(at, model).mixer
        size = (mixer.num_attention_heads + 2 * mixer.groups) * mixer.channels
    elif "linear_fc1" in at.key:
        size = ACTIVATIONS[_layer(at, model).ffn.activation].up_width(shape[0])
    else:
        size = shape[at.dim]
    return tuple(size // t if dim == at.dim else n for dim, n in enumerate(shape))


def runs(name: str, shape: Shape, model: ModelSpec, t: int, padded_vocab: int) -> list[RankSlice]:
    """Return the slices of our tensor `name` of `shape` in the tensors of `t` ranks, along the sharded dim.

    A replicated tensor has one slice for each rank. Padding that only one side has is not part of any slice.
    """
    at = place(name)
    if at.dim is None:
        return [RankSlice(rank, 0, 0, shape[0]) for rank in range(t)]
    part = their_shape(name, shape, model, t, padded_vocab)[at.dim]
    runs = []
    for ours, theirs, length in _blocks(name, shape[at.dim], model, t, padded_vocab):
        while length:
            rank, start = divmod(theirs, part)
            rows_of_part = min(length, part - start)
            runs.append(RankSlice(rank, ours, start, rows_of_part))
            ours, theirs, length = ours + rows_of_part, theirs + rows_of_part, length - rows_of_part
    return runs


def _blocks(name: str, size: int, model: ModelSpec, t: int, padded_vocab: int) -> Iterator[tuple[int, int, int]]:
    """Yield `(ours, theirs, length)` of each slice of our tensor in the concatenation of all ranks' tensors."""
    at, part = place(name), name.split(".")[-2]
    if "linear_qkv" in at.key:
        mixer = _layer(at, model).mixer
        d, queries = mixer.channels, mixer.num_attention_heads // mixer.groups
        length = queries * d if part == "q" else d
        start = {"q": 0, "k": queries * d, "v": (queries + 1) * d}[part]
        for group in range(mixer.groups):
            yield group * length, group * (queries + 2) * d + start, length
    elif "linear_fc1" in at.key and ACTIVATIONS[_layer(at, model).ffn.activation].gated:
        length = size // t
        for rank in range(t):
            yield rank * length, (2 * rank + (part == "up")) * length, length
    elif at.key in _VOCABULARY:
        yield 0, 0, min(size, padded_vocab)
    else:
        yield 0, 0, size
