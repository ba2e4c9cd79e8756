"""Gather of token-sharded tensors in FP8: each rank quantizes its slice, then the slices are all-gathered.

Under sequence parallelism, the input of a column-parallel layer and the output gradient of a row-parallel layer are
sharded along the tokens. If they are gathered in bf16, every rank quantizes the whole tensor. If they are quantized
first, half the bytes are sent, each rank quantizes only its slice, and a norm can fuse with the quantization as on a
single rank.

*Rowwise* data has one row per token. Each row with all its scales belongs to one rank, so gathered rows are simply
concatenated. *Columnwise* data runs along the tokens. With one scale per tensor, it is the transpose of the gathered
rowwise data. With finer scales, it is a different quantization of the same values and must be gathered too. Only wgrad
needs columnwise data, so it stays sharded: for backward, a rank keeps its slice of the input, 1/t of the memory, and
gathers the data while dgrad runs.

The scales along a column must equal the scales of the whole tensor. Blocks along the tokens start anew on every rank,
which is correct if the slice is a multiple of the block size (`Quantizer.shard_alignment`). A scale for a whole column
is computed from the amax over all ranks (`Quantizer.for_sharded_input`). Every quantized slice is then bitwise equal to
a slice of the whole quantized tensor. Where this is impossible, the plan gathers high-precision values
(`megafp8.plan`).

Cost in addition to communication: gathered columnwise data is t matrices `[c, r]`, one after the other, but the GEMM
needs one `[c, t·r]`, which takes a copy. Summing t GEMMs instead would read and write the fp32 weight gradient t - 1
more times, up to seven times as many bytes in Llama-3-8B. The calculation is in
docs/decisions/0006-tensor-parallel-communication.md.

Scales are sent in their memory order: block after block of the summed dim, with all rows of a block together (see
`cublaslt_problem`). Scales of gathered columnwise data therefore arrive in place. Scales of rowwise data, a 32nd of the
bytes for 1×128 blocks, are reordered by a copy, unless each rank's rows are multiplied separately. If tensor cores do
not support a tensor's blocks, the dequantized values are sent in bf16 (`megafp8.numerics.tensor`).

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
    """Communication at the two ends of a tensor-parallel layer: `input` for x and dx, `output` for y and dy."""

    input: TPOverlap = NO_COMM
    output: TPOverlap = NO_COMM

    @classmethod
    def from_overlap(cls, parallel: Literal["column", "row"], overlap: TPOverlap) -> TPComm:
        """Return the communication of a layer sharded by columns, which gathers x, or by rows, which sums y."""
        return cls(input=overlap) if parallel == "column" else cls(output=overlap)


LOCAL_COMM = TPComm()
"""Communication of a layer that is not sharded: none."""


def _joined(gathered: Tensor, ranks: int) -> Tensor:
    """Rearrange the ranks' stacked matrices `[t·c, r]` side by side to `[c, t·r]`."""
    c, r = gathered.shape[0] // ranks, gathered.shape[1]
    return gathered.view(ranks, c, r).transpose(0, 1).reshape(c, ranks * r)


def _joined_data(gathered: Tensor, ranks: int) -> Tensor:
    """Rearrange the ranks' stacked FP8 matrices side by side, copying the widest possible words."""
    word = torch.int64 if gathered.shape[1] % 8 == 0 else torch.uint8
    return _joined(gathered.view(word), ranks).contiguous().view(gathered.dtype)  # a column of one word is a view


class Rows:
    """Running all-gather of rows `[t·r, c]` from each rank's `shard` `[r, c]`: rowwise FP8 data, or values.

    `arriving` tracks the rows that have arrived.
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
        """Return the rows `part`, which must have arrived; they may be the rows of one rank or of all ranks."""
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
        """Wait for all rows and return them. Only for high-precision values."""
        assert not isinstance(self._own, ScaledTensor)
        return self.arriving.wait()[0]

    def columnwise(self) -> ScaledTensor:
        """Wait for all rows and return them columnwise, `[c, t·r]`. Only for data with one scale per tensor."""
        assert isinstance(self._own, ScaledTensor)
        return self._own._replace(data=self.arriving.wait()[0]).t()


class Columns(NamedTuple):
    """Running all-gather of columnwise data.

    Attributes:
        arriving: Data of `ranks` ranks, `[c, r]` each, one after the other.
        ranks: Number of matrices in `arriving`.
        work: Handle to wait for.
        sent: Tensors that are being sent and must stay alive.
    """

    arriving: ScaledTensor
    ranks: int
    work: CollectiveWork
    sent: list[Tensor]

    def wait(self) -> ScaledTensor:
        """Wait for the data and return it as one matrix `[c, t·r]`."""
        self.work.wait()
        if self.ranks == 1:
            return self.arriving
        return self.arriving._replace(data=_joined_data(self.arriving.data, self.ranks))


def gather_columns(shard: ScaledTensor, group: ProcessGroup | None) -> Columns:
    """Start to gather columnwise data from each rank's `shard` `[c, r]`.

    Without a group, `shard` is the whole matrix.
    """
    if group is None:
        return Columns(shard, 1, DONE, [])
    if shard.granularity is DEQUANTIZED:  # token rows are consecutive in memory
        sent = [shard.data.t()]
        (data_rc,), work = all_gather_async(sent, group)
        return Columns(shard._replace(data=data_rc.t()), 1, work, sent)
    same_scales = shard.granularity in (ROW, TENSOR)  # one scale per whole column, or per tensor
    wanted = [shard.data] if same_scales else [shard.data, shard.scale_inv.t().contiguous()]
    gathered, work = all_gather_async(wanted, group)
    scale_inv = shard.scale_inv if same_scales else gathered[1].t()
    return Columns(ScaledTensor(gathered[0], scale_inv, shard.granularity), group.size(), work, wanted)
