"""Sequences cut over ranks: one seed, one model, as for every other layout (`test_equivalence`).

The text is cut so that a rank's tokens are not consecutive, so a wrong position, a label of another rank's or a mask
of the wrong keys shows in the first loss. FP8 scales are made of the amax of the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megafp8.config import check_layout, load_config
from megafp8.data.sampler import batches
from megafp8.data.samples import Batch
from megafp8.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.inputs import open_inputs
from megafp8.training.state import save_state
from megafp8.training.trainer import Trainer
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.latest import load_latest
from tests.training.test_equivalence import ALONE, FP32, MODELS, SMALL, Curve, Runs, assert_close
from tests.world import World

LAYOUTS = {
    "cp2": (2, [*ALONE, "parallel.context=2"]),
    "cp4": (4, [*ALONE, "parallel.context=4"]),
    "dp2-cp2": (4, [*ALONE, "parallel.context=2"]),
    "tp2-cp2": (4, [*ALONE[1:], "parallel.tensor=2", "parallel.context=2", "parallel.sequence_parallel=false"]),
    "tp2-sp-cp2": (4, [*ALONE[1:], "parallel.tensor=2", "parallel.context=2"]),
    "pp2-cp2": (4, [*ALONE[:1], "parallel.pipeline=2", "parallel.context=2"]),
}
STEPS = 8


@pytest.fixture(scope="module")
def runs(world4: World, quickstart_data: QuickstartData) -> Runs:
    return Runs(world4, quickstart_data)


def test_a_batch_is_cut_with_its_positions() -> None:
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens + 1, loss_mask=tokens % 2, document_ids=tokens // 3)
    shard = batch.shard(1, 2)
    assert shard.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(shard.labels, shard.tokens + 1)
    assert torch.equal(shard.loss_mask, shard.tokens % 2)
    assert shard.position_ids.tolist() == [[2, 3, 4, 5]]
    assert torch.equal(shard.document_ids, tokens // 3)
    given = Batch(tokens, tokens, position_ids=tokens % 5).shard(0, 2)
    assert given.position_ids.tolist() == [[0, 1, 1, 2], [3, 4, 4, 0]]
    assert batch.shard(0, 1) is batch


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tp2-sp-cp2"))
@pytest.mark.parametrize("model", slow_but(["llama", "gpt2-tied"], "llama"))
def test_fp32_equals_one_process(runs: Runs, model: str, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    expected = runs.alone((*FP32, *MODELS[model]), STEPS)
    assert_close(runs.on(ranks, [*FP32, *MODELS[model], *options], STEPS), expected, 1e-5, 1e-5)


OPTIONS = {
    "window": ["model.sliding_window=7"],
    "qk-norm": ["model.qk_norm=true", "model.qkv_bias=true"],
    "recompute": ["parallel.recompute=full"],
}


@pytest.mark.parametrize("option", slow_but(OPTIONS, "window"))
def test_options_equal_one_process(runs: Runs, option: str) -> None:
    ranks, options = LAYOUTS["cp4"]
    expected = runs.alone((*FP32, *OPTIONS[option]), STEPS)
    assert_close(runs.on(ranks, [*FP32, *OPTIONS[option], *options], STEPS), expected, 1e-5, 1e-5)


EXACT = ("training.precision=fp64",)
FP8_STEPS = 4
"""Ranks round their gradients to fp32 before these are added up, as under data parallelism: with every step it becomes
likelier that a value falls on the other side of a boundary of FP8."""


@pytest.mark.parametrize("layout", slow_but(["cp2", "cp4", "tp2-sp-cp2", "pp2-cp2"], "tp2-sp-cp2"))
@pytest.mark.parametrize("recipe", slow_but(["current", "delayed"], "delayed"))
def test_fp8_is_the_same_computation(runs: Runs, recipe: str, layout: str) -> None:
    exact = (f"fp8.recipe={recipe}", *EXACT)
    ranks, options = LAYOUTS[layout]
    assert_close(runs.on(ranks, [*exact, *options], FP8_STEPS), runs.alone(exact, FP8_STEPS), 1e-8, 1e-6)


@pytest.mark.parametrize(
    ("layout", "steps", "options"),
    [
        ("cp2", FP8_STEPS, ["fp8.recipe=rowwise"]),
        ("cp2", 1, ["fp8.recipe=blockwise", "training.seq_length=256"]),  # a chunk's tokens are whole blocks
        ("cp2", 1, ["fp8.recipe=mxfp8", "training.seq_length=128"]),
        ("tp2-sp-cp2", FP8_STEPS, ["fp8.recipe=static", "fp8.calibration_steps=2", "fp8.smooth_swiglu=true"]),
    ],
    ids=["rowwise", "blockwise", "mxfp8", "static-smooth"],
)
def test_other_recipes_too(runs: Runs, layout: str, steps: int, options: list[str]) -> None:
    """Steps are fewer where factors are powers of two: then subnormal codes flip (`test_recipes`)."""
    exact = (*options, *EXACT, "model.num_layers=2")
    ranks, cut = LAYOUTS[layout]
    assert_close(runs.on(ranks, [*exact, *cut], steps), runs.alone(exact, steps), 1e-8, 1e-6)


def _trainer(overrides: list[str], steps_done: int) -> tuple[Trainer, Iterator[list[Batch]]]:
    """A trainer on the ranks that are here, and its batches: of short documents, as the commonest token ends them."""
    config = load_config(CONFIG, overrides)
    check_layout(config, dist.get_world_size())
    inputs = open_inputs(config, "test")
    p, t, d = config.parallel, config.training, config.data
    eod_id = int(np.bincount(np.concatenate([inputs.train[i] for i in range(8)])).argmax())
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    stream = batches(
        inputs.train, consumed_samples=steps_done * t.global_batch_size, global_batch_size=t.global_batch_size,
        micro_batch_size=t.micro_batch_size, data_parallel_rank=parallel.data.rank,
        data_parallel_size=parallel.data.size, num_workers=0, eod_id=eod_id,
        reset_at_documents=d.reset_at_documents, mask_eod_loss=d.mask_eod_loss, pin_memory=False,
    )  # fmt: skip
    return Trainer(inputs.config, parallel), stream


DOCUMENTS = ["data.mask_eod_loss=true", "data.reset_at_documents=true", "training.z_loss=1e-4"]


def _curve(overrides: list[str]) -> Curve:
    trainer, stream = _trainer(overrides, 0)
    steps = (trainer.train_step(step, next(stream)) for step in range(STEPS))
    return [(loss.mean, result.grad_norm) for loss, result in steps]


@pytest.mark.parametrize("layout", slow_but(["cp4", "tp2-sp-cp2", "dp2-cp2", "pp2-cp2"], "tp2-sp-cp2"))
def test_short_documents(world4: World, quickstart_data: QuickstartData, layout: str) -> None:
    """Whose ends lie in other places on each rank, as do the labels that do not count."""
    ranks, options = LAYOUTS[layout]
    common = [*SMALL, *quickstart_data.overrides, *FP32, *DOCUMENTS]
    (expected,) = world4.run(_curve, [*common, *ALONE], ranks=1)
    for found in world4.run(_curve, [*common, *options], ranks=ranks):
        assert_close(found, expected, 1e-5, 1e-5)


def _evaluation(overrides: list[str]) -> tuple[float, int]:
    """Mean loss and tokens of a global batch."""
    trainer, stream = _trainer(overrides, 0)
    loss = trainer.evaluate(next(stream))
    return loss.mean, loss.tokens


@pytest.mark.parametrize("layout", ["cp4", "pp2-cp2"])
def test_evaluation(world4: World, quickstart_data: QuickstartData, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    common = [*SMALL, *quickstart_data.overrides, *FP32, *DOCUMENTS]
    ((mean, tokens),) = world4.run(_evaluation, [*common, *ALONE], ranks=1)
    assert tokens < 8 * 32 * 0.98, "hardly a label is masked"
    for found_mean, found_tokens in world4.run(_evaluation, [*common, *options], ranks=ranks):
        assert found_tokens == tokens
        assert found_mean == pytest.approx(mean, rel=1e-6)


def _save(overrides: list[str], folder: str) -> None:
    trainer, stream = _trainer(overrides, 0)
    for step in range(2):
        trainer.train_step(step, next(stream))
    save_state(trainer, Path(folder), 2, None)


def _resume(overrides: list[str], folder: str) -> float:
    trainer, stream = _trainer(overrides, 2)
    assert load_latest(trainer, Path(folder)) == 2
    return trainer.train_step(2, next(stream))[0].mean


def test_a_checkpoint_knows_nothing_of_the_cut(runs: Runs, tmp_path: Path) -> None:
    """Saved by TP2·SP × CP2, continued by one process and by CP4."""
    delayed = ("fp8.recipe=delayed", *EXACT)
    common = [*SMALL, *runs.data.overrides, *delayed]
    runs.world.run(_save, [*common, *LAYOUTS["tp2-sp-cp2"][1]], str(tmp_path))
    for ranks, options in [(1, ALONE), LAYOUTS["cp4"]]:
        for loss in runs.world.run(_resume, [*common, *options], str(tmp_path), ranks=ranks):
            assert loss == pytest.approx(runs.alone(delayed, FP8_STEPS)[2][0], rel=1e-8)
