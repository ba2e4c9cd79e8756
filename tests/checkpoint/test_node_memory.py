"""Checkpoints in the memory of nodes: what is left after nodes are lost loads in any layout, anything else never."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import BackgroundSaver, MemoryReader, NodeMemory, load
from megafp8.checkpoint import node_memory as module
from tests.checkpoint import toy
from tests.marks import slow_but
from tests.world import World

CPU = torch.device("cpu")
PAIRS = ("a", "a", "b", "b")


def _memory(folder: Path, nodes: Sequence[str], token: str = "job") -> NodeMemory:
    root = folder / nodes[dist.get_rank()]
    root.mkdir(exist_ok=True)
    return NodeMemory(root, "run", token, dist.group.WORLD)


def _save(folder: Path, nodes: Sequence[str], tp: int, pp: int, steps: Sequence[int], token: str = "job") -> list[Any]:
    """Save steps whose tensors are those of the toy times the step."""
    memory, model = _memory(folder, nodes, token), toy.make(dist.get_rank(), tp, pp, torch.bfloat16)
    with BackgroundSaver(memory, CPU, lambda saved: None) as saver:
        for step in steps:
            state = {**model.state(), "step": torch.tensor(step)}
            saver.save(step, state, {**toy.METADATA, "stage": f"{step}"})
            saver.wait_copied()
    return memory.nodes


def _load(
    folder: Path, nodes: Sequence[str], tp: int, pp: int, token: str = "job", at_least: int = 0, unwanted: str = ""
) -> tuple[int, bool, int] | None:
    """The step that was found, whether all tensors are as saved, and the bytes that came from other nodes."""
    memory, model = _memory(folder, nodes, token), toy.make(dist.get_rank(), tp, pp, torch.bfloat16)
    found = memory.find(at_least, lambda metadata: metadata["stage"] != unwanted)
    if found is None:
        return None
    assert isinstance(found, MemoryReader)
    here = {path.name for path in found.path.glob("*.distcp")}
    empty, step = model.zeroed(), torch.tensor(0)
    metadata = load(found, {**empty.state(), "step": step}, verify=False)
    fetched = sum(path.stat().st_size for path in found.path.glob("*.distcp") if path.name not in here)
    dist.barrier()  # the first rank of the node removes the folder
    memory.remove_newer(metadata["step"])
    assert not (memory.folder / "loading").exists()
    return int(step), model.equals(empty) and metadata["step"] == step, fetched


LAYOUTS = {
    "same": (PAIRS, 2, 2),
    "other cuts": (PAIRS, 4, 1),
    "copies": (PAIRS, 1, 1),
    "fewer ranks": (("b", "b"), 2, 1),
    "another place of the nodes": (("b", "a", "b"), 1, 1),
    "more nodes": (("c", "b", "d", "a"), 2, 2),
}


@pytest.mark.parametrize(
    ("layout", "lost"),
    slow_but(
        [*((layout, "a") for layout in LAYOUTS), ("same", "b"), ("same", "")],
        *(("same", ""), ("other cuts", "a"), ("fewer ranks", "a"), ("more nodes", "a")),
    ),
)
def test_one_node_may_be_lost(world4: World, tmp_path: Path, layout: str, lost: str) -> None:
    assert world4.run(_save, tmp_path, PAIRS, tp=2, pp=2, steps=[5, 10]) == [[[0, 1], [2, 3]]] * 4
    for node in "ab":
        kept = sorted(path.name for path in (tmp_path / node / "megafp8-run" / "job").glob("*step*"))
        assert kept == ["step_00000010"]
        assert len(list((tmp_path / node).rglob("*.distcp"))) == 4
    if lost:
        shutil.rmtree(tmp_path / lost)
    nodes, tp, pp = LAYOUTS[layout]
    found = world4.run(_load, tmp_path, nodes, tp, pp, ranks=len(nodes))
    assert [one[:2] for one in found] == [(10, True)] * len(nodes)
    for node, (_, _, fetched) in zip(nodes, found):
        assert (fetched > 0) == (node not in "ab" or node == lost)


def test_neighbours_lost_together_are_too_many(world4: World, tmp_path: Path) -> None:
    """Four nodes in a ring: of two that are not neighbours all files are left."""
    ring = ("a", "b", "c", "d")
    world4.run(_save, tmp_path, ring, tp=2, pp=2, steps=[5])
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path, backup, ignore=shutil.ignore_patterns("backup"))
    for lost, remains in (("ac", True), ("bd", True), ("ab", False), ("da", False)):
        for node in ring:
            shutil.rmtree(tmp_path / node)
            if node not in lost:
                shutil.copytree(backup / node, tmp_path / node)
        found = world4.run(_load, tmp_path, ring, 2, 2)
        assert [one and one[:2] for one in found] == [(5, True) if remains else None] * 4, lost


def _save_half(folder: Path, nodes: Sequence[str]) -> bool:
    """A save of step 10 during which two nodes are lost before they have renamed it."""
    rename = module.rename_synced

    def fail(old: Path, new: Path) -> None:
        if dist.get_rank() in (1, 2):
            raise OSError("lost")
        rename(old, new)

    module.rename_synced = fail  # type: ignore[assignment]
    try:
        _save(folder, nodes, 2, 2, [10])
    except RuntimeError as error:
        return "rank 1: OSError: lost" in str(error)
    finally:
        module.rename_synced = rename
    return False


def test_a_save_that_was_not_finished_leaves_the_one_before(world4: World, tmp_path: Path) -> None:
    ring = ("a", "b", "c", "d")
    world4.run(_save, tmp_path, ring, tp=2, pp=2, steps=[5])
    assert world4.run(_save_half, tmp_path, ring) == [True] * 4
    there = {node: len(list((tmp_path / node).rglob("step_00000010"))) for node in ring}
    assert there == {"a": 1, "b": 0, "c": 0, "d": 1}
    assert [one[:2] for one in world4.run(_load, tmp_path, ring, 2, 2)] == [(5, True)] * 4
    assert not list(tmp_path.rglob("step_00000010"))  # removed, so that the step can be saved again
    world4.run(_save, tmp_path, ring, tp=2, pp=2, steps=[10])
    assert [one[:2] for one in world4.run(_load, tmp_path, ring, 2, 2)] == [(10, True)] * 4


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_of_a_damaged_file_the_copy_is_used(world4: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world4.run(_save, tmp_path, PAIRS, tp=2, pp=2, steps=[5])
    files = {node: sorted((tmp_path / node).rglob("*.distcp")) for node in "ab"}
    _flip(files["a"][0])
    _flip(files["b"][3])
    assert [one[:2] for one in world4.run(_load, tmp_path, PAIRS, 2, 2)] == [(5, True)] * 4
    assert f"{files['a'][0]} is damaged" in capfd.readouterr().err
    _flip(files["b"][0])
    assert world4.run(_load, tmp_path, PAIRS, 2, 2) == [None] * 4
    said = capfd.readouterr().err
    assert said.count("of step 5 in memory cannot be used: 1 of 4 files are lost or damaged: __0_0.distcp") == 1


def test_what_another_job_has_left_is_removed(world4: World, tmp_path: Path) -> None:
    world4.run(_save, tmp_path, PAIRS, tp=2, pp=2, steps=[5], token="earlier")
    assert world4.run(_load, tmp_path, PAIRS, tp=2, pp=2, token="job") == [None] * 4
    assert not list(tmp_path.rglob("step_*"))


def test_older_and_unwanted_ones_are_not_loaded(world4: World, tmp_path: Path) -> None:
    world4.run(_save, tmp_path, PAIRS, tp=2, pp=2, steps=[5])
    assert world4.run(_load, tmp_path, PAIRS, tp=2, pp=2, token="job", at_least=6) == [None] * 4
    assert world4.run(_load, tmp_path, PAIRS, tp=2, pp=2, token="job", at_least=5, unwanted="5") == [None] * 4
    assert world4.run(_load, tmp_path, PAIRS, tp=2, pp=2, token="job", at_least=5)[0][:2] == (5, True)


def _check_space(folder: Path, free: int) -> str:
    memory = _memory(folder, PAIRS)
    module._free_bytes = lambda path: free if path.parent.parent.name == "b" else 1 << 40
    try:
        return str(memory.check_space([(1 << 19) - 2048] * 2))
    except ValueError as error:
        return str(error)


def test_too_little_memory_is_refused(world4: World, tmp_path: Path) -> None:
    """2 checkpoints · 4 ranks, their own node's and the other one's · 1 MiB."""
    assert world4.run(_check_space, tmp_path, 8 << 20) == [str(8 << 20)] * 4
    refused = world4.run(_check_space, tmp_path, (8 << 20) - 1)
    assert len(set(refused)) == 1
    assert f"{tmp_path / 'b'} on " in refused[0]
    assert "has 8 MiB of free memory, but 2 checkpoints" in refused[0]


def test_free_bytes_of_memory_and_disk(tmp_path: Path) -> None:
    assert 0 < module._free_bytes(tmp_path) <= shutil.disk_usage(tmp_path).free + (1 << 30)
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < module._free_bytes(Path("/dev/shm")) < 1024 * int(total.split()[1])


def _close(folder: Path) -> None:
    memory = _memory(folder, PAIRS)
    dist.barrier()
    memory.close()


def test_a_finished_job_gives_its_memory_back(world4: World, tmp_path: Path) -> None:
    world4.run(_save, tmp_path, PAIRS, tp=2, pp=2, steps=[5])
    world4.run(_close, tmp_path)
    assert [list((tmp_path / node).iterdir()) for node in "ab"] == [[], []]
