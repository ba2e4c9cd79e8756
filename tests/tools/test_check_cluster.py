"""tools/check_cluster.py: real gloo ranks, with faults injected into the answers of one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.training import check_cluster, machine
from megafp8.training.check_cluster import Facts, Probe, Thresholds
from megafp8.training.errors import NO_RESTART
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, ROOT, QuickstartData
from tests.world import World
from tools import check_cluster as command

PASSES = ["--device", "cpu", "--mebibytes", "0.25", "--warn-below", "0.001", "--fail-below", "0.0001"]


class Injected(Probe):
    """The answers of this machine, and on the last rank the given ones."""

    def __init__(self, device: torch.device, answers: dict[str, Any]) -> None:
        super().__init__(device)
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        self.answers = answers if last else {}

    def versions(self) -> dict[str, str]:
        return super().versions() | self.answers.get("versions", {})

    def limits(self) -> dict[str, int]:
        healthy = {"open files": 1 << 20, "/dev/shm": 1 << 33}
        return super().limits() | healthy | self.answers.get("limits", {})

    def gpu(self) -> dict[str, str]:
        return self.answers.get("gpu", {})

    def now(self) -> float:
        return super().now() + self.answers.get("clock", 0.0)

    def folder(self, path: Path) -> Path:
        return Path(self.answers.get("folder", path))

    def matmul_rate(self) -> float:
        return 1e9 * self.answers.get("speed", 1.0)


def _check(argv: Sequence[str], answers: dict[str, Any], nodes: int) -> tuple[list[tuple[str, str, str]], str]:
    """What rank 0 found, and on all ranks the error that ends them."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, node = rank % (world // nodes), rank // (world // nodes)
    os.environ |= {"LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
    check_cluster.SEEN_FAIL = 0.5
    found: list[tuple[str, str, str]] = []
    report = check_cluster.report
    check_cluster.report = lambda findings: found.extend(map(vars_of, findings)) or report(findings)  # type: ignore[func-returns-value]
    try:
        check_cluster.run(command.parse_arguments([*PASSES, *argv]), lambda device: Injected(device, answers))
    except check_cluster.ClusterFault as error:
        return found, str(error)
    finally:
        check_cluster.report = report
    return found, ""


def vars_of(finding: check_cluster.Finding) -> tuple[str, str, str]:
    return finding.check, finding.status, finding.text


def faults(
    world: World, *argv: str, nodes: int = 2, ranks: int = 4, **answers: Any
) -> tuple[list[tuple[str, str, str]], str]:
    """What did not pass, and the message of all ranks."""
    results = world.run(_check, argv, answers, nodes, ranks=ranks)
    (message,) = {message for _, message in results}
    assert all(found == [] for found, _ in results[1:])
    assert results[0][0]
    return [finding for finding in results[0][0] if finding[1] != "pass"], message


@pytest.mark.slow
def test_a_healthy_cluster(world4: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """With a config: its data is read, its run's folder is written."""
    overrides = [*quickstart_data.overrides, f"run_dir={tmp_path}", "parallel.tensor=2", "parallel.pipeline=2"]
    (found, message), *_ = world4.run(_check, ["--config", str(CONFIG), *overrides], {}, 2)
    assert message == ""
    assert {status for _, status, _ in found} == {"pass"}
    assert [name for name, _, _ in found] == [
        *("versions", "environment", "GPUs", "limits", "ports", "config", "GEMMs", "clocks", "file system"),
        *("all-reduce within nodes", "all-gather within nodes", "all-reduce across nodes", "all-gather across nodes"),
        *("all-reduce of all", "all-gather of all", "links within nodes", "links across nodes"),
    ]
    assert not list(tmp_path.rglob(".check-cluster-*"))


def test_what_to_run_next() -> None:
    arguments = command.parse_arguments(["--config", "my.yaml", "data.train=[a b]"])
    assert check_cluster.proof_command(arguments, "cuda") == "megafp8 prove my.yaml 'data.train=[a b]' --device cuda"


FAULTS = {
    "version": ({"versions": {"torch": "1.0"}}, "versions", "fail", "torch is 1.0 on rank 3 on "),
    "open files": ({"limits": {"open files": 1024}}, "limits", "fail", "1024 open files of rank 3 on "),
    "shared memory": ({"limits": {"/dev/shm": 1 << 26}}, "limits", "warn", "/dev/shm has 64 MiB free for rank 3"),
    "slow GPU": ({"speed": 1e-5}, "GEMMs", "fail", "rank 3 on "),
    "ECC": ({"gpu": {"driver": "1", "ECC errors": "3"}}, "GPUs", "fail", "GPU 1 of "),
}


@pytest.mark.parametrize("name", slow_but(FAULTS))
def test_one_rank_differs(world4: World, name: str) -> None:
    answers, check, status, text = FAULTS[name]
    found, message = faults(world4, **answers)
    (finding,) = [finding for finding in found if finding[0] == check]
    assert finding[1] == status
    assert text in finding[2]
    assert (text in message) == (status == "fail")
    assert "(node 1)" in finding[2]  # both nodes are this machine


@pytest.mark.parametrize(
    ("seconds", "status"), slow_but([(60.0, "fail"), (-1.0, "warn"), (0.1, "pass")], (-1.0, "warn"))
)
def test_a_clock_is_off(world2: World, seconds: float, status: str) -> None:
    found, _ = faults(world2, ranks=2, clock=seconds)
    of_clocks = [finding for finding in found if finding[0] == "clocks"]  # on a busy machine ranks differ in speed too
    assert [finding[1] for finding in of_clocks] == [status] * (status != "pass")
    if of_clocks:
        text = of_clocks[0][2]
        assert ("ahead of" if seconds > 0 else "behind") in text
        (measured,) = re.findall(r"[0-9]+\.[0-9]+", text)
        assert float(measured) == pytest.approx(abs(seconds), abs=0.3)


def test_a_folder_is_not_shared(world2: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    found, message = faults(world2, "--folder", str(tmp_path), ranks=2, folder=str(tmp_path / "other"))
    assert [finding[1] for finding in found if finding[0] == "file system"] == ["fail"]
    assert f"{tmp_path} is not shared: rank 1 on " in message
    assert not list(tmp_path.rglob(".check-cluster-*"))


def _check_with_data(argv: Sequence[str], data: Sequence[str]) -> Any:
    """Rank i has the data set `data[i]`."""
    return _check([*argv, f"data.train=[{data[int(os.environ['RANK'])]}]"], {}, 2)


def test_a_data_file_is_missing_on_one_node(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    others = [key for key in quickstart_data.overrides if not key.startswith("data.train=")]
    argv = ["--config", str(CONFIG), *others, f"run_dir={tmp_path}", "parallel.tensor=2", "parallel.pipeline=1"]
    data = [str(quickstart_data.folder / "stdlib"), str(tmp_path / "absent")]
    results = world2.run(_check_with_data, argv, data)
    (message,) = {message for _, message in results}
    assert message.startswith("1 check has failed:\n  rank 1 on ")
    assert data[1] in message


# --- judging, without ranks -------------------------------------------------------------------------------------------


def facts(count: int, hosts: int, **changes: Any) -> list[Facts]:
    per = count // hosts
    return [
        Facts(i, i % per, node=i // per, host=f"host{i // per}", versions={"torch": "2"}, environment={}, **changes)
        for i in range(count)
    ]


def test_links_are_disjoint_and_make_a_ring() -> None:
    assert check_cluster.link_rounds(1) == []
    assert check_cluster.link_rounds(2) == [[(0, 1)]]
    for count in range(3, 20):
        rounds = check_cluster.link_rounds(count)
        for pairs in rounds:
            members = [i for pair in pairs for i in pair]
            assert len(members) == len(set(members))
        edges = {frozenset(pair) for pairs in rounds for pair in pairs}
        assert edges == {frozenset((i, (i + 1) % count)) for i in range(count)}
        assert len(rounds) == 2 + count % 2


def test_the_slowest_is_named() -> None:
    rates = {"a": 100.0, "b": 98.0, "c": 60.0, "d": 85.0, "e": 101.0}
    found = check_cluster.judge_rates("links", rates, "GB/s", 1.0, Thresholds(0.9, 0.7))
    assert [(f.status, f.text) for f in found] == [
        ("fail", "c: 60 GB/s, 61% of the median, 98"),
        ("warn", "d: 85 GB/s, 87% of the median, 98"),
    ]
    (passed,) = check_cluster.judge_rates("links", rates, "GB/s", 1.0, Thresholds(0.5, 0.3))
    assert passed.text == "median 98 GB/s, slowest 60 (c)"


def test_where() -> None:
    some = facts(16, 2)
    assert check_cluster.where(some) == "ranks 0-15 on host0, host1"
    assert check_cluster.where([some[3]]) == "rank 3 on host0"
    assert check_cluster.where([some[1], some[2], some[9]]) == "ranks 1-2, 9 on host0, host1"


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"gpu": {"ECC errors": "2"}}, "fail", "2 uncorrectable ECC errors"),
        ({"gpu": {"ECC errors": "[N/A]"}}, "pass", ""),
        ({"gpu": {"row remapping failed": "1"}}, "fail", "must be replaced"),
        ({"gpu": {"row remapping pending": "1"}}, "warn", "reset"),
        ({"gpu": {"hardware slowdown": "Active", "temperature": "91"}}, "warn", "hardware slowdown at 91 °C"),
        ({"gpu": {"hardware slowdown": "Not Active"}}, "pass", ""),
        ({"free_memory": 0.5}, "fail", "50% of its memory is in use"),
        ({"gpu_error": "no nvidia-smi"}, "warn", "no nvidia-smi"),
        ({"xid": "NVRM: Xid (PCI:0000:1b:00): 79"}, "warn", "Xid (PCI:0000:1b:00): 79"),
    ],
)
def test_gpus(change: dict[str, Any], status: str, text: str) -> None:
    (found,) = check_cluster.judge_gpus(facts(1, 1, **change))
    assert found.status == status
    assert text in found.text


def test_nvidia_smi_is_parsed() -> None:
    found = machine.parse_gpu("580.65.06, 0, 0, 0, Not Active, Not Active, 34\n")
    assert found["driver"] == "580.65.06"
    assert found["temperature"] == "34"
    with pytest.raises(ValueError, match=r"nvidia-smi answers 'Field .*'"):
        machine.parse_gpu('Field "x" is not a valid field to query.')


def test_locked_memory_and_ports() -> None:
    ports = {"mlx5_0:1": "4: ACTIVE, 400 Gb/sec (4X NDR)"}
    found = check_cluster.judge_limits(facts(2, 2, ports=ports, limits={"locked memory": 65536}))
    assert [f.status for f in found] == ["fail", "pass"]
    assert "locked memory of ranks 0-1 on host0, host1 is limited to 64 KiB" in found[0].text
    down = [
        *facts(1, 1, ports=ports),
        Facts(1, 0, node=1, host="host1", versions={}, environment={}, ports={"mlx5_0:1": "1: DOWN, 10 Gb/sec"}),
    ]
    assert [f.status for f in check_cluster.judge_limits(down)] == ["pass", "warn", "warn"]


def test_one_process_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(PASSES)
    printed = capsys.readouterr().out.splitlines()
    assert code in (0, NO_RESTART)  # by this machine's own limits
    assert printed[0].startswith("pass  versions ")
    assert printed[-1].split()[1::2] == ["pass,", "warn,", "fail"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("files", "code"), [(8192, 0), (512, NO_RESTART)])
def test_through_the_agent(files: int, code: int) -> None:
    """The table on stdout; the faults are the last lines on stderr, and are not restarted."""
    agent = f"{sys.executable} -m launch.agent --standalone --nproc-per-node 2 --max-restarts 2"
    command = f"ulimit -n {files} && exec {agent} tools/check_cluster.py {' '.join(PASSES)}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("pass  versions ") == 1
    limits = f"{files} open files of ranks 0-1 on "
    last = (done.stderr.splitlines() or [""])[-1]
    assert [limits in text for text in (done.stdout, last)] == [bool(code)] * 2


@pytest.mark.parametrize("argv", [["a.b=1"], ["--device", "tpu"]])
def test_wrong_arguments(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse_arguments(argv)
    assert ended.value.code == 2
