"""Optimizer state on the host: the bits of steps without it, the fraction, and what is read while copies run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.optimizer import mixed_precision, offload
from megafp8.optimizer.adamw import AdamW
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.lion import Lion
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.offload import ALIGNMENT, offloaded_elements
from megafp8.parallel.data.grad_buffer import GradBuffer, main_grad_of
from megafp8.parallel.sharding import FlatShard
from tests.kernels import DEVICE
from tests.marks import slow_but
from tests.optimizer.test_adamw import STORAGE
from tests.tiny_model import flat_shard, make_buffer, make_param, state_of

LR = 0.01
SIZES = {"small": 5, "large": 3 * ALIGNMENT + 333, "norm": 700, "odd": ALIGNMENT + 1}


def test_the_fraction_is_exact_and_divides_one_shard() -> None:
    shards = [flat_shard("weight", n) for n in (3 * ALIGNMENT, 0, 10, 5 * ALIGNMENT, 20)]
    total = sum(map(len, shards))
    assert offloaded_elements(shards, 0.0) == [0] * 5
    assert offloaded_elements(shards, 1.0) == [len(shard) for shard in shards]
    assert offloaded_elements(shards, (4 * ALIGNMENT + 30) / total) == [3 * ALIGNMENT, 0, 10, ALIGNMENT, 0]
    assert offloaded_elements(shards, 20 / total) == [0] * 5


class _Model:
    """Weights in bf16, one in fp32 and one released, with their optimizer."""

    def __init__(self, fraction: float, name: str, storage: dict[str, Any], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params: list[nn.Parameter] = [
            make_param(key, torch.randn(n, generator=generator), torch.bfloat16, DEVICE) for key, n in SIZES.items()
        ]
        self.params.append(make_param("fp32", torch.randn(300, generator=generator), device=DEVICE))
        self.params.append(make_param("released", torch.randn(2100, generator=generator), torch.bfloat16, DEVICE))
        self.buffer: GradBuffer = make_buffer(self.params)
        config = OptimizerConfig(name=name, learning_rate=1.0, lion=Lion(beta2=0.9), offload=fraction, **storage)  # type: ignore[arg-type]
        self.optimizer = MixedPrecisionOptimizer(
            self.buffer.shards, config, device=torch.device(DEVICE), seed=3, released={self.params[-1]}
        )
        self.watched: list[Tensor] = []

    @contextmanager
    def watch(self, values: Sequence[tuple[FlatShard, Tensor]]) -> Iterator[None]:
        before = [x.double() for _, x in values]
        yield
        self.watched += [(x - old).square().sum() for (_, x), old in zip(values, before)]

    def step(self, number: int) -> None:
        """A step; the third one is measured, and the second one is tried with a skip first."""
        generator = torch.Generator().manual_seed(number)
        for param in self.params:
            main_grad_of(param).copy_(torch.randn(param.numel(), generator=generator).view(param.shape))
        self.optimizer.prefetch()
        for skips in (True, False) if number == 1 and self.optimizer.skips_on_device else (False,):
            skip = torch.tensor(skips, device=DEVICE) if self.optimizer.skips_on_device else None
            self.optimizer.step(LR, skip=skip, watch=self.watch if number == 2 else None)
            if skips:
                self.optimizer.forget_step()

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        values = {(i, "param"): param.detach() for i, param in enumerate(self.params)}
        values |= {
            (i, key): x for i, param in enumerate(self.params) for key, x in state_of(self.optimizer, param).items()
        }
        return {key: x.cpu().clone() for key, x in values.items()}


def _assert_equal(found: dict[tuple[int, str], Tensor], expected: dict[tuple[int, str], Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


QUICK = [
    ("adamw", "fp32", True), ("adamw", "fp8-remainders", True), ("lion", "bf16", True), ("adamw", "fp32", False),
    ("adamw", "fp8", False), ("lion", "remainders", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "storage", "fused"), slow_but(itertools.product(["adamw", "lion"], STORAGE, [True, False]), *QUICK)
)
def test_steps_and_checkpoints_have_the_bits_of_a_run_without_offload(
    monkeypatch: pytest.MonkeyPatch, name: str, storage: str, fused: bool
) -> None:
    """Also after state has been restored from a run with another fraction.

    One kernel updates all state (`fused`), or torch's optimizers update state that is loaded in fp32.
    """
    for kind in (AdamW, Lion):
        monkeypatch.setattr(kind, "updates_stored", lambda self, device, in_less: fused)
    monkeypatch.setattr(offload, "PIECE", ALIGNMENT)  # more pieces than buffers
    monkeypatch.setattr(mixed_precision, "BATCH", 3 * ALIGNMENT)
    plain, model = (_Model(fraction, name, STORAGE[storage]) for fraction in (0.0, 0.6))
    for number in range(3):
        plain.step(number)
        model.step(number)
    saved = plain.tensors()
    _assert_equal(model.tensors(), saved)
    torch.testing.assert_close(*(torch.stack(x.watched).sum() for x in (model, plain)), rtol=1e-12, atol=0)

    restored = _Model(1.0, name, STORAGE[storage], seed=1)
    restored.step(0)
    restored.optimizer.prefetch()  # outdated once state is restored
    stored = [x for parts in restored.optimizer.storage.values() for part in parts.values() for x in part.tensors]
    assert DEVICE == "cpu" or sum(x.is_cuda for x in stored) == 1  # the released weight's master
    state = restored.optimizer.state()
    for key, values in state.items():
        for shard, x in values:
            i = next(i for i, param in enumerate(restored.params) if param is shard.param)
            x.copy_(saved[i, key][shard.start : shard.end])
    restored.params[4].detach().copy_(saved[4, "param"])
    restored.optimizer.restore(state, 3)
    plain.step(4)
    restored.step(4)
    found, expected = restored.tensors(), plain.tensors()
    for values in (found, expected):
        del values[5, "param"]  # released; its values are its master
    _assert_equal(found, expected)


def test_state_is_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are shared by all pieces, and masters that other code reads stay where they are."""
    monkeypatch.setattr(offload, "PIECE", ALIGNMENT)
    optimizer = _Model(1.0, "adamw", {}).optimizer
    streamed = optimizer._offload
    assert streamed is not None
    buffers = {piece.on_device[0].untyped_storage().data_ptr() for piece in streamed.pieces}
    assert len(streamed.pieces) > len(buffers) == offload.BUFFERS
    arrays = {
        x.untyped_storage().data_ptr() for parts in streamed.storage.values() for s in parts.values() for x in s.tensors
    }
    assert len(arrays) == 2  # with masters, and without
    for shard in optimizer.shards:
        stays = shard.param.dtype == torch.float32 or shard.param in optimizer.released
        assert ("master" in streamed.storage[shard]) != stays
        assert (optimizer.master_of(shard).untyped_storage().data_ptr() in arrays) != stays
