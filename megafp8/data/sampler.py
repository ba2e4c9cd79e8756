"""The samples that a rank reads, as a function of the number of samples consumed so far.

With R data-parallel ranks and micro-batches of b rows, row i of micro-batch m on rank r is the global sample
consumed + (m·R + r)·b + i. A global batch therefore consists of the same samples, in the same micro-batches, for any R,
and one number is enough to resume. `balanced_order` permutes the samples of a global batch by their cost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megafp8.batch import Batch
from megafp8.data import DataError
from megafp8.data.blend import Blend
from megafp8.data.loader_processes import end_with_trainer, start_server

Parts = Sequence[NDArray[Any]]
"""Parts of documents, or sentences, that make up a sample, in order: `[n]`, or with a loss mask `[2, n]`."""


class Objective(Protocol):
    """Training objective: it turns a sample into the inputs and labels of the model."""

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return sample number `index` of the run as a row of integers. All rows have the same shape."""
        ...

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of `rows`, which are stacked along a new first dim."""
        ...


def sample_indices(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    share: range | None = None,
) -> list[list[int]]:
    """Return the sample indices of each micro-batch of one rank in the step after `consumed_samples`. Pure.

    With replicas, `share` selects the micro-batches of a rank that its replica computes; None selects all of them.
    """
    together = micro_batch_size * data_parallel_size
    assert global_batch_size % together == 0
    starts = range(consumed_samples, consumed_samples + global_batch_size, together)
    if share is not None:
        starts = starts[share.start : share.stop : share.step]
    return [
        list(range(start + data_parallel_rank * micro_batch_size, start + (data_parallel_rank + 1) * micro_batch_size))
        for start in starts
    ]


def balanced_order(costs: Sequence[float], micro_batch_size: int) -> list[int]:
    """Return an order of a global batch's samples in which data-parallel ranks wait less for each other. Pure.

    Samples are dealt to micro-batches back and forth, so that the costs of micro-batches are similar. The micro-batch
    at place p is then number g(p) by increasing cost, where bit j of g(p) is the parity of the bits of p from bit j on
    (the inverse Gray code). If R is a power of two, the m-th micro-batches of all R ranks are neighbors by cost, and
    the rank that has the cheapest for one m has the most expensive for another: the ranks' order by cost is reversed
    wherever m has an odd number of one bits. This is the Thue-Morse sequence, so the ranks' sums are nearly equal.

    The order does not depend on R. If R is not a power of two, the sums differ more.
    """
    count = len(costs) // micro_batch_size
    dealt = np.argsort(-np.asarray(costs), kind="stable").reshape(micro_batch_size, count)
    dealt[1::2] = dealt[1::2, ::-1]
    micro_batches = sorted(dealt.T.tolist(), key=lambda rows: math.fsum(costs[row] for row in rows))
    places = np.arange(1 << (count - 1).bit_length())
    for shift in (1, 2, 4, 8, 16, 32):
        places ^= places >> shift
    return [row for place in places[places < count].tolist() for row in micro_batches[place]]


READ_AHEAD = 4
"""Number of later micro-batches that a loader process downloads in advance."""


class _Wanted(NamedTuple):
    """Samples of a micro-batch, and samples of later micro-batches to start downloading."""

    rows: list[int]
    ahead: list[int]


def _with_ahead(batches: Iterator[list[int]], workers: int) -> Iterator[_Wanted]:
    """Yield each batch with the samples that the same worker should start to download. Pure.

    The first batch of each worker names its own samples and the samples of the worker's next `READ_AHEAD`
    micro-batches. Each later batch names only the last of these.
    """
    later = deque(itertools.islice(batches, workers * READ_AHEAD))
    for number, following in enumerate(batches):
        later.append(following)
        ahead = following
        if number < workers:
            ahead = [index for k in range(0, workers * READ_AHEAD + 1, workers) for index in later[k]]
        yield _Wanted(later.popleft(), ahead)


class _Samples(Dataset[Any]):
    """Data set that maps a global sample number to that number and the row of the objective.

    A DataError is returned, not raised: torch's loader would raise it in the main process with the loader process's
    traceback as the message. For the same reason, a loader process opens the files when it reads its first sample, not
    when it starts.
    """

    def __init__(self, blend: Blend, objective: Objective) -> None:
        self.blend: Blend | bytes = blend
        self.objective = objective

    def __getitems__(self, wanted: _Wanted) -> list[tuple[int, NDArray[np.int64]] | DataError]:
        """Return the samples of a micro-batch."""
        with contextlib.suppress(DataError):  # reading the affected sample raises the error again
            for index in wanted.ahead:
                self._opened().fetch_ahead(index)
        return [self[index] for index in wanted.rows]

    def __getitem__(self, index: int) -> tuple[int, NDArray[np.int64]] | DataError:
        try:
            return index, self.objective.row(self._opened().parts(index), index)
        except DataError as error:
            return error

    def _opened(self) -> Blend:
        if isinstance(self.blend, bytes):
            self.blend = cast(Blend, pickle.loads(self.blend))
        return self.blend

    def __getstate__(self) -> dict[str, object]:
        blend = self.blend if isinstance(self.blend, bytes) else pickle.dumps(self.blend)
        return {"blend": blend, "objective": self.objective}


def collate(rows: list[Any], objective: Objective) -> Batch | DataError:
    """Return the micro-batch of a list of (sample number, row), or the first DataError in the list."""
    for row in rows:
        if isinstance(row, DataError):
            return row
    batch = objective.batch(torch.from_numpy(np.stack([row for _, row in rows])))
    return replace(batch, samples=torch.tensor([index for index, _ in rows]))


def batches(
    dataset: Blend,
    *,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    objective: Objective,
    pin_memory: bool,
    position_of: Callable[[int], int] = lambda samples: samples,
    share: range | None = None,
    cost: Callable[[int], float] | None = None,
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches, one list per step, without end, from the step after `consumed_samples` on.

    `num_workers` processes read ahead; 0 reads in this process. For data sets in object storage, each process downloads
    the data of its next `READ_AHEAD` micro-batches in the background. `position_of` maps the number of consumed samples
    to the first sample of the next step, which is larger if samples were left out. `share` is an argument of
    `sample_indices`. `cost` maps the number of tokens of a document to its cost. If it is given, each step's samples
    are read in `balanced_order`, otherwise in the order of the data set.

    Raises:
        DataError: A sample cannot be read. The error is raised in the step that would use the sample.
    """
    place = (micro_batch_size, data_parallel_rank, data_parallel_size, share)

    def step(first: int) -> list[list[int]]:
        indices = sample_indices(first, global_batch_size, *place)
        if cost is None:
            return indices
        samples = range(first, first + global_batch_size)
        costs = [math.fsum(map(cost, dataset.document_lengths(sample))) for sample in samples]
        order = balanced_order(costs, micro_batch_size)
        return [[samples[order[index - first]] for index in rows] for rows in indices]

    steps = itertools.count(consumed_samples, global_batch_size)
    micro_batches = (rows for consumed in steps for rows in step(position_of(consumed)))
    workers = max(1, num_workers)
    wanted = _with_ahead(micro_batches, workers) if dataset.is_remote else (_Wanted(rows, []) for rows in micro_batches)
    loader: DataLoader[Any] = DataLoader(
        _Samples(dataset, objective),
        batch_sampler=cast(Any, wanted),
        collate_fn=partial(collate, objective=objective),
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context=start_server() if num_workers else None,
        worker_init_fn=end_with_trainer,
        prefetch_factor=4 if num_workers else None,
    )
    stream = iter(loader)
    count = len(share or range(global_batch_size // (micro_batch_size * data_parallel_size)))
    while True:
        yield [_checked(next(stream)) for _ in range(count)]


def _checked(batch: Batch | DataError) -> Batch:
    if isinstance(batch, DataError):
        raise batch
    return batch
