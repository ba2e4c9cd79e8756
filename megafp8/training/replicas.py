"""Check that ranks which hold the same part of the model's state hold the same bits.

Data-parallel ranks start with equal weights and apply equal updates to them, so their weights stay equal, bit for bit.
If a bit of one rank's memory flips, if a collective delivers something else to one rank, or if an operation is not
deterministic where it has to be, that rank trains another model from there on. No loss shows it, and which rank's
weights a checkpoint then holds is an accident.

What is replicated depends on the layout:

    over data and context parallelism   weights; without ZeRO masters and moments too; with fp8.param_gather the FP8
                                        data of weights, and their scales; under FSDP no weights
    over tensor parallelism             norms, biases of row-parallel layers, learned positions; their optimizer state
    over first and last pipeline stage  the tied embedding, and its optimizer state
    over data, context and tensor       the state of FP8 scaling, the number of optimizer steps

A check reads these tensors once, as they are, into two 64-bit sums each (`bit_sums`), and takes their minimum and
maximum over each of these groups, one all-reduce of 32 bytes a tensor each. The host waits once, for whether anything
differs. Only if it does, sums are gathered from all ranks, and the majority says whose are wrong.

Cost on a GPU: the time to read what is replicated, in bf16 14 bytes a parameter without ZeRO, 2 with ZeRO stage 1, 1
with fp8.param_gather. Measured on two H200 with 8 layers of Llama-3-8B: 5 to 47 ms, 0.004 to 0.037% of a run's time
where every 100th step is checked (docs/measurements/2026-11-22-h200-replica-check).

Not covered: gradients, and what is computed anew in every step, as FP8 copies of weights are.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_gather_objects, all_reduce
from megafp8.distributed.sharding import spec_of
from megafp8.training.bit_sums import bit_sums
from megafp8.training.errors import ReplicasDiffer
from megafp8.training.trainer import Trainer

_LISTED = 5
"""How many tensors a message names."""


class Replica(NamedTuple):
    """A tensor of this rank that others must hold too. `name` is the same for all of them and for nothing else;
    `shared_over`: names of the groups whose ranks hold it; `holder`: which of two copies on one rank this is."""

    name: str
    values: Tensor
    shared_over: frozenset[str]
    holder: str = ""


def _name_of(param: nn.Parameter) -> str:
    """Which part of which global tensors a local parameter is."""
    pieces = (
        piece.name if piece.shape == piece.global_shape else f"{piece.name}{list(piece.offset)}"
        for piece in spec_of(param).shards
    )
    return " + ".join(pieces)


def replicated_state(trainer: Trainer) -> list[Replica]:
    """All that other ranks must hold too, live, in the same order on all of them. Weights must not be in transit."""
    parallel = trainer.parallel
    sharded = trainer.weights is not None or trainer.sharded is not None  # optimizer state, over data parallelism
    found: list[Replica] = []

    def add(param: nn.Parameter, name: str, tensors: Iterable[Tensor], over_data: bool) -> None:
        spec = spec_of(param)
        shared_over = {"data"} if over_data else set()
        shared_over |= {"tensor"} if spec.replicated_over_tp else set()
        shared_over |= {"embedding"} if any(param is tied for tied in trainer.tied) else set()
        holder = " (output layer)" if spec.is_copy else ""
        found.extend(
            Replica(f"{name}{f' ({i})' if i else ''}", values, frozenset(shared_over), holder)
            for i, values in enumerate(tensors)
        )

    for param in trainer.params:
        name = _name_of(param)
        if param not in trainer.optimizer.released:
            add(param, f"model.{name}", [param.detach()], True)
        elif trainer.weights is not None:
            add(param, f"FP8 data of model.{name}", [trainer.weights.fp8_data[param]], True)
    for fragment in trainer.optimizer.shards:
        part = "" if len(fragment) == fragment.param.numel() else f"[{fragment.start}:{fragment.end}]"
        for key, tensors in trainer.optimizer.stored_tensors(fragment).items():
            add(fragment.param, f"optimizer.{key}.{_name_of(fragment.param)}{part}", tensors, not sharded)
    all_layers = frozenset({"data", "tensor"})
    for param, (op, _) in trainer.released.items():
        if op.gathered_weight is not None:
            names = ", ".join(piece.name for piece in spec_of(param).shards)
            found.append(Replica(f"scale_inv of {names}", op.gathered_weight.scale_inv, all_layers))
    for name, values in trainer.fp8.state_dict().items():
        # Slot 0 of a history is that of the running step, and each rank's own: an evaluation has quantized weights.
        done = values[1:] if name.endswith(".amax_history") else values
        found.append(Replica(name, done, all_layers))
    found.append(Replica("number of optimizer steps", torch.tensor(trainer.optimizer.step_count), all_layers))
    sizes = {"data": parallel.data_context.size, "tensor": parallel.tensor.size, "embedding": parallel.pipeline.size}
    return [replica for replica in found if any(sizes[axis] > 1 for axis in replica.shared_over)]


def check_replicas(trainer: Trainer, step: int) -> None:
    """Compare what ranks must hold alike after `step` steps. Collective; call it between training steps.

    Raises ReplicasDiffer on all ranks alike, naming tensors, ranks and hosts, where any bit differs anywhere.
    """
    parallel = trainer.parallel
    if parallel.world_size == 1:
        return
    trainer.wait_for_weights()
    replicas = replicated_state(trainer)
    sums = bit_sums([replica.values for replica in replicas], parallel.device)
    differs = torch.zeros(len(replicas), dtype=torch.bool, device=parallel.device)
    embedding = None if parallel.embedding is None else parallel.embedding.group
    groups = {"data": parallel.data_context.group, "tensor": parallel.tensor.group, "embedding": embedding}
    for axis, group in groups.items():
        rows = [i for i, replica in enumerate(replicas) if axis in replica.shared_over]
        if axis == "embedding" and len(trainer.tied) == 2:  # one rank holds both ends
            for name in {replicas[i].name for i in rows}:
                first, last = (i for i in rows if replicas[i].name == name)
                differs[[first, last]] |= (sums[first] != sums[last]).any()
        elif rows:
            differs[rows] |= _differs(sums[rows], group)
    found = torch.tensor([float(differs.any())])
    if not all_reduce(found, parallel.world.group, "max").item():
        return
    own = [
        _Held(replica.name, parallel.rank, socket.gethostname(), replica.holder, tuple(values))
        for replica, values, differing in zip(replicas, sums.tolist(), differs.tolist())
        if differing
    ]
    everybody = all_gather_objects(own, parallel.world.group)
    raise ReplicasDiffer(_describe([held for rank in everybody for held in rank], step))


def _differs(sums_t2: Tensor, group: ProcessGroup | None) -> Tensor:
    """Which rows are not equal on all ranks of `group`, bool `[t]`."""
    extremes = all_reduce(torch.stack([sums_t2, ~sums_t2]), group, "max")  # ~ turns the order round
    return (extremes[0] != ~extremes[1]).any(dim=1)


class _Held(NamedTuple):
    """A tensor that differs somewhere, as one rank holds it."""

    name: str
    rank: int
    host: str
    holder: str
    sums: tuple[int, ...]


def _describe(everything: Sequence[_Held], step: int) -> str:
    """Who holds what others do not: by majority, where there is one."""
    by_name: dict[str, list[_Held]] = {}
    for held in everything:
        by_name.setdefault(held.name, []).append(held)
    verdicts: dict[tuple[str, str], list[str]] = {}  # whom to blame, and against whom: the tensors
    for name, copies in by_name.items():
        (most, count), *_ = Counter(held.sums for held in copies).most_common()
        agreeing = [held for held in copies if held.sums == most]
        if 2 * count > len(copies):
            verdict = _holders([held for held in copies if held.sums != most]), _holders(agreeing, hosts=False)
        else:
            verdict = _holders(copies), ""
        verdicts.setdefault(verdict, []).append(name)
    lines = [f"after step {step} ranks hold different bits of what must be the same on all of them."]
    for (who, against), names in verdicts.items():
        tensors = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        if against:
            lines.append(f"{who}: other than {against} in {tensors}.")
        else:
            lines.append(f"{who}: no majority of them agrees on {tensors}.")
    lines.append(
        "Nothing is saved from this state. The cause may be a fault of a GPU, its memory or a link, or an operation "
        "that is not deterministic. Test that host's GPUs (nvidia-smi -q -d ECC; dcgmi diag -r 3) or leave the host "
        "out, and start the same command again: it continues from the newest checkpoint."
    )
    return "\n".join(lines)


def _holders(copies: Sequence[_Held], hosts: bool = True) -> str:
    """`rank 1 on node3, rank 2 on node3`, or `ranks 0, 4`."""
    shown = sorted({(held.rank, held.host, held.holder) for held in copies})
    if hosts:
        return ", ".join(f"rank {rank} on {host}{holder}" for rank, host, holder in shown)
    ranks = [f"{rank}{holder}" for rank, _, holder in shown]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
