"""How the tensor-parallel layers of a run exchange tokens: what `parallel.overlap_tensor` says, or the next best."""

from __future__ import annotations

from collections.abc import Callable

from megafp8.config import ParallelConfig
from megafp8.exchange import Chunked, Exchange, collective_exchange
from megafp8.parallel_state import ParallelState


def token_exchange(config: ParallelConfig, parallel: ParallelState, say: Callable[[str], None]) -> Exchange:
    """The one that all layers share. Collective over the tensor group; `say` hears it where it is not the one asked
    for."""
    group = parallel.tensor.group
    if config.overlap_tensor == "none" or not config.sequence_parallel or group.size() == 1:
        return collective_exchange(group, sequence_parallel=config.sequence_parallel)
    if config.overlap_tensor == "symmetric":
        from megafp8.symmetric import Symmetric  # which needs parts of torch that cost start-up time

        try:
            return Symmetric(group, parallel.device)
        except RuntimeError as error:
            say(f"parallel.overlap_tensor = symmetric: {error}; going on with chunked")
    return Chunked(group)
