"""Which blocks of the causal attention matrix a context-parallel rank computes, and with which kernel calls.

Plain causal attention needs no mask. A chunk of queries attends to its own chunk through the triangle that kernels have
as a flag, and to every earlier key: two calls, whose results are merged. The first needs no other rank's keys, so it
runs while they arrive.

A sliding window or document boundaries need a mask. A complete one would be s²/n booleans a sample, so rows are
processed some at a time, each with all the keys it could attend to: its own key is among them, so no softmax is empty.
Keys before the window of all rows are left out; keys of other documents are not, since the host does not know them.

Shapes: s sequence, n ranks, b micro-batch; q queries and k keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megafp8.context_parallel.split import chunks_of

STEP = 128  # the multiple that kernels prefer for lengths


@dataclass(frozen=True)
class Block:
    """Queries and the keys that they attend to in one kernel call.

    `rows`: the queries' rows in the rank's shard; `queries` and `keys`: positions in the sequence. `kind`: `causal`:
    the keys are the queries' own tokens; `whole`: every query attends to every key, and to its own keys in an earlier
    block; `masked`: as `visible` says.
    """

    rows: range
    queries: range
    keys: range
    kind: Literal["causal", "whole", "masked"]


def plan(s: int, rank: int, ranks: int, *, window: int | None, documents: bool, max_mask: int) -> tuple[Block, ...]:
    """The blocks of `rank` in the order to compute them.

    `window`: a token attends to that many latest tokens, itself included. `documents`: attention stays within
    documents. `max_mask`: elements of a mask for one sample, as near as whole rows allow.
    """
    c = s // (2 * ranks)
    chunks = [(range(i * c, (i + 1) * c), chunk * c) for i, chunk in enumerate(chunks_of(rank, ranks))]
    if documents or (window is not None and window < s):
        return tuple(block for rows, first in chunks for block in _masked(rows, first, window, max_mask))
    own = [Block(rows, range(first, first + c), range(first, first + c), "causal") for rows, first in chunks]
    earlier = [Block(rows, range(first, first + c), range(first), "whole") for rows, first in chunks if first]
    return (*own, *earlier)


def _masked(rows: range, first: int, window: int | None, max_mask: int) -> list[Block]:
    """The blocks of a chunk whose first token has the position `first`."""
    end = first + len(rows)
    keys = end if window is None else min(end, window + len(rows))
    height = max(1, max_mask // keys)
    if height >= STEP:
        height -= height % STEP
    blocks = []
    for start in range(0, len(rows), height):
        part = rows[start : start + height]
        queries = range(first + start, first + start + len(part))
        oldest = 0 if window is None else max(0, queries.start + 1 - window) // STEP * STEP
        blocks.append(Block(part, queries, range(oldest, queries.stop), "masked"))
    return blocks


def visible(
    queries: range, keys: range, window: int | None, document_ids_bs: Tensor | None, device: torch.device
) -> Tensor:
    """Which of `keys` each of `queries` may attend to, bool `[1 or b, 1, q, k]`; `document_ids_bs` of the sequence."""
    q, k = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
    distance = q[:, None] - k[None, :]
    mask = (distance >= 0)[None, None]
    if window is not None:
        mask = mask & (distance < window)
    if document_ids_bs is not None:
        ids_bq, ids_bk = (document_ids_bs[:, part.start : part.stop] for part in (queries, keys))
        mask = mask & (ids_bq[:, None, :, None] == ids_bk[:, None, None, :])
    return mask
