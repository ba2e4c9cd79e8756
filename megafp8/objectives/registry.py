"""Registry of the objectives in this package."""

from __future__ import annotations

from typing import NamedTuple

from megafp8 import objectives
from megafp8.host.registry import records_of
from megafp8.layers.head.parts import rows_of_part
from megafp8.numerics.dtypes import DTYPES
from megafp8.objectives import Config, LossMemory, Objective, ObjectiveLoss, ObjectiveRecord, ParallelState, Tokenizer

_LOSS_BYTES = 5 * 2**29
"""Bytes of the logits that exist at the same time, including temporaries of the loss.

At a vocabulary of 160,000 these are 8,192 tokens in bf16: GEMMs run at full speed, and it takes little time to add the
weight gradient of each part to the fp32 sum.
"""

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


def loss_tokens_at_once(config: Config) -> int:
    """Return about the largest number of tokens of a micro-batch that have logits on a rank at the same time."""
    columns, element = config.spec.stem.rows // config.parallel.tensor, DTYPES[config.training.precision].itemsize
    most = _LOSS_BYTES // (columns * element + loss_memory(config, 1).computed)
    return config.training.loss_tokens_at_once or max(1, most)


class LossParts(NamedTuple):
    """Parts of a micro-batch whose logits exist at the same time: their number, and a rank's tokens in the largest."""

    number: int
    tokens: int


def loss_parts(config: Config) -> LossParts:
    """Return the parts in which the loss of a micro-batch is computed."""
    p, s = config.parallel, config.decoder_length or config.training.seq_length
    b = config.training.micro_batch_size * (1 + config.spec.num_prediction_layers)
    shards = p.tensor if p.sequence_parallel else 1
    rows = s // p.context // shards
    size = rows_of_part(rows, b, shards=shards, at_once=loss_tokens_at_once(config))
    return LossParts(-(-rows // size), size * shards * b)


def _record_of(config: Config) -> ObjectiveRecord:
    (record,) = (record for record in OBJECTIVES if record.applies(config))
    return record
