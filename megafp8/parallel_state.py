"""The grid of ranks and every group cut from it.

The ranks of a job form a grid with four axes, slowest to fastest: pipeline, data, context, tensor. The fastest axis
talks most, so a tensor-parallel group sits on neighbouring ranks (one NVLink domain) and pipeline stages, which talk
least, lie farthest apart. This is Megatron-LM's order "tp-cp-dp-pp" read from the other end.

`rank_groups` is the whole truth and needs no process group: it slices the grid and returns lists of ranks, so the
layout of 16,384 GPUs can be checked on a laptop. `initialize_model_parallel` builds the process groups of exactly those
lists that this rank is in, by one `new_group` each, which only its members call. So a rank's start-up cost does not
grow with the world: torch's own `init_device_mesh` makes every rank go through the groups of all others, some 40,000
of them on 16,384 ranks, and the `DeviceMesh` that torch's libraries ask for is made of our groups instead.

The result is an object, `ParallelState`, and modules are handed the groups they need. The accessors with Megatron-LM's
names at the end of the file serve scripts and notebooks; nothing inside the package calls them.
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
from torch.distributed.device_mesh import DeviceMesh

Ranks = npt.NDArray[np.int_]

AXES = ("pipeline", "data", "context", "tensor")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Groups over several axes: (axes, why it is there).
_JOINT_GROUPS = {
    "data_context": ("data", "context"),  # gradients: a context rank holds other tokens of the same weights
    "model": ("pipeline", "tensor"),  # gradient norm: together they hold one whole model
    "tensor_context": ("context", "tensor"),  # one micro-batch: they hold slices of the same activations
    "amax": ("data", "context", "tensor"),  # delayed scaling: everyone who runs the same layers
}


def rank_groups(
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> dict[str, list[list[int]]]:
    """Every group of a layout as lists of global ranks, in group order. Pure; builds no process group.

    Keys: `tensor`, `context`, `data`, `pipeline` (the axes), `data_context`, `model` (pipeline × tensor),
    `tensor_context`, `amax` (data × context × tensor), `embedding` (first and last stage of each pipeline). The
    data-parallel size is what remains of the world. Raises ValueError where the sizes do not multiply up to the world.
    """
    grid = _grid(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    return {name: ranks.tolist() for name, ranks in _cut(grid).items()}


def _grid(
    world_size: int,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    context_parallel_size: int,
) -> Ranks:
    """All ranks, `[pipeline, data, context, tensor]`. Raises ValueError where the sizes do not fit the world."""
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    model_size = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if world_size < 1 or world_size % model_size:
        raise ValueError(
            f"world size {world_size} is not a multiple of tensor {tensor_model_parallel_size} × pipeline "
            f"{pipeline_model_parallel_size} × context {context_parallel_size} = {model_size} ranks; "
            f"start {model_size * max(1, round(world_size / model_size))} processes or shrink an axis"
        )
    data = world_size // model_size
    shape = (pipeline_model_parallel_size, data, context_parallel_size, tensor_model_parallel_size)
    return np.arange(world_size).reshape(shape)


def _cut(grid: Ranks) -> dict[str, Ranks]:
    """The groups of each name, `[groups, members]`."""

    def along(*axes: str) -> Ranks:
        kept = [AXES.index(axis) for axis in axes]
        rest = [i for i in range(len(AXES)) if i not in kept]
        return grid.transpose(rest + kept).reshape(-1, int(np.prod([grid.shape[i] for i in kept])))

    groups = {axis: along(axis) for axis in AXES}
    groups |= {name: along(*axes) for name, axes in _JOINT_GROUPS.items()}
    pipelines = groups["pipeline"]
    groups["embedding"] = pipelines[:, [0, -1]] if pipelines.shape[1] > 1 else pipelines
    return groups


def _group_of(rank: int, groups: Ranks) -> tuple[int, ...] | None:
    """The one of `groups` that `rank` is in, if there is one."""
    found = groups[(groups == rank).any(axis=1)]
    return tuple(found[0].tolist()) if len(found) else None


@dataclass(frozen=True)
class Group:
    """One group this rank is in: the process group, its global ranks in order, and our place among them."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelState:
    """This rank's place in the grid and its groups. `embedding` is None on ranks between first and last stage.

    `pipeline_backward` has the ranks of `pipeline` but a communicator of its own: activations and gradients flow in
    opposite directions between the same two ranks, and on one communicator a send that waits for a receive queued
    behind another send would deadlock. `data_context_backward` is to `data_context` likewise, for gradients that are
    reduced while weights are gathered.
    """

    mesh: DeviceMesh
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
    data_context_backward: Group
    model: Group
    tensor_context: Group
    amax: Group
    embedding: Group | None
    virtual_pipeline_size: int

    @property
    def is_first_stage(self) -> bool:
        """The first rank of the pipeline; which stages a rank holds is the schedule's placement's matter."""
        return self.pipeline.is_first

    @property
    def is_last_stage(self) -> bool:
        """The last rank of the pipeline."""
        return self.pipeline.is_last


def initialize_distributed(device_type: str, timeout_seconds: float = 600.0) -> torch.device:
    """Join the job that torchrun started (or a job of one process without torchrun) and return this rank's device.

    NCCL on CUDA, with gloo beside it for the host tensors of the world group; gloo alone on CPU.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        # How many streams have a queue of their own on the GPU. By default 8: beyond that they share, and what waits
        # in one stream, a receive for its sender, holds up another. A pipeline has a stream for each neighbour and
        # direction beside those of computation and of every other group, so two ranks could wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    if "RANK" in os.environ:
        # No device_id: it would make torch build each subgroup by splitting the world's communicator, a call that all
        # ranks must join, while ours are made by their members alone. Communicators then connect at their first use.
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    *,
    device: torch.device | None = None,
    timeout_seconds: float = 600.0,
    backend: str | None = None,
) -> ParallelState:
    """Cut the running job into its groups. Call after `torch.distributed` is initialised, once, on every rank.

    `backend`: of the groups; None: gloo on CPU, NCCL on CUDA.

    Raises ValueError, on every rank alike and before any group is built, where the sizes do not fit the world.
    """
    global _STATE
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = device or torch.device("cpu")
    grid = _grid(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    mine = {name: _group_of(rank, groups) for name, groups in _cut(grid).items()}
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
    mesh = DeviceMesh.from_group(
        [axes[axis].group for axis in AXES], device.type, torch.from_numpy(grid), mesh_dim_names=AXES
    )

    def joint(name: str) -> Group:
        """A joint group that is in truth one axis reuses that axis's communicator."""
        return next((g for g in axes.values() if g.ranks == mine[name]), None) or group(name)

    _STATE = ParallelState(
        mesh=mesh,
        device=device,
        rank=rank,
        world_size=world_size,
        world=Group(world, tuple(range(world_size)), rank),
        **axes,
        pipeline_backward=group("pipeline"),
        data_context=joint("data_context"),
        data_context_backward=group("data_context"),
        model=joint("model"),
        tensor_context=joint("tensor_context"),
        amax=joint("amax"),
        # Last: torch puts the number of a rank's groups into the name of its next one, and not every rank has this one.
        embedding=group("embedding") if mine["embedding"] else None,
        virtual_pipeline_size=virtual_pipeline_model_parallel_size or 1,
    )
    return _STATE


def host_group(timeout_seconds: float = 600.0) -> ProcessGroup:
    """A gloo group of the whole job, for a thread that talks beside training. Collective."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))


def destroy_model_parallel() -> None:
    """Forget the groups and leave the job."""
    global _STATE
    _STATE = None
    if dist.is_initialized():
        dist.destroy_process_group()


# --- Megatron-LM's accessor names, for scripts ---------------------------------------------------------------------

_STATE: ParallelState | None = None


def model_parallel_is_initialized() -> bool:
    return _STATE is not None


def get_parallel_state() -> ParallelState:
    """The state built by the last `initialize_model_parallel`."""
    if _STATE is None:
        raise ValueError("model parallel groups are not there yet: call initialize_model_parallel(...) first")
    return _STATE


def get_tensor_model_parallel_group() -> ProcessGroup:
    return get_parallel_state().tensor.group


def get_tensor_model_parallel_rank() -> int:
    return get_parallel_state().tensor.rank


def get_tensor_model_parallel_world_size() -> int:
    return get_parallel_state().tensor.size


def get_pipeline_model_parallel_group() -> ProcessGroup:
    return get_parallel_state().pipeline.group


def get_pipeline_model_parallel_rank() -> int:
    return get_parallel_state().pipeline.rank


def get_pipeline_model_parallel_world_size() -> int:
    return get_parallel_state().pipeline.size


def get_virtual_pipeline_model_parallel_world_size() -> int:
    return get_parallel_state().virtual_pipeline_size


def is_pipeline_first_stage() -> bool:
    return get_parallel_state().is_first_stage


def is_pipeline_last_stage() -> bool:
    return get_parallel_state().is_last_stage


def get_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup:
    state = get_parallel_state()
    return (state.data_context if with_context_parallel else state.data).group


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    state = get_parallel_state()
    return (state.data_context if with_context_parallel else state.data).rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    state = get_parallel_state()
    return (state.data_context if with_context_parallel else state.data).size


def get_context_parallel_group() -> ProcessGroup:
    return get_parallel_state().context.group


def get_context_parallel_rank() -> int:
    return get_parallel_state().context.rank


def get_context_parallel_world_size() -> int:
    return get_parallel_state().context.size


def get_model_parallel_group() -> ProcessGroup:
    return get_parallel_state().model.group


def get_embedding_group() -> ProcessGroup | None:
    embedding = get_parallel_state().embedding
    return None if embedding is None else embedding.group


def get_amax_reduction_group() -> ProcessGroup:
    return get_parallel_state().amax.group
