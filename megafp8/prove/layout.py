"""A layout with every axis of a large one on few ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from megafp8.config import Config

MOST_RANKS = 16
"""Ranks of the folded layout. Four axes of two ranks each fit: tensor, context, pipeline and data parallelism."""


@dataclass(frozen=True)
class ProvedLayout:
    """Sizes of the axes. Experts and replicas of FSDP's shards are ranks of the others."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    replicas: int

    @classmethod
    def from_config(cls, config: Config, ranks: int) -> ProvedLayout:
        p = config.parallel
        data = ranks // (p.tensor * p.context * p.pipeline)
        return cls(p.tensor, p.context, p.pipeline, data, p.expert, p.expert_tensor, p.fsdp_replicas)

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_copies(self) -> float:
        """Ranks that hold the same experts."""
        return self.tensor * self.context * self.data / (self.expert * self.expert_tensor)

    @property
    def shards(self) -> float:
        """Shards of weights, if there is FSDP."""
        return self.context * self.data / self.replicas

    @property
    def shards_of_experts(self) -> float:
        return self.expert_copies / self.replicas

    def is_possible(self) -> bool:
        return all(x.is_integer() for x in (self.expert_copies, self.shards, self.shards_of_experts))

    def kept(self, original: ProvedLayout) -> int:
        """How many of the numbers of ranks that are above 1 in `original` are above 1 here."""
        names = [*self.__dataclass_fields__, "expert_copies", "shards", "shards_of_experts"]
        return sum(getattr(self, name) > 1 for name in names if getattr(original, name) > 1)

    @property
    def has_middle_stage(self) -> bool:
        return self.pipeline > 2


def fold(original: ProvedLayout, most_ranks: int = MOST_RANKS, *, keeps_pipeline: bool = False) -> ProvedLayout:
    """The layout of at most `most_ranks` ranks that keeps most of `original`.

    Each axis is as long as there, 2, or 4 (3 for pipelines of 3), or 8 where nothing shorter is possible. In this order
    it counts how many axes, copies of experts and shards stay above 1, whether a pipeline has a stage that is neither
    first nor last, and how few ranks there are. Where not all axes fit, some have one rank. `keeps_pipeline`: the
    pipeline stays as long as it is, even on more ranks.
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
    if not layouts:  # of experts or replicas that divide nothing small
        return fold(replace(original, expert=1, expert_tensor=1, replicas=1), most_ranks, keeps_pipeline=keeps_pipeline)
    return max(layouts, key=lambda x: (x.kept(original), x.has_middle_stage, -x.ranks, -x.expert, x.pipeline))
