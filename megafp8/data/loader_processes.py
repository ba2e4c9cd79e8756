"""Loader processes: forks of one server process that imports torch while the rank builds its model.

A new Python process needs seconds to import torch. On a machine with fewer cores than processes, the first step of a
run would wait for one import per loader process. The server imports torch once, and forking it takes milliseconds.

The server starts while the config is checked (`start_server`), before this process has threads, CUDA or process groups,
so none of them is copied into a loader process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from megafp8.data.workers import stop_signals_blocked

PRELOADED = ["torch", "megafp8.objectives"]
"""Modules that the server imports. Loader processes need them to unpickle their data set."""


def start_server() -> BaseContext:
    """Start the server if it is not running, and return the multiprocessing context that forks it.

    The call does not wait for the imports. Terminals and batch systems send SIGINT and SIGTERM to all processes of a
    job. Loader processes block both signals, and the training process ends them.
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
        f"data.num_workers = {workers}: the ranks on this host start {workers * ranks} processes that load data, but "
        f"can use only {cores} cores; try data.num_workers={max(0, cores // ranks - 1)} "
        "(0 loads in the training process)"
    )


def end_with_trainer(worker: int) -> None:
    """Watch the training process in a thread, and end this loader process when it is gone.

    torch calls this function with the worker's number. Torch's own check compares the id of the parent process. Here
    that is the server, which runs as long as its forks, so the check would never end the worker.
    """

    def wait() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with trainer", daemon=True).start()
