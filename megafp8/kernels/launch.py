"""Fast launches of Triton kernels that bypass Triton's dispatch in Python, which takes the host about 25 µs.

Triton compiles a kernel for each specialization of its arguments: the dtypes, which pointers are multiples of 16 bytes,
which integers are 1 or multiples of 16, and the constants. At every launch it computes the specialization, looks up the
compiled kernel, and calls the kernel's launcher. A `BoundKernel` lets Triton do the first launch with given arguments,
keeps the compiled kernel that Triton returns, and calls its launcher directly from then on.

The lookup must never find a kernel of another specialization, because the results would be wrong without any error. The
key (`launch_key`) therefore does not repeat Triton's rules. It contains the numbers themselves, the pointers modulo 16,
the dtypes and the device, and is thus finer. Kernels with different numbers at every launch would gain nothing, and
keep using `triton.jit`.

Pointers are passed as integers, so only the first launch reports a CPU tensor among the arguments. Environment
variables and `triton.knobs` that influence compilation are also read only at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

_MAX_KEYS = 4096  # limit per bound kernel, in case shapes differ at every launch


def launch_key(
    device: int, tensors: Sequence[Tensor | None], pointers: Sequence[int | None], numbers: Sequence[float]
) -> Hashable:
    """Return a key that is equal for two launches of a bound kernel only if Triton runs the same compiled kernel.

    `pointers` are the addresses of `tensors`.
    """
    return (
        device, *[None if x is None else x.dtype for x in tensors], *[p and p % 16 for p in pointers],
        *numbers, *map(type, numbers),
    )  # fmt: skip


class TritonKernel:
    """Triton kernel with fast launches. Its parameters are tensors, which may be None, then numbers, then constants.

    Args:
        function: Python function to compile, or a Gluon kernel.
        do_not_specialize: Names of numbers that Triton must not specialize on.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str] = ()) -> None:
        is_kernel = isinstance(function, triton.JITFunction)
        self.jit: Any = function if is_kernel else triton.jit(function, do_not_specialize=list(do_not_specialize))
        self._bound: dict[Hashable, BoundKernel] = {}

    def bind(self, **constants: Any) -> BoundKernel:
        """Return the kernel with the given constants and Triton options such as `num_warps`.

        Equal constants return the same object.
        """
        key = (*constants, *constants.values())
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = BoundKernel(self.jit, constants)
        return bound


class BoundKernel:
    """Triton kernel with constants, launched directly. In Triton's interpreter, Triton does every launch."""

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
        # The arguments of `JITFunction.run`; the three None are the data for hooks and the two hooks.
        run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)

    def _launch_first(self, key: Hashable, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        compiled = self._jit[grid](*arguments, **self._constants)
        constants = [self._constants[name] for name in self._jit.arg_names[len(arguments) :]]
        if len(self._launchers) >= _MAX_KEYS:
            self._launchers.clear()
        self._launchers[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)


def _has_hooks() -> bool:
    """Return whether a launch hook is registered, for example by a profiler. Triton must then do the launch."""
    runtime = knobs.runtime  # a hook is either one function or a chain of functions, which may be empty
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
