"""Norms by layer against plain PyTorch on whole tensors, which are put together from what all ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.optimizer import mixed_precision
from megafp8.optimizer.layer_norms import KINDS, in_order
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import FlatShard, spec_of
from megafp8.training.trainer import RankTrainer
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import Shard, _located, assembled, batches, start
from tests.world import World

STEPS = 2
CASES = [
    GPT2 | TIED | TP2 | PP2, MOE | DP2 | EP2 | ZERO | CLIP, MUON | GROUPS | TP2 | DP2 | ZERO,
    MUON | MOE | DP2 | EP2 | FSDP,
    BF16 | REMAINDERS | DP2, GRAPHS,
    TP2, DP2, DP2 | ZERO, DP2 | FSDP, DP4 | HSDP, CP2, LAYERS_4 | PP2 | ZB_V | TIED, TP2 | DP2 | FSDP,
    FP8_MOMENTS | DP2, MUON | TP2, T5 | TP2 | PP2, FEW_ROWS | DP4 | FSDP, BERT | DP4 | FSDP,
    LORA_2 | MOE | DP4 | EP2 | FSDP,
    DEEPSEEK | TP2 | DP2 | EP4 | ZERO | DELAYED | FP8_GATHER, MOE | DP4 | EP2 | FSDP, MOE | DP4 | EP2 | HSDP,
    MOE | TP2 | DP2 | ETP2,
    DP2 | FSDP | FP8_GATHER | CURRENT, FP16 | DP2 | ZERO, LORA | TP2 | DP2 | ZERO, MTP | TP2 | PP2 | DP2 | ZERO,
]  # fmt: skip
QUICK = [CASES[1], DP2 | FSDP]


def _flat(trainer: RankTrainer, of: Callable[[FlatShard], Tensor]) -> list[Shard]:
    """A tensor of each shard of this rank, and which elements of which global tensors it has."""
    return [found for shard in trainer.optimizer.shards for found in _located("", shard, of(shard).detach())]


def _master(trainer: RankTrainer) -> Callable[[FlatShard], Tensor]:
    """The fp32 values of a shard, however they are stored."""
    masters = dict(trainer.optimizer.state().get("master", []))
    return lambda shard: masters.get(shard, trainer.optimizer.master_of(shard))


def _measure(preset: Preset) -> dict[str, Any]:
    """What a run measures in steps 1 and 2, and the tensors before, in and after these."""
    mixed_precision.BATCH = 4000  # several, of which some have several shards
    config = config_of(preset, logging={"layer_norms_interval": 1})
    trainer, parallel = start(config)
    steps = []
    for step in range(STEPS):
        before = _flat(trainer, _master(trainer))
        _, result = trainer.train_step(step, batches(step, config, parallel))
        factor = config.optimizer.clip_grad_norm and min(1.0, config.optimizer.clip_grad_norm / result.grad_norm)
        gradients = _flat(trainer, gradient_of)
        after = _flat(trainer, _master(trainer))
        steps.append((result, factor or 1.0, {"gradients": gradients, "before": before, "after": after}))
    plain = config_of(preset, logging={"layer_norms_interval": 0})
    trainer, parallel = start(plain)
    results = [trainer.train_step(step, batches(step, plain, parallel))[1] for step in range(STEPS)]
    return {"steps": steps, "same": [_flat(trainer, _master(trainer)), results]}


def _layer(name: str) -> str:
    first, second, *_ = name.split(".")
    return f"layers.{second}" if first == "layers" else first


@pytest.mark.parametrize("preset", slow_but(CASES, *QUICK))
def test_norms_are_those_of_whole_tensors(world4: World, preset: Preset) -> None:
    found = world4.run(_measure, preset, ranks=preset.ranks)
    for step in range(STEPS):
        result, factor, _ = found[0]["steps"][step]
        assert all(rank["steps"][step][0] == result for rank in found), "ranks report different norms"
        whole = {
            key: assembled(rank["steps"][step][2][key] for rank in found) for key in ("gradients", "before", "after")
        }
        whole = {key: {name: x.double() for name, x in tensors.items()} for key, tensors in whole.items()}
        tensors = {
            "grad_norm": {name: x / factor for name, x in whole["gradients"].items()},
            "weight_norm": whole["after"],
            "update_norm": {name: x - whole["before"][name] for name, x in whole["after"].items()},
        }
        expected = {}
        for kind in KINDS:
            squares: dict[str, float] = {}
            for name, x in tensors[kind].items():
                squares[_layer(name)] = squares.get(_layer(name), 0.0) + x.square().sum().item()
            expected |= {f"{kind}/{layer}": math.sqrt(square) for layer, square in squares.items()}
            expected[kind] = math.sqrt(sum(squares.values()))
        assert result.grad_norm == pytest.approx(expected.pop("grad_norm"), rel=2e-6 if factor < 1 else 1e-6)
        # gradients that were clipped and divided again are rounded to fp32 twice
        assert result.layer_norms == pytest.approx(expected, rel=1e-6)
        assert min(result.layer_norms.values()) > 0
    weights, plain = found[0]["same"]
    assert [(r.grad_norm, r.layer_norms) for r in plain] == [(r.grad_norm, {}) for r, *_ in found[0]["steps"]]
    for (name, _, _, x), (_, _, _, y) in zip(found[0]["steps"][-1][2]["after"], weights, strict=True):
        assert torch.equal(x, y), f"{name}: the measurement changes the training"


def _skipped(preset: Preset) -> list[dict[str, float]]:
    config = config_of(preset, logging={"layer_norms_interval": 1})
    trainer, parallel = start(config)
    measured = []
    update = trainer.update

    def keep(*args: Any, **options: Any) -> Any:
        result = update(*args, **options)
        measured.append(dict(result.layer_norms))
        return result

    trainer.update = keep  # type: ignore[assignment]
    trainer.train_step(0, batches(0, config, parallel))
    shard = next(s for s in trainer.strategy.shards if spec_of(s.param).shards[0].name.startswith("layers.0."))

    def spoil() -> None:
        if parallel.rank == 1:
            gradient_of(shard)[0] = math.nan

    trainer.train_step(1, batches(1, config, parallel), before_update=spoil)
    return measured


@pytest.mark.parametrize("preset", slow_but([DP2 | ZERO, MUON | DP2 | ZERO], DP2 | ZERO))
def test_a_skipped_step_tells_which_gradients_are_not_finite(world2: World, preset: Preset) -> None:
    for first, skipped in world2.run(_skipped, preset):
        assert set(skipped) == {name for name in first if name.startswith("grad_norm/")}
        assert [name for name, value in skipped.items() if not math.isfinite(value)] == ["grad_norm/layers.0"]


def test_order_of_layers() -> None:
    layers = ["output", "layers.10", "final_norm", "layers.2", "embedding", "embedding_norm"]
    assert in_order(layers) == ["embedding", "embedding_norm", "layers.2", "layers.10", "final_norm", "output"]
