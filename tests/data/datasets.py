"""Small data sets for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def write_dataset(
    prefix: str | Path, documents: Iterable[Sequence[int]], dtype: type[np.generic] = np.uint16
) -> IndexedDataset:
    """Write `documents` over what is at `prefix`, without a sidecar."""
    writer = IndexedDatasetWriter(prefix, dtype, overwrite=True)
    for document in documents:
        writer.add_document(np.array(document, np.int64))
    writer.close()
    return IndexedDataset(prefix)


def all_documents(prefix: str | Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]
