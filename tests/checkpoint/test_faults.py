"""A full disk and one that may not be written to: a clear error, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ALONE = ["unshare", "--map-root-user", "--mount"]


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*_ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    if not _may_mount(tmp_path):
        pytest.skip("needs a mount namespace of its own")
    command = [*_ALONE, sys.executable, "-m", "tests.checkpoint.on_a_small_disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("full", "full in the background"):
        assert found[name].startswith(
            f"RuntimeError: saving {tmp_path}/step_00000002 failed: rank 0: OSError: [Errno 28]"
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
            f"RuntimeError: saving {tmp_path}/step_00000004 failed: rank 0: OSError: [Errno 30]"
        )
        assert "Read-only file system" in found[name]
    assert "Read-only file system: " in found["read-only lock"]
    assert str(tmp_path / ".lock") in found["read-only lock"]
    assert found["good"] == [1, 3]
    assert found["good in the end"] == [5]
