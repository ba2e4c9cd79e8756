"""Real ranks for tests: a few processes that are started once and run many cases.

A rank is a fork of a server process that has imported torch, which takes milliseconds. A `World` keeps its
processes, and each case joins a new gloo group over as many of them as it asks for. A case that hangs is reported with
the ranks that did not answer and where each of them stood, and the world is started afresh for the next case.

    def _case(parallel_size):            # module level, so that it can be pickled; runs on every rank
        ...
        return value

    def test_it(world4):
        values = world4.run(_case, 2, ranks=2)
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

# A server process imports torch and the package once; every rank is a fork of it, ready in milliseconds.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "megafp8.training.job", "hypothesis", "pytest"])


def _serve(pipe: Connection, stack_path: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stack_file = open(stack_path, "w")  # noqa: SIM115 - kept open for faulthandler
    while True:
        task = pipe.recv()
        if task is None:
            return
        for own in (1, 2):
            theirs = recv_handle(pipe)
            os.dup2(theirs, own)
            os.close(theirs)
        if dist.is_initialized():  # the last case's, which a rank may have left while others still connected to it
            dist.destroy_process_group()
        function, args, rank, ranks, store, timeout = task
        faulthandler.dump_traceback_later(timeout * 0.9, file=stack_file)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
            torch.manual_seed(0)
            result = (True, function(*args))
        except Exception:
            result = (False, traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
        pipe.send(result)
        if not result[0]:  # peers may hang in a collective with us: this process is of no more use
            return


class World:
    """`size` processes that run cases together. Use through the fixtures `world2`, `world4`, `world8`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder = tempfile.mkdtemp(prefix="megafp8-world-")
        self.cases = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def _start(self) -> None:
        self.processes, self.pipes = [], []
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, self._stack_path(rank)), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _stack_path(self, rank: int) -> str:
        return os.path.join(self.folder, f"stack-{rank}")

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def close(self) -> None:
        """End the processes and remove what they left."""
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 120
    ) -> list[Any]:
        """Run `function(*args)` on the first `ranks` processes and return what each returned, by rank."""
        ranks = ranks or self.size
        if not self.processes:
            self._start()
        self.cases += 1
        store = os.path.join(self.folder, f"store-{self.cases}")
        for rank in range(ranks):
            self.pipes[rank].send((function, args, rank, ranks, store, timeout))
            for handle in (
                1,
                2,
            ):  # what ranks print goes where this process' output goes now, so that pytest captures it
                send_handle(self.pipes[rank], handle, self.processes[rank].pid)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < ranks and time.monotonic() < deadline:
            for rank in set(range(ranks)) - answers.keys():
                try:
                    if self.pipes[rank].poll(0.005):
                        answers[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, f"process died, exit code {self.processes[rank].exitcode}")
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 2)  # let the other ranks report too
        hung = sorted(set(range(ranks)) - answers.keys())
        failed = {rank: value for rank, (ok, value) in answers.items() if not ok}
        if hung or failed:
            stacks = {rank: open(self._stack_path(rank)).read() for rank in hung}  # noqa: SIM115
            self._kill()
            report = [f"rank {rank} failed:\n{value}" for rank, value in sorted(failed.items())]
            report += [f"rank {rank} did not finish within {timeout} s; it stood at:\n{stacks[rank]}" for rank in hung]
            raise AssertionError("\n".join(report))
        return [answers[rank][1] for rank in range(ranks)]
