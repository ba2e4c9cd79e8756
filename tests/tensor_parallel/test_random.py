"""Layout-independent random numbers: known answers, slices, chunks, distribution."""

from __future__ import annotations

import pytest
import torch

from megafp8.sharding import Init, Piece, cut
from megafp8.tensor_parallel import random as layout_random
from megafp8.tensor_parallel.random import fill_, normal_at, philox, stream_key


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [(0, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8))],  # Random123's kat_vectors
)
def test_philox_known_answers(counter: int, key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(w.item() for w in philox(torch.tensor([counter]), key)) == words


def _philox_by_hand(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox-4x32-10 in Python integers, straight from the paper."""
    x, (k0, k1) = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x


def test_philox_equals_python_integers() -> None:
    counters = [0, 1, 2, 255, 2**31 - 1, 2**32 - 1, 2**32, 2**40 + 12345, 2**62]
    for key in [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), stream_key(1234, "layers.0.mlp.down.weight")]:
        words = torch.stack(philox(torch.tensor(counters), key))
        assert words.T.tolist() == [_philox_by_hand(c, key) for c in counters]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_is_a_slice(dim: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, init = (12, 8), Init("normal", 0.02)
    whole = fill_(torch.empty(shape), Piece("w", shape, (0, 0), shape), init, seed=3)
    monkeypatch.setattr(layout_random, "_CHUNK", 17)  # several chunks, none a multiple of a row
    for rank in range(ranks):
        piece = cut("w", shape, dim, rank, ranks)
        assert torch.equal(fill_(torch.empty(piece.shape), piece, init, seed=3), whole.chunk(ranks, dim)[rank])


def test_streams_differ_and_are_standard_normal() -> None:
    index = torch.arange(200_000)
    a, b = normal_at(index, stream_key(1, "a")), normal_at(index, stream_key(1, "b"))
    assert not torch.equal(a, normal_at(index, stream_key(2, "a")))
    for x in (a, b):
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 1) < 0.01
        assert abs((x**4).mean() - 3) < 0.1
    assert abs((a * b).mean()) < 0.01  # no correlation between streams
    assert abs((a[1:] * a[:-1]).mean()) < 0.01  # nor between neighbours


def test_ones_and_zeros() -> None:
    piece = Piece("n", (5,), (0,), (5,))
    assert fill_(torch.empty(5), piece, Init("ones"), 0).tolist() == [1.0] * 5
    assert fill_(torch.empty(5), piece, Init("zeros"), 0).tolist() == [0.0] * 5
