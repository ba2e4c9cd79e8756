"""QK-clip (Kimi K2, arXiv:2507.20534): scale down query and key weights of heads with too large attention logits.

Let M be the largest logit of a head in a step, over all tokens of the global batch, and τ the threshold. From the next
step on, the head's logits are multiplied by γ = min(1, τ / M). To do this, the query weights and the key weights of
the head are each multiplied by √γ after the update (`Mixer.row_factors`). Heads that do not exceed τ stay unchanged.

Attention records the largest logits as it computes (`Scores.largest_a`). This module collects them from the ranks that
have the same layers. A maximum does not depend on the order of its values, so every layout clips the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.layers.mixer import Mixer
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import ParallelState


class QkClip:
    """QK-clip of this rank's `mixers` with a threshold for attention logits.

    Attributes:
        recorded: Tensors in which each mixer records the largest logits of its heads during the passes.
    """

    def __init__(self, mixers: Sequence[Mixer], threshold: float, parallel: ParallelState) -> None:
        self._threshold, self._parallel, self._mixers = threshold, parallel, mixers
        self.recorded = [x for mixer in mixers if (x := mixer.largest_logits_a) is not None]
        self._largest: list[Tensor] = []

    def zero(self) -> None:
        """Zero the recorded logits at the beginning of a step."""
        for recorded_a in self.recorded:
            recorded_a.zero_()

    def collect(self) -> Tensor:
        """Collect the recorded logits of all ranks, and return the largest logit of the model. Collective.

        The result is float64 `[1]` on the device and at least 0. The call does not wait for the device.
        """
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
        """Return the factors for the rows of query and key weights by global name, float64. Call `collect` first."""
        factors: dict[str, Tensor] = {}
        for mixer, largest_a in zip(self._mixers, self._largest, strict=True):
            factors |= mixer.row_factors((self._threshold / largest_a).clamp(max=1.0))
        return factors
