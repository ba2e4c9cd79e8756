"""Refits between ranks give the generator the trainer's tensors: in one job, and from one job to another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config, load_config
from megafp8.inference.load import InferenceLayout, build_model, config_of, live_model
from megafp8.inference.refit import Refit
from megafp8.inference.staged_weights import StagedWeights, tensors_of
from megafp8.inference.weight_transfer import TwoJobs
from megafp8.numerics.dtypes import DTYPES
from megafp8.parallel.parallel_state import initialize_distributed
from megafp8.parallel.sharding import Shape
from megafp8.prove.local_ranks import LocalRanks
from megafp8.training.parallel import build_parallel
from megafp8.training.state import weights
from megafp8.training.trainer import RankTrainer
from megafp8.training.weights_digest import sums_of_bits
from tests.ports import free_port

SECONDS = 60.0
SMALL = [
    *("model.num_layers=4", "model.hidden_size=256", "model.num_attention_heads=8", "model.num_query_groups=4"),
    *("model.ffn_hidden_size=512", "model.vocab_size=1000", "training.seq_length=32", "training.cuda_graphs=false"),
    *("data.tokenizer=null", "data.train=[none]", "data.reset_at_documents=false", "parallel.layers_per_stage=null"),
]

Sums = Mapping[tuple[str, Shape, Shape], int]
"""Sums over the bits of tensors, by name, global shape and offset of a part."""


class Sender(NamedTuple):
    """Layout of the trainer; with `fsdp` its data-parallel ranks shard everything."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    fsdp: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def config(self, device: str) -> Config:
        keys = [f"parallel.tensor={self.tensor}", f"parallel.pipeline={self.pipeline}", f"device={device}"]
        keys += [f"training.global_batch_size={self.data}", "parallel.sequence_parallel=false"]
        keys += [f"parallel.fsdp={str(self.fsdp).lower()}", "parallel.zero=0"]
        return load_config("configs/llama3-8b.yaml", [*SMALL, *keys])


def _one_job(config: Config, layout: InferenceLayout) -> tuple[Sums, Sums]:
    trainer = RankTrainer(config, build_parallel(config, initialize_distributed(config.device)))
    model, live = live_model(trainer, layout)
    live(always=True)
    _negate(trainer)
    live(always=True)
    sums = _sums(_tensors(trainer), config), _sums(tensors_of(model), config)
    trainer.close()
    return sums


def _two_jobs(config: Config, sender: Sender, layout: InferenceLayout, port: int) -> tuple[Sums, Sums]:
    """Let the first ranks be the trainer's job, and the others the generator's."""
    rank, size, within = dist.get_rank(), dist.get_world_size(), timedelta(seconds=SECONDS)
    trains = rank < sender.ranks
    initialize_distributed(config.device)  # sets the device of the barrier
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, size, is_master=rank == 0, timeout=within)
    first, ranks = (0, sender.ranks) if trains else (sender.ranks, size - sender.ranks)
    os.environ.update(RANK=str(rank - first), WORLD_SIZE=str(ranks))
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
    own = dist.PrefixStore(f"job of {first}", store)
    dist.init_process_group(backend, store=own, rank=rank - first, world_size=ranks, timeout=within)
    device = initialize_distributed(config.device)
    trainer = staged = None
    offered, wanted = dict[str, Rectangles](), dict[str, Rectangles]()
    if trains:
        trainer = RankTrainer(config, build_parallel(config, device))
        offered = _tensors(trainer)
    else:
        dtype = DTYPES[config.training.precision]
        staged = StagedWeights(
            build_model(config_of(config.spec, layout, config.fp8, dtype, cuda=device.type == "cuda"))
        )
        wanted = staged.tensors
    with TwoJobs(dist.PrefixStore("refit", store), rank, size, device, within) as peers:
        refit = Refit(offered, wanted, peers)
        refit.run(offered, wanted)
        if trainer is not None:
            _negate(trainer)
            offered = _tensors(trainer)
        refit.run(offered, wanted)
    sums = _sums(offered, config), _sums(wanted, config)
    if staged is not None:
        staged.apply()
    if trainer is not None:
        trainer.close()
    return sums


def _tensors(trainer: RankTrainer) -> dict[str, Rectangles]:
    return weights(trainer) | as_rectangles(trainer.fp8.state_dict())


@torch.no_grad()
def _negate(trainer: RankTrainer) -> None:
    for tensor in weights(trainer).values():
        for part in tensor.parts:
            if part.view.is_floating_point():
                part.view.neg_()


def _sums(tensors: Mapping[str, Rectangles], config: Config) -> Sums:
    return sums_of_bits(tensors, DTYPES[config.training.precision])


def _totals(sums: Sequence[Sums]) -> dict[str, int]:
    """Return sums of whole tensors by name; replicas of a part must be equal."""
    parts: dict[tuple[str, Shape, Shape], int] = {}
    for key, value in (item for of_rank in sums for item in of_rank.items()):
        assert parts.setdefault(key, value) == value, key
    totals: dict[str, int] = {}
    for (name, _, _), value in parts.items():
        totals[name] = (totals.get(name, 0) + value) % 2**64
    return totals


def _check(device: str, cases: Sequence[tuple[Sender, InferenceLayout, bool]]) -> None:
    """Refit in each case, in one job or (True) in two, and compare the bits of all tensors."""
    with LocalRanks(on_gpus=device == "cuda") as processes:
        for sender, layout, two_jobs in cases:
            config, ranks = sender.config(device), sender.ranks
            run: Callable[..., tuple[Sums, Sums]] = _one_job
            arguments: tuple[Any, ...] = (config, layout)
            if two_jobs:
                ranks += layout.tensor * layout.pipeline
                run, arguments = _two_jobs, (config, sender, layout, free_port())
            trained, generated = map(_totals, zip(*processes.run(run, arguments, ranks, SECONDS), strict=True))
            assert generated
            assert {name: trained.get(name) for name in generated} == generated, (sender, layout, two_jobs)


def test_over_gloo() -> None:
    _check("cpu", [(Sender(tensor=2), InferenceLayout(1, 1), False), (Sender(), InferenceLayout(1, 1), True)])


NCCL = {
    2: [
        (Sender(data=2), InferenceLayout(2, 1), False), (Sender(pipeline=2), InferenceLayout(2, 1), False),
        (Sender(data=2, fsdp=True), InferenceLayout(2, 1), False), (Sender(tensor=2), InferenceLayout(1, 1), False),
        (Sender(), InferenceLayout(1, 1), True),
    ],
    4: [
        (Sender(tensor=4), InferenceLayout(2, 1), False), (Sender(2, 1, 2), InferenceLayout(4, 1), False),
        (Sender(2, 2), InferenceLayout(1, 1), False), (Sender(data=4, fsdp=True), InferenceLayout(2, 1), False),
        *((Sender(tensor=2), layout, True) for layout in (InferenceLayout(2, 1), InferenceLayout(1, 2))),
        (Sender(data=2), InferenceLayout(2, 1), True),
    ],
}  # fmt: skip
"""Cases by the number of GPUs."""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", NCCL)
def test_over_nccl(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    _check("cuda", NCCL[ranks])
