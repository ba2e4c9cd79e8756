"""fp8.auto_filter: sizes of layers, the same choice on all ranks, and that left out layers run in high precision.

The ceilings are made up so that memory costs nothing and casts are only launches: in FP8 a GEMM takes half the time.
With current scaling and two micro-batches the casts are five launches: FP8 is slower where m·k·n is below 5/3 of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from benchmarks.bench_step import random_batches
from megafp8.config import Config, check_layout, load_config
from megafp8.fp8 import speed_measurement
from megafp8.fp8.speed_model import LinearSize
from megafp8.host.gpus import CEILINGS, Ceilings
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.planner.outline import linear_sites
from megafp8.training import auto_filter
from megafp8.training.auto_filter import Comparison, kept_choice, shown, verdict
from megafp8.training.describe import planned_stage
from megafp8.training.fp8_config import build_fp8
from megafp8.training.state import find_checkpoint, save_state, saved_choice
from megafp8.training.trainer import RankTrainer
from tests.config.test_config import MINIMAL
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.latest import load_latest
from tests.training.runs import ONE_RANK, train_job
from tests.world import World

CPU = torch.device("cpu")
FAKE = Ceilings(bf16=1.0, fp8={"tensor·tensor": 2.0, "row·row": 2.0}, bandwidth=1e30, launch=240_000.0)
# With 64 tokens: qkv 64 -> 96, proj 64 -> 64, gate_up 64 -> 256, down 128 -> 64. m·k·n decides at 400,000.
SMALL = [
    "model.num_layers=4", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_query_groups=2",
    "model.vocab_size=128", "training.seq_length=32", "training.micro_batch_size=2", "training.global_batch_size=4",
    "training.eval_interval=0", "fp8.recipe=current",
]  # fmt: skip
PREDICTED = ["fp8.auto_filter=predicted"]


def linears(stage: nn.Module) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """The layers of the blocks by their name within a block."""
    return {
        name: module
        for name, module in stage.named_modules()
        if name.startswith("blocks.") and isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", [{"num_query_groups": 2, "ffn_hidden_size": 96}, {"activation": "gelu"}])
def test_sizes_are_those_of_the_modules(model: dict[str, Any], tensor: int) -> None:
    tree = {**MINIMAL, "model": {**MINIMAL["model"], **model}, "parallel": {"tensor": tensor}}
    config = Config.model_validate(tree)
    modules = linears(planned_stage(config, 0)).values()
    expected = [(module.state.site.name, *module.weight.shape) for module in modules]
    assert [(name, site.outputs, site.inputs) for name, site in linear_sites(config)] == expected


# --- the choice ------------------------------------------------------------------------------------------------------


@contextmanager
def ceilings(fake: Ceilings | None) -> Iterator[None]:
    """Within, `fake` are a CPU's."""
    if fake is not None:
        CEILINGS["cpu"] = fake
    try:
        yield
    finally:
        CEILINGS.pop("cpu", None)


def _trainer(overrides: list[str], fake: Ceilings) -> RankTrainer:
    """Of this rank. Only the first rank knows the ceilings, so only it can have decided."""
    config = load_config(CONFIG, [*SMALL, *overrides])
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(config.parallel.tensor, config.parallel.pipeline, device=device)
    with ceilings(fake if dist.get_rank() == 0 else None):
        return RankTrainer(config, parallel)


def _train(overrides: list[str], fake: Ceilings) -> tuple[list[str], tuple[str, ...], list[float]]:
    """Kinds of this rank's layers that are FP8, all layers that were left out, and losses of two steps."""
    trainer = _trainer(overrides, fake)
    kinds = set()
    for name, module in linears(trainer.stages[0]).items():
        fp8 = module.state.plan.fp8
        if fp8:
            kinds.add(name.rpartition(".")[2])
    batches = random_batches(trainer.config, trainer.parallel)
    losses = [trainer.train_step(step, batches)[0].mean for step in range(2)]
    return sorted(kinds), trainer.auto_filter.layers, losses


def of_blocks(*kinds: str) -> tuple[str, ...]:
    return tuple(f"layers.{i}.{kind}" for kind in kinds for i in range(4))


@pytest.mark.parametrize(
    ("layout", "ranks", "left_out", "in_fp8"),
    [
        (ONE_RANK, 1, ("attention.qkv", "attention.proj"), ["down", "up"]),
        pytest.param(
            ["parallel.tensor=1", "parallel.pipeline=2"],
            2,
            ("attention.qkv", "attention.proj"),
            ["down", "up"],
            marks=pytest.mark.slow,
        ),
        (["parallel.tensor=2", "parallel.pipeline=1"], 2, ("attention.qkv", "attention.proj", "mlp.down"), ["up"]),
    ],
    ids=["one rank", "pp2", "tp2-sp"],
)
def test_small_layers_are_left_out_on_all_ranks(
    world2: World, layout: list[str], ranks: int, left_out: tuple[str, ...], in_fp8: list[str]
) -> None:
    for kinds, layers, _ in world2.run(_train, [*layout, *PREDICTED], FAKE, ranks=ranks):
        assert kinds == in_fp8
        assert layers == of_blocks(*left_out)


def losses(world: World, *overrides: str, launch: float) -> list[float]:
    ((_, _, found),) = world.run(_train, [*ONE_RANK, *overrides], replace(FAKE, launch=launch), ranks=1)
    return found


def test_what_is_left_out_runs_in_high_precision(world2: World) -> None:
    """To the bit: as where the same layers are excluded by name, and with all left out as without FP8."""
    some = losses(world2, *PREDICTED, launch=FAKE.launch)
    none = losses(world2, "fp8.recipe=none", launch=FAKE.launch)
    assert some == losses(world2, 'fp8.exclude=["*.qkv", "*.proj"]', launch=FAKE.launch)
    assert some != losses(world2, launch=FAKE.launch)
    assert some != none
    assert losses(world2, *PREDICTED, launch=1e9) == none


def test_patterns_and_blocks_come_first() -> None:
    options = ["fp8.exclude=[layers.1.mlp.down]", "fp8.first_blocks_bf16=1", 'fp8.include=["*.down", "*.proj"]']
    config = load_config(CONFIG, [*SMALL, *ONE_RANK, *options])
    found = auto_filter.compare(config, build_fp8(config, None), lambda size, layer: _Speedup(2.0))
    assert [(c.layers, c.size) for c in found] == [
        (("layers.1.attention.proj", "layers.2.attention.proj", "layers.3.attention.proj"), LinearSize(64, 64, 64)),
        (("layers.2.mlp.down", "layers.3.mlp.down"), LinearSize(64, 128, 64)),
    ]


class _Speedup:
    def __init__(self, speedup: float) -> None:
        self.speedup = speedup


CUSTOM = (
    "fp8.custom=[{layers: layers.0.*, input: rowwise, weight: rowwise, grad_output: rowwise}, "
    '{layers: "*.proj", input: current, weight: current, grad_output: current}]'
)


def test_layers_of_one_size_and_two_recipes_are_two_questions() -> None:
    config = load_config(CONFIG, [*SMALL, *ONE_RANK, "fp8.recipe=custom", CUSTOM])
    asked: list[str] = []

    def timing(size: LinearSize, layer: str) -> Any:
        asked.append(layer)
        return _Speedup(1.0)

    auto_filter.compare(config, build_fp8(config, None), timing)
    assert asked == [
        "layers.0.attention.qkv", "layers.0.attention.proj", "layers.0.mlp.gate_up", "layers.0.mlp.down",
        "layers.1.attention.proj",
    ]  # fmt: skip


# --- the log ---------------------------------------------------------------------------------------------------------


def test_the_log_names_layers_and_reasons() -> None:
    slow = Comparison(("layers.0.mlp.down", "layers.1.mlp.down", "layers.3.mlp.down"), LinearSize(64, 128, 64), 0.876)
    even = Comparison(("layers.2.mlp.down",), LinearSize(64, 256, 64), 1.0)
    choice = verdict([slow, even], "measured")
    assert choice.layers == slow.layers
    assert choice.reasons == (
        "fp8.auto_filter: layers.0-1.mlp.down, layers.3.mlp.down stay in high precision: 64x128x64 (tokens x inputs x "
        "outputs) is measured to be 0.88 times as fast in FP8",
        "fp8.auto_filter: layers.2.mlp.down run in FP8: 64x256x64 (tokens x inputs x outputs) is measured to be 1.00 "
        "times as fast in FP8",
    )
    assert kept_choice([]) == verdict([], "measured")
    assert shown([f"layers.{i}.a.b" for i in (11, 9, 10)]) == "layers.9-11.a.b"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "fp8.auto_filter = predicted: the speeds of 'cpu' are not known; known are NVIDIA H200; try measured"),
        (["fp8.gemm_backend=emulated"], "predicted: the speed of fp8.gemm_backend = emulated is not known; try"),
        (["fp8.recipe=mxfp8"], "predicted: .* try measured or none"),
    ],
)
def test_what_cannot_be_predicted_is_refused(overrides: list[str], message: str) -> None:
    config = load_config(CONFIG, [*SMALL, *ONE_RANK, *PREDICTED, *overrides])
    with pytest.raises(ValueError, match=message):
        auto_filter.check(config, build_fp8(config, None), CPU)


def test_predictions_are_of_bf16() -> None:
    config = load_config(CONFIG, [*SMALL, *ONE_RANK, *PREDICTED, "training.precision=fp32"])
    with pytest.raises(ValueError, match=r"it compares FP8 with bf16, and training.precision is fp32"):
        check_layout(config, 1)
    check_layout(load_config(CONFIG, [*SMALL, *ONE_RANK, *PREDICTED, "training.precision=bf16"]), 1)


# --- resuming --------------------------------------------------------------------------------------------------------


def _resume(overrides: list[str], folder: Path) -> tuple[list[float], list[float], Any]:
    """Losses of a run's second step, and of that of a run that resumes where FP8 would be slower everywhere; and what
    the latter finds with another recipe."""
    trainer = _trainer(overrides, FAKE)
    batches = random_batches(trainer.config, trainer.parallel)
    trainer.train_step(0, batches)
    save_state(trainer, folder, 1, None)
    straight = trainer.train_step(1, batches)[0].mean
    found = find_checkpoint(trainer.config, folder, trainer.parallel, None)
    assert found is not None
    found.metadata["config"]["fp8"]["a_key_that_is_gone"] = False
    choice = saved_choice(trainer.config, found)
    assert choice is not None
    assert choice.layers == trainer.auto_filter.layers
    resumed = RankTrainer(trainer.config, trainer.parallel, choice)
    assert load_latest(resumed, folder) == 1
    other = load_config(CONFIG, [*SMALL, *overrides, "fp8.margin=1"])
    return [straight], [resumed.train_step(1, batches)[0].mean], saved_choice(other, found)


def test_a_run_keeps_its_choice(world2: World, tmp_path: Path) -> None:
    ((straight, resumed, other),) = world2.run(
        _resume, [*ONE_RANK, *PREDICTED, "fp8.recipe=delayed"], tmp_path, ranks=1
    )
    assert straight == resumed
    assert other is None, "another fp8 section, another choice"


def _train_where_fp8_is_slower(overrides: list[str]) -> None:
    """On a busy machine a measured time may be any."""

    def times(runs: Sequence[Callable[[], object]], *_: Any, **__: Any) -> list[list[float]]:
        for run in runs:
            run()
        return [[1.0], [1.3], [1.2]]  # high precision; FP8 with and without the cast of the weight

    with patch.object(speed_measurement, "time_round_robin", times):
        train_job(overrides)


def test_measured_on_a_cpu_and_resumed(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """The log says of all blocks that FP8 is slower, on resuming too."""
    kinds = ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")
    folder = tmp_path / yaml.safe_load(CONFIG.read_text())["name"]
    lines: list[str] = []
    for steps, said in ((1, "is measured to be 0."), (2, "as in this run so far")):
        overrides = [
            *SMALL, *quickstart_data.overrides, *ONE_RANK, f"run_dir={tmp_path}", "fp8.auto_filter=measured",
            f"training.steps={steps}", "optimizer.warmup_steps=0",
        ]  # fmt: skip
        world2.run(_train_where_fp8_is_slower, overrides, ranks=1)
        lines = (folder / "log.txt").read_text().splitlines()[len(lines) :]
        found = [line for line in lines if "] fp8.auto_filter: " in line]
        assert all(any(f"layers.0-3.{kind}" in line and said in line for line in found) for kind in kinds), found
    (checkpoint,) = (folder / "checkpoints").glob("step_*2")
    assert len(json.loads((checkpoint / "metadata.json").read_text())["fp8_left_out"]) == 16
