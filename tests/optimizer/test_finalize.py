"""Shared gradients, the norm and clipping under TP2 × PP2 against the whole model's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megafp8.data_parallel.grad_buffer import GradBuffer, main_grad_of
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.optimizer.finalize import clip_, finalize_gradients, global_norm
from megafp8.optimizer.step import OptimizerStep
from megafp8.parallel_state import ParallelState, initialize_model_parallel
from tests.tiny_model import CPU, make_buffer, make_param
from tests.world import World

# The ranks' gradients, small whole numbers, so that every sum is exact in fp32.
_rng = np.random.default_rng(3)
_PARTS = {
    name: _rng.integers(-9, 10, size=shape).astype(np.float64)
    for name, shape in {
        "look_up": (8, 4),  # the embedding's gradient on the first stage
        "output": (8, 4),  # and on the last
        "norm": (2, 4),  # one row from each tensor-parallel rank
        "weight": (4, 6),
        "row_bias": (4,),
    }.items()
}
_WHOLE = {
    "embedding": _PARTS["look_up"] + _PARTS["output"],
    "norm": _PARTS["norm"].sum(0),
    "weight": _PARTS["weight"],
    "row_bias": _PARTS["row_bias"],
}


def _stage() -> tuple[ParallelState, dict[str, nn.Parameter], GradBuffer]:
    """This rank's parameters under TP2 × PP2, all ones, with the gradients that this rank computes."""
    state = initialize_model_parallel(2, 2)
    t = state.tensor.rank
    rows, columns = slice(4 * t, 4 * t + 4), slice(3 * t, 3 * t + 3)
    if state.is_first_stage:
        parts = {
            "embedding": (_PARTS["look_up"][rows], {"replicated_over_tp": False}),
            "norm": (_PARTS["norm"][t], {"reduce_over_tp": True}),
        }
    else:
        parts = {
            "weight": (_PARTS["weight"][:, columns], {"replicated_over_tp": False}),
            "row_bias": (_PARTS["row_bias"], {}),
            "embedding": (_PARTS["output"][rows], {"replicated_over_tp": False, "is_copy": True}),
        }
    params = {name: make_param(name, np.ones_like(grad), **spec) for name, (grad, spec) in parts.items()}
    buffer = make_buffer(params.values(), group=state.data_context.group)
    for name, param in params.items():
        param.grad_sink(torch.from_numpy(parts[name][0]))  # type: ignore[attr-defined]
    return state, params, buffer


def _norm(state: ParallelState, buffer: GradBuffer) -> float:
    return global_norm(
        buffer.shards, tensor_group=state.tensor.group, model_group=state.model.group, device=state.device
    ).item()


def _gradients_case() -> tuple[int, int, dict[str, Any], float]:
    state, params, buffer = _stage()
    buffer.finish()
    assert state.embedding is not None
    finalize_gradients(
        buffer.shards,
        tensor_group=state.tensor.group,
        embedding_group=state.embedding.group,
        shared_params=[params["embedding"]],
    )
    gradients = {name: main_grad_of(param).numpy() for name, param in params.items()}
    return state.pipeline.rank, state.tensor.rank, gradients, _norm(state, buffer)


def test_shared_gradients_and_norm_equal_the_whole_model(world4: World) -> None:
    expected_norm = np.float32(np.sqrt(sum((grad**2).sum() for grad in _WHOLE.values())))
    for stage, t, gradients, norm in world4.run(_gradients_case):
        assert norm == expected_norm
        np.testing.assert_array_equal(gradients["embedding"], _WHOLE["embedding"][4 * t : 4 * t + 4])
        if stage == 0:
            np.testing.assert_array_equal(gradients["norm"], _WHOLE["norm"])
        else:
            np.testing.assert_array_equal(gradients["weight"], _WHOLE["weight"][:, 3 * t : 3 * t + 3])


def _non_finite_case(value: float) -> list[float]:
    """The norm with `value` in one gradient of one rank, for every rank and parameter."""
    norms = []
    for rank in range(torch.distributed.get_world_size()):
        for i in range(3):
            state, params, buffer = _stage()
            if rank == state.rank and i < len(params):
                main_grad_of(list(params.values())[i]).view(-1)[1] = value
            norms.append(_norm(state, buffer))
    return norms


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_anywhere_shows_on_all_ranks(world4: World, value: float) -> None:
    stages = [0, 0, 1, 1]  # tensor is the fastest axis: ranks 0, 1 are the first stage, with two parameters
    bad = [i < (2 if stage == 0 else 3) for stage in stages for i in range(3)]
    for norms in world4.run(_non_finite_case, value):
        assert [not np.isfinite(norm) for norm in norms] == bad


def _step_case() -> dict[str, Any]:
    state, params, buffer = _stage()
    assert state.embedding is not None
    step = OptimizerStep(
        buffer,
        MixedPrecisionAdamW(buffer.shards, device=state.device, weight_decay=0.1),
        tensor_group=state.tensor.group,
        model_group=state.model.group,
        embedding_group=state.embedding.group,
        shared_params=[params["embedding"]],
        max_norm=1.0,
    )
    step(lr=0.5)
    buffer.zero()
    for i, param in enumerate(buffer.params):  # another direction, so that the moments matter
        main_grad_of(param).fill_(0.25 * (-1) ** i if not param.spec.reduce_over_tp else 0.5)  # type: ignore[attr-defined]
    step(lr=0.25)
    return {name: param.detach().numpy() for name, param in params.items()}


def test_tied_and_replicated_weights_stay_equal_through_updates(world4: World) -> None:
    first0, first1, last0, last1 = world4.run(_step_case)
    np.testing.assert_array_equal(first0["embedding"], last0["embedding"])
    np.testing.assert_array_equal(first1["embedding"], last1["embedding"])
    np.testing.assert_array_equal(first0["norm"], first1["norm"])
    np.testing.assert_array_equal(last0["row_bias"], last1["row_bias"])
    assert not np.array_equal(first0["embedding"], np.ones_like(first0["embedding"]))


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1e4])
def test_clip_equals_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    params = [make_param(f"p{i}", np.zeros((3, 5 + i))) for i in range(3)]
    reference = [nn.Parameter(torch.zeros_like(param)) for param in params]
    buffer = make_buffer(params)
    for param, other in zip(params, reference):
        other.grad = torch.randn_like(param) * 3
        param.grad_sink(other.grad)  # type: ignore[attr-defined]
    expected_norm = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    norm = global_norm(buffer.shards, tensor_group=None, model_group=None, device=CPU)
    clip_(buffer.owned, norm, max_norm)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected_norm.detach(), rtol=2e-7, atol=0)
    for param, other in zip(params, reference):
        assert other.grad is not None
        torch.testing.assert_close(main_grad_of(param), other.grad, rtol=4e-7, atol=0)


def test_both_sides_of_a_tied_weight_on_one_rank_get_the_sum() -> None:
    sides = [make_param("embedding", 3), make_param("embedding", 3, is_copy=True)]
    buffer = make_buffer(sides)
    for i, side in enumerate(sides):
        side.grad_sink(torch.full((3,), 1.0 + i))  # type: ignore[attr-defined]
    finalize_gradients(buffer.shards, tensor_group=None, embedding_group=None, shared_params=sides)
    assert [main_grad_of(side).tolist() for side in sides] == [[3.0] * 3] * 2
