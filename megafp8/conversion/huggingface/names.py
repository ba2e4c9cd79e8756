"""Hugging Face's names: in which tensor of theirs each of ours lies, and in which of its rows.

q, k and v may be parts of one tensor, side by side or by head, and gate and up, too. The linear layers of GPT-2 store
the transpose, `[k, n]` for our `[n, k]`. Experts mostly have tensors of their own, as in ours (transformers 5 fuses
them in memory only); gpt-oss and GraniteMoE store those of all experts in one.

Channels of a head: ours rotates the first half of a head against the second, and so does Llama. Where they rotate
neighbouring channels (GLM), or a part of a head (GPT-NeoX), our q and k have the rows of each head in another order:
first the first channel of each pair, then the second ones, pairs that are rotated before those that are not. As both
have the same order, scores do not depend on it. Where pairs are rotated backwards (nanochat), the second channel of
each pair comes first. In latent attention both rotate neighbouring channels.

A table of names has one entry for a module of ours, whose parameters have the same names in theirs, or for a parameter.
The names that most families use are with each kind of part (`config.parts`), and here those of the rest of the network;
`in_layers` puts them into a family's layers, and a family's file has the names that differ.

Shapes: n rows of a tensor of ours.
"""

from __future__ import annotations

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

_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=decoder\.)\d+")

Rows = Callable[[Any, int], tuple[Tensor, int]]
"""Function of the record of the layer's mixer, None outside of layers, and n: the rows `[n]` of their tensor, and their
number."""


class HfPlace(NamedTuple):
    """A tensor of theirs, with the numbers of layer and expert left open, and which `rows` of it are ours.

    `transposed`: weights are stored as `[k, n]`. `stacked`: it holds those of all experts. `shape`: that of a vector
    that is stored with more dims, in which -1 stands for its length.
    """

    name: str
    rows: Rows = lambda mixer, n: (torch.arange(n), n)
    transposed: bool = False
    stacked: bool = False
    shape: Shape = ()


Entries = dict[str, Entry]
"""Stored tensors by name."""

Names = Mapping[str, str | HfPlace]
"""Foreign names by the names of modules and parameters here; a str stands for a `HfPlace` with that name alone."""

EMBEDDING = {"embedding.word": "model.embed_tokens"}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
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
    """The names of the `parts` of a layer, of which `theirs` and `ours` are the prefixes."""
    places = {name: _place(place) for part in parts for name, place in part.items()}
    return {f"{ours}.{name}": place._replace(name=f"{theirs}.{place.name}") for name, place in places.items()}


def usual(*parts: type[PartRecord]) -> Names:
    """The names that most families use for the tensors of these parts."""
    return {f"{part.tensor_prefix}.{ours}": theirs for part in parts for ours, theirs in part.hugging_face.items()}


_PARTS = usual(AttentionConfig, MlpConfig, MoeFfnConfig)
LLAMA: Names = {**EMBEDDING, **HEAD, **in_layers("model.layers.*", NORMS, _PARTS)}
QKV = ("attention.q", "attention.k", "attention.v")


def fused(name: str, rows: Callable[[int], Rows], modules: tuple[str, ...], **options: Any) -> Names:
    """One tensor of theirs for several `modules` of ours: `rows` of each, by its number."""
    return {module: HfPlace(name, rows(i), **options) for i, module in enumerate(modules)}


def equal_parts(parts: int) -> Callable[[int], Rows]:
    """Rows of tensors of equal size, one below the other."""
    return lambda part: lambda mixer, n: (torch.arange(parts * n).view(parts, n)[part], parts * n)


def alternating(parts: int) -> Callable[[int], Rows]:
    """Rows of all parts alternate."""
    return lambda part: lambda mixer, n: (torch.arange(parts * n).view(n, parts)[:, part], parts * n)


def consecutive(part: int, sizes: Callable[[Any], Sequence[int]]) -> Rows:
    """Rows of tensors of these sizes, one below the other."""

    def rows(mixer: Any, n: int) -> tuple[Tensor, int]:
        rows_of = [*sizes(mixer)]
        return torch.arange(sum(rows_of)).split(rows_of)[part], sum(rows_of)

    return rows


def qkv(part: int) -> Rows:
    """Rows of queries, keys and values of all heads, one below the other."""

    def sizes(mixer: AttentionConfig) -> list[int]:
        return [heads * mixer.channels for heads in (mixer.num_attention_heads, mixer.groups, mixer.groups)]

    return consecutive(part, sizes)


def alternating_blocks(part: int) -> Rows:
    """Rows of a head of one tensor, then those of a head of the other."""
    return lambda mixer, n: (torch.arange(2 * n).view(-1, 2, mixer.channels)[:, part].flatten(), 2 * n)


def qkv_by_head(part: int) -> Rows:
    """Rows of query, key and value of a head, then those of the next head."""
    return lambda mixer, n: (torch.arange(3 * n).view(-1, 3, mixer.channels)[:, part].flatten(), 3 * n)


def after(first: int) -> Rows:
    """Rows after `first` ones that are not read."""
    return lambda mixer, n: (first + torch.arange(n), first + n)


FUSED_GATE_UP = fused("mlp.gate_up_proj", equal_parts(2), ("mlp.gate", "mlp.up"))


class Location(NamedTuple):
    """Where a tensor of ours lies: in the tensor of theirs that is called `name`, of `shape`.

    `rows`: int64 `[n]`, which of their rows each of ours is. `transposed`: theirs is stored as `[k, n]`. `outer`:
    theirs has a first dim more, in which ours is there. `flat`: a vector, of which theirs has more dims.
    """

    name: str
    shape: Shape
    rows: Tensor
    transposed: bool
    outer: int | None
    flat: bool = False


class TensorNames(NamedTuple):
    """The names of a family's tensors.

    `ungated`: those of MLPs without a gate that differ. `rotation`: pairs of channels that rotary embeddings rotate:
    those half a head apart, neighbours, or those half a head apart backwards. `copies`: tensors that may be there too,
    and must equal another. `other_heads`: pattern of tensors that a model may have for the pooler and binary head,
    without using them. `stored`: the tensors of a folder under these names, where folders differ in that.
    """

    places: Names
    ungated: Mapping[str, str | HfPlace] = {}
    rotation: Literal["halves", "neighbors", "backwards"] = "halves"
    copies: Mapping[str, str] = {}
    other_heads: str | None = None
    stored: Callable[[ModelSpec, Entries], Entries] = lambda model, entries: entries

    def locate(self, model: ModelSpec, name: str, shape: Shape) -> Location:
        """Where the tensor `name` (`model.layers.3.attention.q.weight`) of `shape` lies, without padding of the
        vocabulary."""
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
        if re.search(r"\.attention\.[qk](_norm)?$", module) and isinstance(mixer, AttentionConfig):
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
        """Which channel of a head of theirs each of ours is, `[d]`. Proportional rotary embedding has our order."""
        channels = torch.arange(record.channels)
        rotated = record.channels if record.proportional_rope else record.rotary_channels
        pairs = channels[:rotated].view(-1, 2).t() if self.rotation == "neighbors" else channels[:rotated].view(2, -1)
        pairs = pairs.flip(0) if self.rotation == "backwards" else pairs
        return torch.cat([pairs, channels[rotated:].view(2, -1)], dim=1).flatten()

    @property
    def prefix(self) -> str:
        """Prefix of all weights but the output layer's; files saved without an output layer lack it."""
        return self._place("embedding.word", "weight").name.partition(".")[0] + "."

    @property
    def output(self) -> str:
        """Name of the output layer's weight, which files of a tied model may lack."""
        return self._place("output", "weight").name

    def is_of_head(self, name: str) -> bool:
        """Whether a tensor of theirs belongs to the output layer and what is beside it."""
        return name.partition(".")[0] == self.output.partition(".")[0]

    def is_of_other_head(self, name: str) -> bool:
        """Whether a tensor of theirs belongs to a head that a model may have without using it."""
        return self.other_heads is not None and re.fullmatch(self.other_heads, name) is not None


def like_llama(*parts: Names, **options: Any) -> TensorNames:
    """Llama's names, but for those of these parts of a layer; `options`: those of `TensorNames`."""
    return TensorNames({**LLAMA, **in_layers("model.layers.*", *parts)}, **options)


def _layer(model: ModelSpec, name: str) -> LayerSpec | None:
    """Return the layer that has the tensor `name`, or None outside of layers."""
    number = re.search(r"(?<=^model\.layers\.)\d+", name)
    return None if number is None else model.layers[int(number[0])]


def _of_stack(model: ModelSpec, name: str) -> str:
    """Return the name of a tensor, of T5's decoder with the layer counted from the decoder's first."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is None or not model.layers[int(layer[1])].is_decoder:
        return name
    return f"decoder.{int(layer[1]) - model.num_layers}.{name[layer.end() :]}"


_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|embeddings\.(position|token_type)_ids"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"  # of T5's first release, which nothing reads
)
"""Constants that older releases of `transformers` saved with the weights."""


def is_buffer(name: str) -> bool:
    """Whether a tensor of theirs is no weight."""
    return _BUFFERS.search(name) is not None


def present_name(name: str) -> str:
    """The name of a tensor where releases of transformers differ.

    BERT's first releases named parameters of norms as TensorFlow does; 5.24 saves an MLP of Kimi Linear as if it had
    experts, other than the published folder.
    """
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))
    return re.sub(r"(layers\.\d+)\.block_sparse_moe\.(gate|up|down)_proj\.", r"\1.mlp.\2_proj.", name)


def is_copy(name: str) -> bool:
    """Whether a tensor of theirs repeats the embedding or the output layer, for multi-token prediction."""
    return re.fullmatch(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", name) is not None


def is_of_shared_keys(model: ModelSpec, name: str) -> bool:
    """Return whether a tensor of theirs projects keys or values for a layer that reads the keys of another layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+", name)
    layers = (
        [] if match is None else model.layers[int(match[1]) :][:1]
    )  # none where the folder has more than the config
    return any(getattr(layer.mixer, "kv_layer", None) is not None for layer in layers)
