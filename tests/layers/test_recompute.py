"""Which blocks save memory, and how."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.config import ParallelConfig
from megafp8.layers.recompute import KEEP_ALL, BlockMemory, block_memory

FULL = BlockMemory(full=True)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, [KEEP_ALL] * 3),
        ({"recompute": "full", "recompute_blocks": 2}, [FULL, FULL, KEEP_ALL]),
        ({"recompute": "full"}, [FULL, FULL]),
        ({"recompute": "full", "recompute_blocks": 2}, [FULL]),
        ({"recompute": "selective"}, [BlockMemory(norms=True, activation=True)]),
        (
            {"recompute": "selective", "recompute_ops": ["attention"], "recompute_blocks": 1},
            [BlockMemory(attention=True), KEEP_ALL],
        ),
        (
            {"recompute": "full", "recompute_blocks": 1, "offload": 2},
            [BlockMemory(full=True, offload=True), BlockMemory(offload=True), KEEP_ALL],
        ),
        ({"offload": True}, [BlockMemory(offload=True)] * 2),
        ({"offload": 1}, [BlockMemory(offload=True), KEEP_ALL]),
    ],
)
def test_block_memory(parallel: dict[str, Any], expected: list[BlockMemory]) -> None:
    assert block_memory(ParallelConfig(**parallel), len(expected)) == expected
