"""Saves on a disk of 1 MiB, in a process with mounts of its own; `test_faults` starts it.

unshare --map-root-user --mount python -m tests.checkpoint.on_a_small_disk FOLDER
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megafp8.checkpoint import (
    BackgroundSaver,
    Destination,
    FolderLock,
    complete_checkpoints,
    load,
    save,
)
from megafp8.config import Config
from megafp8.training.validate import check_writable

SMALL, LARGE = 1000, 1_000_000
CONFIG = Config.model_validate(
    {
        "name": "small",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
        "training": {"steps": 1, "seq_length": 8, "global_batch_size": 1},
        "optimizer": {"learning_rate": 1.0},
        "data": {"train": ["none"]},
    }
)


def _message(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _save_in_background(folder: Path, step: int) -> None:
    with BackgroundSaver(Destination(folder, None), torch.device("cpu"), lambda saved: None) as saver:
        saver.save(step, {"w": torch.full((LARGE,), float(step))}, {})


def _good(folder: Path) -> list[int]:
    """The steps whose checkpoints are there; each has to load with the values of its step."""
    steps = []
    for step, path in complete_checkpoints(folder):
        state = {"w": torch.zeros(SMALL)}
        load(path, state)
        assert bool((state["w"] == step).all())
        steps.append(step)
    return steps


def main(folder: Path) -> dict[str, object]:
    """What came of saves that do not fit, and of saves where nothing may be written."""
    small = {step: {"w": torch.full((SMALL,), float(step))} for step in (1, 3, 5)}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    save(folder, 1, small[1], {})
    found: dict[str, object] = {
        "full": _message(lambda: save(folder, 2, {"w": torch.zeros(LARGE)}, {})),
        "full in the background": _message(lambda: _save_in_background(folder, 2)),
    }
    found["left by a full disk"] = sorted(path.name for path in folder.iterdir())
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    found["start on a full disk"] = _message(lambda: check_writable(CONFIG, folder / "checkpoints"))
    (folder / "filler").unlink()
    (folder / "checkpoints").rmdir()
    save(folder, 3, small[3], {})
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    found |= {
        "read-only": _message(lambda: save(folder, 4, small[1], {})),
        "read-only in the background": _message(lambda: _save_in_background(folder, 4)),
        "start on a read-only disk": _message(lambda: check_writable(CONFIG, folder / "checkpoints")),
        "read-only lock": _message(FolderLock(folder).__enter__),
        "good": _good(folder),
    }
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    save(folder, 5, small[5], {}, keep_last=1)
    return {**found, "good in the end": _good(folder)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
