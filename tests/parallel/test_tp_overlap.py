"""What every `TPOverlap` gathers and sums on real ranks, against all ranks' data computed at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from megafp8.parallel import symmetric_memory
from megafp8.parallel.tp_overlap import (
    NO_COMM,
    Collective,
    Product,
    ReplicatedTokens,
    TPOverlap,
    default_overlap,
    ring_steps,
    sum_partials,
)
from megafp8.parallel.tp_symmetric import SymmetricMemory
from tests.parallel.chunks import InChunks
from tests.parallel.test_symmetric_memory import map_files
from tests.world import World

R, K, N = 6, 5, 7  # rows of a rank, summed over, columns
CHUNKED = ["chunks", "symmetric", "symmetric pairs"]
"""The overlaps that split a GEMM; with pairs, a chunk is two ranks' of four."""


class _Synchronous:
    """A CUDA stream, and an event, of a device that executes immediately."""

    def wait_stream(self, _: Any) -> None: ...

    def wait(self, _: Any) -> None: ...

    def record(self, _: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def symmetric_on_cpu(group: ProcessGroup, folder: str, max_chunks: int = 4) -> SymmetricMemory:
    """`SymmetricMemory` on the host's memory: every byte is moved, but nothing overlaps."""
    map_files(group, folder)
    cuda = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = lambda *_: _Synchronous()  # type: ignore[assignment, misc]
    cuda.synchronize = lambda *_: None
    return SymmetricMemory(group, torch.device("cpu"), sum_partials, size=64, max_chunks=max_chunks)


def _overlap(name: str, group: ProcessGroup, folder: str) -> TPOverlap:
    max_chunks = 2 if name.endswith("pairs") else 4
    if name.startswith("symmetric"):
        return symmetric_on_cpu(group, folder, max_chunks)
    return {"replicated": ReplicatedTokens, "collective": Collective, "chunks": InChunks}[name](group)


def _chunks(name: str, t: int, rank: int) -> list[tuple[int, int]]:
    """First and last rank (exclusive) of each chunk, a rank's own first."""
    if name not in CHUNKED:
        return [(0, t)]
    g = t // 2 if name.endswith("pairs") else 1
    return [(start % t, start % t + g) for start in range(rank // g * g, rank // g * g + t, g)]


def _world() -> ProcessGroup:
    world = groups.WORLD
    assert isinstance(world, ProcessGroup)
    return world


def _data(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(R, K, generator=generator).to(dtype), torch.randn(3, K, generator=generator)


def _gathers(name: str, folder: str) -> None:
    group = _world()
    t, rank = group.size(), group.rank()
    overlap = _overlap(name, group, folder)
    assert overlap.group is group
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        expected = [torch.cat(x) for x in zip(*(_data(r, dtype) for r in range(t)))]
        handle = overlap.gather(_data(rank, dtype))
        assert handle.is_chunked == (name != "collective")
        order = []
        for chunk in handle:
            order.append((chunk.start // R, chunk.stop // R))
            assert torch.equal(handle.gathered[0][chunk].double(), expected[0][chunk].double())
            others = slice(chunk.start // R * 3, chunk.stop // R * 3)
            assert torch.equal(handle.gathered[1][others], expected[1][others])
        assert order == _chunks(name, t, rank)
        for ours, theirs in zip(handle.wait(), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.double(), theirs.double())


def _share(rank: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rank's factors of a partial product: small integers, whose products and sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.randint(-3, 4, (rows, K), generator=generator).to(dtype) for rows in (m, N))
    return a, b.t()


def _product(a: Tensor, b: Tensor, source: TPOverlap, dtype: torch.dtype | None = None) -> tuple[Product, list[slice]]:
    """`a · b`, rounded to `dtype`, and the list that its computed chunks will be noted in."""
    handle, computed = source.gather([a]), []

    def compute_rows(chunk: slice, out: Tensor | None) -> Tensor:
        computed.append(chunk)
        y = (handle.gathered[0][chunk] @ b).to(dtype or a.dtype)
        return y if out is None else out.copy_(y)

    return Product(handle, N, dtype or a.dtype, compute_rows), computed


def _sums(name: str, folder: str) -> None:
    group = _world()
    t, rank = group.size(), group.rank()
    overlap = _overlap(name, group, folder)
    for size, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16), start=1):
        m = t * R * size  # so that buffers grow
        product, computed = _product(*_share(rank, m, dtype), NO_COMM)
        y = overlap.sum(product).wait()
        expected = torch.stack([torch.mm(*_share(r, m, dtype)) for r in range(t)]).double().sum(0)
        assert y.dtype == dtype
        assert torch.equal(y.double(), expected if name == "replicated" else expected.chunk(t)[rank])
        own, *others = (slice(start * (m // t), end * (m // t)) for start, end in _chunks(name, t, rank))
        assert computed == [*others, own]


@pytest.mark.parametrize("name", ["replicated", "collective", *CHUNKED])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_all_rows_in_order_and_sums_all_partials(world4: World, name: str, ranks: int, tmp_path: Any) -> None:
    for case in [_sums] if name == "replicated" else [_gathers, _sums]:
        (tmp_path / case.__name__).mkdir()
        world4.run(case, name, str(tmp_path / case.__name__), ranks=ranks)


@pytest.mark.parametrize(("t", "chunks"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4), (16, 4)])
def test_the_ranks_of_a_ring_receive_from_different_ranks(t: int, chunks: int) -> None:
    """Every rank receives from each other once, and no two ranks from one at the same time."""
    of = [ring_steps(rank, t, 4) for rank in range(t)]
    for rank, found in enumerate(of):
        assert len(found) == chunks
        assert found[0].recv_from[0] == rank
        assert sorted(r for step in found for r in step.recv_from) == list(range(t))
        for i, step in enumerate(found):
            assert sorted(step.recv_from) == list(step.ranks)
            for j in range(len(step.recv_from)):
                assert sorted(steps[i].recv_from[j] for steps in of) == list(range(t))


def _rounds_once(name: str, folder: str) -> None:
    """1 and three times half a bf16 step at 1: rounded with each addition they vanish, rounded once they count."""
    group = _world()
    value = 1.0 if group.rank() == 0 else 2.0**-8
    product, _ = _product(torch.full((4, K), value / K), torch.ones(K, N), NO_COMM, torch.bfloat16)
    assert (_overlap(name, group, folder).sum(product).wait() == 1 + 2.0**-6).all()


def _gathered_product(name: str, folder: str) -> None:
    """A product whose input is gathered in chunks and whose output is not summed."""
    group = _world()
    a, b = _share(0, R, torch.float32)
    product, computed = _product(a + group.rank(), b, _overlap(name, group, folder))
    y = NO_COMM.sum(product).wait()
    assert len(computed) == (2 if name.endswith("pairs") else group.size())
    assert torch.equal(y, torch.cat([(a + r) @ b for r in range(group.size())]))


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("case", [_rounds_once, _gathered_product])
def test_chunks(world4: World, case: Any, name: str, tmp_path: Any) -> None:
    world4.run(case, name, str(tmp_path))


def _one_at_a_time(folder: str) -> None:
    overlap = symmetric_on_cpu(_world(), folder)
    x = torch.zeros(2, 2)
    first = overlap.gather([x])
    with pytest.raises(AssertionError, match="before the previous exchange was waited for"):
        overlap.gather([x])
    first.wait()
    overlap.gather([x]).wait()


def test_a_second_exchange_before_the_first_is_waited_for_is_an_error(world2: World, tmp_path: Any) -> None:
    world2.run(_one_at_a_time, str(tmp_path))


def _one_rank_fails(folder: str) -> str:
    group = _world()
    overlap = symmetric_on_cpu(group, folder)
    if group.rank() == 0:

        def fails(*_: Any) -> None:
            raise RuntimeError("no peer access\nand more")

        symmetric_memory.symmetric_memory._SymmetricMemory.empty_strided_p2p = fails
    with pytest.raises(RuntimeError) as error:
        overlap.gather([torch.zeros(1000, 1)])
    return str(error.value)


def test_failure_on_one_rank_is_raised_on_all(world2: World, tmp_path: Any) -> None:
    first, second = world2.run(_one_rank_fails, str(tmp_path))
    assert first == "symmetric memory cannot be set up: RuntimeError: no peer access"
    assert second == "symmetric memory cannot be set up: another rank failed"


def _default() -> list[str]:
    group = _world()
    return [type(default_overlap(group, sequence_parallel=sp)).__name__ for sp in (False, True)]


def test_default_overlap_of_a_layout(world2: World) -> None:
    assert world2.run(_default, ranks=1) == [["ReplicatedTokens", "ReplicatedTokens"]]
    assert world2.run(_default) == [["ReplicatedTokens", "Collective"]] * 2
