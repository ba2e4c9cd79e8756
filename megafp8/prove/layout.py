"""Small layout that keeps every axis of a large layout on few ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from megafp8.config import Config

MOST_RANKS = 16
"""Maximum number of ranks of the small layout. Four axes of two ranks each fit: tensor, context, pipeline and data."""


@dataclass(frozen=True)
class ProvedLayout:
    """Sizes of the parallel axes. Expert ranks and FSDP replicas are divisions of the other axes' ranks."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    replicas: int

    @classmethod
    def from_config(cls, config: Config, ranks: int) -> ProvedLayout:
        """Return the layout of `config` on `ranks` ranks."""
        p = config.parallel
        data = ranks // (p.tensor * p.context * p.pipeline)
        return cls(p.tensor, p.context, p.pipeline, data, p.expert, p.expert_tensor, p.fsdp_replicas)

    @property
    def ranks(self) -> int:
        """Number of ranks of the layout."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_copies(self) -> float:
        """Number of ranks that hold the same experts."""
        return self.tensor * self.context * self.data / (self.expert * self.expert_tensor)

    @property
    def shards(self) -> float:
        """Number of shards of the weights under FSDP."""
        return self.context * self.data / self.replicas

    @property
    def shards_of_experts(self) -> float:
        """Number of shards of the experts' weights under FSDP."""
        return self.expert_copies / self.replicas

    def is_possible(self) -> bool:
        """Return whether experts and replicas divide the ranks evenly."""
        return all(x.is_integer() for x in (self.expert_copies, self.shards, self.shards_of_experts))

    def kept(self, original: ProvedLayout) -> int:
        """Return the number of sizes that are above 1 both in `original` and here."""
        names = [*self.__dataclass_fields__, "expert_copies", "shards", "shards_of_experts"]
        return sum(getattr(self, name) > 1 for name in names if getattr(original, name) > 1)

    @property
    def has_middle_stage(self) -> bool:
        """Whether the pipeline has a stage that is neither first nor last."""
        return self.pipeline > 2


def fold(original: ProvedLayout, most_ranks: int = MOST_RANKS, *, keeps_pipeline: bool = False) -> ProvedLayout:
    """Return the layout of at most `most_ranks` ranks that preserves most of `original`.

    Each axis has its original size, 2, or 4 (3 for pipelines of 3), or 8 if nothing smaller is possible. Layouts are
    compared, in this order, by the number of axes, copies of experts and shards that stay above 1, by whether the
    pipeline has a stage that is neither first nor last, and by a small number of ranks. If not all axes fit, some have
    one rank. With `keeps_pipeline`, the pipeline keeps its length, even on more ranks.
    """

    def sizes(size: int, longest: tuple[int, ...]) -> list[int]:
        shorts = (1, 2, 3, 4) if size in (1, 3) else (2, 4, *longest)
        return sorted({min(size, short) for short in (*least, *shorts)})

    def possible(*longest: int) -> list[ProvedLayout]:
        options = {name: sizes(getattr(original, name), longest) for name in names}
        options |= {name: options[name][:1] for name in ("expert_tensor", "replicas")}
        if keeps_pipeline:
            options["pipeline"] = [original.pipeline]
        layouts = (ProvedLayout(*chosen) for chosen in product(*options.values()))
        return [layout for layout in layouts if layout.ranks <= most_ranks and layout.is_possible()]

    least = () if most_ranks >= MOST_RANKS else (1,)
    names = ("tensor", "context", "pipeline", "data", "expert", "expert_tensor", "replicas")
    if keeps_pipeline:
        most_ranks = max(most_ranks, original.pipeline)
    layouts = possible() or possible(8)
    if not layouts:  # experts or replicas do not divide any small layout
        return fold(replace(original, expert=1, expert_tensor=1, replicas=1), most_ranks, keeps_pipeline=keeps_pipeline)
    return max(layouts, key=lambda x: (x.kept(original), x.has_middle_stage, -x.ranks, -x.expert, x.pipeline))
