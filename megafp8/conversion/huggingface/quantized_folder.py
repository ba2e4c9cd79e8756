"""Read quantized Hugging Face folders (weights in FP8, MXFP4 or packed integers) as floating point.

`dequantized` returns the stored tensors under the names that they have in a folder that is not quantized. Only this
module knows how each weight is stored, and which tensors belong to it. It supports these values of `quant_method` in
the `quantization_config` of config.json:

    fp8                  X.weight E4M3 [n, k], X.weight_scale_inv: a scale for each block (DeepSeek-V3: 128×128), or one
    compressed-tensors   X.weight E4M3 [n, k], X.weight_scale: a scale for the tensor, each row or each block
                         X.weight_packed int32: integers of 4 or 8 bits, X.weight_scale: for a row and group of columns
    mxfp4                X_blocks uint8 [e, n, k/32, 16], X_scales [e, n, k/32]: E2M1 and a power of two (gpt-oss)

A weight is data · scale, or (data - zero point) · scale, computed as one product in fp32. Weights stored in FP8 or in
integers are read as fp32, which holds this product, so a bf16 target rounds it once, to nearest even. MXFP4 is read as
bf16, which can represent each of its values.

Scales of activations and of the KV cache belong to an engine that computes in FP8. They are left out.

Shapes: n outputs and k inputs of a weight; e experts; r rows that are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from megafp8.conversion.safetensors_format import QUANTIZED, Entry, read_rows
from megafp8.host.messages import value_text
from megafp8.numerics.formats import E4M3
from megafp8.parallel.sharding import Shape

logger = logging.getLogger(__name__)

KEY = "quantization_config"
Entries = dict[str, Entry]
_CHUNK = 1 << 20
"""Number of elements that are dequantized at a time, so that they fit into a processor's cache."""
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_OF_ENGINES = re.compile(
    r"(\.|_)(input_scale|activation_scale|output_scale|[qkv]_scale|kv_scale|prob_scale|input_zero_point)$"
)
"""Names of scales of activations and of the KV cache."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantized(path: Path, quantization: object, entries: Entries) -> Entries:
    """Return the tensors of a folder, each with the name and shape of the weight that it holds.

    Args:
        path: Folder of the tensors.
        quantization: Value of `quantization_config` in config.json; empty if the folder is not quantized.
        entries: Tensors in the folder's files, by name.

    Raises:
        ValueError: A tensor or a value does not fit the quantization, or is not supported. The message names the file,
            the tensor, the value and the supported values.
    """
    config_file = path / "config.json"
    if not quantization:
        scaled = (name for name in entries if f"{name}_scale_inv" in entries)
        if (unread := next((name for name in scaled if entries[name].dtype in QUANTIZED), None)) is not None:
            raise ValueError(
                f"{entries[unread].file}: {unread} is {entries[unread].dtype}, but {config_file} has no {KEY} that "
                'states its scaling; {"quant_method": "fp8", "weight_block_size": [128, 128]} is DeepSeek-V3\'s'
            )
        return entries
    if not isinstance(quantization, dict):
        raise ValueError(f"{config_file}: {KEY} = {value_text(quantization)}: it must be an object")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"{config_file}: {KEY}.quant_method = {value_text(method)} is not supported; {', '.join(_METHODS)} are. "
            "For other methods, use the model's folder in floating point, or let the tool that quantized it save it so"
        )
    left_out = [name for name in entries if _OF_ENGINES.search(name)]
    if left_out:
        logger.info(
            f"{path}: {len(left_out)} scales of activations or of the cache, such as {left_out[0]}, are left out: "
            "a run and a generator compute their own"
        )
    entries = {name: entry for name, entry in entries.items() if name not in left_out}
    return _METHODS[method](_Folder(config_file, quantization), entries)


@dataclass(frozen=True)
class _Folder:
    """The config.json of a folder, and its `quantization_config`."""

    file: Path
    quantization: Mapping[str, Any]

    def refuse(self, key: str, value: object, supported: str) -> NoReturn:
        """Raise ValueError for a key of `quantization_config` that has an unsupported value."""
        raise ValueError(f"{self.file}: {KEY}.{key} = {value_text(value)}: supported: {supported}")


# --- fp8 --------------------------------------------------------------------------------------------------------------

_FP8_KEYS = {
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "activation_scheme": ("dynamic", "static"),
}
"""Supported values of keys in `quantization_config`."""


def _fp8(folder: _Folder, entries: Entries) -> Entries:
    block = folder.quantization.get("weight_block_size")
    if block is not None:
        block = _block(folder, "weight_block_size", block)
    for key, supported in _FP8_KEYS.items():
        if (value := folder.quantization.get(key)) not in (None, *supported):
            folder.refuse(key, value, ", ".join(supported))
    plain = {name: entry for name, entry in entries.items() if not name.endswith("_scale_inv")}
    for name, entry in plain.items():
        if entry.dtype == "F8_E4M3":
            scale = _companion(entries, name, f"{name}_scale_inv")
            plain[name] = _scaled(entry, name, scale, f"{name}_scale_inv", [entry.shape if block is None else block])
    _check_used(entries, plain, "_scale_inv")
    return plain


def _block(folder: _Folder, key: str, block: object) -> tuple[int, int]:
    """Return the rows and columns of a block, as stated by the config key `key`. Raises ValueError if it is invalid."""
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int and 0 < x < 1 << 31 for x in block):
        folder.refuse(key, block, "two numbers of rows and columns, such as [128, 128]")
    return block[0], block[1]


@dataclass(frozen=True)
class _Scaled:
    """Reader of E4M3 data `[n, k]` with a scale for each block of rows × columns. It returns rows in fp32."""

    data: Entry
    name: str
    scale: Entry
    scale_name: str
    block: tuple[int, int]

    def __call__(self, first: int, last: int) -> Tensor:
        k, columns = self.data.shape[1], self.block[1]
        w_rk, scale_r = torch.empty(last - first, k), self.row_scales(first, last)
        full = k // columns
        buffer_rk: Tensor | None = None
        for begin, end in _chunks(first, last, k):
            part = w_rk[begin - first : end - first]
            buffer_rk = torch.empty(part.shape, dtype=torch.int16) if buffer_rk is None else buffer_rk
            data = read_rows(self.data, self.name, begin, end)
            if not _decode_e4m3(data, buffer_rk[: len(data)], part):
                raise _holds_nan(self.data.file, self.name)
            by_row = scale_r[begin - first : end - first]
            if by_row.shape[1] == 1:
                part.mul_(by_row)
            else:
                part[:, : full * columns].unflatten(1, (full, columns)).mul_(by_row[:, :full, None])
                part[:, full * columns :].mul_(by_row[:, full:])
            _check_weights(part, self.data.file, self.name, by_row, E4M3.max)
        return w_rk

    def row_scales(self, first: int, last: int) -> Tensor:
        """Return the scales of rows `[first, last)`, fp32 `[r, blocks of columns]`."""
        rows = self.block[0]
        low = first // rows
        scale = _read_scales(self.scale, self.scale_name, low, max(-(-last // rows), low))
        return scale[torch.arange(first, last) // rows - low]


def is_fp8(entry: Entry) -> bool:
    """Return whether a weight is stored in E4M3."""
    return isinstance(entry.values, _Scaled)


def fp8_rows(entry: Entry, first: int, last: int) -> tuple[Tensor, Tensor] | None:
    """Return rows of a weight as stored: E4M3 data `[r, k]`, and the scale of each row, fp32 `[r]`.

    Return None if the weight is not stored in E4M3 with one scale for all elements of a row.
    """
    stored = entry.values
    if not isinstance(stored, _Scaled) or stored.scale.shape[1] != 1:
        return None
    data = read_rows(stored.data, stored.name, first, last)
    magnitudes = data.view(torch.uint8) & 0x7F  # these bytes have the same order as the magnitudes
    if bool((magnitudes == 0x7F).any()):
        raise _holds_nan(stored.data.file, stored.name)
    scales = stored.row_scales(first, last)
    largest = magnitudes.amax(1, keepdim=True).view(E4M3.dtype)
    _check_weights(largest.float() * scales, stored.data.file, stored.name, scales, E4M3.max)
    return data, scales[:, 0]


def _check_weights(weights: Tensor, file: Path, name: str, scales: Tensor, most: float) -> None:
    """Raise ValueError if a weight is too large for bf16, and so for every dtype of a model.

    `scales` holds the scales of these weights, and `most` is the largest magnitude of the data that they multiply. With
    it, the weights are only searched if their scales are large enough.
    """
    limit = torch.finfo(torch.bfloat16).max
    if weights.numel() and float(scales.max()) * most > limit and (largest := float(weights.abs().max())) > limit:
        raise ValueError(
            f"{file}: {name} has a weight of {largest:g} from a scale of {float(scales.max()):g}, but the largest bf16 "
            f"number is {limit:g}; its scales are damaged: get the folder from its source again"
        )


def _holds_nan(file: Path, name: str) -> ValueError:
    return ValueError(f"{file}: {name} has a NaN, which is not a valid weight: get the folder from its source again")


def _scaled(entry: Entry, name: str, scale: Entry, scale_name: str, blocks: Sequence[Shape]) -> Entry:
    """Return the weight `name`, stored as the E4M3 tensor `entry`.

    `blocks` lists the possible block sizes; the shape of `scale` determines which one applies. Raises ValueError if
    none does.
    """
    if len(entry.shape) != 2:
        raise ValueError(f"{entry.file}: {name} is E4M3 with shape {list(entry.shape)}; only matrices are supported")
    n, k = entry.shape
    if scale.dtype not in _SCALES:
        raise ValueError(f"{scale.file}: {scale_name} is {scale.dtype}; scales must be {', '.join(_SCALES)}")
    grids = {block: (-(-n // max(block[0], 1)), -(-k // max(block[1], 1))) for block in blocks}
    for block, (down, across) in grids.items():
        if scale.shape in _shapes_of(down, across):
            matrix = scale._replace(shape=(down, across))
            return entry._replace(dtype="F32", values=_Scaled(entry, name, matrix, scale_name, (block[0], block[1])))
    wanted = " or ".join(f"{list(grid)} (blocks of {block[0]} × {block[1]})" for block, grid in grids.items())
    raise ValueError(
        f"{scale.file}: {scale_name} has shape {list(scale.shape)}, but {name} {list(entry.shape)} needs {wanted}"
    )


def _shapes_of(down: int, across: int) -> list[Shape]:
    """Return the shapes with which a matrix of scales `[down, across]` may be stored."""
    shapes: list[Shape] = [(down, across)]
    shapes += [(down,)] if across == 1 else []
    return [*shapes, ()] if down == across == 1 else shapes


def _read_scales(entry: Entry, name: str, first: int, last: int) -> Tensor:
    """Read rows `[first, last)` of scales in fp32. Raises ValueError if a scale is not finite and positive."""
    scale = read_rows(entry, name, first, last).float()
    usable = scale.isfinite() & (scale > 0)
    if not bool(usable.all()):
        row, column = (int(x) for x in (~usable).nonzero()[0])
        raise ValueError(
            f"{entry.file}: {name} is {scale[row, column].item()} at [{first + row}, {column}]; a scale must be finite "
            "and greater than 0"
        )
    return scale


def _decode_e4m3(data_rk: Tensor, buffer_rk: Tensor, out_rk: Tensor) -> bool:
    """Convert E4M3 data to fp32 in `out_rk`, and return whether there is no NaN. `buffer_rk` is an int16 buffer.

    E4M3 has the bit layout of fp16 with one exponent bit less, and the exponent bias of fp16 is 8 more. This conversion
    takes a fifth of the time of torch's cast.
    """
    buffer_rk.copy_(data_rk.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out_rk.copy_(buffer_rk.view(torch.float16)).mul_(256.0)
    if not out_rk.numel():
        return True
    low, high = torch.aminmax(out_rk)
    return max(-float(low), float(high)) <= E4M3.max  # a larger number comes from the bits of a NaN


def _chunks(first: int, last: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about `_CHUNK` elements each."""
    step = max(1, _CHUNK // max(columns, 1))
    for begin in range(first, last, step):
        yield begin, min(begin + step, last)


def _companion(entries: Entries, name: str, other: str) -> Entry:
    """Return the tensor `other`, which is needed to read `name`. Raises ValueError if it is missing."""
    if other not in entries:
        raise ValueError(
            f"{entries[name].file}: {name} is {entries[name].dtype}, but no file has {other}, without which its values "
            "are unknown; get the folder from its source again"
        )
    return entries[other]


def _check_used(entries: Entries, plain: Entries, suffix: str) -> None:
    """Raise ValueError for a scale of a tensor that is not quantized."""
    for name, entry in entries.items():
        weight = name.removesuffix(suffix)
        if weight != name and (weight not in plain or plain[weight].values is None):
            how = "which is in no file" if weight not in plain else f"which is {plain[weight].dtype} and not quantized"
            raise ValueError(f"{entry.file} has {name}, a scale of {weight}, {how}; one of the two is wrong")


# --- compressed-tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scheme:
    """Quantization of a group of weights in config.json.

    Attributes:
        kind: `float` or `int`.
        bits: Bits per value.
        block: Rows and columns that share a scale; None means all rows or columns.
        symmetric: Whether the weights have no zero points.
    """

    kind: str
    bits: int
    block: tuple[int | None, int | None]
    symmetric: bool


def _compressed(folder: _Folder, entries: Entries) -> Entries:
    sparsity = folder.quantization.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        folder.refuse("sparsity_config", sparsity, '{"format": "dense"}')
    if folder.quantization.get("transform_config"):
        folder.refuse("transform_config", folder.quantization["transform_config"], "none")
    schemes = _schemes(folder)
    suffixes = ("_scale", "_packed", "_shape", "_zero_point")
    plain = {n: e for n, e in entries.items() if not n.endswith(tuple(f".weight{suffix}" for suffix in suffixes))}
    for name, entry in list(plain.items()):
        if entry.dtype == "F8_E4M3":
            scale = _companion(entries, name, f"{name}_scale")
            if f"{name}_zero_point" in entries:
                raise ValueError(f"{entry.file}: {name} has a zero point, {name}_zero_point; FP8 must not have one")
            floats = [x.block for x in schemes if x.kind == "float"]
            blocks = [(rows or entry.shape[0], columns or entry.shape[-1]) for rows, columns in floats]
            if not blocks:
                folder.refuse("config_groups", "no group with weights of type float", f"one, because {name} is E4M3")
            plain[name] = _scaled(entry, name, scale, f"{name}_scale", blocks)
    for name in entries:
        if name.endswith(".weight_packed"):
            weight = name.removesuffix("_packed")
            if weight in plain:
                raise ValueError(f"{entries[name].file} has both {name} and {weight}; one of the two is wrong")
            plain[weight] = _packed(folder, entries, weight, [x for x in schemes if x.kind == "int"])
    for suffix in suffixes:
        _check_used(entries, plain, suffix)
    return plain


def _schemes(folder: _Folder) -> list[_Scheme]:
    """Return the quantization schemes of the groups in config.json."""
    groups = folder.quantization.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        folder.refuse("config_groups", groups, "an object of groups with targets and weights")
    weights = {f"config_groups.{name}.weights": group.get("weights") for name, group in groups.items()}
    return [_scheme(folder, key, value) for key, value in weights.items() if value is not None]


def _scheme(folder: _Folder, key: str, weights: Any) -> _Scheme:
    if not isinstance(weights, dict):
        folder.refuse(key, weights, "an object")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    if (kind, bits) not in (("float", 8), ("int", 4), ("int", 8)):
        folder.refuse(f"{key} type and num_bits", (kind, bits), "float and 8, int and 4, int and 8")
    group = weights.get("group_size")
    strategy = strategy or ("tensor" if group is None else "channel" if group == -1 else "group")
    if strategy == "block":
        block: tuple[int | None, int | None] = _block(folder, f"{key}.block_structure", weights.get("block_structure"))
    elif strategy == "group":
        if type(group) is not int or not 0 < group < 1 << 31:
            folder.refuse(f"{key}.group_size", group, "a number of columns, such as 128")
        block = (1, group)
    elif strategy in ("tensor", "channel"):
        block = (None, None) if strategy == "tensor" else (1, None)
    else:
        folder.refuse(f"{key}.strategy", strategy, "tensor, channel, group, block")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        folder.refuse(f"{key}.actorder", weights["actorder"], "none or static, which keep the order of columns")
    return _Scheme(kind, bits, block, weights.get("symmetric", True) is not False)


@dataclass(frozen=True)
class _Packed:
    """Reader of packed integers with `bits` bits each. It returns rows in fp32 `[r, k]`.

    The integers are packed into int32 `[n, ceil(k · bits / 32)]`, the first one in the lowest bits. A stored 0 stands
    for -2^(bits - 1). Zero points are packed in the same way along the rows, `[ceil(n · bits / 32), groups]`.
    """

    data: Entry
    scale: Entry
    zero: Entry | None
    name: str
    k: int
    bits: int
    group: int

    def __call__(self, first: int, last: int) -> Tensor:
        w_rk = torch.empty(last - first, self.k)
        scale = _read_scales(self.scale, f"{self.name}_scale", first, last)
        zero = self._zeros(first, last)
        for begin, end in _chunks(first, last, self.k):
            part, rows = w_rk[begin - first : end - first], slice(begin - first, end - first)
            words = read_rows(self.data, f"{self.name}_packed", begin, end)
            part.copy_(_unpacked(words, self.bits)[:, : self.k])
            for column in range(0, self.k, self.group):
                g = slice(column // self.group, column // self.group + 1)
                part[:, column : column + self.group].sub_(zero[rows, g]).mul_(scale[rows, g])
            _check_weights(part, self.data.file, self.name, scale[rows], float(1 << self.bits))
        return w_rk

    def _zeros(self, first: int, last: int) -> Tensor:
        """Return the stored integers that stand for 0 in rows `[first, last)`, `[r, groups]`."""
        if self.zero is None:
            return torch.full((last - first, -(-self.k // self.group)), float(1 << (self.bits - 1)))
        per_word = 32 // self.bits
        low = first // per_word
        words = read_rows(self.zero, f"{self.name}_zero_point", low, max(-(-last // per_word), low))
        zeros = _unpacked(words.t(), self.bits).t()
        return zeros[first - low * per_word : last - low * per_word].float()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the nonnegative integers in int32 words; the last dim becomes 32 / bits times as long."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def _packed(folder: _Folder, entries: Entries, name: str, schemes: list[_Scheme]) -> Entry:
    """Return the weight `name`, stored as `name`_packed. Raises ValueError if no scheme fits its shapes."""
    packed_name = f"{name}_packed"
    packed = entries[packed_name]
    if f"{name}_g_idx" in entries:
        raise ValueError(f"{packed.file}: {name}_g_idx reorders the columns of {name}, which is not supported")
    scale, shape_entry = (_companion(entries, packed_name, f"{name}_{x}") for x in ("scale", "shape"))
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise ValueError(f"{packed.file}: {packed_name} is {packed.dtype} {list(packed.shape)}; it must be I32 [n, k]")
    if shape_entry.shape != (2,) or shape_entry.dtype not in ("I64", "I32"):
        raise ValueError(
            f"{shape_entry.file}: {name}_shape is {shape_entry.dtype} {list(shape_entry.shape)}; it must be I64 [2]"
        )
    if scale.dtype not in _SCALES:
        raise ValueError(f"{scale.file}: {name}_scale is {scale.dtype}; scales must be {', '.join(_SCALES)}")
    n, k = (int(x) for x in read_rows(shape_entry, f"{name}_shape", 0, 2))
    zero = entries.get(f"{name}_zero_point")
    problems = []
    for scheme in schemes:
        group = scheme.block[1] or max(k, 1)
        groups, words = -(-max(k, 0) // group), -(-max(k, 0) * scheme.bits // 32)
        if packed.shape != (n, words):
            problems.append(f"{packed_name} [{n}, {words}] for {scheme.bits} bits")
        elif scale.shape not in _shapes_of(n, groups) or scheme.block[0] is None:
            problems.append(f"{name}_scale [{n}, {groups}] for groups of {group} columns")
        elif not scheme.symmetric and zero is None:
            problems.append(f"{name}_zero_point, because the weights are not symmetric")
        elif zero is not None and (zero.dtype, zero.shape) != ("I32", (-(-n * scheme.bits // 32), groups)):
            problems.append(f"{name}_zero_point I32 [{-(-n * scheme.bits // 32)}, {groups}]")
        else:
            matrix = scale._replace(shape=(n, groups))
            values = _Packed(packed, matrix, zero, name, k, scheme.bits, group)
            return packed._replace(dtype="F32", shape=(n, k), values=values)
    if not schemes:
        folder.refuse("config_groups", "no group with weights of type int", f"one, because {packed_name} is packed")
    zeros = "" if zero is None else f", zero point {zero.dtype} {list(zero.shape)}"
    raise ValueError(
        f"{packed.file}: {packed_name} has shape {list(packed.shape)}, its scales {list(scale.shape)}{zeros}, and "
        f"{name}_shape is [{n}, {k}]; by {folder.file.name} it needs {' or '.join(dict.fromkeys(problems))}"
    )


# --- mxfp4 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MXFP4:
    """Reader of E2M1 data `[e, n, k/32, 16]`, two numbers per byte, with exponents `[e, n, k/32]`.

    It returns experts in bf16 `[r, k, n]`.
    """

    blocks: Entry
    scales: Entry
    name: str

    def __call__(self, first: int, last: int) -> Tensor:
        n, groups, width = self.blocks.shape[1:]
        w_ekn = torch.empty(last - first, 2 * groups * width, n, dtype=torch.bfloat16)
        table = torch.tensor([*_E2M1, *(-x for x in _E2M1)]).bfloat16()
        pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)  # by byte, low half first
        for e in range(first, last):
            blocks, scales = self.blocks.element(e), self.scales.element(e)
            for begin, end in _chunks(0, n, 2 * groups * width):
                exponents = read_rows(scales, f"{self.name}_scales", begin, end)
                if bool((exponents > 252).any()):  # 6 · 2^(253 - 127) is more than the largest number
                    worst = int(exponents.max())
                    raise ValueError(
                        f"{scales.file}: {self.name}_scales contains {worst}, "
                        f"{'a NaN' if worst == 255 else f'the exponent {worst - 127}'}; the largest is 252 (2^125)"
                    )
                data = read_rows(blocks, f"{self.name}_blocks", begin, end)
                values = pairs[data.int()].flatten(-2)
                factors = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).bfloat16()
                w_ekn[e - first, :, begin:end] = values.mul_(factors.unsqueeze(-1)).flatten(1).t()
        return w_ekn


def _mxfp4(folder: _Folder, entries: Entries) -> Entries:
    plain = {name: entry for name, entry in entries.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in entries.items():
        if not name.endswith("_blocks"):
            continue
        weight = name.removesuffix("_blocks")
        scales = _companion(entries, name, f"{weight}_scales")
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and scales.shape == blocks.shape[:3]
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ValueError(
                f"{blocks.file}: {name} is {blocks.dtype} {list(blocks.shape)} and {weight}_scales {scales.dtype} "
                f"{list(scales.shape)}; they must be U8 [experts, rows, groups, 16] and U8 [experts, rows, groups]"
            )
        if weight in plain:
            raise ValueError(f"{blocks.file} has both {name} and {weight}; one of the two is wrong")
        e, n, groups, width = blocks.shape
        shape = (e, 2 * groups * width, n)
        plain[weight] = blocks._replace(dtype="BF16", shape=shape, values=_MXFP4(blocks, scales, weight))
    for name, entry in entries.items():
        if name.endswith("_scales") and name.removesuffix("_scales") not in plain:
            raise ValueError(f"{entry.file} has {name}, but no file has {name.removesuffix('_scales')}_blocks")
    return plain


_METHODS: Mapping[str, Callable[[_Folder, Entries], Entries]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
