"""Sums over rows of experts with scales of blocks on Hopper's warpgroup tensor cores, in Gluon.

Same function in `kernels.grouped_gemm`. With scales of blocks a product of 128 summands is multiplied by its scales
and added to sums in fp32, by the threads that wait for the tensor cores. In Triton all warps of a program do the same
at the same time, so the tensor cores wait meanwhile. Here, in the language below it, warps have roles:

    producer    one warp: copies operands and scales of the next blocks to shared memory, as far as there is room
    consumers   two warpgroups, each with 64 of a tile's 128 rows: while one scales and adds, the tensor cores compute
                for the other

A program has a multiprocessor for itself and takes tile after tile. The producer goes on to the next tile while the
results of the last are stored.

With small experts it is bound by the fp32 sums. What is added to is copied to shared memory while products are
computed, and results leave from there by the copy engine, for which no warp waits.

The copy engine reads vectors of scales from multiples of 16 bytes only. So scales of rows lie where the rows lie in the
columnwise copy (`megafp8.numerics.groups`), which begins at a multiple of 128 for each expert.

Shapes as in `kernels.grouped_gemm`; p and q are multiples of 128.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megafp8.kernels.arithmetic import INTERPRETED
from megafp8.numerics.tensor import ScaledTensor

logger = logging.getLogger(__name__)

# Gluon's names before Triton 3.9, and since.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_BLOCK = gl.constexpr(128)
"""Summands that share a scale, read at once."""
_SIDE = gl.constexpr(64)
"""Rows of an instruction of a warpgroup, whose other side is 128."""
_GROUP = gl.constexpr(16)
"""Tiles next to each other in a column, before the next column of them: their operands stay in the L2 cache."""
_DATA, _SCALES = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)  # of a thread


@gluon.constexpr_function
def _sums():
    """How a warpgroup holds the sums of a product of 64 × 128."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])


@gluon.jit
def _vector(block, first, N: gl.constexpr, LAYOUT: gl.constexpr):
    """N scales from `first` on of a block `[1, ...]` in shared memory."""
    return block.reshape([block.shape[1]]).slice(first, N).load(LAYOUT)


@gluon.jit
def _begin(x, y):
    """Begin x·yᵀ of a block; `warpgroup_mma_wait` waits for it."""
    zeros = gl.zeros([_SIDE, 128], gl.float32, _sums())
    return warpgroup_mma(x, y.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _tile_at(index, down, across):
    """Row and column of a tile: _GROUP tiles down, then the next column of them."""
    group = index // (_GROUP * across)
    height = min(down - group * _GROUP, _GROUP)
    within = index % (_GROUP * across)
    return group * _GROUP + within % height, within // height


@gluon.jit
def _barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers of stages: filled by the copy engine, and emptied by all consumers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return full, empty


# --- sums over rows --------------------------------------------------------------------------------------------------


@gluon.jit
def _sum_at(tile, ends_e, down, across):
    """The expert of a tile, the tile's first row and column, and the blocks of rows that are summed.

    Not asked for a tile ahead: Triton 3.6 then takes the rows of the first tile for those of all.
    """
    expert = tile // (down * across)
    i, j = _tile_at(tile % (down * across), down, across)
    start = gl.load(ends_e + expert - 1, mask=expert > 0, other=0)
    end = gl.load(ends_e + expert)
    return expert, i * 128, j * 128, start // _BLOCK, end // _BLOCK


@gluon.jit
def _copy_blocks(a, b, a_scale_inv, b_scale_inv, a_s, b_s, a_scale_s, b_scale_s, full, empty, i0, j0, first, stop,
                 block, STAGES: gl.constexpr):  # fmt: skip
    """Copy the blocks of rows from `first` to `stop` of a tile, with their scales; blocks copied so far."""
    for k in range(first, stop):
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), (block // STAGES + 1) & 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, 256 * _BLOCK + 1024)
        for side in gl.static_range(2):
            to = a_s.index(2 * stage + side)
            _load_tile(a, [i0 + side * _SIDE, k * _BLOCK], arrived, to)
        _load_tile(b, [j0, k * _BLOCK], arrived, b_s.index(stage))
        _load_tile(a_scale_inv, [k, i0], arrived, a_scale_s.index(stage))
        _load_tile(b_scale_inv, [k, j0], arrived, b_scale_s.index(stage))
        block += 1
    return block


@gluon.jit
def _copy_sums(a, b, a_scale_inv, b_scale_inv, earlier_a, earlier_b, earlier_a_scale_inv, earlier_b_scale_inv, out, a_s,
               b_s, a_scale_s, b_scale_s, out_s, full, empty, old, stored, ends_e, earlier_ends_e, p, q, e,
               STAGES: gl.constexpr, ACCUMULATE: gl.constexpr, PAIR: gl.constexpr):  # fmt: skip
    """The producer of `sums_kernel`. What is added to follows the last block, when the tile before is stored."""
    down, across, block, count = p // 128, q // 128, 0, 0
    for tile in range(gl.program_id(0), e * down * across, gl.num_programs(0)):
        expert, i0, j0, first, stop = _sum_at(tile, ends_e, down, across)
        blocks = stop - first
        if PAIR:
            _, _, _, earlier_first, earlier_stop = _sum_at(tile, earlier_ends_e, down, across)
            blocks += earlier_stop - earlier_first
            block = _copy_blocks(earlier_a, earlier_b, earlier_a_scale_inv, earlier_b_scale_inv, a_s, b_s, a_scale_s,
                                 b_scale_s, full, empty, i0, j0, earlier_first, earlier_stop, block,
                                 STAGES)  # fmt: skip
        block = _copy_blocks(a, b, a_scale_inv, b_scale_inv, a_s, b_s, a_scale_s, b_scale_s, full, empty, i0, j0,
                             first, stop, block, STAGES)  # fmt: skip
        if ACCUMULATE:  # noqa: SIM102 -- known when the kernel is compiled
            if blocks > 0:
                for side in gl.static_range(2):
                    mbarrier.wait(stored.index(side), (count + 1) & 1)
                    mbarrier.expect(old.index(side), _SIDE * 128 * 4)
                    row = expert * p + i0 + side * _SIDE
                    _load_tile(out, [row, j0], old.index(side), out_s.index(side))
                count += 1


@gluon.jit
def _multiply_sums(out, a_s, b_s, a_scale_s, b_scale_s, out_s, full, empty, old, stored, ends_e, earlier_ends_e, p, q,
                   e, CONSUMER: gl.constexpr, STAGES: gl.constexpr, ACCUMULATE: gl.constexpr,
                   PAIR: gl.constexpr):  # fmt: skip
    """A consumer of `sums_kernel`: half of the tile's rows."""
    layout: gl.constexpr = _sums()
    down, across, block, count = p // 128, q // 128, 0, 0
    results = out_s.index(CONSUMER)
    for tile in range(gl.program_id(0), e * down * across, gl.num_programs(0)):
        expert, i0, j0, first, stop = _sum_at(tile, ends_e, down, across)
        blocks = stop - first
        if PAIR:
            _, _, _, earlier_first, earlier_stop = _sum_at(tile, earlier_ends_e, down, across)
            blocks += earlier_stop - earlier_first
        sums = gl.zeros([_SIDE, 128], gl.float32, layout)
        for k in range(blocks):
            stage = block % STAGES
            mbarrier.wait(full.index(stage), (block // STAGES) & 1)
            product = _begin(a_s.index(2 * stage + CONSUMER), b_s.index(stage))
            rows = _vector(a_scale_s.index(stage), CONSUMER * _SIDE, _SIDE, gl.SliceLayout(1, layout))
            columns = _vector(b_scale_s.index(stage), 0, 128, gl.SliceLayout(0, layout))
            if ACCUMULATE:  # noqa: SIM102
                if (k == 0) & (count > 0):
                    tma.store_wait(0)
                    _barrier()
                    mbarrier.arrive(stored.index(CONSUMER), count=1)
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty.index(stage), count=1)
            sums += product * gl.expand_dims(columns, 0) * gl.expand_dims(rows, 1)
            block += 1
        if (not ACCUMULATE) or blocks > 0:
            if ACCUMULATE:
                mbarrier.wait(old.index(CONSUMER), count & 1)
                sums += results.load(layout)
            else:
                tma.store_wait(0)
            _barrier()
            results.store(sums.to(out.dtype))
            fence_async_shared()
            _barrier()
            _store_tile(out, [expert * p + i0 + CONSUMER * _SIDE, j0], results)
            count += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["e"])
def sums_kernel(a, b, a_scale_inv, b_scale_inv, earlier_a, earlier_b, earlier_a_scale_inv, earlier_b_scale_inv, out,
                ends_e, earlier_ends_e, p, q, e, STAGES: gl.constexpr, ACCUMULATE: gl.constexpr,
                PAIR: gl.constexpr):  # fmt: skip
    """Each expert's sum over its rows of a's row times b's: into `out` `[e·p, q]`, or added to it (ACCUMULATE).

    PAIR: over the rows of `earlier_a` and `earlier_b`, too; else these are not read.
    """
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, _SIDE, _BLOCK], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, 128, _BLOCK], b.layout)
    a_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], a_scale_inv.layout)
    b_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], b_scale_inv.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2, _SIDE, 128], out.layout)
    full, empty = _barriers(STAGES, 2)
    old, stored = _barriers(2, 1)
    gl.warp_specialize(
        [
            (_multiply_sums, (out, a_s, b_s, a_scale_s, b_scale_s, out_s, full, empty, old, stored, ends_e,
                              earlier_ends_e, p, q, e, gl.constexpr(0), STAGES, ACCUMULATE, PAIR)),
            (_multiply_sums, (out, a_s, b_s, a_scale_s, b_scale_s, out_s, full, empty, old, stored, ends_e,
                              earlier_ends_e, p, q, e, gl.constexpr(1), STAGES, ACCUMULATE, PAIR)),
            (_copy_sums, (a, b, a_scale_inv, b_scale_inv, earlier_a, earlier_b, earlier_a_scale_inv,
                          earlier_b_scale_inv, out, a_s, b_s, a_scale_s, b_scale_s, out_s, full, empty, old, stored,
                          ends_e, earlier_ends_e, p, q, e, STAGES, ACCUMULATE, PAIR)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------


@cache
def takes(device: torch.device) -> bool:
    """Whether `device` has the instructions that these kernels are written in; says so once if it has not."""
    if INTERPRETED or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) == (9, 0):
        return True
    name = torch.cuda.get_device_name(device)
    logger.info("blockwise experts: Triton's kernels, since those for Hopper do not run on %s", name)
    return False


@cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def sums_over_rows(
    a: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_epq: Tensor, *, accumulate: bool,
    earlier: tuple[ScaledTensor, ScaledTensor, Tensor] | None,
) -> None:  # fmt: skip
    """Each expert's sum over its rows of outer products, and those of `earlier`, into `out_epq` or added to it."""
    experts, p, q = out_epq.shape
    results = gl.NVMMASharedLayout(128, 8 * out_epq.element_size(), 2)
    operands: list[TensorDescriptor] = []
    for x, y in ((a, b), earlier[:2] if earlier is not None else (a, b)):
        operands += [
            TensorDescriptor.from_tensor(x.data, [64, 128], _DATA),
            TensorDescriptor.from_tensor(y.data, [128, 128], _DATA),
            TensorDescriptor.from_tensor(x.scale_inv.t(), [1, 128], _SCALES),
            TensorDescriptor.from_tensor(y.scale_inv.t(), [1, 128], _SCALES),
        ]
    sums_kernel[(_programs(out_epq.device),)](
        *operands, TensorDescriptor.from_tensor(out_epq.flatten(0, 1), [64, 128], results), ends_e,
        ends_e if earlier is None else earlier[2], p, q, experts, STAGES=4, ACCUMULATE=accumulate,
        PAIR=earlier is not None, num_warps=4,
    )  # fmt: skip
