"""The engine on real ranks against the same model run whole, in float64."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megafp8.parallel_state import Group, initialize_distributed, initialize_model_parallel
from megafp8.pipeline_parallel.engine import PipelineEngine, StageOutput
from megafp8.pipeline_parallel.schedules import forward_only, one_f_one_b, with_communication
from megafp8.pipeline_parallel.split import stage_layers
from tests.world import World

LAYERS, ROWS, WIDTH = 5, 3, 4
CPU = torch.device("cpu")


def _layers() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
    return layers


def _microbatches(m: int, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
    """For each micro-batch input and target, `[2, rows, WIDTH]`."""
    generator = torch.Generator().manual_seed(11 + seed)
    return [torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator) for _ in range(m)]


def _whole_model(m: int, seed: int = 0, rows: int = ROWS) -> tuple[list[float], list[Tensor]]:
    """Losses of each micro-batch and gradients of all parameters, without any pipeline."""
    layers = _layers()
    losses = []
    for x, target in _microbatches(m, seed, rows):
        for layer in layers:
            x = x + torch.tanh(layer(x))
        losses.append(((x - target) ** 2).mean() / m)
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses], _gradients(layers)


def _gradients(layers: list[nn.Linear]) -> list[Tensor]:
    return [cast(Tensor, parameter.grad).cpu() for layer in layers for parameter in layer.parameters()]


class _Stage:
    """This rank's part of the chain; keeps a diary of what happened when."""

    def __init__(self, rank: int, p: int, m: int, device: torch.device = CPU) -> None:
        self.layers = [_layers()[i].to(device) for i in stage_layers(LAYERS, p)[rank]]
        self.is_last, self.m = rank == p - 1, m
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []  # outputs there, at each forward
        self.diary: list[str] = []
        self.layers[0].weight.register_post_accumulate_grad_hook(lambda _: self.diary.append("backward"))

    def __call__(self, x: Tensor | None, microbatch: Tensor) -> StageOutput:
        self.alive.append(sum(not storage.expired() for storage in self.outputs))
        data, target = microbatch
        x = data if x is None else x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if not self.is_last:
            self.outputs.append(StorageWeakRef(x.untyped_storage()))
            return StageOutput(x, report="only the last stage reports")
        loss = ((x - target) ** 2).mean() / self.m
        return StageOutput(loss, report=loss.item())


def _train(p: int, m: int, rows: int = ROWS, device: torch.device = CPU) -> dict[str, Any]:
    state = initialize_model_parallel(pipeline_model_parallel_size=p, device=device)
    engine = PipelineEngine(state.pipeline, state.pipeline_backward, (rows, WIDTH), torch.float64, device)
    rank = state.pipeline.rank
    stage = _Stage(rank, p, m, device)
    reports = engine.run(
        with_communication(one_f_one_b(p, m))[rank],
        stage,
        [microbatch.to(device) for microbatch in _microbatches(m, state.data.rank, rows)],
        backward=True,
        before_last_backward=lambda: stage.diary.append("last"),
    )
    return {"reports": reports, "gradients": _gradients(stage.layers), "diary": stage.diary, "alive": stage.alive}


def _assert_equals_whole_model(ranks: list[dict[str, Any]], m: int, seed: int = 0, rows: int = ROWS) -> None:
    losses, gradients = _whole_model(m, seed, rows)
    assert [rank["reports"] for rank in ranks[:-1]] == [[]] * (len(ranks) - 1)
    torch.testing.assert_close(ranks[-1]["reports"], losses, rtol=0, atol=1e-12)
    torch.testing.assert_close([g for rank in ranks for g in rank["gradients"]], gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_whole_model(world4: World, p: int, m: int) -> None:
    ranks = world4.run(_train, p, m, ranks=p, timeout=60)
    _assert_equals_whole_model(ranks, m)
    for rank in ranks:
        assert rank["diary"].count("last") == 1
        assert rank["diary"].count("backward") == m
        assert rank["diary"][-2:] == ["last", "backward"]


def test_a_sent_output_is_freed_before_its_backward(world4: World) -> None:
    """The first of four stages runs four forwards before any backward; only the last output is still being sent."""
    first, *_ = world4.run(_train, 4, 4, timeout=60)
    assert first["alive"] == [0, 1, 1, 1]


def test_two_pipelines_side_by_side(world4: World) -> None:
    """Ranks 0, 2 and 1, 3 are two pipelines with different data: stages count inside their group."""
    ranks = world4.run(_train, 2, 3, timeout=60)
    _assert_equals_whole_model([ranks[0], ranks[2]], 3, seed=0)
    _assert_equals_whole_model([ranks[1], ranks[3]], 3, seed=1)


def _evaluate(p: int, m: int) -> tuple[list[Any], bool]:
    state = initialize_model_parallel(pipeline_model_parallel_size=p)
    engine = PipelineEngine(state.pipeline, state.pipeline_backward, (ROWS, WIDTH), torch.float64, CPU)
    rank = state.pipeline.rank
    stage = _Stage(rank, p, m)
    with_grad: list[bool] = []

    def watched(x: Tensor | None, microbatch: Tensor) -> StageOutput:
        result = stage(x, microbatch)
        with_grad.append(result.output.requires_grad)
        return result

    actions = with_communication(forward_only(p, m))[rank]
    return engine.run(actions, watched, _microbatches(m), backward=False), any(with_grad)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 2), (4, 7)])
def test_an_evaluation_reports_in_order_and_builds_no_graph(world4: World, p: int, m: int) -> None:
    *others, (reports, with_grad) = world4.run(_evaluate, p, m, ranks=p, timeout=60)
    assert others == [([], False)] * (p - 1)
    assert not with_grad
    torch.testing.assert_close(reports, _whole_model(m)[0], rtol=0, atol=1e-12)


def _train_twice(m: int) -> list[Tensor]:
    """Two runs of one engine, gradients accumulating, in bfloat16 as training sends it."""
    state = initialize_model_parallel(pipeline_model_parallel_size=2)
    engine = PipelineEngine(state.pipeline, state.pipeline_backward, (2,), torch.bfloat16, CPU)
    rank = state.pipeline.rank
    weight = nn.Parameter(torch.tensor([2.0, 4.0], dtype=torch.bfloat16))

    def stage(x: Tensor | None, microbatch: Tensor) -> StageOutput:
        y = weight * (microbatch if x is None else x)
        return StageOutput(y.sum() if rank else y)

    for _ in range(2):
        data = [torch.tensor([1.0, float(i)], dtype=torch.bfloat16) for i in range(m)]
        engine.run(with_communication(one_f_one_b(2, m))[rank], stage, data, backward=True)
    assert weight.grad is not None
    return [weight.grad]


def test_bfloat16_and_accumulation_over_runs(world2: World) -> None:
    # d(w1 * w0 * x)/dw is (other weight) * x, summed over x = (1, i), i = 0, 1, 2, and over two runs; exact in bfloat16
    expected = torch.tensor([2.0 * 2 * 3, 4.0 * 2 * 3], dtype=torch.bfloat16)
    assert all(torch.equal(gradient, expected) for (gradient,) in world2.run(_train_twice, 3, timeout=60))


def _alone() -> PipelineEngine:
    """An engine of one stage; it never touches its process group."""
    group = Group(cast(Any, None), (0,), 0)
    return PipelineEngine(group, group, (ROWS, WIDTH), torch.float64, CPU)


@pytest.mark.parametrize(("m", "backward", "message"), [(1, True, "a micro-batch for every"), (2, False, "backward=")])
def test_arguments_that_do_not_fit_the_schedule(m: int, backward: bool, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _alone().run(one_f_one_b(1, 2)[0], _Stage(0, 1, 2), _microbatches(m), backward=backward)


def test_an_error_in_a_stage_propagates() -> None:
    def stage(x: Tensor | None, microbatch: Tensor) -> StageOutput:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        _alone().run(one_f_one_b(1, 2)[0], stage, _microbatches(2), backward=True)


def _nccl_rank(local_rank: int, ranks: int, port: int, p: int, m: int, rows: int, folder: Path) -> None:
    os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(local_rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    device = initialize_distributed("cuda", timeout_seconds=60)
    torch.save(_train(p, m, rows, device), folder / f"{local_rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2, 7])
@pytest.mark.parametrize("p", [2, 4])
def test_over_nccl(tmp_path: Path, p: int, m: int) -> None:
    """Tensors of 10 MB: a send of that size ends only when its receive runs, so a wrong order would hang here."""
    if torch.cuda.device_count() < p:
        pytest.skip(f"needs {p} GPUs")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rows = 300_000
    torch.multiprocessing.spawn(_nccl_rank, (p, port, p, m, rows, tmp_path), nprocs=p)
    _assert_equals_whole_model([torch.load(tmp_path / f"{rank}.pt") for rank in range(p)], m, rows=rows)
