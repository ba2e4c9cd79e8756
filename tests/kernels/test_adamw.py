"""AdamW in one pass, against PyTorch's in float64, in every form in which weights and moments are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.optimizer.adamw import AdamW
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.state_storage import join_master, split_master
from megafp8.parallel.data.grad_buffer import main_grad_of
from megafp8.parallel.sharding import FlatShard
from tests.kernels import DEVICE, noise
from tests.tiny_model import make_buffer, make_param

BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-8, 0.01, 0.1
SIZES = (5, 1024, 3001)
FORMS = ["fp32", "bf16", "remainder"]


def _expected(master: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Master and moments after updates by torch, in float64."""
    weight = torch.nn.Parameter(master.double())
    adam = torch.optim.AdamW([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient in gradients:
        weight.grad = gradient.double()
        adam.step()
    return [weight.detach(), *(adam.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16], ids=["moments in fp32", "in bf16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_equals_torch(form: str, moment: torch.dtype, offset: int) -> None:
    from megafp8.kernels.adamw import AdamWTable, AdamWTensors  # once Triton knows where its kernels run

    if moment == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter rounds to bf16 in another way")
    weights, gradients, tensors = [], [], []
    for i, n in enumerate(SIZES):
        x = noise(n + offset, seed=i)[offset:]
        param = None if form == "fp32" else x.bfloat16()
        if form == "remainder":
            param, remainder = split_master(x)
        weights.append(x.clone())
        gradients.append([noise(n + offset, seed=i + 7 * step, scale=0.1)[offset:] for step in range(1, 4)])
        tensors.append(
            AdamWTensors(
                gradients[-1][0].clone(),
                torch.zeros(n, dtype=moment, device=DEVICE),
                torch.zeros(n, dtype=moment, device=DEVICE),
                None if form == "remainder" else x,
                param,
                remainder if form == "remainder" else None,
            )
        )
    by_form: dict[object, list[AdamWTensors]] = {}
    for x in tensors:
        by_form.setdefault(x.form, []).append(x)
    factor, skip = torch.tensor(0.5, device=DEVICE), torch.tensor(True, device=DEVICE)
    for step in range(3):
        for x, of_step in zip(tensors, gradients):
            x.gradient_n.copy_(of_step[step])
        for alike in by_form.values():
            table = AdamWTable(alike)
            for skipped in (skip, ~skip):  # writes nothing, then all
                table.step(lr=LR, decay=DECAY, betas=BETAS, eps=EPS, count=step + 1, factor=factor, skip=skipped)
    for x, weight, of_step in zip(tensors, weights, gradients):
        assert torch.equal(x.gradient_n, of_step[-1])
        expected = _expected(weight, [gradient * 0.5 for gradient in of_step])
        master = x.master_n
        if master is None:
            assert x.param_n is not None
            assert x.remainder_n is not None
            master = join_master(x.param_n, x.remainder_n)
        elif x.param_n is not None and DEVICE == "cuda":
            assert torch.equal(x.param_n, master.bfloat16())
        rounding = {} if moment == torch.float32 else {"rtol": 2**-7, "atol": 2e-4}
        for found, wanted in zip((master, x.exp_avg_n, x.exp_avg_sq_n), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, **(rounding or {"rtol": 1e-6, "atol": 1e-6}))


@pytest.mark.parametrize("options", [{}, {"moments_dtype": "bf16"}, {"store_param_remainders": True}])
def test_steps_of_the_optimizer(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Steps are those of torch's fused optimizer with loaded state, also measured, clipped and skipped ones."""
    if "moments_dtype" in options and DEVICE == "cpu":
        pytest.skip("the interpreter rounds to bf16 in another way")
    found = []
    for stored in (False, True):
        monkeypatch.setattr(AdamW, "updates_stored", lambda self, device, stored=stored: stored)
        params = [make_param(f"p{i}", noise(n, seed=i).cpu(), torch.bfloat16, DEVICE) for i, n in enumerate(SIZES)]
        params.append(make_param("fp32", noise(40).cpu(), device=DEVICE))
        buffer = make_buffer(params)
        config = OptimizerConfig(learning_rate=1.0, **options)
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
        values = [x.float() for param in params for x in optimizer.state_tensors(param).values()]
        if DEVICE == "cuda" or options:  # the interpreter rounds to bf16 in another way
            values += [param.detach().float() for param in params]
        found.append([*values, torch.tensor(watched)])
    rounding = {"rtol": 2**-7, "atol": 1e-4} if "moments_dtype" in options else {"rtol": 2e-6, "atol": 2e-7}
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, **rounding)
