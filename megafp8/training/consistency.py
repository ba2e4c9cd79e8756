"""Check that ranks that hold the same part of the model's state hold the same bits.

Problem: data-parallel ranks start with equal weights and apply equal updates, so their weights stay bitwise equal. But
if a bit in one rank's memory flips, if a collective delivers wrong data to one rank, or if an operation is not
deterministic although it must be, that rank trains a different model from then on. The loss does not show this, and it
is undefined which rank's weights a checkpoint holds.

The layout determines which state is replicated:

    over data and context parallelism   weights; without ZeRO also masters and moments; with fp8.param_gather the FP8
                                        data of weights and their scales; with FSDP nothing
    over ranks with the same experts    weights of experts, like other weights in the row above; their FP8 state
    over replicas of FSDP's shards      weights, or their FP8 data
    over tensor parallelism             norms, biases of row-parallel layers, learned positions; their optimizer state
    over first and last pipeline stage  tied embeddings and their optimizer state
    over data, context and tensor       the state of FP8 scaling and of the loss scale, the number of optimizer steps

Idea: each rank reads these tensors once, in the dtype in which they are stored, and reduces each tensor to two 64-bit
checksums (`bit_sums`). One all-reduce of 32 bytes per tensor over each of these groups gives the minimum and the
maximum of the checksums. The host synchronizes once, to learn whether any checksums differ. Only then are the checksums
gathered from all ranks, and the majority decides which ranks are wrong.

*Bit sums.* The bits of a tensor are read as n little-endian signed 32-bit words w, the last word padded with zeros. The
bit sums of the tensor, modulo 2^64, are

    sum of w[i]                sum of (i + 1) · w[i]

If two tensors of the same size differ in one word, their first sums differ. If they differ in two words, either the
first sums differ, or the differences are d and -d with |d| < 2^32. The second sums then differ by (i - j) · d, which is
not 0 modulo 2^64 if fewer than 2^31 words lie between the two. Every change of one or two words is therefore detected:
a flipped bit, a NaN, two exchanged values. Other changes are missed with a probability of about 2^-64. A CRC-32 or a
hash would have to read the bytes in order; these sums are reductions that run at memory bandwidth.

Cost on a GPU: the time to read the replicated state, in bf16 14 bytes per parameter without ZeRO, 2 with ZeRO stage 1,
1 with fp8.param_gather. Measured on two H200 with 8 layers of Llama-3-8B: 5 to 47 ms, or 0.004 to 0.037% of the run if
every 100th step is checked (docs/measurements/2026-11-23-h200-faults).

Not covered: gradients, and values that every step recomputes, such as FP8 copies of weights.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.fp8.health import Fp8Record
from megafp8.parallel.collectives import all_gather_objects, all_reduce
from megafp8.parallel.sharding import spec_of
from megafp8.training.errors import StateDiffers
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.trainer import RankTrainer

_LISTED = 5  # most tensors that a message names
_CHUNK = 1 << 20  # number of words whose products are in memory at a time


def words_of(x: Tensor) -> Tensor:
    """Return the bits of `x`, of any dtype, as int32 `[n]`: a view if the alignment allows it, else a copy."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4 or flat.data_ptr() % 4 or flat.storage_offset() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4)).clone()
    return flat.view(torch.int32)


def bit_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bit sums of each tensor, int64 `[t, 2]` on `device`, without waiting for a GPU.

    Tensors on another device are copied to `device` one at a time: all offloaded state may not fit.
    """
    if device.type != "cuda" or not tensors:
        return bit_sums_reference([words_of(x) for x in tensors])
    from megafp8.kernels.bit_sums import bit_sums as on_gpu  # needs Triton, which comes with CUDA builds

    sums: list[Tensor] = []
    for is_there, alike in groupby(tensors, lambda x: x.is_cuda):
        words = (words_of(x.to(device)) for x in alike)
        sums += [on_gpu([*words])] if is_there else (on_gpu([w]) for w in words)
    return torch.cat(sums)


def bit_sums_reference(words: Sequence[Tensor]) -> Tensor:
    """Return the bit sums of `words`, int32 `[n]` each, computed in PyTorch: int64 `[t, 2]`."""
    sums = torch.zeros(len(words), 2, dtype=torch.int64)
    for row, w_n in zip(sums, words):
        for start in range(0, w_n.numel(), _CHUNK):
            chunk = w_n[start : start + _CHUNK].long()
            place = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            row += torch.stack([chunk.sum(), (chunk * place).sum()]).cpu()
    return sums


class SharedTensor(NamedTuple):
    """Tensor of this rank's state that other ranks must hold too.

    Attributes:
        name: Unique name, equal on all ranks that hold the tensor.
        values: Tensor of any shape and dtype.
        shared_over: Names of the groups in which every rank holds the tensor.
        holder: Text that tells two copies on one rank apart, or an empty text.
    """

    name: str
    values: Tensor
    shared_over: frozenset[str]
    holder: str = ""


def _name_of(param: nn.Parameter) -> str:
    """Return the names of the global tensors that a local parameter is part of, with the offsets of its shards."""
    names = [
        shard.name if shard.shape == shard.global_shape else f"{shard.name}{list(shard.offset)}"
        for shard in spec_of(param).shards
    ]
    return _listed(names, " + ")


def _listed(names: Sequence[str], separator: str) -> str:
    return separator.join(names if len(names) <= _LISTED else [*names[:2], "...", names[-1]])


def rank_state(trainer: RankTrainer) -> list[SharedTensor]:
    """Return the tensors of this rank's state, in the same order on every rank of its stage.

    No gather of weights may be running.
    """
    strategy = trainer.strategy
    fp8_data, state = strategy.fp8_data, list[SharedTensor]()

    def add(param: nn.Parameter, name: str, tensors: Iterable[Tensor], axis: str) -> None:
        spec = spec_of(param)
        axis = "expert_data" if axis == "data" and spec.expert and strategy.expert_group is not None else axis
        shared_over = {axis} if axis else set()
        shared_over |= {"tensor"} if spec.replicated_over_tp else set()
        shared_over |= {"embedding"} if any(param is tied for tied in strategy.tied) else set()
        holder = " (last stage)" if spec.is_copy else ""
        state.extend(
            SharedTensor(f"{name}{f' ({i})' if i else ''}", values, frozenset(shared_over), holder)
            for i, values in enumerate(tensors)
        )

    for param in strategy.params:
        name = _name_of(param)
        if param not in trainer.optimizer.released:
            add(param, f"model.{name}", [param.detach()], strategy.param_axis)
        elif param in fp8_data:
            add(param, f"FP8 data of model.{name}", [fp8_data[param]], strategy.param_axis)
    for shard in trainer.optimizer.shards:
        part = "" if len(shard) == shard.param.numel() else f"[{shard.start}:{shard.end}]"
        for key, tensors in trainer.optimizer.stored_tensors(shard).items():
            add(shard.param, f"optimizer.{key}.{_name_of(shard.param)}{part}", tensors, strategy.state_axis)
    all_layers = frozenset({"data", "tensor"})
    for param, (op, _) in strategy.fp8_weights.items():
        if op.gathered_weight is not None:
            shared_over = frozenset({"expert_data"}) if spec_of(param).expert else all_layers
            names = _listed([shard.name for shard in spec_of(param).shards], ", ")
            state.append(SharedTensor(f"scale_inv of {names}", op.gathered_weight.scale_inv, shared_over))
    state += [SharedTensor(f"model.{name}", values, all_layers) for name, values in trainer.constants.items()]
    state += [SharedTensor(name, values, all_layers) for name, values in trainer.loss_scale.items()]
    expert_names = tuple(f"fp8.{layer.site.name}." for layer in trainer.fp8.layers if layer.site.expert)
    state += [SharedTensor(name, values, all_layers) for name, values in trainer.router_shares.items()]
    for name, values in trainer.fp8.state_dict().items():
        state.append(
            SharedTensor(name, values, frozenset({"expert_data"}) if name.startswith(expert_names) else all_layers)
        )
    return state


def shared_state(trainer: RankTrainer) -> list[SharedTensor]:
    """Return the tensors of `compared_state` that at least one other rank must hold too."""
    parallel = trainer.parallel
    sizes = {
        "data": parallel.data_context.size,
        "expert_data": parallel.expert_data.size,
        "fsdp_replicate": parallel.fsdp_replicate.size,
        "tensor": parallel.tensor.size,
        "embedding": parallel.pipeline.size,
    }
    return [x for x in compared_state(trainer) if any(sizes[axis] > 1 for axis in x.shared_over)]


def compared_state(trainer: RankTrainer) -> list[SharedTensor]:
    """Return `rank_state` without values of the running step, and with the number of optimizer steps."""
    # Slot 0 of an amax history is local to the rank and belongs to the running step. An evaluation may have changed it.
    state = [x._replace(values=x.values[1:]) if x.name.endswith(".amax_history") else x for x in rank_state(trainer)]
    count = torch.tensor(trainer.optimizer.step_count)
    return [*state, SharedTensor("number of optimizer steps", count, frozenset({"data", "tensor"}))]


def check_consistency(trainer: RankTrainer, step: int) -> None:
    """Compare the state that ranks share after `step` steps. Collective; call it between training steps.

    Raises StateDiffers on all ranks, with the names of tensors, ranks and hosts, if any bit differs on any rank.
    """
    parallel, strategy = trainer.parallel, trainer.strategy
    if parallel.world_size == 1:
        return
    strategy.wait()
    shared = shared_state(trainer)
    sums = bit_sums([x.values for x in shared], parallel.device)
    differs = torch.zeros(len(shared), dtype=torch.bool, device=parallel.device)
    embedding = None if parallel.embedding is None else parallel.embedding.group
    groups = {
        "data": parallel.data_context.group,
        "expert_data": parallel.expert_data.group,
        "fsdp_replicate": parallel.fsdp_replicate.group,
        "tensor": parallel.tensor.group,
        "embedding": embedding,
    }
    for axis, group in groups.items():
        rows = [i for i, x in enumerate(shared) if axis in x.shared_over]
        if axis == "embedding" and len(strategy.tied) == 2:  # one rank holds the first and the last stage
            for name in {shared[i].name for i in rows}:
                first, last = (i for i in rows if shared[i].name == name)
                differs[[first, last]] |= (sums[first] != sums[last]).any()
        elif rows:
            differs[rows] |= _differs(sums[rows], group)
    any_differs = torch.tensor([float(differs.any())])
    if not all_reduce(any_differs, parallel.world.group, "max").item():
        return
    copies = [
        _TensorCopy(x.name, parallel.rank, socket.gethostname(), x.holder, tuple(values))
        for x, values, differing in zip(shared, sums.tolist(), differs.tolist())
        if differing
    ]
    by_rank = all_gather_objects(copies, parallel.world.group)
    raise StateDiffers(_describe([x for rank in by_rank for x in rank], step))


class ConsistencyCheck(Observer):
    """Observer that runs `check_consistency` before the first step, every `interval` steps, at saves and at skips.

    In a row of skipped steps, only the first one is checked.
    """

    def __init__(self, trainer: RankTrainer, step: int, interval: int) -> None:
        self._trainer, self._begin, self._interval = trainer, step, interval
        self._checked = False  # whether the state after the latest step has been checked

    def __enter__(self) -> ConsistencyCheck:
        self.check_state(self._begin)
        return self

    def before_step(self, step: int) -> None:
        """Mark the state as not checked, because the step changes it."""
        self._checked = False

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Check the state at the interval, and after the first skipped step in a row."""
        if metrics.step % self._interval == 0 or metrics.skipped_in_a_row == 1:
            self.check_state(metrics.step)

    def check_state(self, step: int) -> None:
        """Check the state after `step`, unless it has been checked since the latest step."""
        if not self._checked:
            check_consistency(self._trainer, step)
        self._checked = True


def _differs(sums_t2: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return whether each row differs between ranks of `group`, bool `[t]`."""
    extremes = all_reduce(torch.stack([sums_t2, ~sums_t2]), group, "max")  # ~ reverses the order
    return (extremes[0] != ~extremes[1]).any(dim=1)


class _TensorCopy(NamedTuple):
    """Bit sums of a tensor on one rank, for a tensor that differs between ranks."""

    name: str
    rank: int
    host: str
    holder: str
    sums: tuple[int, ...]


def _describe(copies_of_all: Sequence[_TensorCopy], step: int) -> str:
    """Return the error message: the ranks that differ from the majority, or all ranks if there is no majority."""
    by_name: dict[str, list[_TensorCopy]] = {}
    for copy in copies_of_all:
        by_name.setdefault(copy.name, []).append(copy)
    verdicts: dict[tuple[str, str], list[str]] = {}  # (wrong ranks, majority): tensors
    for name, copies in by_name.items():
        (most, count), *_ = Counter(copy.sums for copy in copies).most_common()
        agreeing = [copy for copy in copies if copy.sums == most]
        if 2 * count > len(copies):
            verdict = _holders([copy for copy in copies if copy.sums != most]), _holders(agreeing, hosts=False)
        else:
            verdict = _holders(copies), ""
        verdicts.setdefault(verdict, []).append(name)
    lines = [f"after step {step} ranks hold different bits of tensors that must be equal on all ranks."]
    for (who, majority), names in verdicts.items():
        tensors = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        verb = f"different from {majority} in" if majority else "no majority agrees on"
        lines.append(f"{who}: {verb} {tensors}.")
    lines.append(
        "This state is not saved. The cause may be a faulty GPU, memory or link, or an operation that is not "
        "deterministic. Test that host's GPUs (nvidia-smi -q -d ECC; dcgmi diag -r 3) or exclude the host, and start "
        "the same command again: it continues from the newest checkpoint."
    )
    return "\n".join(lines)


def _holders(copies: Sequence[_TensorCopy], hosts: bool = True) -> str:
    """Return the ranks that hold the copies as text: `rank 1 on node3, rank 2 on node3`, or `ranks 0, 4`."""
    shown = sorted({(copy.rank, copy.host, copy.holder) for copy in copies})
    if hosts:
        return ", ".join(f"rank {rank} on {host}{holder}" for rank, host, holder in shown)
    ranks = [f"{rank}{holder}" for rank, _, holder in shown]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
