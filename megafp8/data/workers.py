"""Order-preserving map over worker processes that survives the death of a worker.

`multiprocessing.Pool` waits forever for the result of a worker that was killed. `ProcessPoolExecutor` notices, but its
workers share two pipes: one that is killed while it holds a lock or has written half of a result leaves its parent
waiting in a read. Here each worker has a pipe of its own with one task in it at most, and the parent holds no copy of
the worker's end: whatever happens to the worker, the parent's next read or write fails at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 4  # finished and running tasks for each worker, beyond the one whose result comes next


def map_in_order(
    make: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    *,
    workers: int,
    describe: Callable[[Task], str],
) -> Generator[tuple[Task, Result], None, None]:
    """Each of `tasks` with `make()(task)`, in their order, computed by `workers` processes; with 0 by this one.

    `make` is called once in each process. It, tasks and results must be picklable; `tasks` is read as they are needed.
    Exceptions of the function must be handled by it. Raises ChildProcessError if a worker dies, with its exit code or
    signal and `describe` of its task. Processes end with the iterator.
    """
    if workers == 0:
        function = make()
        yield from ((task, function(task)) for task in tasks)
        return
    processes: dict[Connection, BaseProcess] = {}
    try:
        _start(processes, make, workers)
        yield from _run(processes, iter(tasks), describe)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
        for process in processes.values():
            process.join()


def _start(processes: dict[Connection, BaseProcess], make: Callable[[], object], count: int) -> None:
    context = multiprocessing.get_context("spawn")  # tokenizers have threads, and a fork has not
    # Ctrl-C goes to all processes of the terminal. Workers are started with it blocked, so that the parent alone acts
    # on it. The tracker is started before, since its start unblocks it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, make: Callable[[], Callable[[Task], Result]]) -> None:
    """Body of a worker: tasks in, results out, until the parent closes the pipe or dies."""
    function = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(function(connection.recv()))


def _run(
    processes: dict[Connection, BaseProcess], tasks: Iterator[Task], describe: Callable[[Task], str]
) -> Iterator[tuple[Task, Result]]:
    running: dict[Connection, tuple[int, Task]] = {}
    finished: dict[int, tuple[Task, Result]] = {}
    idle = list(processes)
    given = returned = 0
    more = True
    while True:
        while more and idle and given - returned < (1 + _AHEAD) * len(processes):
            try:
                task = next(tasks)
            except StopIteration:
                more = False
                break
            connection = idle.pop()
            running[connection] = (given, task)
            given += 1
            with contextlib.suppress(OSError):  # a dead worker; its end of the pipe reads as closed below
                connection.send(task)
        if not running:
            return
        for connection in cast(list[Connection], wait(list(running))):
            number, task = running.pop(connection)
            try:
                finished[number] = task, connection.recv()
            except (EOFError, OSError):
                raise ChildProcessError(_cause(processes[connection], describe(task))) from None
            idle.append(connection)
        while returned in finished:
            yield finished.pop(returned)
            returned += 1


def _cause(process: BaseProcess, task: str) -> str:
    """Why a worker's pipe was closed."""
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; the kernel ends processes so when memory runs out" if name == "SIGKILL" else ""
            return f"worker process {process.pid} was killed by {name} at {task}{hint}"
    return f"worker process {process.pid} ended with exit code {code} at {task}"
