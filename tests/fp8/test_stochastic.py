"""What the noise of stochastic rounding depends on, and that it survives a restart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, group

from megafp8.fp8 import NVFP4Scaling
from megafp8.fp8.stochastic_rounding import NoiseClock, noise_key
from tests.fp8.test_manager import Model, copied
from tests.world import World


def test_every_cast_has_keys_of_its_own() -> None:
    keys = []
    for seed in (0, 1):
        for replica in range(2):
            clock = NoiseClock(seed, replica, 2)
            for _ in range(2):
                for noise in [clock.tensor("a", None), clock.tensor("b", None)]:
                    keys += [key for _ in range(3) for key in noise.next_keys(advance=True)]
                clock.end_step(None)
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 2 * 3 * 2


def test_a_global_batch_rounds_alike_over_any_number_of_replicas() -> None:
    def of_step(replicas: int) -> set[tuple[int, int]]:
        noises = [NoiseClock(0, replica, replicas).tensor("a", None) for replica in range(replicas)]
        return {key for noise in noises for _ in range(6 // replicas) for key in noise.next_keys(advance=True)}

    assert of_step(1) == of_step(2) == of_step(3)
    assert noise_key(0, 0, "a\x005\0rows") in of_step(2)


def test_a_count_that_does_not_advance() -> None:
    noise = NoiseClock(0, 0, 1).tensor("a", None)
    assert noise.next_keys(advance=False) == noise.next_keys(advance=True) != noise.next_keys(advance=True)


def _slices() -> list[tuple[int, int]]:
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    clock = NoiseClock(0, 0, 1)
    return [clock.tensor(*of).next_keys(advance=True)[0] for of in (("cut", world), ("whole", None))]


def test_slices_of_a_tensor_differ_and_copies_do_not(world2: World) -> None:
    first, second = world2.run(_slices)
    assert first[0] != second[0]
    assert first[1] == second[1]
    ((alone, _),) = world2.run(_slices, ranks=1)
    assert alone == NoiseClock(0, 0, 1).tensor("cut", None).next_keys(advance=True)[0]


def test_a_restart_rounds_as_the_run_would_have() -> None:
    def gradient(model: Model) -> Tensor:
        return torch.autograd.grad(model.forward(7).square().mean(), model.weights)[0]

    model = Model(NVFP4Scaling())
    for step in range(3):
        model.step(step)
    state = copied(model.manager)
    assert {name: tensor.item() for name, tensor in state.items()} == {"fp8.noise_step": 3}
    resumed, fresh = Model(NVFP4Scaling()), Model(NVFP4Scaling())
    resumed.manager.load_state_dict(state)
    with torch.no_grad():
        for other in (resumed, fresh):
            for weight, saved in zip(other.weights, model.weights, strict=True):
                weight.copy_(saved)
    expected = gradient(model)
    assert torch.equal(gradient(resumed), expected)
    assert not torch.equal(gradient(fresh), expected)
