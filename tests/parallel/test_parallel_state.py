"""Groups: the lists of ranks for worlds of any size, and the process groups of real ranks."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.config import load_config
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import (
    AXES,
    initialize_distributed,
    initialize_model_parallel,
    rank_groups,
    set_cuda_environment,
)
from megafp8.training import validate
from tests.world import World
from tools import quickstart

ROOT = Path(__file__).resolve().parents[2]


def test_groups_of_sixteen_ranks_by_hand() -> None:
    groups = rank_groups(16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert groups["tensor"] == groups["tensor_context"] == [[2 * i, 2 * i + 1] for i in range(8)]
    assert groups["data"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["pipeline"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert groups["model"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert groups["amax"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["embedding"] == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert groups["context"] == [[i] for i in range(16)]


def test_groups_of_eight_ranks_with_context_by_hand() -> None:
    groups = rank_groups(8, tensor_model_parallel_size=2, context_parallel_size=2)
    assert groups["context"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["tensor_context"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["data"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["data_context"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_groups_of_two_replicas_by_hand() -> None:
    """Shards are on neighbours, so that they are on one host, and context-parallel ranks hold shards too."""
    groups = rank_groups(16, tensor_model_parallel_size=2, context_parallel_size=2, fsdp_replicas=2)
    assert groups["data_context"] == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert groups["fsdp_shard"] == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert groups["fsdp_replicate"] == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]
    assert rank_groups(8, 2, 2)["fsdp_shard"] == rank_groups(8, 2, 2)["data_context"]


def test_groups_of_experts_by_hand() -> None:
    """Neighbours over all axes of a stage but the pipeline's, as Megatron-Core folds them."""
    groups = rank_groups(16, 2, 2, context_parallel_size=2, expert_model_parallel_size=4)
    assert groups["expert"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["expert_data"] == [[i, i + 4] for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert rank_groups(8, 2)["expert_data"] == rank_groups(8, 2)["amax"]
    cut = rank_groups(16, 2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    assert cut["expert"] == groups["expert"]
    assert cut["expert_tensor"] == [[i, i + 1] for i in range(0, 16, 2)]
    assert cut["expert_model"] == [[i, i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert cut["expert_amax"] == [[i, i + 1, i + 4, i + 5] for i in (0, 2, 8, 10)]
    assert cut["expert_rows"] == cut["expert_tensor"]  # 4 ranks of experts have the tokens of 2 micro-batches
    rows = rank_groups(16, 2, context_parallel_size=4, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    assert rows["expert_rows"] == [[i, i + 1, i + 4, i + 5] for i in (0, 2, 8, 10)]
    assert rank_groups(12, 2, context_parallel_size=3, expert_model_parallel_size=4)["expert_rows"] == [
        [i] for i in range(12)
    ]
    sharded = rank_groups(8, fsdp_replicas=2, expert_model_parallel_size=2)
    assert sharded["expert_data"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sharded["expert_shard"] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert sharded["fsdp_replicate"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="fsdp_replicas is 2; it must divide the 1 ranks of data × context × tensor t"):
        rank_groups(2, fsdp_replicas=2, expert_model_parallel_size=2)
    with pytest.raises(ValueError, match="expert_model_parallel_size is 3; it must divide the 8 ranks of data × cont"):
        rank_groups(8, 2, expert_model_parallel_size=3)


sizes = st.integers(1, 3)


@given(tp=sizes, pp=sizes, cp=sizes, dp=sizes, replicas=sizes, ep=st.sampled_from([1, 2, 4]), etp=sizes)
def test_every_group_partitions_the_world(tp: int, pp: int, cp: int, dp: int, replicas: int, ep: int, etp: int) -> None:
    world = tp * pp * cp * dp * replicas
    etp = math.gcd(etp, tp * cp * dp)
    ep = math.gcd(ep, tp * cp * dp // etp)
    groups = rank_groups(
        world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        fsdp_replicas=replicas, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )  # fmt: skip
    for name, lists in groups.items():
        flat = [rank for ranks in lists for rank in ranks]
        assert len(flat) == len(set(flat)), name
        if name != "embedding":
            assert sorted(flat) == list(range(world)), name
    # The axes are orthogonal: their groups share at most one rank.
    pairs = [
        *itertools.combinations(AXES, 2), *itertools.combinations(("expert_model", "expert_tensor", "expert_data"), 2),
        ("fsdp_shard", "fsdp_replicate"), ("expert_shard", "fsdp_replicate"),
    ]  # fmt: skip
    for a, b in pairs:
        assert all(len(set(x) & set(y)) <= 1 for x in groups[a] for y in groups[b])


def test_sixteen_thousand_ranks_need_no_process_group() -> None:
    groups = rank_groups(16384, 8, 16)
    assert len(groups["data"]) == 128
    assert groups["pipeline"][0] == [i * 1024 for i in range(16)]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "message"),
    [(6, 4, 1, "world size 6 is not a multiple of tensor 4"), (4, 0, 1, "tensor_model_parallel_size is 0")],
)
def test_sizes_that_do_not_fit(world: int, tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_groups(world, tp, pp)


@pytest.mark.parametrize("replicas", [0, 3])
def test_replicas_that_do_not_divide_the_ranks(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"fsdp_replicas is {replicas}; it must divide the 4 ranks of data × context"):
        rank_groups(8, 2, context_parallel_size=2, fsdp_replicas=replicas)


def _sums(tp: int, pp: int, cp: int, replicas: int) -> dict[str, tuple[float, int]]:
    """Return the sum of the ranks and this rank's index of each group, by name."""
    state = initialize_model_parallel(tp, pp, context_parallel_size=cp, fsdp_replicas=replicas)
    found = {}
    joint = ("model", "amax", "data_context", "tensor_context", "fsdp_shard", "fsdp_shard_backward", "fsdp_replicate")
    for name in (*AXES, "pipeline_backward", *joint):
        group = getattr(state, name)
        total = all_reduce(torch.tensor([float(state.rank)]), group.group).item()
        found[name] = (total, group.rank)
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "replicas"),
    [
        (1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 2, 4), (2, 1, 2, 1),
        (1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 1, 1),
    ],
)  # fmt: skip
def test_process_groups_are_the_lists(world4: World, tp: int, pp: int, cp: int, replicas: int) -> None:
    expected = rank_groups(4, tp, pp, cp, replicas)
    for rank, found in enumerate(world4.run(_sums, tp, pp, cp, replicas)):
        for name, (total, index) in found.items():
            ranks = next(g for g in expected[name.removesuffix("_backward")] if rank in g)
            assert (total, index) == (sum(ranks), ranks.index(rank)), name


def test_what_cuda_and_nccl_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    queues, register = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER"
    monkeypatch.setenv(queues, "1")  # as Megatron-LM's users have it
    with pytest.raises(ValueError, match=f"{queues}=1, under which .* unset it, or try {queues}=32"):
        set_cuda_environment()
    monkeypatch.setenv(queues, "16")
    monkeypatch.setenv(register, "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    set_cuda_environment()
    assert (os.environ[queues], os.environ[register]) == ("16", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ValueError, match=f"{register}=1, which does not work .* try {register}=0"):
        set_cuda_environment()
    monkeypatch.delenv(queues)
    monkeypatch.delenv(register)
    set_cuda_environment()
    assert (os.environ[queues], os.environ[register]) == ("32", "0")


def test_a_job_sets_its_environment_before_it_looks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER")
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    seen = []

    def look(*_: object) -> None:
        seen.extend(os.environ.get(name) for name in names)
        raise InterruptedError

    monkeypatch.setattr(validate, "open_inputs", look)
    with pytest.raises(InterruptedError):
        validate.validate(load_config(ROOT / "configs/quickstart.yaml"), 1, "test")
    assert seen == ["32", "0"]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError, match=r"this node has 4 processes but 1 GPU, and each process needs one; start 1 .*cpu"
    ):
        initialize_distributed("cuda")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # a driver is installed
    for gpus, expected in ((0, []), (1, ["device=cpu"]), (4, [])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert quickstart.device() == expected
