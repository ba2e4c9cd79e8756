"""Training objectives, one file each: they turn samples of the data sets into micro-batches.

An objective turns a sample into a row of integers (`row`), in the process that reads the sample, and rows into a
`Batch` (`batch`). A row is a function of the seed and of the sample's number in the run. So a resumed run, or a run in
another layout, trains on the same batches.

To add an objective, add its keys to the section `data` in `megafp8/config/schema.py`, with the rules about them as
`problems` of an `ObjectiveConfig`, and a file here that defines `OBJECTIVE = ObjectiveRecord(applies, build)`. The
registry (`host/registry.py`) finds it. This package exports the names that such a file imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config, ConfigError, Problem
from megafp8.data.sampler import Objective, Parts
from megafp8.data.tokenizers import Tokenizer
from megafp8.parallel.parallel_state import ParallelState

__all__ = [
    "Config",
    "ConfigError",
    "LossMemory",
    "Objective",
    "ObjectiveLoss",
    "ObjectiveRecord",
    "ParallelState",
    "Parts",
    "Problem",
    "Tokenizer",
    "generator_of",
    "special_ids",
]


class ObjectiveLoss(Protocol):
    """Loss of an objective that does not minimize the mean cross entropy of counted labels."""

    metrics: tuple[str, ...]
    """Names of the metrics that it reports in addition to the loss."""
    reads_logits: bool = False
    """Whether the last stage's output is this rank's logits `[s, b, v/t]` instead of token losses `[s, b]`."""
    adds_up: bool = True
    """Whether losses and reports of parts of the tokens add up to the values for all tokens."""

    def __call__(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch.

        The reports of ranks that share sequences add up to the report for whole sequences, and so do their gradients.

        Args:
            output: Output of the last stage.
            batch: Micro-batch with the tokens of this context-parallel rank.

        Returns:
            Sum of the losses, and a float64 report: `[sum of losses, number of losses, sum of each metric]`.
        """
        ...

    def reference_output(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the tensor for `Batch.reference` from the output of a frozen model's last stage.

        It is `[s, b, ...]` if the losses of parts of the tokens add up.
        """
        ...

    def count(self, batch: Batch) -> Tensor:
        """Return the number of losses of a micro-batch of whole sequences, float64 `[]`."""
        ...


class LossMemory(NamedTuple):
    """Bytes of a loss on a rank of the last stage, in addition to the logits of a micro-batch."""

    reference: int = 0
    """Bytes of `Batch.reference` of one micro-batch, which is held for a whole step."""
    computed: int = 0
    """Bytes at the peak of the computation of the loss, for all tokens that have logits at the same time."""


@dataclass(frozen=True)
class ObjectiveRecord:
    """Registry entry of an objective.

    Args:
        applies: Function that returns whether a config has this objective. At most one objective applies to a config.
        build: Function of config, tokenizer and config source that builds the objective. It raises ConfigError if a
            token or a property of the tokenizer is missing.
        loss: Function that builds the loss; None for cross entropy.
        memory: Function that returns the memory of the loss for a micro-batch with a number of tokens per rank; None
            if it is negligible.
    """

    applies: Callable[[Config], bool]
    build: Callable[[Config, Tokenizer | None, str], Objective]
    loss: Callable[[Config, ParallelState], ObjectiveLoss] | None = None
    memory: Callable[[Config, int], LossMemory] | None = None


def generator_of(seed: int, index: int) -> np.random.Generator:
    """Return the random generator of sample number `index` of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), index], np.uint64)))


def special_ids(
    config: Config,
    tokenizer: Tokenizer | None,
    source: str,
    given: Mapping[str, int | None],
    names: Mapping[str, Sequence[str]],
    section: str = "data.special_tokens",
) -> dict[str, int]:
    """Return the ids of special tokens by key.

    Args:
        config: Config of the run.
        tokenizer: Tokenizer of the data, if there is one.
        source: Source of the config, for errors.
        given: Ids that the config sets, by key. They take precedence.
        names: Possible names of the token in the tokenizer, by key. The first name that the tokenizer has is used.
        section: Config section of the keys, for errors.

    Raises:
        ConfigError: Tokens are missing, or their ids are not below `model.vocab_size`.
    """
    problems, ids_by_role = [], {}
    size = config.spec.stem.vocab_size
    assert size is not None
    for key, candidates in names.items():
        ids = [given[key], *(None if tokenizer is None else tokenizer.id_of(name) for name in candidates)]
        number = next((i for i in ids if i is not None), None)
        if number is None:
            rule = f"not given, and data.tokenizer has neither {' nor '.join(candidates)}"
            works = f"set it to a token id below model.vocab_size ({size}), which you may enlarge for it"
            problems.append(Problem(f"{section}.{key}", None, rule, works))
        elif number >= size:
            rule = f"model.vocab_size is {size}"
            works = f"try model.vocab_size={number + 1}, or a smaller id"
            problems.append(Problem(f"{section}.{key}", number, rule, works))
        else:
            ids_by_role[key] = number
    if problems:
        raise ConfigError(source, problems)
    return ids_by_role
