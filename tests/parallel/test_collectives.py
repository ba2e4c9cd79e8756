"""Collectives over real ranks, as the backend needs them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel import collectives
from tests.world import World

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def _gather_uncoalesced() -> None:
    """All-gathers of several dtypes and sizes, none of rows too, while coalescing is an error."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    tensors = [torch.full((rows, 3), rank + 1.0).to(dtype) for dtype in DTYPES for rows in (0, 1, 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_coalescing_manager", lambda **kwargs: pytest.fail("coalesced on gloo"))
        runs = [collectives.all_gather_async(tensors, group) for _ in range(4)]
    for outs, work in runs:
        work.wait()
        for out, x in zip(outs, tensors):
            expected = torch.cat([torch.full((len(x), 3), 1.0 + i) for i in range(group.size())])
            assert out.dtype == x.dtype
            assert torch.equal(out.double(), expected.double())


def test_gloo_gathers_without_coalescing(world2: World) -> None:
    """Two coalesced all-gathers of a gloo group that end at once corrupt memory: a crash in some 10,000 to 100,000."""
    world2.run(_gather_uncoalesced)
