"""Samples of seq_length + 1 tokens from shuffled documents, and micro-batches of them.

There is no state. Sample i belongs to epoch i // samples_per_epoch. Everything in an epoch is a function of
(seed, epoch): which tokens of which documents are in a sample (`packing`), and the order of the samples. So any rank
can read any sample, and a run reads the same sequence after a resume or with another number of ranks.

A run that changes its sample length has a `SamplePosition`. The numbering of samples continues, and the first samples
of the new length are the rest of the current epoch (`Packing.rest`), which is a function of the position.

The permutations and sums of an epoch are its *index*. The index is cached on local disk, in a file named by a hash of
everything that it depends on. The file is written under a temporary name and renamed. Any number of processes on any
number of nodes may create it at the same time: they write the same bytes, so no process waits and no shared file system
is needed. The file ends with its SHA-256; a file that does not match is created again, with a warning. Ranks compare
their indices by `index_checksum`.

The token ids of each sample are compared with the vocabulary when the sample is read. A sharded embedding would
silently return zeros for ids beyond the vocabulary, as it does for tokens of another rank's shard.

Shapes: b micro-batch, s sequence.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.data import DataError
from megafp8.data.indexed_dataset import IndexedDataset, check_ids, read_loss_mask
from megafp8.data.mapped_file import MappedFile
from megafp8.data.packing import PACKINGS, Arrays, BestFit, Concatenation, Packing, PackingName, Sentences
from megafp8.host.user_cache import user_cache

logger = logging.getLogger(__name__)

PADDING = -1
"""Value of a place in a sample that has no token."""
PLACES = 1 << 40
"""Size of the range of token numbers that each data set of a run gets; larger than any data set."""


def padded(parts: Sequence[NDArray[Any]], length: int) -> NDArray[np.int64]:
    """Return `parts` concatenated as int64, padded with `PADDING` to `length`."""
    sample = np.full(length, PADDING, np.int64)
    tokens = np.concatenate(parts)
    sample[: len(tokens)] = tokens
    return sample


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Return the documents of training, validation and test. Pure.

    `split` has weights such as "969,30,1", as in Megatron-LM. Raises ValueError unless there are one to three weights,
    none is negative, and at least one is positive.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f'data.split = {split!r}: it must be up to three weights such as "969,30,1"')
    weights += [0.0] * (3 - len(weights))
    ends = [round(num_documents * sum(weights[: i + 1]) / sum(weights)) for i in range(3)]
    return range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])


Given = tuple[int, int, bool]


@dataclass(frozen=True)
class SamplePosition:
    """Position in a data set at which samples of the current length begin.

    Attributes:
        first: Number of the first sample of the current length.
        epoch: Epoch of that sample.
        given: Samples of this epoch that were read with other lengths. For each length, in order: seq_length, number of
            samples, and whether the pieces of the rest have context (`Packing.rest`). Empty at the start of an epoch.
    """

    first: int = 0
    epoch: int = 0
    given: tuple[Given, ...] = ()


class _Rest(NamedTuple):
    """Rest of an epoch: the packing of its pieces, and the position of each piece in the data set's stream."""

    packing: Packing
    positions: NDArray[np.int64]


class _Index(NamedTuple):
    """Index of one epoch (`Packing.make_index`), its SHA-256, and its file if it was read from the cache."""

    arrays: Arrays
    checksum: str
    file: MappedFile | None = None


def default_cache() -> Path:
    """Return the default folder of cached indices, local to the node and the user."""
    return user_cache() / "index"


@dataclass
class ReferenceValues:
    """Log-probabilities under the reference model of both answers of each pair, float64 `[documents, 2]`.

    `values` is None until they are known. All readers of a data set's samples share one object.
    """

    values: NDArray[np.float64] | None = None


class PackedDataset:
    """Endless samples of `seq_length + 1` tokens from documents of a data set.

    `parts` raises DataError if a sample has a token id that is not in [0, `vocab_size`), or a mask value other than 0
    and 1.

    Args:
        dataset: Data set to read.
        documents: Documents of the data set to use.
        seq_length: Number of labels of a sample.
        seed: Seed of all permutations.
        cache_dir: Folder of cached indices. Default: `default_cache()`.
        vocab_size: Size of the vocabulary; None skips the check of token ids.
        packing: Packing of documents into samples.
        loss_mask: Loss mask of the data set, which `parts` then returns.
        context: The first token of a document is not predicted, and neither is the first token of a piece of one
            (`Packing.rest`).
        pairs: Each document is a pair of sequences, and each sequence is a part of a sample. Pairs that are longer than
            a sample are left out.
        first_place: Number of the first token of the data set; `parts` then returns the numbers of tokens as a last
            row.

    Raises:
        DataError: The documents have too few tokens for one sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        vocab_size: int | None = None,
        packing: PackingName = "concatenate",
        loss_mask: IndexedDataset | None = None,
        context: bool = False,
        pairs: bool = False,
        first_place: int | None = None,
    ) -> None:
        self.position, self._context = SamplePosition(), context
        self.pairs, self.reference = pairs, ReferenceValues() if pairs else None
        self.loss_mask, self.first_place = loss_mask, first_place
        self.dataset, self.documents, self.seq_length, self.seed = dataset, documents, seq_length, seed
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache()
        self.vocab_size = vocab_size
        span = slice(documents.start, documents.stop)
        lengths, self._positions = dataset.document_lengths[span], dataset.document_positions[span]
        self.num_tokens, self.left_out = int(lengths.sum()), 0
        if pairs:
            fits = lengths <= seq_length + 1
            lengths, self.left_out = np.where(fits, lengths, 0), int((~fits).sum())
            self._first_lengths = dataset.sentence_lengths(documents)[::2]
        self.packing: Packing
        if packing == "sentences":
            starts = self._positions - self._positions[:1]
            lengths = dataset.sentence_lengths(documents)
            self.packing = Sentences(lengths, starts, seq_length)
            lengths = np.concatenate([lengths, starts])
        else:
            self.packing = PACKINGS[packing](lengths, seq_length)
        self.samples_per_epoch = self.packing.samples
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{dataset.prefix}: documents {documents.start}-{documents.stop} hold {self.num_tokens:,} tokens, "
                f"{self.packing.too_few}; add data, or change data.split"
            )
        self._identity = hashlib.sha256(lengths.tobytes()).hexdigest()
        self._index: tuple[tuple[object, ...], _Index] | None = None

    def at(self, position: SamplePosition) -> PackedDataset:
        """Return a copy of this data set whose samples start at `position`."""
        moved = copy.copy(self)
        moved.position = position
        moved.__dict__.pop("_rest", None)
        return moved

    @cached_property
    def _rest(self) -> _Rest | None:
        """Rest of the position's epoch; None if the whole epoch is left, or too little for a sample."""
        if not self.position.given:
            return None
        assert isinstance(self.packing, (Concatenation, BestFit))
        lengths, positions = self.packing.lengths, self._positions
        for i, (seq_length, samples, context) in enumerate(self.position.given):
            packing = PACKINGS[self.packing.name](lengths, seq_length)
            index = self._load_index(packing, seq_length, self.position.epoch, self.position.given[:i])
            pieces = packing.rest(index.arrays, samples, context=context)
            positions, lengths = positions[pieces.documents] + pieces.skips, pieces.lengths
        if not len(lengths):
            return None
        rest = PACKINGS[self.packing.name](lengths, self.seq_length)
        return _Rest(rest, positions) if rest.samples > 0 else None

    @property
    def _first_samples(self) -> int:
        """Number of samples from `position.first` to the end of the position's epoch."""
        if not self.position.given:
            return self.samples_per_epoch
        return 0 if self._rest is None else self._rest.packing.samples

    def _place(self, index: int) -> tuple[int, int]:
        """Return the epoch of sample `index`, counted from the position's epoch, and its place in the epoch or rest."""
        number = index - self.position.first
        assert number >= 0
        if number < self._first_samples:
            return 0, number
        epochs, place = divmod(number - self._first_samples, self.samples_per_epoch)
        return 1 + epochs, place

    def position_after(self, samples: int) -> SamplePosition:
        """Return the position for another sample length that starts after `samples` >= `position.first` samples."""
        epochs, place = self._place(samples)
        before = self.position.given if epochs == 0 else ()
        earlier = (*before, (self.seq_length, place, self._context)) if place else before
        return SamplePosition(samples, self.position.epoch + epochs, earlier)

    def epochs(self, samples: int) -> float:
        """Return the number of epochs read after `samples` >= `position.first` samples."""
        epochs, place = self._place(samples)
        if epochs == 0:
            return self.position.epoch + 1 - (self._first_samples - place) / self.samples_per_epoch
        return self.position.epoch + epochs + place / self.samples_per_epoch

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return sample `index` >= 0, int64 `[seq_length + 1]`, padded at the end with `PADDING`."""
        return padded([np.atleast_2d(part)[0] for part in self.parts(index)], self.seq_length + 1)

    def parts(self, index: int) -> list[NDArray[Any]]:
        """Return the parts of documents, or sentences, that make up sample `index` >= 0, in order.

        Each part has its tokens, `[n]`, or with a loss mask its tokens and mask, `[2, n]`. With token numbers or
        reference values, each part has one more row.
        """
        spans = self._spans(index)
        firsts, parts = [first for first, _ in spans], [self.dataset.read(*span) for span in spans]
        if self.vocab_size is not None:
            for first, part in zip(firsts, parts):
                check_ids(self.dataset, part, self.vocab_size, first)
        if self.loss_mask is None:
            return parts if self.first_place is None else self._numbered(parts, firsts)
        masks = [read_loss_mask(self.loss_mask, first, len(part)) for first, part in zip(firsts, parts)]
        masked = [np.stack([part, mask]) for part, mask in zip(parts, masks)]
        if self.first_place is not None:
            return self._numbered(masked, firsts)
        return self._halves(masked, self.documents_of(index)) if self.pairs else masked

    def _numbered(self, parts: Sequence[NDArray[Any]], firsts: Sequence[int]) -> list[NDArray[Any]]:
        """Append a row with the number of each token to `parts`: `[2 or 3, n]`."""
        assert self.first_place is not None
        places = [self.first_place + first + np.arange(part.shape[-1]) for first, part in zip(firsts, parts)]
        return [np.concatenate([np.atleast_2d(x).astype(np.int64), at[None]]) for x, at in zip(parts, places)]

    def _halves(self, parts: Sequence[NDArray[Any]], numbers: Sequence[int]) -> list[NDArray[Any]]:
        """Return the two sequences of each pair: rows with tokens and mask, `[2, n]`.

        If the answer's log-probability under the reference model is known, a third row has it at each token, as the
        bits of a float64.
        """
        halves = [half for i, part in zip(numbers, parts) for half in np.split(part, [self._first_lengths[i]], axis=1)]
        assert self.reference is not None
        if self.reference.values is None:
            return halves
        known = self.reference.values[np.asarray(numbers) + self.documents.start].reshape(-1).view(np.int64)
        return [np.stack([*half.astype(np.int64), np.full(half.shape[1], bits)]) for half, bits in zip(halves, known)]

    @property
    def used_documents(self) -> NDArray[np.int64]:
        """Numbers in the data set of the pairs that are used in samples."""
        lengths = self.packing.lengths if isinstance(self.packing, BestFit) else np.empty(0, np.int64)
        return np.flatnonzero(lengths > 1) + self.documents.start

    def documents_of(self, index: int) -> list[int]:
        """Return the documents of sample `index`, counted from the start of `documents`."""
        epochs, place = self._place(index)
        packing = self._rest.packing if epochs == 0 and self._rest is not None else self.packing
        assert packing is self.packing or not self.pairs
        return [span.document for span in packing.spans(self._load(epochs).arrays, place)]

    def document_lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each part of sample `index`, then of its padding, if there is any."""
        lengths = [count for _, count in self._spans(index)]
        padding = self.seq_length + 1 - sum(lengths)
        return [*lengths, padding] if padding else lengths

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Return the position in the stream, and the number of tokens, of each part of sample `index`."""
        epochs, place = self._place(index)
        packing, positions = self.packing, self._positions
        if epochs == 0 and self._rest is not None:
            packing, positions = self._rest
        spans = packing.spans(self._load(epochs).arrays, place)
        return [(int(positions[document]) + skip, count) for document, skip, count in spans]

    def fetch_ahead(self, index: int) -> None:
        """Start to download the data that `parts(index)` will read, if it is in object storage."""
        if self.dataset.is_remote:
            for span in self._spans(index):
                self.dataset.fetch_ahead(*span)
                if self.loss_mask is not None:
                    self.loss_mask.fetch_ahead(*span)

    @property
    def prefix(self) -> str:
        """Path or URL of the data set, without suffix."""
        return self.dataset.prefix

    @property
    def fingerprint(self) -> str:
        """Identity of the contents, including the loss mask."""
        if self.loss_mask is None:
            return self.dataset.fingerprint
        return hashlib.sha256(f"{self.dataset.fingerprint} {self.loss_mask.fingerprint}".encode()).hexdigest()

    def __getstate__(self) -> dict[str, object]:  # without the index: loader processes read it from the cache
        return {**self.__dict__, "_index": None}

    def index_checksum(self, index: int) -> str:
        """Return the SHA-256 of this machine's index for the epoch of sample `index`."""
        return self._load(self._place(index)[0]).checksum

    def _load(self, epochs: int) -> _Index:
        """Return the index of the epoch that is `epochs` after the position's epoch; 0 means that epoch or its rest."""
        number = self.position.epoch + epochs
        if epochs == 0 and self._rest is not None:
            return self._load_index(self._rest.packing, self.seq_length, number, self.position.given)
        return self._load_index(self.packing, self.seq_length, number, ())

    def _load_index(self, packing: Packing, seq_length: int, number: int, given: tuple[Given, ...]) -> _Index:
        """Return the index of epoch `number`, or of its rest after `given`, from memory or the cache, or create it."""
        settings = (packing.name, seq_length, self.seed, number, *given)
        if self._index is not None and self._index[0] == settings:
            if (file := self._index[1].file) is not None:
                file.check()
            return self._index[1]
        key = hashlib.sha256(repr((_CACHE_FORMAT, self._identity, *settings)).encode())
        path = self.cache_dir / f"{key.hexdigest()[:32]}.index"
        index = self._read(path, packing)
        if index is None:
            index = self._write(path, self._make(number, packing, len(given)))
        self._index = (settings, index)
        return index

    def _make(self, number: int, packing: Packing, rests: int = 0) -> Arrays:
        """Compute the arrays of the index of epoch `number`, or of its rest after `rests` other lengths."""
        key = np.array([self.seed & (2**64 - 1), number + (rests << 48)], dtype=np.uint64)
        return packing.make_index(np.random.Generator(np.random.Philox(key=key)))

    def _read(self, path: Path, packing: Packing) -> _Index | None:
        """Read the cached index, or return None if it is missing or damaged. Damage is logged."""
        file = None
        try:
            file = MappedFile(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):  # ValueError: an empty file
            pass
        raw = np.empty(0, np.uint8) if file is None else file.content
        content, digest = raw[:-_DIGEST_BYTES], bytes(raw[-_DIGEST_BYTES:])
        if _digest(path, content) != digest:
            logger.warning("sample index %s is damaged: its checksum does not match; it will be created again", path)
            return None
        arrays, start = [], 0
        for dtype, length in packing.layout:
            end = start + np.dtype(dtype).itemsize * length
            arrays.append(content[start:end].view(dtype))
            start = end
        return _Index(arrays, digest.hex(), file)

    def _write(self, path: Path, arrays: Arrays) -> _Index:
        """Write an index to the cache atomically."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    digest = _digest(path, *arrays)
                    file.writelines([array.data for array in arrays])
                    file.write(digest)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise DataError(
                f"the sample index of {self.dataset.prefix} cannot be written to {self.cache_dir} ({error}); set "
                f"data.index_cache to a folder with {sum(array.nbytes for array in arrays) / 2**20:,.0f} MiB of room"
            ) from None
        return _Index(arrays, digest.hex())


_CACHE_FORMAT = 4
_DIGEST_BYTES = hashlib.sha256().digest_size


def _digest(path: Path, *content: Any) -> bytes:
    """Return the SHA-256 of a file's name and `content`: a file under the wrong name is as bad as a damaged one."""
    digest = hashlib.sha256(path.name.encode())
    for part in content:
        digest.update(part)
    return digest.digest()


_FEWEST_DOCUMENTS = 64


def room_for(documents: int) -> int:
    """Return the number of documents that `cu_seqlens` has room for: a power of two, at least 64."""
    return int(2 ** math.ceil(math.log2(max(_FEWEST_DOCUMENTS, documents))))


def documents_of(parts: Sequence[NDArray[Any]], length: int) -> NDArray[np.int64]:
    """Return the number of each token's part, `[length]`. Padding at the end counts as one more document."""
    lengths = [part.shape[-1] for part in parts]
    return np.repeat(np.arange(len(parts) + 1), [*lengths, length - sum(lengths)])


def next_token_batch(
    tokens_bs1: Tensor, document_bs1: Tensor | None = None, *, reset_at_documents: bool, mask_eod_loss: bool
) -> Batch:
    """Return the batch of inputs and labels for next-token prediction. Pure.

    `PADDING` becomes token 0 without loss, and is marked in the batch's `padding` and `label_padding`. Samples with
    padding need both options.

    Args:
        tokens_bs1: Samples, `[b, s + 1]`.
        document_bs1: Number of each token's document, `[b, s + 1]`. Both options need it.
        reset_at_documents: Restart attention and positions at each document.
        mask_eod_loss: Ignore labels that are the first token of a document, which no token predicts.
    """
    padding = tokens_bs1 == PADDING
    assert (reset_at_documents and mask_eod_loss) or not padding.any()
    filled = tokens_bs1.masked_fill(padding, 0)
    tokens, labels = filled[:, :-1].contiguous(), filled[:, 1:].contiguous()
    if document_bs1 is None:
        assert not reset_at_documents
        assert not mask_eod_loss
        return Batch(tokens, labels)
    last = document_bs1[:, 1:] != document_bs1[:, :-1]
    mask = (~(last | padding[:, 1:])).float() if mask_eod_loss else None
    if not reset_at_documents:
        return Batch(tokens, labels, mask)
    batch = batch_of_documents(tokens, labels, mask, last)
    if not mask_eod_loss:
        return batch
    return replace(batch, padding=padding[:, :-1].contiguous(), label_padding=padding[:, 1:].contiguous())


def batch_of_documents(tokens: Tensor, labels: Tensor, mask: Tensor | None, last: Tensor) -> Batch:
    """Return a batch in which attention and positions restart after the `last` token of each document. Pure.

    All arguments are `[b, s]`.
    """
    b, s = tokens.shape
    starts = torch.nn.functional.pad(last[:, :-1], (1, 0), value=True)
    cu_seqlens = torch.full((b, room_for(int(starts.sum(1).max())) + 1), s, dtype=torch.int32)
    sample, first = starts.nonzero(as_tuple=True)
    cu_seqlens[sample, (starts.cumsum(1) - 1)[sample, first]] = first.int()
    positions = torch.arange(s).expand_as(tokens)
    return Batch(tokens, labels, mask, positions - torch.where(starts, positions, 0).cummax(1).values, cu_seqlens)
