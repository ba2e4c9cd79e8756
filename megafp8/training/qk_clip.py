"""QK-clip (Kimi K2, arXiv:2507.20534): query and key weights of heads whose attention logits have grown too large.

With the largest logit M of a head in a step, over all tokens of the global batch, and the threshold τ, the head's
logits are to be multiplied by γ = min(1, τ / M) from the next step on. After the update, √γ goes to the weights of its
queries and √γ to those of its keys (`Mixer.row_factors`). Heads that do not exceed τ are not touched.

Attention records the largest logits as it computes (`Scores.largest_a`); here they are collected from the ranks that
have the same layers. A maximum does not depend on the order of what it is taken of, so every layout clips the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.layers.mixer import Mixer
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import ParallelState


class QkClip:
    """Clips the attention logits of this rank's `mixers` to `threshold`. Collective, but for `zero`.

    `recorded`: the largest logits of each head in this rank's passes, live.
    """

    def __init__(self, mixers: Sequence[Mixer], threshold: float, parallel: ParallelState) -> None:
        self._threshold, self._parallel, self._mixers = threshold, parallel, mixers
        self.recorded = [x for mixer in mixers if (x := mixer.largest_logits_a) is not None]
        self._largest: list[Tensor] = []

    def zero(self) -> None:
        """Begin a step."""
        for recorded_a in self.recorded:
            recorded_a.zero_()

    def collect(self) -> Tensor:
        """Take over the logits of the passes of all ranks. Returns the largest of the model, float64 `[1]` on the
        device, at least 0. Does not wait."""
        tensor, device = self._parallel.tensor, self._parallel.device
        sizes = [len(recorded_a) * tensor.size for recorded_a in self.recorded]
        all_values = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._largest = list(all_values.split(sizes))
        for recorded_a, largest_a in zip(self.recorded, self._largest, strict=True):
            largest_a.view(tensor.size, -1)[tensor.rank] = recorded_a
        if self.recorded:
            all_reduce(all_values, self._parallel.amax.group, "max")  # data × context × tensor: all tokens of a layer
        largest = torch.cat([all_values, all_values.new_zeros(1)]).amax(0, keepdim=True)
        return all_reduce(largest, self._parallel.pipeline.group, "max")

    def row_factors(self) -> dict[str, Tensor]:
        """By global name, what the rows of query and key weights are multiplied by, float64, after `collect`."""
        factors: dict[str, Tensor] = {}
        for mixer, largest_a in zip(self._mixers, self._largest, strict=True):
            factors |= mixer.row_factors((self._threshold / largest_a).clamp(max=1.0))
        return factors
