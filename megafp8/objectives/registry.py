"""The objectives of `objectives/`, and which of them a config has."""

from __future__ import annotations

from megafp8 import objectives
from megafp8.objectives import Config, Objective, ObjectiveRecord, Tokenizer
from megafp8.registry import records_of

OBJECTIVES: list[ObjectiveRecord] = records_of(objectives, "OBJECTIVE")


def objective_of(config: Config, tokenizer: Tokenizer | None, source: str) -> Objective:
    """What the model is trained to predict. Raises ConfigError if a token or a property of the tokenizer is missing."""
    (objective,) = (record for record in OBJECTIVES if record.applies(config))
    return objective.build(config, tokenizer, source)
