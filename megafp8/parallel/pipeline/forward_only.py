"""Schedule of an evaluation: only forwards, for any placement."""

from __future__ import annotations

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement


def forward_only(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Return a schedule that runs every micro-batch forward through every stage.

    Stages are assumed to be equally fast. A rank runs the latest of its stages that has an input.
    """
    schedule: Schedule = [[] for _ in placement.stages]
    finished = [0] * placement.num_stages  # number of micro-batches that each stage has finished
    while finished[-1] < num_microbatches:
        inputs = [num_microbatches, *finished[:-1]]
        for rank, stages in enumerate(placement.stages):
            ready = [(stage, c) for c, stage in enumerate(stages) if finished[stage] < inputs[stage]]
            if ready:
                stage, chunk = max(ready)
                schedule[rank].append(Action(Kind.FORWARD, finished[stage], chunk))
                finished[stage] += 1
    return schedule
