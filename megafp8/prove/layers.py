"""Selection of a few layers of a deep model: every kind, and stages of different sizes if the model has them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from megafp8.config import Config
from megafp8.config.resolve import kind_name
from megafp8.planner.stages import stages_of

_NUMBER = re.compile(r"(?<=layers\.)\d+")


class Kept(NamedTuple):
    """Indices of the layers to keep, in order, and their number in each stage."""

    layers: list[int]
    per_stage: list[int]

    def number(self, layer: int) -> int:
        """Return the new index of a kept layer."""
        return self.layers.index(layer)


def patterns_of(config: Config) -> list[str]:
    """Return the patterns over names of layers and weights, which may contain layer indices."""
    f = config.fp8
    patterns = [*f.include, *f.exclude, *f.static_amax, *(rule.layers for rule in f.custom)]
    return [*patterns, *(pattern for group in config.optimizer.groups for pattern in group.match)]


def renumbered(pattern: str, kept: Kept) -> str:
    """Return a pattern with the new layer indices."""
    return _NUMBER.sub(lambda match: str(kept.number(int(match[0]))), pattern)


def keep_layers(config: Config, stages: int) -> Kept:
    """Return the layers to keep in `stages` stages.

    The stages are the first one, the last one and some in between; if stages of the config have different numbers of
    layers, two of the kept stages do, too. Each stage keeps the shortest run of its layers that contains all its kinds.
    A single stage keeps the shortest run in which each kind follows all kinds that it follows in the config.
    """
    model = config.spec
    _, ranges = stages_of(config)
    ranges[-1] = range(ranges[-1].start, model.num_blocks)
    named = {int(number) for pattern in patterns_of(config) for number in _NUMBER.findall(pattern)}
    sharing = {i for i in range(model.num_blocks) if model.layers[i].mixer.shares_weights}
    kinds = [
        (kind, i in sharing and i > kind, i if i in named else None, _keeps_high_precision(config, i))
        for i, kind in enumerate(model.kinds[: model.num_blocks])
    ]
    sizes = sorted({len(layers) for layers in ranges})
    chosen = _spread(ranges, stages)
    kept = []
    for layers in chosen:
        least = 1 + sizes.index(len(layers)) if stages > 1 else 2
        window = _window([kinds[i] for i in layers], least, pairs=stages == 1)
        kept.append({layers.start + i for i in window})
    have = {kinds[i] for layers in kept for i in layers}
    last = model.num_layers - 1
    for i, kind in enumerate(kinds):
        if kind not in have or (i == last and model.num_prediction_layers and kind != kinds[max(kept[-1])]):
            stage = max(s for s, layers in enumerate(chosen) if layers.start <= i)
            kept[stage].add(i)
            have.add(kind)
    for numbers in kept:  # add layers that provide tensors for others
        numbers |= {model.sources[i] for i in numbers if i in model.sources}
    return Kept(sorted(set[int]().union(*kept)), [len(numbers) for numbers in kept])


def _keeps_high_precision(config: Config, layer: int) -> bool:
    """Return whether a layer is one of the first or last layers that stay in high precision."""
    f = config.fp8
    return layer < f.first_blocks_bf16 or layer >= config.spec.num_blocks - f.last_blocks_bf16


def _spread(ranges: Sequence[range], stages: int) -> list[range]:
    """Return `stages` of the stages, from the first to the last, with different lengths if there are any."""
    if stages == 1:
        return [range(ranges[0].start, ranges[-1].stop)]
    chosen = [round(i * (len(ranges) - 1) / (stages - 1)) for i in range(stages)]
    lengths = {len(ranges[i]) for i in chosen}
    if len(lengths) == 1:
        other = next((i for i, layers in enumerate(ranges) if len(layers) not in lengths), None)
        if other is not None:
            place = min(range(stages), key=lambda s: (s in (0, stages - 1), abs(chosen[s] - other)))
            chosen[place] = other
    return [ranges[i] for i in sorted(chosen)]


def _window(kinds: Sequence[Hashable], least: int, pairs: bool) -> range:
    """Return the first shortest run of at least `least` elements that has all kinds, and with `pairs` all pairs."""

    def content(part: Sequence[Hashable]) -> set[Hashable]:
        return {*part, *pairwise(part)} if pairs else {*part}

    wanted = content(kinds)
    runs = (range(i, i + n) for n in range(min(least, len(kinds)), len(kinds) + 1) for i in range(len(kinds) - n + 1))
    return next(run for run in runs if content(kinds[run.start : run.stop]) == wanted)


def layer_keys(config: Config, kept: Kept) -> Iterator[tuple[str, Any]]:
    """Yield the dotted config keys that describe the kinds and the placement of the kept layers."""
    model, p = config.model, config.parallel
    layers, blocks = kept.layers, len(kept.layers)
    decoder = sum(config.spec.layers[i].is_decoder for i in layers)
    yield "model.num_layers", blocks - decoder
    if decoder and (model.num_decoder_layers is not None or 2 * decoder != blocks):
        yield "model.num_decoder_layers", decoder
    if model.pattern:
        names = [kind_name(model, i) for i in layers]  # only one of several equal kinds may be kept
        yield "model.pattern", names
        kinds = model.model_dump(mode="json")["layer_kinds"]
        yield "model.layer_kinds", {name: kind for name, kind in kinds.items() if name in names}
    if model.full_attention_layers:
        yield "model.full_attention_layers", [kept.number(i) for i in layers if i in model.full_attention_layers]
    if model.moe is not None and (model.moe.first_dense_layers or model.moe.layer_interval > 1):
        sparse = [model.moe.is_sparse(i) for i in layers]
        first, interval = next(
            (first, interval)
            for interval in range(1, blocks + 1)
            for first in range(blocks + 1)
            if [i >= first and (i + 1) % interval == 0 for i in range(blocks)] == sparse
        )
        yield "model.moe.first_dense_layers", first
        yield "model.moe.layer_interval", interval
    if len(kept.per_stage) > 1:
        yield "parallel.layers_per_stage", kept.per_stage
    largest = max(kept.per_stage)
    if p.recompute_blocks is not None:
        yield "parallel.recompute_blocks", min(p.recompute_blocks, max(1, largest - 1))
    if type(p.offload) is int:
        yield "parallel.offload", min(p.offload, max(1, largest - 1))
    yield "fp8.first_blocks_bf16", sum(i < config.fp8.first_blocks_bf16 for i in layers)
    yield "fp8.last_blocks_bf16", sum(i >= config.spec.num_blocks - config.fp8.last_blocks_bf16 for i in layers)
