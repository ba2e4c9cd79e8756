"""Profiles of selected steps on selected ranks (section `profile`): traces, memory snapshots and recent collectives.

Files are written to `profile/steps-<first>-<last>` in the run folder. The folder name gets a number if these steps are
repeated after a restart:

    trace_rank_00000.json.gz     trace of torch.profiler with the sections of a step, for https://ui.perfetto.dev
    memory_rank_00000.pickle     allocations during these steps, and the memory allocated after them, for
                                 https://docs.pytorch.org/memory_viz
    collectives_rank_00000       collectives recorded by `parallel.flight_recorder`

Failures in this module only log a warning, and training continues. Without the section `profile`, the cost per step is
two comparisons.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megafp8.config import ProfileConfig
from megafp8.parallel import activity, flight_recorder
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.observer import Observer

logger = logging.getLogger(__name__)

FOLDER = "profile"
_MEMORY_EVENTS = 200_000
"""Maximum number of allocations and frees in a snapshot; it keeps the latest ones."""


class Profiler(Observer):
    """Observer that profiles the steps of `config` on this rank, if the config includes this rank."""

    def __init__(self, config: ProfileConfig | None, run: Path, parallel: ParallelState) -> None:
        self._rank, self._device, self._run = parallel.rank, parallel.device, run
        self._steps, self._what = range(0), frozenset[str]()
        self._running = False
        self._trace: profile | None = None
        self._section: record_function | None = None
        if config is None or config.steps is None:
            return
        first, last = config.steps
        where = "all ranks" if config.ranks == "all" else f"ranks {', '.join(map(str, config.ranks))}"
        logger.info(f"profile: steps {first} to {last} on {where}: {', '.join(config.record)}; to {run / FOLDER}")
        if "memory" in config.record and self._device.type != "cuda":
            logger.info(f"profile: no memory snapshot: torch records no allocations on the device {self._device.type}")
        if config.ranks == "all" or self._rank in config.ranks:
            self._steps, self._what = range(first, last + 1), frozenset(config.record)

    def before_step(self, step: int) -> None:
        """Start recording before the first step to be profiled."""
        if not self._running and step in self._steps:
            self._try(self._start)

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Write the files after the last step to be profiled. This waits for the device."""
        if self._running and step + 1 not in self._steps:
            self._try(self._finish)
        return {}

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running and error is None:  # the run ends before the last step to be profiled
            self._try(self._finish)
        self._stop_listening()  # no synchronization: after an error the device may wait for ranks that are gone

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no failure of the profiler may end the run
            logger.warning(f"profile: stopped: {type(error).__name__}: {error}")
            self._steps, self._running = range(0), False
            with suppress(Exception):
                self._stop()

    @property
    def _snapshots(self) -> bool:
        return "memory" in self._what and self._device.type == "cuda"

    def _start(self) -> None:
        self._running = True
        if self._snapshots:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        if "trace" in self._what:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            # There is only one profiling cycle, but with acc_events=False torch warns that it keeps only one cycle.
            self._trace = profile(activities=kinds, record_shapes=True, acc_events=True)
            self._trace.start()
            if activity.record is not None:
                activity.record.listeners.append(self._enter)

    def _enter(self, section: str) -> None:
        """Begin the record of `section` in the trace, and end the record of the previous section."""
        if self._section is not None:
            self._section.__exit__(None, None, None)
        self._section = record_function(section)
        self._section.__enter__()

    def _stop_listening(self) -> None:
        if activity.record is not None and self._enter in activity.record.listeners:
            activity.record.listeners.remove(self._enter)
        if self._section is not None:
            self._section.__exit__(None, None, None)
            self._section = None

    def _stop(self) -> tuple[profile | None, Any]:
        """Stop recording, and return the trace and the memory snapshot, each None if it was not recorded."""
        self._stop_listening()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
        snapshot = None
        if self._snapshots:
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        return trace, snapshot

    def _finish(self) -> None:
        self._running = False
        activity.enter("profile")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        trace, snapshot = self._stop()
        folder = self._new_folder()
        if trace is not None:
            trace.export_chrome_trace(str(folder / f"trace_rank_{self._rank:05d}.json.gz"))
        if snapshot is not None:
            with (folder / f"memory_rank_{self._rank:05d}.pickle").open("wb") as file:
                pickle.dump(snapshot, file)
        if "collectives" in self._what and flight_recorder.write_collectives(folder, self._rank) is None:
            logger.info("profile: no collectives: torch has recorded none, as expected in a run on one GPU")
        logger.info(f"profile: written to {folder}")

    def _new_folder(self) -> Path:
        """Create and return a folder for these steps that has no files of this rank yet."""
        name = f"steps-{self._steps[0]}-{self._steps[-1]}"
        for number in count(1):
            folder = self._run / FOLDER / (name if number == 1 else f"{name}-{number}")
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.glob(f"*_rank_{self._rank:05d}*")):
                return folder
        raise AssertionError
