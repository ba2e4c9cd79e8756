"""Noise of stochastic rounding: Philox in Python integers, and what it depends on."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed import ProcessGroup, group

from megafp8.numerics.philox import Key, key_of
from megafp8.numerics.step import end_step
from megafp8.numerics.stochastic_rounding import CastNoise, NoiseClock, TensorNoise, uniform
from tests.numerics.test_philox import philox_by_hand
from tests.world import World

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


CPU = torch.device("cpu")


def made_noise(name: str, step: int = 0, microbatch: int = 0, seed: int = 0, part: str = "rows") -> CastNoise:
    return CastNoise(key_of(seed, name, part), torch.tensor(step), torch.tensor(microbatch))


def uniform_by_hand(r: int, c: int, key: Key, step: int = 0, microbatch: int = 0) -> list[list[float]]:
    above = (step << 64) + (microbatch << 96)
    flat = []
    for i in range(r * c):
        word = philox_by_hand(i // 8 + above, key, rounds=7)[i % 8 // 2]
        flat.append((word >> 16 if i % 2 else word & 0xFFFF) / 2**16)
    return [flat[i * c : (i + 1) * c] for i in range(r)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), key_of(1234, "layers.0.mlp.down")])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 12), (0, 8), (8, 0)])
def test_equals_python_integers(shape: tuple[int, int], key: Key, device: str) -> None:
    step, microbatch = (torch.tensor(number, device=device) for number in (2**32 - 1, 7))
    noise = uniform(*shape, CastNoise(key, step, microbatch))
    assert noise.dtype == torch.float32
    assert noise.shape == shape
    assert noise.tolist() == uniform_by_hand(*shape, key, 2**32 - 1, 7)


def test_rows_of_a_longer_matrix() -> None:
    noise = made_noise("x", step=3)
    assert torch.equal(uniform(6, 2, noise, first_row=8), uniform(14, 2, noise)[8:])


def test_is_uniform() -> None:
    noise = uniform(100, 1000, made_noise("x")).double()
    assert noise.min() >= 0
    assert noise.max() < 1
    n = noise.numel()
    counts = torch.histc(noise.flatten(), bins=50, min=0, max=1)
    chi_squared = ((counts - n / 50) ** 2 / (n / 50)).sum().item()
    assert abs(chi_squared - 49) < 5 * math.sqrt(2 * 49)
    for a, b in [(noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[:, 8:], noise[:, :-8])]:
        correlation = 12 * ((a - 0.5) * (b - 0.5)).mean().item()
        assert abs(correlation) < 5 / math.sqrt(a.numel())


Place = tuple[Key, int, int]


def places(noise: TensorNoise) -> list[Place]:
    """What the noise of the next micro-batch is a function of."""
    return [(key, int(step), int(microbatch)) for key, step, microbatch in (noise.rowwise, noise.columnwise)]


def test_every_cast_has_noise_of_its_own() -> None:
    found = []
    for seed in (0, 1):
        for replica in range(2):
            clock = NoiseClock(seed, replica, 2, CPU)
            noises = [clock.tensor("a", None), clock.tensor("b", None)]
            for step in range(2):
                for noise in noises:
                    for _ in range(3):
                        found += places(noise)
                        noise.advance()
                if step == 0:
                    again = places(noises[0])
                    clock.discard_step()
                    assert places(noises[0]) == found[-12:-10] != again
                end_step([(clock, None)])
            assert clock.state_dict()["fp8.noise_step"] == 2
    assert len(set(found)) == len(found) == 2 * 2 * 2 * 2 * 3 * 2


def test_a_global_batch_rounds_alike_over_any_number_of_replicas() -> None:
    def of_step(replicas: int) -> set[Place]:
        found: set[Place] = set()
        for replica in range(replicas):
            noise = NoiseClock(0, replica, replicas, CPU).tensor("a", None)
            for _ in range(6 // replicas):
                found |= set(places(noise))
                noise.advance()
        return found

    assert of_step(1) == of_step(2) == of_step(3)
    assert (key_of(0, "a", "rows"), 0, 5) in of_step(2)


def _shards() -> list[Key]:
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    clock = NoiseClock(0, 0, 1, CPU)
    return [clock.tensor(*of).rowwise.key for of in (("cut", world), ("whole", None))]


def test_shards_of_a_tensor_differ_and_copies_do_not(world2: World) -> None:
    first, second = world2.run(_shards)
    assert first[0] != second[0]
    assert first[1] == second[1]
    ((alone, _),) = world2.run(_shards, ranks=1)
    assert alone == key_of(0, "cut", "rows")
