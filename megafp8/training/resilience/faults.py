"""Faults that a run injects into itself for tests (`resilience.inject`).

Each fault happens once in a run, even if the job is restarted: `faults/<number>.json` in the run folder records that
the fault has happened, and when. `config.FaultConfig` describes the kinds of faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megafp8.batch import Batch
from megafp8.checkpoint import latest
from megafp8.config import FaultConfig
from megafp8.training.consistency import words_of
from megafp8.training.observer import Observer
from megafp8.training.state import checkpoint_folder
from megafp8.training.trainer import RankTrainer

FOLDER = "faults"
_LARGEST_FILLER = 1 << 30
_FILE_LIMIT = 16384  # bytes; messages are smaller, checkpoints are larger


class Faults(Observer):
    """Observer that injects the faults of this rank.

    Args:
        run: Run folder.
        faults: All faults of the config.
        trainer: Trainer of this rank.
        rank: Global rank.
        memory: Folder of this node's checkpoints in memory, or None.
    """

    def __init__(
        self, run: Path, faults: Sequence[FaultConfig], trainer: RankTrainer, rank: int, memory: Path | None = None
    ) -> None:
        self._run, self._trainer, self._memory = run, trainer, memory
        self._own = [(i, fault) for i, fault in enumerate(faults) if fault.rank == rank]

    def happens(self, kind: str, step: int) -> bool:
        """Return whether the fault `kind` happens in `step`, counted from 1, and record it as done if so."""
        return any(fault.kind == kind and fault.step == step and self._begins(i, fault) for i, fault in self._own)

    def _begins(self, number: int, fault: FaultConfig) -> bool:
        folder = self._run / FOLDER
        folder.mkdir(exist_ok=True)
        try:
            with (folder / f"{number}.json").open("x", encoding="utf-8") as file:
                json.dump({**fault.model_dump(), "time": time.time()}, file)
        except FileExistsError:
            return False
        return True

    def before_step(self, step: int) -> None:
        """Inject faults of the process, such as a kill, a full disk or a damaged checkpoint."""
        if not self._own:
            return
        for kind, act in _PROCESS_FAULTS.items():
            if self.happens(kind, step):
                act()
        for _, fault in self._own:
            if fault.kind == "full_disk" and self.happens("full_disk", step):
                _remove_later(fill_disk(self._run, fault.free_bytes), fault.seconds)
            if fault.kind == "slow" and fault.step <= step < fault.step + fault.steps:
                self.happens("slow", step)
                time.sleep(fault.seconds)
        if self.happens("damage_checkpoint", step):
            folders = [x for x in (checkpoint_folder(self._run), self._memory) if isinstance(x, Path)]
            while any(list(folder.glob(".step_*.incomplete")) for folder in folders):
                time.sleep(0.05)  # wait, because a running save would become the newest checkpoint
            newest = latest(checkpoint_folder(self._run))
            assert isinstance(newest, Path), "there is no checkpoint to damage"
            in_memory = None if self._memory is None else latest(self._memory)
            for path in (newest, in_memory):
                if isinstance(path, Path):
                    _change_byte(max(path.glob("*.distcp"), key=lambda path: path.stat().st_size))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.happens("lose_memory", step):
            assert self._memory is not None
            shutil.rmtree(self._memory, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def before_passes(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Inject nan_gradient and loss_spike. For loss_spike, return micro-batches with meaningless labels."""
        if self._own and self.happens("nan_gradient", step):
            self._spoil_gradient()
        if not self._own or not self.happens("loss_spike", step):
            return batches
        return [replace(batch, labels=torch.zeros_like(batch.labels)) for batch in batches]

    def _spoil_gradient(self) -> None:
        """Make the first gradient of the next accumulation on this rank NaN."""
        strategy, clear = self._trainer.strategy, self._trainer.strategy.clear

        def clear_and_spoil() -> None:
            clear()
            strategy.complete()  # later gradients are added to the buffer instead of overwriting it
            strategy.owned[0][0] = torch.nan
            strategy.clear = clear  # type: ignore[method-assign]

        strategy.clear = clear_and_spoil  # type: ignore[method-assign]

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Inject the fault flip_weight: flip a bit of a weight after the update."""
        if self._own and self.happens("flip_weight", step):
            self._trainer.strategy.wait()
            flip_bit(self._trainer.strategy.params[0].detach())
        return {}

    def in_recomputed(self, step: int) -> None:
        """Inject the fault flip_gradient, after the second computation of `step` and before the comparison."""
        if self._own and self.happens("flip_gradient", step):
            flip_bit(self._trainer.strategy.owned[0])


def flip_bit(x: torch.Tensor) -> None:
    """Flip the lowest bit of the first 32-bit word of `x` in place."""
    words_of(x)[:1].bitwise_xor_(1)


def fill_disk(folder: Path, free_bytes: int) -> Path:
    """Create a file in `folder` that leaves only `free_bytes` of its disk free, and return the file's path."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert free < _LARGEST_FILLER, f"{free:,} bytes are free in {folder}: not a small disk made for tests"
    path = folder / "filler"
    with path.open("wb") as file:
        while free > free_bytes:
            with contextlib.suppress(OSError):  # other ranks may have written in the meantime
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size + free - free_bytes)
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    return path


def _remove_later(path: Path, seconds: float) -> None:
    """Remove a file after `seconds`, even if this process has ended before."""
    subprocess.Popen(["sh", "-c", f'sleep {seconds}; rm -f "$0"', str(path)], start_new_session=True)


def _change_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _hang() -> None:
    while True:
        time.sleep(3600)


def _raise() -> None:
    raise RuntimeError("an injected fault")


def _limit_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard))


_PROCESS_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "exception": _raise,
    "fail_save": _limit_files,
}
