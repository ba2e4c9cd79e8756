"""How a run's tensor-parallel layers overlap communication with GEMMs."""

from __future__ import annotations

import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch

from megafp8.config import ParallelConfig
from megafp8.parallel import tp_overlap
from megafp8.parallel.parallel_state import Group, initialize_distributed, initialize_model_parallel
from megafp8.parallel.tp_overlap import Collective, ReplicatedTokens
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


SPANS = "parallel.overlap_tensor = auto: a tensor-parallel group spans hosts; continuing with none"


def _chosen(options: dict[str, Any], device: str, ranks_of_host: str) -> tuple[type, list[str]]:
    """The overlap of a run, and what the log says of it."""
    parallel = initialize_model_parallel(2, device=initialize_distributed("cpu"))
    logger, handler = logging.getLogger("megafp8.training.overlap"), BufferingHandler(1000)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    state, environment = replace(parallel, device=torch.device(device)), {"LOCAL_WORLD_SIZE": ranks_of_host}
    found = build_tp_overlap(ParallelConfig(tensor=2, **options), state, environment)
    logger.removeHandler(handler)
    return type(found), [record.getMessage() for record in handler.buffer]


@pytest.mark.parametrize(
    ("options", "device", "ranks_of_host", "expected", "messages"),
    [
        pytest.param({}, "cpu", "2", Collective, [], id="auto on CPU"),
        pytest.param({}, "cuda", "1", Collective, [SPANS], id="auto over hosts"),
        pytest.param({"overlap_tensor": "none"}, "cuda", "2", Collective, [], id="none"),
        pytest.param({"sequence_parallel": False}, "cuda", "2", ReplicatedTokens, [], id="auto with whole tokens"),
    ],
)
def test_what_each_run_gets(
    world2: World, options: dict[str, Any], device: str, ranks_of_host: str, expected: type, messages: list[str]
) -> None:
    assert world2.run(_chosen, options, device, ranks_of_host) == [(expected, messages)] * 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_partial_sums_are_added_by_the_kernel_on_cuda_only(device: str) -> None:
    partials = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    sum_partials = sum_partials_on(torch.device(device))
    assert (sum_partials is tp_overlap.sum_partials) is (device == "cpu")
    assert sum_partials(partials).tolist() == [4.0, 6.0]
