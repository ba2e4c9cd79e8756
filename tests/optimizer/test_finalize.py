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
from tests.optimizer.tiny import make_param
from tests.world import World

# What the ranks hand in, as small whole numbers, so that every sum is exact in fp32.
_rng = np.random.default_rng(3)
_SHARES = {
    name: _rng.integers(-9, 10, size=shape).astype(np.float64)
    for name, shape in {
        "look_up": (8, 4),  # the embedding's gradient on the first stage
        "output": (8, 4),  # and on the last
        "norm": (2, 4),  # each tensor-parallel rank's share
        "weight": (4, 6),
        "row_bias": (4,),
    }.items()
}
# The gradients of the whole model.
_WHOLE = {
    "embedding": _SHARES["look_up"] + _SHARES["output"],
    "norm": _SHARES["norm"].sum(0),
    "weight": _SHARES["weight"],
    "row_bias": _SHARES["row_bias"],
}
_NORM = np.sqrt(sum((grad**2).sum() for grad in _WHOLE.values()))


def _stage(state: ParallelState) -> tuple[dict[str, nn.Parameter], GradBuffer]:
    """This rank's parameters under TP2 × PP2, all ones, with the gradients that this rank computes."""
    t = state.tensor.rank
    rows, columns = slice(4 * t, 4 * t + 4), slice(3 * t, 3 * t + 3)
    if state.is_first_stage:
        parts = {
            "embedding": (_SHARES["look_up"][rows], {"replicated_over_tp": False}),
            "norm": (_SHARES["norm"][t], {"reduce_over_tp": True}),
        }
    else:
        parts = {
            "weight": (_SHARES["weight"][:, columns], {"replicated_over_tp": False}),
            "row_bias": (_SHARES["row_bias"], {}),
            "embedding": (_SHARES["output"][rows], {"replicated_over_tp": False, "is_copy": True}),
        }
    params = {name: make_param(name, np.ones_like(grad), **spec) for name, (grad, spec) in parts.items()}
    buffer = GradBuffer(
        list(params.values()), data_parallel_group=state.data_context.group, bucket_elements=1, device=state.device
    )
    for name, param in params.items():
        param.grad_sink(torch.from_numpy(parts[name][0]))  # type: ignore[attr-defined]
    return params, buffer


def _norm(state: ParallelState, buffer: GradBuffer) -> float:
    return global_norm(
        buffer.fragments, tensor_group=state.tensor.group, model_group=state.model.group, device=state.device
    ).item()


def _gradients_case() -> tuple[int, int, dict[str, Any], float]:
    state = initialize_model_parallel(2, 2)
    params, buffer = _stage(state)
    buffer.finish()
    assert state.embedding is not None
    finalize_gradients(
        buffer.fragments,
        tensor_group=state.tensor.group,
        embedding_group=state.embedding.group,
        shared_params=[params["embedding"]],
    )
    gradients = {name: main_grad_of(param).numpy() for name, param in params.items()}
    return state.pipeline.rank, state.tensor.rank, gradients, _norm(state, buffer)


def test_shared_gradients_and_norm_equal_the_whole_model(world4: World) -> None:
    for stage, t, gradients, norm in world4.run(_gradients_case):
        assert norm == np.float32(_NORM)
        np.testing.assert_array_equal(gradients["embedding"], _WHOLE["embedding"][4 * t : 4 * t + 4])
        if stage == 0:
            np.testing.assert_array_equal(gradients["norm"], _WHOLE["norm"])
        else:
            np.testing.assert_array_equal(gradients["weight"], _WHOLE["weight"][:, 3 * t : 3 * t + 3])


def _non_finite_case(value: float) -> list[float]:
    """The norm with `value` in one gradient of one rank, for every rank and parameter."""
    state = initialize_model_parallel(2, 2)
    norms = []
    for rank in range(state.world_size):
        for place in range(3):
            params, buffer = _stage(state)
            names = list(params)
            if rank == state.rank and place < len(names):
                main_grad_of(params[names[place]]).view(-1)[1] = value
            norms.append(_norm(state, buffer))
    return norms


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_anywhere_shows_everywhere(world4: World, value: float) -> None:
    stages = [0, 0, 1, 1]  # tensor is the fastest axis: ranks 0, 1 are the first stage, with two parameters
    broken = [place < (2 if stage == 0 else 3) for stage in stages for place in range(3)]
    for norms in world4.run(_non_finite_case, value):
        assert [not np.isfinite(norm) for norm in norms] == broken


def _step_case() -> dict[str, Any]:
    state = initialize_model_parallel(2, 2)
    params, buffer = _stage(state)
    assert state.embedding is not None
    step = OptimizerStep(
        buffer,
        MixedPrecisionAdamW(buffer.fragments, device=state.device, weight_decay=0.1),
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
    plain = [nn.Parameter(torch.zeros_like(param)) for param in params]
    buffer = GradBuffer(params, data_parallel_group=None, bucket_elements=1, device=torch.device("cpu"))
    for param, other in zip(params, plain):
        other.grad = torch.randn_like(param) * 3
        param.grad_sink(other.grad)  # type: ignore[attr-defined]
    expected_norm = torch.nn.utils.clip_grad_norm_(plain, max_norm)
    norm = global_norm(buffer.fragments, tensor_group=None, model_group=None, device=torch.device("cpu"))
    clip_(buffer.owned, norm, max_norm)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected_norm.detach(), rtol=2e-7, atol=0)
    for param, other in zip(params, plain):
        assert other.grad is not None
        torch.testing.assert_close(main_grad_of(param), other.grad, rtol=4e-7, atol=0)
