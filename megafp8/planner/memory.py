"""Memory of each rank, from the config alone.

What a rank holds at its fullest moment, in bytes of torch's allocator (`torch.cuda.max_memory_allocated`): what stays
from step to step, and what is there when the last micro-batch that fits into the pipeline's depth has come to the point
in its backward pass where most is alive. CUDA's context and NCCL's buffers, one to three GB, come on top, and so does
what the allocator cannot use between its blocks.

Backward frees what it passes, so the fullest moment is one of these:

- the loss: all blocks' activations, the logits (their gradient overwrites them), and the output layer's input and its
  gradient;
- the backward of block i: the activations of blocks up to i, those that i makes again if it is recomputed, and what
  backward itself needs. Offloaded blocks count where they are on the device: i and the one before.

Shapes as in `activations`; n parameters of a rank, v vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megafp8.config import Config
from megafp8.fp8 import Fp8Manager
from megafp8.models.gpt import fp8_layer_sizes
from megafp8.models.recompute import block_memory
from megafp8.optimizer.buckets import bucket_layout
from megafp8.pipeline_parallel.split import stage_layers
from megafp8.planner.activations import ELEMENT, block_backward, block_keeps, codes, precision, sizes

_WORKSPACES = 2 * 32 * 2**20
"""cuBLAS's and cuBLASLt's on Hopper, a stream each."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage. `host` is pinned memory of the host and not in the total."""

    parameters: int
    fp8_weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    loss: int
    backward: int
    communication: int
    workspace: int
    host: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def parameter_sizes(config: Config, stage: int) -> list[int]:
    """Elements of each parameter of a rank of `stage`, in forward order."""
    model, t, x = config.model, config.parallel.tensor, sizes(config)
    layers = stage_layers(model.num_layers, config.parallel.pipeline, config.parallel.layers_per_stage)[stage]
    norm = [x.h] * (2 if model.normalization == "layernorm" else 1)
    qkv = (x.a + 2 * x.g) * x.d
    block = [*norm, qkv * x.h, *[qkv] * (model.linear_bias or model.qkv_bias)]
    block += [x.h * x.a * x.d, *[x.h] * model.linear_bias, *[x.d, x.d] * model.qk_norm]
    block += [*norm, x.up * x.h, *[x.up] * model.linear_bias, x.h * x.f, *[x.h] * model.linear_bias]
    table = model.padded_vocab_size // t * x.h
    found = []
    if layers.start == 0:
        found.append(table)
        if model.position_embedding == "learned":
            found.append((model.max_position_embeddings or config.training.seq_length) * x.h)
    found += block * len(layers)
    if layers.stop == model.num_layers:
        found += norm if model.tie_embeddings and layers.start == 0 else [*norm, table]
    return found


def optimizer_bytes(numels: Sequence[int], precision: str, shards: int = 1) -> tuple[int, int]:
    """Masters and Adam's moments, fp32, of parameters cut over `shards` ranks; fp32 weights are their own masters."""
    n = -(-sum(numels) // shards)
    return (0 if precision == "fp32" else 4 * n), 8 * n


def fp8_weight_bytes(config: Config, fp8: Fp8Manager, layers: range) -> int:
    """The FP8 copies of the weights of `layers`: rows, and columns for dgrad."""
    total = 0
    for name, (k, n) in fp8_layer_sizes(config.model, config.parallel.tensor).items():
        layer = precision(fp8, name)
        if int(name.split(".")[1]) not in layers or layer.weight is None or (layer.high.fprop and layer.high.dgrad):
            continue
        total += codes(layer.weight, n, k) + (0 if layer.high.dgrad else codes(layer.weight, k, n))
    return total


def stage_memory(config: Config, world_size: int, stage: int, fp8: Fp8Manager) -> StageMemory:
    """What each rank of pipeline stage `stage` holds under 1F1B. `fp8`: which layers are FP8, as the config says."""
    p, training, x = config.parallel, config.training, sizes(config)
    layers = stage_layers(config.model.num_layers, p.pipeline, p.layers_per_stage)[stage]
    numels = parameter_sizes(config, stage)
    masters, moments = optimizer_bytes(numels, training.precision)
    data = world_size // (p.tensor * p.pipeline)
    microbatches = training.global_batch_size // (training.micro_batch_size * data)
    depth = min(p.pipeline - stage, microbatches)
    static = StageMemory(
        parameters=sum(numels) * ELEMENT[training.precision],
        fp8_weights=fp8_weight_bytes(config, fp8, layers),
        gradients=4 * bucket_layout(numels, max(1, int(p.bucket_mib * 2**20 / 4))).numel,
        masters=masters,
        moments=moments,
        activations=0,
        loss=0,
        backward=0,
        # In flight: an activation and a gradient each way, of which the received activation is the first block's input.
        communication=0 if p.pipeline == 1 else 3 * x.m_own * x.h * x.e,
        workspace=_WORKSPACES,
        host=0,
    )
    return max(_moments(config, fp8, layers, depth, static), key=lambda moment: moment.total)


def _moments(config: Config, fp8: Fp8Manager, layers: range, depth: int, static: StageMemory) -> list[StageMemory]:
    """The rank's memory at the loss, and in the backward pass of each block."""
    x = sizes(config)
    memory = block_memory(config.parallel, len(layers))
    kept = [sum(block_keeps(config, fp8, i, own).values()) for i, own in zip(layers, memory)]
    on_device = [0 if own.offload else size for size, own in zip(kept, memory)]
    away = [size if own.offload else 0 for size, own in zip(kept, memory)]
    others = (depth - 1) * sum(on_device)
    static = replace(static, host=depth * sum(away))
    found = []
    for at, index in enumerate(layers):
        made_again = 0
        if memory[at].full:
            everything = block_keeps(config, fp8, index, replace(memory[at], full=False))
            made_again = sum(everything.values()) - kept[at]  # whose input is part of it
        fetched = sum(away[max(0, at - 1) : at + 1])
        activations = others + sum(on_device[: at + 1]) + fetched
        backward = made_again + block_backward(config, fp8, index)
        found.append(replace(static, activations=activations, backward=backward))
    if layers.stop == config.model.num_layers:
        logits = x.m * (config.model.padded_vocab_size // config.parallel.tensor) * x.e
        ends = (x.m_own + 2 * x.m) * x.h * x.e  # the final norm's input; the output layer's, and its gradient
        found.append(replace(static, activations=others + sum(on_device) + sum(away[-1:]), loss=logits + ends))
    return found


def memory_table(config: Config, world_size: int, fp8: Fp8Manager) -> str:
    """`stage_memory` of each stage, in words and GiB."""
    names = [field.name for field in fields(StageMemory)]
    columns = [*names[:-1], "total", names[-1]]
    lines = [
        "memory of a rank in GiB, by formula; CUDA's context and NCCL's buffers come on top; host: pinned, not in it",
        "stage  " + "  ".join(column.replace("_", " ") for column in columns),
    ]
    for stage in range(config.parallel.pipeline):
        memory = stage_memory(config, world_size, stage, fp8)
        cells = (f"{getattr(memory, column) / 2**30:>{len(column)}.2f}" for column in columns)
        lines.append(f"{stage:>5}  " + "  ".join(cells))
    return "\n".join(lines)
