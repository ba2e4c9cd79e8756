"""Saved tensors go to the host and come back: the same gradients, from copies alone, with at most two blocks here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.models.offload import ActivationOffload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, TOKENS, BLOCKS = 32, 64, 5
SAVED = 4 * TOKENS * WIDTH  # bytes of one activation


class _Alive:
    """Bytes of activations that autograd's nodes can reach on the device, by the storages a test was shown."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, x: Tensor) -> Tensor:
        self.seen.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        return x

    @property
    def count(self) -> int:
        return sum(not ref.expired() for ref in self.seen)


class _Block(nn.Module):
    """Saves three activations: the product's input, and tanh's output once by itself and once as a view of it."""

    def __init__(self, alive: _Alive | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.alive = alive

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        if self.alive is not None:
            self.alive.note(y)
        first, second = y.split(WIDTH // 2, dim=1)
        return x + torch.cat([first * second, second * second], dim=1)


def _blocks(device: str, alive: _Alive | None = None) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(_Block(alive) for _ in range(BLOCKS)).to(device)


def _gradients(device: str, run: Callable[[nn.ModuleList, Tensor], Tensor], passes: int = 1) -> list[Tensor]:
    blocks = _blocks(device)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    outputs = [run(blocks, x * (1 + i)) for i in range(passes)]
    for y in outputs:
        y.square().sum().backward()
    return [grad for grad in (x.grad, *(p.grad for p in blocks.parameters())) if grad is not None]


def _plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _offloaded(offload: ActivationOffload, number: int, recompute: bool = False) -> Callable[..., Tensor]:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        forward = offload.forward([])
        for i, block in enumerate(blocks):
            if i >= number:
                x = block(x)
                continue
            with forward.block():
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passes", [1, 3])  # forward passes before the first backward, as in a pipeline
@pytest.mark.parametrize(("number", "recompute"), [(BLOCKS, False), (2, False), (BLOCKS, True)])
def test_gradients_are_the_same_bits(device: str, passes: int, number: int, recompute: bool) -> None:
    expected = _gradients(device, _plain, passes)
    offload = ActivationOffload(torch.device(device), smallest=0)
    for _ in range(2):  # the second time from buffers that were given back
        found = _gradients(device, _offloaded(offload, number, recompute), passes)
        assert len(found) == len(expected) == 1 + BLOCKS
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def _watched(device: str) -> tuple[ActivationOffload, list[Tensor]]:
    """An offload, and the host's buffers as they are taken."""
    offload, taken = ActivationOffload(torch.device(device), smallest=0), []
    take = offload.host.take

    def watch(size: int) -> Tensor:
        taken.append(take(size))
        return taken[-1]

    offload.host.take = watch  # type: ignore[method-assign]
    return offload, taken


@pytest.mark.parametrize("device", DEVICES)
def test_backward_reads_the_copies(device: str) -> None:
    """What is scribbled over the host's buffers shows in the gradients."""
    offload, taken = _watched(device)
    blocks = _blocks(device)
    gradients = []
    for scribbled in (False, True):
        x = torch.linspace(-1, 1, TOKENS * WIDTH, device=device).view(TOKENS, WIDTH).requires_grad_()
        y = _offloaded(offload, BLOCKS)(blocks, x)
        if scribbled:
            if device == "cuda":
                torch.cuda.synchronize()  # the copies into the buffers come first
            for buffer in taken:
                buffer.zero_()
        gradients += torch.autograd.grad(y.sum(), [x, blocks[0].weight])
    assert not torch.equal(gradients[0], gradients[2])
    assert gradients[1].any()
    assert not gradients[3].any()  # the first block's input, and so its weight's gradient


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_travels_once_and_its_buffer_is_taken_again(device: str) -> None:
    offload, taken = _watched(device)
    for passes in (1, 2):
        y = _offloaded(offload, BLOCKS)(_blocks(device), torch.randn(TOKENS, WIDTH, device=device).requires_grad_())
        assert [buffer.numel() for buffer in taken] == [SAVED] * 2 * BLOCKS * passes  # of each block input and tanh
        y.sum().backward()
        del y
    assert len({buffer.data_ptr() for buffer in taken}) == 2 * BLOCKS


@pytest.mark.parametrize("device", DEVICES)
def test_small_and_held_tensors_stay(device: str) -> None:
    offload, taken = _watched(device)
    x = torch.randn(TOKENS, WIDTH, device=device).requires_grad_()
    block = _blocks(device)[0]
    forward = offload.forward([x])
    with forward.block():
        block(x)
    assert len(taken) == 1  # tanh's output, and not x
    offload.smallest = SAVED + 1
    with forward.block():
        block(x.clone())
    assert len(taken) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_two_blocks_at_most_are_on_the_device(device: str) -> None:
    alive = _Alive()
    offload = ActivationOffload(torch.device(device), smallest=0)
    y = _offloaded(offload, BLOCKS)(_blocks(device, alive), torch.randn(TOKENS, WIDTH, device=device).requires_grad_())
    assert len(alive.seen) == BLOCKS
    assert alive.count == 1  # the newest; during the forward its predecessor was there too
    plain = _Alive()
    z = _plain(_blocks(device, plain), torch.randn(TOKENS, WIDTH, device=device).requires_grad_())
    assert plain.count == BLOCKS
    del y, z
    assert alive.count == plain.count == 0
