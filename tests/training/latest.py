"""Loading the newest checkpoint of a run, as a job does."""

from __future__ import annotations

from pathlib import Path

from megafp8.checkpoint import newest_good
from megafp8.training.state import checkpoint_folder, load_state
from megafp8.training.trainer import RankTrainer


def load_latest(trainer: RankTrainer, run: Path) -> int:
    """Load the newest checkpoint of `run` into `trainer` and return its number of steps. Collective."""
    found = newest_good(checkpoint_folder(run), verify=False, group=trainer.parallel.world.group)
    assert found is not None
    return load_state(trainer, found)
