"""FP8 layers of any model under `parallelize_module`, against the model on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from megafp8 import fp8
from megafp8.parallel import collectives
from megafp8.parallel.tensor.dtensor import Fp8ColwiseParallel, Fp8RowwiseParallel, PrepareFp8ModuleInput
from tests.fp8.test_convert import RECIPES, in_fp8, sgd
from tests.marks import slow_but
from tests.world import World

H, F_, S, B = 64, 128, 128, 2


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, F_, bias=bias), nn.Linear(H, F_, bias=bias)
        self.down = nn.Linear(F_, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def trained(model: nn.Module, slices: Any, steps: int) -> list[float]:
    """Losses of steps on a regression; `slices`: this rank's part of a tensor of all tokens."""
    optimizer, losses = sgd(model), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, target = (torch.randn(B, S, H, generator=generator) for _ in range(2))
        loss = (in_fp8(model, slices(x)) - slices(target)).square().sum() / target.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _on_ranks(name: str, sequence_parallel: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = fp8.convert(MLP(bias=True), RECIPES[name], skip=())
    mesh = init_device_mesh("cpu", (2,))
    layouts = Shard(1) if sequence_parallel else None
    plan = {
        "gate": Fp8ColwiseParallel(),
        "up": Fp8ColwiseParallel(),
        "down": Fp8RowwiseParallel(output_layouts=layouts),
    }
    if sequence_parallel:
        plan |= {"": PrepareFp8ModuleInput()}
    parallelize_module(model, mesh, plan)
    rank = distributed.get_rank()
    gathered: list[torch.dtype] = []  # of the module's input
    original = collectives._ALL_GATHER

    def counted(out: Tensor, x: Tensor, **options: Any) -> Any:
        if out.numel() == B * S * H:
            gathered.append(out.dtype)
        return original(out, x, **options)

    def slices(x: Tensor) -> Tensor:
        return x.chunk(2, dim=1)[rank] if sequence_parallel else x

    collectives._ALL_GATHER = counted
    try:
        losses = trained(model, slices, 3)
    finally:
        collectives._ALL_GATHER = original
    if sequence_parallel and name in ("delayed", "current"):
        assert gathered
        assert set(gathered) == {torch.uint8}
    if sequence_parallel:
        total = torch.tensor(losses)
        distributed.all_reduce(total)
        losses = total.tolist()
    fp8.end_step(model)
    full = [p.full_tensor().sum().item() for p in model.parameters()]
    return losses, full, {name: tensor.tolist() for name, tensor in fp8.state_dict(model).items()}


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    slow_but([(name, flag) for name in RECIPES if name != "nvfp4" for flag in (False, True)], ("delayed", True)),
)
def test_two_ranks_train_like_one(world2: World, name: str, sequence_parallel: bool) -> None:
    """Within the order of fp32 sums: all scales are those of whole tensors."""
    torch.manual_seed(0)
    model = fp8.convert(MLP(bias=True), RECIPES[name], skip=())
    losses = trained(model, lambda x: x, 3)
    fp8.end_step(model)
    parameters = [p.sum().item() for p in model.parameters()]
    for mine, full, state in world2.run(_on_ranks, name, sequence_parallel):
        assert mine == pytest.approx(losses, rel=2e-4)
        assert full == pytest.approx(parameters, rel=1e-3, abs=1e-3)
        for key, tensor in fp8.state_dict(model).items():
            assert state[key] == pytest.approx(tensor.tolist(), rel=1e-3), key
