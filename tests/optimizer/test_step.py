"""Optimizer steps: data-parallel training against one plain process, skipped steps, shared gradients and the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafp8.config.schema import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.linear.grad_sink import deliver
from megafp8.models.gpt import GPTStage
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.step import OptimizerStep, StepResult, clip_factor, multiply_
from megafp8.parallel.data.grad_buffer import GradBuffer, main_grad_of
from megafp8.parallel.data.param_buffer import ParamBuffer
from megafp8.parallel.parallel_state import ParallelState, initialize_model_parallel
from megafp8.parallel.sharding import spec_of
from tests.marks import slow_but
from tests.models.test_gpt import MODELS, MOE_MODELS
from tests.models.weights import randomize
from tests.tiny_model import batch, loss_sum, make_buffer, make_param, reference, tiny_params
from tests.world import World

STEPS, ROWS = 3, 8
HYPER = {"lr": 0.02, "weight_decay": 0.1, "max_norm": 0.7}


def _step(buffer: GradBuffer, weight_decay: float = 0.1, max_norm: float | None = 1.0, **groups: Any) -> OptimizerStep:
    config = OptimizerConfig(learning_rate=1.0, weight_decay=weight_decay)
    optimizer = MixedPrecisionOptimizer(buffer.shards, config, device=buffer.owned[0].device)
    none: dict[str, Any] = {"tensor_group": None, "model_group": None, "embedding_group": None, "shared_params": []}
    return OptimizerStep(buffer, optimizer, max_norm=max_norm, **{**none, **groups})


def _data_parallel_step(
    params: Any, weight_decay: float, max_norm: float | None, sharded: bool = False
) -> tuple[OptimizerStep, Callable[[], None]]:
    """The step, and the gather of the weights after it."""
    group = dist.group.WORLD
    buffer = make_buffer(params, 100, group, sharded=sharded)
    weights = ParamBuffer(buffer.params, buffer.layout, group) if sharded else None

    def gather() -> None:
        if weights is not None:
            weights.start_gather()
            weights.wait()

    return _step(buffer, weight_decay, max_norm, sharded=sharded, data_group=group), gather


def _train(overlap: bool, scale: float = 1.0, sharded: bool = False) -> tuple[dict[str, Any], list[float]]:
    """Weights and norms of the tiny model trained on this rank's rows.

    `scale` multiplies the loss, and `grad_scale` divides it out again.
    """
    p = tiny_params()
    step, gather = _data_parallel_step(p.values(), HYPER["weight_decay"], HYPER["max_norm"], sharded)
    assert len(step.buffer.layout.buckets) > 1
    norms = []
    for i in range(STEPS):
        step.buffer.clear()
        tokens = batch(i, ROWS)
        rows = tokens[dist.get_rank() :: dist.get_world_size()]
        for micro_batch, row in enumerate(rows):
            if overlap and micro_batch == len(rows) - 1:
                step.buffer.start_overlap()
            (loss_sum(p, row) * (scale / tokens[:, 1:].numel())).backward()
        step.buffer.finish()
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


def _state(p: dict[str, Any], optimizer: MixedPrecisionOptimizer) -> list[list[float]]:
    state = [t for found in optimizer.state().values() for _, t in found]
    return [t.detach().float().flatten().tolist() for t in (*p.values(), *state)]


def _nan_case(value: float, dtype: torch.dtype, sharded: bool) -> tuple[StepResult, bool, int, StepResult, bool]:
    """A good step, a step with `value` in a gradient of rank 1, another good step."""
    p = {name: make_param(name, np.ones((3, 4)), dtype) for name in ("a", "b", "c")}
    step, gather = _data_parallel_step(p.values(), 0.1, 1.0, sharded)
    states, results = [_state(p, step.optimizer)], []
    for i in range(3):
        step.buffer.clear()
        step.buffer.start_overlap()
        for name, param in p.items():
            bad = (i, name, dist.get_rank()) == (1, "b", 1)
            deliver(param, torch.full((3, 4), value if bad else 1.0))
        step.buffer.finish()
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
    step = _step(make_buffer([param]), 0.0, None)
    deliver(param, torch.full((4,), 50.0))
    assert step(0.1) == StepResult(100.0, skipped=False)
    assert main_grad_of(param).tolist() == [50.0] * 4


@pytest.mark.gpu
def test_a_step_waits_for_nothing_but_its_norm() -> None:
    params = [make_param(f"p{i}", np.ones((64, 64)), torch.bfloat16, "cuda", is_copy=i == 2) for i in range(3)]
    step = _step(make_buffer(params, 100))
    step(0.1)
    step.buffer.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.buffer.start_overlap()
        for param in params:
            deliver(param, torch.ones(64, 64, dtype=torch.bfloat16, device="cuda"))
        step.buffer.finish()
        result = step(0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.grad_norm == pytest.approx(np.sqrt(2 * 64 * 64), rel=1e-6)


# --- shared gradients and the norm under TP2 × PP2 --------------------------------------------------------------------

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


def _stage() -> tuple[ParallelState, dict[str, nn.Parameter], OptimizerStep]:
    """This rank's parameters under TP2 × PP2, all ones, with the gradients that this rank computes."""
    state = initialize_model_parallel(2, 2)
    assert state.embedding is not None
    t = state.tensor.rank
    rows, columns = slice(4 * t, 4 * t + 4), slice(3 * t, 3 * t + 3)
    if state.pipeline.is_first:
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
    step = _step(
        make_buffer(params.values(), group=state.data_context.group),
        tensor_group=state.tensor.group,
        model_group=state.model.group,
        embedding_group=state.embedding.group,
        shared_params=[params["embedding"]],
    )
    for name, param in params.items():
        deliver(param, torch.from_numpy(parts[name][0]))
    return state, params, step


def _gradients_case() -> tuple[int, int, dict[str, Any], float]:
    state, params, step = _stage()
    step.buffer.finish()
    step.reduce_shared_gradients()
    gradients = {name: main_grad_of(param).numpy() for name, param in params.items()}
    return state.pipeline.rank, state.tensor.rank, gradients, step.global_norm().item()


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
            state, params, step = _stage()
            if rank == state.rank and i < len(params):
                main_grad_of(list(params.values())[i]).view(-1)[1] = value
            norms.append(step.global_norm().item())
    return norms


@pytest.mark.parametrize("value", slow_but([float("nan"), float("inf")], float("inf")))
def test_a_non_finite_gradient_anywhere_shows_on_all_ranks(world4: World, value: float) -> None:
    stages = [0, 0, 1, 1]  # tensor is the fastest axis: ranks 0, 1 are the first stage, with two parameters
    bad = [i < (2 if stage == 0 else 3) for stage in stages for i in range(3)]
    for norms in world4.run(_non_finite_case, value):
        assert [not np.isfinite(norm) for norm in norms] == bad


def _norms_of_models(names: list[str], tp: int, pp: int, ep: int) -> dict[str, tuple[float, float]]:
    """By model, the norm of gradients that are random weights, and that of the whole weights.

    What several ranks have parts of, they sum first.
    """
    state, found = initialize_model_parallel(tp, pp, expert_model_parallel_size=ep), {}
    of_others = state.expert_data.ranks != state.data_context.ranks
    for name in names:
        config, whole = ModelConfig(**(MODELS | MOE_MODELS)[name]), {}
        context = BuildContext(
            state.tensor.group, Fp8Manager(None, amax_group=None), torch.float32, state.device,
            sequence_parallel=True, expert=state.expert.group, sequence_group=state.tensor_context.group,
        )  # fmt: skip
        size = config.num_layers // pp
        ends = [*range(size, config.num_layers, size), len(config.spec.layers)]
        stages = [
            GPTStage(config.spec, context, layers=range(i * size, end), positions=8) for i, end in enumerate(ends)
        ]
        for stage in stages:
            whole |= randomize(stage, lambda piece: 0.3, config.spec)
        stage = stages[state.pipeline.rank]
        tied = stage.shared_weight if pp > 1 else None
        step = OptimizerStep(
            make_buffer(stage.parameters()), None, state.tensor.group, state.model.group,  # type: ignore[arg-type]
            None if state.embedding is None else state.embedding.group, [] if tied is None else [tied], None,
            data_group=state.data_context.group, expert_group=state.expert_data.group if of_others else None,
        )  # fmt: skip
        for param in stage.parameters():
            share = (0.25, 0.75)[state.tensor.rank] if spec_of(param).reduce_over_tp and tp > 1 else 1.0
            share *= (0.25, 0.75)[state.pipeline.rank] if param is tied else 1.0
            main_grad_of(param).copy_(param.detach() * share)
        step.reduce_shared_gradients()
        squares = sum(float(x.detach().square().sum()) for x in whole.values())
        found[name] = float(step.global_norm()), squares**0.5
    return found


DENSE = [name for name in MODELS if name not in ("sparse", "sparse-warmup", "geglu", "gpt2-untied-gelu", "chunks")]
EVEN_EXPERTS = [name for name in MOE_MODELS if name not in ("ungated", "all-experts")]


@pytest.mark.parametrize(
    ("names", "tp", "pp", "ep", "ranks"),
    [
        (DENSE, 2, 1, 1, 2),
        pytest.param(EVEN_EXPERTS, 2, 1, 4, 4, marks=pytest.mark.slow),
        (["deepseek"], 1, 1, 2, 4),
        (["qwen", "tied-mtp", "gpt2"], 2, 2, 1, 4),
    ],
    ids=["tp2", "tp2-ep4", "dp4-ep2", "tp2-pp2"],
)
def test_the_norm_counts_each_weight_of_a_model_once(
    world4: World, names: list[str], tp: int, pp: int, ep: int, ranks: int
) -> None:
    """Sharded, replicated, tied or of experts: attention sinks, latent projections, and all others.

    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 8; https://github.com/ROCm/TransformerEngine/pull/715
    """
    for found in world4.run(_norms_of_models, names, tp, pp, ep, ranks=ranks):
        for name, (norm, expected) in found.items():
            assert norm == pytest.approx(expected, rel=1e-6), name


def _step_case() -> dict[str, Any]:
    _, params, step = _stage()
    step(lr=0.5)
    step.buffer.clear()
    for i, param in enumerate(step.buffer.params):  # another direction, so that the moments matter
        main_grad_of(param).fill_(0.25 * (-1) ** i if not param.spec.reduce_over_tp else 0.5)
    step(lr=0.25)
    return {name: param.detach().numpy() for name, param in params.items()}


def test_tied_and_replicated_weights_stay_equal_through_updates(world4: World) -> None:
    first0, first1, last0, last1 = world4.run(_step_case)
    np.testing.assert_array_equal(first0["embedding"], last0["embedding"])
    np.testing.assert_array_equal(first1["embedding"], last1["embedding"])
    np.testing.assert_array_equal(first0["norm"], first1["norm"])
    np.testing.assert_array_equal(last0["row_bias"], last1["row_bias"])
    assert not np.array_equal(first0["embedding"], np.ones_like(first0["embedding"]))


def test_both_sides_of_a_tied_weight_on_one_rank_get_the_sum() -> None:
    sides = [make_param("embedding", 3), make_param("embedding", 3, is_copy=True)]
    step = _step(make_buffer(sides), shared_params=sides)
    for i, side in enumerate(sides):
        deliver(side, torch.full((3,), 1.0 + i))
    step.reduce_shared_gradients()
    assert [main_grad_of(side).tolist() for side in sides] == [[3.0] * 3] * 2


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1e4])
def test_clip_equals_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    params = [make_param(f"p{i}", np.zeros((3, 5 + i))) for i in range(3)]
    reference = [nn.Parameter(torch.zeros_like(param)) for param in params]
    step = _step(make_buffer(params))
    for param, other in zip(params, reference):
        other.grad = torch.randn_like(param) * 3
        deliver(param, other.grad)
    expected_norm = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    norm = step.global_norm()
    multiply_(step.buffer.owned, clip_factor(norm, max_norm))
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected_norm.detach(), rtol=2e-7, atol=0)
    for param, other in zip(params, reference):
        assert other.grad is not None
        torch.testing.assert_close(main_grad_of(param), other.grad, rtol=4e-7, atol=0)
