"""Register torchtitan's Llama 3 with random tokens for data, as the model `llama3_random`.

torchtitan imports this module through `--experimental.custom_import` (benchmarks/peers/torchtitan.sh). The model, the
parallelism, the loss, the optimizer and the training loop stay torchtitan's. Only its text pipeline is replaced,
because the other projects in the comparison read no text either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import get_train_spec, llama3_args
from torchtitan.protocols.train_spec import register_train_spec


class RandomTokens(BaseDataLoader):
    """Endless micro-batches of uniformly random tokens, different on each data-parallel rank."""

    def __init__(self, vocab_size: int, batch_size: int, seq_length: int, seed: int) -> None:
        """Draw the tokens of `seed` from the whole vocabulary."""
        self._vocab_size = vocab_size
        self._shape = (batch_size, seq_length + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield the input and the labels of one micro-batch after another."""
        while True:
            tokens = torch.randint(self._vocab_size, self._shape, generator=self._generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the benchmark saves no checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""


def build_random_tokens(*, dp_rank: int, job_config: JobConfig, **_: Any) -> RandomTokens:
    """Build the data of one data-parallel rank for torchtitan's trainer."""
    training = job_config.training
    vocab_size = llama3_args[job_config.model.flavor].vocab_size
    return RandomTokens(vocab_size, training.local_batch_size, training.seq_len, seed=1234 + dp_rank)


register_train_spec(
    "llama3_random", replace(get_train_spec(), build_dataloader_fn=build_random_tokens, build_tokenizer_fn=None)
)
