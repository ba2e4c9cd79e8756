"""Outer steps of replicas that train by themselves between them (DiLoCo, arXiv:2311.08105).

A gradient exchange in each step needs fast links. Here each replica trains by itself for a round of H steps, with an
optimizer whose moments stay its own. Then the change of the weights, averaged over the replicas i, is the gradient of
an outer step, SGD with Nesterov momentum (as torch.optim.SGD has it), from the weights at the start of the round:

    gradient = start - mean of weights[i]
    momentum ← μ · momentum + gradient
    weights = start - lr · (gradient + μ · momentum)

After it all replicas have the same weights, with which the next round starts. The traffic between replicas is that of
one gradient exchange in H steps.

Replicas exchange weights, not their changes: the memory of the gradients, which is free between steps, holds a copy of
this replica's weights, and then their mean. Neither the start nor the replica's own result has changed when an exchange
fails, so it can be made again with other members. With lr 1 and μ 0 the result is the mean itself, bit for bit.

Everything is fp32 (or float64), in the shards that this rank owns. Memory: 8 bytes a weight, start and momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megafp8.optimizer.mixed_precision import OUTER_MOMENTUM, MixedPrecisionOptimizer
from megafp8.parallel.data.grad_buffer import gradient_of


def nesterov_(start: Tensor, momentum: Tensor, mean: Tensor, learning_rate: float, mu: float) -> None:
    """An outer step in place: `start` becomes the new weights. `mean`: of the replicas' weights."""
    gradient = start - mean
    momentum.mul_(mu).add_(gradient)
    # start is mean + gradient: so nothing is rounded where all of the gradient is applied.
    torch.add(mean, gradient - learning_rate * (gradient + mu * momentum), out=start)


class OuterOptimizer:
    """The outer steps of the weights of `optimizer`, which holds their momentum (`outer=True`).

    `gradients`: the flat buffers that hold the gradients of its shards. Attributes: `start`: the weights at the start
    of the round, by shard.
    """

    def __init__(
        self, optimizer: MixedPrecisionOptimizer, gradients: Sequence[Tensor], learning_rate: float, momentum: float
    ) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        self._learning_rate, self._momentum = learning_rate, momentum
        self.start = [optimizer.load_master(shard).clone() for shard in optimizer.shards]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round with the weights as they are."""
        for shard, start in zip(self._optimizer.shards, self.start):
            start.copy_(self._optimizer.load_master(shard))

    @torch.no_grad()
    def sum_weights(self, sum_: Callable[[Sequence[Tensor]], None]) -> None:
        """Let `sum_` replace this replica's weights, in the memory of the gradients, by the sum over replicas."""
        for shard in self._optimizer.shards:
            gradient_of(shard).copy_(self._optimizer.load_master(shard))
        sum_(self._gradients)

    @torch.no_grad()
    def step(self, count: int) -> None:
        """The outer step, after `sum_weights` of `count` replicas. FP8 copies of the weights are out of date then."""
        for shard, start in zip(self._optimizer.shards, self.start):
            (momentum,) = self._optimizer.stored_tensors(shard)[OUTER_MOMENTUM]
            nesterov_(start, momentum, gradient_of(shard).div_(count), self._learning_rate, self._momentum)
            self._optimizer.store_master(shard, start)
