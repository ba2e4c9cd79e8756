"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(counts: Sequence[int]) -> list[range]:
    """Return the layers (numbered from 0) of each stage, given the number of layers of each stage, at least 1."""
    assert min(counts) >= 1, f"a stage without layers: {counts}"
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def even(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage, equal if `num_stages` divides `num_layers`.

    Otherwise some stages have one more layer, from the last but one toward the first. The last stage, which has the
    output layer and the loss, never gets one more; the first stage, which has the embedding, comes last in this order.
    10 layers on 4 stages give 2, 3, 3, 2.
    """
    least, remainder = divmod(num_layers, num_stages)
    last = num_stages - 1
    return [least + (last - remainder <= stage < last) for stage in range(num_stages)]


def balanced(num_layers: int, homes: Sequence[int], last_work: float) -> list[int]:
    """Return the number of layers of each stage, at least 1, such that ranks have equal work.

    Layers are assigned one at a time to the rank with the least work, and there to the stage with the least work; the
    first wins ties.

    Args:
        num_layers: Number of layers.
        homes: Rank of each stage.
        last_work: Work of the output layer on the last stage, in units of a layer.
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
