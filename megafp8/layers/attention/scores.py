"""Computation of attention's scores and probabilities from q·k: scale, soft cap, bias by distance, dropout.

    score = cap · tanh(q·k · scale / cap) + bias[j - i]      of query position i and key position j
    output = Σ dropped(softmax(score)) · v

This covers Gemma 2 (soft cap: arXiv:2408.00118), ALiBi (arXiv:2108.12409) and T5 (arXiv:1910.10683). ALiBi's bias is a
slope times the distance. T5 learns biases for ranges of distances, which are expanded to one bias per distance.

*Dropout* derives a probability's random number from its position: Philox's counter consists of the key position, the
query position, the head and the sample, and Philox's key is (seed, layer). Every layout of ranks, and recomputation,
therefore drops the same probabilities, and no mask is stored.

Positions are indices into the tensors. If an `AttentionMask` has `positions_bs`, they are positions in the whole
sequence.

Shapes: s queries, t keys, b micro-batch, a query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.numerics.philox import Key, philox_of_words


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities: each becomes 0 with probability `p`, and is divided by 1 - p otherwise.

    The probability of (sample, head, i, j) is kept if word j % 4 of Philox-4x32-10 of the counter (j // 4, i, head,
    sample mod 2^32) is at least p · 2^32, rounded.

    Attributes:
        p: Probability of dropping.
        key: Philox key.
        sample_b: Index of each sequence in the run, int64 `[b]` on the device, so that a CUDA graph can be replayed.
        first_head: Index of this rank's first head among the heads of all tensor-parallel ranks.
    """

    p: float
    key: Key
    sample_b: Tensor
    first_head: int = 0

    @property
    def threshold(self) -> int:
        """Smallest random word with which a probability is kept."""
        return round(self.p * 2**32)


@dataclass(frozen=True, eq=False)
class Scores:
    """Settings that turn q·k into scores and probabilities.

    Attributes:
        scale: Factor of q·k; None means 1/√d.
        softcap: Soft cap: scores become softcap · tanh(score / softcap). None means no cap.
        distance_bias_ar: Biases by distance, `[a, s_total + t_total - 1]`, in fp32 (fp64) or the model's dtype,
            differentiable. Entry j - i + s_total - 1 is added to the score of query position i and key position j.
            s_total and t_total are the numbers of queries and keys of the whole sequence.
        dropout: Dropout of probabilities; None means no dropout.
        largest_a: Buffer `[a]` in fp32 or wider that is raised to each head's largest score; requires that there is no
            soft cap and no bias.
        batch_invariant: Whether sums over keys have an order that does not depend on the other queries.
    """

    scale: float | None = None
    softcap: float | None = None
    distance_bias_ar: Tensor | None = None
    dropout: AttentionDropout | None = None
    largest_a: Tensor | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap: {self.softcap} is not above 0; None turns it off")
        if self.dropout is not None and not 0 <= self.dropout.threshold < 2**32:
            raise ValueError(f"dropout: p = {self.dropout.p} is not in [0, 1); 0.1 would work")

    @property
    def only_scales(self) -> bool:
        """Whether scores are q·k times a number, which every kernel computes."""
        return self.softcap is None and not self.depend_on_positions

    @property
    def depend_on_positions(self) -> bool:
        """Whether scores or dropout depend on the positions of queries and keys."""
        return self.distance_bias_ar is not None or self.dropout is not None

    def scale_of(self, head_dim: int) -> float:
        """Return the factor of q·k for heads of `head_dim` channels."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def check(self, heads: int, b: int, queries: int, keys: int) -> None:
        """Raise ValueError if the bias or dropout does not fit an attention of these sizes.

        `queries` and `keys` count the positions of the whole sequence.
        """
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
    """Return which probabilities of one sample's queries at positions `i_s` are kept, bool `[a, s, keys]`."""
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
    """Return ALiBi's slopes, the rates at which heads' scores fall with distance (Press et al. 2021, arXiv:2108.12409).

    Head i of n, counted from 1, has the slope 2^(-8 i / n). If n is not a power of two, the first heads have the slopes
    of the largest power of two below n. The remaining heads have the slopes of twice that power that lie between them.
    """
    power = 1 << (heads.bit_length() - 1)
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
    return [*(2 ** (-8 * i / power) for i in range(1, power + 1)), *between[: heads - power]]
