from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data_parallel.grad_buffer import GradBuffer, main_grad_of
from megafp8.distributed.sharding import FlatShard
from megafp8.optimizer import adam
from megafp8.optimizer.adam import MixedPrecisionAdamW, choose_adam
from tests.optimizer.tiny import make_param

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
DTYPES = [torch.float32, torch.bfloat16]


def _adamw(weight: np.ndarray, gradients: list[np.ndarray], lrs: list[float], decay: float) -> np.ndarray:
    """Algorithm 2 of Loshchilov & Hutter 2019 in float64, with decay scaled by the learning rate as in torch."""
    weight, m, v = weight.astype(np.float64), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, lrs), start=1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        weight = weight - lr * (m_hat / (np.sqrt(v_hat) + EPS) + decay * weight)
    return weight


KEPT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"moments_dtype": torch.bfloat16},
    "fp8": {"moments_dtype": torch.float8_e4m3fn},
    "remainders": {"store_param_remainders": True},
    "fp8-remainders": {"moments_dtype": torch.float8_e4m3fn, "store_param_remainders": True},
}


def _model(
    dtype: torch.dtype, seed: int = 0, device: str = "cpu", **kept: Any
) -> tuple[list[Any], GradBuffer, MixedPrecisionAdamW]:
    """A weight of `dtype` with decay and a norm in fp32 without."""
    rng = np.random.default_rng(seed)
    params = [
        make_param("weight", rng.normal(size=(4, 6)), dtype, device),
        make_param("norm", rng.normal(size=5), device=device),
    ]
    buffer = GradBuffer(params, data_parallel_group=None, bucket_elements=1, device=torch.device(device))
    optimizer = MixedPrecisionAdamW(
        buffer.shards, device=torch.device(device), weight_decay=DECAY, betas=BETAS, eps=EPS, **kept
    )
    return params, buffer, optimizer


def _gradients(steps: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(5)
    return [[rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=5).astype(np.float32)] for _ in range(steps)]


def _run(params: list[Any], buffer: GradBuffer, optimizer: MixedPrecisionAdamW, gradients: Any, lrs: Any) -> None:
    for per_param, lr in zip(gradients, lrs):
        buffer.zero()
        for param, gradient in zip(params, per_param):
            main_grad_of(param).copy_(torch.from_numpy(gradient))
        optimizer.step(lr)


def _state(params: list[Any], optimizer: MixedPrecisionAdamW) -> list[torch.Tensor]:
    return [t.clone() for param in params for t in (param.detach(), *optimizer.state_tensors(param).values())]


def _check_against_the_paper(dtype: torch.dtype, device: str = "cpu") -> None:
    params, buffer, optimizer = _model(dtype, device=device)
    start = [param.detach().double().cpu().numpy() for param in params]
    gradients, lrs = _gradients(6), [0.01, 0.02, 0.03, 0.02, 0.01, 0.005]
    _run(params, buffer, optimizer, gradients, lrs)
    assert optimizer.step_count == 6
    for i, decay in enumerate([DECAY, 0.0]):
        expected = _adamw(start[i], [g[i].astype(np.float64) for g in gradients], lrs, decay)
        master = optimizer.state_tensors(params[i]).get("master", params[i].detach())
        assert master.dtype == torch.float32
        master = master.view(params[i].shape)
        np.testing.assert_allclose(master.cpu().numpy(), expected, rtol=2e-6, atol=2e-7)
        assert torch.equal(params[i].detach(), master.to(params[i].dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_paper(dtype: torch.dtype) -> None:
    _check_against_the_paper(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_paper_on_cuda(dtype: torch.dtype) -> None:
    _check_against_the_paper(dtype, "cuda")


def test_updates_below_the_precision_of_bf16_add_up() -> None:
    param = make_param("norm", [1.0], torch.bfloat16)
    buffer = GradBuffer([param], data_parallel_group=None, bucket_elements=1, device=torch.device("cpu"))
    optimizer = MixedPrecisionAdamW(buffer.shards, device=buffer.flat.device, weight_decay=0.0)
    main_grad_of(param).fill_(1.0)  # a constant gradient moves by lr a step
    for _ in range(100):
        optimizer.step(lr=1e-4)  # bf16 below 1.0 is 0.0039 apart
    assert param.item() == torch.tensor(0.99).bfloat16().item()


@pytest.mark.parametrize("weight_decay", [None, 0.5])
def test_only_marked_parameters_decay(weight_decay: float | None) -> None:
    params, _, optimizer = _model(torch.float32)
    before = [param.detach().clone() for param in params]
    optimizer.step(0.1, weight_decay)
    torch.testing.assert_close(params[0].detach(), before[0] * (1 - 0.1 * (weight_decay or DECAY)))
    assert torch.equal(params[1].detach(), before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_is_there_before_the_first_step(dtype: torch.dtype) -> None:
    params, _, optimizer = _model(dtype)
    state = optimizer.state_tensors(params[0])
    assert list(state) == (["exp_avg", "exp_avg_sq"] if dtype == torch.float32 else ["master", "exp_avg", "exp_avg_sq"])
    for tensor in state.values():
        assert tensor.dtype == torch.float32
        assert tensor.shape == (params[0].numel(),)
    assert optimizer.step_count == 0


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_state_continues_bit_for_bit(dtype: torch.dtype, kept: str) -> None:
    gradients, lrs = _gradients(7), [0.01] * 7
    params, buffer, optimizer = _model(dtype, **KEPT[kept])
    _run(params, buffer, optimizer, gradients[:4], lrs)
    saved = {key: [tensor.clone() for _, tensor in found] for key, found in optimizer.state().items()}
    weights, count = [param.detach().clone() for param in params], optimizer.step_count
    _run(params, buffer, optimizer, gradients[4:], lrs)

    others, other_buffer, restored = _model(dtype, seed=1, **KEPT[kept])
    _run(others, other_buffer, restored, gradients[:2], lrs)  # used before, so nothing may be left of it
    for param, weight in zip(others, weights):
        if param.dtype == torch.float32:
            param.detach().copy_(weight)
    state = restored.state()
    for key, found in state.items():
        for (_, tensor), value in zip(found, saved[key], strict=True):
            tensor.copy_(value)
    restored.restore(state, count)
    assert all(torch.equal(param.detach(), weight) for param, weight in zip(others, weights))
    _run(others, other_buffer, restored, gradients[4:], lrs)
    for a, b in zip(_state(params, optimizer), _state(others, restored), strict=True):
        assert torch.equal(a, b)
    assert restored.step_count == 7


class _LikeApex(torch.optim.Optimizer):
    """FusedAdam's interface (step in the group, fp32 moments in the state) with the arithmetic spelt out."""

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


def test_the_way_through_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "choose_adam", lambda device: (_LikeApex, "apex FusedAdam: for a test"))
    _check_against_the_paper(torch.bfloat16)
    for kept in KEPT:
        test_restored_state_continues_bit_for_bit(torch.bfloat16, kept)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).float().bfloat16().double().numpy()


@pytest.mark.parametrize("batch", [1, 20, 1000])
def test_moments_in_bf16_are_rounded_after_each_step(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Held against the paper's formulas with moments that are rounded as a step ends; the step itself sees fp32."""
    monkeypatch.setattr(adam, "BATCH", batch)
    params = [make_param("weight", np.linspace(-1, 1, 24).reshape(4, 6)), make_param("norm", np.ones(5))]
    buffer = GradBuffer(params, data_parallel_group=None, bucket_elements=1, device=torch.device("cpu"))
    optimizer = MixedPrecisionAdamW(
        buffer.shards, device=torch.device("cpu"), weight_decay=DECAY, moments_dtype=torch.bfloat16
    )
    expected = [param.detach().double().numpy().copy() for param in params]
    moments = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in expected]
    for t, gradients in enumerate(_gradients(5), start=1):
        _run(params, buffer, optimizer, [gradients], [0.01])
        for i, (g, decay) in enumerate(zip(gradients, [DECAY, 0.0])):
            m, v = moments[i]
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g.astype(np.float64) ** 2
            m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
            expected[i] -= 0.01 * (m_hat / (np.sqrt(v_hat) + EPS) + decay * expected[i])
            moments[i] = [_to_bf16(m), _to_bf16(v)]
    for param, weight, (m, v) in zip(params, expected, moments):
        state = optimizer.state_tensors(param)
        assert {key: tensor.dtype for key, tensor in state.items()} == dict.fromkeys(state, torch.bfloat16)
        np.testing.assert_allclose(param.detach().numpy(), weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state["exp_avg"].float().numpy(), m.ravel(), rtol=2**-7, atol=0)
        np.testing.assert_allclose(state["exp_avg_sq"].float().numpy(), v.ravel(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("batch", [1, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_with_fp8_moments(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int) -> None:
    """The paper's step, in float64, from the moments that are kept; and these are its moments, but for one code."""
    monkeypatch.setattr(adam, "BATCH", batch)
    params, buffer, optimizer = _model(dtype, moments_dtype=torch.float8_e4m3fn)
    before = [_fp32_state(optimizer, param) for param in params]
    for t, gradients in enumerate(_gradients(20), start=1):
        _run(params, buffer, optimizer, [gradients], [0.01])
        after = [_fp32_state(optimizer, param) for param in params]
        for (m, v, w), (new_m, new_v, new_w), g, decay in zip(before, after, gradients, [DECAY, 0.0], strict=True):
            m = BETAS[0] * m + (1 - BETAS[0]) * g.ravel()
            v = BETAS[1] * v + (1 - BETAS[1]) * g.ravel().astype(np.float64) ** 2
            m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
            w = w - 0.01 * (m_hat / (np.sqrt(v_hat) + EPS) + decay * w)
            np.testing.assert_allclose(new_w, w, rtol=2e-6, atol=2e-7)
            np.testing.assert_allclose(new_m, m, rtol=1 / 8, atol=np.abs(m).max() / 448 / 256)
            np.testing.assert_allclose(new_v, v, rtol=1 / 8, atol=v.max() / 61440 / 2**16)
        before = after


def _fp32_state(optimizer: MixedPrecisionAdamW, param: torch.nn.Parameter) -> list[np.ndarray]:
    """Moments and values of a parameter, flat."""
    state = optimizer.state_tensors(param)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    found = (state["exp_avg"], state["exp_avg_sq"], state.get("master", param.detach().flatten()))
    return [x.double().numpy().copy() for x in found]


def test_memory() -> None:
    for kept, (weight, norm) in {"fp8": (2 * (24 + 1) + 4 * 24, 2 * (5 + 1)), "remainders": (10 * 24, 8 * 5)}.items():
        _, _, optimizer = _model(torch.bfloat16, **KEPT[kept])
        sizes = {sum(part.nbytes for part in parts.values()) for parts in optimizer.storage.values()}
        assert sizes == {weight, norm}  # the norm is fp32, and its own master
        held = sum(master.untyped_storage().nbytes() for master in optimizer.storage)
        assert held == 4 * 5 + (4 * 24 if kept == "fp8" else 0)


@pytest.mark.parametrize("moments_dtype", [*DTYPES, torch.float8_e4m3fn])
def test_a_rank_that_owns_nothing(moments_dtype: torch.dtype) -> None:
    optimizer = MixedPrecisionAdamW([], device=torch.device("cpu"), weight_decay=0.1, moments_dtype=moments_dtype)
    optimizer.step(0.1)
    assert optimizer.step_count == 1
    assert optimizer.state() == {}


def test_batches_hold_everything_once_in_order() -> None:
    sizes = [5, 7, 30, 1, 19, 4]
    fragments = [FlatShard(make_param("weight", [0.0] * n), 0, n) for n in sizes]
    batches = adam._batches(fragments, 20)
    assert [[len(f) for f in batch] for batch in batches] == [[5, 7], [30], [1, 19], [4]]
    assert [f for batch in batches for f in batch] == fragments


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
    assert choose_adam(torch.device("cpu"))[0] is torch.optim.AdamW


def test_choice_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert choose_adam(torch.device("cuda")) == (torch.optim.AdamW, "torch fused AdamW: NVIDIA apex is not installed")
