"""Replayed micro-batches train what eager ones train, bit for bit.

On a CPU a stand-in takes the place of the graph (`runs.RerunCapture`). So everything but CUDA itself is tested there:
which micro-batches are replayed, the copies of the inputs, what becomes of the results, and data parallelism beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.config import Config, ConfigError
from megafp8.data.samples import Batch
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.models.gpt import GPTStage
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.pipeline_parallel.actions import loop_placement
from megafp8.pipeline_parallel.engine import StageOutput
from megafp8.pipeline_parallel.schedules.one_f_one_b import one_f_one_b
from megafp8.training.cuda_graphs import Captured, MicrobatchGraphs
from megafp8.training.trainer import Trainer
from megafp8.training.validate import choose_device
from tests.marks import slow_but
from tests.training.runs import (
    WORDS,
    Curve,
    RerunCapture,
    RerunGraphs,
    Runs,
    batches,
    config,
    config_of,
    start,
    steps_of,
)
from tests.world import World

# --- with a stand-in for CUDA ----------------------------------------------------------------------------------------

CASES = {  # captures and replays, by hand: four of five steps replay micro-batches, two each
    "": (2, 8),
    "delayed": (2, 8),
    "documents gpt2": (2, 8),
    "full": (2, 8),
    "1-sample": (1, 4),
    "current report-3": (2, 6),  # the third step is sampled, and eager
    # The last micro-batch of a step is eager where its backward overlaps with the reduction.
    "dp2": (1, 4),
    "dp2 late-reduce": (2, 8),
    "dp2 zero delayed": (1, 4),
    "dp2 zero delayed fp8-gather": (1, 4),
    "dp2 zero current fp8-gather": (1, 4),
}


@pytest.mark.parametrize("words", slow_but(CASES, *list(CASES)[:-1]))
def test_replayed_and_eager_micro_batches_are_the_same(runs: Runs, words: str) -> None:
    eager, replayed = runs.of(words), runs.of(f"{words} graphs")
    assert replayed.curve == eager.curve
    assert replayed.state == eager.state
    assert len(set(eager.curve)) == len(eager.curve), "the batches of two steps were the same"
    assert all((rank["captures"], rank["replays"]) == CASES[words] for rank in replayed.elements)


def _leaves_left(settings: Config) -> int:
    """How many of autograd's leaf nodes outlive a step."""
    trainer, parallel = start(settings)
    forward = trainer._forward

    def leaf(param: nn.Parameter) -> Any:
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def marking(stage: GPTStage, x: Tensor | None, microbatch: Batch) -> StageOutput:
        result = forward(stage, x, microbatch)
        for param in trainer.params:
            leaf(param).metadata["marked"] = True
        assert all(leaf(param).metadata for param in trainer.params), "they live as long as the micro-batch's graph"
        return result

    trainer._forward = marking  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    trainer.train_step(0, batches(0, settings, parallel))
    gc.enable()
    return sum("marked" in leaf(param).metadata for param in trainer.params)


@pytest.mark.parametrize("words", ["delayed", "delayed full"])
def test_no_leaf_remembers_the_stream_of_an_eager_step(world2: World, words: str) -> None:
    """One that did would draw that stream into the capture, which fails."""
    assert world2.run(_leaves_left, config_of(words), ranks=1) == [0]


class Weights:
    """As much of the FP8 manager as graphs see. `calls` are those of `forget_weights` and of copies taken and given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._kept: list[QuantizedTensor | None] = [None]

    def forget_weights(self) -> None:
        self.calls.append("forget")

    def weight_copies(self) -> list[QuantizedTensor | None]:
        self.calls.append("take")
        return self._kept

    def restore_weight_copies(self, copies: list[QuantizedTensor | None]) -> None:
        assert copies is self._kept
        self.calls.append("give back")


def test_the_weights_belong_to_the_first_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megafp8")
    weights = Weights()

    def capture(work: Callable[[], Tensor]) -> Captured:
        weights.calls.append("capture")
        return Captured(lambda: weights.calls.append("replay"), work())

    graphs = MicrobatchGraphs(weights, torch.device("cpu"), eager_steps=2, capture=capture)
    ready = []
    for _ in range(4):
        graphs.begin_step()
        ready.append(graphs.ready)
    assert ready == [False, False, True, True]
    for first in (True, False, False, True):
        graphs.run(lambda: torch.zeros(()), (), first=first)
    first_time = ["forget", "capture", "take", "replay", "give back"]
    assert weights.calls == [*first_time, "capture", "replay", "replay", "replay", "give back"]
    assert [text.split(" in ")[0] for text in caplog.messages] == [
        "CUDA graph: captured the first micro-batch of a step",
        "CUDA graph: captured later micro-batches",
    ]


def test_inputs_of_another_shape_are_refused() -> None:
    graphs = MicrobatchGraphs(Weights(), torch.device("cpu"), eager_steps=0, capture=RerunCapture())
    graphs.run(lambda x, y: torch.zeros(2, dtype=torch.float64), (torch.ones(3), None), first=True)
    with pytest.raises(AssertionError, match=r"an input of \(1,\) for a graph of \(3,\)"):
        graphs.run(lambda x, y: x, (torch.ones(1), None), first=True)
    with pytest.raises(AssertionError, match="given once and missing once"):
        graphs.run(lambda x, y: x, (torch.ones(3), torch.ones(3)), first=True)


def _with_more_documents_in_step(words: str, more: int | None) -> tuple[list[float], tuple[int, int]]:
    """Losses of five steps, one with room for more documents in its batches; captures and replays."""
    settings = config_of(words)
    trainer, parallel = start(settings)
    losses = []
    for step in range(5):
        own = batches(step, settings, parallel)
        losses.append(trainer.train_step(step, [x.with_room(128) for x in own] if step == more else own)[0].mean)
    if trainer.graphs is None:
        return losses, (0, 0)
    assert isinstance(trainer.graphs, RerunGraphs)
    return losses, (trainer.graphs.rerun.captures, trainer.graphs.rerun.replays)


def test_more_documents_than_there_was_room_for(world2: World) -> None:
    """Steps 1, 2 and 4 are replayed: 0 is the first, and 3 has another shape."""
    ((eager, _),) = world2.run(_with_more_documents_in_step, "documents delayed", None, ranks=1)
    ((found, counts),) = world2.run(_with_more_documents_in_step, "documents delayed graphs", 3, ranks=1)
    assert found == eager
    assert counts == (4, 6)


def test_without_a_gpu_they_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config(device="auto")) == "cpu"
    with pytest.raises(ConfigError, match=r"training\.cuda_graphs = True: torch sees no CUDA device here; try"):
        choose_device(config_of("graphs", device="auto"))


# --- with CUDA -------------------------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"recipe": "delayed", "amax_history_len": 4, "interval": 2},
    "current": {"recipe": "current", "report_interval": 4},
    "rowwise": {"recipe": "rowwise"},
    "blockwise": {"recipe": "blockwise"},
    "static": {"recipe": "static", "calibration_steps": 2},
}


def train(settings: Config, parallel: ParallelState, steps: int) -> tuple[Curve, Trainer]:
    """Losses and gradient norms, with an evaluation after each step, which leaves FP8 copies of the weights behind."""
    trainer = Trainer(settings, parallel)
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
    replaying = settings.model_copy(update={"training": settings.training.model_copy(update={"cuda_graphs": True})})
    with gpu() as parallel:
        eager, _ = train(settings, parallel, 8)
        again, _ = train(settings, parallel, 8)
        replayed, trainer = train(replaying, parallel, 8)
        assert trainer.graphs is not None
        assert trainer.graphs.ready
    noise, distance = (max(abs(a - b) / b for (a, _), (b, _) in zip(c, eager)) for c in (again, replayed))
    assert distance <= 3 * noise, "exactly the same where two eager runs are"


BF16 = {"precision": "bf16", "seq_length": 64, "micro_batch_size": 2, "global_batch_size": 6}
LARGER = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 256}


def gpu_config(fp8: dict[str, Any], **sections: dict[str, Any]) -> Config:
    sections["model"] = {**LARGER, **sections.get("model", {})}
    return config(device="auto", training=BF16, fp8={**fp8, "gemm_autotune": False}, **sections)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_replays_what_it_would_run(recipe: str) -> None:
    assert_replays_are_eager(gpu_config(RECIPES[recipe]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["documents", "full", "gpt2", "tied"])
def test_a_gpu_replays_models_of_every_kind(case: str) -> None:
    sections = {name: dict(keys) for name, keys in WORDS[case].items() if name != "training"}
    sections.get("model", {}).pop("num_query_groups", None)
    assert_replays_are_eager(gpu_config({"recipe": "delayed"}, **sections))


@pytest.mark.gpu
def test_an_eager_micro_batch_takes_the_weights_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last one of a step does beside data parallelism."""
    eager_last: list[bool] = []

    def last_is_eager(trainer: Trainer, found: list[Batch]) -> list[Tensor]:
        reports = replay(trainer, found[:-1])
        assert all(operand is not None for operand in trainer.fp8.weight_copies())
        eager_last.append(True)
        return reports + trainer._run(one_f_one_b(loop_placement(1), 1)[0], found[-1:])

    replay = Trainer._replay
    monkeypatch.setattr(Trainer, "_replay", last_is_eager)
    assert_replays_are_eager(gpu_config({"recipe": "blockwise"}))
    assert eager_last
