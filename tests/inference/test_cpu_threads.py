"""Cores of processes, on machines as Linux describes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.inference.cpu_threads import physical_cores, share


def _two_sockets(system: Path) -> None:
    """Eight cores of two logical CPUs, i and i + 8; of two NUMA nodes that take turns."""
    for cpu in range(16):
        topology = system / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for node, cpus in enumerate(("0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15")):
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    (system / "node/node2").mkdir()
    (system / "node/node2/cpulist").write_text("\n")  # memory without processors


def test_a_thread_of_each_core_by_node(tmp_path: Path) -> None:
    _two_sockets(tmp_path)
    assert physical_cores(range(16), tmp_path) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert physical_cores([3, 8, 9, 11, 12], tmp_path) == [8, 12, 3, 9], "not all CPUs are ours"
    assert physical_cores([5, 1], tmp_path / "missing") == [1, 5]


def test_ranges_of_cpus(tmp_path: Path) -> None:
    (tmp_path / "node/node0").mkdir(parents=True)
    (tmp_path / "node/node1").mkdir()
    (tmp_path / "node/node0/cpulist").write_text("2-3\n")
    (tmp_path / "node/node1/cpulist").write_text("0-1,4\n")
    assert physical_cores(range(5), tmp_path) == [2, 3, 0, 1, 4]


@pytest.mark.parametrize(("ranks", "shares"), [(1, [8]), (2, [4, 4]), (3, [2, 3, 3]), (8, [1] * 8), (9, [8] * 9)])
def test_shares(ranks: int, shares: list[int]) -> None:
    cores = list(range(8))
    found = [share(cores, rank, ranks) for rank in range(ranks)]
    assert [len(own) for own in found] == shares
    if ranks <= 8:
        assert [core for own in found for core in own] == cores


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_is_bound() -> None:
    """In a process of its own: the second of two."""
    program = (
        "import os, torch; from megafp8.inference.cpu_threads import bind_threads, physical_cores, share\n"
        "cores = physical_cores(os.sched_getaffinity(0)); bind_threads()\n"
        "own = share(cores, 1, 2); assert sorted(os.sched_getaffinity(0)) == sorted(own), own\n"
        "assert torch.get_num_threads() == len(own)\n"
        "try: bind_threads(len(own) + 1)\n"
        "except ValueError as error: print(error)"
    )
    environment = os.environ | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "must be between 1 and" in done.stdout
