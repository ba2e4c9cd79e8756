"""Lion against the paper's algorithm in float64, in every storage of state, on one rank and on two with ZeRO."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megafp8.linear.grad_sink import deliver
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.lion import Lion
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.parallel.data.grad_buffer import GradBuffer, main_grad_of
from megafp8.parallel.data.param_buffer import ParamBuffer
from megafp8.training.describe import planned_stage
from megafp8.training.state import tensor_kinds
from tests.tiny_model import CPU, make_buffer, make_param, state_of
from tests.training.presets import BF16, config_of
from tests.world import World

DECAY, LRS = 0.3, [0.01, 0.02, 0.03, 0.02, 0.01]
BETAS = {"beta1": 0.8, "beta2": 0.9}
SHAPES = {"weight": (7, 5), "embedding": (3, 11), "norm": (6,)}


def _values(step: int) -> dict[str, np.ndarray]:
    """Initial values (step 0) or the gradients of a step, in fp32."""
    rng = np.random.default_rng([11, step])
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def _paper_step(
    name: str, w: np.ndarray, m: np.ndarray, gradient: np.ndarray, lr: float
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2 of arXiv:2302.06675 in float64: weight and momentum; norms do not decay."""
    g = gradient.astype(np.float64)
    c = BETAS["beta1"] * m + (1 - BETAS["beta1"]) * g
    decay = 0.0 if name == "norm" else DECAY
    return w - lr * (np.sign(c) + decay * w), BETAS["beta2"] * m + (1 - BETAS["beta2"]) * g


def _paper() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Weights and momenta after all steps."""
    found = {}
    for name, w in _values(0).items():
        w, m = w.astype(np.float64), np.zeros(w.shape)
        for step, lr in enumerate(LRS, start=1):
            w, m = _paper_step(name, w, m, _values(step)[name], lr)
        found[name] = w, m
    return found


def _optimizer(buffer: GradBuffer, **options: Any) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(name="lion", lion=Lion(**BETAS), learning_rate=1.0, weight_decay=DECAY, **options)
    return MixedPrecisionOptimizer(buffer.shards, config, device=CPU)


def _train(sharded: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """This rank's weights, gathered, and the momenta of what it owns, NaN elsewhere."""
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks = 1 if group is None else group.size()
    params = {name: make_param(name, value) for name, value in _values(0).items()}
    buffer = make_buffer(params.values(), 40, group, sharded=sharded)
    gathered = ParamBuffer(buffer.params, buffer.layout, group) if sharded else None
    optimizer = _optimizer(buffer)
    for step, lr in enumerate(LRS, start=1):
        buffer.clear()
        for name, gradient in _values(step).items():  # halves of it from two ranks
            deliver(params[name], torch.from_numpy(gradient) / ranks)
        buffer.finish()
        optimizer.step(lr)
        if gathered is not None:
            gathered.start_gather()
            gathered.wait()
    momenta = {name: np.full(param.numel(), np.nan) for name, param in params.items()}
    for name, param in params.items():
        for shard in (shard for shard in optimizer.shards if shard.param is param):
            momenta[name][shard.start : shard.end] = state_of(optimizer, param)["exp_avg"].double().numpy()
    return {name: (p.detach().double().numpy(), momenta[name].reshape(p.shape)) for name, p in params.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_paper(world2: World, ranks: int, sharded: bool) -> None:
    results = world2.run(_train, sharded, ranks=ranks)
    for name, (weight, momentum) in _paper().items():
        owned = np.zeros(weight.shape, dtype=int)
        for found in results:
            np.testing.assert_allclose(found[name][0], weight, rtol=1e-5, atol=1e-6)
            mine = ~np.isnan(found[name][1])
            np.testing.assert_allclose(found[name][1][mine], momentum[mine], rtol=1e-5, atol=1e-7)
            owned += mine
        assert (owned == (1 if sharded else ranks)).all(), name


@pytest.mark.parametrize(
    ("options", "rounded"),
    [({"moments_dtype": "bf16"}, 2**-8), ({"moments_dtype": "fp8"}, 1 / 8), ({"store_param_remainders": True}, 0.0)],
)
def test_a_step_with_state_in_less_than_fp32(options: dict[str, Any], rounded: float) -> None:
    """The paper's step from the stored state; the new momentum is its, within one step of the format."""
    params = {name: make_param(name, value, torch.bfloat16) for name, value in _values(0).items()}
    buffer = make_buffer(params.values())
    optimizer = _optimizer(buffer, **options)

    def state(name: str) -> tuple[np.ndarray, np.ndarray]:
        tensors, shape = state_of(optimizer, params[name]), SHAPES[name]
        return tuple(tensors[key].double().numpy().reshape(shape).copy() for key in ("master", "exp_avg"))  # type: ignore[return-value]

    for step, lr in enumerate(LRS, start=1):
        before = {name: state(name) for name in params}
        for name, gradient in _values(step).items():
            main_grad_of(params[name]).copy_(torch.from_numpy(gradient))
        optimizer.step(lr)
        for name, (w, m) in before.items():
            new_w, new_m = _paper_step(name, w, m, _values(step)[name], lr)
            found_w, found_m = state(name)
            np.testing.assert_allclose(found_w, new_w, rtol=2e-6, atol=2e-7)
            np.testing.assert_allclose(found_m, new_m, rtol=rounded + 1e-6, atol=np.abs(new_m).max() / 448 / 8)


def test_a_checkpoint_holds_one_moment_of_each_weight() -> None:
    config = config_of(BF16, optimizer={"name": "lion"})
    names = {name for stage in [planned_stage(config, 0)] for p in stage.parameters() for name in _names(p)}
    kinds = {name: kind for name, (_, kind) in tensor_kinds(config).items() if name.startswith("optimizer.")}
    moments = dict.fromkeys((f"optimizer.exp_avg.{name}" for name in names), torch.float32)
    assert kinds == moments | {name.replace("exp_avg", "master"): torch.float32 for name in moments}


def _names(param: Any) -> list[str]:
    return [piece.name for piece in param.spec.shards]
