"""Replicas that are lost and come back: nothing is lost by it, and the losses are those of a twin, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.replicas.soak import KINDS
from tests.quickstart_data import ROOT

SECONDS = 600
"""Limit of a trial, which takes 40 seconds on two idle cores. Its eight processes wait for each other."""
pytestmark = pytest.mark.timeout(SECONDS + 60)


def _soak(tmp_path: Path, *options: str) -> None:
    pytest.importorskip("torchft")
    out = tmp_path / "soak.json"
    # With the delay, replicas do fewer steps while a lost one comes back, and the twin computes all of them again.
    command = [sys.executable, "-m", "tests.parallel.replicas.soak", "--delay", "0.1", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    result = json.loads(out.read_text())
    assert all(fault["same_processes"] for fault in result["faults"]), done.stdout
    assert result["twin_steps"] == result["steps"]
    assert not result["twin_differs"]


def test_three_replicas_of_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    _soak(tmp_path, "--replicas", "3", "--kinds", "kill_rank", "pause_rank", "flip_weight")


def test_a_slow_replica_leaves_by_rule_and_batches_shrink(tmp_path: Path) -> None:
    _soak(tmp_path, "--batch", "shrink", "--layout", "fsdp2", "--kinds", "slow_rank", "kill_rank")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_every_kind_of_fault(tmp_path: Path, layout: str) -> None:
    _soak(tmp_path, "--layout", layout, "--kinds", *KINDS)
