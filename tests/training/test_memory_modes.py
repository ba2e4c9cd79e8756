"""Whatever is made again in backward or waits on the host: losses, gradients, weights and FP8 state are the same bits.

Whole steps of the trainer in fp32 against those of a run that keeps everything, on one rank, under tensor and sequence
parallelism, and through a pipeline that holds several micro-batches.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.marks import slow_but
from tests.quickstart_data import QuickstartData
from tests.training.test_equivalence import GPT2
from tests.training.test_recipes import TINY, _trainer
from tests.world import World

STEPS = 3
LAYOUTS = {
    "alone": (1, ["parallel.tensor=1", "parallel.pipeline=1"]),
    "tp2-sp": (2, ["parallel.tensor=2", "parallel.pipeline=1"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.sequence_parallel=false"]),
    "pp2": (2, ["parallel.tensor=1", "parallel.pipeline=2"]),
    "cp2": (2, ["parallel.tensor=1", "parallel.pipeline=1", "parallel.context=2"]),
    "pp2-zb": (2, ["parallel.tensor=1", "parallel.pipeline=2", "parallel.schedule=zb-h1"]),
    "pp2-interleaved": (
        2,
        [
            "parallel.tensor=1",
            "parallel.pipeline=2",
            "parallel.schedule=interleaved",
            "parallel.virtual_pipeline=2",
            "model.num_layers=4",
        ],
    ),
}
SELECTIVE = "parallel.recompute=selective"
MODES = {
    "full": ["parallel.recompute=full"],
    "full-first": ["parallel.recompute=full", "parallel.recompute_blocks=1"],
    "norms": [SELECTIVE, "parallel.recompute_ops=[norms]"],
    "activation": [SELECTIVE, "parallel.recompute_ops=[activation]"],
    "attention": [SELECTIVE, "parallel.recompute_ops=[attention]"],
    "all": [SELECTIVE, "parallel.recompute_ops=[norms, activation, attention]"],
    "offload": ["parallel.offload=true"],
    "offload-full": ["parallel.offload=true", "parallel.recompute=full"],
    "offload-all": ["parallel.offload=1", SELECTIVE, "parallel.recompute_ops=[norms, activation, attention]"],
}
CHANGED = {
    "none": ["fp8.recipe=none"],
    "delayed": ["fp8.recipe=delayed"],
    "current": ["fp8.recipe=current"],
    "blockwise": ["fp8.recipe=blockwise"],
    "blockwise-gathered": ["fp8.recipe=blockwise", "training.seq_length=256", "model.num_query_groups=8"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad": ["fp8.recipe=rowwise", "fp8.wgrad_in_bf16=true"],
    "smooth": ["fp8.recipe=delayed", "fp8.smooth_swiglu=true"],
    "static": ["fp8.recipe=static", "fp8.calibration_steps=1"],
    "nvfp4": ["fp8.recipe=nvfp4"],
    "report": ["fp8.recipe=delayed", "fp8.report_interval=1"],
    "gpt2": ["fp8.recipe=delayed", *GPT2],
    "gpt2-none": ["fp8.recipe=none", *GPT2],
    "gelu": ["fp8.recipe=current", "model.activation=gelu"],
    "parallel-block": ["fp8.recipe=delayed", "model.parallel_block=true"],
    "qk-norm": ["fp8.recipe=delayed", "model.qk_norm=true"],
}


def _digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().numpy().tobytes())
    return total.hexdigest()


def _run(common: list[str], modes: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Of each mode, step by step: loss, gradient norm, digests of gradients, weights, FP8 state, and FP8 records."""
    found: dict[str, list[Any]] = {}
    for name, options in modes.items():
        trainer, stream = _trainer([*common, *options])
        for stage in trainer.stages:
            if stage.offload is not None:
                stage.offload.smallest = 0
        found[name] = []
        for step in range(STEPS):
            loss, result = trainer.train_step(step, next(stream))
            state = list(trainer.fp8.state_dict().values())
            digests = [_digest(tensors) for tensors in ([trainer.gradients.flat], trainer.params, state)]
            found[name].append((loss.mean, result.grad_norm, *digests, trainer.fp8_records))
    return found


@pytest.fixture(scope="module")
def common(quickstart_data: QuickstartData) -> list[str]:
    return [*TINY, *quickstart_data.overrides, "training.micro_batch_size=1", "training.global_batch_size=4"]


def _compare(world: World, common: list[str], layout: str, changed: str, modes: list[str]) -> None:
    ranks, options = LAYOUTS[layout]
    chosen = {"plain": [], **{mode: MODES[mode] for mode in modes}}
    for found in world.run(_run, [*common, *CHANGED[changed], *options], chosen, ranks=ranks):
        assert found["plain"][0] != found["plain"][1]
        for mode in modes:
            assert found[mode] == found["plain"], mode


@pytest.mark.parametrize("layout", slow_but(["alone", "tp2-sp", "pp2"], "tp2-sp", "pp2"))
@pytest.mark.parametrize("recipe", slow_but(["none", "delayed", "current", "blockwise"], "none", "delayed"))
def test_every_mode_changes_no_bit(world2: World, common: list[str], recipe: str, layout: str) -> None:
    modes = list(MODES) if layout == "alone" else ["full", "norms", "activation", "offload", "offload-all"]
    _compare(world2, common, layout, recipe, modes)


@pytest.mark.parametrize(
    ("changed", "layout"),
    [
        ("delayed", "tp2"),
        pytest.param("none", "tp2", marks=pytest.mark.slow),
        ("blockwise-gathered", "tp2-sp"),
        ("rowwise", "tp2-sp"),
        pytest.param("rowwise-wgrad", "tp2-sp", marks=pytest.mark.slow),
        ("smooth", "tp2-sp"),
        pytest.param("static", "tp2-sp", marks=pytest.mark.slow),
        ("nvfp4", "tp2-sp"),
        pytest.param("nvfp4", "pp2", marks=pytest.mark.slow),
        ("report", "pp2"),
        ("none", "cp2"),
        pytest.param("delayed", "cp2", marks=pytest.mark.slow),
        ("current", "cp2"),
        ("none", "pp2-zb"),
        ("delayed", "pp2-zb"),
        pytest.param("current", "pp2-interleaved", marks=pytest.mark.slow),
        ("gpt2", "tp2-sp"),
        ("gpt2-none", "tp2-sp"),
        pytest.param("gelu", "tp2-sp", marks=pytest.mark.slow),
        pytest.param("parallel-block", "tp2-sp", marks=pytest.mark.slow),
        ("qk-norm", "alone"),
    ],
)
def test_other_recipes_and_models(world2: World, common: list[str], changed: str, layout: str) -> None:
    _compare(world2, common, layout, changed, ["all", "offload-all"])
