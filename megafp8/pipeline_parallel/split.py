"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(counts: Sequence[int]) -> list[range]:
    """The layers (numbered from 0) of each stage, in order, that has so many; one at least."""
    assert min(counts) >= 1, f"a stage without layers: {counts}"
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def even(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage has: as many as others where that divides.

    Otherwise some stages take one layer more, counted from the last stage but one towards the first; the last stage
    never does, for it already has the output layer and the loss, and the first, which has the embedding, is the last
    resort: 10 layers on 4 stages are 2, 3, 3, 2.
    """
    least, more = divmod(num_layers, num_stages)
    last = num_stages - 1
    return [least + (last - more <= stage < last) for stage in range(num_stages)]


def balanced(num_layers: int, homes: Sequence[int], last_work: float) -> list[int]:
    """How many layers each stage has if ranks are to have equal work. `homes`: the rank of each stage, in order;
    `last_work`: of the last stage beside its layers, the output layer's, counted in layers.

    Layers are dealt out one at a time, to the rank that has least, there to the stage that has least, to the first of
    equals. Every stage has one at least.
    """
    counts = [1] * len(homes)
    of_stage = [1.0] * (len(homes) - 1) + [1.0 + last_work]
    of_rank = [sum(work for work, home in zip(of_stage, homes) if home == rank) for rank in range(max(homes) + 1)]
    for _ in range(num_layers - len(homes)):
        stage = min(range(len(homes)), key=lambda stage: (of_rank[homes[stage]], of_stage[stage]))
        counts[stage] += 1
        of_stage[stage] += 1
        of_rank[homes[stage]] += 1
    return counts
