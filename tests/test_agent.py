"""Real agents (`launch/agent.py`) through the launch scripts: killed ranks and nodes, errors, clean stops."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from launch.agent import can_listen
from megafp8.checkpoint import complete_checkpoints
from megafp8.training.metrics import read_metrics
from tests.marks import slow_but
from tests.ports import free_port
from tests.quickstart_data import CONFIG, ROOT, QuickstartData

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "training.seq_length=16",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.eval_interval=0",
    "optimizer.warmup_steps=1",
    "checkpoint.interval=5",
    "fp8.recipe=none",
]


def descendants(pid: int) -> list[int]:
    """All descendants of `pid`: ranks have their own sessions, so a process group is not enough."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [member for child in children for member in (int(child), *descendants(int(child)))]


class Node:
    """An agent and its ranks, with their output in a file."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        path["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | path | {"OMP_NUM_THREADS": "1"} | environment,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )

    def rank_pids(self) -> list[int]:
        """The ranks, by local rank."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                for variable in variables:
                    if variable.startswith(b"LOCAL_RANK=") and b"pretrain" in words:
                        found.setdefault(int(variable[11:]), pid)
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """The agent and its ranks, as when a machine loses power."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.rank_pids():
                os.kill(pid, signal.SIGUSR2)  # prints where it waits
            time.sleep(2)
            raise AssertionError(f"{self.log.name} hangs; it printed:\n{self.log.read_text()}") from None

    def said(self) -> str:
        return self.log.read_text()


class Launch:
    """Starts nodes that work in one run folder."""

    def __init__(self, folder: Path, data: QuickstartData) -> None:
        self.folder, self.data = folder, data
        self.nodes: list[Node] = []
        self.port, self.word = str(free_port()), folder.name

    def options(self, *more: str) -> list[str]:
        return [*SMALL, *self.data.overrides, f"run_dir={self.folder}", *more]

    def start(self, name: str, command: list[str], **environment: str) -> Node:
        self.nodes.append(Node(command, self.folder / f"{name}.log", **environment))
        return self.nodes[-1]

    def single(self, processes: int, *options: str, **environment: str) -> Node:
        command = ["bash", "launch/single_node.sh", str(CONFIG), *self.options(*options)]
        return self.start("single", command, NPROC_PER_NODE=str(processes), **environment)

    def multi(self, name: str, processes: int, *options: str, inside: Sequence[str] = (), **environment: str) -> Node:
        """`inside`: a command that runs another one elsewhere, such as in a network namespace."""
        command = [*inside, "bash", "launch/multi_node.sh", str(CONFIG), *self.options(*options)]
        where = {"NNODES": "2", "HEAD_NODE": "localhost", "HEAD_PORT": self.port, "RDZV_ID": self.word}
        return self.start(name, command, NPROC_PER_NODE=str(processes), **where | environment)

    @property
    def metrics(self) -> Path:
        return self.folder / "quickstart" / "metrics.jsonl"

    def steps(self) -> list[int]:
        """Steps in metrics.jsonl, in the order in which they were done."""
        return [int(line.split('"step": ')[1].split(",")[0]) for line in self.metrics.read_text().splitlines()]

    def curve(self) -> list[tuple[int, float]]:
        return [(r["step"], r["loss"]) for r in read_metrics(self.metrics)]

    def saved(self) -> list[int]:
        return [step for step, _ in complete_checkpoints(self.folder / "quickstart" / "checkpoints")]

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            printed = "\n".join(f"--- {node.log.name}\n{node.said()}" for node in self.nodes)
            assert time.monotonic() < deadline, f"{what} did not come; printed:\n{printed}"
            assert any(node.process.poll() is None for node in self.nodes), f"all ended before {what}:\n{printed}"
            time.sleep(0.1)

    def wait_for_save(self, step: int) -> None:
        self.wait_for(f"checkpoint {step}", lambda: any(saved >= step for saved in self.saved()))


@pytest.fixture
def launch(tmp_path: Path, quickstart_data: QuickstartData) -> Iterator[Launch]:
    started = Launch(tmp_path, quickstart_data)
    yield started
    for node in started.nodes:
        node.kill()


FOUR = ["parallel.tensor=2", "parallel.pipeline=2"]
THREE = ["parallel.tensor=1", "parallel.pipeline=3", "model.num_layers=3"]
ONE_RANK = ["parallel.tensor=1", "parallel.pipeline=1"]
FOREVER = "training.steps=1000000"


def answers(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", int(port))) == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", slow_but(["rank", "rank of the head", "node", "head"]))
def test_two_nodes_recover_and_stop(launch: Launch, lost: str) -> None:
    """From kill -9 of a rank, and of a whole node that is then started again. SIGTERM to one node then ends both."""
    ranks, layout = (1, THREE) if lost == "rank" else (2, FOUR)  # the head has the rendezvous store
    options = [*layout, FOREVER]
    stopped = 143 if lost == "rank" else 0
    environment = {"STOPPED_EXIT_CODE": "143"} if stopped else {}
    head = launch.multi("head", ranks, *options, **environment)
    launch.wait_for("the head's store", lambda: answers(launch.port))
    other = launch.multi("other", 2, *options, **environment)
    launch.wait_for_save(5)
    if lost == "rank":
        os.kill(other.rank_pids()[1], signal.SIGKILL)
    elif lost == "rank of the head":
        os.kill(head.rank_pids()[0], signal.SIGKILL)
    elif lost == "node":
        other.kill()
        other = launch.multi("other", 2, *options)
    else:
        head.kill()
        head = launch.multi("head", 2, *options)
    launch.wait_for("a resume", lambda: any("resumed from step" in node.said() for node in launch.nodes))
    before = len(launch.steps())
    launch.wait_for("new steps", lambda: len(launch.steps()) > before + 1)
    if lost == "rank":
        assert "was ended by SIGKILL" in other.said()
        assert "restarting, 3 left" in other.said()
        assert "torch/distributed/elastic" not in head.said() + other.said(), "messages around the one that says why"

    other.process.send_signal(signal.SIGTERM)
    codes = [node.wait(180) for node in (head, other)]
    assert codes == [stopped, stopped], f"--- head\n{head.said()}\n--- other\n{other.said()}"
    assert any("stopped on request after step" in node.said() for node in (head, other))
    assert launch.saved()[-1] == launch.curve()[-1][0]
    assert "Traceback" not in head.said() + other.said()


def test_the_head_knows_its_address() -> None:
    """By the address itself, not by what the host name resolves to; but not where another agent listens already."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        other.listen()
        assert not can_listen(endpoint)
    assert can_listen(endpoint)
    assert can_listen("localhost:0")
    assert not can_listen("192.0.2.1:29400")  # of no machine: RFC 5737
    assert not can_listen("no-such-host.invalid:29400")


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Commands that run another one in a network of its own: two network namespaces, joined by one link.

    The machine's own network is not reachable from them, and its host name is the loopback interface in both.
    """
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    names = [f"megafp8-{os.getpid()}-{i}" for i in range(2)]
    enter = [["ip", "netns", "exec", name] for name in names]
    link = [f"m{os.getpid()}x{i}" for i in range(2)]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", link[0], "type", "veth", "peer", "name", link[1]]]
    for i in range(2):
        commands += [["ip", "link", "set", link[i], "netns", names[i]]]
        commands += [[*enter[i], "ip", "link", "set", link[i], "name", "veth0"]]
        commands += [[*enter[i], "ip", "address", "add", f"10.83.7.{i + 1}/24", "dev", "veth0"]]
        commands += [[*enter[i], "ip", "link", "set", device, "up"] for device in ("veth0", "lo")]
    try:
        for command in commands:
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"no network namespaces here: {' '.join(command)} failed")
        yield enter
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [0, 1])
def test_two_networks_train_on_after_a_node_was_lost(launch: Launch, namespaces: list[list[str]], lost: int) -> None:
    """Tensor parallelism inside a node, the pipeline across: the losses are those of an undisturbed run."""
    options = [*FOUR, "training.steps=60"]
    where = {"HEAD_NODE": "10.83.7.1", "GLOO_SOCKET_IFNAME": "veth0"}

    def node(i: int) -> Node:
        return launch.multi(f"node{i}", 2, *options, inside=namespaces[i], LOCAL_ADDR=f"10.83.7.{i + 1}", **where)

    nodes = [node(0), node(1)]
    launch.wait_for_save(5)
    nodes[lost].kill()
    nodes[lost] = node(lost)
    assert [node.wait(300) for node in nodes] == [0, 0], "\n".join(node.said() for node in nodes)
    assert any("resumed from step" in node.said() for node in launch.nodes)
    disturbed = launch.curve()

    alone = launch.single(4, *options, "name=undisturbed")
    assert alone.wait(300) == 0, alone.said()
    records = read_metrics(launch.folder / "undisturbed" / "metrics.jsonl")
    assert disturbed == [(r["step"], r["loss"]) for r in records]
    assert [step for step, _ in disturbed] == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_wrong_config_is_not_restarted(launch: Launch, nodes: int) -> None:
    wrong = [*FOUR, "training.seq_length=127"]
    if nodes == 1:
        started = [launch.single(4, *wrong, MAX_RESTARTS="3")]
    else:
        started = [launch.multi(name, 2, *wrong) for name in ("head", "other")]
    for node in started:
        assert node.wait(120) == 2
        *_, first, last = node.said().splitlines()
        assert first.startswith("error: ")
        assert last.startswith("  training.seq_length = 127: sequence parallelism splits it")
        assert node.said().count("training.seq_length = 127") == 1


FAULT = """
import os, sys
import pretrain_gpt
from megafp8.data import DataError
from megafp8.training import job
one_step = job.Job._one_step
def fail(self):
    if self.step == 2 and os.environ["RANK"] == "1":
        raise {error}
    return one_step(self)
job.Job._one_step = fail
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("error", "code", "attempts"), [("DataError('stdlib.bin: token 600')", 2, 1), ("KeyError('unexpected')", 1, 2)]
)
def test_a_failure_of_one_rank_on_two_nodes(launch: Launch, error: str, code: int, attempts: int) -> None:
    """Both agents end with the message of the rank that failed, as the last thing they print."""
    script = launch.folder / "fault.py"
    script.write_text(FAULT.format(error=error))
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{launch.port}", "--rdzv-id", launch.word]
    agent = [sys.executable, "-m", "launch.agent", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"]
    options = launch.options("parallel.tensor=2", "parallel.pipeline=1", "training.steps=20", "checkpoint.interval=0")
    command = [*agent, *rendezvous, str(script), "--config", str(CONFIG), *options]
    nodes = [launch.start(name, command) for name in ("head", "other")]
    assert [node.wait(200) for node in nodes] == [code, code]
    said = [node.said() for node in nodes]
    last = "error: stdlib.bin: token 600" if code == 2 else "KeyError: 'unexpected'"
    assert [text.splitlines()[-1] for text in said] == [last, last]
    assert max(text.count(last) for text in said) == attempts


REPORT_GROUPS = """
import json, os, sys
from pathlib import Path
import pretrain_gpt
from megafp8.training import job
run = job.Job.run
def report(self):
    found = {"rank": self.parallel.rank, "node": os.environ["GROUP_RANK"]}
    found |= {name: getattr(self.parallel, name).ranks for name in ("fsdp_shard", "fsdp_replicate")}
    Path(sys.argv[0]).with_name(f"rank-{self.parallel.rank}.json").write_text(json.dumps(found))
    run(self)
job.Job.run = report
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_are_inside_a_node_and_replicas_across_two(launch: Launch) -> None:
    """Trained on two nodes, then resumed on one rank, which takes over the weights of all shards."""
    script = launch.folder / "report.py"
    script.write_text(REPORT_GROUPS)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{launch.port}", "--rdzv-id", launch.word]
    agent = [sys.executable, "-m", "launch.agent", "--nnodes", "2", "--nproc-per-node", "2"]
    hsdp = [*ONE_RANK, "parallel.fsdp=true", "parallel.fsdp_replicas=2"]
    options = launch.options(*hsdp, "training.global_batch_size=16", "training.stop_after=10")
    command = [*agent, *rendezvous, str(script), "--config", str(CONFIG), *options]
    nodes = [launch.start(name, command) for name in ("head", "other")]
    assert [node.wait(200) for node in nodes] == [0, 0], "\n".join(node.said() for node in nodes)
    found = [json.loads((launch.folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    node_of = [report["node"] for report in found]
    assert sorted(set(node_of)) == ["0", "1"]
    for report in found:
        shards, replicas = ([node_of[rank] for rank in report[name]] for name in ("fsdp_shard", "fsdp_replicate"))
        assert shards == [report["node"]] * 2
        assert sorted(replicas) == ["0", "1"]
    said = "".join(node.said() for node in nodes)
    assert "parallel.fsdp_replicas: 2 replicas of the shards, each on 2 ranks of one host" in said
    assert launch.saved() == [5, 10]
    assert launch.curve()[-1][1] < launch.curve()[0][1]
    alone = launch.single(1, *ONE_RANK, "training.global_batch_size=16", "training.stop_after=11")
    assert alone.wait(100) == 0, alone.said()
    assert [step for step, _ in launch.curve()] == [*range(1, 12)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_node_stops(launch: Launch, number: int) -> None:
    node = launch.single(2, "parallel.tensor=2", "parallel.pipeline=1", FOREVER)
    launch.wait_for_save(5)
    os.killpg(node.process.pid, number)
    assert node.wait(180) == 0
    assert "stopped on request after step" in node.said().splitlines()[-1]
    assert "Traceback" not in node.said()


# --- on GPUs ---------------------------------------------------------------------------------------------------------

ON_GPUS = [
    *("model.num_layers=8", "model.hidden_size=1024", "model.num_attention_heads=8", "model.num_query_groups=4"),
    *("model.ffn_hidden_size=2816", "training.seq_length=1024", "training.micro_batch_size=1", "fp8.recipe=delayed"),
    *("training.global_batch_size=8", "training.precision=bf16", "training.steps=12", "training.eval_interval=4"),
    *("training.eval_steps=1", "deterministic=true", "fp8.gemm_autotune=false", "fp8.report_interval=3"),
]
GPU_LAYOUTS = {
    "one": (1, ""),
    "experts": (1, "model.moe.num_experts=8 model.moe.top_k=2 model.moe.aux_loss=0.01 fp8.report_interval=0"),
    "experts of two": (2, "model.moe.num_experts=8 model.moe.top_k=2 parallel.expert=2 fp8.report_interval=0"),
    "tensor": (2, "parallel.tensor=2"),
    "1f1b": (2, "parallel.pipeline=2"),
    "zb-h1": (2, "parallel.pipeline=2 parallel.schedule=zb-h1"),
    "zb-v": (2, "parallel.pipeline=2 parallel.schedule=zb-v parallel.virtual_pipeline=2"),
    "zero": (2, "parallel.zero=1"),
    "fsdp": (2, "parallel.fsdp=true fp8.param_gather=true"),
    "context": (2, "parallel.context=2"),
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_a_job_replays_its_steps(launch: Launch, layout: str) -> None:
    """With checkpoints, evaluations and FP8 reports between them, and data from the loader, as no benchmark has.

    Next to seven other test processes on the GPU and 16 cores, a run takes 35 s, or 80 s with experts.
    """
    ranks, keys = GPU_LAYOUTS[layout]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found = []
    for graphs in ("false", "true"):
        options = [*ONE_RANK, *ON_GPUS, *keys.split(), f"training.cuda_graphs={graphs}", f"name={graphs}"]
        node = launch.single(ranks, *options)
        assert node.wait(240) == 0, node.said()
        records = read_metrics(launch.folder / graphs / "metrics.jsonl")
        found.append([(r["step"], r["loss"], r["grad_norm"], r["validation_loss"]) for r in records])
        assert ("CUDA graphs: step recorded" in node.said()) == (graphs == "true")
    assert len(found[0]) == 12
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_node_of_one_gpu_is_lost_with_its_memory(launch: Launch) -> None:
    """The job continues from the copy on the other node, bit for bit; the flight recorder has NCCL's collectives."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    slow = "resilience.inject=[{kind: slow, rank: 0, step: 1, seconds: 0.5, steps: 14}]"  # until the node is killed
    options = [*ONE_RANK, *ON_GPUS, "parallel.zero=1", "training.steps=14"]
    whole = launch.single(2, *options, "name=whole")
    memory = launch.folder / "memory"
    options += [slow, "checkpoint.interval=7", "checkpoint.memory_interval=2"]
    options += [f"checkpoint.memory_folder={memory}/$NODE", "profile.steps=[2, 3]"]
    options += ["profile.ranks=[0, 1]", "profile.record=[trace, memory, collectives]"]

    def node(name: str) -> Node:
        return launch.multi(name, 1, *options, NODE=name, CUDA_VISIBLE_DEVICES=str(int(name == "other")))

    def has(name: str, step: int) -> bool:
        return bool(list((memory / name).glob(f"*/*/step_{step:08d}")))

    head = node("head")
    launch.wait_for("the head's store", lambda: answers(launch.port))
    other = node("other")
    launch.wait_for("step 10 in memory", lambda: has("head", 10) and has("other", 10))
    other.kill()
    shutil.rmtree(memory / "other")
    other = node("other")
    assert [one.wait(150) for one in (head, other, whole)] == [0] * 3, "\n".join(one.said() for one in launch.nodes)
    said = "".join(one.said() for one in launch.nodes)
    assert re.findall(r"resumed from step .*", said) in ([f"resumed from step {n}, in memory"] for n in (10, 12)), said
    curves = [read_metrics(launch.folder / name / "metrics.jsonl") for name in ("whole", "quickstart")]
    assert len({tuple((r["step"], r["loss"], r["grad_norm"]) for r in curve) for curve in curves}) == 1
    profile = launch.folder / "quickstart" / "profile" / "steps-2-3"
    for rank in range(2):
        entries = pickle.loads((profile / f"collectives_rank_{rank:05d}").read_bytes())["entries"]
        assert any(entry["profiling_name"].startswith("nccl:") for entry in entries)
