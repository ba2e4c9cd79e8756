"""Scales for an FP8 cache with one scale for the keys of a layer and one for its values.

Engines such as vLLM and SGLang store k / k_scale and v / v_scale in E4M3, and read the two scales from a model's
folder. megafp8's cache (`paged_cache`) does not need them: it has a scale for each head of each token. The scales are
measured for exported folders. A model reads texts, and the scale of the keys is the largest magnitude of a layer's
keys, as a cache stores them (after norms and rotary embedding), divided by 448. Values have their scale likewise.

    {"kv_cache_scales": {"0": {"k_scale": 0.0213, "v_scale": 0.0047}, "1": ...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import parse_object, read_file, to_json
from megafp8.numerics.formats import E4M3
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.parallel_state import ParallelState
from megafp8.spec import ModelSpec

KEY = "kv_cache_scales"


class Scales(NamedTuple):
    """Scales of a layer, which multiply its E4M3 keys and values when they are read."""

    keys: float
    values: float


class KeyValueAmax:
    """Recorder of the largest magnitudes of keys and values in the layers of this rank (`Scorer`'s `on_keys`).

    Raises ValueError for a model with another kind of attention, such as latent attention, for which engines cache
    other tensors.
    """

    def __init__(self, model: ModelSpec) -> None:
        mixers = [spec.mixer for spec in model.distinct_layers]
        kinds = {mixer.kind for mixer in mixers if mixer.present and not mixer.is_recurrent}
        if kinds != {"attention"}:
            other = next(iter(sorted(kinds - {"attention"})), "no attention")
            raise ValueError(f"{KEY}: the model has {other}; only layers of kind attention have these scales")
        self._amax: dict[int, Tensor] = {}

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Record the magnitudes of a layer's keys and values."""
        newest = torch.stack([x.detach().abs().amax().float() for x in (k, v)])
        self._amax[layer] = newest if layer not in self._amax else torch.maximum(self._amax[layer], newest)

    def scales(self, parallel: ParallelState) -> dict[int, Scales]:
        """Return the scales of all layers of the model. Collective.

        Raises ValueError if the model has read no text, or if a magnitude is zero or not finite.
        """
        largest: dict[int, list[float]] = {}
        amaxes = {layer: amax.tolist() for layer, amax in self._amax.items()}
        for rank_amaxes in all_gather_objects(amaxes, parallel.world.group):
            for layer, amax in rank_amaxes.items():
                largest[layer] = [max(pair) for pair in zip(amax, largest.get(layer, amax))]
        for layer, amax in sorted(largest.items()):
            if not all(0 < x < math.inf for x in amax):
                raise ValueError(f"{KEY}: the largest key and value of layer {layer} are {amax}")
        if not largest:
            raise ValueError(f"{KEY}: the model has read no text; give --input or --data")
        return {layer: Scales(*(x / E4M3.max for x in amax)) for layer, amax in sorted(largest.items())}


def write_scales(file: Path, scales: Mapping[int, Scales]) -> None:
    """Write the scales of layers to a JSON file in the format of this module."""
    layers = {str(layer): {"k_scale": x.keys, "v_scale": x.values} for layer, x in scales.items()}
    file.write_bytes(to_json({KEY: layers}))


def read_scales(file: Path) -> dict[int, Scales]:
    """Read the scales in a file of `write_scales`. Raises ValueError, which names the file and the layer."""
    layers = parse_object(file, read_file(file)).get(KEY)
    if not isinstance(layers, dict) or not all(layer.isdecimal() for layer in layers):
        raise ValueError(f"{file} has no {KEY} by layer: create it with megafp8 evaluate --kv-cache-scales {file}")
    scales = {}
    for layer, scale in layers.items():
        keys, values = (scale.get(name) if isinstance(scale, dict) else None for name in ("k_scale", "v_scale"))
        if not (
            isinstance(keys, float) and isinstance(values, float) and 0 < keys < math.inf and 0 < values < math.inf
        ):
            raise ValueError(f"{file}: layer {layer} has {json.dumps(scale)}; k_scale and v_scale must be above 0")
        scales[int(layer)] = Scales(keys, values)
    return scales
