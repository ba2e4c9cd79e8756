"""The layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(counts: Sequence[int]) -> list[range]:
    """The layers (numbered from 0) of each stage, from the number of layers of each, at least 1."""
    assert min(counts) >= 1, f"a stage without layers: {counts}"
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def even(num_layers: int, num_stages: int) -> list[int]:
    """The number of layers of each stage, equal where `num_stages` divides `num_layers`.

    Otherwise some stages have one layer more, from the last but one towards the first: never the last, which has the
    output layer and the loss, and the first, which has the embedding, last of all. 10 layers on 4 stages: 2, 3, 3, 2.
    """
    least, remainder = divmod(num_layers, num_stages)
    last = num_stages - 1
    return [least + (last - remainder <= stage < last) for stage in range(num_stages)]


def balanced(num_layers: int, homes: Sequence[int], last_work: float) -> list[int]:
    """The number of layers of each stage, at least 1, so that ranks have equal work.

    `homes`: the rank of each stage. `last_work`: of the output layer on the last stage, in layers. Layers are assigned
    one at a time to the rank with least work, there to the stage with least, to the first of equals.
    """
    counts = [1] * len(homes)
    stage_work = [1.0] * (len(homes) - 1) + [1.0 + last_work]
    rank_work = [sum(work for work, home in zip(stage_work, homes) if home == rank) for rank in range(max(homes) + 1)]
    for _ in range(num_layers - len(homes)):
        stage = min(range(len(homes)), key=lambda stage: (rank_work[homes[stage]], stage_work[stage]))
        counts[stage] += 1
        stage_work[stage] += 1
        rank_work[homes[stage]] += 1
    return counts
