"""bench_step: profiles, overrides, bubbles, and a run on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import bench_step
from benchmarks.bench_step import layout_overrides, simulated_bubble, variant_overrides
from benchmarks.compiled_step import CompiledTrainer
from benchmarks.profiling import Kernel, by_name, outside, step_profile, union
from megafp8.config import Config, ParallelConfig, load_config
from megafp8.data.samples import next_token_batch
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.pipeline.simulate import StageTimes, simulate
from megafp8.training.describe import planned_stage
from megafp8.training.pipeline import plan_pipeline
from megafp8.training.trainer import RankTrainer

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.num_query_groups=1"),
    *("model.ffn_hidden_size=64", "model.vocab_size=128", "training.seq_length=16"),
]


def test_intervals() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (2.5, 3)]) == [(0, 4)]
    assert outside([(0, 4), (5, 6)], [(1, 2), (3, 5.5)]) == pytest.approx(1 + 1 + 0.5)


def test_exposed_communication() -> None:
    kernels = [
        ("gemm", 0.0, 4.0),
        ("ncclDevKernel_ReduceScatter", 2.0, 5.0),  # one of three is exposed
        ("Memcpy PtoP (Device -> Device)", 6.0, 7.0),
        ("Memset (Device)", 7.0, 8.0),
    ]
    found = step_profile(kernels, duration=10.0)
    assert (found.computing, found.communicating, found.exposed) == pytest.approx((0.5, 0.4, 0.2))
    assert found.idle == pytest.approx(0.3)
    again = [("void gemm<128>(float*, int)", 8.0, 9.0), ("void gemm<128>(float*, float)", 9.0, 9.5)]
    assert by_name([*kernels, *again])[:2] == [Kernel("gemm", 1, 4.0), Kernel("ncclDevKernel_ReduceScatter", 1, 3.0)]
    assert Kernel("gemm<128>", 2, 1.5) in by_name(again)


def test_layouts_and_variants() -> None:
    assert layout_overrides("tensor=2 training.precision=bf16") == ["parallel.tensor=2", "training.precision=bf16"]
    assert variant_overrides("fp32") == ["training.precision=fp32", "fp8.recipe=none"]
    assert variant_overrides("current+fast")[1:] == ["fp8.recipe=current", "fp8.fast_accumulation=[true,true,true]"]
    assert variant_overrides("bf16+deterministic")[2:] == ["deterministic=true"]
    with pytest.raises(ValueError, match=r"'bf16\+slow' has the option 'slow', which is none of fast, eager, determ"):
        variant_overrides("bf16+slow")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_simulated_timeline_is_simulated_again(schedule: str) -> None:
    """From its own spans, whatever each stage takes."""
    overrides = ["parallel.tensor=1", "parallel.pipeline=4", f"parallel.schedule={schedule}"]
    plan = plan_pipeline(load_config(ROOT / "configs/llama3-8b.yaml", overrides), 8)
    times = [StageTimes(1.0, 1.5, 0.5), StageTimes(2.0, 1.0, 1.0), StageTimes(0.5, 1.0, 2.0), StageTimes(4.0, 3.0, 1.0)]
    measured = simulate(plan.train, plan.placement, times)
    assert simulated_bubble(plan, measured) == pytest.approx(measured.bubble_fraction)


def test_the_compiled_baseline_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    overrides = [*TINY, "model.tie_embeddings=true", "optimizer.warmup_steps=0", "optimizer.learning_rate=0.01"]
    config = load_config(ROOT / "configs/llama3-8b.yaml", overrides)
    trainer = CompiledTrainer(config, cast(ParallelState, SimpleNamespace(device=torch.device("cpu"))))
    expected = sum(p.numel() for p in planned_stage(one_rank(config), 0).parameters())
    assert sum(p.numel() for p in trainer.model.parameters()) == expected
    batch = next_token_batch(torch.randint(128, (2, 17)), reset_at_documents=False, mask_eod_loss=False)
    losses = [trainer.train_step(step, [batch, batch])[0].mean for step in range(5)]
    assert losses[0] == pytest.approx(math.log(128), rel=0.05)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_lines_that_cannot_run_say_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    arguments = ["--config", str(ROOT / "configs/gpt2-125m.yaml"), "--variants", "compiled,current,fp32,mxfp8+fast"]
    arguments += ["--layouts", "pipeline=1", "--micro-batches", "1", "--warmup", "1", "--steps", "1", "--rounds", "2"]
    tiny = [option for option in TINY if "groups" not in option and "ffn" not in option]
    arguments += ["--json", str(report), "--set", *tiny, "training.micro_batch_size=1", "device=cpu"]
    build = bench_step.RankTrainer.__init__

    def refuse(trainer: RankTrainer, config: Config, *rest: Any) -> None:
        if config.fp8.recipe == "current":
            raise ValueError("found when\nthe trainer is built")
        build(trainer, config, *rest)

    monkeypatch.setattr(bench_step.RankTrainer, "__init__", refuse)
    assert bench_step.main(arguments) == 0
    rows = {row["variant"]: row for row in json.loads(report.read_text())["rows"]}
    assert rows["fp32"]["first_loss"] == pytest.approx(math.log(128), rel=0.05)
    shown = capsys.readouterr().out
    for variant, said in (
        ("compiled", "no biases, and not model.activation = 'gelu_tanh', model.linear_bias = True, model.norm"),
        ("current", "found when the trainer is built"),
        ("mxfp8+fast", "fp8.fast_accumulation = (True, True, True): fp8.recipe mxfp8 has no such option"),
    ):
        assert said in rows[variant]["failure"]
        assert f"pipeline=1 {variant}: {rows[variant]['failure']}" in shown
    assert bench_step.main([*arguments[:3], "compiled,mxfp8+fast", *arguments[4:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: pipeline=1 compiled: the compiled baseline has")
    assert "\nerror: pipeline=1 mxfp8+fast: " in said


def one_rank(config: Config) -> Config:
    return config.model_copy(update={"parallel": ParallelConfig()})


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_step", "--config", "configs/llama3-8b.yaml", "--layouts"]
    command += ["tensor=1 pipeline=1", "tensor=2 pipeline=1", "--variants", "fp32,current+fast,fp32+documents"]
    command += [
        "--micro-batches",
        "2",
        "--warmup",
        "1",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--json",
        str(tmp_path / "out.json"),
        "--set",
        *TINY,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row["layout"], row["variant"]): row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    fp32, current = (rows["tensor=1 pipeline=1", variant] for variant in ("fp32", "current+fast"))
    assert fp32["first_loss"] == pytest.approx(math.log(128), rel=0.02)
    assert 0 < abs(current["last_loss"] - fp32["last_loss"]) < 0.01
    assert fp32["tokens_per_second_per_gpu"] == pytest.approx(2 * 16 / (fp32["step_ms"] / 1e3))
    documents = rows["tensor=1 pipeline=1", "fp32+documents"]
    assert documents["first_loss"] == pytest.approx(math.log(128), rel=0.02)
    assert "parallel.tensor" in rows["tensor=2 pipeline=1", "fp32"]["failure"]
    assert "parallel.tensor" in done.stdout
