"""Training steps of a tiny model on data-parallel ranks against one plain process, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megafp8.data_parallel.grad_buffer import main_grad_of
from megafp8.data_parallel.param_buffer import ParamBuffer
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.optimizer.finalize import finalize_gradients, global_norm
from megafp8.optimizer.step import OptimizerStep, StepResult
from tests.tiny_model import batch, loss_sum, make_buffer, make_param, reference, tiny_params
from tests.world import World

STEPS, ROWS = 3, 8
HYPER = {"lr": 0.02, "weight_decay": 0.1, "max_norm": 0.7}


def _optimizer_step(
    params: Any, group: Any, weight_decay: float, max_norm: float | None, sharded: bool = False
) -> tuple[OptimizerStep, Callable[[], None]]:
    """The step, and the gather of the weights after it."""
    buffer = make_buffer(params, 100, group, sharded=sharded)
    weights = ParamBuffer(buffer.params, buffer.layout, group) if sharded else None
    step = OptimizerStep(
        buffer,
        MixedPrecisionAdamW(buffer.shards, device=buffer.flat.device, weight_decay=weight_decay),
        tensor_group=None,
        model_group=None,
        embedding_group=None,
        shared_params=[],
        max_norm=max_norm,
        shard_group=group if sharded else None,
    )

    def gather() -> None:
        if weights is not None:
            weights.start_gather()
            weights.wait()

    return step, gather


def _train(overlap: bool, scale: float = 1.0, sharded: bool = False) -> tuple[dict[str, Any], list[float]]:
    """Weights and norms of the tiny model trained on this rank's rows.

    `scale` multiplies the loss, and `grad_scale` divides it out again.
    """
    p = tiny_params()
    step, gather = _optimizer_step(p.values(), dist.group.WORLD, HYPER["weight_decay"], HYPER["max_norm"], sharded)
    assert len(step.buffer.layout.buckets) > 1
    norms = []
    for i in range(STEPS):
        step.buffer.zero()
        tokens = batch(i, ROWS)
        rows = tokens[dist.get_rank() :: dist.get_world_size()]
        for micro_batch, row in enumerate(rows):
            if overlap and micro_batch == len(rows) - 1:
                step.buffer.start_overlap()
            (loss_sum(p, row) * (scale / tokens[:, 1:].numel())).backward()
        result = step(HYPER["lr"], grad_scale=None if scale == 1.0 else torch.tensor(1 / scale))
        assert not result.skipped
        gather()
        norms.append(result.grad_norm)
    return {name: param.detach().numpy() for name, param in p.items()}, norms


def _assert_equal(a: tuple[dict[str, Any], list[float]], b: tuple[dict[str, Any], list[float]]) -> None:
    assert a[1] == b[1]
    for name, value in a[0].items():
        np.testing.assert_array_equal(value, b[0][name])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_data_parallel_training_equals_one_plain_process(world4: World, ranks: int) -> None:
    expected, expected_norms = reference(STEPS, ROWS, **HYPER)
    assert min(expected_norms) > HYPER["max_norm"]  # so clipping is part of the comparison
    without, with_overlap = (world4.run(_train, overlap, ranks=ranks) for overlap in (False, True))
    for weights, norms in [*without, *world4.run(_train, True, 1.0, True, ranks=ranks)]:
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
        for name, value in weights.items():
            np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-6)
    for found in [*without, *with_overlap]:
        _assert_equal(found, without[0])


def test_grad_scale_corrects_the_token_count(world2: World) -> None:
    for plain, scaled in zip(world2.run(_train, True), world2.run(_train, True, 0.25)):
        _assert_equal(plain, scaled)  # a power of two is exact


def _state(p: dict[str, Any], optimizer: MixedPrecisionAdamW) -> list[list[float]]:
    state = [t for found in optimizer.state().values() for _, t in found]
    return [t.detach().float().flatten().tolist() for t in (*p.values(), *state)]


def _nan_case(value: float, dtype: torch.dtype, sharded: bool) -> tuple[StepResult, bool, int, StepResult, bool]:
    """A good step, a step with `value` in a gradient of rank 1, another good step."""
    p = {name: make_param(name, np.ones((3, 4)), dtype) for name in ("a", "b", "c")}
    step, gather = _optimizer_step(p.values(), dist.group.WORLD, 0.1, 1.0, sharded)
    states, results = [_state(p, step.optimizer)], []
    for i in range(3):
        step.buffer.zero()
        step.buffer.start_overlap()
        for name, param in p.items():
            bad = (i, name, dist.get_rank()) == (1, "b", 1)
            param.grad_sink(torch.full((3, 4), value if bad else 1.0))  # type: ignore[attr-defined]
        results.append(step(0.1))
        gather()
        states.append(_state(p, step.optimizer))
    return results[1], states[2] == states[1], step.optimizer.step_count, results[2], states[3] != states[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_non_finite_gradient_skips_the_step_on_all_ranks(
    world2: World, value: float, dtype: torch.dtype, sharded: bool
) -> None:
    for bad, unchanged, count, good, moved in world2.run(_nan_case, value, dtype, sharded):
        assert bad.skipped
        assert not np.isfinite(bad.grad_norm)
        assert unchanged
        assert count == 2
        assert good == StepResult(pytest.approx(12.0), skipped=False)  # 36 elements of 1 + 1
        assert moved


def test_no_clipping_without_a_limit() -> None:
    param = make_param("p", np.ones(4))
    step, _ = _optimizer_step([param], None, 0.0, None)
    param.grad_sink(torch.full((4,), 50.0))  # type: ignore[attr-defined]
    assert step(0.1) == StepResult(100.0, skipped=False)
    assert main_grad_of(param).tolist() == [50.0] * 4


@pytest.mark.gpu
def test_nothing_waits_for_the_device_before_the_norm() -> None:
    params = [make_param(f"p{i}", np.ones((64, 64)), torch.bfloat16, "cuda", is_copy=i == 2) for i in range(3)]
    step, _ = _optimizer_step(params, None, 0.1, 1.0)
    step(0.1)
    step.buffer.zero()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.buffer.start_overlap()
        for param in params:
            param.grad_sink(torch.ones(64, 64, dtype=torch.bfloat16, device="cuda"))  # type: ignore[attr-defined]
        step.buffer.finish()
        shards, device = step.buffer.shards, step.buffer.flat.device
        finalize_gradients(shards, tensor_group=None, embedding_group=None, shared_params=[])
        norm = global_norm(shards, tensor_group=None, model_group=None, device=device)
        step.optimizer.step(0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(np.sqrt(2 * 64 * 64), rel=1e-6)
