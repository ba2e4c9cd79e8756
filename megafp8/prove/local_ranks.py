"""Ranks as processes on this machine, started once to run many functions, each in its own gloo group.

A rank is a fork of a server process that has already imported torch and the package, so it starts within milliseconds.
Each call creates a new group over the ranks that it needs. In each call, torch and the environment are in the state of
a new process. If a rank fails, dies or does not finish in time, all ranks of the call are killed, and new ones are
started for the next call. The error shows the stack of each rank, causes first: ranks that died, ranks that hung, other
exceptions, and finally lost connections.

    def work(parallel_size):             # module level, so that it can be pickled; runs on every rank
        ... return value

    with LocalRanks() as ranks:
        values = ranks.run(work, (2,), ranks=2, timeout=60)
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

PRELOADED = ["torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "megafp8.training.run"]
"""Modules that the server imports, so that ranks need not. torch._dynamo takes a second, and many functions need it."""
_STDOUT_STDERR = (1, 2)
_LEAVE = "leave"
"""Message to the ranks of a call once all of them have answered."""
_DIED = "process died"
_FROZEN: list[None] = []
"""Object that garbage collection skips while the objects of a rank are frozen. Counting frozen objects takes 10 ms."""


def _serve(pipe: Connection, stack_path: str) -> None:
    """Run the loop of a rank: receive, run and answer calls, and leave their groups. A call of None ends the loop.

    The result is: whether the call succeeded, its return value or traceback, and its CPU seconds.
    """
    import torch.distributed as dist

    environment = dict(os.environ)
    gc.freeze()  # so that collections look at the objects of calls only
    with open(stack_path, "w") as stack_file:
        faulthandler.enable(stack_file)
        while (task := pipe.recv()) is not None:
            if task == _LEAVE:
                _leave_groups()
                continue
            for descriptor in _STDOUT_STDERR:
                received = recv_handle(pipe)
                os.dup2(received, descriptor)
                os.close(received)
            function, args, rank, ranks, store, stack_at, backend = task
            begin = time.process_time()
            _reset({**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
            faulthandler.dump_traceback_later(max(0.1, stack_at - time.monotonic()), file=stack_file)
            try:
                dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
                result = (True, function(*args))
            except Exception:
                result = (False, traceback.format_exc())
            finally:
                faulthandler.cancel_dump_traceback_later()
            pipe.send((*result, time.process_time() - begin))
            del task, function, args, result
    if dist.is_initialized():  # NCCL warns about groups that are not destroyed
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Destroy the groups of the previous call, and the models that hold them in reference cycles.

    Each gloo group has a thread that wakes up a hundred times a second for as long as the group exists.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from megafp8.parallel.parallel_state import destroy_model_parallel

    destroy_model_parallel()
    # Device meshes of the same ranks are equal, so these caches would return the groups that were just destroyed.
    _clear_sharding_prop_cache()
    gc.collect()
    if any(x is _FROZEN for x in gc.get_objects()):  # a training job thaws all objects when it ends
        gc.freeze()


def _reset(environment: dict[str, str]) -> None:
    """Undo changes of the previous call: environment variables, torch's settings and random state."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.manual_seed(0)


class RanksFailed(AssertionError):
    """Failure of a call. `hung` are the ranks that did not finish in time."""

    def __init__(self, text: str, hung: list[int]) -> None:
        super().__init__(text)
        self.hung = hung

    @property
    def cause(self) -> str:
        """Failure in one line: the ranks that did not finish, or the last line of the report."""
        if self.hung:
            return f"ranks {', '.join(map(str, self.hung))} did not finish"
        return [line for line in str(self).splitlines() if line][-1]


class _Rank:
    """Rank of `LocalRanks`: its process, the pipe to it, and the file for its stack in case it hangs."""

    def __init__(self, stack_path: Path, context: BaseContext) -> None:
        self.stack_path = stack_path
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, str(stack_path)), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, task: tuple[Any, ...]) -> None:
        """Start a call. The rank's output goes to the current output of this process, which may be captured."""
        self.pipe.send(task)
        for descriptor in _STDOUT_STDERR:
            send_handle(self.pipe, descriptor, self.process.pid)

    def receive(self) -> tuple[bool, Any, float]:
        """Return the result of the call and its CPU seconds. The result has arrived, or the process has died."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            return False, f"{_DIED}, exit code {self.process.exitcode}\n{self.stack_path.read_text()}", 0.0

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class LocalRanks:
    """Processes that run functions as ranks. Each starts when a call first needs it.

    `preloaded`: additional modules for the server to import, if it has not started yet. `on_gpus`: ranks may use GPUs
    and have NCCL in addition to gloo. They are then not forked, because a module that queries GPUs while it is imported
    would keep forks from using them. `cpu_seconds`: CPU time of all calls.
    """

    def __init__(self, preloaded: Sequence[str] = (), *, on_gpus: bool = False) -> None:
        self._context = mp.get_context("spawn" if on_gpus else "forkserver")
        self._context.set_forkserver_preload([*PRELOADED, *preloaded])
        self._backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        self.folder = Path(tempfile.mkdtemp(prefix="megafp8-ranks-"))
        self._calls, self.cpu_seconds = 0, 0.0
        self._ranks: dict[int, _Rank] = {}

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, gracefully if possible, and remove their files."""
        for rank in self._ranks.values():
            rank.pipe.send(None)
        deadline = time.monotonic() + 30
        for rank in self._ranks.values():
            rank.process.join(timeout=max(0.0, deadline - time.monotonic()))
            rank.kill()
        self._ranks.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], ranks: int, timeout: float) -> list[Any]:
        """Run `function(*args)` on the first `ranks` processes, and return the results by rank.

        Raises RanksFailed if a rank fails or does not finish within `timeout` seconds.
        """
        self._calls += 1
        store = str(self.folder / f"store-{self._calls}")
        stack_at = time.monotonic() + 0.9 * timeout  # counted from here: a rank may still be leaving earlier groups
        for i in range(ranks):
            if i not in self._ranks:
                self._ranks[i] = _Rank(self.folder / f"stack-{i}", self._context)
            self._ranks[i].send((function, args, i, ranks, store, stack_at, self._backend))
        try:
            answers = self._answers(ranks, timeout)
        except BaseException:  # Ctrl-C, or a caller's own time limit: the next call must not get these answers
            self._kill(ranks)
            raise
        hung = sorted(set(range(ranks)) - answers.keys())
        failed = {i: value for i, (succeeded, value) in sorted(answers.items()) if not succeeded}
        if hung or failed:  # the other ranks may hang in a collective with these
            report = [(_order(value), f"rank {i} failed:\n{value}") for i, value in failed.items()]
            for i in hung:
                stack = self._ranks[i].stack_path.read_text()
                report.append((1, f"rank {i} did not finish within {timeout} s; its stack was:\n{stack}"))
            self._kill(ranks)
            raise RanksFailed("\n".join(text for _, text in sorted(report)), hung)
        for i in range(ranks):  # not before: a rank may have answered while others still connect to its groups
            self._ranks[i].pipe.send(_LEAVE)
        return [answers[i][1] for i in range(ranks)]

    def _kill(self, ranks: int) -> None:
        for i in range(ranks):
            self._ranks.pop(i).kill()

    def _answers(self, ranks: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return the results of the ranks that answer in time. After a failure, the other ranks have 2 more seconds."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = {self._ranks[i].pipe: i for i in range(ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                *answer, seconds = self._ranks[rank].receive()
                answers[rank] = (answer[0], answer[1])
                self.cpu_seconds += seconds
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2)
        return answers


def _order(failure: str) -> int:
    """Return the position of a failure in a report.

    A dead rank comes first, because it causes the lost connections of other ranks.
    """
    if failure.startswith(_DIED):
        return 0
    return 3 if "gloo" in failure.splitlines()[-1] else 2
