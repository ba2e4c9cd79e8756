"""The fused vocab-parallel cross-entropy against torch's on the whole logits in float64.

Ranks are emulated one after another in this process: each round runs all of them with the results of the collectives
known so far, and records their inputs to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.layers.head.op import LabelLosses
from tests.kernels import DEVICE  # before the kernels: it chooses the interpreter where there is no GPU
from tests.layers.head.test_kernel import DTYPES, U, error_of_sum
from tests.layers.head.test_op import reference
from tests.marks import slow_but

fused = pytest.importorskip("megafp8.layers.head.fused_op")

S, B = 3, 2
REDUCE = {"sum": lambda x: x.sum(dim=0), "max": lambda x: x.amax(dim=0)}


def group_of(rank: int, size: int) -> ProcessGroup:
    return cast(ProcessGroup, SimpleNamespace(rank=lambda: rank, size=lambda: size))


class Ranks:
    """All-reduces for ranks that run one after another."""

    def __init__(self) -> None:
        self.known: list[Tensor] = []  # results of the collectives so far
        self.given: list[Tensor] = []  # each rank's input to the next one
        self.op = "sum"
        self.calls = 0  # of the rank now running

    def all_reduce(self, x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
        self.calls += 1
        if self.calls <= len(self.known):
            return x.copy_(self.known[self.calls - 1])  # in place, as the real one
        if self.calls == len(self.known) + 1:
            self.given.append(x.clone())
            self.op = op
        return x

    def run(self, ranks: int, case: Callable[[int], Any]) -> list[Any]:
        """What `case(rank)` returns on each rank once every collective's result is known."""
        while True:
            self.given = []
            results = []
            for rank in range(ranks):
                self.calls = 0
                results.append(case(rank))
            if not self.given:
                return results
            self.known.append(REDUCE[self.op](torch.stack(self.given)))


def inputs(v: int, vocab_size: int, dtype: torch.dtype, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and the loss's gradient, one token masked."""
    generator = torch.Generator().manual_seed(v)
    logits = (torch.randn(S, B, v, generator=generator) * spread).to(dtype)
    labels = torch.randint(vocab_size, (S, B), generator=generator)
    dloss = torch.rand(S, B, generator=generator)
    dloss[1, 1] = 0.0
    return logits.to(DEVICE), labels.to(DEVICE), dloss.to(DEVICE)


def fused_losses(
    logits: Tensor, labels: Tensor, vocab_size: int, z_loss: float = 0.0, rank: int = 0, ranks: int = 1
) -> LabelLosses:
    """Compute the losses of each label from the logits of a rank."""
    group = group_of(rank, ranks)
    return LabelLosses(*fused.FusedVocabParallelLosses.apply(logits, labels, group, vocab_size, z_loss, None))


def check(
    losses: LabelLosses, dlogits: Tensor, logits: Tensor, labels: Tensor, dloss: Tensor, vocab_size: int, z: float
) -> None:
    """Compare with float64, within the sum of fp32's rounding errors (`error_of_sum`) and the gradient's rounding."""
    x = logits[..., :vocab_size].double()
    exact, exact_z_loss, gradient = reference(x, labels, dloss, z)
    log_z, peak = x.logsumexp(dim=-1), x.amax(dim=-1)
    label = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    of_sum = error_of_sum(vocab_size) + 16 * U  # and the ranks' sums scaled to one maximum
    of_log_z = of_sum + 4 * U * (log_z.abs() + peak.abs())
    of_loss = of_sum + 4 * U * (exact.abs() + (peak - label).abs())
    assert ((losses.cross_entropy.double() - exact).abs() <= of_loss).all()
    of_z_loss = z * (2 * log_z.abs() * of_log_z + 4 * U * log_z.square())
    assert ((losses.z_loss.double() - exact_z_loss).abs() <= of_z_loss).all()
    assert not losses.z_loss.requires_grad

    softmax_part = (x - log_z.unsqueeze(-1)).exp() * dloss.unsqueeze(-1)
    relative = (of_sum + 2 * z * of_log_z).unsqueeze(-1) + U * (2 * (peak.unsqueeze(-1) - x) + 16)
    weighted = softmax_part * (1 + 2 * z * log_z.abs()).unsqueeze(-1)
    dtype = torch.finfo(logits.dtype)
    half_a_step, half_of_smallest = 0.5 * dtype.eps, 0.5 * dtype.eps * dtype.smallest_normal
    bound = weighted * relative * (1 + half_a_step) + half_a_step * gradient.abs() + max(1e-37, half_of_smallest)
    assert ((dlogits[..., :vocab_size].double() - gradient).abs() <= bound).all()
    assert dlogits[..., vocab_size:].count_nonzero() == 0


VOCABULARIES = [
    (32, 32, 0.0, 1.0), (32, 29, 0.0, 1.0), (32, 7, 0.1, 1.0), (32, 32, 1e-4, 300.0), (20000, 19001, 1e-4, 3.0)
]  # fmt: skip


@pytest.mark.parametrize(
    ("v", "vocab_size", "z_loss", "spread", "ranks", "dtype"),
    slow_but(
        [(*vocabulary, ranks, dtype) for vocabulary in VOCABULARIES for ranks in (1, 2, 4) for dtype in DTYPES],
        *((*vocabulary, 2, torch.bfloat16) for vocabulary in VOCABULARIES),
        *((*VOCABULARIES[1], 2, dtype) for dtype in DTYPES),
        (*VOCABULARIES[2], 4, torch.float32),
    ),
    ids=str,
)
def test_slices_equal_torch_on_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    v: int,
    vocab_size: int,
    z_loss: float,
    spread: float,
    dtype: torch.dtype,
) -> None:
    logits, labels, dloss = inputs(v, vocab_size, dtype, spread)
    own = [part.contiguous().clone().requires_grad_() for part in logits.chunk(ranks, dim=-1)]

    def forward(rank: int) -> LabelLosses:
        return fused_losses(own[rank], labels, vocab_size, z_loss, rank, ranks)

    emulated = Ranks()
    monkeypatch.setattr(fused, "all_reduce", emulated.all_reduce)
    losses = emulated.run(ranks, forward)
    assert [reduced.numel() for reduced in emulated.known] == [S * B, 2 * S * B]
    assert all(torch.equal(x, y) for of_rank in losses for x, y in zip(of_rank, losses[0]))
    for of_rank in losses:
        of_rank.cross_entropy.backward(dloss)
    gradient = torch.cat([x.grad for x in own], dim=-1)
    assert ([x.dtype for x in losses[0]], gradient.dtype) == ([torch.float32] * 2, dtype)
    check(losses[0], gradient, logits, labels, dloss, vocab_size, z_loss)


def test_a_common_offset_of_all_logits_costs_no_precision() -> None:
    logits, labels, dloss = inputs(64, 64, torch.float32, 2.0)
    logits = (logits * 256).round() / 256  # so that adding 1024 is exact
    results = []
    for offset in (0.0, 1024.0):
        own = (logits + offset).requires_grad_()
        loss = fused_losses(own, labels, 64).cross_entropy
        loss.backward(dloss)
        results.append((loss.detach(), own.grad))
    (loss, gradient), (offset_loss, offset_gradient) = results
    assert torch.equal(loss, offset_loss)
    assert torch.equal(gradient, offset_gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_overwrites_the_logits_and_a_second_backward_is_an_error(dtype: torch.dtype) -> None:
    logits, labels, _ = inputs(64, 64, dtype, 1.0)
    leaf = logits.clone().requires_grad_()
    product = leaf * 2.0
    seen: list[Tensor] = []
    product.register_hook(seen.append)
    loss = fused_losses(product, labels, 64).cross_entropy.sum()
    loss.backward(retain_graph=True)
    assert seen[0].data_ptr() == product.data_ptr()
    assert not seen[0].requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_that_are_not_contiguous_are_not_overwritten() -> None:
    logits, labels, dloss = inputs(64, 60, torch.float32, 1.0)
    wide = torch.cat([logits, logits], dim=-1)
    own = wide[..., :64].detach().requires_grad_()
    losses = fused_losses(own, labels, 60)
    losses.cross_entropy.backward(dloss)
    assert torch.equal(wide[..., :64], logits)
    assert own.grad is not None
    check(losses, own.grad, logits, labels, dloss, 60, 0.0)
