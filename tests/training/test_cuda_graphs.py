"""Replayed steps train what eager ones train, bit for bit.

On a CPU a stand-in takes the place of the graph (`runs.RerunCapture`). So everything but CUDA itself is tested there:
which steps are replayed, the copies of the inputs, what becomes of the results, and every layout.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megafp8.batch import Batch
from megafp8.config import Config, ConfigError
from megafp8.layers.experts import own_rows
from megafp8.parallel.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.parallel.pipeline.engine import StageOutput
from megafp8.training import cuda_graphs
from megafp8.training.cuda_graphs import Graphs
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import choose_device
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config, config_of
from tests.training.runs import (
    Curve,
    LoggedCapture,
    Outcome,
    RankResult,
    RerunGraphs,
    Runs,
    batches,
    result_of,
    start,
    steps_of,
)
from tests.training.runs import (
    train as train_steps,
)
from tests.world import World

# --- with a stand-in for CUDA ----------------------------------------------------------------------------------------

SLOW = [
    DELAYED,
    LAYERS_4 | PP2 | ZB_V | DELAYED,
    FSDP | DP2 | CURRENT | FP8_GATHER,
    SAMPLES_1,
    CURRENT | REPORT_3,
    DP2,
    MOE | BF16 | DP2 | EP2,
    CP2 | DOCUMENTS,
    DP2 | ZERO | DELAYED | FP8_GATHER,
    DP2 | LATE_REDUCE,
    FULL,
    DOCUMENTS | GPT2,
    TP2 | DELAYED,
    DP2 | ZERO | DELAYED,
    DP2 | ZERO | CURRENT | FP8_GATHER | LATE_GATHER,
    NONE,
]
CASES = {  # captures and replays, by hand: the first of five steps is eager, and an evaluation drops the graph
    NONE: (2, 4),
    DELAYED: (2, 4),
    DOCUMENTS | GPT2: (2, 4),
    FULL: (2, 4),
    SAMPLES_1: (2, 4),
    CURRENT | REPORT_3: (2, 3),  # the third step, the first that is sampled, is eager, and drops the graph
    DELAYED | REPORT_2: (3, 3),  # as is the second here; the fourth has a graph, beside the ordinary one
    DP2: (2, 4),
    MOE | BF16 | DP2 | EP2: (2, 4),
    MOE | BF16 | DELAYED | DP2 | EP2 | ALL_TO_ALL: (3, 5),  # a step has more rows for a rank than there is room for
    DP2 | LATE_REDUCE: (2, 4),
    DP2 | ZERO | DELAYED: (2, 4),
    DP2 | ZERO | DELAYED | FP8_GATHER: (2, 4),
    DP2 | ZERO | CURRENT | FP8_GATHER | LATE_GATHER: (2, 4),
    FSDP | DP2 | CURRENT | FP8_GATHER: (2, 4),
    TP2 | DELAYED: (2, 4),
    CP2 | DOCUMENTS: (2, 3),  # a step with another number of gathered keys is eager
    LAYERS_4 | PP2 | ZB_V | DELAYED: (2, 4),
}


@pytest.mark.parametrize("preset", slow_but(CASES, *[preset for preset in CASES if preset not in SLOW]))
def test_replayed_and_eager_steps_are_the_same(runs: Runs, preset: Preset) -> None:
    eager, replayed = runs.of(preset), runs.of(preset | GRAPHS)
    assert replayed.curve == eager.curve
    assert replayed.state == eager.state
    assert len(set(eager.curve)) == len(eager.curve), "the batches of two steps were the same"
    assert {(rank["captures"], rank["replays"]) for rank in replayed.elements} == {CASES[preset]}


def _train_in_parts(settings: Config) -> tuple[RankResult, list[str]]:
    """Train and evaluate twice, with graphs for each part of a step. Also return the names of the recorded parts."""
    with patch.object(cuda_graphs, "MOST_BLOCKS", 1):
        trainer, parallel = start(settings)
        names: list[str] = []
        if trainer.graphs is not None:
            record = trainer.graphs._record

            def named(name: str, work: Any, inputs: Any) -> Callable[[], Any]:
                names.append(f"{name}, {len(inputs)}, {sorted(getattr(work, 'keywords', {}))}")
                return record(name, work, inputs)

            trainer.graphs._record = named  # type: ignore[method-assign]
        curve = train_steps(trainer, parallel, 4)
        evaluations = [trainer.evaluate(batches(step, settings, parallel)) for step in (7, 8)]
        return result_of(trainer, [*curve, *((x.mean, x.tokens) for x in evaluations)]), names


@pytest.mark.parametrize(
    ("preset", "samples"),
    slow_but(
        [
            (DELAYED | REPORT_2, 9),
            (MOE | BF16 | DP2 | EP2, 10),
            (DP2 | ZERO | DELAYED | FP8_GATHER, 8),
            (DP2 | LATE_REDUCE, 12),
            (TP2 | DELAYED, 7),
            (DOCUMENTS | GPT2, 8),
        ],
        (DELAYED | REPORT_2, 9),
        (MOE | BF16 | DP2 | EP2, 10),
    ),
)
def test_a_step_in_parts_is_an_eager_step(world4: World, preset: Preset, samples: int) -> None:
    settings = config_of(preset, training={"global_batch_size": samples})
    eager = Outcome.of([result for result, _ in world4.run(_train_in_parts, settings, ranks=preset.ranks)])
    with_graphs = settings.model_copy(update={"training": settings.training.model_copy(update={"cuda_graphs": True})})
    found = world4.run(_train_in_parts, with_graphs, ranks=preset.ranks)
    replayed = Outcome.of([result for result, _ in found])
    for ours, theirs in zip(replayed.curve, eager.curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-14), "losses are summed in another order"
    assert replayed.state == eager.state
    assert replayed.records == eager.records
    each = samples // (2 if DP2 in preset else 1)
    parts = [(2, ["last"]), (2, ["first", "last"]), (2 + each % 2, ["first"])]
    for kind in ("step", "evaluation"):
        for _, names in found:
            assert [f"{kind}, {n}, {keywords}" in names for n, keywords in parts] == [True, each > 5, True]


def _with_too_little_room(preset: Preset) -> tuple[list[Any], int, int]:
    """Results of steps and evaluations, and captures and replays.

    The first graph of each kind has room for half of the rows of experts that it meets.
    """
    settings = config_of(preset)
    trainer, parallel = start(settings)
    bound, usual = trainer.row_bound, (own_rows.MARGIN, own_rows._MULTIPLE, own_rows._PART)
    grow = bound.grow

    def growing() -> None:
        own_rows.MARGIN = usual[0]
        grow()

    trainer.expert_room = 0.5  # type: ignore[misc]

    bound.grow = growing  # type: ignore[method-assign]
    results: list[Any] = []
    try:
        for run, count in ((trainer.train_step, 4), (lambda _, given: trainer.evaluate(given), 2)):
            own_rows.MARGIN, own_rows._MULTIPLE, own_rows._PART = 0.5, 1, 1
            results += [run(step, batches(step, settings, parallel)) for step in range(count)]
    finally:
        own_rows.MARGIN, own_rows._MULTIPLE, own_rows._PART = usual
    rerun = trainer.graphs.rerun if isinstance(trainer.graphs, RerunGraphs) else None
    return results, *((rerun.captures, rerun.replays) if rerun is not None else (0, 0))


@pytest.mark.parametrize("dispatch", [NONE, ALL_TO_ALL])
def test_a_graph_without_room_for_all_rows_of_experts_is_replaced_by_a_larger_one(
    world4: World, dispatch: Preset
) -> None:
    """Whatever it computed, results are those of eager steps."""
    preset = MOE | BF16 | DELAYED | DP2 | EP2 | dispatch
    expected = world4.run(_with_too_little_room, preset, ranks=2)
    found = world4.run(_with_too_little_room, preset | GRAPHS, ranks=2)
    assert [results for results, *_ in found] == [results for results, *_ in expected]
    assert [counts for _, *counts in found] == [[4, 6]] * 2, "one step and one evaluation are computed twice"


def _leaves_left(settings: Config) -> int:
    """How many of autograd's leaf nodes outlive a step."""
    trainer, parallel = start(settings)
    (forward,) = trainer.stage_functions
    output = trainer.stages[0].head.output.weight  # type: ignore[union-attr]

    def leaf(param: nn.Parameter) -> Any:
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def marking(x: Tensor | None, microbatch: Batch) -> StageOutput:
        result = forward(x, microbatch)
        for param in trainer.strategy.params:
            leaf(param).metadata["marked"] = True
        left = [param for param in trainer.strategy.params if param is not output]  # the loss has computed its gradient
        assert all(leaf(param).metadata for param in left), "they live as long as the micro-batch's graph"
        return result

    trainer.stage_functions = [marking]
    gc.collect()
    gc.disable()
    trainer.train_step(0, batches(0, settings, parallel))
    gc.enable()
    return sum("marked" in leaf(param).metadata for param in trainer.strategy.params)


@pytest.mark.parametrize("preset", [DELAYED, DELAYED | FULL])
def test_no_leaf_remembers_the_stream_of_an_eager_step(world2: World, preset: Preset) -> None:
    """One that did would draw that stream into the capture, which fails."""
    assert world2.run(_leaves_left, config_of(preset), ranks=1) == [0]


def test_each_kind_of_step_is_eager_before_it_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megafp8")
    log: list[Any] = []
    graphs = Graphs(torch.device("cpu"), new_capture=lambda: LoggedCapture(log))

    def step(name: str, tokens: int = 3, count: int = 1) -> list[Any]:
        log.clear()
        batch = Batch(torch.ones(1, tokens), torch.ones(1, tokens))
        graphs.run(
            name, lambda _: log.append(name), [batch] * count, eager_runs=2 if name == "a" else 1,
            before_capture=lambda: log.append("before"),
        )  # fmt: skip
        return list(log)

    captured, replayed = ["before", "a", "replay"], ["replay"]
    assert [step("a") for _ in range(4)] == [["a"], ["a"], captured, replayed]
    assert step("b") == ["b"], "eager, and the memory of the graph of a is freed"
    assert [step("a"), step("b"), step("a"), step("b")] == [captured, ["before", "b", "replay"], replayed, replayed]
    assert [step("b", tokens=5) for _ in range(2)] == [["b"], ["before", "b", "replay"]], (
        "other shapes are another kind"
    )
    assert step("b", tokens=5, count=2) == ["before", "b", "replay"], "more micro-batches run the same kernels"
    assert caplog.messages[0].startswith("CUDA graphs: a recorded in ")
    assert len(caplog.messages) == 5


def test_a_step_that_cannot_be_recorded_says_how_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Callable[[], Any]) -> Callable[[], Any]:
        raise ValueError("operation not permitted")

    graphs = Graphs(torch.device("cpu"), new_capture=lambda: fail)
    with pytest.raises(RuntimeError, match=r"\(operation not permitted\); training.cuda_graphs=false trains without"):
        graphs.run("step", lambda _: None, [], eager_runs=0)


def _with_more_documents_in_step(preset: Preset, more: int | None) -> tuple[list[float], tuple[int, int]]:
    """Losses of five steps, one with room for more documents in the last rank's batches; captures and replays."""
    settings = config_of(preset)
    trainer, parallel = start(settings)
    losses = []
    for step in range(5):
        own = batches(step, settings, parallel)
        if step == more and parallel.rank == parallel.world_size - 1:
            own = [x.with_room(128) for x in own]
        losses.append(trainer.train_step(step, own)[0].mean)
    if trainer.graphs is None:
        return losses, (0, 0)
    assert isinstance(trainer.graphs, RerunGraphs)
    return losses, (trainer.graphs.rerun.captures, trainer.graphs.rerun.replays)


def test_more_documents_than_there_was_room_for(world2: World) -> None:
    """Steps 1, 2 and 4 are replayed on both ranks: 0 is the first, and 3 has other shapes on one."""
    preset = DOCUMENTS | DELAYED | DP2
    eager = world2.run(_with_more_documents_in_step, preset, None, ranks=2)
    found = world2.run(_with_more_documents_in_step, preset | GRAPHS, 3, ranks=2)
    assert [losses for losses, _ in found] == [losses for losses, _ in eager]
    assert [counts for _, counts in found] == [(2, 3), (2, 3)]


def test_without_a_gpu_they_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config(device="auto")) == "cpu"
    with pytest.raises(ConfigError, match=r"training\.cuda_graphs = True: torch sees no CUDA device here; try"):
        choose_device(config_of(GRAPHS, device="auto"))


# --- with CUDA -------------------------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"recipe": "delayed", "amax_history_len": 4, "interval": 2},
    "current": {"recipe": "current", "report_interval": 4},
    "rowwise": {"recipe": "rowwise"},
    "blockwise": {"recipe": "blockwise"},
    "static": {"recipe": "static", "calibration_steps": 2},
}


def train(settings: Config, parallel: ParallelState, steps: int) -> tuple[Curve, RankTrainer]:
    """Losses and gradient norms, with an evaluation after each step, which leaves FP8 copies of the weights behind."""
    trainer = RankTrainer(settings, parallel)
    curve = []
    for step in range(steps):
        curve += steps_of(trainer, parallel, [step])
        trainer.evaluate(batches(1000, settings, parallel))
    return curve, trainer


@contextmanager
def gpu() -> Iterator[ParallelState]:
    try:
        yield initialize_model_parallel(device=initialize_distributed("cuda"))
    finally:
        destroy_model_parallel()


def assert_replays_are_eager(settings: Config) -> None:
    """Curves of eager and replayed micro-batches agree to the bit, or to what two eager runs leave open.

    A backward pass of attention may sum in any order; with as few tokens as here there is nothing to order.
    """
    eagerly, replaying = (
        settings.model_copy(update={"training": settings.training.model_copy(update={"cuda_graphs": graphs})})
        for graphs in (False, True)
    )
    with gpu() as parallel:
        eager, _ = train(eagerly, parallel, 8)
        again, _ = train(eagerly, parallel, 8)
        replayed, trainer = train(replaying, parallel, 8)
        assert trainer.graphs is not None
        assert trainer.graphs._replays
        trainer.graphs.drop()
    noise, distance = (max(abs(a - b) / b for (a, _), (b, _) in zip(c, eager)) for c in (again, replayed))
    assert distance <= 3 * noise, "exactly the same where two eager runs are"


BF16_TRAINING = {"precision": "bf16", "seq_length": 64, "micro_batch_size": 2, "global_batch_size": 6}
LARGER = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 256}


def gpu_config(fp8: dict[str, Any], **sections: dict[str, Any]) -> Config:
    sections["model"] = {**LARGER, **sections.get("model", {})}
    return config(device="auto", training=BF16_TRAINING, fp8={**fp8, "gemm_autotune": False}, **sections)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_replays_what_it_would_run(recipe: str) -> None:
    assert_replays_are_eager(gpu_config(RECIPES[recipe]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DOCUMENTS, FULL, GPT2, TIED])
def test_a_gpu_replays_models_of_every_kind(case: Preset) -> None:
    sections = {name: dict(keys) for name, keys in case.sections.items() if name != "training"}
    sections.get("model", {}).pop("num_query_groups", None)
    assert_replays_are_eager(gpu_config({"recipe": "delayed"}, **sections))
