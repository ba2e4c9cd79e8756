"""When the actions of a run were really done, and timelines, real or simulated, as files.

A `Stopwatch` marks start and end of each compute action on the device that computes: by CUDA events, which cost the
host nothing to wait for, or by the host's clock on CPU. Its zero is the moment at which all ranks of the pipeline have
come together, so that their times can be laid side by side; over hosts that is right to the duration of a barrier.

A timeline is kept as JSON: {"placement": stages of each rank, "spans": for each rank [cell, start, end], in seconds}.
`chrome_trace` is what https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from megafp8.distributed.collectives import all_gather_objects, barrier
from megafp8.parallel_state import Group
from megafp8.pipeline_parallel.registry import action_of, cell
from megafp8.pipeline_parallel.schedules import Action, Placement
from megafp8.pipeline_parallel.simulate import Span, Timeline


class Stopwatch:
    """Takes the time of one rank's actions. Making one is collective over `pipeline`: it is everyone's zero."""

    def __init__(self, pipeline: Group, device: torch.device) -> None:
        self._pipeline, self._cuda = pipeline, device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        if self._cuda:
            torch.cuda.synchronize(device)
        barrier(pipeline.group)
        self._zero = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, action: Action) -> None:
        """`action` begins."""
        self._marks.append((action, self._now(), None))

    def stop(self) -> None:
        """What began last has ended."""
        action, start, _ = self._marks.pop()
        self._marks.append((action, start, self._now()))

    def timeline(self) -> Timeline:
        """Of all ranks, in seconds. Collective over the pipeline; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        spans = [Span(action, self._seconds(start), self._seconds(end)) for action, start, end in self._marks]
        return Timeline(all_gather_objects(spans, self._pipeline.group))

    def _seconds(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self._cuda else mark - self._zero


def write_timeline(timeline: Timeline, placement: Placement, path: Path) -> None:
    """Write a timeline for `read_timeline`."""
    spans = [[[cell(span.action), span.start, span.end] for span in spans] for spans in timeline.spans]
    path.write_text(json.dumps({"placement": placement.stages, "spans": spans}), encoding="utf-8")


def read_timeline(path: Path) -> tuple[Timeline, Placement]:
    """What `write_timeline` wrote. Raises ValueError where the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        placement = Placement(tuple(tuple(map(int, stages)) for stages in found["placement"]))
        spans = [
            [Span(action_of(name, str(path)), float(start), float(end)) for name, start, end in spans]
            for spans in found["spans"]
        ]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no pipeline timeline: {error}") from None
    return Timeline(spans), placement


def chrome_trace(timelines: dict[str, tuple[Timeline, Placement]], *, unit: float = 1.0) -> dict[str, Any]:
    """Chrome's trace events: a process for each timeline, a thread for each rank. `unit`: seconds of a time of 1."""
    events: list[dict[str, Any]] = []
    for pid, (name, (timeline, placement)) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for rank, spans in enumerate(timeline.spans):
            events.append({"ph": "M", "pid": pid, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            for span in spans:
                a = span.action
                events.append({
                    "ph": "X", "pid": pid, "tid": rank, "name": cell(a), "cat": a.kind.value,
                    "ts": (span.start - timeline.start) * unit * 1e6, "dur": (span.end - span.start) * unit * 1e6,
                    "args": {"micro-batch": a.microbatch, "stage": placement.stages[rank][a.chunk]},
                })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
