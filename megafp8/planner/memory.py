"""Memory of each rank, from the config alone.

What a rank holds at its fullest moment, in bytes of torch's allocator (`torch.cuda.max_memory_allocated`): what stays
from step to step, and what is there at that point of the schedule where most is alive. CUDA's context and NCCL's
buffers, one to three GB, come on top, and so does what the allocator cannot use between its blocks.

The schedule says which micro-batches are held: between its forward and its backward a micro-batch holds its
activations, and between its backward and its weight gradients, where these are apart, their operands. Backward frees
what it passes, so the fullest moment within it is one of these:

- the loss: all blocks' activations, the logits (their gradient overwrites them), and the output layer's input and its
  gradient;
- the backward of block i: the activations of blocks up to i, those that i makes again if it is recomputed, and what
  backward itself needs. Offloaded blocks count where they are on the device: i and the one before.

Under parallel.fsdp a rank has its rows alone, and what is gathered belongs to the moment: two blocks' weights, for the
next is on its way; a block's gradients, whole, and what is being sent of those before; FP8 copies of one layer. Codes
have two blocks' places throughout. Torch keeps what it sent last until it sends again.

Shapes as in `activations`; n parameters of a rank, v vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megafp8.config import Config
from megafp8.data_parallel.buckets import bucket_layout
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.recipes.base import DelayedScaling
from megafp8.fp8.tensor import TENSOR
from megafp8.models.gpt import fp8_layer_names, fp8_layer_sizes
from megafp8.models.recompute import block_memory
from megafp8.optimizer.fp8_moments import BLOCK
from megafp8.pipeline_parallel.schedules import Action, Kind, Placement, Schedule, splits
from megafp8.planner.activations import (
    ELEMENT,
    block_backward,
    block_keeps,
    block_leaves_for_later,
    codes,
    precision,
    sizes,
)
from megafp8.planner.stages import layers_of_stages

_WORKSPACES = 2 * 32 * 2**20
"""cuBLAS's and cuBLASLt's on Hopper, a stream each."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of parameters, and of what exists for each of them from the first step to the last, on a rank.

    `weights`: with fp8.param_gather codes where there are no values; then only their columns are copies. With
    parallel.fsdp the values are the masters.
    """

    weights: int
    gradients: int
    masters: int
    moments: int


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Bytes of a rank at its fullest moment. `host` is pinned memory of the host and not in the total."""

    fp8_weights: int = 0
    amax_history: int = 0
    activations: int = 0
    loss: int = 0
    backward: int = 0
    communication: int = 0
    workspace: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def state_memory(
    config: Config, numels: Sequence[int], data: int, alone: Sequence[int] = (), coded: Collection[int] = ()
) -> StateMemory:
    """Of parameters of `numels` elements, of which `alone` have buckets of their own and `coded` are FP8 codes, on one
    of `data` that sum their gradients; under ZeRO the most that any of them holds."""
    p, dtype = config.parallel, config.training.precision
    if p.fsdp:
        rows = [-(-count // data) for count in numels]
        aligned = sum(-(-count // 64) * 64 for count in rows)
        codes_held = sum(rows[i] for i in coded)
        return StateMemory(codes_held, gradients=aligned * 4, masters=sum(rows) * 4, moments=_moments(config, rows))
    ranks, count = data if p.zero else 1, sum(numels)
    layout = bucket_layout(
        numels, max(1, int(p.bucket_mib * 2**20 / 4)), ranks=ranks, own_bucket=alone, fp8_bucket=coded
    )
    code_bytes = sum(bucket.end - bucket.start for bucket in layout.buckets if bucket.params[0] in coded)
    owned = min(count, layout.numel // ranks)
    owned_codes = min(sum(numels[i] for i in coded), code_bytes // ranks)
    return StateMemory(
        weights=((layout.numel if p.zero else count) - code_bytes) * ELEMENT[dtype] + code_bytes,
        gradients=layout.numel * 4,
        masters=(2 if config.optimizer.store_param_remainders else 4) * (owned_codes if dtype == "fp32" else owned),
        moments=_moments(config, [owned] if p.zero else numels),
    )


def _moments(config: Config, numels: Sequence[int]) -> int:
    """Bytes of both moments of runs of `numels` elements."""
    kept = config.optimizer.moments_dtype
    if kept == "fp8":
        return 2 * sum(count + -(-count // BLOCK) for count in numels)
    return 2 * sum(numels) * ELEMENT[kept]


class _Parameter(NamedTuple):
    """Elements on a rank; the layer that it is the weight of, if FP8 patterns see that."""

    elements: int
    layer: str = ""


def _norm(config: Config) -> list[_Parameter]:
    return [_Parameter(config.model.hidden_size)] * (2 if config.model.normalization == "layernorm" else 1)


def _block(config: Config, index: int) -> list[_Parameter]:
    """The parameters of block `index`."""
    model, x, norm = config.model, sizes(config), _norm(config)
    layers = fp8_layer_names(model, range(index, index + 1))
    width = (x.a + 2 * x.g) * x.d
    qkv, proj, up, down = map(_Parameter, (width * x.h, x.h * x.a * x.d, x.up * x.h, x.h * x.f), layers)
    output_bias, head_norms = [_Parameter(x.h)] * model.linear_bias, [_Parameter(x.d)] * (2 * model.qk_norm)
    attention = [qkv, *[_Parameter(width)] * (model.linear_bias or model.qkv_bias), proj, *output_bias, *head_norms]
    return [*norm, *attention, *norm, up, *[_Parameter(x.up)] * model.linear_bias, down, *output_bias]


def _stage(config: Config, layers: range) -> list[_Parameter]:
    """The parameters of a stage of `layers` on a rank, in the order of its constructor."""
    model, h = config.model, config.model.hidden_size
    table = [_Parameter(model.padded_vocab_size // config.parallel.tensor * h)]
    first, last = layers.start == 0, layers.stop == model.num_layers
    positions = _Parameter((model.max_position_embeddings or config.training.seq_length) * h)
    embedding = [*table * (first or (last and model.tie_embeddings))]
    embedding += [positions] * (first and model.position_embedding == "learned")
    blocks = [parameter for index in layers for parameter in _block(config, index)]
    return [*embedding, *blocks, *_norm(config) * last, *table * (last and not model.tie_embeddings)]


def parameter_sizes(config: Config, layers: range) -> list[int]:
    """Elements of each parameter of a stage of `layers` on a rank, in the order of its constructor."""
    return [parameter.elements for parameter in _stage(config, layers)]


def coded_parameters(config: Config, fp8: Fp8Manager, layers: range) -> list[int]:
    """Which of these are FP8 codes and nothing else."""
    if not config.fp8.param_gather:
        return []
    found = [precision(fp8, parameter.layer) if parameter.layer else None for parameter in _stage(config, layers)]
    return [i for i, layer in enumerate(found) if layer is not None and layer.weight is TENSOR]


def fp8_weight_bytes(config: Config, fp8: Fp8Manager, layers: range) -> int:
    """The FP8 copies of the weights of `layers`: rows, unless they are the weights, and columns for dgrad."""
    total = 0
    for name, (k, n) in fp8_layer_sizes(config.model, config.parallel.tensor, layers).items():
        layer = precision(fp8, name)
        if layer.weight is None or (layer.high.fprop and layer.high.dgrad):
            continue
        rows_are_copies = not (config.fp8.param_gather and layer.weight is TENSOR)
        total += codes(layer.weight, n, k) - (0 if rows_are_copies else n * k)
        total += 0 if layer.high.dgrad else codes(layer.weight, k, n)
    return total


def amax_history_bytes(config: Config, fp8: Fp8Manager, layers: range) -> int:
    """Of delayed scaling's amax histories for the operands of a stage's layers, fp32."""
    count = 0
    for name in fp8_layer_names(config.model, layers):
        operands = fp8.recipe.operands(name) if fp8.recipe is not None and fp8.selects(name) else None
        if operands is not None:
            count += sum(isinstance(operand, DelayedScaling) for operand in operands)
    return count * config.fp8.amax_history_len * 4


def rank_memory(
    config: Config, fp8: Fp8Manager, data: int, stages: Sequence[range], actions: Sequence[Action]
) -> RankMemory:
    """What a rank holds that has the layers `stages`, a range for each chunk, and takes `actions` in a step, one of
    `data` that sum their gradients. `fp8`: which layers are FP8, as the config says."""
    p, x = config.parallel, sizes(config)
    numels: list[int] = []
    alone: list[int] = []
    coded: list[int] = []
    for layers in stages:
        at_an_end = layers.start == 0 or layers.stop == config.model.num_layers
        if config.model.tie_embeddings and p.pipeline > 1 and at_an_end:
            alone.append(len(numels))
        coded += [len(numels) + i for i in coded_parameters(config, fp8, layers)]
        numels += parameter_sizes(config, layers)
    state = state_memory(config, numels, data, alone, coded)
    static = RankMemory(
        **vars(state),
        fp8_weights=0 if p.fsdp else sum(fp8_weight_bytes(config, fp8, layers) for layers in stages),
        amax_history=sum(amax_history_bytes(config, fp8, layers) for layers in stages),
        # In flight: an activation and a gradient each way, of which the received activation is the first block's input.
        communication=0 if p.pipeline == 1 else 3 * x.m_own * x.h * x.e,
        workspace=_WORKSPACES,
    )
    overlaps = p.overlap_grad_reduce and any(action.microbatch for action in actions)
    return _fullest(static, [_chunk(config, fp8, layers, overlaps) for layers in stages], actions)


class _Chunk(NamedTuple):
    """Of a micro-batch in a chunk: bytes kept on the device and on the host, those left for weight gradients, and in
    its backward's fullest moment those of activations, loss and backward."""

    kept: int
    away: int
    left: int
    fullest: tuple[int, int, int]


def _fullest(static: RankMemory, chunks: Sequence[_Chunk], actions: Sequence[Action]) -> RankMemory:
    """The rank's memory at the fullest moment of a step."""
    later = splits(list(actions))
    held = away = host = 0
    found = [static]
    for action in actions:
        chunk = chunks[action.chunk]
        if action.kind is Kind.FORWARD:
            held, away = held + chunk.kept, away + chunk.away
            host = max(host, away)
        elif action.kind is Kind.BACKWARD:
            held, away = held - chunk.kept, away - chunk.away
            activations, loss, backward = chunk.fullest
            found.append(replace(static, activations=held + activations, loss=loss, backward=backward))
            held += chunk.left if (action.microbatch, action.chunk) in later else 0
        elif action.kind is Kind.WEIGHT:
            held -= chunk.left
    return replace(max(found, key=lambda moment: moment.total), host=host)


class _Gathered(NamedTuple):
    """Under parallel.fsdp, bytes in the backward of each block, at the loss, and at the end of backward."""

    blocks: list[int]
    loss: int
    end: int


def _gathered(config: Config, fp8: Fp8Manager, layers: range, overlaps: bool) -> _Gathered:
    """`overlaps`: what is sent last of a micro-batch stays until the next one's backward has begun."""
    if not config.parallel.fsdp:
        return _Gathered([0] * len(layers), 0, 0)
    e, sent = ELEMENT[config.training.precision], ELEMENT[config.optimizer.reduce_dtype]
    elements = [sum(parameter.elements for parameter in _block(config, i)) for i in layers]
    coded = [sum(_coded_elements(config, fp8, i)) for i in layers]
    values = [(count - codes_of) * e for count, codes_of in zip(elements, coded)]
    places = 2 * max(coded, default=0)  # for codes, from the first block's forward on
    copies = [max(_coded_elements(config, fp8, i, gathered_as_codes=False), default=0) for i in layers]
    table = config.model.padded_vocab_size // config.parallel.tensor * config.model.hidden_size
    first, last = layers.start == 0, layers.stop == config.model.num_layers
    stays = table * e * (config.model.tie_embeddings and (first or last))
    summed = table * sent * (config.model.tie_embeddings and last)  # from the output layer's backward to the end
    blocks = []
    for at, own in enumerate(elements):
        before_own = elements[at + 1] if at + 1 < len(elements) else table * (last and not config.model.tie_embeddings)
        here = values[at] + (values[at - 1] if at else 0) + copies[at] + (own + max(own, before_own)) * sent
        blocks.append(here + places + stays + summed)
    end = table * (4 + sent)  # the embedding's gradient in fp32, and as it is sent
    ends_with_table = first or bool(stays)
    late = table * sent * (overlaps and ends_with_table)
    blocks[-1] += late * (not last)
    loss = last * (table * (e + sent) + values[-1] + late) + places
    return _Gathered(blocks, loss, ends_with_table * end + stays + places)


def _coded_elements(config: Config, fp8: Fp8Manager, index: int, *, gathered_as_codes: bool = True) -> list[int]:
    """Of block `index`, elements of each FP8 layer's weight; or of those alone that are gathered as codes."""
    found = []
    for parameter in _block(config, index):
        layer = precision(fp8, parameter.layer) if parameter.layer else None
        if layer is None or layer.weight is None:
            continue
        if not gathered_as_codes or (config.fp8.param_gather and layer.weight is TENSOR):
            found.append(parameter.elements)
    return found


def _chunk(config: Config, fp8: Fp8Manager, layers: range, overlaps: bool) -> _Chunk:
    x, gathered = sizes(config), _gathered(config, fp8, layers, overlaps)
    memory = block_memory(config.parallel, len(layers))
    kept = [sum(block_keeps(config, fp8, i, own).values()) for i, own in zip(layers, memory)]
    on_device = [0 if own.offload else size for size, own in zip(kept, memory)]
    away = [size if own.offload else 0 for size, own in zip(kept, memory)]
    moments = []
    for at, index in enumerate(layers):
        made_again = 0
        if memory[at].full:
            everything = block_keeps(config, fp8, index, replace(memory[at], full=False))
            made_again = sum(everything.values()) - kept[at]  # whose input is part of it
        activations = sum(on_device[: at + 1]) + sum(away[max(0, at - 1) : at + 1])
        moments.append((activations, 0, made_again + block_backward(config, fp8, index) + gathered.blocks[at]))
    if layers.stop == config.model.num_layers:
        logits = x.m * (config.model.padded_vocab_size // config.parallel.tensor) * x.e
        ends = (x.m_own + 2 * x.m) * x.h * x.e  # the final norm's input; the output layer's, and its gradient
        moments.append((sum(on_device) + sum(away[-1:]), logits + ends, gathered.loss))
    moments.append((0, 0, gathered.end))
    left = sum(block_leaves_for_later(config, fp8, index) for index in layers)
    if layers.stop == config.model.num_layers:  # the output layer's input, and the logits' gradient
        left += x.m * (x.h + config.model.padded_vocab_size // config.parallel.tensor) * x.e
    return _Chunk(sum(on_device), sum(away), left, max(moments, key=sum))


def pipeline_memory(
    config: Config, fp8: Fp8Manager, world_size: int, placement: Placement, schedule: Schedule
) -> list[RankMemory]:
    """Of a rank of each pipeline rank; `schedule` is a step's, on `world_size` ranks in all."""
    p = config.parallel
    layers = layers_of_stages(config, placement)
    data = world_size // (p.tensor * p.pipeline)  # context-parallel ranks among them
    return [
        rank_memory(config, fp8, data, [layers[stage] for stage in stages], actions)
        for stages, actions in zip(placement.stages, schedule, strict=True)
    ]


def memory_table(memories: Sequence[RankMemory]) -> str:
    """`pipeline_memory` in words and GiB."""
    names = [field.name for field in fields(RankMemory)]
    columns = [*names[:-1], "total", names[-1]]
    lines = [
        "memory of a rank in GiB, by formula; CUDA's context and NCCL's buffers come on top; host: pinned, not in it",
        "pipeline rank  " + "  ".join(column.replace("_", " ") for column in columns),
    ]
    for rank, memory in enumerate(memories):
        cells = (f"{getattr(memory, column) / 2**30:>{len(column)}.2f}" for column in columns)
        lines.append(f"{rank:>13}  " + "  ".join(cells))
    return "\n".join(lines)
