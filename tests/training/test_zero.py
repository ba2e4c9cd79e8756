"""Sharded over data parallelism, the optimizer trains what it trains unsharded: ZeRO stage 1 against stage 0.

Under two data-parallel ranks every sum has two terms, so losses, norms and weights are the same bit for bit, FP8 or
not. Under four, buckets of other lengths are summed in another order.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import CheckpointReader, latest, load
from megafp8.config import Config, check_layout
from megafp8.distributed import collectives
from megafp8.parallel_state import ParallelState, initialize_distributed, initialize_model_parallel
from megafp8.training.cuda_graphs import MicrobatchGraphs
from megafp8.training.state import checkpoint_folder, save_state
from megafp8.training.trainer import Trainer
from tests.marks import slow_but
from tests.training.latest import load_latest
from tests.training.test_cuda_graphs import Curve, HighPrecisionFallback, batches, config
from tests.world import World

STEPS = 8
SMALL_BUCKET = 0.05  # MiB, which makes some ten buckets
CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "dp2": (2, {}),
    "dp2-tied": (2, {"model": {"tie_embeddings": True}}),
    "dp2-biases": (2, {"model": {"linear_bias": True, "normalization": "layernorm", "position_embedding": "learned"}}),
    "dp2-delayed": (2, {"fp8": {"recipe": "delayed", "amax_history_len": 4}}),
    "dp2-current": (2, {"fp8": {"recipe": "current"}}),
    "dp2-fp64": (2, {"training": {"precision": "fp64"}}),
    "dp2-masked": (2, {"training": {"global_batch_size": 8}}),
    "dp2-bf16-state": (2, {"optimizer": {"reduce_dtype": "bf16", "moments_dtype": "bf16"}}),
    "tp2-dp2": (4, {"parallel": {"tensor": 2}}),
    "tp2-dp2-delayed": (4, {"parallel": {"tensor": 2}, "fp8": {"recipe": "delayed", "amax_history_len": 4}}),
    "tp2-dp2-tied": (4, {"parallel": {"tensor": 2, "sequence_parallel": False}, "model": {"tie_embeddings": True}}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "pp2-dp2-zb-h1": (4, {"parallel": {"pipeline": 2, "schedule": "zb-h1"}}),
    "pp2-dp2-v-tied": (
        4,
        {
            "parallel": {"pipeline": 2, "schedule": "zb-v", "virtual_pipeline": 2},
            "model": {"tie_embeddings": True, "num_layers": 4},
        },
    ),
    "pp2-dp2": (4, {"parallel": {"pipeline": 2}}),
    "pp2-dp2-tied": (4, {"parallel": {"pipeline": 2}, "model": {"tie_embeddings": True}}),
    "pp2-dp2-tied-one-bucket": (
        # An embedding so large that slices of a bucket with more in it would cut it, in each stage at another element.
        4, {
            "parallel": {"pipeline": 2, "bucket_mib": 100.0},
            "model": {"tie_embeddings": True, "vocab_multiple": 1024, "ffn_hidden_size": 64},
        },
    ),
    "pp2-dp2-current": (4, {"parallel": {"pipeline": 2}, "fp8": {"recipe": "current"}}),
}  # fmt: skip


def settings(changes: dict[str, dict[str, Any]], **parallel: Any) -> Config:
    """The small model of the CUDA graphs' tests with two micro-batches a step under two data-parallel ranks."""
    training = {"global_batch_size": 8, **changes.get("training", {})}
    parallel = {"bucket_mib": SMALL_BUCKET, **changes.get("parallel", {}), **parallel}
    return config(**{**changes, "training": training, "parallel": parallel})


def start(settings: Config) -> tuple[Trainer, ParallelState]:
    p = settings.parallel
    check_layout(settings, torch.distributed.get_world_size())
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    return Trainer(settings, parallel), parallel


def steps_of(trainer: Trainer, parallel: ParallelState, steps: range, masked: bool = False) -> Curve:
    curve = []
    for step in steps:
        loss, result = trainer.train_step(step, batches(step, trainer.config, parallel, masked))
        assert not result.skipped
        curve.append((loss.mean, result.grad_norm))
    return curve


def _train(settings: Config, masked: bool = False) -> tuple[Curve, list[Tensor], dict[str, int]]:
    """Curve, final weights, and elements of this rank's optimizer state by name."""
    trainer, parallel = start(settings)
    curve = steps_of(trainer, parallel, range(STEPS), masked)
    trainer.wait_for_weights()
    held = {key: sum(t.numel() for _, t in fragments) for key, fragments in trainer.optimizer.state().items()}
    held["buffer"], held["weights"] = trainer.gradients.layout.numel, sum(p.numel() for p in trainer.params)
    return curve, [p.detach().clone() for p in trainer.params], held


def _both(plain: Config, sharded: Config, masked: bool) -> tuple[Any, Any]:
    return _train(plain, masked), _train(sharded, masked)


@pytest.mark.parametrize("case", slow_but(CASES, "dp2", "dp2-masked", "tp2-dp2-delayed", "pp2-dp2-zb-h1"))
def test_zero_1_trains_what_zero_0_trains_bit_for_bit(world4: World, case: str) -> None:
    ranks, changes = CASES[case]
    answers = world4.run(_both, settings(changes), settings(changes, zero=1), case == "dp2-masked", ranks=ranks)
    for (expected, weights, whole), (found, sharded_weights, held) in answers:
        assert found == expected
        assert all(torch.equal(a, b) for a, b in zip(sharded_weights, weights, strict=True))
        for key in whole.keys() - {"buffer", "weights"}:
            assert whole[key] == whole["weights"]
            assert held[key] <= held["buffer"] // 2
    masters = ["master"] if "fp64" in case else []
    for key in ["exp_avg", "exp_avg_sq", *masters]:  # data-parallel ranks together hold each element once
        assert sum(held[key] for _, (_, _, held) in answers) == sum(w["weights"] for (_, _, w), _ in answers) // 2
    assert len({loss for loss, _ in answers[0][0][0]}) == STEPS


@pytest.mark.parametrize("context", [1, 2])
def test_four_data_parallel_ranks(world4: World, context: int) -> None:
    changes = {"parallel": {"context": context}}
    answers = world4.run(_both, settings(changes), settings(changes, zero=1), False)
    for (expected, _, whole), (found, _, held) in answers:
        for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
            assert a_loss == pytest.approx(b_loss, rel=1e-6)
            assert a_norm == pytest.approx(b_norm, rel=1e-6)
        assert held["exp_avg"] <= held["buffer"] // 4 < whole["exp_avg"] * 0.27
    assert sum(held["exp_avg"] for _, (_, _, held) in answers) == answers[0][0][2]["exp_avg"]


def test_masters_of_a_bf16_model(world4: World) -> None:
    changes = {
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64},
        "training": {"precision": "bf16", "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
    }
    small = {"bucket_mib": 0.005}
    answers = world4.run(_both, settings(changes, **small), settings(changes, zero=1, **small), False, ranks=2)
    for (expected, weights, whole), (found, sharded_weights, held) in answers:
        assert found == expected
        assert all(a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in zip(sharded_weights, weights))
        assert held["master"] <= held["buffer"] // 2 < whole["master"]


@pytest.mark.parametrize("option", ["overlap_param_gather", "overlap_grad_reduce"])
def test_overlap_changes_nothing(world4: World, option: str) -> None:
    for (expected, *_), (found, *_) in world4.run(
        _both, settings({}, zero=1), settings({}, zero=1, **{option: False}), False, ranks=2
    ):
        assert found == expected


class _Late:
    """A gather that brings nothing before it is waited for."""

    def __init__(self, gather: Any, x: Tensor, group: Any) -> None:
        self.gather = functools.partial(gather, x, group)

    def wait(self) -> None:
        self.gather().wait()


def _late_case(sharded: Config) -> tuple[Curve, Curve]:
    expected = _train(sharded)[0]
    gather = collectives.all_gather_in_place_async
    collectives.all_gather_in_place_async = functools.partial(_Late, gather)  # type: ignore[assignment]
    try:
        return expected, _train(sharded)[0]
    finally:
        collectives.all_gather_in_place_async = gather


@pytest.mark.parametrize("parallel", slow_but([{}, {"pipeline": 2}, {"recompute": "full"}], {"pipeline": 2}))
def test_nobody_computes_with_weights_that_are_still_on_their_way(world4: World, parallel: dict[str, Any]) -> None:
    changes = {"model": {"tie_embeddings": True}, "fp8": {"recipe": "current"}, "parallel": parallel}
    for expected, found in world4.run(_late_case, settings(changes, zero=1), ranks=2 * parallel.get("pipeline", 1)):
        assert found == expected


def _graphs_case(sharded: Config) -> tuple[Curve, Curve, int]:
    expected = _train(sharded)[0]
    trainer, parallel = start(sharded)
    fallback = HighPrecisionFallback()
    trainer.graphs = MicrobatchGraphs(trainer.fp8, parallel.device, eager_steps=1, capture=fallback)
    return expected, steps_of(trainer, parallel, range(STEPS)), fallback.replays


def test_graphs_of_micro_batches(world4: World) -> None:
    sharded = settings({"fp8": {"recipe": "delayed", "amax_history_len": 4}}, zero=1)
    for expected, found, replays in world4.run(_graphs_case, sharded, ranks=2):
        assert found == expected
        assert replays == STEPS - 1


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _save(settings: Config, folder: str) -> Curve:
    """Save after three steps; the three steps after that."""
    trainer, parallel = start(settings)
    steps_of(trainer, parallel, range(3))
    save_state(trainer, Path(folder), 3, None)
    return steps_of(trainer, parallel, range(3, 6))


def _resume(settings: Config, folder: str, into: str | None = None) -> Curve:
    """Load; save what was loaded `into` another folder, or three more steps."""
    trainer, parallel = start(settings)
    assert load_latest(trainer, Path(folder)) == 3
    if into is None:
        return steps_of(trainer, parallel, range(3, 6))
    save_state(trainer, Path(into), 3, None)
    return []


def _contents(folder: Path) -> dict[str, Tensor]:
    path = latest(checkpoint_folder(folder))
    assert path is not None
    entries = CheckpointReader(path).index.state_dict_metadata
    state = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load(path, state)
    return state


DELAYED: dict[str, dict[str, Any]] = {
    "model": {"tie_embeddings": True},
    "fp8": {"recipe": "delayed", "amax_history_len": 4},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp2-zero": (2, {"zero": 1}),
    "dp2-zero-other-buckets": (2, {"zero": 1, "bucket_mib": 1.0}),
    "dp4-zero": (4, {"zero": 1}),
    "tp2-dp2-zero": (4, {"zero": 1, "tensor": 2}),
    "pp2-dp2-zero": (4, {"zero": 1, "pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("saved_as", slow_but(["dp2", "tp2-dp2-zero", "pp2-dp2-zero"], "tp2-dp2-zero"))
def test_state_fits_every_layout_exactly(world4: World, tmp_path: Path, saved_as: str) -> None:
    ranks, parallel = LAYOUTS[saved_as]
    world4.run(_save, settings(DELAYED, **parallel), str(tmp_path / "saved"), ranks=ranks)
    saved = _contents(tmp_path / "saved")
    moved = [name for name, tensor in saved.items() if name.startswith("optimizer.exp_avg.") and tensor.any()]
    assert len(moved) == sum(name.startswith("model.") for name in saved)
    for name, (ranks, parallel) in LAYOUTS.items():
        if name != saved_as:
            world4.run(
                _resume, settings(DELAYED, **parallel), str(tmp_path / "saved"), str(tmp_path / name), ranks=ranks
            )
            again = _contents(tmp_path / name)
            assert again.keys() == saved.keys()
            assert all(torch.equal(again[key], tensor) for key, tensor in saved.items()), name


@pytest.mark.parametrize("layout", ["dp2-zero", "pp2-dp2-zero"])
def test_resuming_is_bit_identical(world4: World, tmp_path: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    straight = world4.run(_save, settings(DELAYED, **parallel), str(tmp_path), ranks=ranks)
    resumed = world4.run(_resume, settings(DELAYED, **parallel), str(tmp_path), None, ranks=ranks)
    assert resumed == straight
    assert all(math.isfinite(loss) for loss, _ in resumed[0])


def test_a_checkpoint_of_shards_has_each_element_once(world4: World, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS["tp2-dp2-zero"]
    world4.run(_save, settings(DELAYED, **parallel), str(tmp_path), ranks=ranks)
    path = latest(checkpoint_folder(tmp_path))
    assert path is not None
    for name, entry in CheckpointReader(path).index.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name
