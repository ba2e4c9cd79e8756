"""Errors that end a run for a reason the user can act on; all ranks raise them together, with the same message."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot go on. Checkpoints are as they were."""


class ReplicasDiffer(TrainingError):
    """Ranks that must hold equal bits do not."""


class Diverged(TrainingError):
    """Too many steps in a row were skipped because their gradients were not finite."""
