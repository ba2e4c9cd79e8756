"""Replicas that are lost and come back: nothing is lost by it, and the losses are those of a twin, bit for bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.replicas.soak import FSDP2, KINDS, TP2, run
from tests.quickstart_data import QuickstartData
from tests.world import fork_server

SECONDS = 600
"""Limit of a trial, which takes 25 seconds on two idle cores. Its six to eight processes wait for each other."""
pytestmark = pytest.mark.timeout(SECONDS + 60)


def _run(folder: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a trial in this process, with its output in the log and its result in soak.json."""
    with (folder / "soak.log").open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    result = run(folder, *arguments, **options)
    (folder / "soak.json").write_text(json.dumps(result))


def _soak(folder: Path, data: QuickstartData, layout: list[str], *kinds: str, **options: Any) -> None:
    pytest.importorskip("torchft")
    # In a process of its own: it forks, and must have started no threads.
    # With the delay, replicas do fewer steps while a lost one comes back, and the twin computes all of them again.
    arguments = (data, layout, kinds, 0, 1_000_000)
    process = fork_server().Process(target=_run, args=(folder, arguments, {"delay": 0.1} | options))
    process.start()
    process.join(SECONDS)
    process.kill()
    log = (folder / "soak.log").read_text()
    assert (folder / "soak.json").exists(), log[-8000:]
    result = json.loads((folder / "soak.json").read_text())
    assert all(fault["same_processes"] for fault in result["faults"]), log
    assert result["twin_steps"] == result["steps"]
    assert not result["twin_differs"]


def test_three_replicas_of_two_tensor_parallel_ranks(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    kinds = ("kill_rank", "pause_rank", "flip_weight")
    _soak(tmp_path, quickstart_data, TP2, *kinds, replicas=3, samples=4)


def test_a_slow_replica_leaves_by_rule_and_batches_shrink(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    _soak(tmp_path, quickstart_data, FSDP2, "slow_rank", "kill_rank", replicas=3, samples=6, batch="shrink")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, FSDP2], ids=["tp2", "fsdp2"])
def test_every_kind_of_fault(tmp_path: Path, quickstart_data: QuickstartData, layout: list[str]) -> None:
    _soak(tmp_path, quickstart_data, layout, *KINDS)
