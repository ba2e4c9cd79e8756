"""Matrix products by cuBLASLt, called through NVIDIA's own low-level binding (nvmath-python).

It has three features that torch's `scaled_mm` lacks:
    algorithm   cuBLASLt predicts which of its kernels is fastest for a shape. Timing its eight best predictions once
                makes a layer's GEMMs 7% faster on an H200 at its power limit, and single GEMMs 12% faster; on five of
                them, two hundred more variants set by hand gained less than 1%
    beta = 1    adds the product to the fp32 values in memory: a weight's gradient goes directly into its fp32 buffer,
                without a temporary or an `add_`
    scales      every granularity of Hopper, with bf16 or fp32 results
A call of nvmath's own `Matmul` costs the host 36 µs. Here, a `Plan` holds everything that can be prepared, so a call is
a lookup, two pointers to set and the launch: less than 8 µs, including 5 µs in cuBLASLt itself.

cuBLASLt is column-major. Its `[n, m]` is a row-major `[m, n]`, so out = a · b is computed as outᵀ = bᵀ · aᵀ: cuBLASLt's
A is our b, its B is our a, and no byte moves. Hopper needs FP8 operands that are contiguous along k ("TN"); a bf16
operand may be row-major or transposed. `megafp8.gemm.cublaslt_problem` has the layouts of operands and scales.

*Limits.* Two algorithms round differently, so the result depends on the algorithm: two runs are bitwise equal only if
both read the same cache file, or neither tunes. For a given algorithm, NVIDIA guarantees equal bits. Processes that
share a file agree from their first call, because the first process that finishes timing a problem decides for all.
Ranks that do not share a file may choose differently; data-parallel ranks keep identical weights even so, because they
apply the same reduced gradient. Each call changes its plan's descriptors, so only one thread at a time may call a
`CublasLt`, which all layers of a process on one device share. autograd's thread may call it, because the thread that
called `backward` waits for it.

Shapes: m, n the result's dims, k the summed dim.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafp8.gemm.cublaslt_problem import ALIGNMENT, GemmProblem
from megafp8.numerics.tensor import ScaledTensor

# Values of `cudaDataType` and `cublasComputeType_t`.
_CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FP32, _COMPUTE_FP32 = 0, 68
_SCALE_MODES = {"tensor": "SCALAR_32F", "row": "OUTER_VEC_32F", "1x128": "VEC128_32F", "128x128": "BLK128x128_32F"}

_WORKSPACE_BYTES = 32 * 2**20  # NVIDIA's recommendation for Hopper
_ALGO_BYTES = 64  # size of `cublasLtMatmulAlgo_t`
_CANDIDATES = 32  # number requested; cuBLASLt 13.1 never returns more than 8
_WARM_ROUNDS, _ROUNDS = 2, 11


def available(device: torch.device) -> bool:
    """Return whether `device` has FP8 tensor cores and nvmath-python is installed."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        import nvmath.bindings.cublasLt  # noqa: F401
    except ImportError:
        return False
    return True


class AlgorithmFile:
    """Cache of the fastest algorithms: a JSON file `{machine: {problem: 128 hex digits}}`.

    An algorithm is 64 opaque bytes, valid for one release of cuBLASLt on one type of GPU, which `machine` names.
    Processes may share the file: it is replaced as a whole, under a lock, and the first choice stays.
    """

    def __init__(self, file: Path, machine: str) -> None:
        self.file = file
        self.machine = machine

    def find(self, problem: str) -> bytes | None:
        """Return the algorithm stored for `problem`, or None."""
        digits = self._read().get(self.machine, {}).get(problem)
        return None if digits is None else bytes.fromhex(digits)

    def store_first(self, problem: str, algorithm: bytes) -> bytes:
        """Store `algorithm` unless another process was first, and return the stored algorithm."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file.with_name(self.file.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._read()
            digits = content.setdefault(self.machine, {}).setdefault(problem, algorithm.hex())
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=self.file.name, delete=False) as new:
                json.dump(content, new, indent=1, sort_keys=True)
            os.replace(new.name, self.file)
        return bytes.fromhex(digits)

    def _read(self) -> dict[str, dict[str, str]]:
        """Return the content, empty if the file does not exist."""
        try:
            content = json.loads(self.file.read_text())
            for algorithms in content.values():
                if any(len(bytes.fromhex(digits)) != _ALGO_BYTES for digits in algorithms.values()):
                    raise ValueError(f"an algorithm must have {_ALGO_BYTES} bytes")
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{self.file}: not a file of cuBLASLt algorithms ({error}); delete it") from error
        return content


def _set(setter: Callable[..., None], dtype_of: Callable[..., Any], target: int, attribute: int, value: int) -> None:
    """Set one attribute of a descriptor or preference, through a buffer of the attribute's type."""
    buffer = np.array([value], dtype=dtype_of(attribute))
    setter(target, attribute, buffer.ctypes.data, buffer.nbytes)


class Plan:
    """Descriptors of a problem for cuBLASLt, which live as long as the process.

    cuBLASLt's A is our b, and its B is our a.
    """

    def __init__(self, lt: ModuleType, handle: int, problem: GemmProblem) -> None:
        self._lt, self._handle = lt, handle
        m, n, k = problem[:3]
        a_type, b_type = _CUDA_TYPES[problem.a_dtype], _CUDA_TYPES[problem.b_dtype]
        b_size = (k, n) if problem.b_order == "nk" else (n, k)
        a_size = (k, m) if problem.a_order == "mk" else (m, k)
        self._b_layout = lt.matrix_layout_create(b_type, *b_size, b_size[0])
        self._a_layout = lt.matrix_layout_create(a_type, *a_size, a_size[0])
        self._out_layout = lt.matrix_layout_create(_CUDA_TYPES[problem.out_dtype], n, m, n)
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(problem.accumulate))
        self._pointer = ctypes.c_int64(0)
        self._addresses = tuple(ctypes.addressof(x) for x in (self._alpha, self._beta, self._pointer))
        self._beta_on_device: Tensor | None = None
        if problem.scaled:  # alpha and beta must then both be on the device
            self._beta_on_device = torch.tensor(self._beta.value, device=torch.cuda.current_device())

        attribute = lt.MatmulDescAttribute
        self._desc = lt.matmul_desc_create(_COMPUTE_FP32, _FP32)
        settings: dict[Any, int] = {
            attribute.TRANSA: problem.b_order == "nk",
            attribute.TRANSB: problem.a_order == "km",
        }
        if problem.a_scaling != "none":
            settings[attribute.FAST_ACCUM] = problem.fast
            settings[attribute.A_SCALE_MODE] = lt.MatmulMatrixScale[_SCALE_MODES[problem.b_scaling]]
            settings[attribute.B_SCALE_MODE] = lt.MatmulMatrixScale[_SCALE_MODES[problem.a_scaling]]
        if problem.scaled:
            settings[attribute.POINTER_MODE] = lt.PointerMode.DEVICE
        if problem.bias:
            settings[attribute.EPILOGUE] = lt.Epilogue.BIAS
            settings[attribute.BIAS_DATA_TYPE] = _CUDA_TYPES[problem.out_dtype]
        for name, value in settings.items():
            _set(lt.matmul_desc_set_attribute, lt.get_matmul_desc_attribute_dtype, self._desc, name, int(value))
        self._a_scale_inv, self._b_scale_inv = int(attribute.B_SCALE_POINTER), int(attribute.A_SCALE_POINTER)
        self._bias = int(attribute.BIAS_POINTER)
        self.algorithm = np.zeros(_ALGO_BYTES // 8, dtype=np.uint64)
        self._chosen = self.algorithm.ctypes.data

    def set_pointers(self, a_scale_inv: int, b_scale_inv: int, bias: int) -> None:
        """Set the addresses of scale_inv of a and b, and of the bias if there is one, for the following launches."""
        set_attribute, pointer, at = self._lt.matmul_desc_set_attribute, self._pointer, self._addresses[2]
        pointer.value = a_scale_inv
        set_attribute(self._desc, self._a_scale_inv, at, 8)
        pointer.value = b_scale_inv
        set_attribute(self._desc, self._b_scale_inv, at, 8)
        if bias:
            pointer.value = bias
            set_attribute(self._desc, self._bias, at, 8)

    def launch(self, a: int, b: int, out: int, workspace: int, stream: int, factor: int = 0) -> None:
        """Launch the chosen algorithm on these addresses. `factor` is the address of a scaled problem's factor."""
        alpha, beta, _ = self._addresses
        if self._beta_on_device is not None:
            alpha, beta = factor, self._beta_on_device.data_ptr()
        layout = self._out_layout
        self._lt.matmul(
            self._handle, self._desc, alpha, b, self._b_layout, a, self._a_layout, beta, out, layout, out, layout,
            self._chosen, workspace, _WORKSPACE_BYTES, stream,
        )  # fmt: skip

    def choose(self, algorithm: bytes) -> None:
        """Set the algorithm for the following launches."""
        self.algorithm[:] = np.frombuffer(algorithm, dtype=np.uint64)

    def candidates(self, count: int) -> list[bytes]:
        """Return up to `count` algorithms, most likely the fastest first; empty if cuBLASLt knows none."""
        lt = self._lt
        attribute = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        settings = {attribute[f"MIN_ALIGNMENT_{x}_BYTES"]: ALIGNMENT for x in "ABCD"}
        settings[attribute.MAX_WORKSPACE_BYTES] = _WORKSPACE_BYTES
        for name, value in settings.items():
            _set(lt.matmul_preference_set_attribute, lt.get_matmul_preference_attribute_dtype, preference, name, value)
        results = np.zeros(count, dtype=lt.matmul_heuristic_result_dtype)
        num_found = np.zeros(1, dtype=np.int32)
        layouts = (self._b_layout, self._a_layout, self._out_layout, self._out_layout)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, self._desc, *layouts, preference, count, results.ctypes.data, num_found.ctypes.data
            )
        except lt.cuBLASLtError:
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [result["algo"].tobytes() for result in results[: num_found[0]] if result["state"] == 0]

    def accepts(self, algorithm: bytes) -> bool:
        """Return whether cuBLASLt can run the problem with `algorithm`, which may come from a file."""
        result = np.zeros(1, dtype=self._lt.matmul_heuristic_result_dtype)
        opaque = np.frombuffer(algorithm, dtype=np.uint64).copy()
        layouts = (self._b_layout, self._a_layout, self._out_layout, self._out_layout)
        try:
            self._lt.matmul_algo_check(self._handle, self._desc, *layouts, opaque.ctypes.data, result.ctypes.data)
        except self._lt.cuBLASLtError:
            return False
        return bool(result["state"][0] == 0 and result["workspace_size"][0] <= _WORKSPACE_BYTES)


class CublasLt:
    """Handle, workspaces and plans of cuBLASLt on one device.

    Compute a problem once before capturing it in a CUDA graph. `device` must be torch's current device at every call.

    Args:
        device: CUDA device.
        autotune: Time the algorithms when a problem is first used, about a tenth of a second each; otherwise use
            cuBLASLt's prediction.
        cache_file: File in which choices are looked up, and stored if tuned; None keeps them only in this object.
    """

    def __init__(self, device: torch.device, *, autotune: bool, cache_file: Path | None) -> None:
        from nvmath.bindings import cublasLt  # an optional dependency

        self._lt: ModuleType = cublasLt
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._index: int = self.device.index
        self._autotune = autotune
        with torch.cuda.device(self.device):
            self._handle: int = cublasLt.create()
        gpu = torch.cuda.get_device_properties(self.device)
        self.machine = f"{gpu.name}, {gpu.multi_processor_count} SMs, cuBLASLt {cublasLt.get_version()}"
        self._file = None if cache_file is None else AlgorithmFile(cache_file, self.machine)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._workspaces: dict[int, Tensor] = {}  # one per stream: concurrent GEMMs must not share a workspace

    def matmul_tn(
        self,
        a: ScaledTensor,
        b: ScaledTensor,
        out_mn: Tensor,
        *,
        accumulate: bool,
        use_fast_accum: bool,
        bias: Tensor | None = None,
    ) -> None:
        """Compute `out = a · bᵀ`, or `out += a · bᵀ`, of quantized operands a `[m, k]` and b `[n, k]`, plus `bias`.

        E4M3 and E5M2 operands can be mixed, but two E5M2 operands are not supported. Granularities must be in
        `HOPPER_PAIRS`.

        Args:
            a: Operand `[m, k]`, with scale_inv laid out by `arranged`.
            b: Operand `[n, k]`, with scale_inv laid out by `arranged`.
            out_mn: Row-major result, bf16 or fp32. If it is accumulated in bf16, the product is rounded before it is
                added.
            accumulate: Add the product to `out_mn`.
            use_fast_accum: Use fast accumulation; only has an effect with scales per tensor or per row.
            bias: Vector `[n]`, contiguous and with out's dtype, if `cublaslt_problem.adds_bias` allows it.

        Raises:
            ValueError: If cuBLASLt does not support the problem: n and k must be multiples of 16, and m of 4 if a's
                blocks are 1x128.
        """
        a8, b8, a_scale_inv, b_scale_inv = a.data, b.data, a.scale_inv, b.scale_inv
        assert a8.is_contiguous()
        assert b8.is_contiguous()
        # Everything that a plan was made for and checked against, read as cheaply as possible.
        key = (
            a8.shape, b8.shape, out_mn.shape, a8.dtype, b8.dtype, out_mn.dtype, a_scale_inv.stride(),
            b_scale_inv.stride(), a.granularity.name, b.granularity.name, accumulate, use_fast_accum, bias is None,
        )  # fmt: skip
        pointers = (a_scale_inv.data_ptr(), b_scale_inv.data_ptr(), 0 if bias is None else bias.data_ptr())
        plan = self._plans.get(key)
        if plan is None:
            assert bias is None or (bias.shape == out_mn.shape[1:] and bias.dtype == out_mn.dtype)
            problem = GemmProblem.from_scaled(
                a, b, out_mn, accumulate=accumulate, use_fast_accum=use_fast_accum, bias=bias is not None
            )
            plan = self._plans[key] = self._make_plan(problem, a8, b8, pointers)
        plan.set_pointers(*pointers)
        self._launch(plan, a8, b8, out_mn)

    def matmul(
        self, a_mk: Tensor, b_kn: Tensor, out_mn: Tensor, *, accumulate: bool, factor: Tensor | None = None
    ) -> None:
        """Compute `out = a · b`, or `out += a · b`, of bf16 matrices that are each row-major or transposed.

        `out_mn` is row-major, bf16 or fp32. If it is accumulated in bf16, the product is rounded before it is added.
        `factor`, fp32 `[]`, multiplies the product before it is rounded or added.
        """
        key = (
            a_mk.shape, a_mk.stride(), b_kn.shape, b_kn.stride(), out_mn.shape, a_mk.dtype, b_kn.dtype, out_mn.dtype,
            accumulate, factor is None,
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            problem = GemmProblem.from_unscaled(a_mk, b_kn, out_mn, accumulate=accumulate, scaled=factor is not None)
            plan = self._plans[key] = self._make_plan(problem, a_mk, b_kn, None, factor)
        self._launch(plan, a_mk, b_kn, out_mn, factor)

    def _launch(self, plan: Plan, a: Tensor, b: Tensor, out_mn: Tensor, factor: Tensor | None = None) -> None:
        """Launch a plan on the current stream, with the stream's workspace."""
        assert out_mn.is_contiguous()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        workspace = self._workspaces.get(stream)
        if workspace is None:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._workspaces[stream] = workspace
        at_a, at_b, at_out = a.data_ptr(), b.data_ptr(), out_mn.data_ptr()
        assert (at_a | at_b | at_out) % ALIGNMENT == 0
        at_factor = 0 if factor is None else factor.data_ptr()
        plan.launch(at_a, at_b, at_out, workspace.data_ptr(), stream, at_factor)

    def _make_plan(
        self, problem: GemmProblem, a: Tensor, b: Tensor, pointers: tuple[int, int, int] | None,
        factor: Tensor | None = None,
    ) -> Plan:  # fmt: skip
        """Make a plan and choose its algorithm: the stored one, the fastest on these operands, or the first candidate.

        `pointers` are the arguments of `Plan.set_pointers`.
        """
        problem.require_supported()
        plan = Plan(self._lt, self._handle, problem)
        if pointers is not None:
            plan.set_pointers(*pointers)
        algorithm = None if self._file is None else self._file.find(str(problem))
        if algorithm is None:
            candidates = plan.candidates(_CANDIDATES if self._autotune else 1)
            if not candidates:
                raise ValueError(f"{self.machine} has no algorithm for {problem}")
            algorithm = candidates[0]
            if self._autotune:
                algorithm = self._fastest(plan, candidates, problem, a, b, factor)
                if self._file is not None:
                    algorithm = self._file.store_first(str(problem), algorithm)
        if not plan.accepts(algorithm):
            where = "" if self._file is None else f" in {self._file.file}; delete the file"
            raise ValueError(f"{self.machine} refuses the algorithm of {problem}{where}")
        plan.choose(algorithm)
        return plan

    def _fastest(
        self, plan: Plan, candidates: list[bytes], problem: GemmProblem, a: Tensor, b: Tensor, factor: Tensor | None
    ) -> bytes:
        """Return the algorithm with the smallest median time, measured on a scratch result."""
        assert not torch.cuda.is_current_stream_capturing(), "compute a problem once before capturing it"
        out_mn = torch.zeros(problem[:2], dtype=problem.out_dtype, device=self.device)
        # Overwriting L2 before each run leaves the operands in memory, as in training. It also gives the host time to
        # get ahead, so that the events measure the GEMM and not its launch.
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=self.device)
        times: list[list[float]] = [[] for _ in candidates]
        for _ in range(_WARM_ROUNDS + _ROUNDS):  # interleaved: clocks drift with the chip's power and temperature
            events = []
            for algorithm in candidates:
                plan.choose(algorithm)
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self._launch(plan, a, b, out_mn, factor)
                end.record()
                events.append((start, end))
            # Wait only for this stream: in a pipeline, an early receive may also be on the device. It runs until the
            # neighbor sends, and the neighbor may wait for this rank.
            events[-1][1].synchronize()
            for taken, (start, end) in zip(times, events):
                taken.append(start.elapsed_time(end))
        medians = [statistics.median(taken[_WARM_ROUNDS:]) for taken in times]
        return candidates[medians.index(min(medians))]
