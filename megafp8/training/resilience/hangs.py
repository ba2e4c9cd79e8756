"""Hang watch: end the job with a message that names the rank at fault if a rank makes no progress.

Problem: if one rank stops, hangs or leaves out a collective, all other ranks wait in collectives until the time limit
of the collectives ends them all with the same error. The ended processes no longer show which rank was at fault, and
where it was.

Idea: on each rank a thread looks at the marks of `parallel.activity`. After `seconds` without a mark it creates the
folder `hangs/<launch>/` in the run folder and writes a report there: step, section, calls begun and waited for, the
stacks of all threads, and the record of torch's flight recorder. The threads of the other ranks see the folder and
write their reports. When all reports have arrived, or the time to wait is over, the lowest rank with a report writes
the verdict (`verdict.decide`), and all ranks exit with code HUNG, so that the agent restarts the job. The verdict also
names ranks that could not report.

While training makes progress, nothing is sent or written. The cost on each rank is a look at a counter and at a path
per poll, for any number of ranks. All hosts must share the run folder, as they must for checkpoints.

A job that is suspended as a whole and continued later does not count as a hang: time counts only while the thread runs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from megafp8.config import Config
from megafp8.host.text_file import replace_text
from megafp8.parallel import activity
from megafp8.parallel.activity import Activity
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.flight_recorder import write_collectives
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.errors import HUNG, report_failure
from megafp8.training.observer import Observer
from megafp8.training.resilience.verdict import CollectiveCall, ProcessLocation, Report, decide

FOLDER = "hangs"
VERDICT_FILE = "verdict.txt"
ELSEWHERE = 0.9
"""Fraction of timeout_seconds that a rank may spend without progress outside of steps, and in its first step."""
LONG_SECTIONS = frozenset({"start", "evaluation", "save", "rewind", "profile"})
"""Sections in which ranks may wait long for a rank that reads, writes or evaluates."""
_PACKAGE = str(Path(__file__).resolve().parent.parent.parent)


@contextmanager
def progress_watched(
    config: Config, run: Path, parallel: ParallelState, write_error: Callable[[str], None]
) -> Iterator[None]:
    """Record this process's activity, and end the job if it makes no progress for `config.hang_seconds`. Collective.

    Args:
        config: Config of the run.
        run: Folder for the reports of a hang.
        parallel: Process groups.
        write_error: Function that writes the message of a hang to the log.
    """
    with activity.recorded() as record:
        if not config.hang_seconds:
            yield
            return
        watch = HangWatch(
            run,
            parallel,
            record,
            seconds=config.hang_seconds,
            seconds_elsewhere=ELSEWHERE * config.timeout_seconds,
            record=write_error,
        )
        with watch:
            yield


class StepMarks(Observer):
    """Observer that marks the steps of the training loop in the record of this process's activity."""

    def before_step(self, step: int) -> None:
        """Mark the beginning of `step`."""
        activity.begin_step(step)

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Mark the beginning of the section after the step."""
        activity.enter("after the step")
        return {}


class HangWatch:
    """Context manager that runs a thread, which ends this process if the process makes no progress.

    Construction is collective: every rank must build its watch and enter it.

    Args:
        run: Folder for the reports of a hang.
        parallel: Process groups.
        activity: Record of this process's activity.
        seconds: Time without progress within a step after which the job is ended.
        seconds_elsewhere: The same limit outside of steps, as in evaluations and saves, and in the first step and
            before it. There, time counts only while this rank waits in a collective or for data: a large save or a long
            evaluation in which no rank waits for another is not a hang.
        record: Function that writes the message to the log.
        end: Function that ends the process with an exit code.
    """

    def __init__(
        self,
        run: Path,
        parallel: ParallelState,
        activity: Activity,
        *,
        seconds: float,
        seconds_elsewhere: float,
        record: Callable[[str], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._rank, self._activity, self._record, self._end = parallel.rank, activity, record, end
        self._seconds, self._elsewhere = seconds, max(seconds, seconds_elsewhere)
        self._interval = min(15.0, seconds / 10)
        place_and_time = (
            ProcessLocation(socket.gethostname(), os.getpid()),
            time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime()),
        )
        launches = all_gather_objects(place_and_time, parallel.world.group)
        self._places = [place for place, _ in launches]
        self._folder = run / FOLDER / launches[0][1]
        self._main = threading.main_thread().ident
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _within_step(self) -> bool:
        activity = self._activity
        # The first step of a process compiles kernels and opens connections, so it may take long.
        is_warm = activity.first_step is not None and activity.step > activity.first_step
        return is_warm and activity.section not in LONG_SECTIONS

    def _waits(self) -> bool:
        """Return whether this rank waits for other ranks, for the device or for data."""
        activity = self._activity
        return bool(activity.waits() or activity.device_waits) or activity.section == "data"

    def _watch(self) -> None:
        seen, idle = -1, 0.0
        while not self._done.wait(self._interval):
            marks, within = self._activity.marks, self._within_step()
            counts = marks == seen and (within or self._waits())
            idle, seen = idle + self._interval if counts else 0.0, marks
            if idle >= (self._seconds if within else self._elsewhere) or self._folder.exists():
                break
        if not self._done.is_set():
            self._end_job(idle)

    def _end_job(self, idle: float) -> None:
        """Report, wait for the other ranks' reports, and end the process with the verdict."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_report(idle)
            message = self._message(self._wait_for_reports())
        except OSError as error:  # a faulty disk may be the reason for the hang
            message = f"no progress for {idle:.0f} s, and {self._folder} cannot be written: {error}"
        if self._rank == 0:
            self._record(message)
        report_failure(f"error: {message}", HUNG, "")
        self._end(HUNG)

    def _write_report(self, idle: float) -> None:
        name = self._folder / f"rank_{self._rank:05d}"
        with name.with_suffix(".stacks.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        replace_text(name.with_suffix(".json"), json.dumps(asdict(self.report(idle))))
        with suppress(Exception):  # the job must end even if the flight recorder fails
            write_collectives(self._folder, self._rank)

    def report(self, idle: float) -> Report:
        """Return a report of this rank's present activity, after `idle` seconds without progress."""
        activity = self._activity
        calls = activity.calls()
        waits = [
            CollectiveCall(call.op, call.key, number, call.peer_key, list(call.others))
            for call, number in activity.waits()
        ]
        host = socket.gethostname()
        return Report(
            rank=self._rank,
            step=activity.step,
            section=activity.section,
            idle_seconds=idle,
            begun={call.key: call.begun for call in calls},
            others={call.key: list(call.others) for call in calls if call.key == call.peer_key},
            waits=waits,
            waits_for_device=bool(activity.device_waits),
            where=_where(sys._current_frames().get(self._main or 0)),
            process_states={
                rank: _process_state(place.pid)
                for rank, place in enumerate(self._places)
                if place.host == host and rank != self._rank
            },
        )

    def _wait_for_reports(self) -> dict[int, Report]:
        """Return the reports of all ranks by rank, or after a time limit only the reports that have arrived."""
        deadline = time.monotonic() + 2 * self._interval + min(5.0, self._seconds)
        while True:
            reports = {}
            for path in sorted(self._folder.glob("rank_*.json")):
                fields = json.loads(path.read_text(encoding="utf-8"))
                reports[fields["rank"]] = _report_of(fields)
            if len(reports) == len(self._places) or time.monotonic() > deadline:
                return reports
            time.sleep(min(0.2, self._interval))

    def _message(self, reports: Mapping[int, Report]) -> str:
        """Return the verdict. The lowest rank with a report decides it and writes it to a file for the others."""
        path = self._folder / VERDICT_FILE
        if self._rank == min(reports):
            self._print_stacks([rank for rank in range(len(self._places)) if rank not in reports])
            verdict = decide(reports, self._places, str(self._folder))
            replace_text(path, verdict.message)
            return verdict.message
        deadline = time.monotonic() + self._interval + 10
        while time.monotonic() < deadline:
            with suppress(OSError):
                return path.read_text(encoding="utf-8")
            time.sleep(0.1)
        return decide(reports, self._places, str(self._folder)).message

    def _print_stacks(self, silent: Sequence[int]) -> None:
        """Make the ranks `silent` on this host print their stacks on stderr, even if Python is blocked.

        `errors.run_and_report` installs the signal handler for this.
        """
        for rank in silent:
            if self._places[rank].host == socket.gethostname():
                with suppress(OSError):
                    os.kill(self._places[rank].pid, signal.SIGUSR2)


def _report_of(fields: dict[str, object]) -> Report:
    report = Report(**fields)  # type: ignore[arg-type]
    calls = [CollectiveCall(**call) for call in report.waits]  # type: ignore[arg-type]
    states = {int(rank): state for rank, state in report.process_states.items()}
    return Report(**{**fields, "waits": calls, "process_states": states})  # type: ignore[arg-type]


def _process_state(pid: int) -> str:
    """Return the state of a process on this host as Linux names it, such as `T (stopped)`, or `gone` if it ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return "gone"
    return next((line.split(":", 1)[1].strip() for line in status.splitlines() if line.startswith("State:")), "unknown")


def _where(frame: FrameType | None) -> str:
    """Return the innermost line of this package in a stack, such as `training/job.py:12 in run`."""
    innermost = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "unknown"
    name = frame.f_code.co_filename.removeprefix(_PACKAGE).lstrip("/")
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
