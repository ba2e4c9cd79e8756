"""How attention's scores and probabilities are computed from q·k: scale, soft cap, bias by distance, dropout.

    score = cap · tanh(q·k · scale / cap) + bias[j - i]      of query position i and key position j
    output = Σ dropped(softmax(score)) · v

This covers Gemma 2 (soft cap: arXiv:2408.00118), ALiBi (arXiv:2108.12409), whose bias is a slope times the distance,
and T5 (arXiv:1910.10683), whose learned biases of ranges of distances are gathered into one for each distance.

*Dropout* draws the numbers of a probability from where it is: Philox's counter is the position of the key, that of the
query, the head and the sample, and its key is (seed, layer). So every layout of ranks, and recomputation, drops the
same probabilities, and no mask is stored.

Positions are those in the tensors, or in the whole sequence where an `AttentionMask` has `positions_bs`.

Shapes: s queries, t keys, b micro-batch, a query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.numerics.philox import Key, philox_of_words


class AttentionDropout(NamedTuple):
    """Dropout of probabilities: each is 0 with probability `p`, else divided by 1 - p.

    The probability of (sample, head, i, j) is kept where word j % 4 of Philox-4x32-10 of the counter (j // 4, i, head,
    sample mod 2^32) is at least p · 2^32, rounded.
    `sample_b`: int64 `[b]` on the device, the index of each sequence in the run, so that a CUDA graph can be replayed.
    `first_head`: the first of this rank's heads among those of all tensor-parallel ranks.
    """

    p: float
    key: Key
    sample_b: Tensor
    first_head: int = 0

    @property
    def threshold(self) -> int:
        """The smallest word of a probability that is kept."""
        return round(self.p * 2**32)


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores and probabilities are computed from q·k.

    `scale`: 1/√d if None. `softcap`: scores become softcap · tanh(score / softcap).
    `distance_bias_ar`: `[a, s_total + t_total - 1]`, fp32 (fp64) or the model's dtype, differentiable: entry
    j - i + s_total - 1 is added to the score of query position i and key position j. s_total and t_total are the
    numbers of queries and keys of the whole sequence.
    `largest_a`: `[a]`, fp32 or wider, is raised to each head's largest score; without softcap and bias.
    `batch_invariant`: sums over keys have an order that does not depend on the other queries.
    """

    scale: float | None = None
    softcap: float | None = None
    distance_bias_ar: Tensor | None = None
    dropout: AttentionDropout | None = None
    largest_a: Tensor | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap: {self.softcap} is not above 0; None would turn it off")
        if self.dropout is not None and not 0 <= self.dropout.threshold < 2**32:
            raise ValueError(f"dropout: p = {self.dropout.p} is not in [0, 1); 0.1 would work")

    @property
    def only_scales(self) -> bool:
        """Whether scores are q·k times a number, which every kernel computes."""
        return self.softcap is None and not self.depend_on_positions

    @property
    def depend_on_positions(self) -> bool:
        return self.distance_bias_ar is not None or self.dropout is not None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def check(self, heads: int, b: int, queries: int, keys: int) -> None:
        """ValueError if these are not of attention of that many heads, samples, and positions of the whole sequence."""
        bias, dropout = self.distance_bias_ar, self.dropout
        if bias is not None and bias.shape != (heads, queries + keys - 1):
            raise ValueError(
                f"distance_bias_ar: {list(bias.shape)} is not [heads, queries + keys - 1] = [{heads}, "
                f"{queries + keys - 1}] of {queries} queries and {keys} keys"
            )
        if dropout is not None and dropout.sample_b.shape != (b,):
            raise ValueError(f"dropout: sample_b is {list(dropout.sample_b.shape)}, not [{b}], one index per sequence")


PLAIN = Scores()


def kept(dropout: AttentionDropout, sample: Tensor, heads: int, i_s: Tensor, keys: slice) -> Tensor:
    """Which probabilities of a sample's queries at positions `i_s` are kept, bool `[a, s, keys]`."""
    device = i_s.device
    group = torch.arange(keys.start // 4, -(-keys.stop // 4), device=device)
    head = dropout.first_head + torch.arange(heads, device=device)
    words = philox_of_words(
        group, i_s.long()[:, None], head[:, None, None], (sample & 0xFFFFFFFF).view(1, 1, 1), dropout.key
    )
    start = keys.start % 4
    word_ast = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
    return word_ast[..., start : start + keys.stop - keys.start] >= dropout.threshold


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al. 2021, arXiv:2108.12409), by which heads' scores fall with the distance of tokens.

    2^(-8 i / n) of head i of n, counted from 1. If n is no power of two, the first heads have the slopes of the largest
    power of two below n, and the others those between, of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
    return [*(2 ** (-8 * i / power) for i in range(1, power + 1)), *between[: heads - power]]
