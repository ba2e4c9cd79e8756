"""Launches of Triton kernels without Triton's dispatch in Python, which costs the host some 25 µs each time.

Triton compiles a kernel anew for each specialization of its arguments: their dtypes, which pointers are multiples of 16
bytes, which integers are 1 or multiples of 16, and the constants. At every launch it works out the specialization,
looks up the compiled kernel, and calls that kernel's launcher. A `BoundKernel` leaves the first launch with certain
arguments to Triton, keeps the compiled kernel that this returns, and calls its launcher itself from then on.

The look-up must never find a kernel of another specialization: its results would be wrong without any error. So the key
(`launch_key`) does not repeat Triton's rules. It has the numbers themselves, the pointers modulo 16, the dtypes and the
device, and is thereby finer. Kernels whose numbers differ at every launch would gain nothing and stay with
`triton.jit`.

Pointers are passed as integers, so a CPU tensor among the arguments is reported by the first launch only. Environment
variables and `triton.knobs` that influence compilation are read at the first launch only, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

_MAX_KEYS = 4096  # of a bound kernel, where shapes differ at every launch


def launch_key(
    device: int, tensors: Sequence[Tensor | None], pointers: Sequence[int | None], numbers: Sequence[float]
) -> Hashable:
    """Equal for two launches of a bound kernel only if Triton compiles the same for both. `pointers`: of `tensors`."""
    return (
        device, *[None if x is None else x.dtype for x in tensors], *[p and p % 16 for p in pointers],
        *numbers, *map(type, numbers),
    )  # fmt: skip


class TritonKernel:
    """`function` as a Triton kernel. Its parameters are tensors, some of which may be None, then numbers, constants.

    `function`: of Python, or a kernel of Gluon. `do_not_specialize`: numbers that Triton is not to compile a kernel of
    its own for.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str] = ()) -> None:
        is_kernel = isinstance(function, triton.JITFunction)
        self.jit: Any = function if is_kernel else triton.jit(function, do_not_specialize=list(do_not_specialize))
        self._bound: dict[Hashable, BoundKernel] = {}

    def bind(self, **constants: Any) -> BoundKernel:
        """The kernel with its constants, and Triton's options such as `num_warps`; the same object for the same."""
        key = (*constants, *constants.values())
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = BoundKernel(self.jit, constants)
        return bound


class BoundKernel:
    """`jit` with `constants`, launched as described above; in Triton's interpreter every launch is Triton's."""

    def __init__(self, jit: Any, constants: dict[str, Any]) -> None:
        self._jit, self._constants = jit, constants
        self._interpreted = not isinstance(jit, triton.JITFunction)
        self._launchers: dict[Hashable, tuple[Any, ...]] = {}

    def launch(self, grid: tuple[int, int], tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> None:
        """Launch on the current device and stream."""
        if self._interpreted or _has_hooks():
            self._jit[grid](*tensors, *numbers, **self._constants)
            return
        device = torch._C._cuda_getDevice()
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        key = launch_key(device, tensors, pointers, numbers)
        launcher = self._launchers.get(key)
        if launcher is None:
            self._launch_first(key, grid, (*tensors, *numbers))
            return
        run, function, metadata, constants = launcher
        stream = torch._C._cuda_getCurrentRawStream(device)
        # The arguments of `JITFunction.run`; the three None are what hooks are told, and the two hooks.
        run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)

    def _launch_first(self, key: Hashable, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        compiled = self._jit[grid](*arguments, **self._constants)
        constants = [self._constants[name] for name in self._jit.arg_names[len(arguments) :]]
        if len(self._launchers) >= _MAX_KEYS:
            self._launchers.clear()
        self._launchers[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)


def _has_hooks() -> bool:
    """Whether a hook, such as a profiler's, is registered for launches, which Triton then calls."""
    runtime = knobs.runtime  # either hook is a chain of functions, which may be empty, or one function
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
