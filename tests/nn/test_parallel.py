"""Modules sharded over two ranks against the same module on one: outputs and all gradients, in FP8 too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megafp8 import fp8, nn
from megafp8.parallel.collectives import all_gather, all_reduce
from tests.nn.compare import CPU64, random, randomized
from tests.world import World

S, B, H, F = 32, 1, 32, 64
OPTIONS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": "decoder", **CPU64}


def _shard(name: str, whole: Tensor, local: Any, gated: bool) -> Tensor:
    """This rank's part of a parameter; fc1 of a gated activation has part of gate and of up."""
    if whole.shape == local.shape:
        return whole
    rank = distributed.get_rank()
    if gated and "fc1" in name:
        return torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
    return whole.chunk(2, dim=local.partition_dim)[rank]


def _compare(sequence_parallel: bool, recipe: fp8.Fp8Recipe | None, tolerance: float, **options: Any) -> None:
    group = distributed.group.WORLD
    gated = "glu" in options.get("activation", "")
    whole = randomized(nn.TransformerLayer(H, F, 4, **OPTIONS, **options))
    sharded = nn.TransformerLayer(
        H, F, 4, tp_size=2, set_parallel_mode=True, sequence_parallel=sequence_parallel, **OPTIONS, **options
    )
    sharded.set_tensor_parallel_group(group)
    with torch.no_grad():
        for (name, p), (_, local) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
            local.copy_(_shard(name, p, local, gated))

    def mine(x: Tensor) -> Tensor:
        return x.chunk(2)[distributed.get_rank()] if sequence_parallel else x

    inputs = [random(S, B, H), random(S, B, H, seed=1)]
    for_whole = [x.clone().requires_grad_() for x in inputs]
    for_sharded = [mine(x).clone().requires_grad_() for x in inputs]
    with fp8.autocast(enabled=recipe is not None, recipe=recipe):
        expected, actual = (
            f(x, encoder_output=memory) for f, (x, memory) in ((whole, for_whole), (sharded, for_sharded))
        )
    dy = random(S, B, H, seed=2)
    expected.backward(dy)
    actual.backward(mine(dy))
    if sequence_parallel:
        actual = all_gather(actual.detach(), group)

    def close(a: Tensor | None, b: Tensor | None, name: str) -> None:
        assert a is not None, name
        assert b is not None, name
        error = float((a - b).norm() / (1 + b.norm()))  # a key bias has the gradient 0
        assert error <= tolerance, f"{name}: {error}"

    close(actual.detach(), expected.detach(), "output")
    for x, y in zip(for_sharded, for_whole, strict=True):
        close(all_gather(x.grad, group) if sequence_parallel else x.grad, y.grad, "input")
    for (name, p), (_, local) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        grad = all_reduce(local.grad.clone(), group) if getattr(local, "sequence_parallel", False) else local.grad
        close(grad, _shard(name, p.grad, local, gated), name)


def _all() -> None:
    _compare(False, None, 1e-10, num_gqa_groups=2)
    _compare(True, None, 1e-10, activation="swiglu", apply_residual_connection_post_layernorm=True)
    # With one scale per tensor all ranks quantize as one does.
    _compare(True, fp8.CurrentScaling(), 1e-9, activation="swiglu", bias=False, normalization="RMSNorm")
    _compare(False, fp8.CurrentScaling(), 1e-9, fuse_qkv_params=True)


def test_two_ranks_are_as_one(world2: World) -> None:
    world2.run(_all)


def _trained(model: Any, layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Parameters after four steps of two micro-batches."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for _ in range(4):
        for part in x.chunk(2, dim=1):
            with fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=2)):
                y = model(part)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in layer.parameters()]


def _data_parallel() -> None:
    """Two ranks with the same samples have the gradients of one."""
    options = OPTIONS | {"layer_type": "encoder", "params_dtype": torch.float32, "activation": "swiglu"}
    start, x = randomized(nn.TransformerLayer(H, F, 4, **options)), random(S, 2 * B, H).float()
    one = copy.deepcopy(start)
    expected = _trained(one, one, x)
    replicated = copy.deepcopy(start)
    for actual in (
        _trained(DistributedDataParallel(replicated), replicated, x),
        *(_trained(sharded, sharded, x) for sharded in map(_sharded, [start, start], [True, False])),
    ):
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _sharded(layer: torch.nn.Module, reshard: bool) -> torch.nn.Module:
    return fully_shard(copy.deepcopy(layer), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)


def test_ddp_and_fsdp2(world2: World) -> None:
    world2.run(_data_parallel)
