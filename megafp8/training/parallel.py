"""Process groups of the config section `parallel`."""

from __future__ import annotations

import torch

from megafp8.config import Config
from megafp8.parallel.parallel_state import ParallelState, initialize_model_parallel


def build_parallel(config: Config, device: torch.device) -> ParallelState:
    """Create the process groups of `config.parallel`. Collective. Call `initialize_distributed` first."""
    p = config.parallel
    return initialize_model_parallel(
        p.tensor,
        p.pipeline,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        fsdp_replicas=p.fsdp_replicas,
        device=device,
        timeout_seconds=config.timeout_seconds,
    )
