"""Quantized tensors whose tokens are sharded: quantized by each rank, then all-gathered in FP8.

Under sequence parallelism the input of a column-parallel layer and the output gradient of a row-parallel one are
sharded along the tokens. Gathered in bf16 they are quantized whole by every rank. Quantized first, half the bytes
travel, a rank quantizes its slice only, and a norm fuses with the quantization as it does on one rank.

*Rowwise* data, one row per token, belongs to one rank with all its scales, so gathered rows follow each other.
*Columnwise* data runs along the tokens: with one scale per tensor it is the gathered rowwise data transposed; with
finer scales it is another quantization of the same values and has to be gathered too. It is needed for wgrad only. So
it stays sharded: the input's is kept for backward as a slice, 1/t of the memory, and gathered while dgrad runs.

The scales along a column must be those of the whole tensor. Blocks along the tokens begin anew on every rank, which is
right where a slice is a multiple of a block (`Quantizer.shard_alignment`); a scale for the whole column is made from
the amax over all ranks (`Quantizer.for_sharded_input`). Every quantized slice is then, bit for bit, a slice of the
whole quantized tensor. Where that cannot be had, the plan gathers values (`megafp8.plan`).

Cost beyond the bytes that travel: gathered columnwise data is t matrices `[c, r]` beside each other and the GEMM wants
one `[c, t·r]`, a copy. Summing t GEMMs instead would pass over the fp32 weight gradient t - 1 times more, up to seven
times those bytes in Llama-3-8B. The count is in docs/decisions/0006-tensor-parallel-communication.md.

Scales travel as they lie in memory, block after block of the dim summed over, all rows of a block together (see
`cublaslt_problem`). So those of gathered columnwise data arrive in place, and those of rowwise data, a 32nd of the
bytes where blocks are 1×128, are put in order by a copy, unless each rank's rows are multiplied on their own. Where
tensor cores do not take a tensor's blocks, what travels is dequantized, in bf16 (`megafp8.numerics.tensor`).

Shapes: r rows (tokens) of a rank's slice, c columns, t ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.tensor import DEQUANTIZED, ROW, TENSOR, ScaledTensor
from megafp8.parallel.collectives import DONE, CollectiveWork, all_gather_async
from megafp8.parallel.tp_overlap import NO_COMM, TPOverlap


class TPComm(NamedTuple):
    """Communication at the two ends of a tensor-parallel layer: x and dx pass `input`, y and dy `output`."""

    input: TPOverlap = NO_COMM
    output: TPOverlap = NO_COMM

    @classmethod
    def from_overlap(cls, parallel: Literal["column", "row"], overlap: TPOverlap) -> TPComm:
        """That of a layer whose weight is sharded by columns, which gathers x, or by rows, which sums y."""
        return cls(input=overlap) if parallel == "column" else cls(output=overlap)


LOCAL_COMM = TPComm()
"""Communication of a layer that is not sharded: none."""


def _joined(gathered: Tensor, ranks: int) -> Tensor:
    """`[t·c, r]`, the ranks' matrices one after the other, to `[c, t·r]`, beside each other."""
    c, r = gathered.shape[0] // ranks, gathered.shape[1]
    return gathered.view(ranks, c, r).transpose(0, 1).reshape(c, ranks * r)


def _joined_data(gathered: Tensor, ranks: int) -> Tensor:
    word = torch.int64 if gathered.shape[1] % 8 == 0 else torch.uint8  # the widest that a copy of bytes may be of
    return _joined(gathered.view(word), ranks).contiguous().view(gathered.dtype)  # a column of one word is a view


class Rows:
    """Rows `[t·r, c]` being gathered from each rank's `shard` `[r, c]`: FP8 data rowwise, or values.

    `arriving`: which rows have arrived.
    """

    def __init__(self, shard: ScaledTensor | Tensor, tp_overlap: TPOverlap) -> None:
        self._own, self._gathers_scales = shard, False
        if isinstance(shard, ScaledTensor):
            self._gathers_scales = tp_overlap.group is not None and shard.scale_inv.dim() > 0
            assert shard.tensor_scale_inv is None or not self._gathers_scales, "slices have one level of scales"
            sent = [shard.data, shard.scale_inv.t().contiguous()] if self._gathers_scales else [shard.data]
        else:
            sent = [shard]
        self.arriving = tp_overlap.gather(sent)

    def part(self, part: slice) -> ScaledTensor | Tensor:
        """Some rows, which must have arrived; of all ranks or of one."""
        shard, data = self._own, self.arriving.gathered[0]
        if not isinstance(shard, ScaledTensor):
            return data[part]
        if self._gathers_scales:
            r, blocks = shard.data.shape[0], shard.scale_inv.shape[1]
            first, last = part.start // r, part.stop // r
            scale_inv = _joined(self.arriving.gathered[1][first * blocks : last * blocks], last - first).t()
        elif shard.scale_inv.dim() == 0 or part == slice(0, data.shape[0]):
            scale_inv = shard.scale_inv
        else:
            scale_inv = shard.scale_inv[part].t().contiguous().t()
        return shard._replace(data=data[part], scale_inv=scale_inv)

    def values(self) -> Tensor:
        """All rows, once they have arrived; for values."""
        assert not isinstance(self._own, ScaledTensor)
        return self.arriving.wait()[0]

    def columnwise(self) -> ScaledTensor:
        """`[c, t·r]`, waited for; with one scale for the tensor."""
        assert isinstance(self._own, ScaledTensor)
        return self._own._replace(data=self.arriving.wait()[0]).t()


class Columns(NamedTuple):
    """Columnwise data being gathered: `arriving` has that of `ranks` ranks, `[c, r]` each, one after the other;
    `sent` is being read."""

    arriving: ScaledTensor
    ranks: int
    work: CollectiveWork
    sent: list[Tensor]

    def wait(self) -> ScaledTensor:
        """`[c, t·r]`."""
        self.work.wait()
        if self.ranks == 1:
            return self.arriving
        return self.arriving._replace(data=_joined_data(self.arriving.data, self.ranks))


def gather_columns(shard: ScaledTensor, group: ProcessGroup | None) -> Columns:
    """Start gathering columnwise data from each rank's `shard` `[c, r]`, which is whole where there is no group."""
    if group is None:
        return Columns(shard, 1, DONE, [])
    if shard.granularity is DEQUANTIZED:  # in memory the tokens' rows follow each other
        sent = [shard.data.t()]
        (data_rc,), work = all_gather_async(sent, group)
        return Columns(shard._replace(data=data_rc.t()), 1, work, sent)
    same_scales = shard.granularity in (ROW, TENSOR)  # of whole columns, or of the tensor
    wanted = [shard.data] if same_scales else [shard.data, shard.scale_inv.t().contiguous()]
    gathered, work = all_gather_async(wanted, group)
    scale_inv = shard.scale_inv if same_scales else gathered[1].t()
    return Columns(ScaledTensor(gathered[0], scale_inv, shard.granularity), group.size(), work, wanted)
