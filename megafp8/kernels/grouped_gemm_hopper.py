"""Grouped FP8 GEMMs with one scale per expert on Hopper's warpgroup tensor cores, in Gluon.

The functions are the same as in `kernels.grouped_gemm`; products with block scales are in `kernels.grouped_gemm_cuda`.
Threads add products to sums in fp32, scale the sums and store them. In Triton, all warps of a program do this at the
same time, and the tensor cores wait meanwhile. In Gluon, the language below Triton, warps have roles:

    producer    one warp: copies operands of the next 128 summands to shared memory while there is room
    consumers   two warpgroups: while one adds or stores, the tensor cores compute for the other

A program has a multiprocessor for itself and computes one tile after another. Each consumer computes half of a tile's
rows unless noted otherwise. The producer goes on to the next tile while the results of the last tile are stored.

Scales multiply the final sums.

*Rows times matrices.* Fast sums stay in the tensor cores: the consumers alternate with tiles of 128 × 128 (CUTLASS'
ping-pong), and while one stores results, the other multiplies. Otherwise, products of 128 summands are added in fp32.
The tiles are then 128 × 256, and a consumer multiplies first one half of the columns, then the other, because the sums
and a product of all columns do not fit in registers. Tiles may reach beyond n, where nothing is stored, and beyond k,
where the copy engine reads zeros.

*Sums over rows.* The fp32 sums in memory limit the speed if experts are small. The old sums are copied to shared memory
while products are computed. The copy engine stores the results from shared memory, and no warp waits for it.

Shapes: as in `kernels.grouped_gemm`. p is a multiple of 128; n, k and q are multiples of 16.
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

# Gluon's names since Triton 3.9, or before it.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_BLOCK = gl.constexpr(128)
"""Number of summands read at once."""
_SIDE = gl.constexpr(64)
"""Number of rows of a warpgroup instruction, which has 128 columns."""
_GROUP = gl.constexpr(16)
"""Number of tiles computed down a column before the next column begins, so that operands stay in the L2 cache."""
_DATA = gl.NVMMASharedLayout(128, 8, 2)
_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)  # per thread


@gluon.constexpr_function
def _sums():
    """Return the register layout of a warpgroup's 64 × 128 sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])


@gluon.constexpr_function
def _stored(ROWS):
    """Return the layout for storing ROWS × 128 results.

    A thread stores 16 bytes of a row, and a warp stores rows that it computed.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]] + ([[64, 0]] if ROWS == 128 else [])
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, 128])


@gluon.jit
def _begin(x, y):
    """Start the product x·yᵀ of a block; `warpgroup_mma_wait` waits for it."""
    zeros = gl.zeros([_SIDE, 128], gl.float32, _sums())
    return warpgroup_mma(x, y.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _tile_at(index, down, across):
    """Return row and column of a tile. Tiles are numbered _GROUP tiles down, then in the next column of tiles."""
    group = index // (_GROUP * across)
    height = min(down - group * _GROUP, _GROUP)
    within = index % (_GROUP * across)
    return group * _GROUP + within % height, within // height


@gluon.jit
def _barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate two barriers per stage: the copy engine has filled the stage, and all consumers have emptied it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return full, empty


# --- rows times matrices ---------------------------------------------------------------------------------------------


@gluon.jit
def _next_expert(tile, expert, start, end, first, stop, ends_e, e, across):
    """Return the expert of a tile, given the expert of an earlier tile.

    The expert's rows begin at `start` and end before `end`. Its tiles begin at `first` and end before `stop`.
    """
    while (stop <= tile) & (expert + 1 < e):
        expert += 1
        start = end
        end = gl.load(ends_e + expert)
        first = stop
        stop = first + (end - start + 127) // 128 * across
    return expert, start, end, first, stop


@gluon.jit
def _first_expert(tile, ends_e, e, across):
    """Return the expert of a program's first tile, in the form of `_next_expert`."""
    expert, start, first = 0, 0, 0
    end = gl.load(ends_e)
    stop = (end + 127) // 128 * across
    return _next_expert(tile, expert, start, end, first, stop, ends_e, e, across)


@gluon.jit
def _copy_tiles(a, b, a_s, b_s, full, empty, ends_e, n, k, e, row_step, column_step, COLUMNS: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    """Run the producer: copy the operands of tiles of 128 × COLUMNS, 128 summands at a time."""
    across, blocks = (n + COLUMNS - 1) // COLUMNS, (k + _BLOCK - 1) // _BLOCK
    tile, block = gl.program_id(0), 0
    expert, start, end, first, stop = _first_expert(tile, ends_e, e, across)
    while tile < stop:
        down, right = _tile_at(tile - first, (end - start + 127) // 128, across)
        i0, row, column = start + down * 128, expert * row_step + right * COLUMNS, expert * column_step
        for i in range(blocks):
            stage = block % STAGES
            mbarrier.wait(empty.index(stage), (block // STAGES + 1) & 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, (128 + COLUMNS) * _BLOCK)
            _load_tile(a, [i0, i * _BLOCK], arrived, a_s.index(stage))
            _load_tile(b, [row, column + i * _BLOCK], arrived, b_s.index(stage))
            block += 1
        tile += gl.num_programs(0)
        expert, start, end, first, stop = _next_expert(tile, expert, start, end, first, stop, ends_e, e, across)


@gluon.jit
def _store(out_mn, sums, i0, j0, end, n):
    """Store results from row i0 and column j0 on; skip rows from `end` on and columns from n on."""
    to: gl.constexpr = _stored(sums.shape[0])
    i = i0 + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, to))
    j = j0 + gl.arange(0, 128, layout=gl.SliceLayout(0, to))
    at = gl.expand_dims(i.to(gl.int64) * n, 1) + gl.expand_dims(j, 0)
    results = gl.convert_layout(sums.to(out_mn.dtype.element_ty), to)
    gl.store(out_mn + at, results, mask=gl.expand_dims(i < end, 1) & gl.expand_dims(j < n, 0))


@gluon.jit
def _multiply_pingpong(out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, may_begin, ends_e, n, k, e, a_stride,
                       b_stride, CONSUMER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Run a consumer of `fast_rows_kernel`: compute every second tile in the tensor cores' accumulators.

    A block is started before the previous block ends. When the last block of a tile has been started, the other
    consumer may begin its tile.
    """
    across, blocks = (n + 127) // 128, (k + _BLOCK - 1) // _BLOCK
    tile, block, count = gl.program_id(0) + CONSUMER * gl.num_programs(0), CONSUMER * blocks, 0
    expert, start, end, first, stop = _first_expert(tile, ends_e, e, across)
    while tile < stop:
        down, right = _tile_at(tile - first, (end - start + 127) // 128, across)
        a_scale, b_scale = gl.load(a_scale_inv + expert * a_stride), gl.load(b_scale_inv + expert * b_stride)
        sums = gl.zeros([128, 128], gl.float32, _sums())
        # A wait for `full` distinguishes rounds of stages only by parity. If it began before the other consumer had
        # waited for the blocks of its tile, it could end a round too early.
        mbarrier.wait(may_begin.index(CONSUMER), (count + 1 + CONSUMER) & 1)
        for i in range(blocks):
            stage = block % STAGES
            mbarrier.wait(full.index(stage), (block // STAGES) & 1)
            sums = warpgroup_mma(a_s.index(stage), b_s.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=i > 0)
            block += 1
        mbarrier.arrive(may_begin.index(1 - CONSUMER), count=1)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1)
        _store(out_mn, sums * a_scale * b_scale, start + down * 128, right * 128, end, n)
        block += blocks
        count += 1
        tile += 2 * gl.num_programs(0)
        expert, start, end, first, stop = _next_expert(tile, expert, start, end, first, stop, ends_e, e, across)


@gluon.jit(do_not_specialize=["e", "a_stride", "b_stride"])
def fast_rows_kernel(a, b, out_mn, a_scale_inv, b_scale_inv, ends_e, n, k, e, row_step, column_step, a_stride, b_stride,
                     STAGES: gl.constexpr):  # fmt: skip
    """Multiply rows of a by the matrix of their expert, keeping sums in the tensor cores.

    The matrix of expert i begins at row i·row_step and column i·column_step of b. `a_stride` and `b_stride` are the
    distances between the scales of neighboring experts.
    """
    a_s = gl.allocate_shared_memory(a.dtype, [STAGES, 128, _BLOCK], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, 128, _BLOCK], b.layout)
    full, empty = _barriers(STAGES, 1)
    may_begin, _ = _barriers(2, 1)
    gl.warp_specialize(
        [
            (_multiply_pingpong, (out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, may_begin, ends_e, n, k, e,
                                  a_stride, b_stride, gl.constexpr(0), STAGES)),
            (_multiply_pingpong, (out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, may_begin, ends_e, n, k, e,
                                  a_stride, b_stride, gl.constexpr(1), STAGES)),
            (_copy_tiles, (a, b, a_s, b_s, full, empty, ends_e, n, k, e, row_step, column_step, gl.constexpr(128),
                           STAGES)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply_halves(out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, ends_e, n, k, e, a_stride, b_stride,
                     CONSUMER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Run a consumer of `precise_rows_kernel`: compute half of each tile's rows, adding products in fp32."""
    across, blocks = (n + 255) // 256, (k + _BLOCK - 1) // _BLOCK
    tile, block = gl.program_id(0), 0
    expert, start, end, first, stop = _first_expert(tile, ends_e, e, across)
    while tile < stop:
        down, right = _tile_at(tile - first, (end - start + 127) // 128, across)
        i0, j0 = start + down * 128 + CONSUMER * _SIDE, right * 256
        a_scale, b_scale = gl.load(a_scale_inv + expert * a_stride), gl.load(b_scale_inv + expert * b_stride)
        sums = gl.zeros([_SIDE, 128], gl.float32, _sums())
        sums2 = gl.zeros([_SIDE, 128], gl.float32, _sums())  # sums of the next 128 columns
        for _ in range(blocks):
            stage = block % STAGES
            mbarrier.wait(full.index(stage), (block // STAGES) & 1)
            x = a_s.index(stage).slice(CONSUMER * _SIDE, _SIDE)
            product = _begin(x, b_s.index(stage).slice(0, 128))
            product = warpgroup_mma_wait(0, deps=(product,))
            sums += product
            product = _begin(x, b_s.index(stage).slice(128, 128))
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty.index(stage), count=1)
            sums2 += product
            block += 1
        _store(out_mn, sums * a_scale * b_scale, i0, j0, end, n)
        _store(out_mn, sums2 * a_scale * b_scale, i0, j0 + 128, end, n)
        tile += gl.num_programs(0)
        expert, start, end, first, stop = _next_expert(tile, expert, start, end, first, stop, ends_e, e, across)


@gluon.jit(do_not_specialize=["e", "a_stride", "b_stride"])
def precise_rows_kernel(a, b, out_mn, a_scale_inv, b_scale_inv, ends_e, n, k, e, row_step, column_step, a_stride,
                        b_stride, STAGES: gl.constexpr):  # fmt: skip
    """Compute the same products as `fast_rows_kernel`, adding products of 128 summands in fp32."""
    a_s = gl.allocate_shared_memory(a.dtype, [STAGES, 128, _BLOCK], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, 256, _BLOCK], b.layout)
    full, empty = _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply_halves, (out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, ends_e, n, k, e, a_stride,
                                b_stride, gl.constexpr(0), STAGES)),
            (_multiply_halves, (out_mn, a_scale_inv, b_scale_inv, a_s, b_s, full, empty, ends_e, n, k, e, a_stride,
                                b_stride, gl.constexpr(1), STAGES)),
            (_copy_tiles, (a, b, a_s, b_s, full, empty, ends_e, n, k, e, row_step, column_step, gl.constexpr(256),
                           STAGES)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


# --- sums over rows --------------------------------------------------------------------------------------------------


@gluon.jit
def _sum_at(tile, ends_e, down, across):
    """Return the expert of a tile, the tile's first row and column, and the range of row blocks to sum.

    Do not call it one tile ahead: Triton 3.6 would then use the rows of the first tile for all tiles.
    """
    expert = tile // (down * across)
    i, j = _tile_at(tile % (down * across), down, across)
    start = gl.load(ends_e + expert - 1, mask=expert > 0, other=0)
    end = gl.load(ends_e + expert)
    return expert, i * 128, j * 128, start // _BLOCK, end // _BLOCK


@gluon.jit
def _copy_blocks(a, b, a_s, b_s, full, empty, i0, j0, first, stop, block, STAGES: gl.constexpr):
    """Copy the blocks of rows from `first` to `stop` of a tile; return the number of blocks copied so far."""
    for k in range(first, stop):
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), (block // STAGES + 1) & 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, 256 * _BLOCK)
        for side in gl.static_range(2):
            to = a_s.index(2 * stage + side)
            _load_tile(a, [i0 + side * _SIDE, k * _BLOCK], arrived, to)
        _load_tile(b, [j0, k * _BLOCK], arrived, b_s.index(stage))
        block += 1
    return block


@gluon.jit
def _copy_sums(a, b, earlier_a, earlier_b, out, a_s, b_s, out_s, full, empty, old, stored, ends_e, earlier_ends_e, p, q,
               e, STAGES: gl.constexpr, ACCUMULATE: gl.constexpr, PAIR: gl.constexpr):  # fmt: skip
    """Run the producer of `sums_kernel`.

    The old sums are copied after a tile's last block, when the results of the previous tile have been stored.
    """
    down, across, block, count = p // 128, (q + 127) // 128, 0, 0
    for tile in range(gl.program_id(0), e * down * across, gl.num_programs(0)):
        expert, i0, j0, first, stop = _sum_at(tile, ends_e, down, across)
        blocks = stop - first
        if PAIR:
            _, _, _, earlier_first, earlier_stop = _sum_at(tile, earlier_ends_e, down, across)
            blocks += earlier_stop - earlier_first
            block = _copy_blocks(earlier_a, earlier_b, a_s, b_s, full, empty, i0, j0, earlier_first, earlier_stop,
                                 block, STAGES)  # fmt: skip
        block = _copy_blocks(a, b, a_s, b_s, full, empty, i0, j0, first, stop, block, STAGES)
        if ACCUMULATE:  # noqa: SIM102 -- known when the kernel is compiled
            if blocks > 0:
                for side in gl.static_range(2):
                    mbarrier.wait(stored.index(side), (count + 1) & 1)
                    mbarrier.expect(old.index(side), _SIDE * 128 * 4)
                    row = expert * p + i0 + side * _SIDE
                    _load_tile(out, [row, j0], old.index(side), out_s.index(side))
                count += 1


@gluon.jit
def _add_blocks(sums, a_s, b_s, full, empty, stored, block, blocks, leaving, CONSUMER: gl.constexpr, FAST: gl.constexpr,
                STAGES: gl.constexpr, ACCUMULATE: gl.constexpr):  # fmt: skip
    """Add the products of `blocks` blocks to `sums`; return the sums and the number of blocks multiplied so far.

    `leaving` is not 0 if the results of the previous tile may still be in the shared memory that the old sums need.
    """
    for k in range(blocks):
        stage = block % STAGES
        mbarrier.wait(full.index(stage), (block // STAGES) & 1)
        x, y = a_s.index(2 * stage + CONSUMER), b_s.index(stage)
        if FAST:
            product = warpgroup_mma(x, y.permute((1, 0)), sums, is_async=True)
        else:
            product = _begin(x, y)
        if ACCUMULATE:  # noqa: SIM102 -- known when the kernel is compiled
            if (k == 0) & (leaving > 0):
                tma.store_wait(0)
                _barrier()
                mbarrier.arrive(stored.index(CONSUMER), count=1)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        if FAST:
            sums = product
        else:
            sums += product
        block += 1
    return sums, block


@gluon.jit
def _multiply_sums(out, a_scale_inv, b_scale_inv, earlier_a_scale_inv, earlier_b_scale_inv, a_s, b_s, out_s, full,
                   empty, old, stored, ends_e, earlier_ends_e, p, q, e, a_stride, b_stride, CONSUMER: gl.constexpr,
                   FAST: gl.constexpr, STAGES: gl.constexpr, ACCUMULATE: gl.constexpr,
                   PAIR: gl.constexpr):  # fmt: skip
    """Run a consumer of `sums_kernel`: compute half of each tile's rows."""
    layout: gl.constexpr = _sums()
    down, across, block, count = p // 128, (q + 127) // 128, 0, 0
    results = out_s.index(CONSUMER)
    for tile in range(gl.program_id(0), e * down * across, gl.num_programs(0)):
        expert, i0, j0, first, stop = _sum_at(tile, ends_e, down, across)
        last_blocks, earlier_blocks = stop - first, 0
        if PAIR:
            _, _, _, earlier_first, earlier_stop = _sum_at(tile, earlier_ends_e, down, across)
            earlier_blocks = earlier_stop - earlier_first
        blocks, leaving = earlier_blocks + last_blocks, count
        sums = gl.zeros([_SIDE, 128], gl.float32, layout)
        a_scale, b_scale = gl.load(a_scale_inv + expert * a_stride), gl.load(b_scale_inv + expert * b_stride)
        if PAIR:
            a_ratio = gl.load(earlier_a_scale_inv + expert * a_stride) / a_scale
            b_ratio = gl.load(earlier_b_scale_inv + expert * b_stride) / b_scale
            sums, block = _add_blocks(sums, a_s, b_s, full, empty, stored, block, earlier_blocks, leaving, CONSUMER,
                                      FAST, STAGES, ACCUMULATE)  # fmt: skip
            sums = sums * a_ratio * b_ratio  # convert to the scales of a and b
            leaving = gl.where(earlier_blocks > 0, 0, leaving)
        sums, block = _add_blocks(sums, a_s, b_s, full, empty, stored, block, last_blocks, leaving, CONSUMER, FAST,
                                  STAGES, ACCUMULATE)  # fmt: skip
        sums = sums * a_scale * b_scale
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


@gluon.jit(do_not_specialize=["e", "a_stride", "b_stride"])
def sums_kernel(a, b, a_scale_inv, b_scale_inv, earlier_a, earlier_b, earlier_a_scale_inv, earlier_b_scale_inv, out,
                ends_e, earlier_ends_e, p, q, e, a_stride, b_stride, FAST: gl.constexpr, STAGES: gl.constexpr,
                ACCUMULATE: gl.constexpr, PAIR: gl.constexpr):  # fmt: skip
    """Compute each expert's sum of outer products over its rows, and store it in `out`, `[e·p, q]`.

    With ACCUMULATE, the sums are added to `out`. With PAIR, they also cover the rows of `earlier_a` and `earlier_b`,
    which have separate scales; otherwise these are not read. `a_stride` and `b_stride` are the distances between the
    scales of neighboring experts. FAST sums stay in the tensor cores.
    """
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, _SIDE, _BLOCK], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, 128, _BLOCK], b.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2, _SIDE, 128], out.layout)
    full, empty = _barriers(STAGES, 2)
    old, stored = _barriers(2, 1)
    gl.warp_specialize(
        [
            (_multiply_sums, (out, a_scale_inv, b_scale_inv, earlier_a_scale_inv, earlier_b_scale_inv, a_s, b_s, out_s,
                              full, empty, old, stored, ends_e, earlier_ends_e, p, q, e, a_stride, b_stride,
                              gl.constexpr(0), FAST, STAGES, ACCUMULATE, PAIR)),
            (_multiply_sums, (out, a_scale_inv, b_scale_inv, earlier_a_scale_inv, earlier_b_scale_inv, a_s, b_s, out_s,
                              full, empty, old, stored, ends_e, earlier_ends_e, p, q, e, a_stride, b_stride,
                              gl.constexpr(1), FAST, STAGES, ACCUMULATE, PAIR)),
            (_copy_sums, (a, b, earlier_a, earlier_b, out, a_s, b_s, out_s, full, empty, old, stored, ends_e,
                          earlier_ends_e, p, q, e, STAGES, ACCUMULATE, PAIR)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------


@cache
def takes(device: torch.device) -> bool:
    """Return whether `device` has the instructions that these kernels use. Log once if it does not."""
    if INTERPRETED or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) == (9, 0):
        return True
    name = torch.cuda.get_device_name(device)
    logger.info("FP8 experts: using Triton's kernels, because the kernels for Hopper do not run on %s", name)
    return False


@cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_times_matrices(
    a_mk: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_mn: Tensor, row_step: int, column_step: int, *, fast: bool
) -> None:
    """Multiply rows by the transpose of their expert's matrix, with one scale per expert, into `out_mn`.

    The matrix of expert i begins at row i·row_step and column i·column_step of b. With `fast`, sums stay in the tensor
    cores.
    """
    k, n, experts = a_mk.data.shape[1], out_mn.shape[1], len(ends_e)
    kernel, columns, stages = (fast_rows_kernel, 128, 6) if fast else (precise_rows_kernel, 256, 4)
    kernel[(_programs(out_mn.device),)](
        TensorDescriptor.from_tensor(a_mk.data, [128, 128], _DATA),
        TensorDescriptor.from_tensor(b.data, [columns, 128], _DATA), out_mn, a_mk.scale_inv, b.scale_inv, ends_e, n, k,
        experts, row_step, column_step, a_mk.scale_inv.stride(-1), b.scale_inv.stride(-1), STAGES=stages, num_warps=4,
    )  # fmt: skip


def sums_over_rows(
    a: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_epq: Tensor, *, accumulate: bool,
    earlier: tuple[ScaledTensor, ScaledTensor, Tensor] | None, fast: bool,
) -> None:  # fmt: skip
    """Sum outer products over each expert's rows, including the rows of `earlier`, into `out_epq`.

    With `accumulate`, the sums are added to `out_epq`. With `fast`, they stay in the tensor cores.
    """
    experts, p, q = out_epq.shape
    results = gl.NVMMASharedLayout(128, 8 * out_epq.element_size(), 2)
    operands: list[TensorDescriptor | Tensor] = []
    for x, y in ((a, b), earlier[:2] if earlier is not None else (a, b)):
        operands += [
            TensorDescriptor.from_tensor(x.data, [64, 128], _DATA),
            TensorDescriptor.from_tensor(y.data, [128, 128], _DATA), x.scale_inv, y.scale_inv,
        ]  # fmt: skip
    sums_kernel[(_programs(out_epq.device),)](
        *operands, TensorDescriptor.from_tensor(out_epq.flatten(0, 1), [64, 128], results), ends_e,
        ends_e if earlier is None else earlier[2], p, q, experts, a.scale_inv.stride(-1), b.scale_inv.stride(-1),
        FAST=fast, STAGES=5, ACCUMULATE=accumulate, PAIR=earlier is not None, num_warps=4,
    )  # fmt: skip
