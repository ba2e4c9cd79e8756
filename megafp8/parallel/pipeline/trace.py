"""Measured times of a schedule's actions, and files of measured or simulated timelines.

A `Stopwatch` records the start and end of each compute action on the device: with CUDA events, which the host does not
wait for, or with the host's clock on CPU. Time zero is a barrier over the pipeline, so that the times of all ranks can
be compared. Between hosts the accuracy is the duration of a barrier.

A timeline file is JSON: {"placement": stages of each rank, "spans": for each rank [cell, start, end], in seconds}.
`chrome_trace` returns a trace that https://ui.perfetto.dev and chrome://tracing can open.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from megafp8.host.strict_json import parse_json
from megafp8.parallel.collectives import all_gather_objects, barrier
from megafp8.parallel.parallel_state import Group
from megafp8.parallel.pipeline.actions import Action, StagePlacement
from megafp8.parallel.pipeline.registry import cell, parse_cell
from megafp8.parallel.pipeline.simulate import TimedAction, Timeline


class Stopwatch:
    """Timer of one rank's compute actions.

    The constructor is a barrier over `pipeline`, which sets time zero of all ranks.
    """

    def __init__(self, pipeline: Group, device: torch.device) -> None:
        self._pipeline, self._cuda = pipeline, device.type == "cuda"
        self._events: list[tuple[Action, Any, Any]] = []
        if self._cuda:
            torch.cuda.synchronize(device)
        barrier(pipeline.group)
        self._zero = self._now()

    def _now(self) -> Any:
        """Return an event on the current stream, or the time of the host's clock on CPU."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, action: Action) -> None:
        """Record the start of `action`."""
        self._events.append((action, self._now(), None))

    def stop(self) -> None:
        """Record the end of the action that was started last."""
        action, start, _ = self._events.pop()
        self._events.append((action, start, self._now()))

    def timeline(self) -> Timeline:
        """Return the timeline of all ranks, in seconds. Collective over the pipeline; synchronizes the device."""
        if self._cuda:
            torch.cuda.synchronize()
        spans = [TimedAction(action, self._seconds(start), self._seconds(end)) for action, start, end in self._events]
        return Timeline(all_gather_objects(spans, self._pipeline.group))

    def _seconds(self, event: Any) -> float:
        """Return the seconds from time zero to `event`."""
        return self._zero.elapsed_time(event) / 1e3 if self._cuda else event - self._zero


def write_timeline(timeline: Timeline, placement: StagePlacement, path: Path) -> None:
    """Write a timeline for `read_timeline`."""
    spans = [[[cell(action), start, end] for action, start, end in spans] for spans in timeline.spans]
    path.write_text(json.dumps({"placement": placement.stages, "spans": spans}), encoding="utf-8")


def read_timeline(path: Path) -> tuple[Timeline, StagePlacement]:
    """Read a file that `write_timeline` wrote; raise ValueError if the file is not a timeline."""
    try:
        events = parse_json(path.read_bytes())
        placement = StagePlacement(tuple(tuple(map(int, stages)) for stages in events["placement"]))
        spans = [
            [TimedAction(parse_cell(name, str(path)), float(start), float(end)) for name, start, end in spans]
            for spans in events["spans"]
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is not a pipeline timeline: {error}") from None
    return Timeline(spans), placement


def chrome_trace(timelines: dict[str, tuple[Timeline, StagePlacement]], *, unit: float = 1.0) -> dict[str, Any]:
    """Return Chrome trace events, with one process per timeline and one thread per rank.

    `unit` is the number of seconds per unit of time in the timelines.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, (timeline, placement)) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for rank, spans in enumerate(timeline.spans):
            events.append({"ph": "M", "pid": pid, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events += [
                {
                    "ph": "X", "pid": pid, "tid": rank, "name": cell(action), "cat": action.kind.value,
                    "ts": (start - timeline.start) * unit * 1e6, "dur": (end - start) * unit * 1e6,
                    "args": {"micro-batch": action.microbatch, "stage": placement.stages[rank][action.chunk]},
                }
                for action, start, end in spans
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
