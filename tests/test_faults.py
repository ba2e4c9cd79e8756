"""Four real processes under the elastic agent, with each kind of fault: detected, named and recovered from."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fault_soak import EXPECTED, SAME_DATA, SMALL
from megafp8.training.metrics import read_metrics
from tests.quickstart_data import CONFIG, QuickstartData
from tests.test_agent import Launch, answers, launch  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 14
OPTIONS = [
    *SMALL,
    "training.global_batch_size=4",
    f"training.steps={STEPS}",
    "training.consistency_check_interval=2",
    "checkpoint.interval=4",
]
MORE = {
    "damage_checkpoint": ["checkpoint.interval=2"],  # there is an older one, however slow saves are
    "loss_spike": ["resilience.loss_spike={window: 4, sigmas: 1.5}"],
    "flip_gradient": ["resilience.recompute_interval=3"],
}
IN_MEMORY = "checkpoint.memory_interval=1", "checkpoint.memory_folder={folder}/memory/$LOCAL_RANK"
NOT_RESTARTED = ("nan_gradient", "loss_spike", "slow")


def start(launch: Launch, name: str, *options: str, restarts: int = 1, processes: int = 4):  # type: ignore[no-untyped-def]  # noqa: F811
    """A job of four processes, in a run folder `name`."""
    command = ["bash", "launch/single_node.sh", str(CONFIG), *launch.data.overrides, *OPTIONS, *options]
    command += [f"run_dir={launch.folder}", f"name={name}"]
    return launch.start(name, command, NPROC_PER_NODE=str(processes), MAX_RESTARTS=str(restarts))


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, quickstart_data: QuickstartData) -> Iterator[Path]:
    """The run folder of a run without faults."""
    job = Launch(tmp_path_factory.mktemp("undisturbed"), quickstart_data)
    try:
        assert start(job, "whole").wait(300) == 0, job.nodes[0].said()
        yield job.folder / "whole"
    finally:
        job.nodes[0].kill()


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_fault_is_named_and_recovered_from(launch: Launch, undisturbed: Path, kind: str) -> None:  # noqa: F811
    fault = {"kind": kind, "rank": 2, "step": 9, "seconds": 1.0, "steps": 4}
    ranks = (2, 0, 1, 3) if kind == "loss_spike" else (2,)  # the loss is a mean over ranks
    faults = json.dumps([{**fault, "rank": rank} for rank in ranks])
    more = [option.format(folder=launch.folder) for option in IN_MEMORY] if kind == "lose_memory" else []
    more += ["checkpoint.interval=0"] if kind == "lose_memory" else MORE.get(kind, [])
    node = start(launch, "fault", f"resilience.inject={faults}", *more)
    marker = launch.folder / "fault" / "faults" / "0.json"
    pattern = re.compile(EXPECTED[kind].format(**fault))
    launch.wait_for("the fault", marker.exists, 300)
    launch.wait_for("its message", lambda: bool(pattern.search(node.said())), 300)
    seconds = time.time() - json.loads(marker.read_text())["time"]
    assert node.wait(300) == 0, node.said()
    print(f"{kind}: named after {seconds:.1f} s")
    assert ("restarting, 1 left" in node.said()) == (kind not in NOT_RESTARTED), node.said()
    found, expected = losses(launch.folder / "fault"), losses(undisturbed)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert (found == expected) == (kind in SAME_DATA), node.said()
    if kind == "lose_memory":
        assert re.search(r"resumed from step [678], in memory", node.said())  # the save of 8 may not have been done
        assert not list((launch.folder / "memory").rglob("step_*"))
    if kind in ("stop", "hang", "leave_out_collective"):
        (folder,) = (launch.folder / "fault" / "hangs").glob("*")
        stacks = sorted(folder.glob("*.stacks.txt"))
        assert len(stacks) == (3 if kind == "stop" else 4)
        assert all("thread" in path.read_text() for path in stacks)
        assert pattern.search((launch.folder / "fault" / "log.txt").read_text())


def test_a_hang_that_repeats_ends_the_job(launch: Launch) -> None:  # noqa: F811
    """With exit code 3, once no restarts are left."""
    node = start(launch, "fault", "resilience.inject=[{kind: hang, rank: 1, step: 3}]", restarts=0)
    assert node.wait(300) == 3, node.said()
    assert node.said().splitlines()[-1].startswith("stacks of the ranks that could write them: ")


@pytest.mark.parametrize("lost", ["one node", "both memories"])
def test_a_node_is_lost_with_its_memory(launch: Launch, undisturbed: Path, lost: str) -> None:  # noqa: F811
    """Two nodes of two ranks go on from the copy on the other node; without it, from disk."""
    slow = "resilience.inject=[{kind: slow, rank: 0, step: 1, seconds: 0.5, steps: 14}]"
    memory = launch.folder / "memory"
    options = [*OPTIONS, slow, "checkpoint.interval=7", "checkpoint.memory_interval=2"]
    options += [f"checkpoint.memory_folder={memory}/$NODE", f"run_dir={launch.folder}", "name=parts"]
    command = ["bash", "launch/multi_node.sh", str(CONFIG), *launch.data.overrides, *options]
    where = {"NNODES": "2", "HEAD_NODE": "localhost", "HEAD_PORT": launch.port, "RDZV_ID": launch.word}

    def node(name: str):  # type: ignore[no-untyped-def]
        return launch.start(name, command, NPROC_PER_NODE="2", NODE=name, **where)

    def has(name: str, step: int) -> bool:
        return bool(list((memory / name).glob(f"*/*/step_{step:08d}")))

    nodes = [node("head")]
    launch.wait_for("the head's store", lambda: answers(launch.port))
    nodes.append(node("other"))
    launch.wait_for("step 10 in memory", lambda: has("head", 10) and has("other", 10))
    nodes[1].kill()
    shutil.rmtree(memory / "other")
    if lost == "both memories":
        shutil.rmtree(memory / "head")
    nodes[1] = node("other")
    assert [one.wait(300) for one in nodes] == [0, 0], "\n".join(one.said() for one in nodes)
    said = "".join(one.said() for one in nodes)
    resumed = re.findall(r"resumed from step .*", said)
    expected = {
        "one node": [f"resumed from step {step}, in memory" for step in (10, 12)],
        "both memories": ["resumed from step 7, on disk: memory has no complete newer checkpoint"],
    }
    assert len(resumed) == 1
    assert resumed[0] in expected[lost], said
    found = losses(launch.folder / "parts")
    assert found == losses(undisturbed)
    assert not list(memory.rglob("step_*"))


def test_other_numbers_of_ranks_continue_the_run(launch: Launch) -> None:  # noqa: F811
    """4, 3 and 4 data-parallel ranks, with the global batch and the samples of one run on 4."""
    batch = "training.global_batch_size=12"
    assert start(launch, "whole", batch).wait(300) == 0
    for processes, stop in ((4, 4), (3, 9), (4, STEPS)):
        node = start(launch, "parts", batch, f"training.stop_after={stop}", processes=processes)
        assert node.wait(300) == 0, node.said()
    whole, parts = (read_metrics(launch.folder / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [r["consumed_samples"] for r in parts] == [r["consumed_samples"] for r in whole]
    assert [r["loss"] for r in parts[:4]] == [r["loss"] for r in whole[:4]]
    assert [r["loss"] for r in parts] == pytest.approx([r["loss"] for r in whole], rel=1e-5)


def test_a_node_leaves_and_returns(launch: Launch) -> None:  # noqa: F811
    """With 3 to 4 nodes the others go on without it, on 3 ranks, and with it again when it is back."""
    slow = "resilience.inject=[{kind: slow, rank: 0, step: 1, seconds: 0.3, steps: 100000}]"
    options = [*OPTIONS, "training.global_batch_size=12", "training.steps=1000000", "resilience.straggler_interval=0"]
    command = [*launch.data.overrides, *options, slow, f"run_dir={launch.folder}"]
    where = {"NNODES": "3:4", "HEAD_NODE": "localhost", "HEAD_PORT": launch.port, "RDZV_ID": launch.word}

    def node(name: str):  # type: ignore[no-untyped-def]
        script = ["bash", "launch/multi_node.sh", str(CONFIG), *command, "name=parts"]
        return launch.start(name, script, NPROC_PER_NODE="1", **where)

    def ranks() -> list[int]:
        path = launch.folder / "parts" / "launches.jsonl"
        return [json.loads(line)["ranks"] for line in path.read_text().splitlines()] if path.exists() else []

    def steps() -> int:
        path = launch.folder / "parts" / "metrics.jsonl"
        return len(read_metrics(path)) if path.exists() else 0

    def wait_for_steps(number: int) -> None:
        launch.wait_for(f"{number} ranks", lambda: ranks()[-1:] == [number])
        before = steps()
        launch.wait_for("steps", lambda: steps() > before + 5)

    nodes = [node("head")]
    launch.wait_for("the head's store", lambda: answers(launch.port))
    nodes += [node(f"node{i}") for i in (1, 2, 3)]
    wait_for_steps(4)
    nodes[3].kill()
    wait_for_steps(3)
    nodes[3] = node("node3")
    wait_for_steps(4)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [one.wait(300) for one in nodes] == [0, 0, 0, 0], "\n".join(one.said() for one in nodes)
    parts = losses(launch.folder / "parts")
    whole = ["training.global_batch_size=12", "training.steps=1000000", f"training.stop_after={len(parts)}"]
    assert start(launch, "whole", *whole).wait(300) == 0
    assert [loss for _, loss in parts] == pytest.approx([loss for _, loss in losses(launch.folder / "whole")], rel=1e-4)
