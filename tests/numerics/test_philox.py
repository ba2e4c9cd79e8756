"""Philox: Random123's known answers, and Python integers."""

from __future__ import annotations

import pytest
import torch

from megafp8.numerics.philox import Key, key_of, philox, philox_of_words


def philox_by_hand(counter: int, key: Key, rounds: int = 10) -> list[int]:
    """Philox-4x32 in Python integers, straight from the paper. `counter`: up to 128 bits."""
    x, (k0, k1) = [counter >> 32 * i & 0xFFFFFFFF for i in range(4)], key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x


def test_known_answers() -> None:
    """Random123's kat_vectors: counter 0, key 0, of ten and seven rounds; and digits of π."""
    zero = torch.tensor([0])
    words = philox(zero, (0, 0))
    assert [word.item() for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = philox_of_words(zero, zero, zero, zero, (0, 0), rounds=7)
    assert [word.item() for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    pi = [torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = philox_of_words(*pi, (0xA4093822, 0x299F31D0))
    assert [word.item() for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), key_of(1234, "layers.0.mlp.down.weight")])
def test_equals_python_integers(key: Key) -> None:
    counters = [0, 1, 2, 255, 2**31 - 1, 2**32 - 1, 2**32, 2**40 + 12345, 2**62]
    words = torch.stack(philox(torch.tensor(counters), key))
    assert words.T.tolist() == [philox_by_hand(counter, key) for counter in counters]


def test_keys_tell_parts_apart() -> None:
    assert key_of(1, "a") == key_of(1, "a")
    assert len({key_of(1, "a"), key_of(2, "a"), key_of(1, "b"), key_of(1, 1, "a"), key_of(11, "a")}) == 5


def test_keys_stay_what_they_were() -> None:
    """Initial weights, and the noise of stochastic rounding, follow from these: another key is another run."""
    assert key_of(1234, "layers.0.mlp.down.weight") == (4122989312, 1461526117)
    assert key_of(1234, 7, "layers.0.mlp.down") == (4015238161, 2854507232)
