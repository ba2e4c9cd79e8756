"""Embedding table with rows sharded over the tensor-parallel group.

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
    """Embedding with the rows of its table `[v, h]` sharded over tensor-parallel ranks.

    It maps tokens `[b, s]` to `[s, b, h]`, or to `[s/t, b, h]` under sequence parallelism. A rank looks up the tokens
    in its own rows and leaves zeros for other tokens, and the ranks' results are summed. The gradient goes to the
    weight's gradient sink, as for a linear layer.

    Args:
        name: Name of the module in the model.
        num_embeddings: Number of rows, v.
        embedding_dim: Number of columns, h.
        group: Tensor-parallel ranks.
        init: Initialization of the weight.
        dtype: Dtype of the weight.
        device: Device of the weight.
        sequence_parallel: Whether the output is sharded along the sequence.
        multiplier: Factor of the output, rounded to its dtype.
        weight: Existing parameter to use instead of a new one.
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
        """Return the embeddings of the tokens, `[s, b, h]` or `[s/t, b, h]`."""
        x_sbh = look_up(self.weight, tokens_bs.t() - self.first, partial=self.group.size() > 1)
        reduce = reduce_scatter_to_sequence_parallel if self.sequence_parallel else reduce_from_tensor_parallel
        x_sbh = reduce(x_sbh, self.group)
        return x_sbh if self.multiplier == 1 else x_sbh * self.multiplier
