"""What a model is trained to predict, one file each: from a sample of the data sets to a micro-batch.

An objective makes of a sample a row of integers (`row`), in the process that reads it, and rows into a `Batch`
(`batch`). A row is a function of the seed and of the sample's number in the run, so a resumed run, or one in another
layout, trains on the same batches.

To add an objective, add its keys to the section `data` in `megafp8/config/schema.py`, with the rules about them as
`problems` of an `ObjectiveConfig`, and a file here that defines `OBJECTIVE = ObjectiveRecord(applies, build)`; the
registry (`host/registry.py`) finds it. This package has what such a file imports.
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
    """What is minimized where it is not the mean cross entropy of labels that count.

    `metrics`: names of what it reports beside the loss. `reads_logits`: the last stage's output is this rank's logits
    `[s, b, v/t]`, not the losses of tokens `[s, b]`.
    """

    metrics: tuple[str, ...]
    reads_logits: bool = False

    def __call__(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of losses of a micro-batch, and a report, float64: `[sum of losses, their number, sum of each
        metric]`.

        `output`: of the last stage. `batch`: with the tokens of this context-parallel rank. The sums of the reports of
        all ranks that share sequences are those of whole ones, and so are the sums of their gradients.
        """
        ...

    def reference_output(self, output: Tensor, batch: Batch) -> Tensor:
        """What `Batch.reference` is to hold, from the output of a frozen model's last stage."""
        ...

    def count(self, batch: Batch) -> Tensor:
        """Number of losses of a micro-batch of whole sequences, float64 `[]`."""
        ...


class LossMemory(NamedTuple):
    """Bytes on a rank of the last stage, beside the logits of a micro-batch: `reference`: `Batch.reference` of one
    micro-batch, which is held for all of a step; `computed`: at the peak of the loss."""

    reference: int = 0
    computed: int = 0


@dataclass(frozen=True)
class ObjectiveRecord:
    """When a config has an objective, and how it is made.

    `build(config, tokenizer, source)` raises ConfigError, about a config that was read from `source`, if a token or a
    property of the tokenizer is missing. `applies`: of at most one objective. `loss`: None for cross entropy.
    `memory(config, tokens)`: of that loss for a micro-batch of so many tokens on a rank, if it is worth counting.
    """

    applies: Callable[[Config], bool]
    build: Callable[[Config, Tokenizer | None, str], Objective]
    loss: Callable[[Config, ParallelState], ObjectiveLoss] | None = None
    memory: Callable[[Config, int], LossMemory] | None = None


def generator_of(seed: int, index: int) -> np.random.Generator:
    """Random numbers of sample number `index` of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), index], np.uint64)))


def special_ids(
    config: Config,
    tokenizer: Tokenizer | None,
    source: str,
    given: Mapping[str, int | None],
    names: Mapping[str, Sequence[str]],
    section: str = "data.special_tokens",
) -> dict[str, int]:
    """Ids of special tokens: those `given`, else of the first of the `names` that the tokenizer has.

    `names`: by key of `section`. Raises ConfigError naming those that are missing.
    """
    problems, ids_by_role = [], {}
    size = config.spec.stem.vocab_size
    assert size is not None
    for key, candidates in names.items():
        ids = [given[key], *(None if tokenizer is None else tokenizer.id_of(name) for name in candidates)]
        number = next((i for i in ids if i is not None), None)
        if number is None:
            rule = f"not given, and data.tokenizer has neither {' nor '.join(candidates)}"
            works = f"give the id of a token for it below model.vocab_size ({size}), which may be enlarged for it"
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
