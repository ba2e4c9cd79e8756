"""Compiles and launches `grouped_gemm_cuda.cu`: rows times matrices with scales of blocks on Hopper.

In CUDA rather than Triton or Gluon, as these have no tensor-core products 192 columns wide and no copies to two
multiprocessors at once: 5 to 12% faster on an H200 than 128 columns in Gluon. NVRTC compiles it at the first use in a
process, in about 3 s for each pair of FP8 formats; so products are computed once before they are captured in a CUDA
graph, as with Triton's kernels. `cuda.bindings` calls NVRTC and the driver (`pip install megafp8[gpu]`).

Shapes as in `kernels.grouped_gemm`; n and k are multiples of 128.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.numerics.tensor import ScaledTensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
RESULTS = {torch.bfloat16: "bf16", torch.float16: "f16"}

# What a launch needs to know of the source, which asserts that it agrees.
_CLUSTER, _THREADS, _SHARED_BYTES = 2, 384, 225_952
_A_BOX_ROWS, _B_BOX_ROWS = 64, 96  # copied at once


@cache
def takes(device: torch.device) -> bool:
    """Whether the kernel runs on `device`; says so once if a Hopper GPU lacks what compiles it."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from cuda.bindings import driver, nvrtc

        supported, (version, _) = _checked(driver.cuDriverGetVersion()) // 1000, _checked(nvrtc.nvrtcVersion())
        if version > supported:
            raise RuntimeError(f"it is of CUDA {version}, the driver of CUDA {supported}")
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        logger.info("blockwise experts: Triton's kernel, not the faster one in CUDA: NVRTC cannot be used: %s", reason)
        return False
    return True


def _checked(result: tuple[Any, ...]) -> Any:
    """What a function of CUDA's bindings returns besides its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{type(status).__name__}.{status.name}")
    return values[0] if len(values) == 1 else values


@cache
def compiled(a: str, b: str, result: str) -> tuple[bytes, str]:
    """Machine code for sm_90a of the source with these formats, and what the compiler says."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"grouped_gemm_cuda.cu", 0, [], []))
    macros = {
        "A_TYPE": f'"{a}"', "B_TYPE": f'"{b}"', "RESULT_TYPE": f'"{result}"', "LAUNCHED_CLUSTER": _CLUSTER,
        "LAUNCHED_THREADS": _THREADS, "LAUNCHED_SHARED_BYTES": _SHARED_BYTES, "A_BOX_ROWS": _A_BOX_ROWS,
        "B_BOX_ROWS": _B_BOX_ROWS,
    }  # fmt: skip
    flags = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v"]
    flags += [f"--define-macro={name}={value}".encode() for name, value in macros.items()]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    log = b"  " * _checked(nvrtc.nvrtcGetProgramLogSize(program))  # written to, so no single byte, which Python shares
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
    """The context that torch uses on a device."""
    from cuda.bindings import driver

    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))


@contextmanager
def _on(device: int) -> Iterator[None]:
    """`device` is the current one, also to the driver: to it a new thread, as those of backward, has none at first."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        if not int(_checked(driver.cuCtxGetCurrent())):
            _checked(driver.cuCtxSetCurrent(_primary_context(device)))
        yield


@cache
def _kernel(a: str, b: str, result: str, device: int) -> tuple[Any, Any]:
    """The kernel on a device, which is current, and its module, which must live as long."""
    from cuda.bindings import driver

    module = _checked(driver.cuModuleLoadData(compiled(a, b, result)[0]))
    function = _checked(driver.cuModuleGetFunction(module, b"rows_kernel"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, _SHARED_BYTES))
    return function, module


@lru_cache(maxsize=4096)
def _tensor_map(pointer: int, rows: int, columns: int, stride: int, box_rows: int) -> Any:
    """Boxes of `box_rows` rows and 128 columns of a matrix of bytes, rows swizzled in shared memory.

    It holds these numbers and nothing of what is in memory, so it may be used again.
    """
    from cuda.bindings import driver

    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, pointer, [u64(columns), u64(rows)],
            [u64(stride)], [u32(128), u32(box_rows)], [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _map_of(matrix: Tensor, box_rows: int) -> Any:
    assert matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 and matrix.data_ptr() % 16 == 0  # noqa: PT018
    return _tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0), box_rows)


class _Sizes(ctypes.Structure):
    """`Sizes` of the source."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("n", "k", "experts", "row_step", "column_step", "a_stride", "b_stride")
    ]


@cache
def _programs(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count // _CLUSTER * _CLUSTER


def rows_times_matrices(
    a_mk: ScaledTensor, b: ScaledTensor, ends_e: Tensor, out_mn: Tensor, row_step: int, column_step: int
) -> None:
    """Rows times the transpose of their expert's matrix, into `out_mn` (bf16 or fp16).

    The matrix of expert i begins at row i·row_step and column i·column_step of b.
    """
    from cuda.bindings import driver

    a_scale_km = a_mk.scale_inv.t()
    assert a_scale_km.stride(1) == 1 and a_scale_km.stride(0) % 4 == 0 and a_scale_km.data_ptr() % 16 == 0  # noqa: PT018
    assert b.scale_inv.stride(1) == 1 and out_mn.is_contiguous() and out_mn.data_ptr() % 16 == 0  # noqa: PT018
    assert ends_e.dtype == torch.int32
    device = out_mn.device.index
    formats = FORMATS[a_mk.data.dtype], FORMATS[b.data.dtype], RESULTS[out_mn.dtype]
    k, n = a_mk.data.shape[1], out_mn.shape[1]
    maps = _map_of(a_mk.data, _A_BOX_ROWS), _map_of(b.data, _B_BOX_ROWS)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a_scale_km, out_mn, b.scale_inv, ends_e)]
    sizes = _Sizes(n, k, len(ends_e), row_step, column_step, a_scale_km.stride(0), b.scale_inv.stride(0))
    addresses = [int(m.getPtr()) for m in maps] + [ctypes.addressof(argument) for argument in (*pointers, sizes)]
    arguments = (ctypes.c_void_p * len(addresses))(*addresses)
    with _on(device):
        _checked(
            driver.cuLaunchKernel(
                _kernel(*formats, device)[0], _programs(device), 1, 1, _THREADS, 1, 1, _SHARED_BYTES,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(arguments), 0,
            )
        )  # fmt: skip
