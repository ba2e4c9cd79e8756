"""Every FP8 recipe trains, over two ranks what it trains on one, and its state advances once a step.

Two ranks of tensor and sequence parallelism, or of a pipeline, against one process, with float64 sums, so that nothing
is left to differ but codes and scales. How many steps are the same is a matter of the recipe:

    all      one scale a tensor, reduced over the group; blocks of 32 and 16 that no slice cuts
    two      factors that are powers of two and belong to a row or a block that is cut: any of them gives the same codes
             but subnormal ones, and a difference in these, 1e-10 of the loss, may push another value over a boundary
    one      nvfp4: gradients that are cut over the group are rounded with other noise in each slice
    none     rowwise: half a row has another factor than the row, so its codes are rounded anew

From there on it is the same recipe with other roundings. Roundings are why a run differs from one without FP8, so two
runs may differ from each other by √2 of that, and twice as much because the difference is known from few steps only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.batch import Batch
from megafp8.config import check_layout, load_config
from megafp8.data.sampler import batches
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.inputs import open_inputs
from megafp8.training.state import save_state
from megafp8.training.trainer import RankTrainer
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.latest import load_latest
from tests.training.runs import LAYOUTS, ONE_RANK, SMALL, Curve, curve
from tests.world import World

TINY = [
    *SMALL,
    "model.num_layers=2",
    "model.num_query_groups=8",  # so that a rank's q, k and v are whole blocks
    "training.global_batch_size=4",
    "optimizer.warmup_steps=1",
]
STEPS = 6
MIXED = (
    '{layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}, '
    '{layers: "layers.0.*", input: static, weight: current, grad_output: delayed}, '
    '{layers: "*", input: mxfp8, weight: current, grad_output: mxfp8}'
)
RECIPES = {
    "delayed": ["fp8.recipe=delayed"],
    "current": ["fp8.recipe=current"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad": ["fp8.recipe=rowwise", "fp8.override_linear_precision=[false, false, true]"],
    "rowwise-pow2": ["fp8.recipe=rowwise", "fp8.power_of_two_scale=true"],
    "blockwise": ["fp8.recipe=blockwise"],
    "blockwise-gathered": ["fp8.recipe=blockwise", "training.seq_length=128"],  # a rank's tokens are whole blocks
    "static": ["fp8.recipe=static", "fp8.calibration_steps=2", "fp8.margin=1"],
    "mxfp8": ["fp8.recipe=mxfp8"],
    "nvfp4": ["fp8.recipe=nvfp4"],
    "nvfp4-whole": ["fp8.recipe=nvfp4", 'fp8.include=["*.proj", "*.down"]'],  # whose gradients are whole on all ranks
    "custom": [
        "fp8.recipe=custom", f"fp8.custom=[{MIXED}]", "fp8.calibration_steps=2", "fp8.power_of_two_scale=true"
    ],
    "kept-blocks": ["fp8.recipe=current", "fp8.first_blocks_bf16=1"],
}  # fmt: skip
NONE = ("fp8.recipe=none",)


class Runs:
    """Curves on one or two ranks, the former each once."""

    def __init__(self, world: World, data: QuickstartData) -> None:
        self.world, self.data = world, data
        self.alone = functools.lru_cache(maxsize=None)(lambda *options: self.on(1, [*options, *ONE_RANK]))

    def on(self, ranks: int, options: list[str]) -> Curve:
        overrides = [*TINY, *self.data.overrides, "training.precision=fp64", *options]
        curves = self.world.run(curve, overrides, STEPS, ranks=ranks)
        assert all(other == curves[0] for other in curves), "ranks report different losses"
        return curves[0]


@pytest.fixture(scope="module")
def runs(world2: World, quickstart_data: QuickstartData) -> Runs:
    return Runs(world2, quickstart_data)


OF_ONE_KIND = {"rowwise-wgrad", "rowwise-pow2", "blockwise-gathered", "nvfp4-whole"}


@pytest.mark.parametrize("recipe", slow_but(RECIPES, *[recipe for recipe in RECIPES if recipe not in OF_ONE_KIND]))
def test_it_learns(runs: Runs, recipe: str) -> None:
    losses = [loss for loss, _ in runs.alone(*RECIPES[recipe])]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.05
    assert losses != [loss for loss, _ in runs.alone(*NONE)]


def largest_distance(found: Curve, expected: Curve) -> float:
    return max(abs(a - b) / b for (a, _), (b, _) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("recipe", "layout", "same"),
    [
        pytest.param("delayed", "tp2-sp", STEPS, marks=pytest.mark.slow),  # in test_layouts.py too
        pytest.param("current", "tp2-sp", STEPS, marks=pytest.mark.slow),
        pytest.param("rowwise", "tp2-sp", 0, marks=pytest.mark.slow),
        pytest.param("rowwise-pow2", "tp2-sp", 2, marks=pytest.mark.slow),
        ("blockwise", "tp2-sp", 2),
        pytest.param("blockwise-gathered", "tp2-sp", 2, marks=pytest.mark.slow),
        pytest.param("static", "tp2-sp", STEPS, marks=pytest.mark.slow),
        pytest.param("static", "pp2", STEPS, marks=pytest.mark.slow),
        pytest.param("mxfp8", "tp2-sp", STEPS, marks=pytest.mark.slow),
        pytest.param("nvfp4", "tp2-sp", 1, marks=pytest.mark.slow),
        pytest.param("nvfp4", "pp2", STEPS, marks=pytest.mark.slow),
        pytest.param("nvfp4-whole", "tp2-sp", STEPS, marks=pytest.mark.slow),
        pytest.param("custom", "tp2-sp", 2, marks=pytest.mark.slow),
        ("kept-blocks", "pp2", STEPS),
    ],
)
def test_two_ranks_train_what_one_trains(runs: Runs, recipe: str, layout: str, same: int) -> None:
    expected = runs.alone(*RECIPES[recipe])
    ranks, options = LAYOUTS[layout]
    found = runs.on(ranks, [*RECIPES[recipe], *options])
    for step in range(same):  # a loss follows from the gradients of the steps before
        assert found[step][0] == pytest.approx(expected[step][0], rel=1e-8), f"loss of step {step}"
    for step in range(same - 1):
        assert found[step][1] == pytest.approx(expected[step][1], rel=1e-6), f"gradient norm of step {step}"
    roundings = largest_distance(expected, runs.alone(*NONE))
    assert largest_distance(found, expected) <= 2 * math.sqrt(2) * roundings


@pytest.mark.parametrize("recipe", slow_but(["static", "nvfp4"], "static"))
def test_data_parallelism_starts_the_same(runs: Runs, recipe: str) -> None:
    """Two steps, as in test_layouts.py; nvfp4's micro-batches round alike wherever they are."""
    ranks, options = LAYOUTS["dp2"]
    found, expected = runs.on(ranks, [*RECIPES[recipe], *options])[:2], runs.alone(*RECIPES[recipe])[:2]
    for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
        assert a_loss == pytest.approx(b_loss, rel=1e-8)
        assert a_norm == pytest.approx(b_norm, rel=1e-6)


def _trainer(overrides: list[str]) -> tuple[RankTrainer, Iterator[list[Batch]]]:
    """A trainer on the ranks that are here, all of one data-parallel rank, and its batches from the first on."""
    config = load_config(CONFIG, overrides)
    check_layout(config, dist.get_world_size())
    inputs = open_inputs(config, "test")
    device = initialize_distributed("cpu")
    p = config.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    stream = batches(
        inputs.train, consumed_samples=0, global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size, data_parallel_rank=0, data_parallel_size=1, num_workers=0,
        objective=inputs.objective, pin_memory=False,
    )  # fmt: skip
    return RankTrainer(inputs.config, parallel), stream


def _saved_after(overrides: list[str], folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Losses of a run's later steps, and of those of a run that was loaded from its checkpoint after `steps`."""
    trainer, stream = _trainer(overrides)
    given = [next(stream) for _ in range(STEPS)]
    for step in range(steps):
        trainer.train_step(step, given[step])
    save_state(trainer, folder, steps, None)
    straight = [trainer.train_step(step, given[step])[0].mean for step in range(steps, STEPS)]
    resumed = RankTrainer(trainer.config, trainer.parallel)
    assert load_latest(resumed, folder) == steps
    return straight, [resumed.train_step(step, given[step])[0].mean for step in range(steps, STEPS)]


@pytest.mark.parametrize("recipe", slow_but(["static", "nvfp4", "custom"], "nvfp4"))
def test_a_checkpoint_continues_bit_for_bit(runs: Runs, recipe: str, tmp_path: Path) -> None:
    """Saved in the middle of calibration, and of the steps whose noise is to differ."""
    overrides = [*TINY, *runs.data.overrides, *RECIPES[recipe], *ONE_RANK]
    ((straight, resumed),) = runs.world.run(_saved_after, overrides, tmp_path, 1, ranks=1)
    assert straight == resumed


def _histories(overrides: list[str], steps: int) -> list[tuple[float, dict[str, Any], dict[str, float]]]:
    """After each step the loss, the FP8 state, and the amaxes of the weights that it used, of this rank."""
    trainer, stream = _trainer(overrides)
    found = []
    for step in range(steps):
        weights = {name: p.detach().abs().max().item() for name, p in trainer.stages[0].named_parameters()}
        loss, result = trainer.train_step(step, next(stream))
        assert not result.skipped
        state = {name: torch.Tensor.tolist(tensor) for name, tensor in trainer.fp8.state_dict().items()}
        found.append((loss.mean, state, weights))
    return found


PIPELINE = ["parallel.tensor=1", "parallel.pipeline=2", "training.micro_batch_size=1", "training.global_batch_size=8"]


@pytest.mark.slow  # in test_layouts.py too
@pytest.mark.parametrize("recipe", ["delayed", "static", "nvfp4"])
def test_pipeline_with_recompute_and_eight_microbatches(runs: Runs, recipe: str) -> None:
    """The state advances once a step, and recompute changes nothing, to the bit."""
    steps, length = 3, 5
    plain, recomputed = (
        runs.world.run(
            _histories,
            [
                *TINY, *runs.data.overrides, *PIPELINE, *RECIPES[recipe], f"fp8.amax_history_len={length}",
                f"parallel.recompute={kind}",
            ],
            steps,
            ranks=2,
        )
        for kind in ("none", "full")
    )  # fmt: skip
    assert plain == recomputed
    for rank, records in enumerate(recomputed):
        assert all(math.isfinite(loss) for loss, _, _ in records)
        for done, (_, state, _) in enumerate(records, start=1):
            if recipe == "nvfp4":
                assert state == {"fp8.noise_step": done}
                continue
            assert state
            for name, value in state.items():
                assert f"layers.{rank}." in name
                if name.endswith(".amax_history"):
                    assert [amax > 0 for amax in value] == [0 < slot <= done for slot in range(length)]
                    assert all(math.isfinite(amax) for amax in value)
                elif name.endswith(".calibrated_steps"):
                    assert value == min(done, 2)
                elif name.endswith(".channel_scale"):  # the largest channel has 1, and all others powers of two
                    assert {math.log2(scale) % 1 for scale in value} == {0}
                    assert min(value) == 1 < max(value)
                    assert value != (records[done - 2][1][name] if done > 1 else [1.0] * len(value))
                else:
                    assert math.isfinite(value)
                    assert value > 0
        if recipe == "delayed":  # the weights' histories are theirs, newest first
            newest_first = [weights["blocks.0.ffn.down.weight"] for _, _, weights in records][::-1]
            history = records[-1][1][f"fp8.layers.{rank}.mlp.down.weight.amax_history"]
            assert history == [0.0, *newest_first, 0.0]
