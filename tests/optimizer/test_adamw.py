"""AdamW against the paper's formulas in float64, with every way to store its state; saving and restoring it."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megafp8.optimizer import adamw, mixed_precision
from megafp8.optimizer.adamw import choose_adam
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.parallel.data.grad_buffer import main_grad_of
from tests.tiny_model import CPU, flat_shard, make_buffer, make_param, state_of

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
DTYPES = [torch.float32, torch.bfloat16]
STORAGE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"moments_dtype": "bf16"},
    "fp8": {"moments_dtype": "fp8"},
    "remainders": {"store_param_remainders": True},
    "fp8-remainders": {"moments_dtype": "fp8", "store_param_remainders": True},
}

State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Weight, first and second moment in float64, flat."""


def _paper_step(state: State, gradient: np.ndarray, t: int, lr: float, decay: float) -> State:
    """Algorithm 2 of Loshchilov & Hutter 2019 in float64, with decay scaled by the learning rate as in torch."""
    w, m, v = state
    g = gradient.ravel().astype(np.float64)
    m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
    m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
    return w - lr * (m_hat / (np.sqrt(v_hat) + EPS) + decay * w), m, v


def _gradients(steps: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(5)
    return [[rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=5).astype(np.float32)] for _ in range(steps)]


def _options(**more: Any) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=1.0, **{"weight_decay": DECAY, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, **more}
    )


class _Model:
    """A weight of `dtype` with decay and a norm in fp32 without, and their optimizer."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, device: str = "cpu", **storage: Any) -> None:
        rng = np.random.default_rng(seed)
        self.params: list[nn.Parameter] = [
            make_param("weight", rng.normal(size=(4, 6)), dtype, device),
            make_param("norm", rng.normal(size=5), device=device),
        ]
        self.buffer = make_buffer(self.params)
        self.optimizer = MixedPrecisionOptimizer(self.buffer.shards, _options(**storage), device=torch.device(device))

    def train(self, gradients: list[list[np.ndarray]], lrs: list[float]) -> None:
        for per_param, lr in zip(gradients, lrs):
            self.buffer.clear()
            for param, gradient in zip(self.params, per_param):
                main_grad_of(param).copy_(torch.from_numpy(gradient))
            self.optimizer.step(lr)

    def values(self, param: nn.Parameter) -> np.ndarray:
        """The fp32 values of a parameter, flat."""
        return state_of(self.optimizer, param).get("master", param.detach().flatten()).double().cpu().numpy().copy()

    def state(self, param: nn.Parameter) -> State:
        """The values and moments of a parameter."""
        state = state_of(self.optimizer, param)
        return self.values(param), *(state[key].double().numpy().copy() for key in ("exp_avg", "exp_avg_sq"))  # type: ignore[return-value]

    def tensors(self) -> list[Tensor]:
        return [t.clone() for p in self.params for t in (p.detach(), *state_of(self.optimizer, p).values())]


def _check_against_the_paper(dtype: torch.dtype, device: str = "cpu") -> None:
    model = _Model(dtype, device=device)
    expected: list[State] = [(model.values(p), np.zeros(p.numel()), np.zeros(p.numel())) for p in model.params]
    gradients, lrs = _gradients(6), [0.01, 0.02, 0.03, 0.02, 0.01, 0.005]
    model.train(gradients, lrs)
    assert model.optimizer.step_count == 6
    for i, (param, decay) in enumerate(zip(model.params, [DECAY, 0.0])):
        for t, (per_param, lr) in enumerate(zip(gradients, lrs), start=1):
            expected[i] = _paper_step(expected[i], per_param[i], t, lr, decay)
        master = state_of(model.optimizer, param).get("master", param.detach())
        assert master.dtype == torch.float32
        np.testing.assert_allclose(model.values(param), expected[i][0], rtol=2e-6, atol=2e-7)
        assert torch.equal(param.detach(), master.view(param.shape).to(param.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_the_paper(dtype: torch.dtype, device: str) -> None:
    _check_against_the_paper(dtype, device)


def test_updates_below_the_precision_of_bf16_add_up() -> None:
    param = make_param("norm", [1.0], torch.bfloat16)
    buffer = make_buffer([param])
    optimizer = MixedPrecisionOptimizer(buffer.shards, _options(weight_decay=0.0), device=CPU)
    main_grad_of(param).fill_(1.0)  # a constant gradient moves by lr a step
    for _ in range(100):
        optimizer.step(lr=1e-4)  # bf16 below 1.0 is 0.0039 apart
    assert param.item() == torch.tensor(0.99).bfloat16().item()


def test_only_marked_parameters_decay() -> None:
    model = _Model(torch.float32)
    before = [param.detach().clone() for param in model.params]
    model.optimizer.step(0.1)
    torch.testing.assert_close(model.params[0].detach(), before[0] * (1 - 0.1 * DECAY))
    assert torch.equal(model.params[1].detach(), before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_exists_before_the_first_step(dtype: torch.dtype) -> None:
    model = _Model(dtype)
    state = state_of(model.optimizer, model.params[0])
    assert set(state) == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())
    for tensor in state.values():
        assert tensor.dtype == torch.float32
        assert tensor.shape == (model.params[0].numel(),)
    assert model.optimizer.step_count == 0


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_state_continues_bit_for_bit(dtype: torch.dtype, storage: str) -> None:
    gradients, lrs = _gradients(7), [0.01] * 7
    model = _Model(dtype, **STORAGE[storage])
    model.train(gradients[:4], lrs)
    saved = {key: [tensor.clone() for _, tensor in found] for key, found in model.optimizer.state().items()}
    weights, count = [param.detach().clone() for param in model.params], model.optimizer.step_count
    model.train(gradients[4:], lrs)

    restored = _Model(dtype, seed=1, **STORAGE[storage])
    restored.train(gradients[:2], lrs)  # used before, so nothing of it may remain
    for param, weight in zip(restored.params, weights):
        if param.dtype == torch.float32:
            param.detach().copy_(weight)
    state = restored.optimizer.state()
    for key, found in state.items():
        for (_, tensor), value in zip(found, saved[key], strict=True):
            tensor.copy_(value)
    restored.optimizer.restore(state, count)
    assert all(torch.equal(param.detach(), weight) for param, weight in zip(restored.params, weights))
    restored.train(gradients[4:], lrs)
    assert all(torch.equal(a, b) for a, b in zip(model.tensors(), restored.tensors(), strict=True))
    assert restored.optimizer.step_count == 7


@pytest.mark.parametrize("batch", [1, 20, 1000])
def test_moments_in_bf16_are_rounded_after_each_step(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Against the paper's formulas with moments that are rounded as a step ends; the step itself is in fp32."""
    monkeypatch.setattr(mixed_precision, "BATCH", batch)
    model = _Model(torch.float32, moments_dtype="bf16")
    expected: list[State] = [(model.values(p), np.zeros(p.numel()), np.zeros(p.numel())) for p in model.params]
    for t, gradients in enumerate(_gradients(5), start=1):
        model.train([gradients], [0.01])
        for i, (gradient, decay) in enumerate(zip(gradients, [DECAY, 0.0])):
            w, *moments = _paper_step(expected[i], gradient, t, 0.01, decay)
            m, v = (torch.from_numpy(x).float().bfloat16().double().numpy() for x in moments)
            expected[i] = w, m, v
    for param, (w, m, v) in zip(model.params, expected):
        state = state_of(model.optimizer, param)
        assert {key: tensor.dtype for key, tensor in state.items()} == dict.fromkeys(state, torch.bfloat16)
        np.testing.assert_allclose(model.values(param), w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state["exp_avg"].float().numpy(), m, rtol=2**-7, atol=0)
        np.testing.assert_allclose(state["exp_avg_sq"].float().numpy(), v, rtol=2**-7, atol=0)


@pytest.mark.parametrize("batch", [1, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_with_fp8_moments(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int) -> None:
    """The paper's step from the stored moments; the new ones are its moments, within one step of the format."""
    monkeypatch.setattr(mixed_precision, "BATCH", batch)
    model = _Model(dtype, moments_dtype="fp8")
    before = [model.state(param) for param in model.params]
    for t, gradients in enumerate(_gradients(20), start=1):
        model.train([gradients], [0.01])
        for i, (param, decay) in enumerate(zip(model.params, [DECAY, 0.0])):
            state = state_of(model.optimizer, param)
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
            w, m, v = _paper_step(before[i], gradients[i], t, 0.01, decay)
            before[i] = new_w, new_m, new_v = model.state(param)
            np.testing.assert_allclose(new_w, w, rtol=2e-6, atol=2e-7)
            np.testing.assert_allclose(new_m, m, rtol=1 / 8, atol=np.abs(m).max() / 448 / 256)
            np.testing.assert_allclose(new_v, v, rtol=1 / 8, atol=v.max() / 61440 / 2**16)


def test_memory() -> None:
    for name, (weight, norm) in {"fp8": (2 * (24 + 1) + 4 * 24, 2 * (5 + 1)), "remainders": (10 * 24, 8 * 5)}.items():
        optimizer = _Model(torch.bfloat16, **STORAGE[name]).optimizer
        sizes = {sum(part.nbytes for part in parts.values()) for parts in optimizer.storage.values()}
        assert sizes == {weight, norm}  # the norm is fp32, and its own master
        held = sum(master.untyped_storage().nbytes() for master in optimizer._live)
        assert held == 4 * 5 + (4 * 24 if name == "fp8" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_released_parameters_have_their_values_in_the_masters(dtype: torch.dtype) -> None:
    param = make_param("weight", [1.0, 2.0], dtype)
    buffer = make_buffer([param])
    optimizer = MixedPrecisionOptimizer(buffer.shards, _options(weight_decay=0.5), device=CPU, released={param})
    optimizer.step(1.0)  # without a gradient: decays only
    ((shard, values),) = optimizer.released_values()
    assert (shard.param is param, values.dtype, values.tolist()) == (True, dtype, [0.5, 1.0])
    assert param.tolist() == [1.0, 2.0]
    assert torch.equal(optimizer.stored_tensors(shard)["master"][0], torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize("moments_dtype", ["fp32", "bf16", "fp8"])
def test_a_rank_that_owns_nothing(moments_dtype: str) -> None:
    optimizer = MixedPrecisionOptimizer([], _options(moments_dtype=moments_dtype), device=CPU)
    optimizer.step(0.1)
    assert optimizer.step_count == 1
    assert optimizer.state() == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_moving_average_is_a_weighted_sum_of_the_weights(dtype: torch.dtype) -> None:
    steps, decay = 12, 0.4
    model = _Model(dtype, average_decay=decay)
    weights: list[list[np.ndarray]] = []
    for gradients in _gradients(steps):
        model.train([gradients], [0.05])
        model.optimizer.average_weights()
        weights.append([model.values(param) for param in model.params])
    decays = [min(decay, (n - 1) / (n + 9)) for n in range(1, steps + 1)]
    assert decays[1] < decays[5] < decays[-1] == decay
    shares = [(1 - d) * math.prod(decays[n + 1 :]) for n, d in enumerate(decays)]
    assert sum(shares) == pytest.approx(1)
    for i, param in enumerate(model.params):
        expected = sum(share * of_step[i] for share, of_step in zip(shares, weights))
        average = state_of(model.optimizer, param)["average"]
        assert average.dtype == torch.float32
        np.testing.assert_allclose(average.double().numpy(), expected, rtol=2e-6, atol=2e-7)
    model.optimizer.restart_average()
    for param in model.params:
        average = state_of(model.optimizer, param)["average"]
        np.testing.assert_array_equal(average.double().numpy(), model.values(param))


def test_batches_hold_everything_once_in_order() -> None:
    shards = [flat_shard("weight", n) for n in [5, 7, 30, 1, 19, 4]]
    batches = mixed_precision._batches(shards, 20)
    assert [[len(shard) for shard in batch] for batch in batches] == [[5, 7], [30], [1, 19], [4]]
    assert [shard for batch in batches for shard in batch] == shards


# --- apex -------------------------------------------------------------------------------------------------------------


class _LikeApex(torch.optim.Optimizer):
    """FusedAdam's interface (step in the group, fp32 moments in the state) in plain arithmetic."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.lerp_(p.grad, 1 - beta1)
                v.lerp_(p.grad**2, 1 - beta2)
                m_hat, v_hat = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
                p -= group["lr"] * (m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p)


def test_apex_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "choose_adam", lambda device: (_LikeApex, "apex FusedAdam: for a test"))
    _check_against_the_paper(torch.bfloat16)
    for storage in STORAGE:
        test_restored_state_continues_bit_for_bit(torch.bfloat16, storage)


def _fake_apex(monkeypatch: pytest.MonkeyPatch, available: bool | None) -> None:
    """`available=None`: PyPI's unrelated package."""
    modules = {name: ModuleType(name) for name in ("apex", "apex.multi_tensor_apply", "apex.optimizers")}
    modules["apex"].__path__ = []
    if available is None:
        modules = {"apex": modules["apex"]}
    else:
        modules["apex.multi_tensor_apply"].multi_tensor_applier = type("", (), {"available": available})  # type: ignore[attr-defined]
        modules["apex.optimizers"].FusedAdam = _LikeApex  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("available", "chosen", "reason"),
    [
        (None, torch.optim.AdamW, "not a working NVIDIA apex"),
        (False, torch.optim.AdamW, "without its CUDA extensions"),
        (True, _LikeApex, "apex FusedAdam: NVIDIA apex is installed"),
    ],
)
def test_choice_between_apex_and_torch(
    monkeypatch: pytest.MonkeyPatch, available: bool | None, chosen: type, reason: str
) -> None:
    _fake_apex(monkeypatch, available)
    implementation, text = choose_adam(torch.device("cuda"))
    assert implementation is chosen
    assert reason in text
    assert choose_adam(CPU)[0] is torch.optim.AdamW


def test_choice_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert choose_adam(torch.device("cuda")) == (torch.optim.AdamW, "torch fused AdamW: NVIDIA apex is not installed")
