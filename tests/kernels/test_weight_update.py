"""AdamW and Lion in one pass: against float64 in every form in which weights and moments are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.numerics.moments import BLOCK, FIRST, SECOND, decode, encode
from megafp8.numerics.stochastic_rounding import CastNoise, uniform
from megafp8.optimizer.adamw import AdamW
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.lion import Lion
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.state_storage import join_master, split_master
from megafp8.parallel.data.grad_buffer import main_grad_of
from megafp8.parallel.sharding import FlatShard
from tests.kernels import DEVICE, noise
from tests.tiny_model import make_buffer, make_param, state_of

BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-8, 0.01, 0.1
SIZES = (5, 1024, 3001)
FORMS = ["fp32", "bf16", "remainder"]


def _expected(update: str, master: Tensor, gradients: list[Tensor], moment: torch.dtype) -> list[Tensor]:
    """Master and moments after updates in float64: torch's AdamW, or the paper's Lion.

    Lion's moment is rounded after each update, because a sign depends on it.
    """
    weight = torch.nn.Parameter(master.double())
    if update == "lion":
        w, m = weight.detach(), torch.zeros_like(weight.detach())
        for gradient in gradients:
            w = w - LR * (torch.sign(BETAS[0] * m + (1 - BETAS[0]) * gradient.double()) + DECAY * w)
            m = (BETAS[1] * m + (1 - BETAS[1]) * gradient.double()).to(moment).double()
        return [w, m]
    adam = torch.optim.AdamW([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient in gradients:
        weight.grad = gradient.double()
        adam.step()
    return [weight.detach(), *(adam.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]


def _step(table: Any, update: str, **options: Any) -> None:
    options = {"lr": LR, "decay": DECAY, "betas": BETAS, **options}
    getattr(table, update)(**options, **({"eps": EPS} if update == "adamw" else {}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16], ids=["moments in fp32", "in bf16"])
@pytest.mark.parametrize(("update", "offset"), [("adamw", 0), ("adamw", 1), ("lion", 0)])
def test_equals_float64(form: str, moment: torch.dtype, update: str, offset: int) -> None:
    from megafp8.kernels.weight_update import UpdateTable, WeightTensors  # once Triton knows where its kernels run

    if moment == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter rounds to bf16 in another way")
    masters, gradients, weights = [], [], []
    for i, n in enumerate(SIZES):
        x = noise(n + offset, seed=i)[offset:]
        param = None if form == "fp32" else x.bfloat16()
        if form == "remainder":
            param, remainder = split_master(x)
        masters.append(x.clone())
        gradients.append([noise(n + offset, seed=i + 7 * step, scale=0.1)[offset:] for step in range(1, 4)])
        moments = [torch.zeros(n, dtype=moment, device=DEVICE) for _ in range(2)]
        weights.append(
            WeightTensors(
                gradients[-1][0].clone(), moments[0], moments[1] if update == "adamw" else None, None, None,
                None if form == "remainder" else x, param, remainder if form == "remainder" else None,
            )
        )  # fmt: skip
    by_form: dict[object, list[WeightTensors]] = {}
    for x in weights:
        by_form.setdefault(x.form, []).append(x)
    factor, skip = torch.tensor(0.5, device=DEVICE), torch.tensor(True, device=DEVICE)
    for step in range(3):
        for x, of_step in zip(weights, gradients):
            x.gradient_n.copy_(of_step[step])
        for alike in by_form.values():
            table = UpdateTable(alike)
            for skipped in (skip, ~skip):  # writes nothing, then all
                _step(table, update, count=step + 1, factor=factor, skip=skipped)
    for x, start, of_step in zip(weights, masters, gradients):
        assert torch.equal(x.gradient_n, of_step[-1])
        expected = _expected(update, start, [gradient * 0.5 for gradient in of_step], moment)
        master = x.master_n
        if master is None:
            assert x.param_n is not None
            assert x.remainder_n is not None
            master = join_master(x.param_n, x.remainder_n)
        elif x.param_n is not None and DEVICE == "cuda":
            assert torch.equal(x.param_n, master.bfloat16())
        rounding = {} if moment == torch.float32 else {"rtol": 2**-7, "atol": 2e-4}
        for found, wanted in zip((master, x.first_n, x.second_n), expected):
            assert found is not None
            torch.testing.assert_close(found.double(), wanted, **(rounding or {"rtol": 1e-6, "atol": 1e-6}))


def _spread(n: int, seed: int) -> Tensor:
    """Return numbers over many orders of magnitude; some are zero or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.rand(n, generator=generator) * 14 - 12 + torch.arange(n) // BLOCK % 30 - 15
    x = torch.randn(n, generator=generator) * 10.0**power
    x[::50], x[7::500] = 0, 1e-42
    return x


@pytest.mark.parametrize("form", ["fp32", "remainder"])
@pytest.mark.parametrize("update", ["adamw", "lion"])
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0x80000001)])
def test_moments_in_fp8_are_the_references_bit_for_bit(form: str, update: str, key: tuple[int, int]) -> None:
    """They are decoded moments in fp32, updated by the same kernel and encoded by the reference, for any numbers."""
    from megafp8.kernels.weight_update import UpdateTable, WeightTensors

    n, count = 5000, 70_000
    formats = (FIRST, SECOND)[: 2 if update == "adamw" else 1]
    old = [_spread(n, 1), _spread(n, 2).square()][: len(formats)]
    for x in old:
        x[3000], x[3200] = 3e38, torch.nan  # blocks with the largest number, and with NaN
    number = [torch.tensor(i, device=DEVICE) for i in (count - 1, 0)]
    random_n2 = uniform(n, 2, CastNoise(key, *number))
    stored = [encode(x.to(DEVICE), fmt, torch.zeros(n, device=DEVICE)) for x, fmt in zip(old, formats)]
    decoded = [decode(*parts, fmt) for parts, fmt in zip(stored, formats)]
    gradient, start = _spread(n, 3).to(DEVICE), noise(n, seed=4)
    gradient[4000] = torch.inf
    results = []
    for in_fp8 in (False, True):
        master = start.clone()
        param, remainder = split_master(master) if form == "remainder" else (None, None)
        data, exponents = zip(*stored) if in_fp8 else (decoded, (None, None))
        weight = WeightTensors(
            gradient, *(*data, None)[:2], *(*exponents, None)[:2], None if form == "remainder" else master, param,
            remainder, key,
        )  # fmt: skip
        _step(UpdateTable([weight]), update, count=count, factor=None, skip=None)
        results.append([x for x in (weight.master_n, weight.param_n, weight.remainder_n) if x is not None])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for parts, moment, fmt in zip(stored, decoded, formats):
        wanted = encode(moment, fmt, random_n2[:, int(fmt.positive)])
        for found, expected in zip(parts, wanted, strict=True):
            assert torch.equal(found, expected)


STORED: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {}),
    ("adamw", {"moments_dtype": "bf16"}),
    ("adamw", {"store_param_remainders": True}),
    ("adamw", {"moments_dtype": "fp8", "store_param_remainders": True}),
    ("lion", {}),
    ("lion", {"moments_dtype": "fp8"}),
]


@pytest.mark.parametrize(("update", "options"), STORED)
def test_steps_of_the_optimizer(monkeypatch: pytest.MonkeyPatch, update: str, options: dict[str, Any]) -> None:
    """Steps are those of torch's fused optimizer with loaded state, also measured, clipped and skipped ones."""
    moments = options.get("moments_dtype", "fp32")
    if moments == "bf16" and DEVICE == "cpu":
        pytest.skip("the interpreter rounds to bf16 in another way")
    found = []
    for stored in (False, True):
        for kind in (AdamW, Lion):
            monkeypatch.setattr(kind, "updates_stored", lambda self, device, in_less, stored=stored: stored)
        params = [make_param(f"p{i}", noise(n, seed=i).cpu(), torch.bfloat16, DEVICE) for i, n in enumerate(SIZES)]
        params.append(make_param("fp32", noise(40).cpu(), device=DEVICE))
        buffer = make_buffer(params)
        config = OptimizerConfig(name=update, learning_rate=1.0, lion=Lion(beta2=0.9), **options)
        optimizer = MixedPrecisionOptimizer(buffer.shards, config, device=torch.device(DEVICE))
        assert optimizer.takes_factor == stored
        watched: list[float] = []

        @contextmanager
        def watch(values: Sequence[tuple[FlatShard, Tensor]], watched: list[float] = watched) -> Iterator[None]:
            before = [x.clone() for _, x in values]
            yield
            watched += [float((x - old).norm()) for (_, x), old in zip(values, before)]

        for step in range(4):
            for i, param in enumerate(params):
                main_grad_of(param).copy_(noise(param.numel(), seed=i + 10 * step, scale=0.1))
            clip = torch.tensor(0.5, device=DEVICE)
            if stored and step == 1:
                optimizer.step(LR, factor=clip, skip=torch.tensor(True, device=DEVICE))
                optimizer.forget_step()
            if not stored:
                buffer.flat.mul_(clip)
            optimizer.step(LR, factor=clip if stored else None, watch=watch if step == 2 else None)
        values = [x.float() for param in params for x in state_of(optimizer, param).values()]
        if DEVICE == "cuda" or options.get("store_param_remainders"):  # the interpreter rounds to bf16 in another way
            values += [param.detach().float() for param in params]
        found.append([*values, torch.tensor(watched)])
    rounding = {"rtol": 2**-7, "atol": 1e-4} if moments == "bf16" else {"rtol": 2e-6, "atol": 2e-7}
    for ours, theirs in zip(found[1], found[0], strict=True):
        if moments == "fp8":  # an element may be rounded to its other neighbor where sums differ in the last bit
            same = torch.isclose(ours, theirs, rtol=1e-3, atol=1e-5)
            assert same.float().mean() > 0.998
        else:
            torch.testing.assert_close(ours, theirs, **rounding)
