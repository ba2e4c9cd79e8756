"""Which `TPOverlap` a run's layers get."""

from __future__ import annotations

import logging
from dataclasses import replace
from logging.handlers import BufferingHandler

import pytest
import torch

from megafp8.config import ParallelConfig
from megafp8.distributed.tp_overlap import Collective, P2PRing, Replicated
from megafp8.parallel_state import Group, initialize_distributed, initialize_model_parallel
from megafp8.training.overlap import build_tp_overlap, on_one_host, sum_partials_on
from tests.kernels import DEVICE  # before the kernels: it chooses the interpreter where there is no GPU
from tests.world import World


@pytest.mark.parametrize(
    ("ranks", "local", "expected"),
    [((0, 1), "8", True), ((6, 7), "8", True), ((7, 8), "8", False), ((8, 15), "8", True), ((0, 1), None, False)],
)
def test_hosts(ranks: tuple[int, ...], local: str | None, expected: bool) -> None:
    group = Group(None, ranks, 0)  # type: ignore[arg-type]
    assert on_one_host(group, {} if local is None else {"LOCAL_WORLD_SIZE": local}) is expected


def _chosen() -> dict[str, tuple[str, list[str]]]:
    parallel = initialize_model_parallel(2, device=initialize_distributed("cpu"))
    gpus = replace(parallel, device=torch.device("cuda"))
    logger = logging.getLogger("megafp8.training.overlap")
    logger.setLevel(logging.INFO)
    found = {}
    for name, config, state, environment in (
        ("auto on CPU", ParallelConfig(tensor=2), parallel, {"LOCAL_WORLD_SIZE": "2"}),
        ("auto over hosts", ParallelConfig(tensor=2), gpus, {"LOCAL_WORLD_SIZE": "1"}),
        ("none", ParallelConfig(tensor=2, overlap_tensor="none"), gpus, {"LOCAL_WORLD_SIZE": "2"}),
        ("chunked", ParallelConfig(tensor=2, overlap_tensor="chunked"), parallel, {}),
        ("auto, whole tokens", ParallelConfig(tensor=2, sequence_parallel=False), gpus, {"LOCAL_WORLD_SIZE": "2"}),
    ):
        handler = BufferingHandler(1000)
        logger.addHandler(handler)
        found[name] = (
            type(build_tp_overlap(config, state, environment)).__name__,
            [record.getMessage() for record in handler.buffer],
        )
        logger.removeHandler(handler)
    return found


def test_what_each_run_gets(world2: World) -> None:
    for found in world2.run(_chosen):
        assert found["auto on CPU"] == (Collective.__name__, [])
        spans = "parallel.overlap_tensor = auto: a tensor-parallel group spans hosts; continuing with none"
        assert found["auto over hosts"] == (Collective.__name__, [spans])
        assert found["none"] == (Collective.__name__, [])
        assert found["chunked"] == (P2PRing.__name__, [])
        assert found["auto, whole tokens"] == (Replicated.__name__, [])


def test_partial_sums_are_added_by_the_kernel_on_cuda_only() -> None:
    partials = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    assert sum_partials_on(torch.device("cuda")) is not sum_partials_on(torch.device("cpu"))
    for device in ("cuda", "cpu"):
        assert sum_partials_on(torch.device(device))(partials).tolist() == [4.0, 6.0]
