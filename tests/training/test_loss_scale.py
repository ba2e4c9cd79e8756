"""fp16: steps with a forced overflow are skipped, training goes on, and a checkpoint holds the state of the scale."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafp8.config import Config
from megafp8.training.job import Job
from megafp8.training.state import save_state
from tests.optimizer.test_loss_scale import simulated
from tests.training.latest import load_latest
from tests.training.presets import DELAYED, DP2, DROPOUT, FP16, MASKED, MOE, ZERO, config_of
from tests.training.runs import Runs, batches, start
from tests.world import World

SAVED, STEPS = 6, 10
Step = tuple[float, bool, float]
"""Loss, whether it was skipped, loss scale."""


def _train(config: Config, folder: str, first: int) -> list[Step]:
    """Steps from `first` on, where there is a checkpoint, or which leave one."""
    trainer, parallel = start(config)
    if first:
        assert load_latest(trainer, Path(folder)) == first
    found = []
    for step in range(first, STEPS):
        before = [param.detach().clone() for param in trainer.strategy.params]
        loss, result = trainer.train_step(step, batches(step, config, parallel))
        trainer.strategy.wait()
        same = all(torch.equal(old, new) for old, new in zip(before, trainer.strategy.params, strict=True))
        assert same == result.skipped
        assert result.loss_scale is not None
        found.append((loss.mean, result.skipped, result.loss_scale))
        if step + 1 == SAVED and not first:
            save_state(trainer, Path(folder), SAVED, None)
    return found


def test_overflows_are_skipped_and_a_resumed_run_goes_on(world2: World, tmp_path: Path) -> None:
    preset = FP16 | DP2 | ZERO | DELAYED | DROPOUT
    config = config_of(preset)
    scale = config.training.loss_scale.model_copy(update={"initial_scale": 2.0**22, "growth_interval": 2})
    config = config.model_copy(update={"training": config.training.model_copy(update={"loss_scale": scale})})
    straight, other = world2.run(_train, config, str(tmp_path), 0, ranks=preset.ranks)
    assert straight == other
    losses, skipped, scales = zip(*straight)
    assert skipped[:2] == (True, True)
    assert sum(skipped) < STEPS - 3
    assert [2.0**22, *simulated(scale, [not x for x in skipped])[:-1]] == list(scales)
    assert max(scales[scales.index(min(scales)) :]) > min(scales), "it grows again"
    assert losses[-1] < losses[0]
    assert world2.run(_train, config, str(tmp_path), SAVED, ranks=2)[0] == straight[SAVED:]


@pytest.mark.slow
def test_gradients_are_those_of_fp32(runs: Runs) -> None:
    """Those of the routers' losses, which are added in backward, too."""
    expected, found = (
        runs.of(FP16 | MOE | MASKED, training={"precision": "fp32", "loss_scale": {}}),
        runs.of(FP16 | MOE | MASKED),
    )
    for ours, theirs in zip(found.curve, expected.curve, strict=True):
        assert ours == pytest.approx(theirs, rel=3e-3)


def test_a_scale_that_can_shrink_has_not_diverged() -> None:
    def check_state() -> None:
        raise RuntimeError("too many skipped steps")

    job = SimpleNamespace(config=config_of(FP16), _check_state=check_state)
    Job._stop_if_diverged(job, SimpleNamespace(loss_scale=2.0, skipped_in_a_row=10))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="too many"):
        Job._stop_if_diverged(job, SimpleNamespace(loss_scale=1.0, skipped_in_a_row=10))  # type: ignore[arg-type]
