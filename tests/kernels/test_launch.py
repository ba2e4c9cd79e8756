"""Direct launches: the key against Triton's own specialization, and which launches are left to Triton."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from megafp8.kernels import launch
from megafp8.kernels.launch import BoundKernel, TritonKernel, launch_key


def copy_kernel(x, y, bias, n, offset, eps, BLOCK, ADD):
    """Never compiled here."""


def add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


JIT = JITFunction(copy_kernel)
DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.int64)
NUMBERS = (0, 1, 2, 8, 15, 16, 17, 32, 48, 2**31 - 1, 2**31, 2**31 + 15, 2**32, -1, -16, True, False, 1.0, 0.0, 16.0)


def triton_specialization(arguments: tuple[Any, ...]) -> Any:
    """What `JITFunction.run` looks compiled kernels up by."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(JIT.signature, JIT.params, backend)
    return tuple(bind(*arguments, BLOCK=128, ADD=True)[1])


def random_arguments(rng: random.Random, memory: Tensor) -> tuple[list[Tensor | None], list[float]]:
    tensors: list[Tensor | None] = []
    for _ in range(3):
        dtype = rng.choice(DTYPES)
        first = rng.choice((0, 16, 8, 24, 32)) // dtype.itemsize * dtype.itemsize
        tensors.append(memory[first : first + 64].view(dtype) if first % dtype.itemsize == 0 else None)
    if rng.random() < 0.3:
        tensors[rng.randrange(3)] = None
    return tensors, [rng.choice(NUMBERS) for _ in range(3)]


def test_launches_of_equal_keys_have_equal_specializations() -> None:
    rng, memory = random.Random(1), torch.zeros(256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    found: dict[Any, Any] = {}
    equal = 0
    for trial in range(6_000):
        tensors, numbers = random_arguments(rng, memory)
        if trial % 2:  # few keys, so that many are equal
            tensors, numbers = [tensors[0]] * 3, numbers[:1] * 3
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        key = launch_key(0, tensors, pointers, numbers)
        specialization = triton_specialization((*tensors, *numbers))
        equal += key in found
        assert found.setdefault(key, specialization) == specialization, (tensors, numbers)
    assert equal > 1_000
    assert len(set(found.values())) > 300


class FakeCompiled:
    """Triton's compiled kernel; `run` records its arguments."""

    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.run = lambda *arguments: calls.append(arguments)


class FakeJit(JITFunction):
    """Compiles nothing; `plain` are the launches that were left to Triton, `direct` the others."""

    def __init__(self) -> None:
        super().__init__(copy_kernel)
        self.plain: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> FakeCompiled:
        self.plain.append((grid, *arguments, constants))
        return FakeCompiled(self.direct)


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> FakeJit:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    return FakeJit()


def test_the_first_launch_is_tritons_and_later_ones_are_its_launchers(jit: FakeJit) -> None:
    kernel = BoundKernel(jit, {"ADD": True, "num_warps": 4, "BLOCK": 128})
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        kernel.launch((5, 2), (x, y, None), (64, 1, 0.5))
    assert [call[:1] for call in jit.plain] == [((5, 2),)]
    pointers = (x.data_ptr(), y.data_ptr(), None)
    # As `JITFunction.run` calls it, with constants in the order of the kernel's parameters.
    assert jit.direct == [(5, 2, 1, 103, 17, (4, 1, 0), None, None, None, *pointers, 64, 1, 0.5, 128, True)] * 2
    kernel.launch((5, 2), (x[1:], y, None), (64, 1, 0.5))  # no longer aligned
    kernel.launch((5, 2), (x, y, None), (63, 1, 0.5))
    kernel.launch((5, 2), (x.double(), y, None), (64, 1, 0.5))
    assert len(jit.plain) == 4
    assert len(jit.direct) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_every_launch(jit: FakeJit, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = BoundKernel(jit, {"ADD": True, "BLOCK": 128}), torch.zeros(64)
    kernel.launch((1, 1), (x, x, x), (64, 1, 0.5))
    chain, told = getattr(knobs.runtime, hook), []
    chain.add(told.append)
    try:
        kernel.launch((1, 1), (x, x, x), (64, 1, 0.5))
    finally:
        chain.remove(told.append)
    assert (len(jit.plain), len(jit.direct)) == (2, 0)
    monkeypatch.setattr(knobs.runtime, hook, told.append)  # as some set it
    kernel.launch((1, 1), (x, x, x), (64, 1, 0.5))
    assert (len(jit.plain), len(jit.direct)) == (3, 0)


def test_kernels_are_bound_once_and_forget_when_shapes_never_repeat(
    jit: FakeJit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = TritonKernel(copy_kernel)
    assert kernel.bind(BLOCK=128, ADD=True) is kernel.bind(BLOCK=128, ADD=True)
    assert kernel.bind(BLOCK=128, ADD=True) is not kernel.bind(BLOCK=128, ADD=False)
    monkeypatch.setattr(launch, "_MAX_KEYS", 2)
    bound, x = BoundKernel(jit, {"ADD": True, "BLOCK": 128}), torch.zeros(64)
    for n in (1, 2, 3, 3, 1):
        bound.launch((1, 1), (x, x, x), (n, 1, 0.5))
    assert (len(jit.plain), len(jit.direct)) == (4, 1)


@pytest.mark.gpu
def test_direct_launches_compute_what_tritons_do() -> None:
    kernel = TritonKernel(add_kernel).bind(BLOCK=256)
    memory = torch.randn(4096, device="cuda")
    for first in (0, 1, 0, 1, 2, 4, 1, 4):  # aligned to 16 bytes, and not, in turn
        for n in (1, 16, 1000, 1, 16, 1000):
            x, y = memory[first : first + n], memory[2048 + first : 2048 + first + n]
            z = torch.zeros(n, device="cuda")
            kernel.launch((-(-n // 256), 1), (x, y, z), (n,))
            assert torch.equal(z, x + y)
