"""Which samples a rank reads: a function of how many the run has consumed, and of nothing else.

Micro-batch m of data-parallel rank r of R holds the samples consumed + (m·R + r)·b + row. A global batch is thus the
same set of samples, in the same micro-batches, whatever R; and a resumed run needs one number.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from megafp8.data.blend import Blend
from megafp8.data.errors import DataError
from megafp8.data.samples import Batch, next_token_batch


def sample_indices(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> list[list[int]]:
    """Sample indices of each micro-batch of one rank in the step after `consumed_samples`. Pure."""
    together = micro_batch_size * data_parallel_size
    assert global_batch_size % together == 0
    starts = range(consumed_samples, consumed_samples + global_batch_size, together)
    return [
        list(range(start + data_parallel_rank * micro_batch_size, start + (data_parallel_rank + 1) * micro_batch_size))
        for start in starts
    ]


class _Samples(Dataset[Any]):
    """Samples by global number. One that cannot be read is its DataError, returned and not raised.

    torch's loader would raise it in the main process with the traceback of the loader process as its message. For the
    same reason a loader process opens the files with its first sample, and not when it is started.
    """

    def __init__(self, blend: Blend) -> None:
        self.blend: Blend | bytes = blend

    def __getitem__(self, index: int) -> NDArray[np.int64] | DataError:
        try:
            if isinstance(self.blend, bytes):
                self.blend = cast(Blend, pickle.loads(self.blend))
            return self.blend[index]
        except DataError as error:
            return error

    def __getstate__(self) -> dict[str, object]:
        return {"blend": self.blend if isinstance(self.blend, bytes) else pickle.dumps(self.blend)}


class _MicroBatches:
    """The endless sequence of a rank's micro-batches, as lists of indices."""

    def __init__(self, consumed_samples: int, global_batch_size: int, place: tuple[int, int, int]) -> None:
        self.consumed_samples, self.global_batch_size, self.place = consumed_samples, global_batch_size, place

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed_samples
        while True:
            yield from sample_indices(consumed, self.global_batch_size, *self.place)
            consumed += self.global_batch_size


def _collate(rows: list[Any], eod_id: int | None, reset_at_documents: bool, mask_eod_loss: bool) -> Batch | DataError:
    for row in rows:
        if isinstance(row, DataError):
            return row
    tokens = torch.from_numpy(np.stack(rows))
    return next_token_batch(tokens, eod_id, reset_at_documents=reset_at_documents, mask_eod_loss=mask_eod_loss)


def batches(
    dataset: Blend,
    *,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    eod_id: int | None,
    reset_at_documents: bool,
    mask_eod_loss: bool,
    pin_memory: bool,
) -> Iterator[list[Batch]]:
    """This rank's micro-batches, one list a step, from the step after `consumed_samples` on, without end.

    `num_workers` processes read ahead; 0 reads in this one. Raises DataError in the step that would use a sample which
    cannot be read.
    """
    place = (micro_batch_size, data_parallel_rank, data_parallel_size)
    loader: DataLoader[Any] = DataLoader(
        _Samples(dataset),
        batch_sampler=_MicroBatches(consumed_samples, global_batch_size, place),
        collate_fn=partial(_collate, eod_id=eod_id, reset_at_documents=reset_at_documents, mask_eod_loss=mask_eod_loss),
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context="spawn" if num_workers else None,
        prefetch_factor=4 if num_workers else None,
    )
    stream = iter(loader)
    count = global_batch_size // (micro_batch_size * data_parallel_size)
    while True:
        yield [_checked(next(stream)) for _ in range(count)]


def _checked(batch: Batch | DataError) -> Batch:
    if isinstance(batch, DataError):
        raise batch
    return batch
