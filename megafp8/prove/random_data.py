"""Small data sets of random tokens that suit a config's objective."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megafp8.config import Config
from megafp8.data.indexed_dataset import IndexedDatasetWriter

EOD = 0


def write_data(config: Config, folder: Path, vocabulary: int, samples: int) -> Config:
    """Write the data sets of `config`, each with tokens for `samples` samples, and return the config with their paths.

    Documents are shorter and longer than a sample, end with token 0, and have ids below `vocabulary`. Tokens repeat
    with a stride, so that there is something to learn. With a loss mask, some tokens are answers. With `data.dpo`, a
    document consists of two halves, which fit into a sample.
    """
    data = config.data
    for i, name in enumerate(data.train):
        rng = np.random.default_rng([config.seed, i])
        writer = IndexedDatasetWriter(folder / name, np.uint16, loss_mask=data.has_loss_mask)
        left = samples * (config.sample_tokens + 1)
        while left > 0:
            longest = config.sample_tokens if data.dpo is not None else 2 * config.sample_tokens
            length = int(rng.integers(4, 1 + longest))
            first, stride = rng.integers(vocabulary - 1), rng.integers(1, 5)
            tokens = np.append(1 + (first + stride * np.arange(length - 1)) % (vocabulary - 1), EOD)
            mask = (rng.random(length) < 0.6).astype(np.uint8) if data.has_loss_mask else None
            sentences = None if data.dpo is None else [length // 2, length - length // 2]
            if data.packing == "sentences":
                parts = 1 + length // 8
                sentences = [len(part) for part in np.array_split(tokens, parts)]
            writer.add_document(tokens, sentences, mask)
            left -= length
        writer.close()
    paths = {name: str(folder / name) for name in data.train}
    train = (
        {paths[x]: weight for x, weight in data.train.items()} if isinstance(data.train, dict) else [*paths.values()]
    )
    placed = data.model_copy(update={"train": train, "index_cache": str(folder / "index")})
    return config.model_copy(update={"data": placed})
