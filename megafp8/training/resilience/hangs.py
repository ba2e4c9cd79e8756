"""Watches a rank for progress; ends the job with a message that names the rank at fault if there is none.

Problem: if one rank stops, hangs or leaves a collective out, all others wait in collectives, whose time limit ends all
of them with the same error. Which rank is at fault, and where it is, is lost with the processes.

Idea: on each rank a thread looks at the marks of `parallel.activity`. After `seconds` without a mark it creates the
folder `hangs/<launch>/` in the run folder and writes its report there: step, section, calls begun and waited for, and
the stacks of all threads, and what torch's flight recorder has. The threads of the other ranks see the folder and write
theirs. Once all reports are there, or some have not come in time, the lowest rank that has reported writes the verdict
(`verdict.decide`), and all ranks exit with code HUNG, so that the agent restarts the job. A rank that cannot report is
thereby named.

While training goes on nothing is sent or written, so a run of any number of ranks costs each of them one look at a
counter and at one path a poll. The run folder must be shared by all hosts, as it must for checkpoints.

A whole job that is suspended and continued is not taken for a hang: time counts only while the thread runs.
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
"""Part of timeout_seconds that a rank may spend without progress outside of steps, and in its first one."""
LONG_SECTIONS = frozenset({"start", "evaluation", "save", "rewind", "profile"})
"""Sections in which ranks may wait long for one that reads, writes or evaluates."""
_PACKAGE = str(Path(__file__).resolve().parent.parent.parent)


@contextmanager
def progress_watched(
    config: Config, run: Path, parallel: ParallelState, write_error: Callable[[str], None]
) -> Iterator[None]:
    """Record this process's activity, and end the job if it makes no progress for `config.hang_seconds`. Collective.

    Args:
        run: Folder for the reports of a hang.
        write_error: Writes the message of a hang to the log.
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
    """Marks the steps of the training loop in the record of this process's activity."""

    def before_step(self, step: int) -> None:
        activity.begin_step(step)

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        activity.enter("after the step")
        return {}


class HangWatch:
    """A thread that ends this process if it makes no progress. Collective; a context manager, entered on every rank.

    `seconds`: time without progress within a step after which the job is ended. Elsewhere, as in evaluations, saves,
    the first step and all that comes before it, it is `seconds_elsewhere`, and only time in which this rank waits in a
    collective or for data counts: a large save or a long evaluation in which no rank waits for another is no hang.
    `record`: writes the message to the log. `end`: ends the process.
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
        # The first step of a process compiles and connects.
        is_warm = activity.first_step is not None and activity.step > activity.first_step
        return is_warm and activity.section not in LONG_SECTIONS

    def _waits(self) -> bool:
        """Return whether this rank waits for others, for the device or for data."""
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
        except OSError as error:  # the disk may be why there is no progress
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
        with suppress(Exception):  # whatever is wrong with it, the job must end
            write_collectives(self._folder, self._rank)

    def report(self, idle: float) -> Report:
        """What this rank is doing."""
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
        """The reports of all ranks or, after several polls, those that are there."""
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
        """The verdict, which the lowest rank that has reported writes."""
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
        """Let ranks on this host print their stacks on stderr (`errors.run_and_report`), even if Python is blocked."""
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
    """The state of a process of this host as Linux names it, e.g. `T (stopped)`; `gone` if there is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return "gone"
    return next((line.split(":", 1)[1].strip() for line in status.splitlines() if line.startswith("State:")), "unknown")


def _where(frame: FrameType | None) -> str:
    """The innermost line of this package in a stack, as `training/job.py:12 in run`."""
    innermost = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "unknown"
    name = frame.f_code.co_filename.removeprefix(_PACKAGE).lstrip("/")
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
