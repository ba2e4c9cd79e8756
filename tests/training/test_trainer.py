"""The way from a training step to its GEMMs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import megafp8
from megafp8.gemm import dispatch
from megafp8.training.trainer import RankTrainer
from tests.training.presets import BF16, DELAYED, config_of
from tests.training.runs import batches, start
from tests.world import World

PACKAGE = str(Path(megafp8.__file__).parent)
MOST_FRAMES = 17
"""Functions of the package from `RankTrainer.train_step` to the GEMM, both included."""


def _functions_to_first_gemm() -> list[str]:
    config = config_of(BF16 | DELAYED)
    trainer, parallel = start(config)
    stacks: list[list[str]] = []
    gemm = dispatch.emulated

    def traced(*args: Any) -> Any:
        stack, frame = ["emulated"], sys._getframe(1)
        while stack[-1] != RankTrainer.train_step.__qualname__:
            if frame.f_code.co_filename.startswith(PACKAGE):
                stack.append(frame.f_code.co_qualname)
            assert isinstance(frame.f_back, FrameType)
            frame = frame.f_back
        stacks.append(stack[::-1])
        return gemm(*args)

    with patch.object(dispatch, "emulated", traced):
        trainer.train_step(0, batches(0, config, parallel))
    return stacks[0]


def test_few_functions_are_between_a_step_and_its_first_gemm(world2: World) -> None:
    (functions,) = world2.run(_functions_to_first_gemm, ranks=1)
    assert functions[-1] == "emulated"
    assert len(functions) <= MOST_FRAMES, " > ".join(functions)
