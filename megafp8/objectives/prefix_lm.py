"""Prefix language modeling: the first tokens of a sample see each other, and the model predicts the rest.

    tokens    t0 t1 t2 | t3 t4 t5 t6        a prefix of 3
    labels    t1 t2 t3   t4 t5 t6 t7
    counts     0  0  1    1  1  1  1
    t1 sees   t0 t1 t2                      the prefix, in both directions
    t4 sees   t0 t1 t2   t3 t4              the prefix, and the tokens before it

Sources: Raffel et al. 2019, arXiv:1910.10683, section 3.2.1; UL2's S-denoising, arXiv:2205.05131; GLM. The last token
of the prefix predicts the first token after the prefix. Labels within the prefix do not count, because the model sees
these tokens. A prefix of one token is plain next-token prediction.

Shapes: b micro-batch size, s sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.objectives import Config, ObjectiveRecord, Parts, Tokenizer, generator_of
from megafp8.objectives.next_token import NextToken, next_token


@dataclass(frozen=True)
class PrefixLM:
    """Next-token objective with a prefix in each sample.

    The length of a prefix is drawn uniformly. It depends only on the seed and on the sample's number in the run.

    Args:
        next_token: Objective without prefixes.
        seed: Seed of the run.
        shortest: Shortest prefix, in tokens.
        longest: Longest prefix, in tokens.
    """

    next_token: NextToken
    seed: int
    shortest: int
    longest: int

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the row of `next_token` with the prefix length as the last column, `[s + 2]` or `[2, s + 2]`."""
        length = generator_of(self.seed, index).integers(self.shortest, self.longest, endpoint=True)
        row = self.next_token.row(parts, index)
        return np.concatenate([row, np.full_like(row[..., :1], length)], axis=-1)

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows, with `prefix` and a loss mask."""
        batch, prefix_b = self.next_token.batch(rows[..., :-1]), rows.flatten(1)[:, -1].contiguous()
        counts_bs = (torch.arange(batch.tokens.shape[1]) >= prefix_b[:, None] - 1).float()
        if batch.loss_mask is not None:
            counts_bs = counts_bs * batch.loss_mask
        return replace(batch, loss_mask=counts_bs, prefix=prefix_b)


def _build(config: Config, _tokenizer: Tokenizer | None, _source: str) -> PrefixLM:
    options = config.data.prefix_lm
    assert options is not None
    return PrefixLM(
        next_token(config), config.seed, options.min_length, options.max_length or config.training.seq_length
    )


OBJECTIVE = ObjectiveRecord(lambda config: config.data.prefix_lm is not None, _build)
