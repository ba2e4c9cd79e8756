"""The process groups that a config's section `parallel` describes."""

from __future__ import annotations

import torch

from megafp8.config import Config
from megafp8.parallel.parallel_state import ParallelState, initialize_model_parallel


def build_parallel(config: Config, device: torch.device) -> ParallelState:
    """The grid of ranks of `config.parallel`. Collective; the job has been joined (`initialize_distributed`)."""
    p = config.parallel
    return initialize_model_parallel(
        p.tensor,
        p.pipeline,
        p.virtual_pipeline,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        fsdp_replicas=p.fsdp_replicas,
        device=device,
        timeout_seconds=config.timeout_seconds,
    )
