"""Compilation and launch of the CUDA kernels for grouped GEMMs on Hopper.

The kernels are rows times matrices (`grouped_gemm_cuda.cu`) and sums over rows (`grouped_sums_cuda.cu`). They are
written in CUDA because Triton and Gluon have no tensor-core products with 192 columns and no copies to two
multiprocessors at once. NVRTC compiles each `Variant` of a kernel at its first use in a process, which takes about 3 s.
As with Triton's kernels, a product must therefore be computed once before it is captured in a CUDA graph.
`cuda.bindings` (extra `gpu`) calls NVRTC and the driver.

Shapes: as in `kernels.grouped_gemm`. n, k, p and q are multiples of 128 with block scales, and of 16 with one scale per
expert.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.numerics.tensor import BLOCK_1X128, ScaledTensor

logger = logging.getLogger(__name__)

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
ROWS_RESULTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
SUMS_RESULTS = {torch.float32: "f32", **ROWS_RESULTS}


class Variant(NamedTuple):
    """Variant of a kernel: the formats of its operands and results, the kind of scales, and where sums are kept.

    Without `block_scales`, each expert has one scale for each operand. `fast` sums stay in the tensor cores.
    """

    a: str
    b: str
    result: str
    block_scales: bool
    fast: bool = False


class CudaKernel(NamedTuple):
    """CUDA kernel: its source, and sizes that a launch needs. The source asserts that the sizes agree."""

    name: str
    source: str
    shared_bytes: int
    a_box_rows: int  # rows of a that are copied at once
    b_box_rows: int  # rows of b that are copied at once, half of the columns of a tile


def _source(name: str) -> str:
    return "".join(Path(__file__).with_name(part).read_text(encoding="utf-8") for part in ("hopper.cuh", name))


ROWS = CudaKernel("rows_kernel", _source("grouped_gemm_cuda.cu"), 225_952, 64, 96)
SUMS = CudaKernel("sums_kernel", _source("grouped_sums_cuda.cu"), 211_360, 128, 96)
NARROW_SUMS = SUMS._replace(shared_bytes=229_600, b_box_rows=64)
_FEW_ROWS = {"blocks": 1536, "experts": 3072}
"""Padded rows per expert below which narrow tiles are faster, by what has a scale. Measured with 512 to 8,192 rows."""
_CLUSTER, _THREADS = 2, 384
_ADDED_BOX_ROWS, _STORED_BOX_ROWS, _BOX_COLUMNS = 64, 16, 32  # boxes of results


@cache
def takes(device: torch.device) -> bool:
    """Return whether the kernels run on `device`. Log once if a Hopper GPU lacks the compiler."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from cuda.bindings import driver, nvrtc

        supported, (version, _) = _checked(driver.cuDriverGetVersion()) // 1000, _checked(nvrtc.nvrtcVersion())
        if version > supported:
            raise RuntimeError(f"it belongs to CUDA {version}, but the driver supports only CUDA {supported}")
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        logger.info(
            "FP8 experts: using Triton's kernels instead of the faster CUDA kernels, as NVRTC cannot be used: %s",
            reason,
        )
        return False
    return True


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the values in a result of CUDA's bindings, or raise RuntimeError if its status is an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{type(status).__name__}.{status.name}")
    return values[0] if len(values) == 1 else values


@cache
def compiled(kernel: CudaKernel, variant: Variant) -> tuple[bytes, str]:
    """Compile a variant of a kernel; return the machine code for sm_90a and the compiler's log."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(kernel.source.encode(), f"{kernel.name}.cu".encode(), 0, [], []))
    macros = {
        "A_TYPE": f'"{variant.a}"', "B_TYPE": f'"{variant.b}"', "RESULT_TYPE": f'"{variant.result}"',
        "RESULT_BYTES": 4 if variant.result == "f32" else 2, "BLOCK_SCALES": int(variant.block_scales),
        "FAST_SUMS": int(variant.fast), "LAUNCHED_CLUSTER": _CLUSTER, "LAUNCHED_THREADS": _THREADS,
        "LAUNCHED_SHARED_BYTES": kernel.shared_bytes, "A_BOX_ROWS": kernel.a_box_rows, "B_BOX_ROWS": kernel.b_box_rows,
        "ADDED_BOX_ROWS": _ADDED_BOX_ROWS, "STORED_BOX_ROWS": _STORED_BOX_ROWS, "BOX_COLUMNS": _BOX_COLUMNS,
    }  # fmt: skip
    flags = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v"]
    flags += [f"--define-macro={name}={value}".encode() for name, value in macros.items()]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    # The buffer is written to, so it must not be a single byte, which Python shares.
    log = b"  " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode().strip("\0 \n")
    if int(status) != 0:
        raise RuntimeError(f"{status.name}: {text}")
    code = b"  " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code, text


@cache
def _primary_context(device: int) -> Any:
    """Return the CUDA context that torch uses on a device."""
    from cuda.bindings import driver

    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))


@contextmanager
def _on(device: int) -> Iterator[None]:
    """Make `device` the current device of torch and of the driver.

    To the driver, a new thread, such as a thread of backward, has no current device at first.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        if not int(_checked(driver.cuCtxGetCurrent())):
            _checked(driver.cuCtxSetCurrent(_primary_context(device)))
        yield


@cache
def _loaded(kernel: CudaKernel, variant: Variant, device: int) -> tuple[Any, Any]:
    """Load a kernel on the current device; return the kernel and its module, which must live as long as the kernel."""
    from cuda.bindings import driver

    module = _checked(driver.cuModuleLoadData(compiled(kernel, variant)[0]))
    function = _checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, kernel.shared_bytes))
    return function, module


class _TensorMap(ctypes.Structure):
    """C structure `TensorMap` of the CUDA sources."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=4096)
def _tensor_map(pointer: int, rows: int, columns: int, stride: int, box_rows: int, size: int) -> _TensorMap:
    """Return a tensor map that copies boxes of `box_rows` rows of a matrix, swizzled in shared memory.

    `stride` is the distance between rows, and `size` the size of an element, both in bytes. A tensor map contains only
    these numbers and no data, so it can be cached.
    """
    from cuda.bindings import driver

    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    box_columns = 128 if size == 1 else _BOX_COLUMNS
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_UINT{8 * size}"), 2, pointer,
            [u64(columns), u64(rows)], [u64(stride)], [u32(box_columns), u32(box_rows)], [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{box_columns * size}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return _TensorMap.from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), ctypes.sizeof(_TensorMap)))


def _map_of(matrix: Tensor, box_rows: int) -> _TensorMap:
    """Return the tensor map of a matrix of operands or results."""
    stride = matrix.stride(0) * matrix.element_size()
    assert matrix.stride(1) == 1 and stride % 16 == 0 and matrix.data_ptr() % 16 == 0  # noqa: PT018
    return _tensor_map(matrix.data_ptr(), *matrix.shape, stride, box_rows, matrix.element_size())


class _RowsSizes(ctypes.Structure):
    """C structure `Sizes` of `grouped_gemm_cuda.cu`."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("n", "k", "experts", "row_step", "column_step", "a_stride", "b_stride")
    ]


class _SumsSizes(ctypes.Structure):
    """C structure `Sizes` of `grouped_sums_cuda.cu`."""

    _fields_ = [(name, ctypes.c_int) for name in ("p", "q", "experts", "accumulate")]


class _Operands(ctypes.Structure):
    """C structure `Operands` of `grouped_sums_cuda.cu`, padded to a multiple of 64 bytes to align its tensor maps."""

    _fields_ = [
        ("a", _TensorMap), ("b", _TensorMap), ("a_scale_inv", ctypes.c_void_p), ("b_scale_inv", ctypes.c_void_p),
        ("ends_e", ctypes.c_void_p), ("a_stride", ctypes.c_int), ("b_stride", ctypes.c_int),
        ("padding", ctypes.c_char * 32),
    ]  # fmt: skip


@cache
def _programs(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count // _CLUSTER * _CLUSTER


def _launch(kernel: CudaKernel, variant: Variant, device: int, *arguments: Any) -> None:
    """Launch a variant of a kernel. `arguments` are ctypes values in the order of the kernel's parameters."""
    from cuda.bindings import driver

    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    with _on(device):
        _checked(
            driver.cuLaunchKernel(
                _loaded(kernel, variant, device)[0], _programs(device), 1, 1, _THREADS, 1, 1, kernel.shared_bytes,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(addresses), 0,
            )
        )  # fmt: skip


def rows_times_matrices(
    a_mk: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_mn: Tensor, row_step: int, column_step: int, *, fast: bool
) -> None:
    """Multiply rows by the transpose of their expert's matrix, and store the products in `out_mn` (bf16 or fp16).

    The matrix of expert i begins at row i·row_step and column i·column_step of b. With `fast`, sums stay in the tensor
    cores, unless blocks have scales.
    """
    a_scales, a_stride = _scales(a_mk)
    b_stride = b.scale_inv.stride(0 if a_mk.granularity is BLOCK_1X128 else -1)
    assert out_mn.is_contiguous() and out_mn.data_ptr() % 16 == 0  # noqa: PT018
    assert ends_e.dtype == torch.int32
    variant = _variant(a_mk, b, ROWS_RESULTS[out_mn.dtype], fast=fast)
    k, n = a_mk.data.shape[1], out_mn.shape[1]
    maps = _map_of(a_mk.data, ROWS.a_box_rows), _map_of(b.data, ROWS.b_box_rows)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a_scales, out_mn, b.scale_inv, ends_e)]
    sizes = _RowsSizes(n, k, len(ends_e), row_step, column_step, a_stride, b_stride)
    _launch(ROWS, variant, out_mn.device.index, *maps, *pointers, sizes)


def sums_over_rows(
    a: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_epq: Tensor, *, accumulate: bool, fast: bool,
    earlier: tuple[ScaledTensor, ScaledTensor, Tensor] | None,
) -> None:  # fmt: skip
    """Sum outer products over each expert's rows, including the rows of `earlier`, into `out_epq`.

    With `accumulate`, the sums are added to `out_epq`, which must be fp32. Otherwise it may also be bf16 or fp16. With
    `fast`, sums stay in the tensor cores, unless blocks have scales.
    """
    experts, p, q = out_epq.shape
    assert out_epq.is_contiguous() and (out_epq.dtype == torch.float32 or not accumulate)  # noqa: PT018
    variant = _variant(a, b, SUMS_RESULTS[out_epq.dtype], fast=fast)
    rows = a.data.shape[1]
    if earlier is not None:
        assert (earlier[0].data.dtype, earlier[1].data.dtype) == (a.data.dtype, b.data.dtype)
        rows += earlier[0].data.shape[1]
    few = _FEW_ROWS["blocks" if variant.block_scales else "experts"] * experts
    kernel = NARROW_SUMS if rows < few or q % 128 else SUMS
    now, before = _operands(kernel, a, b, ends_e), _Operands()
    if earlier is not None:
        before = _operands(kernel, *earlier)
    results = out_epq.flatten(0, 1)
    maps = _map_of(results, _STORED_BOX_ROWS), _map_of(results, _ADDED_BOX_ROWS)
    sizes = _SumsSizes(p, q, experts, int(accumulate))
    _launch(kernel, variant, out_epq.device.index, before, now, *maps, sizes)


def _variant(a: ScaledTensor, b: ScaledTensor, result: str, *, fast: bool) -> Variant:
    """Return the variant of a kernel for two operands. Sums are never fast if blocks have scales."""
    block_scales = a.granularity is BLOCK_1X128
    return Variant(FORMATS[a.data.dtype], FORMATS[b.data.dtype], result, block_scales, fast and not block_scales)


def _scales(x: ScaledTensor) -> tuple[Tensor, int]:
    """Return the scales of `x`, and their stride along experts or along blocks of summands.

    The scales of blocks are transposed, so that the scales of a block of summands are contiguous for TMA.
    """
    if x.granularity is not BLOCK_1X128:
        return x.scale_inv, x.scale_inv.stride(-1)
    scale_inv = x.scale_inv.t()
    assert scale_inv.stride(1) == 1 and scale_inv.stride(0) % 4 == 0 and scale_inv.data_ptr() % 16 == 0  # noqa: PT018
    return scale_inv, scale_inv.stride(0)


def _operands(kernel: CudaKernel, a: ScaledTensor, b: ScaledTensor, ends_e: Tensor) -> _Operands:
    assert ends_e.dtype == torch.int32
    (a_scales, a_stride), (b_scales, b_stride) = _scales(a), _scales(b)
    return _Operands(
        _map_of(a.data, kernel.a_box_rows), _map_of(b.data, kernel.b_box_rows), a_scales.data_ptr(),
        b_scales.data_ptr(), ends_e.data_ptr(), a_stride, b_stride,
    )  # fmt: skip
