"""Sources of models with LoRA, with the adapters merged or separate.

    MergedSource       W + scale · B A replaces W, A and B: an ordinary model, for every format
    AdaptedSource      the weights W, and A and B separately; a run can continue with them
    AdaptersAlone      A and B only, for adapter folders

The product is computed in fp32, from the masters if they are saved, and the sum is rounded to W's dtype. Optimizer
state is left out, because it only belongs to A and B.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megafp8.conversion.base import CheckpointSource, MasterWeights, RenamedSource, is_weight
from megafp8.conversion.native import NativeSource
from megafp8.parallel.tensor.lora import A, B, Lora, is_lora


class AdaptedSource(CheckpointSource, Protocol):
    """Source with weights, and with A and B of some projections, such as `model.layers.0.attention.q.lora_a`.

    Attributes:
        scales: Factor of the product B A, by projection (`model.layers.0.attention.q`).
        base: Folder from which the weights come, or None if it is unknown.
    """

    scales: Mapping[str, float]
    base: str | None


class MergedSource(RenamedSource):
    """Model of an `AdaptedSource`, with the products of the adapters added to the weights."""

    def __init__(self, adapted: AdaptedSource) -> None:
        super().__init__(adapted, {name: name for name in adapted.tensors if not is_lora(name)})
        self.adapted = adapted
        if "config" in self.about:
            self.about = {**self.about, "config": {**self.about["config"], "lora": None}}

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`; a weight with adapters includes their product."""
        return self._merged(name, super().read(name), slice(None))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of `read(name)`."""
        return self._merged(name, super().read_rows(name, first, last), slice(first, last))

    def _merged(self, name: str, weight: Tensor, rows: slice) -> Tensor:
        """Add the adapters' product to `weight`, which holds `rows` of the tensor `name`."""
        stem = name.removesuffix(".weight")
        if stem not in self.adapted.scales or stem == name:
            return weight
        a, b = self.adapted.read(f"{stem}.{A}").float(), self.adapted.read(f"{stem}.{B}")[rows].float()
        return (weight.float() + self.adapted.scales[stem] * (b @ a)).to(weight.dtype)


class AdaptedNative(MasterWeights, AdaptedSource):
    """Weights in the checkpoint of a run with LoRA. A and B are read from the masters if these are saved."""

    def __init__(self, source: NativeSource) -> None:
        super().__init__(source, is_lora)
        self.tensors = {name: info for name, info in self.tensors.items() if is_weight(name)}
        config = source.about["config"]
        scale = config["lora"]["alpha"] / config["lora"]["rank"]
        self.scales = {name.removesuffix(f".{A}"): scale for name in self.tensors if name.endswith(f".{A}")}
        self.base = config.get("checkpoint", {}).get("init_from")


class AdaptersAlone(RenamedSource):
    """Tensors A and B of the adapters that `source` merges; `about` has their `Lora` under "adapters", and "base".

    Raises ValueError if `source` has no adapters, or if projections differ in rank or scale.
    """

    def __init__(self, source: CheckpointSource) -> None:
        adapted = adapted_of(source)
        if adapted is None:
            raise ValueError(f"{source.path} has no adapters; only checkpoints of runs with the section lora have them")
        super().__init__(adapted, {name: name for name in adapted.tensors if is_lora(name)})
        self.about = {**adapted.about, "adapters": lora_of(adapted), "base": adapted.base}


def open_native(path: str | Path) -> CheckpointSource:
    """Open a native checkpoint. If its run used LoRA, the adapters are merged."""
    source = NativeSource(path)
    lora = source.about["config"].get("lora")
    return source if lora is None else MergedSource(AdaptedNative(source))


def adapted_of(source: CheckpointSource) -> AdaptedSource | None:
    """Return the weights and adapters that `source` merges, or None if it merges none."""
    return source.adapted if isinstance(source, MergedSource) else None


def lora_of(adapted: AdaptedSource) -> Lora:
    """Return rank, alpha and targets of all adapters. Raises ValueError if projections differ in rank or scale."""
    sizes = {(adapted.tensors[f"{stem}.{A}"].shape[0], scale): stem for stem, scale in adapted.scales.items()}
    if len(sizes) > 1:
        (one, x), (other, y) = list(sizes.items())[:2]
        raise ValueError(
            f"{adapted.path}: adapters differ, {x} has rank {one[0]} and scale {one[1]:g}, {y} has rank {other[0]} and "
            f"scale {other[1]:g}; such adapters can only be merged"
        )
    ((rank, scale),) = sizes
    return Lora(rank, scale * rank, frozenset(stem.rpartition(".")[2] for stem in adapted.scales))
