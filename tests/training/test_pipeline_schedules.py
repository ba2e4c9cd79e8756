"""Every pipeline schedule trains the same model: against each other bit for bit, against one process, in FP8 too.

A micro-batch is computed alike under every schedule, and gradients are summed in the order of the micro-batches, so
losses, and every weight after some steps, do not depend on the schedule in a single bit. Not even on the number of
stages, as long as no sum over the whole model enters (clipping) and the embedding is not shared between two layers of
one stage; those are compared within rounding.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import Config, check_layout
from megafp8.data.samples import Batch, next_token_batch
from megafp8.data_parallel.grad_buffer import main_grad_of
from megafp8.distributed.sharding import shards_of
from megafp8.parallel_state import ParallelState, initialize_distributed, initialize_model_parallel
from megafp8.pipeline_parallel.registry import BUILT_IN, write_csv
from megafp8.pipeline_parallel.schedules import COMPUTE, Action, Kind, Placement, Schedule, in_turns
from megafp8.training.state import load_latest, save_state
from megafp8.training.trainer import Trainer
from tests.marks import slow_but
from tests.world import World

STEPS = 3
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2, "dualpipev": 2}
BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 8, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64,
        "vocab_multiple": 64, "qkv_bias": True,
    },
    "training": {"steps": 20, "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "precision": "fp32"},
    "optimizer": {"learning_rate": 1e-2, "clip_grad_norm": 0.0},
    "data": {"train": ["none"]},
}  # fmt: skip
DELAYED = {"recipe": "delayed", "amax_history_len": 2}


def config(**sections: dict[str, Any]) -> Config:
    """The small model with some fields changed."""
    changed = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in BASE.keys() | sections.keys()}
    return Config.model_validate({"name": "test", **changed})


def batches(step: int, settings: Config, parallel: ParallelState) -> list[Batch]:
    """A step's random micro-batches of this rank."""
    t, data = settings.training, parallel.data
    generator = torch.Generator().manual_seed(100 * step + data.rank)
    shape = (t.micro_batch_size, t.seq_length + 1)
    count = t.global_batch_size // (t.micro_batch_size * data.size)
    return [
        next_token_batch(
            torch.randint(64, shape, generator=generator), None, reset_at_documents=False, mask_eod_loss=False
        )
        for _ in range(count)
    ]


class Outcome:
    """What a run leaves: curves, the first step's gradients and the final weights by name, of all ranks."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        self.losses: list[float] = ranks[0]["losses"]
        self.evaluations: list[float] = ranks[0]["evaluations"]
        assert all((r["losses"], r["evaluations"]) == (self.losses, self.evaluations) for r in ranks)
        self.norms: list[float] = ranks[0]["norms"]
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        for rank in ranks:
            for name, tensor in rank["weights"].items():  # copies of the tied weight must be equal
                torch.testing.assert_close(self.weights.setdefault(name, tensor), tensor, rtol=0, atol=0)
            self.gradients |= rank["gradients"]


def _train(settings: Config) -> dict[str, Any]:
    p = settings.parallel
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(p.tensor, p.pipeline, p.virtual_pipeline, device=device)
    check_layout(settings, parallel.world_size)
    trainer = Trainer(settings, parallel)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluations": [], "gradients": {}, "weights": {}}

    def collected(of: Any) -> dict[str, Tensor]:
        parts = [(piece, view.clone()) for param in trainer.params for piece, view in shards_of(param, of(param))]
        return {f"{piece.name} {piece.offset}": view for piece, view in parts}

    for step in range(STEPS):
        loss, result = trainer.train_step(step, batches(step, settings, parallel))
        found["losses"].append(loss.mean)
        found["norms"].append(result.grad_norm)
        if step == 0:
            found["evaluations"].append(trainer.evaluate(batches(1000, settings, parallel)).mean)
            found["gradients"] = collected(main_grad_of)
    found["weights"] = collected(lambda param: param.detach())
    return found


class Runs:
    """Runs settings on as many ranks as they ask for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alone = functools.lru_cache(maxsize=None)(self._alone)

    def on(self, ranks: int, **sections: dict[str, Any]) -> Outcome:
        return Outcome(self.world.run(_train, config(**sections), ranks=ranks, timeout=100))

    def _alone(self, tied: bool, recipe: str, m: int) -> Outcome:
        return self.on(1, **changes(tied, recipe, m))


def changes(tied: bool, recipe: str, m: int) -> dict[str, dict[str, Any]]:
    fp8 = DELAYED if recipe == "delayed" else {"recipe": recipe}
    return {"model": {"tie_embeddings": tied}, "training": {"global_batch_size": m}, "fp8": fp8}


@pytest.fixture(scope="module")
def runs(world4: World) -> Runs:
    return Runs(world4)


def parallel(schedule: str, p: int, **more: Any) -> dict[str, Any]:
    return {"pipeline": p, "schedule": schedule, "virtual_pipeline": SCHEDULES[schedule], **more}


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    assert found.evaluations == expected.evaluations
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)


CASES = [
    (2, 4, False, "none"),
    (2, 1, True, "delayed"),
    (4, 8, False, "delayed"),
    (4, 3, True, "none"),
]


@pytest.mark.parametrize(("p", "m", "tied", "recipe"), slow_but(CASES, *CASES[::2]))
def test_schedules_and_one_process_train_the_same(runs: Runs, p: int, m: int, tied: bool, recipe: str) -> None:
    alone = runs.alone(tied, recipe, m)
    outcomes = {
        schedule: runs.on(p, parallel=parallel(schedule, p), **changes(tied, recipe, m)) for schedule in SCHEDULES
    }
    for outcome in outcomes.values():
        assert_same_bits(outcome, outcomes["1f1b"])
    one = outcomes["1f1b"]
    assert one.losses[-1] != one.losses[0]
    if not tied:
        assert_same_bits(one, alone)
    assert one.losses[0] == alone.losses[0]
    torch.testing.assert_close(one.gradients, alone.gradients, rtol=1e-5, atol=1e-7)
    assert one.norms == pytest.approx(alone.norms, rel=1e-5 if recipe == "none" else 2e-2)


@pytest.mark.parametrize("recipe", slow_but(["delayed", "blockwise"], "delayed"))
def test_deferred_weight_gradients_of_cut_sequences(runs: Runs, recipe: str) -> None:
    """Sequence parallelism gathers columns when the weight gradient is computed. Blocks need 128 tokens a rank."""
    sections: dict[str, Any] = {
        "model": {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 128},
        "training": {"seq_length": 256, "global_batch_size": 3},
        "fp8": {"recipe": recipe},
    }
    both = [
        runs.on(4, **sections, parallel=parallel(schedule, 2, tensor=2, recompute=recompute))
        for schedule, recompute in (("1f1b", "none"), ("zb-v", "full"))
    ]
    assert_same_bits(*both)


@pytest.mark.parametrize("schedules", [("1f1b", "zb-h1"), ("zb-v", "dualpipev")])
def test_clipped_gradients_under_one_placement(runs: Runs, schedules: tuple[str, str]) -> None:
    clipped = {"learning_rate": 1e-2, "clip_grad_norm": 0.1}
    both = [runs.on(2, parallel=parallel(schedule, 2), optimizer=clipped) for schedule in schedules]
    assert_same_bits(*both)
    assert both[0].norms == both[1].norms
    assert min(both[0].norms) > 0.1


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_reduction_that_overlaps_the_schedule(runs: Runs, schedule: str) -> None:
    """Buckets so small that most are reduced while micro-batches are still under way."""
    both = [
        runs.on(4, parallel=parallel(schedule, 2, overlap_grad_reduce=overlap, bucket_mib=0.01))
        for overlap in (True, False)
    ]
    assert_same_bits(*both)


@pytest.mark.parametrize(
    "fp8",
    [
        {"recipe": "delayed", "wgrad_in_bf16": True},
        {"recipe": "delayed", "override_linear_precision": [False, True, False]},
        {"recipe": "delayed", "smooth_swiglu": True},
        {"recipe": "nvfp4"},
        {"recipe": "static", "calibration_steps": 1},
    ],
)  # fmt: skip
def test_deferred_weight_gradients_of_every_kind(runs: Runs, fp8: dict[str, Any]) -> None:
    both = [runs.on(2, fp8=fp8, parallel=parallel(schedule, 2)) for schedule in ("1f1b", "zb-h1")]
    assert_same_bits(*both)


def test_layers_by_hand(runs: Runs) -> None:
    split = runs.on(2, parallel=parallel("zb-v", 2, layers_per_stage=[1, 3, 3, 1]))
    assert_same_bits(split, runs.alone(False, "none", 4))


def all_forwards_first(placement: Placement, num_microbatches: int) -> Schedule:
    """GPipe over chunks."""
    order = [(Kind.FORWARD, range(placement.num_chunks)), (Kind.BACKWARD, reversed(range(placement.num_chunks)))]
    actions = [Action(kind, i, c) for kind, chunks in order for c in chunks for i in range(num_microbatches)]
    return [list(actions) for _ in placement.stages]


def test_schedules_of_the_users(runs: Runs, tmp_path: Path) -> None:
    expected = runs.alone(False, "none", 4)
    function = f"{__name__}:all_forwards_first"
    assert_same_bits(runs.on(2, parallel={"pipeline": 2, "virtual_pipeline": 3, "schedule": function}), expected)
    path = tmp_path / "mine.csv"
    write_csv(BUILT_IN["zb-h1"](in_turns(2), 4), path)
    assert_same_bits(runs.on(2, parallel={"pipeline": 2, "schedule": str(path)}), expected)


def _resumed(first: Config, second: Config, folder: Path) -> list[float]:
    """Losses of a step under `first`, saved, and of two more under `second`."""
    found = []
    for settings, steps in ((first, (0,)), (second, (1, 2))):
        p = settings.parallel
        device = initialize_distributed("cpu")
        parallel = initialize_model_parallel(p.tensor, p.pipeline, p.virtual_pipeline, device=device)
        trainer = Trainer(settings, parallel)
        assert load_latest(trainer, folder) == steps[0]
        found += [trainer.train_step(step, batches(step, settings, parallel))[0].mean for step in steps]
        if steps[0] == 0:
            save_state(trainer, folder, 1, None)
    return found


@pytest.mark.parametrize("tied", slow_but([False, True], True))
def test_a_checkpoint_loads_under_any_schedule(runs: Runs, tmp_path: Path, tied: bool) -> None:
    sections = changes(tied, "delayed", 4)
    straight = runs.on(2, parallel=parallel("1f1b", 2), **sections)
    for one, other in itertools.pairwise(["1f1b", "interleaved", "zb-v", "1f1b"]):
        first, second = (config(parallel=parallel(schedule, 2), **sections) for schedule in (one, other))
        for losses in runs.world.run(_resumed, first, second, tmp_path / one, ranks=2, timeout=60):
            assert losses == straight.losses


def _traced(settings: Config) -> tuple[bool, list[list[Action]], list[list[Action]]]:
    p = settings.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, p.virtual_pipeline, device=initialize_distributed("cpu"))
    trainer = Trainer(settings, parallel)
    trainer.train_step(0, batches(0, settings, parallel))
    before = trainer.timeline is None
    trainer.train_step(1, batches(1, settings, parallel))
    assert trainer.timeline is not None
    compute = [[a for a in actions if a.kind in COMPUTE] for actions in trainer.plan.train]
    return before, [[span.action for span in spans] for spans in trainer.timeline.spans], compute


def test_a_step_is_traced_where_asked_for(world4: World) -> None:
    settings = config(parallel=parallel("zb-v", 2), logging={"pipeline_trace_step": 2})
    for before, traced, compute in world4.run(_traced, settings, ranks=2, timeout=60):
        assert before
        assert traced == compute
