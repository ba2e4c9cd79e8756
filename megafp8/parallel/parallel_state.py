"""Grid of ranks (pipeline, data, context, tensor) and the process groups of its axes.

The axes from slowest to fastest are pipeline, data, context, tensor. The fastest axis communicates most, so a
tensor-parallel group is on neighboring ranks (one NVLink domain). Pipeline stages communicate least, so they are
farthest apart. This is Megatron-LM's order "tp-cp-dp-pp" in reverse notation.

`rank_groups` computes all groups as lists of ranks, without process groups, so the layout of 16,384 GPUs can be checked
on a laptop. `initialize_model_parallel` builds the process groups of this rank, with one `new_group` call each that
only the members make. Start-up cost therefore does not grow with the world. torch's own `init_device_mesh` would make
every rank enumerate the groups of all others, some 40,000 on 16,384 ranks.

The result is a `ParallelState`, and modules are passed the groups they need.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megafp8.host.error_causes import lost_connection
from megafp8.host.launched import launched_ranks, unset_advice

Ranks = npt.NDArray[np.int_]

AXES = ("pipeline", "data", "context", "tensor")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Groups over several axes, with their purpose.
_JOINT_GROUPS = {
    "data_context": ("data", "context"),  # gradients: context ranks have the same weights and different tokens
    "model": ("pipeline", "tensor"),  # gradient norm: together the ranks hold one whole model
    "tensor_context": ("context", "tensor"),  # one micro-batch: the ranks hold slices of the same activations
    "amax": ("data", "context", "tensor"),  # delayed scaling: all ranks that run the same layers
}

_QUEUES, _REGISTER = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_DESTROYED = False  # whether this process has destroyed groups


def rank_groups(
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    fsdp_replicas: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
) -> dict[str, list[list[int]]]:
    """Return every group of a layout as lists of global ranks, in group order, without building process groups.

    The data-parallel size is the rest of the world. The keys are:

    - `tensor`, `context`, `data`, `pipeline`: the axes.
    - `data_context`, `model` (pipeline × tensor), `tensor_context`, `amax` (data × context × tensor): several axes.
    - `embedding`: first and last stage of each pipeline.
    - `fsdp_shard`: consecutive ranks of `data_context`, which is split into `fsdp_replicas` such groups.
    - `fsdp_replicate`: ranks at the same place of each `fsdp_shard`.
    - `expert`: consecutive ranks of data × context × tensor, equal to `expert_model` × `expert_tensor` (neighbors).
    - `expert_data`: ranks at the same place of each `expert`.
    - `expert_shard`: consecutive ranks of `expert_data` in the same replica.
    - `expert_amax`: `expert_data` × `expert_tensor`.
    - `expert_rows`: ranks of `expert_amax` at one place of the data axis.

    Raises:
        ValueError: If the sizes do not multiply up to the world, or do not divide the ranks that they split.
    """
    grid = _grid(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    groups = _groups(grid, fsdp_replicas, expert_model_parallel_size, expert_tensor_parallel_size)
    return {name: ranks.tolist() for name, ranks in groups.items()}


def _grid(world_size: int, tensor: int, pipeline: int, context: int) -> Ranks:
    """Return all ranks, `[pipeline, data, context, tensor]`; raise ValueError if the sizes do not fit the world."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for name, value in zip(names, (tensor, pipeline, context)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    model_size = tensor * pipeline * context
    if world_size < 1 or world_size % model_size:
        suggested = model_size * max(1, round(world_size / model_size))
        raise ValueError(
            f"world size {world_size} is not a multiple of tensor {tensor} × pipeline {pipeline} × context {context} = "
            f"{model_size} ranks; start {suggested} processes or shrink an axis"
        )
    return np.arange(world_size).reshape(pipeline, world_size // model_size, context, tensor)


def _groups(grid: Ranks, fsdp_replicas: int, expert_model: int, expert_tensor: int) -> dict[str, Ranks]:
    """Return the groups by name, `[groups, members]`; raise ValueError if a size does not divide its ranks."""

    def along(*axes: str) -> Ranks:
        members = [AXES.index(axis) for axis in axes]
        rest = [i for i in range(len(AXES)) if i not in members]
        return grid.transpose(rest + members).reshape(-1, int(np.prod([grid.shape[i] for i in members])))

    groups = {axis: along(axis) for axis in AXES}
    groups |= {name: along(*axes) for name, axes in _JOINT_GROUPS.items()}
    pipelines = groups["pipeline"]
    groups["embedding"] = pipelines[:, [0, -1]] if pipelines.shape[1] > 1 else pipelines

    def divided(name: str, value: int, whole: str, axes: str) -> None:
        ranks = groups[whole].shape[1]
        if value < 1 or ranks % value:
            raise ValueError(f"{name} is {value}; it must divide the {ranks} ranks of {axes}")

    divided("fsdp_replicas", fsdp_replicas, "data_context", "data × context")
    divided("expert_model_parallel_size", expert_model, "amax", "data × context × tensor")
    divided("expert_tensor_parallel_size", expert_tensor, "amax", "data × context × tensor")
    expert = expert_model * expert_tensor
    divided("expert_model_parallel_size × expert_tensor_parallel_size", expert, "amax", "data × context × tensor")
    groups["expert"], groups["expert_data"] = _split(groups["amax"], expert)
    groups["expert_tensor"], groups["expert_model"] = _split(groups["expert"], expert_tensor)
    whole = groups["amax"].reshape(len(groups["amax"]), -1, expert_model, expert_tensor)
    groups["expert_amax"] = whole.swapaxes(1, 2).reshape(-1, whole.shape[1] * expert_tensor)
    groups["expert_rows"] = groups["expert_tensor"]
    micro_batch = groups["tensor_context"]
    if micro_batch.shape[1] % expert == 0:  # otherwise an expert gets tokens of several micro-batches
        whole = micro_batch.reshape(len(micro_batch), -1, expert_model, expert_tensor)
        groups["expert_rows"] = whole.swapaxes(1, 2).reshape(-1, whole.shape[1] * expert_tensor)
    divided("fsdp_replicas", fsdp_replicas, "expert_data", "data × context × tensor that hold the same experts")
    shards, expert_shards = (groups[name].shape[1] // fsdp_replicas for name in ("data_context", "expert_data"))
    groups["fsdp_shard"], groups["fsdp_replicate"] = _split(groups["data_context"], shards)
    groups["expert_shard"], _ = _split(groups["expert_data"], expert_shards)
    return groups


def _split(groups: Ranks, size: int) -> tuple[Ranks, Ranks]:
    """Split each group into groups of `size` neighbors; return these, and the groups of ranks at the same place."""
    parts = groups.reshape(len(groups), -1, size)
    return parts.reshape(-1, size), parts.swapaxes(1, 2).reshape(-1, parts.shape[1])


def _group_of(rank: int, groups: Ranks) -> tuple[int, ...] | None:
    """Return the group that contains `rank`, or None."""
    members = groups[(groups == rank).any(axis=1)]
    return tuple(members[0].tolist()) if len(members) else None


@dataclass(frozen=True)
class Group:
    """Process group of this rank, with its global ranks in order and this rank's index among them."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the group."""
        return self.rank == 0


@dataclass(frozen=True)
class ParallelState:
    """Place of this rank in the grid, and the groups of this rank.

    Attributes:
        device: Device of this rank.
        rank, world_size: Global rank, and number of ranks of the job.
        world: Group of all ranks.
        tensor, context, data, pipeline: Groups of the axes.
        pipeline_backward: Ranks of `pipeline` with a second communicator. Activations and gradients are sent in
            opposite directions between the same two ranks; on one communicator, a send that waits for a receive queued
            behind another send would deadlock.
        data_context, model, tensor_context, amax: Groups over several axes, as in `rank_groups`.
        fsdp_shard, fsdp_replicate: Dims of torch's mesh for HSDP: FSDP shards over `fsdp_shard`, and the ranks of
            `fsdp_replicate` hold the same shards. Together they are `data_context`.
        fsdp_shard_backward: Ranks of `fsdp_shard` with a second communicator, for gradients that are reduced while
            weights are gathered.
        expert: Ranks over which the experts of a layer are divided and between which tokens are exchanged.
        expert_tensor: Ranks of `expert` that hold different parts of the same experts.
        expert_data: Ranks that hold the same parts of experts. Together with `expert` they are data × context × tensor.
        expert_amax: Ranks that hold the same experts, whole or in parts.
        expert_rows: Ranks of `expert_amax` with tokens of the same micro-batch and no other. If the ranks of
            `expert` hold several micro-batches, this is `expert_tensor`.
        expert_shard, expert_shard_backward: Counterparts of `fsdp_shard` and `fsdp_shard_backward` for experts.
        embedding: First and last stage of the pipeline; None on stages in between.
    """

    device: torch.device
    rank: int
    world_size: int
    world: Group
    tensor: Group
    context: Group
    data: Group
    pipeline: Group
    pipeline_backward: Group
    data_context: Group
    fsdp_shard: Group
    fsdp_shard_backward: Group
    fsdp_replicate: Group
    model: Group
    tensor_context: Group
    amax: Group
    expert: Group
    expert_tensor: Group
    expert_data: Group
    expert_amax: Group
    expert_rows: Group
    expert_shard: Group
    expert_shard_backward: Group
    embedding: Group | None


def set_cuda_environment() -> None:
    """Set the environment variables that CUDA and NCCL read at start. Call this before the process uses CUDA.

    *32 hardware queues* instead of 8. If there are more streams than queues, streams share queues, and a receive that
    waits for its sender in one stream blocks another stream. A pipeline has a stream for each neighbor and direction in
    addition to the compute stream and the streams of other groups, and a CUDA graph has one for each branch, so two
    ranks could wait for each other forever.

    *No registration of the buffers that CUDA graphs send from and receive to.* With torch's expandable segments, which
    the launch scripts turn on, NCCL then reads the wrong memory or hangs (pytorch#158029, torchtitan#3306).

    Raises:
        ValueError: If the environment already has a value that cannot work.
    """
    queues = os.environ.setdefault(_QUEUES, "32")
    if not queues.isdigit() or int(queues) < 8:
        raise ValueError(
            f"the environment has {_QUEUES}={queues}, under which streams that wait for other ranks block others; "
            f"unset it, or try {_QUEUES}=32"
        )
    registers = os.environ.setdefault(_REGISTER, "0")
    segments = next((x for name in _ALLOCATOR if "expandable_segments:True" in (x := os.environ.get(name, ""))), None)
    if registers != "0" and segments is not None:
        raise ValueError(
            f"the environment has {_REGISTER}={registers}, which does not work with torch's {segments}; unset it, or "
            f"try {_REGISTER}=0"
        )


def initialize_distributed(device_type: str, timeout_seconds: float = 600.0) -> torch.device:
    """Join the job that a launcher started, or start a job of one process, and return this rank's device.

    CUDA uses NCCL, with gloo for the host tensors of the world group; CPU uses gloo only.

    Raises:
        ValueError: On all ranks of the node, if there are fewer GPUs than processes.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if "RANK" in os.environ else 0
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if processes > gpus:
            available = f"{gpus} GPU{'s' * (gpus != 1)}"
            works = f"start {gpus} (megafp8 launch --nproc-per-node {gpus}), or set the device to cpu"
            raise ValueError(
                f"this node has {processes} processes but {available}, and each process needs one; {works}"
            )
        set_cuda_environment()
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    launched_ranks()  # rejects combinations of variables that no launcher sets
    if "RANK" in os.environ:
        # Pass no device_id: with it, torch would build each subgroup by splitting the world's communicator, which all
        # ranks must join, but only members make our groups. Communicators connect at their first use.
        _join(backend, timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


class RanksDidNotMeet(ConnectionError):
    """Some ranks of a job did not connect to the address in the environment."""


def _join(backend: str, timeout: datetime.timedelta) -> None:
    """Make the world group of the ranks that the environment names. A lost connection is raised unchanged.

    Raises:
        ValueError: If the address is missing.
        RanksDidNotMeet: If ranks are missing.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"a launcher also sets {' and '.join(missing)}; {unset_advice()}")
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and lost_connection(error):
            raise
        message = str(error).partition("\n")[0].rstrip(".")
        raise RanksDidNotMeet(f"ranks of this job are missing: {message}; {unset_advice()}") from None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
    fsdp_replicas: int = 1,
    device: torch.device | None = None,
    timeout_seconds: float = 600.0,
    backend: str | None = None,
) -> ParallelState:
    """Build the groups of the running job. Call this on every rank, after `torch.distributed` is initialized.

    Args:
        tensor_model_parallel_size: Number of tensor-parallel ranks.
        pipeline_model_parallel_size: Number of pipeline-parallel ranks.
        context_parallel_size: Number of context-parallel ranks.
        expert_model_parallel_size: Number of ranks of data × context × tensor over which the experts of a layer are
            divided.
        expert_tensor_parallel_size: Number of ranks over which each expert is divided.
        fsdp_replicas: Number of replicas of FSDP's shards (Megatron-LM's `num_distributed_optimizer_instances`).
        device: Device of this rank; CPU by default.
        timeout_seconds: Timeout of the groups' collectives.
        backend: Backend of the groups; None means gloo on CPU and NCCL on CUDA.

    Raises:
        ValueError: On every rank, before any group is built, if the sizes do not fit the world.
    """
    if _DESTROYED:
        _forget_meshes()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = device or torch.device("cpu")
    grid = _grid(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    all_groups = _groups(grid, fsdp_replicas, expert_model_parallel_size, expert_tensor_parallel_size)
    mine = {name: _group_of(rank, groups) for name, groups in all_groups.items()}
    world = dist.group.WORLD
    assert world is not None
    timeout = datetime.timedelta(seconds=timeout_seconds)

    def group(name: str) -> Group:
        ranks = mine[name]
        assert ranks is not None
        process_group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend or _BACKENDS[device.type], use_local_synchronization=True
        )
        assert process_group is not None
        return Group(process_group, ranks, ranks.index(rank))

    axes = {axis: group(axis) for axis in AXES}

    def joint(name: str, *more: Group) -> Group:
        """Return a group of an axis or of `more` with the same ranks, or build a new group."""
        return next((g for g in (*axes.values(), *more) if g.ranks == mine[name]), None) or group(name)

    data_context, amax, tensor_context = joint("data_context"), joint("amax"), joint("tensor_context")
    # A separate communicator, so that tokens do not wait for gradients that are reduced at the same time.
    expert = group("expert") if expert_model_parallel_size * expert_tensor_parallel_size > 1 else joint("expert")
    expert_data = joint("expert_data", data_context, amax)
    fsdp_shard, fsdp_shard_backward = joint("fsdp_shard", data_context), group("fsdp_shard")
    expert_shard = joint("expert_shard", fsdp_shard, expert_data)
    return ParallelState(
        device=device,
        rank=rank,
        world_size=world_size,
        world=Group(world, tuple(range(world_size)), rank),
        **axes,
        pipeline_backward=group("pipeline"),
        data_context=data_context,
        fsdp_shard=fsdp_shard,
        fsdp_shard_backward=fsdp_shard_backward,
        fsdp_replicate=joint("fsdp_replicate", data_context),
        model=joint("model"),
        tensor_context=tensor_context,
        amax=amax,
        expert=expert,
        expert_tensor=joint("expert_tensor", expert),
        expert_data=expert_data,
        expert_amax=joint("expert_amax", data_context, amax, expert_data),
        expert_rows=joint("expert_rows", tensor_context, expert),
        expert_shard=expert_shard,
        expert_shard_backward=fsdp_shard_backward if expert_shard is fsdp_shard else group("expert_shard"),
        # This group comes last: torch numbers a rank's groups in their names, and not every rank has this group.
        embedding=group("embedding") if mine["embedding"] else None,
    )


def host_group(timeout_seconds: float = 600.0) -> ProcessGroup:
    """Build a gloo group of the whole job, for communication by a thread other than the training thread. Collective."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))


def rejoin(device_type: str, timeout_seconds: float = 600.0) -> None:
    """Leave all groups and join the same job again, so that groups of another layout can be built. Collective.

    Objects that hold a group must not be used after this.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # New groups get the same names as before, and the store has stale addresses under these names.
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    if device_type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # wait on the host until all ranks are done with the groups
    destroy_model_parallel()
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def destroy_model_parallel() -> None:
    """Destroy the groups and leave the job."""
    global _DESTROYED
    if dist.is_initialized():
        dist.destroy_process_group()
        _DESTROYED = True


def _forget_meshes() -> None:
    """Clear torch's cache of operations on DTensors.

    Meshes of the same ranks compare equal, so cached results would contain groups of an earlier job in this process.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imported here: it takes a second

    _clear_sharding_prop_cache()
