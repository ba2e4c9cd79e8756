"""Tensor names of Hugging Face families: for each of our tensors, the Hugging Face (HF) tensor and rows that hold it.

q, k and v may be parts of one HF tensor, one after the other or interleaved by head; gate and up may be, too. The
linear layers of GPT-2 store the transpose, `[k, n]` for our `[n, k]`. Most families store each expert in separate
tensors, as we do (transformers 5 only fuses them in memory). gpt-oss and GraniteMoE store all experts in one tensor.

Channels of a head: our rotary embedding, like Llama's, rotates the first half of a head against the second half. Some
HF models rotate adjacent channels (GLM) or only a part of a head (GPT-NeoX). Our q and k then have the rows of each
head in another order: first the first channel of each pair, then the second channel of each pair, with rotated pairs
before the others. Since q and k have the same order, attention scores do not depend on it. If pairs are rotated
backwards (nanochat), the second channel of each pair comes first. In latent attention, our models and most HF models
rotate adjacent channels.

A table of names has an entry for each of our modules or parameters. The parameters of a module have the same names in
HF. The names that most families use are stored with each kind of part (`config.parts`); the names for the rest of the
network are in this module. `in_layers` adds the prefix of a family's layers, and a family's file has the names that
differ.

Shapes: n is the number of rows of our tensor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megafp8.config import AttentionConfig, MlpConfig, MoeFfnConfig
from megafp8.conversion.safetensors_format import Entry
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.parallel.sharding import Shape
from megafp8.spec import LayerSpec, ModelSpec, PartRecord

logger = logging.getLogger(__name__)
_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=decoder\.)\d+|(?<=adapters\.)\d+")

Rows = Callable[[Any, int], tuple[Tensor, int]]
"""Function that returns the rows of the HF tensor that hold our tensor, `[n]`, and the HF tensor's number of rows.

Its arguments are the record of the layer's mixer (None outside layers), and n.
"""


class HfPlace(NamedTuple):
    """HF tensor in which one of our tensors is stored, for any layer and expert.

    Attributes:
        name: Name of the HF tensor, with `*` for the numbers of layer and expert.
        rows: Rows of the HF tensor that hold our tensor.
        transposed: Whether weights are stored as `[k, n]`.
        stacked: Whether the HF tensor holds the weights of all experts.
        shape: Shape of a vector that is stored with more dims, with -1 for its length; empty otherwise.
    """

    name: str
    rows: Rows = lambda mixer, n: (torch.arange(n), n)
    transposed: bool = False
    stacked: bool = False
    shape: Shape = ()


Entries = dict[str, Entry]
"""Stored tensors by name."""

Names = Mapping[str, str | HfPlace]
"""HF names by our names of modules and parameters. A str stands for a `HfPlace` that only has this name."""

EMBEDDING = {"embedding.word": "model.embed_tokens"}
NORMS = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "shared_norm": "input_layernorm",
}  # fmt: skip
OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
MULTI_TOKEN_PREDICTION = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
HEAD = {"final_norm": "model.norm", "output": "lm_head"}


def _place(place: str | HfPlace) -> HfPlace:
    return HfPlace(place) if isinstance(place, str) else place


def in_layers(theirs: str, *parts: Names, ours: str = "layers.*") -> dict[str, str | HfPlace]:
    """Return the names of the `parts` of a layer, with the prefix `ours` for our names and `theirs` for HF names."""
    places = {name: _place(place) for part in parts for name, place in part.items()}
    return {f"{ours}.{name}": place._replace(name=f"{theirs}.{place.name}") for name, place in places.items()}


def usual(*parts: type[PartRecord]) -> Names:
    """Return the names that most families use for the tensors of these parts."""
    return {f"{part.tensor_prefix}.{ours}": theirs for part in parts for ours, theirs in part.hugging_face.items()}


_PARTS = usual(AttentionConfig, MlpConfig, MoeFfnConfig)
LLAMA: Names = {**EMBEDDING, **HEAD, **in_layers("model.layers.*", NORMS, _PARTS)}
QKV = ("attention.q", "attention.k", "attention.v")


def fused(name: str, rows: Callable[[int], Rows], modules: tuple[str, ...], **options: Any) -> Names:
    """Return the names of several `modules` that HF stores in one tensor; `rows(i)` are the rows of module i."""
    return {module: HfPlace(name, rows(i), **options) for i, module in enumerate(modules)}


def equal_parts(parts: int) -> Callable[[int], Rows]:
    """Return a function from a part's number to its rows, if parts of equal size are stored one after the other."""
    return lambda part: lambda mixer, n: (torch.arange(parts * n).view(parts, n)[part], parts * n)


def alternating(parts: int) -> Callable[[int], Rows]:
    """Return a function from a part's number to its rows, if the rows of all parts alternate."""
    return lambda part: lambda mixer, n: (torch.arange(parts * n).view(n, parts)[:, part], parts * n)


def consecutive(part: int, sizes: Callable[[Any], Sequence[int]]) -> Rows:
    """Return the rows of a part, if parts of these sizes are stored one after the other."""

    def rows(mixer: Any, n: int) -> tuple[Tensor, int]:
        rows_of = [*sizes(mixer)]
        return torch.arange(sum(rows_of)).split(rows_of)[part], sum(rows_of)

    return rows


def qkv(part: int) -> Rows:
    """Return the rows of a part, if queries, keys and values of all heads are stored one after the other."""

    def sizes(mixer: AttentionConfig) -> list[int]:
        return [heads * mixer.channels for heads in (mixer.num_attention_heads, mixer.groups, mixer.groups)]

    return consecutive(part, sizes)


def alternating_blocks(part: int) -> Rows:
    """Return the rows of a part, if the heads of two tensors alternate."""
    return lambda mixer, n: (torch.arange(2 * n).view(-1, 2, mixer.channels)[:, part].flatten(), 2 * n)


def qkv_by_group(part: int) -> Rows:
    """Return the rows of a part, if queries, key and value of a group of heads are stored together, group by group."""

    def rows(mixer: AttentionConfig, n: int) -> tuple[Tensor, int]:
        sizes = [mixer.num_attention_heads // mixer.groups, 1, 1]
        stored = torch.arange(mixer.groups * sum(sizes) * mixer.channels).view(mixer.groups, sum(sizes), -1)
        return stored.split(sizes, dim=1)[part].flatten(), stored.numel()

    return rows


def rotated_last(width: Callable[[Any, int], int]) -> Rows:
    """Return the rows of latent attention's heads of this width if HF rotates their last channels half against half."""

    def rows(mixer: Any, n: int) -> tuple[Tensor, int]:
        channels = torch.arange(width(mixer, n))
        channels[-mixer.rope_head_dim :] = channels[-mixer.rope_head_dim :].view(2, -1).t().flatten()
        return torch.arange(n).view(-1, len(channels))[:, channels].flatten(), n

    return rows


def after(first: int) -> Rows:
    """Return all rows after the first `first` rows, which are not read."""
    return lambda mixer, n: (first + torch.arange(n), first + n)


def stacked_experts(
    prefix: str, parameter: str = "weight", suffix: str = "", *, transposed: bool = False, alternate: bool = False
) -> Names:
    """Return the names of a parameter of all experts that HF stores in `gate_up_proj` and `down_proj`.

    Rows of gate and up `alternate`, or all rows of gate come before the rows of up.
    """
    options: Any = {"transposed": transposed, "stacked": True}
    gate_up = alternating(2) if alternate else equal_parts(2)
    places = fused(f"{prefix}.gate_up_proj{suffix}", gate_up, ("gate", "up"), **options)
    places = {**places, "down": HfPlace(f"{prefix}.down_proj{suffix}", **options)}
    return {f"mlp.experts.*.{module}.{parameter}": place for module, place in places.items()}


FUSED_GATE_UP = fused("mlp.gate_up_proj", equal_parts(2), ("mlp.gate", "mlp.up"))


class Location(NamedTuple):
    """Location of one of our tensors in an HF tensor.

    Attributes:
        name: Name of the HF tensor.
        shape: Shape of the HF tensor.
        rows: For each row of our tensor, its row in the HF tensor; int64 `[n]`.
        transposed: Whether the HF tensor is stored as `[k, n]`.
        outer: Index of our tensor in an additional first dim of the HF tensor, or None if there is no such dim.
        flat: Whether our tensor is a vector that HF stores with more dims.
    """

    name: str
    shape: Shape
    rows: Tensor
    transposed: bool
    outer: int | None
    flat: bool = False


class TensorNames(NamedTuple):
    """Names of a family's tensors.

    Attributes:
        places: HF names by our names.
        ungated: HF names that differ in MLPs without a gate.
        rotation: Pairs of channels that rotary embeddings rotate: `halves` (half a head apart), `neighbors` (adjacent),
            or `backwards` (half a head apart, rotated backwards).
        copies: Tensors that a folder may have in addition, with the names of the tensors that they must equal.
        other_heads: Pattern of tensors of the pooler and binary head, which a folder may have although its model does
            not use them; empty if there are none.
        zeros: Pattern of tensors that a folder may lack, which are then zero; empty if there are none.
        constants: Numbers, by name, that a folder stores for each layer as tensors without dims, although no model of
            the family has other values. `*` stands for the number of the layer.
        stored: Function that renames the tensors of a folder to these names, if folders of the family differ.
    """

    places: Names
    ungated: Mapping[str, str | HfPlace] = {}
    rotation: Literal["halves", "neighbors", "backwards"] = "halves"
    copies: Mapping[str, str] = {}
    other_heads: str = ""
    zeros: str = ""
    constants: Mapping[str, float] = {}
    stored: Callable[[ModelSpec, Entries], Entries] = lambda model, entries: entries

    def locate(self, model: ModelSpec, name: str, shape: Shape) -> Location:
        """Return the location of our tensor `name` (`model.layers.3.attention.q.weight`), which has `shape`.

        `shape` excludes the padding of the vocabulary.
        """
        module, _, parameter = _of_stack(model, name.removeprefix("model.")).rpartition(".")
        numbers = _NUMBER.findall(module)
        layer = _layer(model, name)
        gated = layer is None or layer.ffn.kind != "mlp" or ACTIVATIONS[layer.ffn.activation].gated
        place = self._place(_NUMBER.sub("*", module), parameter, gated)
        outer = int(numbers.pop()) if place.stacked else None
        left = iter(numbers)
        theirs = re.sub(r"\*", lambda _: next(left), place.name)
        mixer = None if layer is None else layer.mixer
        rows, count = place.rows(mixer, shape[0])
        if re.search(r"\.attention\.(index_)?[qk](_norm)?$", module) and isinstance(mixer, AttentionConfig):
            rows = rows.unflatten(0, (-1, mixer.channels))[:, self._channels(mixer)].flatten()
        transposed, stored = place.transposed and parameter == "weight", (count, *shape[1:])
        stored = stored[::-1] if transposed else stored
        if place.shape:
            stored = tuple(count if size == -1 else size for size in place.shape)
        if place.stacked:
            assert layer is not None
            stored = (layer.ffn.num_experts, *stored)
        return Location(theirs, stored, rows, transposed, outer, flat=bool(place.shape))

    def _place(self, module: str, parameter: str, gated: bool = True) -> HfPlace:
        names = self.places if gated else {**self.places, **self.ungated}
        if (name_of_ours := names.get(f"{module}.{parameter}")) is not None:
            return _place(name_of_ours)
        place = _place(names[module])
        return place._replace(name=f"{place.name}.{parameter}")

    def _channels(self, record: AttentionConfig) -> Tensor:
        """Return the HF channel of each channel of one of our heads, `[d]`. Proportional RoPE has the same order."""
        channels = torch.arange(record.channels)
        rotated = record.channels if record.proportional_rope else record.rotary_channels
        pairs = channels[:rotated].view(-1, 2).t() if self.rotation == "neighbors" else channels[:rotated].view(2, -1)
        pairs = pairs.flip(0) if self.rotation == "backwards" else pairs
        return torch.cat([pairs, channels[rotated:].view(2, -1)], dim=1).flatten()

    @property
    def prefix(self) -> str:
        """Prefix of all weights except the output layer. Files that were saved without an output layer lack it."""
        return self._place("embedding.word", "weight").name.partition(".")[0] + "."

    @property
    def output(self) -> str:
        """Name of the output layer's weight. Files of a tied model may lack this weight."""
        return self._place("output", "weight").name

    def constants_of(self, model: ModelSpec) -> dict[str, float]:
        """Return the value of each constant that a folder of `model` stores, by name."""
        layers = range(model.num_layers)
        return {name.replace("*", str(i)): value for name, value in self.constants.items() for i in layers}


def like_llama(*parts: Names, **options: Any) -> TensorNames:
    """Return Llama's names, with other names for these parts of a layer. `options` are passed to `TensorNames`."""
    return TensorNames({**LLAMA, **in_layers("model.layers.*", *parts)}, **options)


def _layer(model: ModelSpec, name: str) -> LayerSpec | None:
    """Return the layer that has our tensor `name`, or None if the tensor is outside the layers."""
    number = re.search(r"(?<=^model\.layers\.)\d+", name)
    return None if number is None else model.layers[int(number[0])]


def _of_stack(model: ModelSpec, name: str) -> str:
    """Return the name of a tensor; in T5's decoder, layers are counted from the decoder's first layer."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is None or not model.layers[int(layer[1])].is_decoder:
        return name
    return f"decoder.{int(layer[1]) - model.num_layers}.{name[layer.end() :]}"


def without_prediction(model: ModelSpec, entries: Entries) -> Entries:
    """Return the tensors without `mtp`: layers of multi-token prediction that are built unlike the model's layers."""
    main = {name: entry for name, entry in entries.items() if not name.startswith("mtp.")}
    if len(main) < len(entries):
        logger.info("mtp: the layers of multi-token prediction are left out; transformers does not read them, either")
    return main


_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|attn\.causal_mask"
    r"|embeddings\.(position|token_type)_ids"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"  # in T5's first release; nothing reads it
)
"""Constants that older releases of `transformers` saved with the weights."""


def is_buffer(name: str) -> bool:
    """Return whether an HF tensor is a constant, not a weight."""
    return _BUFFERS.search(name) is not None


def present_name(name: str) -> str:
    """Return the present name of a tensor that has other names in some releases of transformers.

    BERT's first releases named the parameters of norms as TensorFlow does. Release 5.24 saves an MLP of Kimi Linear
    under the name for experts, unlike the published folder.
    """
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))
    return re.sub(r"(layers\.\d+)\.block_sparse_moe\.(gate|up|down)_proj\.", r"\1.mlp.\2_proj.", name)


def is_copy(name: str) -> bool:
    """Return whether an HF tensor is a copy of the embedding or the output layer for multi-token prediction."""
    return re.fullmatch(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", name) is not None


def is_of_shared_keys(model: ModelSpec, name: str) -> bool:
    """Return whether an HF tensor projects keys or values for a layer that reads the keys of another layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+", name)
    layers = model.layers[int(match[1]) :][:1] if match else ()  # empty if the folder has more layers than the config
    return any(getattr(layer.mixer, "kv_layer", None) is not None for layer in layers)
