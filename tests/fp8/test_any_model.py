"""Stock models of transformers, converted: 50 steps in every layout, against the same training on one rank.

Bits are compared where the arithmetic is the same. Elsewhere sums are in another order: a last bit of fp32 that moves a
value over a rounding boundary of FP8 changes it by a sixteenth, and later steps multiply that. So single losses are
compared in the first steps, later their mean; and with SGD, for AdamW's steps are as large for the smallest gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megafp8 import fp8
from megafp8.parallel.data.fp8_all_gather import gather_in_fp8
from megafp8.parallel.tensor.dtensor import Fp8ColwiseParallel, Fp8RowwiseParallel
from tests.fp8.test_convert import RECIPES, VOCAB, _shard, batches, mixtral
from tests.world import World

STEPS = 50


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "mixtral": mixtral}


def train(model: nn.Module, parts: int, part: int | None, run: nn.Module | None = None) -> list[float]:
    """Losses of steps, this rank's `part` of `parts` of each batch; None: all of them, one after the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for tokens in batches(STEPS):
        chunks = tokens.chunk(parts) if part is None else [tokens.chunk(parts)[part]]
        total = 0.0
        for chunk in chunks:
            with fp8.autocast():
                loss = (model if run is None else run)(input_ids=chunk, labels=chunk, use_cache=False).loss
            loss.backward()
            total += loss.item() / len(chunks)
        for parameter in model.parameters() if part is None else ():
            if parameter.grad is not None:
                parameter.grad /= len(chunks)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_close(losses: list[float], expected: list[float]) -> None:
    assert losses[:8] == pytest.approx(expected[:8], rel=2e-3)
    assert sum(losses) == pytest.approx(sum(expected), rel=1e-2)


def _data_parallel(name: str, recipe: str, how: str) -> list[float]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = fp8.convert(MODELS[name](), RECIPES[recipe])
    run: nn.Module = model
    if how == "ddp":
        run = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            _shard(layer)
        _shard(model)
        if how == "fsdp in fp8":
            gather_in_fp8(model)
    losses = torch.tensor(train(model, ranks, rank, run))
    distributed.all_reduce(losses)
    return (losses / ranks).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_data_parallel(world2: World, name: str, recipe: str) -> None:
    expected = train(fp8.convert(MODELS[name](), RECIPES[recipe]), 2, None)
    results = {how: world2.run(_data_parallel, name, recipe, how)[0] for how in ("ddp", "fsdp")}
    for losses in results.values():
        assert_close(losses, expected)
        assert losses[-1] < 0.9 * losses[0]
    if recipe != "rowwise" and name == "llama":
        assert world2.run(_data_parallel, name, recipe, "fsdp in fp8")[0] == results["fsdp"]


def _tensor_parallel(name: str, recipe: str) -> list[float]:
    model = fp8.convert(MODELS[name](), RECIPES[recipe])
    column, row = Fp8ColwiseParallel(), Fp8RowwiseParallel()
    attention = {f"self_attn.{part}_proj": column for part in "qkv"} | {"self_attn.o_proj": row}
    mlp = {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row} if name == "llama" else {}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), attention | mlp)
    return train(model, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_tensor_parallel(world2: World, name: str, recipe: str) -> None:
    expected = train(fp8.convert(MODELS[name](), RECIPES[recipe]), 1, None)
    for losses in world2.run(_tensor_parallel, name, recipe):
        assert_close(losses, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_compiled(recipe: str) -> None:
    expected = train(fp8.convert(llama(), RECIPES[recipe]), 1, None)
    torch._dynamo.reset()
    model, counter = fp8.convert(llama(), RECIPES[recipe]), CompileCounterWithBackend("aot_eager")
    assert train(model, 1, None, torch.compile(model, backend=counter, fullgraph=True)) == expected
    assert counter.frame_count == 1


class Half(nn.Module):
    """A stage of a pipeline."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def regression_loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _pipeline(recipe: str) -> tuple[list[float], float]:
    rank = distributed.get_rank()
    groups = [distributed.new_group([i]) for i in range(2)]  # ranks that run the same layers
    stage = fp8.convert(Half(rank), RECIPES[recipe], skip=())
    x, y = (torch.zeros(16, 32, requires_grad=needed) for needed in (rank == 1, True))
    # Given, so that torch does not run the stage to find shapes.
    pipeline_stage = PipelineStage(stage, rank, 2, torch.device("cpu"), input_args=x, output_args=y)
    schedule = Schedule1F1B(pipeline_stage, 2, loss_fn=regression_loss)
    optimizer, generator = torch.optim.SGD(stage.parameters(), lr=0.1), torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        x, target = (torch.randn(32, 32, generator=generator) for _ in range(2))
        losses: list[Tensor] = []
        with fp8.autocast(group=groups[rank]):
            schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return found, sum(p.double().sum().item() for p in stage.parameters())


@pytest.mark.parametrize("recipe", ["delayed"])
def test_stages_of_a_pipeline(world2: World, recipe: str) -> None:
    model = nn.Sequential(*(fp8.convert(Half(seed), RECIPES[recipe], skip=()) for seed in range(2)))
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(3)
    expected = []
    for _ in range(3):
        x, target = (torch.randn(32, 32, generator=generator) for _ in range(2))
        for x_part, target_part in zip(x.chunk(2), target.chunk(2), strict=True):
            with fp8.autocast():
                loss = regression_loss(model(x_part), target_part)
            loss.backward()
            expected.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    first, last = world2.run(_pipeline, recipe)
    assert last[0] == expected
    for (_, total), stage in zip((first, last), model, strict=True):
        assert total == sum(p.double().sum().item() for p in stage.parameters())
