"""The proof of GPUs, with CPU ranks in bf16 in their place: rounding stays within the bounds, and faults do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megafp8.config import ConfigError, load_config
from megafp8.optimizer.step import OptimizerStep, StepResult
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import spec_of
from megafp8.prove.certificate import CheckResult
from megafp8.prove.layout import ProvedLayout, fold
from megafp8.prove.on_gpus import Squares, noise_of, relative, rows
from megafp8.prove.proof import prove
from megafp8.prove.runs import Context
from megafp8.prove.shrink import numbers_of, shrink
from megafp8.section import Quantity
from tests.marks import slow_but
from tests.prove.faults import FAULTS
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.world import Ranks

CHECKS = ["reference", "cpu", "initial weights", "losses", "gradients", "weights"]


@contextmanager
def doubled_gradient() -> Iterator[None]:
    """The gradient of one weight is twice as large."""
    update = OptimizerStep.__call__

    def doubled(self: OptimizerStep, *args: object, **options: object) -> StepResult:
        for shard in self.buffer.shards:
            if any(piece.name == "layers.1.mlp.down.weight" for piece in spec_of(shard.param).shards):
                gradient_of(shard).mul_(2)
        return update(self, *args, **options)  # type: ignore[arg-type]

    with patch.object(OptimizerStep, "__call__", doubled):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


def proven(preset: Preset, ranks: Ranks, folder: Path, around: Context = nothing) -> list[CheckResult]:
    config = config_of(preset, fp8={"amax_history_len": 1024})  # not all recipes have one
    small = shrink(config, preset.ranks, preset.ranks, "cuda")
    on_cpu = small._replace(config=small.config.model_copy(update={"device": "cpu"}))
    return list(rows(on_cpu, folder, ranks, 60.0, around))


@pytest.mark.parametrize(
    "preset", slow_but([BF16, BF16 | DELAYED | MOE, BF16 | BLOCKWISE | TP2 | DP2 | ZERO, BF16 | FSDP | DP2], BF16)
)
def test_rounding_is_within_the_bounds(rank_processes: Ranks, tmp_path: Path, preset: Preset) -> None:
    found = proven(preset, rank_processes, tmp_path)
    with_fp8 = [f"{check}, FP8" for check in CHECKS] if preset.sections.get("fp8", {}).get("recipe") else []
    assert [row.check for row in found] == CHECKS + with_fp8
    assert all(row.passed for row in found), [row for row in found if not row.passed]
    assert {row.status for row in found if row.check.split(",")[0] not in CHECKS[:2]} == {"within"}


@pytest.mark.parametrize(
    ("preset", "around", "where"),
    [
        (BF16, doubled_gradient, "layers.1.mlp.down.weight"),
        (BF16 | DELAYED, doubled_gradient, "layers.1.mlp.down.weight"),
        (BF16 | TP2, FAULTS["no_all_reduce_of_replicated"], "norm.weight"),
    ],
)
def test_a_fault_is_beyond_them(
    rank_processes: Ranks, tmp_path: Path, preset: Preset, around: Context, where: str
) -> None:
    found = proven(preset, rank_processes, tmp_path, around)
    gradients = [row for row in found if row.check.startswith("gradients")]
    assert len(gradients) == 1 + (DELAYED in preset)
    assert all(row.status == "DIFFERENT" and where in row.where for row in gradients), gradients


def test_relative_root_mean_squares() -> None:
    whole, half = ((0,), (4,)), [((0,), (2,)), ((2,), (2,))]
    copies = [{"a": Squares((4,), 4.0, {whole: x})} for x in (4.0, 16.0)]
    assert relative(copies, ["a"]) == {"a": 1.0}  # the worse copy: a mean square of 4
    shards = [{"a": Squares((4,), 4.0, {part: 8.0})} for part in half]
    assert relative(shards, ["a"]) == {"a": 1.0}
    assert relative(shards[:1], ["a", "b"]) == {"a": math.inf, "b": math.inf}
    assert relative([{"a": Squares((4,), 0.0, {whole: 0.0})}], ["a"]) == {"a": 0.0}
    assert noise_of([{"a": Squares((4,), 1e-40, {}), "b": Squares((4,), 1e-6, {})}]) == {"a"}


@pytest.mark.parametrize("name", ["deepseek-v3.2", "kimi-linear-48b-a3b", "llama3-405b", "gpt-oss-20b"])
def test_numbers_for_kernels(name: str) -> None:
    """Widths of heads are those of the config, larger ones multiples of 128; precision, recipe and graphs stay."""
    config = load_config(f"configs/{name}.yaml")
    small = shrink(config, None, 1, "cuda")
    before, after = (
        {x.value for x in numbers_of(c) if x.quantity is Quantity.CHANNELS} for c in (config, small.config)
    )
    assert {x for x in before if x <= 512} <= after
    assert all(x % 128 == 0 and x <= 1280 for x in after if x > 512)
    assert small.config.spec.attention_widths == config.spec.attention_widths
    assert (small.ranks, small.config.device, small.config.training.seq_length) == (1, "cuda", 256)
    assert small.config.training.precision == config.training.precision
    assert small.config.training.cuda_graphs == config.training.cuda_graphs
    assert small.config.fp8.gemm_backend == config.fp8.gemm_backend


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_layouts_on_few_gpus(most: int) -> None:
    folded = fold(ProvedLayout(8, 2, 16, 8, 32, 1, 1), most)
    assert folded.ranks == most
    assert folded.is_possible()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        prove(config_of(BF16), device="cuda")
