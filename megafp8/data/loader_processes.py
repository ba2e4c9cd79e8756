"""Loader processes: forks of one server process that imports torch while the rank builds its model.

A process of its own would import torch for seconds. On a machine with fewer cores than processes, the first step of a
run waited for one import per loader process. The server imports torch once, and a fork of it takes milliseconds.

The server starts while the config is checked (`start_server`), before this process has threads, CUDA or process groups.
None of them is copied into a loader process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from megafp8.data.workers import stop_signals_blocked

PRELOADED = ["torch", "megafp8.objectives"]
"""Modules that the server imports: what a loader process unpickles needs them."""


def start_server() -> BaseContext:
    """Start the server unless it runs already, and return the context whose processes are forks of it.

    The call does not wait for the imports. Loader processes block SIGINT and SIGTERM, which terminals and batch systems
    send to all processes of a job: the training process ends them.
    """
    context = multiprocessing.get_context("forkserver")
    with stop_signals_blocked():
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    return context


def describe_overload(workers: int, ranks: int) -> str | None:
    """Describe loader processes that outnumber the cores of this host, or return None if there are enough cores.

    Args:
        workers: Loader processes of each rank.
        ranks: Ranks on this host.
    """
    cores = len(os.sched_getaffinity(0))
    if workers * ranks <= cores:
        return None
    return (
        f"data.num_workers = {workers}: the ranks on this host start {workers * ranks} processes that load data, and "
        f"may use {cores} cores; try data.num_workers={max(0, cores // ranks - 1)} (0 loads in the training process)"
    )


def end_with_trainer(worker: int) -> None:
    """End this loader process when the process that started it is gone. torch calls it with the worker's number.

    torch compares the number of the parent process, which here is the server, and the server runs as long as its forks.
    """

    def wait() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with trainer", daemon=True).start()
