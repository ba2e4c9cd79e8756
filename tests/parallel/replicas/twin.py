"""The run of one replica that computes the shares of all members itself, from the record of who trained which step.

It has no quorum, no vote and no connections: for each step it computes the gradients of each member's share of the
batch one after the other, adds them up in the order of the members, and updates the weights once. So its losses are
those of a run with this membership, bit for bit, if such a run is right.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.optimizer.step import StepResult
from megafp8.training.loss import BatchLoss
from megafp8.training.replicas.trainer import ReplicaTrainer
from tests.parallel.replicas.cluster import fork
from tests.ports import free_port


class _Computed(Exception):
    """The passes of a share are done; the step is not."""


class SharesInTurn:
    """The exchange of a trainer that computes the shares of all members itself, one after the other."""

    def __init__(self) -> None:
        self._parts: list[list[list[Tensor]]] = []
        self._members = 0

    def __call__(self, sums: Sequence[Tensor], maxima: Sequence[Tensor]) -> None:
        self._parts.append([[x.clone() for x in xs] for xs in (sums, maxima)])
        if len(self._parts) < self._members:
            raise _Computed
        for i, x in enumerate(sums):
            total = self._parts[0][0][i]
            for part in self._parts[1:]:
                total = total + part[0][i]
            x.copy_(total)
        for i, x in enumerate(maxima):
            x.copy_(torch.stack([part[1][i] for part in self._parts]).amax(dim=0))

    def step(
        self, trainer: ReplicaTrainer, step: int, shares: Sequence[Sequence[Batch]]
    ) -> tuple[BatchLoss, StepResult]:
        """A step of `trainer`, whose exchange this is, with the micro-batches of each member."""
        self._parts, self._members = [], len(shares)
        for batches in shares[:-1]:
            with pytest.raises(_Computed):
                trainer.train_step(step, batches)
        return trainer.train_step(step, shares[-1])


def run_twin(
    folder: Path, arguments: Sequence[str], ranks: int, membership: Sequence[Sequence[int]], shrink_from: int | None
) -> list[Any]:
    """Losses and norms, as hexadecimal floats, of steps that `membership` trains. `arguments`: a config's.

    `shrink_from`: None if a step always has the whole batch, or else the number of members that have it.
    """
    port = str(free_port())
    out = folder / "twin.jsonl"
    out.unlink(missing_ok=True)
    pids = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        pids.append(
            fork(lambda place=place: _run(place, arguments, membership, shrink_from, out), folder / "twin.log", True)
        )
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), (folder / "twin.log").read_text()[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def _run(
    place: Mapping[str, str],
    arguments: Sequence[str],
    membership: Sequence[Sequence[int]],
    shrink_from: int | None,
    out: Path,
) -> int:
    from megafp8.parallel.parallel_state import initialize_distributed
    from megafp8.parallel.replicas import share
    from megafp8.training import command_line
    from megafp8.training.parallel import build_parallel

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **place}
    sys.argv = ["pretrain", *arguments]
    inputs = command_line.prepare(command_line.parse_arguments(None))
    assert inputs is not None
    config = inputs.config
    parallel = build_parallel(config, initialize_distributed("cpu"))
    exchange = SharesInTurn()
    trainer = ReplicaTrainer(config, parallel, exchange)
    samples, consumed = config.training.global_batch_size, 0
    with out.open("w") if parallel.rank == 0 else open(os.devnull, "w") as file:
        for step, trained in enumerate(membership):
            members, count = len(trained), trainer.num_microbatches
            parts = 1 if shrink_from is None else shrink_from
            present = parts if shrink_from is None else members
            shares = [share(count // parts * present, members, member) for member in range(members)]
            streams = [inputs.batches(inputs.train, parallel, consumed, num_workers=0, share=own) for own in shares]
            consumed += samples // parts * present
            loss, result = exchange.step(trainer, step, [next(stream) for stream in streams])
            line = {"loss": float(loss.mean).hex(), "norm": float(result.grad_norm).hex()}
            file.write(json.dumps(line) + "\n")
    return 0
