"""Products of few tokens with a quantized weight, `x wᵀ + bias`. Reading the weight once limits the speed.

Reference: `QuantizedWeight.dequantize`, and sums in fp32. Values are unpacked in registers to integers or E4M3, which
are exact in bf16 and fp32, and the sums are multiplied by the scales. Only the sums and the result are rounded.

`vector_kernel` is for one token. Each thread loads 16 bytes of a few rows at a time, multiplies them in fp32 by its
part of the token, and adds the products. The threads of a program cover a range of k, and add their sums at the end.
`tile_kernel` is for up to 64 tokens. It unpacks tiles to bf16 and multiplies them by tensor cores. Programs divide n.
Both kernels are deterministic.

The kinds of weights are the same as in `megafp8.linear.quantized_weight`, and "bf16" for an unquantized weight.

Shapes: m tokens, n outputs, k inputs; t threads, v values that a thread loads at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel

INT8_TO_FP32: tl.constexpr = tl.constexpr(
    "{ .reg .b32 u, a, b, c, d; xor.b32 u, $4, 0x80808080; "
    "prmt.b32 a, u, 0x4B000000, 0x7440; prmt.b32 b, u, 0x4B000000, 0x7441; "
    "prmt.b32 c, u, 0x4B000000, 0x7442; prmt.b32 d, u, 0x4B000000, 0x7443; "
    "sub.rn.f32 $0, a, 0f4B000080; sub.rn.f32 $1, b, 0f4B000080; "
    "sub.rn.f32 $2, c, 0f4B000080; sub.rn.f32 $3, d, 0f4B000080; }"
)
"""Convert four integers to fp32: a byte u in the last bits of 2²³ means 2²³ + u, and u is the integer plus 128."""
INT8_TO_BF16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 u, a, b, c, d; xor.b32 u, $2, 0x80808080; "
    "prmt.b32 a, u, 0x4B000000, 0x7440; prmt.b32 b, u, 0x4B000000, 0x7441; "
    "prmt.b32 c, u, 0x4B000000, 0x7442; prmt.b32 d, u, 0x4B000000, 0x7443; "
    "sub.rn.f32 a, a, 0f4B000080; sub.rn.f32 b, b, 0f4B000080; "
    "sub.rn.f32 c, c, 0f4B000080; sub.rn.f32 d, d, 0f4B000080; "
    "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632; }"
)
"""Convert four integers to bf16: take the upper halves of their fp32 values; the lower halves are zero."""
INT4_TO_FP32: tl.constexpr = tl.constexpr(
    "{ .reg .b32 u; and.b32 u, $8, 0x0F0F0F0F; "
    "prmt.b32 $0, u, 0x43000000, 0x7044; prmt.b32 $1, u, 0x43000000, 0x7144; "
    "prmt.b32 $2, u, 0x43000000, 0x7244; prmt.b32 $3, u, 0x43000000, 0x7344; "
    "shr.u32 u, $8, 4; and.b32 u, u, 0x0F0F0F0F; "
    "prmt.b32 $4, u, 0x43000000, 0x7044; prmt.b32 $5, u, 0x43000000, 0x7144; "
    "prmt.b32 $6, u, 0x43000000, 0x7244; prmt.b32 $7, u, 0x43000000, 0x7344; }"
)
"""Convert the low and high halves of four bytes to fp32, plus 128: q is in the top seven mantissa bits of 128."""
INT4_TO_BF16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 u, a, b, one; and.b32 u, $4, 0x0F0F0F0F; mov.b32 one, 0x3F803F80; "
    "prmt.b32 a, u, 0x43434343, 0x4140; prmt.b32 b, u, 0x43434343, 0x4342; "
    "fma.rn.bf16x2 $0, a, one, $5; fma.rn.bf16x2 $1, b, one, $6; "
    "shr.u32 u, $4, 4; and.b32 u, u, 0x0F0F0F0F; "
    "prmt.b32 a, u, 0x43434343, 0x4140; prmt.b32 b, u, 0x43434343, 0x4342; "
    "fma.rn.bf16x2 $2, a, one, $5; fma.rn.bf16x2 $3, b, one, $6; }"
)
"""Convert both halves of four bytes to bf16, where 0x4300 + q means 128 + q, and add -(128 + zero)."""

FP8_TO_BF16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 a, b, s, power, zero; mov.b32 power, 0x7B807B80; mov.b32 zero, 0x80008000; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; "
    "and.b32 s, a, 0x80008000; shr.u32 a, a, 4; and.b32 a, a, 0x07F007F0; or.b32 a, a, s; "
    "and.b32 s, b, 0x80008000; shr.u32 b, b, 4; and.b32 b, b, 0x07F007F0; or.b32 b, b, s; "
    "fma.rn.bf16x2 $0, a, power, zero; fma.rn.bf16x2 $1, b, power, zero; }"
)
"""Convert four finite E4M3 numbers to bf16: shift exponent and mantissa, and multiply by 2¹²⁰ to adjust the bias."""


@triton.jit
def _unpack_fp32(w, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return values in fp32: for int4 the low halves and the high halves, plus 128; otherwise the values twice."""
    if KIND == "int4":
        if INTERPRETED:
            low, high = (w & 15).to(tl.float32) + 128.0, (w >> 4).to(tl.float32) + 128.0
        else:
            low, high = tl.inline_asm_elementwise(
                INT4_TO_FP32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
    else:
        if KIND == "int8" and not INTERPRETED:
            low = tl.inline_asm_elementwise(INT8_TO_FP32, "=f,=f,=f,=f,r", [w], dtype=tl.float32, is_pure=True, pack=4)
        else:
            low = w.to(tl.float32)
        high = low
    return low, high


@triton.jit
def _unpack_bf16(w, zero, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return values in bf16 (fp32 in the interpreter): for int4 the low halves and the high halves, minus `zero`.

    Otherwise the values are returned twice. `zero` can be broadcast to the shape of w.
    """
    if KIND == "int4":
        if INTERPRETED:
            low, high = (w & 15).to(tl.float32) - zero, (w >> 4).to(tl.float32) - zero
        else:
            offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), w.shape)
            low, high = tl.inline_asm_elementwise(
                INT4_TO_BF16, "=r,=r,=r,=r,r,r,r", [w, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        if INTERPRETED:
            low = w.to(tl.float32)
        elif KIND == "int8":
            low = tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif KIND == "fp8":
            low = tl.inline_asm_elementwise(FP8_TO_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            low = w
        high = low
    return low, high


def vector_kernel(x_k, data, scale_inv_gn, zero_gn, bias_n, y_n, n, k, KIND: tl.constexpr, HALF: tl.constexpr,
                    ROWS: tl.constexpr, T: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr,
                    INTERPRETED: tl.constexpr):  # fmt: skip
    """Multiply one token by ROWS rows of the weight."""
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(j, n - 1)
    t, v = tl.arange(0, T), tl.arange(0, V)
    width = k // 2 if KIND == "int4" else k  # width of a row of data
    at_row = data + row.to(tl.int64)[:, None, None] * width
    sums = tl.zeros([ROWS, T], tl.float32)
    for begin in tl.range(0, width, T * V):
        first = begin + t * V  # first position of each thread
        at = first[:, None] + v[None, :]
        if EVEN:
            w = tl.load(at_row + at[None, :, :])
        else:
            w = tl.load(at_row + at[None, :, :], mask=(at < width)[None, :, :], other=0.0)
        low, high = _unpack_fp32(w, KIND, INTERPRETED)
        if KIND == "int4":
            group = first // HALF
            at = tl.multiple_of(first + group * HALF, V)[:, None] + v[None, :]
            if EVEN:
                x_low, x_high = tl.load(x_k + at).to(tl.float32), tl.load(x_k + at + HALF).to(tl.float32)
            else:
                inside = (first < width)[:, None]
                x_low = tl.load(x_k + at, mask=inside, other=0.0).to(tl.float32)
                x_high = tl.load(x_k + at + HALF, mask=inside, other=0.0).to(tl.float32)
            part = tl.sum(low * x_low[None, :, :] + high * x_high[None, :, :], axis=2)
            at_scale = tl.minimum(group, k // (2 * HALF) - 1)[None, :] * n + row[:, None]
            scale_inv = tl.load(scale_inv_gn + at_scale).to(tl.float32)
            zero = tl.load(zero_gn + at_scale).to(tl.float32)
            sums += scale_inv * (part - (128.0 + zero) * tl.sum(x_low + x_high, axis=1)[None, :])
        else:
            if EVEN:
                x = tl.load(x_k + at).to(tl.float32)
            else:
                x = tl.load(x_k + at, mask=at < width, other=0.0).to(tl.float32)
            sums += tl.sum(low * x[None, :, :], axis=2)
    y = tl.sum(sums, axis=1)
    if KIND == "int8" or KIND == "fp8":
        y *= tl.load(scale_inv_gn + row)
    if bias_n is not None:
        y += tl.load(bias_n + row).to(tl.float32)
    tl.store(y_n + j, y.to(y_n.dtype.element_ty), mask=j < n)


@triton.jit
def _dot(x, w, sums, SPLIT: tl.constexpr):
    """Return `x wᵀ + sums`, for batches of matrices if SPLIT."""
    if SPLIT:
        y = tl.dot(x, tl.trans(w, 0, 2, 1), sums, input_precision="ieee")
    else:
        y = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    return y


def tile_kernel(x_mk, data, scale_inv_gn, zero_gn, bias_n, y_mn, m, n, k, KIND: tl.constexpr, HALF: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr,
                EVEN: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Multiply M tokens by N rows of the weight, K columns of data at a time. For int4, K is HALF, half of a group.

    SPLIT is the number of warps that read separate columns and add their sums at the end; this is a batched matrix
    product, which Triton divides over warps. If SPLIT is 0, the warps share each product. STEP is the number of columns
    that all warps read at a time.
    """
    j = tl.program_id(0) * N + tl.arange(0, N)
    i = tl.program_id(1) * M + tl.arange(0, M)
    row = tl.minimum(j, n - 1)
    width = k // 2 if KIND == "int4" else k
    at = tl.arange(0, K)
    if SPLIT:
        first = tl.arange(0, SPLIT)[:, None] * K  # first column of each warp
        at_k = first[:, :, None] + at[None, None, :]
        at_row = data + row.to(tl.int64)[None, :, None] * width
        at_token = x_mk + i.to(tl.int64)[None, :, None] * k
        in_batch = (i < m)[None, :, None]  # do not read beyond m: with few tokens, this would be most of the bytes
        at_scale = row[None, :]
        sums = tl.zeros([SPLIT, M, N], tl.float32)
    else:
        first = tl.zeros([1], tl.int32)
        at_k = at[None, :]
        at_row = data + row.to(tl.int64)[:, None] * width
        at_token = x_mk + i.to(tl.int64)[:, None] * k
        in_batch = (i < m)[:, None]
        at_scale = row
        sums = tl.zeros([M, N], tl.float32)
    for begin in tl.range(0, width, STEP):
        at_w = begin + at_k
        if EVEN:
            inside = in_batch
            w = tl.load(at_row + at_w)
        else:
            inside = in_batch & (at_w < width)
            w = tl.load(at_row + at_w, mask=at_w < width, other=0.0)
        if KIND == "int4":
            group = tl.minimum(begin + first, width - K) // K
            at_x = at_w + begin + tl.expand_dims(first, -1)
            x_low = tl.load(at_token + at_x, mask=inside, other=0.0)
            x_high = tl.load(at_token + at_x + K, mask=inside, other=0.0)
            scale_inv = tl.load(scale_inv_gn + at_scale + group * n).to(tl.float32)
            zero = tl.load(zero_gn + at_scale + group * n).to(tl.float32)
            low, high = _unpack_bf16(w, tl.expand_dims(zero, -1), KIND, INTERPRETED)
            part = _dot(x_high, high, _dot(x_low, low, tl.zeros_like(sums), SPLIT), SPLIT)
            sums += part * tl.expand_dims(scale_inv, -2)
        else:
            x = tl.load(at_token + at_w, mask=inside, other=0.0)
            values, _ = _unpack_bf16(w, 0.0, KIND, INTERPRETED)
            sums = _dot(x, values, sums, SPLIT)
    y = tl.sum(sums, axis=0) if SPLIT else sums
    if KIND == "int8" or KIND == "fp8":
        y *= tl.load(scale_inv_gn + row)[None, :]
    if bias_n is not None:
        y += tl.load(bias_n + row).to(tl.float32)[None, :]
    at_y = i.to(tl.int64)[:, None] * n + j[None, :]
    tl.store(y_mn + at_y, y.to(y_mn.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


def dequantize_kernel(data, scale_inv_gn, zero_gn, w_nk, n, k, KIND: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr,
                      K: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Dequantize N rows and K bytes of a weight. For int4, K is HALF, the bytes of a group."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    first = tl.program_id(1) * K
    at = first + tl.arange(0, K)
    width = k // 2 if KIND == "int4" else k
    inside = (row < n)[:, None] & (at < width)[None, :]
    w = tl.load(data + row.to(tl.int64)[:, None] * width + at[None, :], mask=inside, other=0.0)
    low, high = _unpack_fp32(w, KIND, INTERPRETED)
    to = w_nk + row.to(tl.int64)[:, None] * k + at[None, :]
    if KIND == "int4":
        at_scale = first // K * n + row
        scale_inv = tl.load(scale_inv_gn + at_scale, mask=row < n, other=0.0).to(tl.float32)[:, None]
        zero = 128.0 + tl.load(zero_gn + at_scale, mask=row < n, other=0).to(tl.float32)[:, None]
        tl.store(to + first, ((low - zero) * scale_inv).to(w_nk.dtype.element_ty), mask=inside)
        tl.store(to + first + K, ((high - zero) * scale_inv).to(w_nk.dtype.element_ty), mask=inside)
    else:
        scale_inv = tl.load(scale_inv_gn + row, mask=row < n, other=0.0)[:, None]
        tl.store(to, (low * scale_inv).to(w_nk.dtype.element_ty), mask=inside)


class VectorTile(NamedTuple):
    """Tile of `vector_kernel`: rows per program, and warps; each of a warp's 32 threads reads 16 bytes at a time."""

    rows: int
    warps: int


class PackedWeightTile(NamedTuple):
    """Tile of `tile_kernel`: rows per program, bytes of a row read at a time, warps, and pipeline stages.

    With `split`, each warp reads `k` bytes of separate columns. For int4, the bytes are always a group's bytes.
    """

    n: int
    k: int
    warps: int
    stages: int
    split: bool


_vector, _tile, _dequantize = TritonKernel(vector_kernel), TritonKernel(tile_kernel), TritonKernel(dequantize_kernel)
MOST_TOKENS = 64
"""Largest number of tokens for these kernels. With more tokens, dequantizing the weight to bf16 is worth its cost."""


class PackedData(NamedTuple):
    """Weight in the form that kernels read: quantized (see `megafp8.linear.quantized_weight`) or bf16.

    `group` is the number of columns that share a scale, or 0 if all columns of a row share one.
    """

    kind: str
    data: Tensor
    k: int
    scale_inv_gn: Tensor | None = None
    zero_gn: Tensor | None = None
    group: int = 0


def multiply(
    x_mk: Tensor, weight: PackedData, bias_n: Tensor | None = None, tile: VectorTile | PackedWeightTile | None = None
) -> Tensor:
    """Compute `x wᵀ + bias`, `[m, n]` in x's dtype.

    Args:
        x_mk: Contiguous bf16 tokens, at most `MOST_TOKENS`; fp32 in the interpreter.
        weight: Weight, `[n, k]`.
        bias_n: Bias, `[n]`, or None.
        tile: Tile to use, or None for the best one. A `VectorTile` supports only one token.
    """
    (m, k), n = x_mk.shape, len(weight.data)
    y_mn = x_mk.new_empty(m, n)
    if not y_mn.numel():
        return y_mn
    tile = tile or best_tile(weight.kind, m, n)
    width, half = weight.data.shape[1], weight.group // 2
    tensors = (kernel_input(x_mk), kernel_input(weight.data), weight.scale_inv_gn, weight.zero_gn, bias_n, y_mn)
    common = {"KIND": weight.kind, "HALF": half, "INTERPRETED": INTERPRETED, "num_warps": tile.warps}
    if isinstance(tile, VectorTile):
        assert m == 1
        value = 16 // weight.data.itemsize
        threads = min(32 * tile.warps, next_power_of_2(ceil_div(width, value)))
        constants = {"ROWS": tile.rows, "T": threads, "V": value, "EVEN": width % (threads * value) == 0}
        _vector.bind(**constants, **common).launch((ceil_div(n, tile.rows), 1), tensors, (n, k))
        return y_mn
    tokens = max(16, min(next_power_of_2(m), 64))
    columns = half or tile.k // weight.data.itemsize
    split = tile.warps if tile.split else 0
    step = columns * max(split, 1)
    constants = {"M": tokens, "N": tile.n, "K": columns, "SPLIT": split, "STEP": step, "EVEN": width % step == 0}
    grid = (ceil_div(n, tile.n), ceil_div(m, tokens))
    _tile.bind(**constants, **common, num_stages=tile.stages).launch(grid, tensors, (m, n, k))
    return y_mn


_ONE_TOKEN = {
    "bf16": VectorTile(1, 4),
    "int8": VectorTile(4, 2),
    "fp8": VectorTile(4, 2),
    "int4": VectorTile(4, 1),  # the more iterations a program has, the fewer instructions it needs per value
}


def best_tile(kind: str, m: int, n: int) -> VectorTile | PackedWeightTile:
    """Return the fastest tile for a weight's kind, m tokens and n outputs."""
    if m == 1:
        return _ONE_TOKEN[kind]
    if m <= 16:
        return PackedWeightTile(32 if n >= 16384 else 16, 64, 4, 4, split=True)
    return PackedWeightTile(64 if n >= 8192 else 32, 128, 4, 3, split=False)


def dequantize(weight: PackedData, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight, `[n, k]` in `dtype`; see `QuantizedWeight.dequantize`."""
    n, half = len(weight.data), weight.group // 2
    w_nk = torch.empty(n, weight.k, dtype=dtype, device=weight.data.device)
    if w_nk.numel():
        rows, columns = 16, half or 256
        constants = {"KIND": weight.kind, "HALF": half, "N": rows, "K": columns, "INTERPRETED": INTERPRETED}
        grid = (ceil_div(n, rows), ceil_div(weight.data.shape[1], columns))
        tensors = (weight.data, weight.scale_inv_gn, weight.zero_gn, w_nk)
        _dequantize.bind(**constants, num_warps=4).launch(grid, tensors, (n, weight.k))
    return w_nk
