"""Order-preserving map over worker processes that fails instead of hanging when a worker is killed.

`multiprocessing.Pool` waits forever for the result of a killed worker. `ProcessPoolExecutor` notices, but its workers
share two pipes: if a worker is killed while it holds a lock or writes a result, the parent blocks in a read. Here each
worker has a separate pipe with at most one task in it, and the parent closes its copy of the worker's end, so a read or
write fails as soon as the worker is dead. Threads of the parent wait for the workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_PER_WORKER = 5  # running, waiting, or finished and not yet returned


def map_in_order(
    make: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    *,
    workers: int,
    describe: Callable[[Task], str],
) -> Generator[tuple[Task, Result], None, None]:
    """Yield each task with its result, in order. The processes end when the iterator is closed.

    Args:
        make: Function that is called once in each process and returns the function to apply to tasks. `make`, tasks and
            results must be picklable, and the returned function must not raise exceptions.
        tasks: Tasks; read only as needed.
        workers: Number of processes; 0 computes in this process.
        describe: Function that describes a task in the message of an error.

    Raises:
        ChildProcessError: A worker died. The message has its exit code or signal, and the description of its task.
    """
    if workers == 0:
        function = make()
        yield from ((task, function(task)) for task in tasks)
        return
    idle: queue.SimpleQueue[tuple[Connection, BaseProcess]] = queue.SimpleQueue()

    def run(task: Task) -> Result:
        connection, process = worker = idle.get()
        try:
            connection.send(task)
            result: Result = connection.recv()
            return result
        except (EOFError, OSError):
            raise ChildProcessError(_cause_of_death(process, describe(task))) from None
        finally:
            idle.put(worker)  # also if it is dead: later tasks then fail at once

    started: list[tuple[Connection, BaseProcess]] = []
    executor = ThreadPoolExecutor(workers)
    pending: deque[tuple[Task, Future[Result]]] = deque()
    try:
        _start(started, make, workers)
        for worker in started:
            idle.put(worker)
        for task in tasks:
            pending.append((task, executor.submit(run, task)))
            if len(pending) == workers * _TASKS_PER_WORKER:
                task, future = pending.popleft()
                yield task, future.result()
        while pending:
            task, future = pending.popleft()
            yield task, future.result()
    finally:
        for _, process in started:
            process.kill()
        executor.shutdown(cancel_futures=True)
        for connection, process in started:
            process.join()
            connection.close()


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Context manager in which new processes start with SIGINT and SIGTERM blocked.

    Terminals send SIGINT (Ctrl-C), and batch systems SIGTERM, to all processes. Only the parent should handle them.
    """
    resource_tracker.ensure_running()  # starting it unblocks both signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(started: list[tuple[Connection, BaseProcess]], make: Callable[[], object], count: int) -> None:
    """Start `count` workers and append each to `started`."""
    context = multiprocessing.get_context("spawn")  # tokenizers have threads, which a fork would not copy
    with stop_signals_blocked():
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make), daemon=True)
            process.start()
            theirs.close()
            started.append((ours, process))


def _work(connection: Connection, make: Callable[[], Callable[[Task], Result]]) -> None:
    """Run a worker: receive tasks and send results until the parent closes the pipe or dies."""
    function = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(function(connection.recv()))


def _cause_of_death(process: BaseProcess, task: str) -> str:
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
            return f"worker process {process.pid} was killed by {name} at {task}{hint}"
    return f"worker process {process.pid} ended with exit code {code} at {task}"
