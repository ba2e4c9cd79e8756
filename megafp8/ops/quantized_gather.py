"""Tokens cut over ranks: cast where they are, gathered as codes.

Under sequence parallelism the input of a column-parallel layer and the output gradient of a row-parallel one lie in
slices, a rank's tokens after those of the rank before. Gathered in bf16 they are cast whole by every rank. Cast first,
half the bytes travel, a rank casts its slice only, and a norm fuses with its cast as if there were no ranks.

Rows, a token each, belong to one rank with all their factors, so rows follow rows. Columns run along the tokens: with
one factor for the tensor they are the gathered rows transposed, but with finer factors they are another cast of the
same values, and have to be gathered too. Nobody needs them before wgrad. So they stay cut: the
input's are kept for backward as a slice, 1/t of the memory, and backward sends them while dgrad runs. A column's
factors must be those of the whole: blocks along the tokens begin anew on every rank, which is right where a slice is a
multiple of a block, and else the values are gathered as before (`Quantizer.shard_alignment`); a factor for the whole
column is made from the amax over all ranks (`Quantizer.for_sharded_input`). Every cast is then, bit for bit, a slice
of the whole tensor's.

What it costs beyond the bytes that travel: gathered columns are t matrices `[c, r]` beside each other, and the GEMM
wants one `[c, t·r]`, a copy. Summing t GEMMs instead would pass over the fp32 weight gradient t - 1 times more, which
is up to seven times those bytes in Llama-3-8B. The count is in docs/decisions/0005-gathering-codes.md.

How tokens travel, at once or part by part while a GEMM runs, is the layer's `TPOverlap`s' business (`TPComm`).

Factors travel as they lie in memory, block after block of the dim summed over, all rows of a block together (see
`cublaslt_problem`). So those of gathered columns arrive in place, and those of rows, a 32nd of the codes' bytes where
blocks are 1×128, are put in order by a copy, unless each rank's rows are multiplied on their own.

Shapes: r rows (tokens) of a rank's slice, c columns, t ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import DONE, Work, all_gather_async
from megafp8.distributed.tp_overlap import NO_COMM, TPOverlap
from megafp8.fp8.quantizers import Quantizer
from megafp8.fp8.tensor import ROW, TENSOR, ScaledTensor


class TPComm(NamedTuple):
    """Where a layer's tokens come from and where they go: x and dx pass `input`, y and dy `output`.

    `grad_cast`: casts dy before it is gathered at `output`, where its slices can be cast; None gathers values.
    """

    input: TPOverlap = NO_COMM
    output: TPOverlap = NO_COMM
    grad_cast: Quantizer | None = None


LOCAL_COMM = TPComm()
"""Of a layer that has all its tokens, and all of its weight."""


def _joined(gathered: Tensor, ranks: int) -> Tensor:
    """`[t·c, r]`, the ranks' matrices one after the other, to `[c, t·r]`, beside each other."""
    c, r = gathered.shape[0] // ranks, gathered.shape[1]
    return gathered.view(ranks, c, r).transpose(0, 1).reshape(c, ranks * r)


def _joined_codes(gathered: Tensor, ranks: int) -> Tensor:
    word = torch.int64 if gathered.shape[1] % 8 == 0 else torch.uint8  # the widest that a copy of bytes may be of
    return _joined(gathered.view(word), ranks).view(gathered.dtype)


class Rows:
    """Rows `[t·r, c]` on their way from each rank's `own` `[r, c]`. `arriving`: which of them are there."""

    def __init__(self, own: ScaledTensor, tp_overlap: TPOverlap) -> None:
        codes, factors, granularity, tensor_scale = own
        self._own = own
        self._cuts_factors = tp_overlap.group is not None and granularity is not TENSOR
        assert tensor_scale is None or not self._cuts_factors, "slices are not cast under two levels of factors"
        self.arriving = tp_overlap.gather([codes, factors.t().contiguous()] if self._cuts_factors else [codes])

    def part(self, part: slice) -> ScaledTensor:
        """Some of them, which must have arrived; of all ranks or of one."""
        own, codes = self._own, self.arriving.gathered[0]
        if self._cuts_factors:
            r, blocks = own.data.shape[0], own.scale_inv.shape[1]
            first, last = part.start // r, part.stop // r
            factors = _joined(self.arriving.gathered[1][first * blocks : last * blocks], last - first).t()
        elif own.granularity is TENSOR or part == slice(0, codes.shape[0]):
            factors = own.scale_inv
        else:
            factors = own.scale_inv[part].t().contiguous().t()
        return own._replace(data=codes[part], scale_inv=factors)

    def columns(self) -> ScaledTensor:
        """`[c, t·r]`, waited for; of one factor for all of them."""
        return self._own._replace(data=self.arriving.wait()[0]).t()


class Columns(NamedTuple):
    """Columns under way: `arriving` has the codes of `ranks` ranks, `[c, r]` each, one after the other; `sent` is being
    read."""

    arriving: ScaledTensor
    ranks: int
    work: Work
    sent: list[Tensor]

    def wait(self) -> ScaledTensor:
        """`[c, t·r]`."""
        self.work.wait()
        if self.ranks == 1:
            return self.arriving
        return self.arriving._replace(data=_joined_codes(self.arriving.data, self.ranks))


def gather_columns(own: ScaledTensor, group: ProcessGroup | None) -> Columns:
    """Start gathering the whole's columns from each rank's `own` `[c, r]`; they are whole where there is no group."""
    if group is None:
        return Columns(own, 1, DONE, [])
    same_factors = own.granularity in (ROW, TENSOR)  # of whole columns, or of all
    wanted = [own.data] if same_factors else [own.data, own.scale_inv.t().contiguous()]
    gathered, work = all_gather_async(wanted, group)
    factors = own.scale_inv if same_factors else gathered[1].t()
    return Columns(ScaledTensor(gathered[0], factors, own.granularity), group.size(), work, wanted)
