"""Which blocks spare memory, and how."""

from __future__ import annotations

from megafp8.config import ParallelConfig
from megafp8.models.recompute import KEEP_ALL, BlockMemory, block_memory


def test_nothing_is_spared_unasked() -> None:
    assert block_memory(ParallelConfig(), 3) == [KEEP_ALL] * 3


def test_the_first_blocks_in_full() -> None:
    memory = block_memory(ParallelConfig(recompute="full", recompute_blocks=2), 3)
    assert memory == [BlockMemory(full=True), BlockMemory(full=True), KEEP_ALL]
    assert block_memory(ParallelConfig(recompute="full"), 2) == [BlockMemory(full=True)] * 2
    assert block_memory(ParallelConfig(recompute="full", recompute_blocks=2), 1) == [BlockMemory(full=True)]


def test_by_operation() -> None:
    assert block_memory(ParallelConfig(recompute="selective"), 1) == [BlockMemory(norms=True, activation=True)]
    parallel = ParallelConfig(recompute="selective", recompute_ops=["attention"], recompute_blocks=1)
    assert block_memory(parallel, 2) == [BlockMemory(attention=True), KEEP_ALL]


def test_offload_beside_it() -> None:
    both = block_memory(ParallelConfig(recompute="full", recompute_blocks=1, offload=2), 3)
    assert both == [BlockMemory(full=True, offload=True), BlockMemory(offload=True), KEEP_ALL]
    assert [own.offload for own in block_memory(ParallelConfig(offload=True), 2)] == [True, True]
    assert [own.offload for own in block_memory(ParallelConfig(offload=1), 2)] == [True, False]
