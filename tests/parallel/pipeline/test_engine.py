"""The engine on real ranks against the same model run whole, in float64."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.parallel.parallel_state import Group, initialize_distributed, initialize_model_parallel
from megafp8.parallel.pipeline.actions import COMPUTE, StagePlacement, loop_placement, v_placement
from megafp8.parallel.pipeline.communication import with_communication
from megafp8.parallel.pipeline.engine import PipelineEngine, StageOutput
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.registry import SCHEDULES, place_stages
from megafp8.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from megafp8.parallel.pipeline.schedules.zb_h1 import zb_h1
from megafp8.parallel.pipeline.split import even, stage_layers
from megafp8.parallel.pipeline.trace import Stopwatch
from tests.marks import slow_but
from tests.ports import free_port
from tests.world import World

LAYERS, ROWS, WIDTH = 12, 3, 4
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
    """One part of the chain; notes which of its outputs are alive."""

    def __init__(self, stage: int, stages: int, m: int, device: torch.device = CPU) -> None:
        self.layers = [_layers()[i].to(device) for i in stage_layers(even(LAYERS, stages))[stage]]
        self.is_last, self.m = stage == stages - 1, m
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []  # outputs there, at each forward

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


def _train(
    name: str, placement: StagePlacement, m: int, rows: int = ROWS, device: torch.device = CPU
) -> dict[str, Any]:
    state = initialize_model_parallel(pipeline_model_parallel_size=placement.num_ranks, device=device)
    groups, wgrads = (state.pipeline, state.pipeline_backward), WgradStore()
    engine = PipelineEngine(*groups, placement, (rows, WIDTH), torch.float64, device, wgrads)
    rank = state.pipeline.rank
    stages = [_Stage(stage, placement.num_stages, m, device) for stage in placement.stages[rank]]
    schedule = with_communication(SCHEDULES[name].build(placement, m), placement)
    stopwatch = Stopwatch(state.pipeline, device)
    reports = engine.run(
        schedule[rank],
        stages,
        [microbatch.to(device) for microbatch in _microbatches(m, state.data.rank, rows)],
        backward=True,
        stopwatch=stopwatch,
    )
    return {
        "reports": reports,
        "gradients": {stage: _gradients(s.layers) for stage, s in zip(placement.stages[rank], stages)},
        "alive": stages[0].alive,
        "spans": stopwatch.timeline().spans,
        "compute": [[a for a in actions if a.kind in COMPUTE] for actions in schedule],
    }


def _assert_equals_whole_model(
    ranks: list[dict[str, Any]], placement: StagePlacement, m: int, seed: int = 0, rows: int = ROWS
) -> None:
    losses, expected = _whole_model(m, seed, rows)
    last = placement.homes[-1][0]
    assert [rank["reports"] for r, rank in enumerate(ranks) if r != last] == [[]] * (len(ranks) - 1)
    torch.testing.assert_close(ranks[last]["reports"], losses, rtol=0, atol=1e-12)
    found = {stage: gradients for rank in ranks for stage, gradients in rank["gradients"].items()}
    flat = [g for stage in sorted(found) for g in found[stage]]
    torch.testing.assert_close(flat, expected, rtol=0, atol=1e-12)


CASES = [
    *(("1f1b", loop_placement(p), m) for p in (1, 2, 4) for m in (1, 2, 7)),
    *(("interleaved", loop_placement(p, v), m) for p, v in ((2, 2), (2, 3), (4, 2), (4, 3)) for m in (1, 3, 8)),
    *(("zb-h1", loop_placement(p), m) for p in (1, 2, 4) for m in (1, 7)),
    *((name, v_placement(p), m) for name in ("zb-v", "dualpipev") for p in (1, 2, 4) for m in (1, 3, 9)),
]


QUICK = [
    case
    for case in CASES
    if len(case[1].stages) > 1 and case[2] not in (1, 2) and (case[1].num_ranks, case[2]) != (4, 3)
]


@pytest.mark.parametrize(
    ("name", "placement", "m"), slow_but(CASES, *QUICK), ids=lambda x: str(getattr(x, "stages", x))
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    world4: World, name: str, placement: StagePlacement, m: int
) -> None:
    ranks = world4.run(_train, name, placement, m, ranks=placement.num_ranks, timeout=60)
    _assert_equals_whole_model(ranks, placement, m)
    for rank in ranks:  # the stopwatch has seen every rank do what its list says, one thing after another
        assert [[span.action for span in spans] for spans in rank["spans"]] == rank["compute"]
        for spans in rank["spans"]:
            assert all(a.start < a.end <= b.start for a, b in itertools.pairwise(spans))
            assert spans[0].start >= 0


def test_a_sent_output_is_freed_before_its_backward(world4: World) -> None:
    """The first of four stages runs four forwards before any backward; only the last output is still being sent."""
    first, *_ = world4.run(_train, "1f1b", loop_placement(4), 4, timeout=60)
    assert first["alive"] == [0, 1, 1, 1]


def test_two_pipelines_side_by_side(world4: World) -> None:
    """Ranks 0, 2 and 1, 3 are two pipelines with different data: stages count inside their group."""
    placement = v_placement(2)
    ranks = world4.run(_train, "zb-v", placement, 3, timeout=60)
    _assert_equals_whole_model([ranks[0], ranks[2]], placement, 3, seed=0)
    _assert_equals_whole_model([ranks[1], ranks[3]], placement, 3, seed=1)


def _evaluate(placement: StagePlacement, m: int) -> tuple[list[Any], bool]:
    state = initialize_model_parallel(pipeline_model_parallel_size=placement.num_ranks)
    engine = PipelineEngine(
        state.pipeline, state.pipeline_backward, placement, shape=(ROWS, WIDTH), dtype=torch.float64, device=CPU
    )
    rank = state.pipeline.rank
    with_grad: list[bool] = []

    def watched(stage: _Stage, x: Tensor | None, microbatch: Tensor) -> StageOutput:
        result = stage(x, microbatch)
        with_grad.append(result.output.requires_grad)
        return result

    stages = [functools.partial(watched, _Stage(s, placement.num_stages, m)) for s in placement.stages[rank]]
    actions = with_communication(forward_only(placement, m), placement)[rank]
    return engine.run(actions, stages, _microbatches(m), backward=False), any(with_grad)


@pytest.mark.parametrize("m", slow_but([1, 3, 7], 1, 7))
@pytest.mark.parametrize(
    "placement",
    [loop_placement(1), loop_placement(4), loop_placement(2, 3), loop_placement(4, 2), v_placement(2), v_placement(4)],
    ids=lambda x: x.stages,
)
def test_an_evaluation_reports_in_order_and_builds_no_graph(world4: World, placement: StagePlacement, m: int) -> None:
    ranks = world4.run(_evaluate, placement, m, ranks=placement.num_ranks, timeout=60)
    reports, with_grad = ranks.pop(placement.homes[-1][0])
    assert ranks == [([], False)] * (placement.num_ranks - 1)
    assert not with_grad
    torch.testing.assert_close(reports, _whole_model(m)[0], rtol=0, atol=1e-12)


def _train_twice(m: int) -> list[Tensor]:
    """Two runs of one engine, gradients accumulating, in bfloat16 as training sends it."""
    state = initialize_model_parallel(pipeline_model_parallel_size=2)
    engine = PipelineEngine(
        state.pipeline, state.pipeline_backward, loop_placement(2), shape=(2,), dtype=torch.bfloat16, device=CPU
    )
    rank = state.pipeline.rank
    weight = nn.Parameter(torch.tensor([2.0, 4.0], dtype=torch.bfloat16))

    def stage(x: Tensor | None, microbatch: Tensor) -> StageOutput:
        y = weight * (microbatch if x is None else x)
        return StageOutput(y.sum() if rank else y)

    for _ in range(2):
        data = [torch.tensor([1.0, float(i)], dtype=torch.bfloat16) for i in range(m)]
        actions = with_communication(one_f_one_b(loop_placement(2), m), loop_placement(2))[rank]
        engine.run(actions, [stage], data, backward=True)
    assert weight.grad is not None
    return [weight.grad]


def test_bfloat16_and_accumulation_over_runs(world2: World) -> None:
    # d(w1 * w0 * x)/dw is (other weight) * x, summed over x = (1, i), i = 0, 1, 2, and over two runs; exact in bfloat16
    expected = torch.tensor([2.0 * 2 * 3, 4.0 * 2 * 3], dtype=torch.bfloat16)
    assert all(torch.equal(gradient, expected) for (gradient,) in world2.run(_train_twice, 3, timeout=60))


def _alone() -> PipelineEngine:
    """An engine of one stage; it never touches its process group."""
    group = Group(cast(Any, None), (0,), 0)
    return PipelineEngine(group, group, loop_placement(1), shape=(ROWS, WIDTH), dtype=torch.float64, device=CPU)


@pytest.mark.parametrize(
    ("build", "m", "backward", "message"),
    [
        (one_f_one_b, 1, True, "a micro-batch for every"),
        (one_f_one_b, 2, False, "backward="),
        (zb_h1, 2, True, "need a store"),
    ],
)
def test_arguments_that_do_not_fit_the_schedule(build: Any, m: int, backward: bool, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _alone().run(build(loop_placement(1), 2)[0], [_Stage(0, 1, 2)], _microbatches(m), backward=backward)


def test_an_error_in_a_stage_propagates() -> None:
    def stage(x: Tensor | None, microbatch: Tensor) -> StageOutput:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        _alone().run(one_f_one_b(loop_placement(1), 2)[0], [stage], _microbatches(2), backward=True)


def _nccl_rank(
    local_rank: int, port: int, name: str, placement: StagePlacement, m: int, rows: int, folder: Path
) -> None:
    os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(placement.num_ranks), LOCAL_RANK=str(local_rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    device = initialize_distributed("cuda", timeout_seconds=60)
    torch.save(_train(name, placement, m, rows, device), folder / f"{local_rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2, 7])
@pytest.mark.parametrize(
    ("name", "placement"),
    [(name, place_stages(name, p, record.least_chunks)) for p in (2, 4) for name, record in SCHEDULES.items()],
    ids=lambda x: str(getattr(x, "stages", x)),
)
def test_over_nccl(tmp_path: Path, name: str, placement: StagePlacement, m: int) -> None:
    """Tensors of 10 MB: a send of that size ends only when its receive runs, so a wrong order would hang here."""
    p = placement.num_ranks
    if torch.cuda.device_count() < p:
        pytest.skip(f"needs {p} GPUs")
    port, rows = free_port(), 300_000
    torch.multiprocessing.spawn(_nccl_rank, (port, name, placement, m, rows, tmp_path), nprocs=p)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(p)]
    _assert_equals_whole_model(ranks, placement, m, rows=rows)
