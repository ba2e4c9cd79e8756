"""Outer steps that combine replicas after rounds of independent training (DiLoCo, arXiv:2311.08105).

Exchanging gradients in every step needs fast links. Here each replica trains independently for a round of H steps, with
an optimizer that keeps its moments local. Then the change of the weights, averaged over the replicas i, is the gradient
of an outer step: SGD with Nesterov momentum (as in torch.optim.SGD) from the weights at the start of the round:

    gradient = start - mean of weights[i]
    momentum ← μ · momentum + gradient
    weights = start - lr · (gradient + μ · momentum)

Afterwards all replicas have the same weights, and the next round starts from them. The traffic between replicas is one
gradient exchange per H steps.

Replicas exchange weights, not changes of weights. The memory of the gradients, which is free between steps, holds a
copy of this replica's weights and then their mean. If an exchange fails, neither the start nor the replica's result has
changed, so the exchange can be repeated with other members. With lr 1 and μ 0 the result is bitwise equal to the mean.

Everything is fp32 (or float64), in the shards that this rank owns. Memory: 8 bytes per weight for start and momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megafp8.optimizer.mixed_precision import OUTER_MOMENTUM, MixedPrecisionOptimizer
from megafp8.parallel.data.grad_buffer import gradient_of


def nesterov_(start: Tensor, momentum: Tensor, mean: Tensor, learning_rate: float, mu: float) -> None:
    """Apply an outer step in place: `start` becomes the new weights. `mean` is the mean of the replicas' weights."""
    gradient = start - mean
    momentum.mul_(mu).add_(gradient)
    # start = mean + gradient. Adding to the mean rounds nothing if the whole gradient is applied.
    torch.add(mean, gradient - learning_rate * (gradient + mu * momentum), out=start)


class OuterOptimizer:
    """Optimizer of outer steps.

    Args:
        optimizer: Optimizer of the weights, built with `outer=True`, so that it holds the outer momentum.
        gradients: Flat buffers that hold the gradients of the optimizer's shards.
        learning_rate: Learning rate of outer steps.
        momentum: Decay rate of the outer momentum.

    Attributes:
        start: Weights at the start of the round, by shard.
    """

    def __init__(
        self, optimizer: MixedPrecisionOptimizer, gradients: Sequence[Tensor], learning_rate: float, momentum: float
    ) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        self._learning_rate, self._momentum = learning_rate, momentum
        self.start = [optimizer.load_master(shard).clone() for shard in optimizer.shards]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round with the current weights."""
        for shard, start in zip(self._optimizer.shards, self.start):
            start.copy_(self._optimizer.load_master(shard))

    @torch.no_grad()
    def sum_weights(self, sum_: Callable[[Sequence[Tensor]], None]) -> None:
        """Copy the weights into the memory of the gradients, where `sum_` replaces them by the sum over replicas."""
        for shard in self._optimizer.shards:
            gradient_of(shard).copy_(self._optimizer.load_master(shard))
        sum_(self._gradients)

    @torch.no_grad()
    def step(self, count: int) -> None:
        """Apply the outer step after `sum_weights` of `count` replicas. FP8 copies of the weights are then stale."""
        for shard, start in zip(self._optimizer.shards, self.start):
            (momentum,) = self._optimizer.stored_tensors(shard)[OUTER_MOMENTUM]
            nesterov_(start, momentum, gradient_of(shard).div_(count), self._learning_rate, self._momentum)
            self._optimizer.store_master(shard, start)
