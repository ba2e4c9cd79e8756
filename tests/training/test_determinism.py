"""`deterministic: true`: what it switches, what it refuses, and that two runs are the same bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils import deterministic

from megafp8.config import Config, ConfigError, check_layout
from megafp8.layers.attention.op import sdpa_backends
from megafp8.training.determinism import describe_determinism, make_deterministic
from megafp8.training.fp8_config import build_fp8
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, ROOT, QuickstartData
from tests.training.presets import BF16, CP2, CURRENT, DELAYED, DOCUMENTS, NVFP4, PP2, TP2, ZB_H1, Preset, config_of
from tests.training.runs import ONE_RANK, SMALL, Outcome, RankResult, result_of, start, train
from tests.world import World

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process as it is before it is switched, and again afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    yield monkeypatch
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# --- what it switches ------------------------------------------------------------------------------------------------


def test_each_switch(process: pytest.MonkeyPatch) -> None:
    assert sdpa_backends()[0] is SDPBackend.CUDNN_ATTENTION
    make_deterministic("cuda")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not torch.backends.cudnn.benchmark
    assert {name: os.environ[name] for name in VARIABLES} == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }
    assert sdpa_backends() == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    line = describe_determinism("cuda")
    assert "\n" not in line
    for part in ("attention in a fixed order", "untimed", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "NCCL_ALGO=Ring"):
        assert part in line


def test_on_a_cpu_the_environment_stays(process: pytest.MonkeyPatch) -> None:
    make_deterministic("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not any(name in os.environ for name in VARIABLES)
    assert "NCCL" not in describe_determinism("cpu")


def test_what_the_environment_says_already(process: pytest.MonkeyPatch) -> None:
    process.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    process.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"CUDA has started without NCCL_ALGO.*NCCL_ALGO=Ring"):
        make_deterministic("cuda")
    process.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(ValueError, match=r"the environment has NCCL_ALGO=NVLS.*unset it, or try NCCL_ALGO=Ring"):
        make_deterministic("cuda")
    process.setenv("NCCL_ALGO", "Ring")
    make_deterministic("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("top", "fp8", "tunes"),
    [({}, {}, True), ({"deterministic": True}, {}, False), ({}, {"gemm_autotune": False}, False)],
)
def test_algorithms_are_not_timed(top: dict[str, Any], fp8: dict[str, Any], tunes: bool) -> None:
    config = config_of(DELAYED, fp8=fp8).model_copy(update=top)
    assert build_fp8(config, None).gemm_autotune is tunes


# --- what it refuses -------------------------------------------------------------------------------------------------


def _deterministic(preset: Preset, *, device: str = "auto", **sections: dict[str, Any]) -> Config:
    return config_of(preset, device=device, **sections).model_copy(update={"deterministic": True})


@pytest.mark.parametrize(
    ("preset", "fp8", "key"),
    [
        (CURRENT, {"auto_filter": "measured"}, "fp8.auto_filter = 'measured'"),
        (CURRENT, {"gemm_autotune": True}, "fp8.gemm_autotune = True"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(preset: Preset, fp8: dict[str, Any], key: str) -> None:
    check_layout(config_of(preset, device="auto", fp8=fp8), 2)
    with pytest.raises(ConfigError, match=re.escape(key)) as error:
        check_layout(_deterministic(preset, fp8=fp8), 2)
    assert "or deterministic=false" in str(error.value)


def test_what_can_be_is_not() -> None:
    check_layout(_deterministic(CP2 | BF16), 2)
    check_layout(_deterministic(CURRENT | BF16, fp8={"auto_filter": "predicted"}), 2)


# --- two runs --------------------------------------------------------------------------------------------------------


def _run(config: Config) -> RankResult:
    make_deterministic("cpu")
    trainer, parallel = start(config)
    return result_of(trainer, train(trainer, parallel))


@pytest.mark.parametrize("recipe", slow_but([DELAYED, NVFP4]))
def test_two_runs_on_a_cpu(world4: World, recipe: Preset) -> None:
    """Everything at once: tensor, sequence, pipeline; the noise of nvfp4 too."""
    config = _deterministic(TP2 | PP2 | ZB_H1 | DOCUMENTS | recipe, device="cpu")
    first, second = (Outcome.of(world4.run(_run, config)) for _ in range(2))
    assert first == second
    assert len(set(first.curve)) == len(first.curve)


def _losses(folder: Path, name: str, *options: str) -> list[float]:
    """Of a run of benchmarks/bench_step.py in a process of its own: each round trains the same model anew."""
    path = folder / name
    command = [sys.executable, "-m", "benchmarks.bench_step", "--config", "configs/llama3-8b.yaml", "--json", str(path)]
    command += ["--layouts", "tensor=1 pipeline=1", "--micro-batches", "2", "--warmup", "1", "--rounds", "2", *options]
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(path.read_text())["samples"][0]["losses"]
    return losses


@pytest.mark.slow
def test_the_log_says_so(quickstart_data: QuickstartData, tmp_path: Path) -> None:
    command = [sys.executable, "pretrain_gpt.py", "--config", str(CONFIG), f"run_dir={tmp_path}", "deterministic=true"]
    command += [*quickstart_data.overrides, *ONE_RANK, *SMALL, "training.steps=1", "optimizer.warmup_steps=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"] {describe_determinism('cpu')}\n" in done.stderr


@pytest.mark.slow
def test_a_mixed_benchmark_is_refused(tmp_path: Path) -> None:
    sizes = ["--set", "model.num_layers=1", "training.seq_length=16"]
    with pytest.raises(AssertionError, match="all must be or none"):
        _losses(tmp_path, "mixed", "--variants", "fp32,fp32+deterministic", *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["bf16", "delayed", "blockwise"])
def test_two_runs_on_a_gpu(tmp_path: Path, variant: str) -> None:
    """Two rounds in each of two processes. Tokens enough for the embedding's gradient to be sorted, long enough
    sequences for attention's backward to have blocks in parallel."""
    sizes = ["model.num_layers=2", "model.hidden_size=1024", "model.num_attention_heads=8", "model.num_query_groups=4"]
    sizes += ["model.ffn_hidden_size=2048", "model.vocab_size=4096", "training.seq_length=4096"]
    options = ["--variants", f"{variant}+deterministic", "--steps", "12", "--set", *sizes]
    first, second = (_losses(tmp_path, name, *options) for name in ("first", "second"))
    half = len(first) // 2
    assert first[:half] == first[half:]
    assert first == second
    assert len(set(first[:half])) == half
