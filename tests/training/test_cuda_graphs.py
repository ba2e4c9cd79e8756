"""Replayed micro-batches train what eager ones train, bit for bit.

On a CPU a stand-in takes the place of the graph: it does its work again at each replay, on the memory that it was
captured with, and leaves the result in the memory that it had at first. So everything but CUDA itself is tested there:
which micro-batches are replayed, the copies of the inputs, what becomes of the results, and data parallelism beside it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.config import Config, ConfigError
from megafp8.data.samples import Batch, next_token_batch
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
from tests.world import World

VOCABULARY = 128
Curve = list[tuple[float, float]]

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "ffn_hidden_size": 256,
        "vocab_size": VOCABULARY,
    },
    "training": {"steps": 20, "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 6, "precision": "fp32"},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"train": ["none"]},
}  # fmt: skip


def config(**sections: dict[str, Any]) -> Config:
    """The small model with some fields changed."""
    changed = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in BASE.keys() | sections.keys()}
    return Config.model_validate({"name": "test", **changed})


def batches(step: int, settings: Config, parallel: ParallelState, masked: bool) -> list[Batch]:
    """A step's random micro-batches of this rank; `masked`: in documents, of some 16 tokens, that are kept apart."""
    t, data = settings.training, parallel.data
    generator = torch.Generator().manual_seed(100 * step + data.rank)
    count = t.global_batch_size // (t.micro_batch_size * data.size)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (t.micro_batch_size, t.seq_length + 1), generator=generator)
        if masked:
            tokens[torch.rand(tokens.shape, generator=generator) < 1 / 16] = 0
        eod = 0 if masked else None
        found.append(next_token_batch(tokens, eod, reset_at_documents=masked, mask_eod_loss=masked))
    return found


def train(
    settings: Config, parallel: ParallelState, steps: int, graphs: Callable[..., MicrobatchGraphs] | None, masked: bool
) -> tuple[Curve, Trainer]:
    """Losses and gradient norms; `graphs` makes the trainer's."""
    trainer = Trainer(settings, parallel)
    if graphs is not None:
        trainer.graphs = graphs(trainer.fp8, parallel.device)
    curve = []
    for step in range(steps):
        loss, result = trainer.train_step(step, batches(step, settings, parallel, masked))
        curve.append((loss.mean, result.grad_norm))
        trainer.evaluate(batches(1000, settings, parallel, masked))  # it leaves copies of the weights behind
    return curve, trainer


# --- with a stand-in for CUDA ----------------------------------------------------------------------------------------


class HighPrecisionFallback:
    """Captures nothing: replaying is doing the work again. Counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        self.captures += 1
        result = torch.full((2,), torch.nan, dtype=torch.float64)

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return Captured(replay, result)


def _both(settings: Config, steps: int, masked: bool) -> tuple[Curve, Curve, int, int]:
    """The curve of eager micro-batches and of replayed ones on the ranks that are here, captures and replays."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    eager, _ = train(settings, parallel, steps, None, masked)
    fallback = HighPrecisionFallback()
    graphs = functools.partial(MicrobatchGraphs, eager_steps=1, capture=fallback)
    replayed, _ = train(settings, parallel, steps, graphs, masked)
    return eager, replayed, fallback.captures, fallback.replays


CASES: dict[str, tuple[dict[str, Any], bool, int]] = {  # changes, masked, how often 3 of 4 steps replay something
    "fp32": ({}, False, 9),
    "delayed": ({"fp8": {"recipe": "delayed", "amax_history_len": 4}}, False, 9),
    "masked": ({"model": {"position_embedding": "learned"}}, True, 9),
    "recompute": ({"parallel": {"recompute": "full"}}, False, 9),
    "one micro-batch": ({"training": {"global_batch_size": 2}}, False, 3),
    "sampled": ({"fp8": {"recipe": "current", "report_interval": 3}}, False, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_and_eager_micro_batches_are_the_same(world2: World, case: str) -> None:
    changes, masked, expected_replays = CASES[case]
    ((eager, replayed, captures, replays),) = world2.run(_both, config(**changes), 4, masked, ranks=1)
    assert replayed == eager
    assert len(set(eager)) == 4, "the batches of two steps were the same"
    assert (captures, replays) == (1 if case == "one micro-batch" else 2, expected_replays)


@pytest.mark.parametrize(("overlap", "expected_replays"), [(True, 6), (False, 9)])
def test_only_what_overlaps_with_the_reduction_is_eager(world2: World, overlap: bool, expected_replays: int) -> None:
    settings = config(training={"global_batch_size": 12}, parallel={"overlap_grad_reduce": overlap})
    for eager, replayed, _, replays in world2.run(_both, settings, 4, False):
        assert replayed == eager
        assert replays == expected_replays


def _leaves_left(settings: Config) -> int:
    """How many of autograd's leaf nodes outlive a step."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    trainer = Trainer(settings, parallel)
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
    trainer.train_step(0, batches(0, settings, parallel, False))
    gc.enable()
    return sum("marked" in leaf(param).metadata for param in trainer.params)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_leaf_remembers_the_stream_of_an_eager_step(world2: World, recompute: str) -> None:
    """One that did would draw that stream into the capture, which fails."""
    settings = config(fp8={"recipe": "delayed"}, parallel={"recompute": recompute})
    assert world2.run(_leaves_left, settings, ranks=1) == [0]


class Weights:
    """As much of the FP8 manager as graphs see. `forget_weights` and new copies are noted in a diary."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self._kept: list[QuantizedTensor | None] = [None]

    def forget_weights(self) -> None:
        self.diary.append("forget")

    def weight_copies(self) -> list[QuantizedTensor | None]:
        self.diary.append("take")
        return self._kept

    def restore_weight_copies(self, copies: list[QuantizedTensor | None]) -> None:
        assert copies is self._kept
        self.diary.append("give back")


def test_the_weights_belong_to_the_first_graph() -> None:
    weights, said = Weights(), []

    def capture(work: Callable[[], Tensor]) -> Captured:
        weights.diary.append("capture")
        return Captured(lambda: weights.diary.append("replay"), work())

    graphs = MicrobatchGraphs(weights, torch.device("cpu"), eager_steps=2, capture=capture, say=said.append)
    ready = []
    for _ in range(4):
        graphs.begin_step()
        ready.append(graphs.ready)
    assert ready == [False, False, True, True]
    for first in (True, False, False, True):
        graphs.run(lambda: torch.zeros(()), (), first=first)
    first_time = ["forget", "capture", "take", "replay", "give back"]
    assert weights.diary == [*first_time, "capture", "replay", "replay", "replay", "give back"]
    assert [text.split(" in ")[0] for text in said] == [
        "CUDA graph: captured the first micro-batch of a step",
        "CUDA graph: captured later micro-batches",
    ]


def test_inputs_of_another_shape_are_refused() -> None:
    graphs = MicrobatchGraphs(Weights(), torch.device("cpu"), eager_steps=0, capture=HighPrecisionFallback())
    graphs.run(lambda x, y: torch.zeros(2, dtype=torch.float64), (torch.ones(3), None), first=True)
    with pytest.raises(AssertionError, match=r"an input of \(1,\) for a graph of \(3,\)"):
        graphs.run(lambda x, y: x, (torch.ones(1), None), first=True)
    with pytest.raises(AssertionError, match="came to lack"):
        graphs.run(lambda x, y: x, (torch.ones(3), torch.ones(3)), first=True)


def test_without_a_gpu_they_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config()) == "cpu"
    with pytest.raises(ConfigError, match=r"training\.cuda_graphs = True: torch sees no CUDA device here; try"):
        choose_device(config(training={"cuda_graphs": True}))


# --- with CUDA -------------------------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"recipe": "delayed", "amax_history_len": 4, "interval": 2},
    "current": {"recipe": "current", "report_interval": 4},
    "rowwise": {"recipe": "rowwise"},
    "blockwise": {"recipe": "blockwise"},
    "static": {"recipe": "static", "calibration_steps": 2},
}


@contextmanager
def gpu() -> Iterator[ParallelState]:
    try:
        yield initialize_model_parallel(device=initialize_distributed("cuda"))
    finally:
        destroy_model_parallel()


def assert_replays_are_eager(settings: Config, masked: bool = False) -> None:
    """Curves of eager and replayed micro-batches agree to the bit, or to what two eager runs leave open.

    A backward pass of attention may sum in any order; with as few tokens as here there is nothing to order.
    """
    replaying = settings.model_copy(update={"training": settings.training.model_copy(update={"cuda_graphs": True})})
    with gpu() as parallel:
        eager, _ = train(settings, parallel, 8, None, masked)
        again, _ = train(settings, parallel, 8, None, masked)
        replayed, trainer = train(replaying, parallel, 8, None, masked)
        assert trainer.graphs is not None
        assert trainer.graphs.ready
    noise, distance = (max(abs(a - b) / b for (a, _), (b, _) in zip(c, eager)) for c in (again, replayed))
    assert distance <= 3 * noise, "exactly the same where two eager runs are"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_replays_what_it_would_run(recipe: str) -> None:
    training = {"precision": "bf16", "seq_length": 64}
    assert_replays_are_eager(config(training=training, fp8={**RECIPES[recipe], "gemm_autotune": False}))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["masked", "recompute", "learned", "tied"])
def test_a_gpu_replays_models_of_every_kind(case: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "masked": {},
        "recompute": {"parallel": {"recompute": "full"}},
        "learned": {"model": {"position_embedding": "learned", "activation": "gelu", "normalization": "layernorm"}},
        "tied": {"model": {"tie_embeddings": True}},
    }
    fp8 = {"recipe": "delayed", "gemm_autotune": False}
    training = {"precision": "bf16", "seq_length": 64}
    assert_replays_are_eager(config(training=training, fp8=fp8, **changes[case]), masked=case == "masked")


@pytest.mark.gpu
def test_an_eager_micro_batch_takes_the_weights_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last one of a step does beside data parallelism."""
    settings = config(
        training={"precision": "bf16", "seq_length": 64}, fp8={"recipe": "blockwise", "gemm_autotune": False}
    )
    eager_last: list[bool] = []

    def last_is_eager(trainer: Trainer, found: list[Batch]) -> list[Tensor]:
        reports = replay(trainer, found[:-1])
        assert all(operand is not None for operand in trainer.fp8.weight_copies())
        eager_last.append(True)
        return reports + trainer._run(one_f_one_b(loop_placement(1), 1)[0], found[-1:])

    replay = Trainer._replay
    monkeypatch.setattr(Trainer, "_replay", last_is_eager)
    assert_replays_are_eager(settings)
    assert eager_last
