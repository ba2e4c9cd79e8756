"""Verdict on the rank at fault when a job makes no progress, from the reports of all ranks that can still write one.

    case                              cause
    a rank does not report            its process is stopped or blocked in native code, or its host is lost
    ranks wait for a rank that does   this rank hangs, or computes for too long, outside of collectives
    not wait
    ranks wait for each other         they have begun different collectives; the ranks in the minority are at fault
    all members have begun a call,    the link between them, or one of their devices, is faulty
    and it does not end

Rank A waits for rank B if A waits for call n of a group, or for message n, and B has begun fewer than n. On a GPU the
host does not wait in the collective itself. A host that waits for the device therefore waits for all ranks that have
begun fewer calls in any of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessLocation:
    """Host and process id of a rank."""

    host: str
    pid: int


@dataclass(frozen=True)
class CollectiveCall:
    """Call of a collective or message.

    Attributes:
        op: Name of the operation.
        key: Key under which this rank counts such calls (`activity.Calls`).
        number: Number of the call, counted by this rank.
        peer_key: Key under which the other members count these calls.
        others: Other member ranks.
    """

    op: str
    key: str
    number: int
    peer_key: str
    others: list[int]

    def __str__(self) -> str:
        return f"{self.op} (number {self.number} with {_ranks(self.others)})"


@dataclass(frozen=True)
class Report:
    """Report of a rank's activity.

    Attributes:
        rank: Global rank.
        step: Step of the rank.
        section: Section of the training loop.
        idle_seconds: Time since the rank made progress.
        begun: Number of calls begun, by key.
        others: Other member ranks, by key, for calls of groups.
        waits: Calls that threads of the rank wait for.
        waits_for_device: Whether the host waits for the device.
        where: Innermost line of the main thread's stack in this package.
        process_states: Process states of the other ranks on the same host.
    """

    rank: int
    step: int
    section: str
    idle_seconds: float
    begun: dict[str, int]
    others: dict[str, list[int]]
    waits: list[CollectiveCall]
    waits_for_device: bool
    where: str
    process_states: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Ranks at fault, and a message with the reasons."""

    ranks: list[int]
    message: str


def decide(reports: Mapping[int, Report], places: Sequence[ProcessLocation], folder: str) -> Verdict:
    """Return the verdict on the reports.

    Args:
        reports: Reports by rank. Ranks that could not report are missing.
        places: Locations of all ranks.
        folder: Folder with the stacks, for the message.
    """
    waited = {rank: _waited_for(report, reports) for rank, report in reports.items()}
    waiting = {rank for rank, others in waited.items() if others}
    silent = [rank for rank in range(len(places)) if rank not in reports]
    free = sorted({other for others in waited.values() for other in others} - waiting - set(silent))
    if silent:
        at_fault, reasons = silent, {rank: _of_silent(rank, reports) for rank in silent}
    elif free:
        at_fault, reasons = free, {rank: _of_free(reports[rank]) for rank in free}
    elif waiting:
        at_fault = _minority(reports, waiting)
        reasons = {rank: f"waits in {_place_in(reports[rank])}, which the others have not begun" for rank in at_fault}
    else:
        at_fault = [r for r, report in reports.items() if not report.waits and not report.waits_for_device]
        at_fault = sorted(at_fault or reports)
        reasons = {rank: _of_free(reports[rank]) for rank in at_fault}
    idle = max((report.idle_seconds for report in reports.values()), default=0.0)
    steps = sorted({report.step for rank, report in reports.items() if rank not in at_fault})
    lines = [f"no progress for {idle:.0f} s" + (f" in step {steps[0]}" if steps else "")]
    for rank in at_fault:
        lines.append(f"rank {rank} on {places[rank].host} (process {places[rank].pid}) {reasons[rank]}")
    for place, ranks in _others(reports, at_fault).items():
        lines.append(f"{_ranks(ranks)}: {place}")
    lines.append(f"stacks of the ranks that could write them: {folder}")
    return Verdict(at_fault, "\n".join(lines))


def _waited_for(report: Report, reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks that the rank of `report` waits for."""

    def begun(rank: int, key: str) -> int:
        return reports[rank].begun.get(key, 0) if rank in reports else -1

    ranks_waited_for = {
        other for call in report.waits for other in call.others if begun(other, call.peer_key) < call.number
    }
    if report.waits_for_device:
        groups = ((key, others) for key, others in report.others.items())
        ranks_waited_for |= {
            other for key, others in groups for other in others if begun(other, key) < report.begun[key]
        }
    return ranks_waited_for


def _of_silent(rank: int, reports: Mapping[int, Report]) -> str:
    states = {report.process_states[rank] for report in reports.values() if rank in report.process_states}
    if any(state.startswith("T") for state in states):
        return "is stopped (by SIGSTOP, or a debugger)"
    if "gone" in states:
        return "has ended"
    known = f"; state of its process: {', '.join(sorted(states))}" if states else ""
    return f"does not report: it is stopped, blocked in native code, or its host does not answer{known}"


def _of_free(report: Report) -> str:
    if report.waits:
        calls = ", ".join(map(str, report.waits))
        return f"waits in {calls}, which all members have begun: the link between them or a device is faulty"
    return f"hangs in step {report.step}, {report.section}, outside of collectives: {report.where}"


def _place_in(report: Report) -> str:
    calls = "; ".join(map(str, report.waits)) or ("the device" if report.waits_for_device else report.where)
    return f"{calls}, step {report.step}, {report.section}"


def _minority(reports: Mapping[int, Report], waiting: set[int]) -> list[int]:
    """Return the ranks in the minority: the smallest group of ranks in `waiting` that wait for the same calls.

    If several groups are equally small, return the ranks of all of them.
    """
    by_call: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(waiting):
        report = reports[rank]
        by_call.setdefault((str(report.step), *sorted(call.key for call in report.waits)), []).append(rank)
    fewest = min(map(len, by_call.values()))
    return sorted(rank for ranks in by_call.values() if len(ranks) == fewest for rank in ranks)


def _others(reports: Mapping[int, Report], at_fault: Sequence[int]) -> dict[str, list[int]]:
    """Return the activities of the ranks that are not at fault, each with its ranks."""
    ranks_by_state: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if rank not in at_fault:
            calls = ", ".join(f"{call.op} number {call.number}" for call in report.waits)
            doing = f"wait in {calls}" if calls else f"at {report.where}"
            ranks_by_state.setdefault(f"{doing}, step {report.step}, {report.section}", []).append(rank)
    return ranks_by_state


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
