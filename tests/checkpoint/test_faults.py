"""A full and a read-only disk: a clear error, and nothing is lost. Runs itself in a process with mounts of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import BackgroundSaver, Destination, FolderLock, complete_checkpoints, load, save
from megafp8.checkpoint.files import ChecksummedFiles
from megafp8.config import Config
from megafp8.training.errors import lost_connection
from megafp8.training.validate import check_writable

_ALONE = ["unshare", "--map-root-user", "--mount"]


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


def save_on_a_small_disk(folder: Path) -> dict[str, object]:
    """Outcomes of saves that do not fit on the disk, and of saves where nothing may be written."""
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


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*_ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("content", [b"a", torch.zeros(1 << 20)])
def test_the_error_of_a_full_disk_is_raised_as_it_is(content: bytes | torch.Tensor) -> None:
    """Where the buffer of a small file meets it, and where torch.save does: caused by nothing, itself included."""
    full = ChecksummedFiles().create_stream(Path("/dev/full"), "wb")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as raised, full as stream:
        torch.save(content, stream) if isinstance(content, torch.Tensor) else stream.write(content)
    assert raised.value.__cause__ is None
    assert not lost_connection(raised.value)


@pytest.mark.slow
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    if not _may_mount(tmp_path):
        pytest.skip("needs a mount namespace of its own")
    command = [*_ALONE, sys.executable, "-m", "tests.checkpoint.test_faults", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("full", "full in the background"):
        assert found[name].startswith(
            f"SaveFailed: saving {tmp_path}/step_00000002 failed: rank 0: OSError: [Errno 28]"
        )
        assert found[name].endswith("/__0_0.distcp'. Earlier checkpoints are untouched")
        assert "No space left on device: '" in found[name]
    for name, reason in (("full", "No space left on device"), ("read-only", "Read-only file system")):
        expected = f"the run cannot write to {tmp_path}/checkpoints: {reason}; set run_dir to a folder"
        assert found[f"start on a {name} disk"].startswith("ConfigError: config: 1 problem\n  run_dir = 'runs': ")
        assert expected in found[f"start on a {name} disk"]
    assert found["left by a full disk"] == ["step_00000001"]
    for name in ("read-only", "read-only in the background"):
        assert found[name].startswith(
            f"SaveFailed: saving {tmp_path}/step_00000004 failed: rank 0: OSError: [Errno 30]"
        )
        assert "Read-only file system" in found[name]
    assert "Read-only file system: " in found["read-only lock"]
    assert str(tmp_path / ".lock") in found["read-only lock"]
    assert found["good"] == [1, 3]
    assert found["good in the end"] == [5]


if __name__ == "__main__":
    print(json.dumps(save_on_a_small_disk(Path(sys.argv[1]))))
