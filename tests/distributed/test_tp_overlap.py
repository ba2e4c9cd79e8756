"""What exchanges gather and sum on real ranks, against what is computed from all ranks' data at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from megafp8.distributed import symmetric_memory as mapped
from megafp8.distributed.tp_overlap import (
    NO_COMM,
    Collective,
    P2PRing,
    Product,
    Replicated,
    TPOverlap,
    default_overlap,
    ring_steps,
)
from megafp8.distributed.tp_symmetric import SymmetricMemory
from tests.distributed.test_symmetric_memory import map_files
from tests.world import World

R, K, N = 6, 5, 7  # rows of a rank, summed over, columns


class _Now:
    """A CUDA stream, and an event, of a device that does everything at once."""

    def wait_stream(self, _: Any) -> None: ...

    def wait(self, _: Any) -> None: ...

    def record(self, _: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def symmetric_on_cpu(group: ProcessGroup, folder: str, parts: int = 4) -> SymmetricMemory:
    """`SymmetricMemory` on streams and memory of the host: every byte is moved, but nothing runs beside it."""
    map_files(group, folder)
    cuda = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = lambda *_: _Now()  # type: ignore[assignment, misc]
    cuda.synchronize = lambda *_: None
    return SymmetricMemory(group, torch.device("cpu"), size=64, parts=parts)


def _exchange(name: str, group: ProcessGroup, folder: str) -> TPOverlap:
    if name.startswith("symmetric"):
        return symmetric_on_cpu(group, folder, 2 if name.endswith("pairs") else 4)
    if name == "chunked pairs":
        return P2PRing(group, parts=2)
    return {"replicated": Replicated, "at once": Collective, "chunked": P2PRing}[name](group)


def _parts(name: str, t: int, rank: int) -> list[tuple[int, int]]:
    """First rank and end of each part, a rank's own first."""
    if name in ("at once", "replicated"):
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
    tp_overlap = _exchange(name, group, folder)
    assert tp_overlap.group is group
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        expected = [torch.cat(x) for x in zip(*(_data(r, dtype) for r in range(t)))]
        arriving = tp_overlap.gather(_data(rank, dtype))
        assert arriving.in_pieces == (name != "at once")
        order = []
        for part in arriving:
            order.append((part.start // R, part.stop // R))
            assert torch.equal(arriving.whole[0][part].double(), expected[0][part].double())
            others = slice(part.start // R * 3, part.stop // R * 3)
            assert torch.equal(arriving.whole[1][others], expected[1][others])
        assert order == _parts(name, t, rank)
        for ours, theirs in zip(arriving.wait(), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.double(), theirs.double())


IN_PARTS = ["chunked", "symmetric", "chunked pairs", "symmetric pairs"]


@pytest.mark.parametrize("name", ["at once", *IN_PARTS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_is_everything_in_order(world4: World, name: str, ranks: int, tmp_path: Any) -> None:
    world4.run(_gathers, name, str(tmp_path), ranks=ranks)


@pytest.mark.parametrize(("t", "parts"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4), (16, 4)])
def test_turns_meet(t: int, parts: int) -> None:
    """Every rank deals with each other once; in each step, who deals with whom is agreed on by both."""
    of = [ring_steps(rank, t, 4) for rank in range(t)]
    for rank, found in enumerate(of):
        assert len(found) == parts
        assert found[0].there[0] == found[0].back[0] == rank
        assert sorted(r for turn in found for r in turn.there) == list(range(t))
        for i, turn in enumerate(found):
            assert sorted(turn.there) == list(turn.ranks)
            for j, (there, back) in enumerate(zip(turn.there, turn.back)):
                assert of[there][i].back[j] == rank
                assert of[back][i].there[j] == rank


def _share(rank: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small integers, whose products and sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.randint(-3, 4, (rows, K), generator=generator).to(dtype) for rows in (m, N))
    return a, b.t()


def _product(a: Tensor, b: Tensor, source: TPOverlap) -> tuple[Product, list[slice]]:
    arriving, computed = source.gather([a]), []

    def rows(part: slice, out: Tensor | None) -> Tensor:
        computed.append(part)
        y = arriving.whole[0][part] @ b
        return y if out is None else out.copy_(y)

    return Product(arriving, N, a.dtype, rows), computed


def _sums(name: str, folder: str) -> None:
    group = _world()
    t, rank = group.size(), group.rank()
    tp_overlap = _exchange(name, group, folder)
    for turn, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
        m = t * R * (turn + 1)  # so that buffers grow
        shares = [torch.mm(*_share(r, m, dtype)) for r in range(t)]
        product, computed = _product(*_share(rank, m, dtype), NO_COMM)
        y = tp_overlap.sum(product).wait()
        whole = torch.stack(shares).double().sum(0)
        assert y.dtype == dtype
        assert torch.equal(y.double(), whole if name == "replicated" else whole.chunk(t)[rank])
        own, *others = (slice(start * (m // t), end * (m // t)) for start, end in _parts(name, t, rank))
        assert computed == [*others, own]


@pytest.mark.parametrize("name", ["replicated", "at once", *IN_PARTS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_those_of_all_shares(world4: World, name: str, ranks: int, tmp_path: Any) -> None:
    world4.run(_sums, name, str(tmp_path), ranks=ranks)


def _rounds_once(name: str, folder: str) -> None:
    """1 and three times half a bf16 step at 1: rounded with each addition they vanish, rounded once they count."""
    group = _world()
    value = 1.0 if group.rank() == 0 else 2.0**-8
    product, _ = _product(torch.full((4, K), value / K), torch.ones(K, N), NO_COMM)
    share = product._replace(dtype=torch.bfloat16, rows=lambda part, out: _as(product.rows(part, None), out))
    assert (_exchange(name, group, folder).sum(share).wait() == 1 + 2.0**-6).all()


def _as(y: Tensor, out: Tensor | None) -> Tensor:
    y = y.bfloat16()
    return y if out is None else out.copy_(y)


@pytest.mark.parametrize("name", IN_PARTS)
def test_shares_are_added_before_they_are_rounded(world4: World, name: str, tmp_path: Any) -> None:
    world4.run(_rounds_once, name, str(tmp_path))


def _through_a_layer(name: str, folder: str) -> None:
    """Gathered in pieces, and summed elsewhere: what the pieces give is put together."""
    group = _world()
    a, b = _share(0, R, torch.float32)
    product, computed = _product(a + group.rank(), b, _exchange(name, group, folder))
    y = NO_COMM.sum(product).wait()
    assert len(computed) == (2 if name.endswith("pairs") else group.size())
    assert torch.equal(y, torch.cat([(a + r) @ b for r in range(group.size())]))


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_product_of_pieces_is_the_product(world4: World, name: str, tmp_path: Any) -> None:
    world4.run(_through_a_layer, name, str(tmp_path))


def _one_at_a_time(folder: str) -> None:
    tp_overlap = symmetric_on_cpu(_world(), folder)
    x = torch.zeros(2, 2)
    first = tp_overlap.gather([x])
    with pytest.raises(AssertionError, match="before the last one was waited for"):
        tp_overlap.gather([x])
    first.wait()
    tp_overlap.gather([x]).wait()


def test_two_at_once_would_need_more_buffers(world2: World, tmp_path: Any) -> None:
    world2.run(_one_at_a_time, str(tmp_path))


def _cannot(folder: str) -> str:
    group = _world()
    tp_overlap = symmetric_on_cpu(group, folder)
    if group.rank() == 0:

        def fails(*_: Any) -> None:
            raise RuntimeError("no peer access\nand more")

        mapped.symmetric_memory._SymmetricMemory.empty_strided_p2p = fails
    with pytest.raises(RuntimeError) as error:
        tp_overlap.gather([torch.zeros(1000, 1)])
    return str(error.value)


def test_where_one_rank_cannot_all_say_so(world2: World, tmp_path: Any) -> None:
    first, second = world2.run(_cannot, str(tmp_path))
    assert first == "symmetric memory cannot be set up: RuntimeError: no peer access"
    assert second == "symmetric memory cannot be set up: another rank failed"


def _plain() -> list[str]:
    group = _world()
    return [type(default_overlap(group, sequence_parallel=sp)).__name__ for sp in (False, True)]


def test_the_plain_exchange_of_a_layout(world2: World) -> None:
    assert world2.run(_plain, ranks=1) == [["Replicated", "Replicated"]]
    assert world2.run(_plain) == [["Replicated", "Collective"]] * 2
