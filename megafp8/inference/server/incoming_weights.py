"""New weights of a server: a thread reads or receives them, while the engine's thread stays free to stop."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch

from megafp8.inference.load import read_weights
from megafp8.inference.model import Model
from megafp8.inference.staged_weights import StagedWeights
from megafp8.inference.weight_transfer import Cancellation, receive_weights

_PREVIOUS_SECONDS = 15.0
"""Longest wait for the thread of an abandoned refit, which still holds memory."""


class NewWeights(NamedTuple):
    """Source of new weights: a checkpoint, or the store of a trainer that sends.

    Attributes:
        checkpoint: Path of the checkpoint, or None.
        trainer: Address (host:port) of the trainer's store, or None.
        version: Version of the weights; None means the next number.
        seconds: Time in which the weights must arrive.
    """

    checkpoint: str | None = None
    trainer: str | None = None
    version: int | None = None
    seconds: float = 600.0


class IncomingWeights:
    """Weights that a thread of this rank stages, while the old weights stay in use.

    The thread takes part in no collective of the job, so ranks may abandon it at any time. It then ends by itself, and
    its staged weights are not used.

    Args:
        model: Model that generates.
        new: Source of the weights.
        previous: Thread of the previous refit, which has to end first.
    """

    def __init__(self, model: Model, new: NewWeights, previous: threading.Thread | None) -> None:
        self.new = new
        self._cancellation = Cancellation()
        self._staged: StagedWeights | None = None
        self._failure: Exception | None = None
        self.state: Literal["arriving", "complete", "failed"] = "arriving"
        self.thread = threading.Thread(target=self._run, args=(model, previous), name="incoming weights", daemon=True)
        self.thread.start()

    def staged(self) -> StagedWeights | None:
        """Return the weights, or None if they are incomplete. Raises the exception that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure
        return self._staged

    def cancel(self) -> None:
        """Make the thread end soon, unless it reads a checkpoint or waits for a tensor from a trainer."""
        self._cancellation.request()

    def _run(self, model: Model, previous: threading.Thread | None) -> None:
        device = model.parallel.device
        try:
            if previous is not None:
                previous.join(_PREVIOUS_SECONDS)
                if previous.is_alive():
                    raise ValueError("an earlier refit still waits for its weights; try again later")
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                staged = StagedWeights(model)
                if self.new.checkpoint is not None:
                    read_weights(self.new.checkpoint, model, staged.tensors)
                else:
                    trainer = self.new.trainer or ""
                    receive_weights(trainer, self.new.seconds, self._cancellation, model, staged.tensors)
            self._staged, self.state = staged, "complete"
        except Exception as error:
            self._failure, self.state = error, "failed"
