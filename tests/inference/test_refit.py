"""Refit: a live trainer's weights in a generator of another layout are those of its checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import CheckpointReader, latest
from megafp8.config import Config
from megafp8.inference import Generator
from megafp8.inference.staged_weights import tensors_of
from megafp8.training.state import checkpoint_folder, save_state
from tests.inference.test_checkpoints import CACHE, OPTIONS, PROMPTS, SCALES_OF_BATCHES
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import start, steps_of
from tests.world import World

Layout = dict[str, int]


def _misfits(generator: Generator, folder: Path) -> list[str]:
    """Names of this rank's tensors that are not those of the newest checkpoint, read without the code of refits."""
    newest = latest(checkpoint_folder(folder))
    assert newest is not None
    reader = CheckpointReader(newest)
    wrong = []
    for name, rectangles in tensors_of(generator.model).items():
        for offset, view in rectangles.parts:
            expected = reader.read(name, offset, tuple(view.shape)).to(view.dtype)
            if not torch.equal(expected, view.detach()):
                wrong.append(name)
    return wrong


def _refitted(config: Config, folder: str, layout: Layout) -> dict[str, Any]:
    trainer, parallel = start(config)
    generator = Generator.from_trainer(trainer, cache=CACHE, **layout)
    assert generator.live is not None
    found: dict[str, Any] = {"misfits": [], "versions": [], "copies": []}
    for step in range(2):
        curve = steps_of(trainer, parallel, [step])
        completions = generator.generate(PROMPTS, OPTIONS[0])
        save_state(trainer, Path(folder) / str(step), step + 1, None)
        found["misfits"] += _misfits(generator, Path(folder) / str(step))
        found["versions"] += [x.weight_versions for x in completions]
        found["copies"].append(generator.live.copies)
        dist.barrier()
    found["texts"], found["curve"] = [x.tokens for x in completions], curve
    found["parameters"] = sum(p.numel() for stage in generator.model.stages for p in stage.parameters())
    own = {p.data_ptr() for p in trainer.model.parameters() if p.numel()}
    parameters = [p for stage in generator.model.stages for p in stage.parameters()]
    found["shared"] = sum(p.numel() for p in parameters if p.data_ptr() in own)
    return found


def _of_checkpoint(folder: str, layout: Layout) -> list[list[int]]:
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, **layout)
    return [x.tokens for x in generator.generate(PROMPTS, OPTIONS[0])]


def _curve(config: Config) -> Any:
    return steps_of(*start(config), range(2))[-1:]


CASES: list[tuple[Preset, Layout]] = [
    (DP2, {"tensor": 2}),
    (TP2 | DELAYED, {"tensor": 1}),
    (PP2 | TIED, {"pipeline": 1}),
    (TP2 | DP2 | BLOCKWISE | WIDE, {"tensor": 1}),
]
SLOW: list[tuple[Preset, Layout]] = [
    (ZERO | DP2 | FP8_GATHER | CURRENT, {"tensor": 2}),
    (FSDP | DP2 | GEMMA, {"tensor": 2}),
    (MOE | EP2 | DP2 | ALL_TO_ALL, {"tensor": 2, "expert": 1}),
    (DEEPSEEK | TP2 | EP2, {"tensor": 1, "expert": 1}),
    (TP2 | PP2 | GPT2, {"tensor": 1, "pipeline": 2}),
    (MTP | PP2 | LAYERS_4, {"pipeline": 1}),
    (HYBRID | TP2 | DELAYED, {"tensor": 1}),
    (TP2 | DP2 | BF16, {"tensor": 4}),
    (CALIBRATED | DP2, {"tensor": 2}),
]


@pytest.mark.parametrize(
    ("preset", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_another_layout(world4: World, tmp_path: Path, preset: Preset, layout: Layout) -> None:
    """Weights, constants and scales equal those of the checkpoint after each step, and so do texts; training goes on as
    if nothing had been generated."""
    config = config_of(preset)
    of_ranks = world4.run(_refitted, config, str(tmp_path), layout, ranks=preset.ranks)
    assert [found["misfits"] for found in of_ranks] == [[]] * preset.ranks
    assert all(found["versions"] == [[1]] * 3 + [[2]] * 3 for found in of_ranks)
    assert all(found["texts"] == of_ranks[0]["texts"] for found in of_ranks)
    assert world4.run(_curve, config, ranks=preset.ranks)[0] == of_ranks[0]["curve"]
    sizes = [layout.get("tensor", config.parallel.tensor), layout.get("pipeline", config.parallel.pipeline)]
    if config.fp8.recipe not in SCALES_OF_BATCHES:
        read = dict(zip(("tensor", "pipeline"), sizes)) | {"expert": layout.get("expert", 1)}
        ranks = sizes[0] * sizes[1]
        assert world4.run(_of_checkpoint, str(tmp_path / "1"), read, ranks=ranks)[0] == of_ranks[0]["texts"]
