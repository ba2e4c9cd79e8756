"""What stochastic rounding counts: optimizer steps, and micro-batches within one.

Noise is a function of (seed, step, name), see `noise`. The name says the tensor, the micro-batch, whether rows or
columns are cast, and which slice of the tensor this rank has. A micro-batch is numbered as it is in the global batch,
so that a step rounds alike however the batch is dealt out to data-parallel ranks; and each is cast once, in its
backward pass, so counting casts counts micro-batches.

The step is in checkpoints: a resumed run rounds as the run that was not interrupted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.noise import noise_key
from megafp8.philox import Key


class TensorNoise:
    """The keys of one tensor, `name`."""

    def __init__(self, clock: NoiseClock, name: str) -> None:
        self.clock, self.name = clock, name
        self.microbatch = 0

    def next_keys(self, *, advance: bool) -> tuple[Key, Key]:
        """For the rows and the columns of the next micro-batch; it stays the next one unless `advance`."""
        clock = self.clock
        number = self.microbatch * clock.replicas + clock.replica
        self.microbatch += advance
        step = int(clock.step.item())
        rows, columns = (noise_key(clock.seed, step, f"{self.name}\0{number}\0{part}") for part in ("rows", "columns"))
        return rows, columns


class NoiseClock:
    """The noise of all tensors of this rank, which is data-parallel rank `replica` of `replicas`."""

    def __init__(self, seed: int, replica: int, replicas: int) -> None:
        self.seed, self.replica, self.replicas = seed, replica, replicas
        self.step = torch.zeros((), dtype=torch.int64)  # on the host, where keys are made
        self._tensors: list[TensorNoise] = []

    def tensor(self, name: str, group: ProcessGroup | None) -> TensorNoise:
        """The noise of the tensor `name`, which `group` holds slices of; None: this rank has it whole."""
        noise = TensorNoise(self, name if group is None or group.size() == 1 else f"{name}\0{group.rank()}")
        self._tensors.append(noise)
        return noise

    def end_step(self, group: ProcessGroup | None) -> None:
        """The next step. Nothing is communicated."""
        self.step += 1
        for noise in self._tensors:
            noise.microbatch = 0

    def refresh(self) -> None:
        """Nothing is derived from the step."""

    def state_dict(self) -> dict[str, Tensor]:
        """`fp8.noise_step` `[]`, int64 on the host."""
        return {"fp8.noise_step": self.step}
