"""Sources with LoRA: as the whole model, or with the adapters apart.

    MergedSource       W + scale · B A in place of W, A and B: a model like any other, for every format
    AdaptedSource      the weights W, and beside them A and B, with which a run continues
    AdaptersAlone      A and B, for adapter folders

The product is made in fp32, of the masters where they are saved, and the sum is rounded to W's dtype. Optimizer state,
which is that of A and B, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megafp8.conversion.base import CheckpointSource, MasterWeights, is_weight
from megafp8.conversion.native import NativeSource
from megafp8.parallel.tensor.lora import A, B, Lora, is_lora


class AdaptedSource(CheckpointSource, Protocol):
    """A source whose tensors are weights, and of some projections A and B: `model.layers.0.attention.q.lora_a`.

    `scales`: by projection (`model.layers.0.attention.q`), what its product B A is multiplied by. `base`: the folder
    that the weights come from, where that is known.
    """

    scales: Mapping[str, float]
    base: str | None


class MergedSource(CheckpointSource):
    """The model of an `AdaptedSource`, with the products added to the weights."""

    def __init__(self, adapted: AdaptedSource) -> None:
        self.adapted = adapted
        self.path, self.model, self.tokenizer_files = adapted.path, adapted.model, adapted.tokenizer_files
        self.about: Mapping[str, Any] = adapted.about
        if "config" in self.about:
            self.about = {**self.about, "config": {**self.about["config"], "lora": None}}
        self.tensors = {name: info for name, info in adapted.tensors.items() if not is_lora(name)}

    def read(self, name: str) -> Tensor:
        return self._merged(name, self.adapted.read(name), slice(None))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self._merged(name, self.adapted.read_rows(name, first, last), slice(first, last))

    def _merged(self, name: str, weight: Tensor, rows: slice) -> Tensor:
        """`weight`, which are `rows` of the tensor `name`, with its part of the product."""
        stem = name.removesuffix(".weight")
        if stem not in self.adapted.scales or stem == name:
            return weight
        a, b = self.adapted.read(f"{stem}.{A}").float(), self.adapted.read(f"{stem}.{B}")[rows].float()
        return (weight.float() + self.adapted.scales[stem] * (b @ a)).to(weight.dtype)


class AdaptedNative(MasterWeights, AdaptedSource):
    """The weights in the checkpoint of a run with LoRA, A and B as precise as they are saved."""

    def __init__(self, source: NativeSource) -> None:
        super().__init__(source, is_lora)
        self.tensors = {name: info for name, info in self.tensors.items() if is_weight(name)}
        config = source.about["config"]
        scale = config["lora"]["alpha"] / config["lora"]["rank"]
        self.scales = {name.removesuffix(f".{A}"): scale for name in self.tensors if name.endswith(f".{A}")}
        self.base = config.get("checkpoint", {}).get("init_from")


class AdaptersAlone(CheckpointSource):
    """The tensors A and B of an `AdaptedSource`; `about` has their `Lora` as "adapters", and "base".

    Raises ValueError where projections differ in rank or scale.
    """

    def __init__(self, adapted: AdaptedSource) -> None:
        self._adapted = adapted
        self.path, self.model, self.tokenizer_files = adapted.path, adapted.model, adapted.tokenizer_files
        self.tensors = {name: info for name, info in adapted.tensors.items() if is_lora(name)}
        self.about = {**adapted.about, "adapters": lora_of(adapted), "base": adapted.base}

    def read(self, name: str) -> Tensor:
        return self._adapted.read(name)


def open_native(path: str | Path) -> CheckpointSource:
    """A native checkpoint; one of a run with LoRA as the whole model."""
    source = NativeSource(path)
    lora = source.about["config"].get("lora")
    return source if lora is None else MergedSource(AdaptedNative(source))


def adapted_of(source: CheckpointSource) -> AdaptedSource | None:
    """The weights and adapters that `source` merges, if it does."""
    return source.adapted if isinstance(source, MergedSource) else None


def adapters_alone(source: CheckpointSource) -> AdaptersAlone:
    """The adapters that `source` merges. Raises ValueError where it has none."""
    adapted = adapted_of(source)
    if adapted is None:
        raise ValueError(f"{source.path} has no adapters; only a checkpoint of a run with the section lora has")
    return AdaptersAlone(adapted)


def lora_of(adapted: AdaptedSource) -> Lora:
    """Rank, alpha and targets of all adapters. Raises ValueError where projections differ in rank or scale."""
    sizes = {(adapted.tensors[f"{stem}.{A}"].shape[0], scale): stem for stem, scale in adapted.scales.items()}
    if len(sizes) > 1:
        (one, x), (other, y) = list(sizes.items())[:2]
        raise ValueError(
            f"{adapted.path}: adapters differ, {x} has rank {one[0]} and scale {one[1]:g}, {y} has rank {other[0]} and "
            f"scale {other[1]:g}; such can be merged only"
        )
    ((rank, scale),) = sizes
    return Lora(rank, scale * rank, frozenset(stem.rpartition(".")[2] for stem in adapted.scales))
