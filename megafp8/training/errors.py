"""Exit codes of a job, and errors that end a run for a reason the user can act on.

All ranks raise these errors together, with the same message.
"""

from __future__ import annotations

from typing import ClassVar

DONE = 0  # all steps done, or stopped cleanly on request
FAILED = 1  # anything that may be gone after a restart: a crash, a lost node, a full disk
NO_RESTART = 2  # what no restart can mend: config, data, checkpoint, divergence


class TrainingError(RuntimeError):
    """Training cannot go on. Checkpoints are as they were."""

    exit_code: ClassVar[int] = FAILED


class ReplicasDiffer(TrainingError):
    """Ranks that must hold equal bits do not."""


class Diverged(TrainingError):
    """Too many steps in a row were skipped because their gradients were not finite."""

    exit_code: ClassVar[int] = NO_RESTART  # the same steps would be skipped again
