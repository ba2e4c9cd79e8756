"""Parameters in buckets: they keep their values, and modules wait for what the ranks have updated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafp8.parallel.data.buckets import bucket_layout
from megafp8.parallel.data.param_buffer import ParamBuffer
from tests.tiny_model import make_param
from tests.world import World


class _Layer(nn.Module):
    def __init__(self, *params: nn.Parameter) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self) -> list[float]:
        return [param.view(-1)[-1].item() for param in self.params]


def _buffer(params: list[nn.Parameter], ranks: int = 1) -> ParamBuffer:
    group = dist.group.WORLD if ranks > 1 else None
    return ParamBuffer(params, bucket_layout([p.numel() for p in params], 64, ranks=ranks), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_keep_their_values_and_become_views_of_buckets(dtype: torch.dtype) -> None:
    params = [make_param(f"p{i}", np.random.default_rng(i).normal(size=(3 + i, 5)), dtype) for i in range(4)]
    before = [param.detach().clone() for param in params]
    buffer = _buffer(params)
    for param, values in zip(params, before):
        assert torch.equal(param.detach(), values)
        assert param.requires_grad
        assert param.is_leaf
        assert any(param.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in buffer.buckets)
        assert param.storage_offset() % 64 == 0
    for bucket in buffer.buckets:
        bucket.zero_()
    assert not any(param.any() for param in params)


def _gather_case(dtype: torch.dtype) -> list[list[float]]:
    """Each rank writes its number plus 1 to its slices; the layers see all ranks' when they run."""
    params = [make_param(f"p{i}", 200, dtype) for i in range(4)]
    buffer = _buffer(params, dist.get_world_size())
    layers = [_Layer(params[0], params[3]), _Layer(params[1]), _Layer(params[2])]
    buffer.wait_before(layers)
    for bucket in buffer.buckets:
        bucket.chunk(dist.get_world_size())[dist.get_rank()].fill_(dist.get_rank() + 1)
    buffer.start_gather()
    found = [layer() for layer in layers]
    buffer.start_gather()  # the first one has been waited for
    buffer.wait()
    return [*found, params[1].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_runs_has_what_all_ranks_updated(world2: World, dtype: torch.dtype) -> None:
    for *layers, p1 in world2.run(_gather_case, dtype):
        assert layers == [[2.0, 2.0], [2.0], [2.0]]
        assert p1 == [1.0] * 128 + [2.0] * 72  # 200 elements in a bucket of 256


def test_misuse_is_an_error() -> None:
    params = [make_param(f"p{i}", 8) for i in range(2)]
    with pytest.raises(AssertionError, match="no module would wait for"):
        _buffer(params).wait_before([_Layer(params[0])])
    with pytest.raises(AssertionError, match="several dtypes"):
        _buffer([params[0], make_param("b", 8, torch.bfloat16)])
