"""Embedding of tokens, which computes the residual stream from token ids.

Shapes: s sequence, b micro-batch, h hidden size (in outputs: of all residual streams together), t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megafp8.layers.context import BuildContext, replicated_parameters
from megafp8.layers.dropout import op as dropouts
from megafp8.layers.dropout.reference import DropoutStream, TokenPlaces
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.layers.norm.module import block_norm, normalized
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.mappings import scatter_to_sequence_parallel
from megafp8.spec import ModelSpec


def word_embedding(
    model: ModelSpec, context: BuildContext, weight: nn.Parameter | None = None
) -> VocabParallelEmbedding:
    """Return the embedding of token ids; `weight` is an existing table to share."""
    return VocabParallelEmbedding(
        "embedding.word",
        model.stem.rows,
        model.hidden_size,
        group=context.tensor,
        init=Init("normal", model.init_std),
        dtype=context.dtype,
        device=context.device,
        sequence_parallel=context.sequence_parallel,
        multiplier=model.stem.multiplier,
        weight=weight,
    )


class Embedding(nn.Module):
    """Embedding of tokens `[b, s]` as the residual stream `[s, b, h]`, or `[s/t, b, h]` under sequence parallelism.

    If the model has learned positions or token types, their embeddings are added, and if it has an embedding norm, the
    sum is normalized. If there are several residual streams, each starts with this value.
    """

    def __init__(self, model: ModelSpec, context: BuildContext, positions: int) -> None:
        super().__init__()
        self.context, self.streams = context, model.stream_width // model.hidden_size
        self.word = word_embedding(model, context)
        self.position: nn.Parameter | None = None
        if model.stem.position_embedding == "learned":
            self.position = self._table("position", positions, model)
        self.token_type = self._table("token_type", model.stem.token_types, model) if model.stem.token_types else None
        self.norm = block_norm("embedding_norm", model, context) if model.stem.normalizes else None
        self.dropout = DropoutStream.from_seed(model.hidden_dropout, context.seed, "embedding")

    def _table(self, name: str, rows: int, model: ModelSpec) -> nn.Parameter:
        shapes = {f"embedding.{name}.weight": (rows, model.hidden_size)}
        return replicated_parameters(self.context, shapes, Init("normal", model.init_std))

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor | None,
        places: TokenPlaces | None = None,
        token_types_bs: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream of the tokens.

        Args:
            tokens_bs: Token ids.
            position_ids_bs: Positions of the tokens; None means 0, 1, ... in each sequence.
            places: Positions and samples of the residual stream's tokens, which key its dropout; None means no dropout.
            token_types_bs: Types of the tokens; None means type 0 for all tokens.
        """
        x_sbh = self.word(tokens_bs)
        if self.position is not None:
            if position_ids_bs is None:
                position_ids_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)[None]
            x_sbh = x_sbh + self._look_up(self.position, position_ids_bs)
        if self.token_type is not None:
            types_bs = torch.zeros_like(tokens_bs) if token_types_bs is None else token_types_bs
            x_sbh = x_sbh + self._look_up(self.token_type, types_bs)
        x_sbh = x_sbh if self.norm is None else normalized(self.norm, x_sbh)
        x_sbh = dropouts.add(None, x_sbh, self.dropout.at(places))
        return x_sbh if self.streams == 1 else x_sbh.repeat(1, 1, self.streams)

    def _look_up(self, table: nn.Parameter, ids_bs: Tensor) -> Tensor:
        ids_sb = ids_bs.transpose(0, 1)
        if self.context.sequence_sharded:  # the table's gradient then covers this rank's slice: reduce_over_tp
            ids_sb = scatter_to_sequence_parallel(ids_sb, self.context.tensor)
        return nn.functional.embedding(ids_sb, table)
