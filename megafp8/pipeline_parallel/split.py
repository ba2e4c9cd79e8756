"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(num_layers: int, num_stages: int, explicit: Sequence[int] | None = None) -> list[range]:
    """The layers (numbered from 0) of each stage, in order.

    Even where it divides. Otherwise some stages take one layer more, counted from the last stage but one towards the
    first; the last stage never does, for it already has the output layer and the loss, and the first, which has the
    embedding, is the last resort: 10 layers on 4 stages are 2, 3, 3, 2. `explicit` gives the number of layers of each
    stage instead.

    Raises ValueError, with the YAML path, where a stage would be empty or `explicit` does not fit.
    """
    if num_stages < 1:
        raise ValueError(f"parallel.pipeline is {num_stages}; it must be at least 1")
    if num_layers < num_stages:
        raise ValueError(
            f"parallel.pipeline (× virtual_pipeline) is {num_stages} but the model has {num_layers} layers: that "
            f"leaves a stage with no layers; use at most {num_layers} stages"
        )
    counts = _even(num_layers, num_stages)
    if explicit is not None:
        _check_explicit(explicit, num_layers, num_stages, would_work=counts)
        counts = list(explicit)
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


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


def _even(num_layers: int, num_stages: int) -> list[int]:
    least, more = divmod(num_layers, num_stages)
    last = num_stages - 1
    return [least + (last - more <= stage < last) for stage in range(num_stages)]


def _check_explicit(explicit: Sequence[int], num_layers: int, num_stages: int, would_work: list[int]) -> None:
    if len(explicit) != num_stages:
        problem = f"has {len(explicit)} entries for {num_stages} pipeline stages"
    elif min(explicit) < 1:
        problem = "has a stage with no layers; every entry must be at least 1"
    elif sum(explicit) != num_layers:
        problem = f"sums to {sum(explicit)} but the model has {num_layers} layers"
    else:
        return
    raise ValueError(f"parallel.layers_per_stage {list(explicit)} {problem}; {would_work} would work")
