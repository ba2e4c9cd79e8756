"""The table of an embedding, its rows sharded over the tensor-parallel group.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary; t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.layers.embedding.op import look_up
from megafp8.parallel.sharding import Init, empty_parameter, shard_dim
from megafp8.parallel.tensor.mappings import reduce_from_tensor_parallel, reduce_scatter_to_sequence_parallel


class VocabParallelEmbedding(nn.Module):
    """Rows of the table `[v, h]` sharded over ranks: tokens `[b, s]` -> `[s, b, h]`, or `[s/t, b, h]`
    sequence-parallel.

    A rank looks up the tokens it owns, leaves zeros for the others, and the shares are summed. The gradient goes to the
    weight's sink, as that of a linear layer does. `multiplier`: of the output, rounded to its dtype. `weight`: use this
    parameter rather than make one.
    """

    def __init__(
        self,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup,
        init: Init,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
        multiplier: float = 1.0,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        t, rank = group.size(), group.rank()
        self.group = group
        self.sequence_parallel = sequence_parallel and t > 1
        self.multiplier = float(torch.tensor(multiplier, dtype=dtype, device="cpu"))
        rows = num_embeddings // t
        self.first = rank * rows
        if weight is None:
            shard = shard_dim(f"{name}.weight", (num_embeddings, embedding_dim), 0, rank, t)
            weight = empty_parameter([shard], init, dtype, device, replicated_over_tp=False)
        self.weight = weight

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_sbh = look_up(self.weight, tokens_bs.t() - self.first, partial=self.group.size() > 1)
        reduce = reduce_scatter_to_sequence_parallel if self.sequence_parallel else reduce_from_tensor_parallel
        x_sbh = reduce(x_sbh, self.group)
        return x_sbh if self.multiplier == 1 else x_sbh * self.multiplier
