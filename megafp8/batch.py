"""Micro-batch (`Batch`), as it moves from the data through the pipeline to a stage.

Shapes: b micro-batch, s sequence, d the decoder's sequence or depths of multi-token prediction, n documents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megafp8.layers.head.parts import TokenPart
from megafp8.parallel.context import shard_positions
from megafp8.parallel.placement import Placement, place_documents


@dataclass(frozen=True)
class Batch:
    """Micro-batch of tensors `[b, s]`; after `with_later_labels`, labels, mask and padding are `[(1 + d) b, s]`.

    Attributes:
        tokens: int64; the encoder's tokens for T5.
        labels: int64; `[b, d]` for T5, as is the loss mask.
        loss_mask: float32, 0 for labels that are not learned; None if all labels are learned.
        position_ids: int64; None unless attention and positions restart at documents.
        cu_seqlens: int32 `[b, n + 1]`, first token of each document of a sample, then s until the row is full; None
            unless attention restarts at documents. n is a power of two of at least 64, so that it rarely changes
            between batches: CUDA graphs need a fixed shape.
        chunks: int32 `[b, n, slots]`, tokens of each document in each slot of context-parallel ranks; None if all
            documents are cut equally (`with_placement`).
        gathered: Tokens of each context-parallel rank whose keys all ranks need; None without `chunks`.
        samples: int64 `[b]`, indices of the samples in the run; None without dropout.
        token_types: int64; None if all are 0.
        prefix: int64 `[b]`, number of leading tokens of a sample that all of its tokens attend to; None if tokens
            attend only to earlier tokens.
        padding: bool, padding tokens, which routers do not count; None without padding.
        label_padding: bool, padding labels; None if `padding` is None.
        decoder_tokens: int64 `[b, d]`, tokens of T5's decoder.
        documents: int64, document of the sample that each token belongs to; None unless losses are summed by document.
        places: int64, place of each token in a file that has a record of it, -1 for padding
            (`PackedDataset.first_place`).
        reference: Output of a frozen model for the micro-batch, as its loss defines it
            (`megafp8.objectives.ObjectiveLoss`): `[s, b, ...]` by token, or float64 `[b, n]` by document.
        sampled: float64 `[b, s, 4]`, record of each label that the model has sampled (`megafp8.objectives.grpo`).
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    chunks: Tensor | None = None
    gathered: int | None = None
    samples: Tensor | None = None
    token_types: Tensor | None = None
    prefix: Tensor | None = None
    padding: Tensor | None = None
    label_padding: Tensor | None = None
    decoder_tokens: Tensor | None = None
    documents: Tensor | None = None
    places: Tensor | None = None
    reference: Tensor | None = None
    sampled: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy this batch to `device`, asynchronously if it is in pinned memory."""
        return self.map(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy this batch to pinned memory."""
        return self.map(Tensor.pin_memory)

    @property
    def room(self) -> int:
        """Number of documents per sample that fit in `cu_seqlens`; 0 without `cu_seqlens`."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1

    def with_room(self, documents: int) -> Batch:
        """Pad `cu_seqlens`, `chunks` and `reference` to hold at least `documents` documents per sample."""
        added = documents - self.room
        if self.cu_seqlens is None or added <= 0:
            return self
        cu_seqlens = torch.cat([self.cu_seqlens, self.cu_seqlens[:, -1:].expand(-1, added)], dim=1)
        chunks = None if self.chunks is None else pad(self.chunks, (0, 0, 0, added))
        reference = None if self.reference is None else pad(self.reference, (0, added))
        return replace(self, cu_seqlens=cu_seqlens, chunks=chunks, reference=reference)

    @property
    def placement(self) -> Placement | None:
        """Placement of the documents on context-parallel ranks; None if all are cut equally."""
        if self.chunks is None:
            return None
        assert self.gathered is not None
        return Placement(self.chunks, self.gathered)

    def with_placement(self, ranks: int) -> Batch:
        """Place documents on context-parallel ranks such that attention is fast. The batch is in host memory."""
        if self.cu_seqlens is None:
            return self
        chunks, gathered = place_documents(self.cu_seqlens, ranks)
        pinned = self.cu_seqlens.is_pinned()  # a copy from other memory would wait for the device
        return replace(self, chunks=chunks.pin_memory() if pinned else chunks, gathered=gathered)

    def with_gathered(self, tokens: int) -> Batch:
        """Set the tokens of each context-parallel rank whose keys all ranks gather, to at least as many as now."""
        return self if self.gathered is None else replace(self, gathered=tokens)

    def with_later_labels(self, depths: int) -> Batch:
        """Append the labels of depths 1 to `depths` of multi-token prediction: at depth d, the labels d tokens later.

        A label is masked if its token's document or sample ends before it. A token is padding at depth d if one of the
        d tokens after it is padding, because the layers of that depth read the embeddings of these tokens.
        """
        if not depths:
            return self
        labels, mask, positions = self.labels, self.loss_mask, self.position_ids
        if mask is None:
            mask = torch.ones_like(labels, dtype=torch.float32)
        if positions is None:
            positions = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
        shifts = range(1, depths + 1)
        masks = [mask, *(mask.roll(-d, 1) * (positions.roll(-d, 1) == positions + d) for d in shifts)]
        later = [labels, *(labels.roll(-d, 1) for d in shifts)]
        padding, label_padding = self.padding, self.label_padding
        if padding is not None:
            assert label_padding is not None
            read = [padding, *(label_padding.roll(-d, 1) for d in range(depths))]
            padding = torch.cat([*accumulate(read, torch.logical_or)])
        return replace(
            self, labels=torch.cat(later), loss_mask=torch.cat(masks), padding=padding, label_padding=None
        )  # fmt: skip

    def shard(self, rank: int, ranks: int, *, cuts_documents: bool = True) -> Batch:
        """Return the tokens of context-parallel `rank`, with their positions `[b, s/ranks]`.

        Positions are `[1, s/ranks]` if they are the same in all samples. Tensors of whole samples stay unchanged.
        `cuts_documents` has the same meaning as in `parallel.context.place_tokens`.
        """
        if ranks == 1:
            return self
        documents, s = self.cu_seqlens if cuts_documents else None, self.tokens.shape[1]
        mine = shard_positions(documents, s, rank, ranks, self.tokens.device, self.chunks)

        def take(x: Tensor) -> Tensor:
            return x.gather(1, mine.repeat(x.shape[0] // mine.shape[0], 1))

        positions = mine if self.position_ids is None else take(self.position_ids)
        sampled = self.sampled
        if sampled is not None:
            sampled = torch.stack([take(x) for x in sampled.unbind(2)], dim=2)
        names = ("tokens", "labels", "loss_mask", "token_types", "padding", "label_padding", "documents", "places")
        taken: dict[str, Any] = {name: take(x) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, position_ids=positions, sampled=sampled, **taken)

    def part(self, part: TokenPart) -> Batch:
        """Return the labels of a part of the tokens, with what their losses read. `reference` must be by token."""
        names = ("labels", "loss_mask", "sampled")
        taken: dict[str, Any] = {name: part.of(x, 1) for name in names if (x := getattr(self, name)) is not None}
        reference = None if self.reference is None else part.of(self.reference, 0)
        return replace(self, reference=reference, **taken)

    @property
    def shape(self) -> Hashable:
        """Shapes of all tensors, and the other numbers on which a CUDA graph depends."""
        return (*(x.shape for x in self.tensors), self.gathered)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are present, in the order of the fields."""
        return [x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `function` to each tensor and return the new batch."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped: dict[str, Any] = {name: function(x) for name, x in parts.items() if isinstance(x, Tensor)}
        return replace(self, **mapped)
