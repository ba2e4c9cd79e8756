"""Python frames of a training step: what the host does to launch it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import megafp8
from megafp8.config import Config
from megafp8.gemm.dispatch import emulated
from megafp8.training.trainer import RankTrainer
from tests.training.presets import CURRENT, DELAYED, Preset, config_of
from tests.training.runs import batches, start, steps_of
from tests.world import World

PACKAGE = str(Path(megafp8.__file__).parent)


def _callers(frame: FrameType) -> list[FrameType]:
    """Return the frames of the package from `RankTrainer.train_step` to `frame`."""
    frames = [frame]
    while frames[-1].f_code is not RankTrainer.train_step.__code__:
        assert frames[-1].f_back is not None
        frames.append(frames[-1].f_back)
    return [x for x in frames if x.f_code.co_filename.startswith(PACKAGE)]


def _frames(config: Config) -> tuple[int, int]:
    """Return the number of the package's frames in a step, and how many are on the stack at its first GEMM."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    count, depth, own = 0, 0, batches(2, config, parallel)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, depth
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            count += 1
            if frame.f_code is emulated.__code__ and not depth:
                depth = len(_callers(frame))

    sys.setprofile(profile)
    try:
        trainer.train_step(2, own)
    finally:
        sys.setprofile(None)
    return count, depth


@pytest.mark.parametrize(("preset", "most"), [(DELAYED, 2400), (CURRENT, 2800)], ids=str)
def test_a_step_of_two_layers_and_two_micro_batches_calls_few_functions(
    world2: World, preset: Preset, most: int
) -> None:
    """An indirection in a linear layer or a cast costs up to 50 frames."""
    ((count, depth),) = world2.run(_frames, config_of(preset), ranks=1)
    assert 1000 < count <= most
    assert depth <= 16
