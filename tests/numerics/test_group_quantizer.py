"""Casts of all experts at once where ranks have shards of each expert's matrices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.numerics.group_quantizer import GroupQuantizer
from megafp8.numerics.groups import RowGroups
from megafp8.numerics.recipes.base import Fp8Tensor, RecipeQuantizer
from megafp8.numerics.recipes.current import CurrentScaling
from megafp8.numerics.sources import Plain
from tests.world import World


def _cast() -> tuple[Tensor, Tensor]:
    """FP8 data, as bytes, of this rank's columns of three experts' rows, and the experts' scales.

    In the first expert's rows the first rank has the largest element, in the second's the last rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x_mk = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    x_mk[3, 5], x_mk[20, 60] = 300.0, -900.0
    group = dist.group.WORLD if ranks > 1 else None
    tensors = [Fp8Tensor(f"experts.{e}.down", "input", group, None) for e in range(3)]
    joined = GroupQuantizer.join([RecipeQuantizer(CurrentScaling(), tensor, torch.device("cpu")) for tensor in tensors])
    assert joined is not None
    row_groups = RowGroups(torch.tensor([16, 40, 48], dtype=torch.int32), 384)
    own = x_mk.chunk(ranks, dim=1)[rank].contiguous()
    cast = joined(Plain(own), row_groups, rowwise=True, columnwise=False).required_rowwise
    return cast.data.view(torch.uint8), cast.scale_inv


def test_ranks_with_shards_of_experts_cast_as_one_rank_does(world2: World) -> None:
    """The scale of an expert is that of the largest element on any rank.

    https://github.com/pytorch/torchtitan/issues/3109
    """
    ((data, scale_inv),) = world2.run(_cast, ranks=1)
    shards = world2.run(_cast)
    assert torch.equal(torch.cat([shard for shard, _ in shards], dim=1), data)
    assert all(torch.equal(scales, scale_inv) for _, scales in shards)
