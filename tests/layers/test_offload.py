"""Offloaded activations: the same gradients, from the host's copies, with at most two blocks on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.layers.offload import ActivationOffload

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
WIDTH, TOKENS, BLOCKS = 32, 64, 5
SAVED = 4 * TOKENS * WIDTH  # bytes of one activation


class _Block(nn.Module):
    """Saves the matrix product's input, and tanh's output, once whole and once as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        self.outputs.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        first, second = y.split(WIDTH // 2, dim=1)
        return x + torch.cat([first * second, second * second], dim=1)


def _blocks(device: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(_Block() for _ in range(BLOCKS)).to(device)


def _alive(blocks: nn.ModuleList) -> int:
    """Outputs of tanh that are still on the device."""
    return sum(not ref.expired() for block in blocks for ref in block.outputs)


def _input(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(device).requires_grad_()


def _run(
    blocks: nn.ModuleList, x: Tensor, offload: ActivationOffload | None, number: int = BLOCKS, recompute: bool = False
) -> Tensor:
    """Forward of all blocks, the first `number` of them offloaded."""
    forward = None if offload is None else offload.forward([])
    for i, block in enumerate(blocks):
        if forward is None or i >= number:
            x = block(x)
            continue
        with forward.block():
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    return x


def _gradients(device: str, run: Callable[[nn.ModuleList, Tensor], Tensor], passes: int) -> list[Tensor]:
    blocks, x = _blocks(device), _input(device)
    outputs = [run(blocks, x * (1 + i)) for i in range(passes)]
    for y in outputs:
        y.square().sum().backward()
    return [grad for grad in (x.grad, *(p.grad for p in blocks.parameters())) if grad is not None]


@DEVICES
@pytest.mark.parametrize("passes", [1, 3])  # forward passes before the first backward, as in a pipeline
@pytest.mark.parametrize(("number", "recompute"), [(BLOCKS, False), (2, False), (BLOCKS, True)])
def test_gradients_are_the_same_bits(device: str, passes: int, number: int, recompute: bool) -> None:
    expected = _gradients(device, lambda blocks, x: _run(blocks, x, None), passes)
    offload = ActivationOffload(torch.device(device), smallest=0)
    for _ in range(2):  # the second time from reused buffers
        found = _gradients(device, lambda blocks, x: _run(blocks, x, offload, number, recompute), passes)
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


@DEVICES
def test_backward_reads_the_copies(device: str) -> None:
    """Zeroing the host's buffers changes the gradients."""
    offload, taken = _watched(device)
    blocks = _blocks(device)
    gradients = []
    for zeroed in (False, True):
        x = torch.linspace(-1, 1, TOKENS * WIDTH, device=device).view(TOKENS, WIDTH).requires_grad_()
        y = _run(blocks, x, offload)
        if zeroed:
            if device == "cuda":
                torch.cuda.synchronize()  # the copies into the buffers come first
            for buffer in taken:
                buffer.zero_()
        gradients += torch.autograd.grad(y.sum(), [x, blocks[0].weight])
    assert not torch.equal(gradients[0], gradients[2])
    assert gradients[1].any()
    assert not gradients[3].any()  # the first block's input, and so its weight's gradient


@DEVICES
def test_a_storage_is_copied_once_and_its_buffer_reused(device: str) -> None:
    offload, taken = _watched(device)
    for passes in (1, 2):
        y = _run(_blocks(device), _input(device), offload)
        assert [buffer.numel() for buffer in taken] == [SAVED] * 2 * BLOCKS * passes  # of each block input and tanh
        y.sum().backward()
        del y
    assert len({buffer.data_ptr() for buffer in taken}) == 2 * BLOCKS


@DEVICES
def test_small_and_excluded_tensors_stay(device: str) -> None:
    offload, taken = _watched(device)
    x, block = _input(device), _blocks(device)[0]
    forward = offload.forward([x])
    with forward.block():
        block(x)
    assert len(taken) == 1  # tanh's output, and not x
    offload.smallest = SAVED + 1
    with forward.block():
        block(x.clone())
    assert len(taken) == 1


@DEVICES
def test_at_most_two_blocks_are_on_the_device(device: str) -> None:
    offloaded, ordinary = _blocks(device), _blocks(device)
    y = _run(offloaded, _input(device), ActivationOffload(torch.device(device), smallest=0))
    assert _alive(offloaded) == 1  # the newest; during the forward its predecessor was there too
    z = _run(ordinary, _input(device), None)
    assert _alive(ordinary) == BLOCKS
    del y, z
    assert _alive(offloaded) == _alive(ordinary) == 0
