"""Registry of the objectives in this package."""

from __future__ import annotations

from megafp8 import objectives
from megafp8.host.registry import records_of
from megafp8.objectives import Config, LossMemory, Objective, ObjectiveLoss, ObjectiveRecord, ParallelState, Tokenizer

OBJECTIVES: list[ObjectiveRecord] = records_of(objectives, "OBJECTIVE")


def objective_of(config: Config, tokenizer: Tokenizer | None, source: str) -> Objective:
    """Build the objective of `config`.

    Raises:
        ConfigError: A token or a property of the tokenizer is missing.
    """
    return _record_of(config).build(config, tokenizer, source)


def loss_of(config: Config, parallel: ParallelState) -> ObjectiveLoss | None:
    """Build the loss of `config`, or return None for the mean cross entropy of counted labels."""
    make = _record_of(config).loss
    return None if make is None else make(config, parallel)


def loss_memory(config: Config, tokens: int) -> LossMemory:
    """Return the memory of the loss for a micro-batch with `tokens` tokens on a rank."""
    memory = _record_of(config).memory
    return LossMemory() if memory is None else memory(config, tokens)


def _record_of(config: Config) -> ObjectiveRecord:
    (record,) = (record for record in OBJECTIVES if record.applies(config))
    return record
