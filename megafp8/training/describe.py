"""What a run will be, before it is: the resolved config, the layout of ranks, parameters per rank.

Parameters are counted by building each stage on torch's meta device with stand-ins for the groups, so the figure is
that of the real constructors and costs neither memory nor a process group, at any world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import yaml
from torch.distributed import ProcessGroup

from megafp8.config import Config
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.flops import flops_per_token
from megafp8.models.gpt import GPTStage
from megafp8.parallel_state import rank_groups
from megafp8.pipeline_parallel.split import stage_layers
from megafp8.sharding import spec_of


@dataclass(frozen=True)
class _PlannedGroup:
    """As much of a process group as constructors ask for."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def planned_stage(config: Config, stage: int) -> GPTStage:
    """Pipeline stage `stage` as the first tensor rank will hold it, on the meta device."""
    context = BuildContext(
        tensor=cast(ProcessGroup, _PlannedGroup(config.parallel.tensor)),
        fp8=Fp8Manager(None, amax_group=None),
        dtype=torch.float32,
        device=torch.device("meta"),
        sequence_parallel=config.parallel.sequence_parallel,
    )
    layers = stage_layers(config.model.num_layers, config.parallel.pipeline, config.parallel.layers_per_stage)
    return GPTStage(config.model, context, layers=layers[stage], positions=position_rows(config))


def position_rows(config: Config) -> int:
    """Rows of the learned position table."""
    return config.model.max_position_embeddings or config.training.seq_length


def describe(config: Config, world_size: int) -> str:
    """The text of --dry-run."""
    p, t = config.parallel, config.training
    data = world_size // (p.tensor * p.pipeline * p.context)
    groups = rank_groups(world_size, p.tensor, p.pipeline, p.context)
    stages = [planned_stage(config, stage) for stage in range(p.pipeline)]
    counts = [sum(x.numel() for x in stage.parameters()) for stage in stages]
    params = [param for stage in stages for param in stage.parameters() if not spec_of(param).is_copy]
    total = sum(x.numel() * (1 if spec_of(x).replicated_over_tp else p.tensor) for x in params)
    lines = [
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
        "",
        f"layout: {world_size} ranks = pipeline {p.pipeline} × data {data}"
        f"{f' × context {p.context}' if p.context > 1 else ''} × tensor {p.tensor}"
        f"{' with sequence parallelism' if p.sequence_parallel and p.tensor > 1 else ''}",
        f"micro-batches per step and rank: {t.global_batch_size // (t.micro_batch_size * data)}"
        f" of {t.micro_batch_size} × {t.seq_length // p.context} tokens;"
        f" {t.global_batch_size * t.seq_length:,} tokens a step",
        f"parameters: {total:,} in the model; {flops_per_token(config.model, t.seq_length) / 1e9:.3f} GFLOP per token",
        "",
        "stage  layers    parameters/rank  ranks",
    ]
    layers = stage_layers(config.model.num_layers, p.pipeline, p.layers_per_stage)
    per_stage = data * p.context * p.tensor
    for stage, (count, span) in enumerate(zip(counts, layers)):
        first = stage * per_stage
        lines.append(f"{stage:>5}  {span.start:>3}-{span.stop - 1:<4} {count:>16,}  {first}-{first + per_stage - 1}")
    lines += ["", "groups of rank 0:"]
    context = ("context",) if p.context > 1 else ()
    for name in ("tensor", *context, "data", "pipeline", "amax", "model", "embedding"):
        ranks = next(g for g in groups[name] if 0 in g)
        shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        lines.append(f"  {name:<10} {len(ranks):>5} ranks: {shown}  ({len(groups[name])} such groups)")
    return "\n".join(lines)
