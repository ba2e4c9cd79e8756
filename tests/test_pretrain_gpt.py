"""The job from the command line: errors with their messages and exit codes, and output.

Each error is checked in a process that is configured as one rank of a job whose other ranks do not exist: if it tried
to build a process group, it would hang.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import pretrain_gpt
from megafp8.parallel.pipeline.schedules import Action, Kind, Schedule, StagePlacement
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, ROOT, QuickstartData


@pytest.fixture
def data(quickstart_data: QuickstartData, tmp_path: Path) -> QuickstartData:
    """A copy to damage."""
    for file in ("stdlib.bin", "stdlib.idx", "stdlib.json", "tokenizer.model"):
        shutil.copy(quickstart_data.folder / file, tmp_path / file)
    return QuickstartData(tmp_path)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run pretrain_gpt.py's main as one rank of `world_size`; give back exit code and stderr."""

    def run(data: QuickstartData, *overrides: str, world_size: int = 4) -> tuple[int, str]:
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        arguments = ["--config", str(CONFIG), f"run_dir={tmp_path / 'runs'}", *data.overrides, *overrides]
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
        code = pretrain_gpt.main()
        assert not dist.is_initialized()
        assert not (tmp_path / "runs").exists(), "a refused run left something behind"
        return code, capsys.readouterr().err

    return run


def backwards_in_a_ring(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """A schedule for two ranks that deadlocks."""
    pairs = [[Action(kind, i) for i in range(num_microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]]
    return [*pairs, [Action(kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(num_microbatches)]]


MISTAKES: dict[str, tuple[list[str], int, str]] = {  # overrides, number of ranks, part of the message
    "unknown key": (["training.stepz=3"], 4, "training.stepz = 3: there is no such key; did you mean training.steps?"),
    "wrong type": (["training.steps=many"], 4, "training.steps = 'many': input should be a valid integer"),
    "an option of another recipe": (["fp8.recipe=rowwise", "fp8.margin=2"], 4,
        "fp8.margin = 2: fp8.recipe rowwise has no such option; delayed, static have it; leave it out (its default is "
        "0), or try fp8.recipe=delayed"),
    "a size that no machine has": (["model.vocab_size=3e9"], 4,
        "model.vocab_size = 3000000000: by formula a rank needs 4,336.3 GiB (moments 2,145.8 GiB, weights 1,072.9 GiB, "
        "gradients 1,072.9 GiB), and this host has for it"),
    "a missing checkpoint to start from": (["checkpoint.init_from=/absent"], 4, "checkpoint.init_from = '/absent': "),
    "world size not divisible": ([], 3, "the world has 3 ranks, not a multiple of 4; start 4 processes"),
    "a stage with no layers": (["parallel.pipeline=8", "parallel.tensor=1"], 8,
        "parallel.pipeline = 8: a stage would have no layers: model.num_layers is 4; try 4 or less"),
    "an explicit stage with no layers": (["parallel.layers_per_stage=[0, 4]"], 4,
        "parallel.layers_per_stage = [0, 4]: stage 0 would have no layers; try [2, 2]"),
    "a schedule that cannot run": (["parallel.schedule=tests.test_pretrain_gpt:backwards_in_a_ring"], 4,
        "parallel.schedule = 'tests.test_pretrain_gpt:backwards_in_a_ring': schedule tests.test_pretrain_gpt:"
        "backwards_in_a_ring: rank 0, position 1, BACKWARD(0): deadlock: waits for BACKWARD(0) of rank 1"),
    "a missing schedule": (["parallel.schedule=absent.csv"], 4, "schedule absent.csv could not be read"),
    "sequence not divisible": (["training.seq_length=127"], 4,
        "training.seq_length = 127: sequence parallelism splits it into parallel.tensor (2) equal parts; try 128"),
    "global batch not divisible": (["training.global_batch_size=6"], 4,
        "training.global_batch_size = 6: not a multiple"),
    "no GPU": (["device=cuda"], 4, "device = 'cuda': torch sees no CUDA device here; try device=cpu"),
    "bad split": (["data.split=1,2,3,4"], 4, "data.split = '1,2,3,4'"),
    "no documents to validate on": (['data.split="100,0,0"'], 4, "has no validation documents"),
    "no tokenizer and no vocabulary": (["data.tokenizer=null", "model.vocab_size=null"], 4,
        "model.vocab_size = None: it is not given, and there is no data.tokenizer"),
    "a vocabulary smaller than the tokenizer": (["model.vocab_size=500"], 4,
        "model.vocab_size = 500: smaller than the 512 tokens of data.tokenizer"),
    "too little data": (["training.seq_length=1000000", "parallel.sequence_parallel=false"], 4,
        "few for one sample of training.seq_length + 1 = 1,000,001"),
    "a pattern that matches no layer": (['fp8.exclude=["layers.9.*"]'], 4, "'layers.9.*' matches no layer"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_the_config(start, data: QuickstartData, case: str) -> None:
    overrides, world_size, expected = MISTAKES[case]
    code, said = start(data, *overrides, world_size=world_size)
    assert code == 2
    assert expected in said


def _truncate(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _use_another_vocabulary(sidecar: Path) -> None:
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"tokenizer_fingerprint": "0" * 64}))


def _write_a_token_beyond_the_vocabulary(path: Path) -> None:
    """Megatron's data sets have no sidecar: the tokens themselves are read."""
    path.with_suffix(".json").unlink()
    with path.open("r+b") as file:
        file.write(struct.pack("<H", 600))


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("stdlib.bin", Path.unlink, "{path} is missing: its index promises"),
        ("stdlib.bin", lambda path: _truncate(path, 2), "{path} has {size:,} bytes, but its index promises {before:,}"),
        ("stdlib.bin", _write_a_token_beyond_the_vocabulary, "holds token 600, but model.vocab_size is 512"),
        ("stdlib.idx", lambda path: _truncate(path, 8), "{path} has .* truncated or damaged"),
        ("stdlib.json", _use_another_vocabulary, "the vocabularies differ"),
        ("tokenizer.model", Path.unlink, "tokenizer.model': no such file"),
    ],
)
def test_damaged_files(start, data: QuickstartData, name: str, damage: Callable[[Path], None], expected: str) -> None:
    path = data.folder / name
    before = path.stat().st_size
    damage(path)
    size = path.stat().st_size if path.exists() else 0
    code, said = start(data)
    assert code == 2
    first, *rest = expected.format(path=path, size=size, before=before).split(" .* ")
    assert first in said
    assert all(part in said for part in rest)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_through_torchrun_a_mistake_is_said_once_and_ends_the_job(data: QuickstartData, tmp_path: Path) -> None:
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*data.overrides, f"run_dir={tmp_path}", "parallel.pipeline=1", "training.seq_length=127"]
    done = run_python(*agent, str(ROOT / "pretrain_gpt.py"), "--config", str(CONFIG), *options)
    assert done.returncode != 0
    message = "training.seq_length = 127: sequence parallelism splits it"
    assert done.stderr.count(message) == 1
    assert message in done.stderr.strip().splitlines()[-2]  # before torchrun's closing rule


def dry_run(config: str, ranks: int, *overrides: str, code: int = 0) -> str:
    """What a dry run that ends with exit code `code` prints."""
    return dry_run_of([f"configs/{config}.yaml", "--world-size", str(ranks), *overrides], code)


def dry_run_of(arguments: list[str], code: int = 0) -> str:
    """What `pretrain_gpt.py --dry-run` prints, run in this process: it needs no group, and torch is loaded."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", "--dry-run", *arguments]),
        mock.patch.object(gc, "disable"),  # a dry run ends its process
    ):
        ended = pretrain_gpt.main()
    assert ended == code, said.getvalue()
    return said.getvalue()


@pytest.mark.slow
def test_dry_run_shows_the_memory_of_the_optimizer() -> None:
    """Llama 3.1 405B, stage 1: the matrices of 8 layers over 8 tensor-parallel ranks, and the norms whole."""
    numel = 8 * (3_187_671_040 // 8 + 2 * 16384)

    def columns(*options: str) -> list[str]:
        said = dry_run("llama3-405b", 1024, *options)
        (line,) = (line for line in said.splitlines() if line.startswith("    1    7-14 "))
        return line.split()[2:6]

    parameters, weights, gradients, optimizer = columns("parallel.zero=0")
    assert parameters == f"{numel:,}"
    assert (weights, gradients, optimizer) == tuple(f"{numel * n / 2**30:.2f}" for n in (2, 4, 12))
    assert columns("parallel.zero=1") == [parameters, weights, gradients, f"{numel * 12 / 8 / 2**30:.2f}"]
    assert columns("parallel.zero=1", "optimizer.moments_dtype=bf16")[3] == f"{numel * 8 / 8 / 2**30:.2f}"


def test_dry_run_of_a_v() -> None:
    said = dry_run("quickstart", 8, "parallel.schedule=zb-v", "parallel.virtual_pipeline=2")
    assert "schedule: zb-v, stages per rank: 2; simulated" in said
    stages = [line.split()[0::6] for line in said.splitlines() if ", chunk" in line]
    assert [(stage[0], stage[1]) for stage in stages] == [("0", "0-3,"), ("1", "4-7,"), ("2", "4-7,"), ("3", "0-3,")]
    assert "embedding " not in said.partition("groups of rank 0:")[2].partition("linear layers:")[0]


def test_dry_run_with_a_frozen_model(tmp_path: Path) -> None:
    """The reference of DPO has the weights of the model; a teacher that is not there is named."""

    packed = ["data.packing=best_fit", "data.reset_at_documents=true", "data.mask_eod_loss=true"]

    def columns(*options: str) -> dict[str, str]:
        said = dry_run("quickstart", 4, *packed, *options)
        table = said.partition("memory of a rank")[2].splitlines()
        names = [x.replace(" ", "_") for x in re.split("  +", table[1].strip())]
        return dict(zip(names, table[2].split()))

    live, precomputed = columns("data.dpo.reference=live"), columns("data.dpo.reference=precomputed")
    assert live["frozen"] == live["weights"] == precomputed["weights"]
    assert "frozen" not in precomputed
    said = dry_run("quickstart", 4, f"data.distillation.teacher={tmp_path / 'a'}")
    assert f"data.distillation.teacher = {tmp_path / 'a'}: no such folder; memory and times do not include it" in said


def test_dry_run_with_long_sequences() -> None:
    layout = ["parallel.tensor=4", "parallel.pipeline=1", "parallel.context=2", "training.seq_length=131072"]
    divisors = "[" + "1, " * 64 + "]"
    rope = f"model.longrope={{short_factor: {divisors}, long_factor: {divisors}, factor: 32}}"
    said = dry_run("llama3-8b", 16, *layout, rope)
    assert "longrope: long_factor, because sequences of 131072 tokens are above the original 4096" in said
    assert "layout: 16 ranks = pipeline 1 × data 2 × context 2 × tensor 4 with sequence parallelism" in said
    assert "of 1 × 65536 tokens;" in said
    assert "context        2 ranks: 0, 4  (8 such groups)" in said
    assert "0-15" in said


def test_dry_run_shows_shards_and_replicas() -> None:
    """Llama 3 8B on four hosts of 8 ranks."""
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.fsdp=true", "model.vocab_size=128256"]
    said = dry_run("llama3-8b", 32, *layout, "parallel.fsdp_replicas=4")
    assert "\nfsdp: weights and gradients sharded over 8 ranks, optimizer state over all of 4 replicas\n" in said
    assert "  fsdp_shard         8 ranks: 0, 1, 2, 3, 4, 5, 6, 7  (4 such groups)" in said
    assert "  fsdp_replicate     4 ranks: 0, 8, 16, 24  (8 such groups)" in said
    (line,) = (line for line in said.splitlines() if line.startswith("    0    0-31 "))
    _, _, parameters, *sizes, _ = line.split()
    numel = int(parameters.replace(",", "")) / 8
    assert sizes == [f"{numel * each / 2**30:.2f}" for each in (2, 4, 12 / 4)]
    assert "sharded over 32 ranks\n" in dry_run("llama3-8b", 32, *layout)
    experts = ["parallel.pipeline=1", "parallel.zero=0", "parallel.fsdp=true", "parallel.fsdp_replicas=2"]
    said = dry_run("qwen3-30b-a3b", 64, *experts, "model.vocab_size=151936")
    assert "gradients sharded over 32 ranks, experts over 4, optimizer state over all of 2 replicas\n" in said
    assert "  expert_shard       4 ranks: 0, 8, 16, 24  (16 such groups)" in said
    refused = dry_run("llama3-8b", 32, *layout, "parallel.fsdp_replicas=5", code=2)
    assert refused.splitlines()[-1] == (
        "  parallel.fsdp_replicas = 5: the shards of parallel.fsdp are replicated over equal parts of 32 data-parallel "
        "ranks; try 1 or 2 or 4"
    )


def test_dry_run_reads_the_vocabulary_or_says_what_it_lacks(tmp_path: Path) -> None:
    missing = f"data.tokenizer.path={tmp_path}/none"
    said = dry_run("gpt2-125m", 8, missing, "model.vocab_size=null", code=2)
    assert f"model.vocab_size = None: the tokenizer, {tmp_path}/none, is missing" in said
    assert "Traceback" not in said
    said = dry_run("gpt2-125m", 8, missing)
    assert f"needed before a start:\n  data.tokenizer.path = {tmp_path}/none: neither a file" in said
    options = ["data.tokenizer={kind: bytes}", "model.vocab_size=null", "--verbose"]
    said = dry_run("gpt2-125m", 8, *options)
    assert "vocab_size: 257" in said
    assert "\ntokenizer: end token 256, after the bytes; no beginning token\n" in said


CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
_SLOW = (
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "gpt2-125m",
    "llama3-70b",
    "llama3-405b",
    "qwen3-next-80b-a3b",
    "qwen3-30b-a3b",
)
QUICK = [config for config in CONFIGS if config not in _SLOW]
FEWEST_RANKS = {"deepseek-v3": 512, "llama3-8b-stages": 16, "qwen3-30b-a3b": 16, "mixtral-8x7b": 32, "olmo2-7b": 2}
FEWEST_RANKS |= {"nemotron-3-nano-30b": 16, "kimi-linear-48b-a3b": 64}


@pytest.mark.parametrize("config", slow_but(CONFIGS, *QUICK))
def test_dry_run_of_a_config_as_it_is(config: str) -> None:
    """Without tokenizer, data and weights, on the fewest ranks that all of its stages run on."""
    said = dry_run_of([f"configs/{config}.yaml"])
    assert "needed before a start:" in said
    if config in FEWEST_RANKS:
        assert said.startswith(f"{FEWEST_RANKS[config]} ranks, the fewest that this config runs on;")


def test_a_dry_run_of_adapters_says_that_their_time_is_not_predicted() -> None:
    said = dry_run_of(["configs/gpt2-125m.yaml", "lora={}"])
    assert "no predicted time of a step: lora: the time of steps that train adapters is not predicted" in said


def test_a_dry_run_refuses_stages_that_the_run_would_refuse() -> None:
    stages = "stages=[{name: wide, begin: 50, overrides: {model.ffn_hidden_size: 1024}}]"
    said = dry_run("quickstart", 4, stages, code=2)
    assert "configs/quickstart.yaml, stage wide from step 50: " in said
    assert "the stage cannot begin, since the checkpoint of step 50" in said


A = ["--config", "a.yaml"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["training.steps=3"], "a config is needed"),
        ([*A, "--dry-run", "--world-size", "0"], "--world-size: 0 ranks; at least 1 is needed"),
        ([*A, "--dry-run", "--world-size", "-4"], "--world-size: -4 ranks; at least 1 is needed"),
        ([*A, "--dry-run", "--world-size", "4", "--world-size", "8"], "--world-size is given twice: 4 and 8; give one"),
        ([*A, "--world-size", "4"], "--world-size is for --dry-run"),
        ([*A, "training.steps=3", "--config", "b.yaml"], "--config is given twice: a.yaml and b.yaml; give one"),
    ],
)
def test_wrong_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    assert pretrain_gpt.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert expected in said


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
import pretrain_gpt
for arguments in sys.argv[1:]:
    sys.argv = ["pretrain_gpt.py", *arguments.split()]
    assert pretrain_gpt.main() == (0 if "schema" in arguments else 2)
"""


def test_a_config_error_needs_no_torch() -> None:
    mistakes = ["training.steps=ten", "training.stepz=3", "parallel.tensor=3", "name", "--dry-run --world-size 3"]
    runs = [f"--config configs/quickstart.yaml {mistake}" for mistake in mistakes]
    done = run_python("-c", WITHOUT_TORCH, *runs, "--config absent.yaml", "--print-schema")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(mistakes) + 1
    schema = json.loads(done.stdout)
    assert schema["$defs"]["ParallelConfig"]["properties"]["tensor"]["description"].startswith("Tensor-parallel size")


DRY_RUN = """
import sys
import torch
before = set(sys.modules)
sys.argv = ["pretrain_gpt.py", "--config", "configs/llama3-405b.yaml", "--dry-run", "--world-size", "1024"]
import pretrain_gpt
assert pretrain_gpt.main() == 0
print("imported:", *sorted(set(sys.modules) - before))
"""


def test_a_dry_run_of_a_cluster_layout_imports_little_besides_torch() -> None:
    done = run_python("-c", DRY_RUN)
    assert done.returncode == 0, done.stderr
    said, _, imported = done.stdout.rpartition("imported:")
    assert "layout: 1024 ranks = pipeline 16 × data 8 × tensor 8 with sequence parallelism" in said
    assert "parameters: 405,853,388,800 in the model" in said  # Llama-3.1-405B's published count
    assert "119-125" in said
    assert "amax          64 ranks: 0, 1, 2, 3, 4, 5, 6, 7, …  (16 such groups)" in said
    assert "data.train, data/corpus/text: no data/corpus/text.bin and no data/corpus/text.idx" in said
    assert "megafp8.training.describe" in imported.split()
    packages = {"matplotlib", "tensorboard", "transformers", "triton", "tokenizers", "wandb", "sympy", "pandas"}
    assert not packages & {name.partition(".")[0] for name in imported.split()}
    prefixes = ("torch.distributed.checkpoint", "torch._dynamo", "torch.distributed.fsdp", "megafp8.checkpoint")
    assert not [name for name in imported.split() if name.startswith(prefixes)]
