"""Peak memory of each rank, from the config alone.

Memory is counted in bytes of PyTorch's allocator (`torch.cuda.max_memory_allocated`): bytes that persist from step to
step, plus temporary bytes at the point of the schedule where they are highest. CUDA's context and NCCL's buffers add
one to three GB, and fragmentation adds more.

A micro-batch holds its activations between its forward and its backward. If the schedule separates weight gradients
from backward, it holds their operands in between. Backward frees activations as it proceeds, so its peak is one of
these:

- the loss: all blocks' activations, the logits of a part of the tokens (their gradient overwrites them), and the output
  layer's input and its gradient;
- the backward of block i: the activations of blocks up to i, the recomputed activations of block i, and temporaries.
  Offloaded blocks count while they are on the device: block i and the one before.

Under parallel.fsdp, a rank holds its shard, and gathered parameters are transient: the weights of two blocks, because
the next one is prefetched; the whole gradients of a block, and of preceding blocks that are being reduced; the FP8
copies of one layer. FP8 weights have buffers for two blocks throughout. PyTorch keeps the last reduced gradients until
the next reduction.

Each layer reports what it saves (`layers.costs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple

from megafp8.config import Config
from megafp8.layers.costs import ELEMENT, MicroBatch, fp8_bytes
from megafp8.layers.experts.own_rows import MARGIN
from megafp8.layers.norm.module import NORMS
from megafp8.layers.recompute import block_memory
from megafp8.numerics.dtypes import DTYPES, state_dtype, sum_dtype
from megafp8.numerics.tensor import BLOCK_16X16
from megafp8.objectives.registry import loss_memory, loss_parts
from megafp8.optimizer.fp8_moments import BLOCK
from megafp8.optimizer.offload import BUFFERS, PIECE
from megafp8.parallel.data.plan import DataParallelPlan
from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement, split_backwards
from megafp8.planner.outline import LayerOutline, LinearLayer, ModelOutline, Parameter
from megafp8.planner.stages import data_parallel_plans, gathers_blocks, layers_of_stages

_WORKSPACES = 2 * 32 * 2**20
"""Workspaces of cuBLAS and cuBLASLt on Hopper, one for each stream."""
_HALVINGS = 8  # steps of the search for the room of experts


@dataclass(frozen=True)
class StateMemory:
    """Bytes of parameters and of their permanent state on a rank.

    `weights`: FP8 data if fp8.param_gather stores nothing else; `fp8_weights` are then the columnwise copies. With
    parallel.fsdp without replicas, the high-precision weights are the masters. `moments` includes the moving average of
    the weights.
    `host`: pinned host memory of masters and moments (optimizer.offload), which are not counted as such.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    host: int


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Bytes of a rank at its peak. `host` is pinned host memory, also of activations, and not part of the total.

    `frozen`: weights of the frozen model with which the loss compares, and its outputs for all micro-batches of a step.
    """

    fp8_weights: int = 0
    amax_history: int = 0
    activations: int = 0
    loss: int = 0
    backward: int = 0
    communication: int = 0
    workspace: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def state_memory(config: Config, parameters: Sequence[Parameter], data: int) -> StateMemory:
    """Return the state of `parameters` on one of `data` ranks that sum their gradients; under ZeRO, the maximum.

    Gradients of experts are summed over the ranks that hold the same experts.
    """
    others_plan, experts_plan = data_parallel_plans(config, data)
    trained = [x for x in parameters if x.trained]
    if len(trained) < len(parameters):
        state, frozen = _state_memory(config, trained, others_plan), [x for x in parameters if not x.trained]
        return replace(state, weights=state.weights + _weight_bytes(config, frozen, data))
    experts = [x for x in parameters if x.expert]
    if not experts or experts_plan.ranks == data:
        return _state_memory(config, parameters, others_plan)
    others = [x for x in parameters if not x.expert]
    parts = [_state_memory(config, others, others_plan), _state_memory(config, experts, experts_plan)]
    return StateMemory(*(sum(values) for values in zip(*map(astuple, parts))))


def _weight_bytes(config: Config, parameters: Sequence[Parameter], data: int) -> int:
    """Return the bytes of untrained parameters on one of `data` ranks."""
    others_plan, experts_plan = data_parallel_plans(config, data)
    plans = ((x.elements, experts_plan if x.expert else others_plan) for x in parameters)
    return sum(-(-elements // plan.weight_shards) for elements, plan in plans) * ELEMENT[config.training.precision]


def _state_memory(config: Config, parameters: Sequence[Parameter], plan: DataParallelPlan) -> StateMemory:
    """Return the state of parameters if all their gradients are summed over the same ranks."""
    optimizer, dtype = config.optimizer, config.training.precision
    counts = [len(optimizer.update(hidden_matrix=hidden).moments) for hidden in (False, True)]
    whole = gathers_blocks(config) and not plan.gathers_blocks  # experts that FSDP does not shard, nor gather in FP8
    elements = plan.held(
        [x.elements for x in parameters],
        [counts[bool(x.matrices)] for x in parameters],
        own_bucket=[i for i, x in enumerate(parameters) if x.shared],
        fp8=[i for i, x in enumerate(parameters) if x.only_fp8 and not whole],
    )
    moments, separate = _moments(config, elements.updated), elements.masters - elements.released
    masters = elements.released * sum_bytes(config) + separate * separate_master_bytes(config)
    offloaded = [int(optimizer.offload * nbytes) for nbytes in (separate * separate_master_bytes(config), moments)]
    return StateMemory(
        weights=elements.values * ELEMENT[dtype] + elements.fp8,
        gradients=elements.gradients * sum_bytes(config),
        masters=masters - offloaded[0],
        moments=moments - offloaded[1],
        host=sum(offloaded),
    )


def separate_master_bytes(config: Config) -> int:
    """Return the bytes of the master of an element that has other values too; only such masters can be offloaded."""
    if ELEMENT[config.training.precision] == sum_bytes(config):
        return 0
    return 2 if config.optimizer.store_param_remainders else sum_bytes(config)


def masters_are_gathered(config: Config) -> bool:
    """Return whether FSDP gathers from the masters, which then stay on the device."""
    return config.parallel.fsdp and config.parallel.fsdp_replicas == 1


def _offload_buffers(config: Config, host: int) -> int:
    """Return the bytes of the buffers through which a step streams `host` bytes of optimizer state."""
    masters = 0 if masters_are_gathered(config) else PIECE * separate_master_bytes(config)
    moments = _moments(config, [(len(config.optimizer.update(hidden_matrix=False).moments), PIECE)])
    return min(host, BUFFERS * (masters + moments))


def sum_bytes(config: Config) -> int:
    """Return the bytes per element of gradients and masters."""
    return sum_dtype(DTYPES[config.training.precision]).itemsize


def state_bytes(config: Config, dtype: str) -> int:
    """Return the bytes per element of gradients or state with a dtype named in the config."""
    return state_dtype(dtype, DTYPES[config.training.precision]).itemsize


def least_moment_bytes(config: Config) -> int:
    """Return a lower bound for the bytes per element of moments, moving average and outer state."""
    moments = min(len(config.optimizer.update(hidden_matrix=hidden).moments) for hidden in (False, True))
    return moments * state_bytes(config, config.optimizer.moments_dtype) + _kept_bytes(config)


def _moments(config: Config, tensors: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of moments, moving average and outer state.

    `tensors` has the number of moments and the number of elements of each tensor.
    """
    dtype, total = config.optimizer.moments_dtype, 0
    for moments, count in tensors:
        scales = -(-count // BLOCK) if dtype == "fp8" else 0
        total += moments * (count * state_bytes(config, dtype) + scales) + count * _kept_bytes(config)
    return total


def _kept_bytes(config: Config) -> int:
    """Return the bytes per element of the moving average, and of momentum and start weights of outer steps."""
    return sum_bytes(config) * ((config.optimizer.average_decay is not None) + 2 * (config.outer is not None))


class BlockElements(NamedTuple):
    """Number of elements of a block's parameters on a rank.

    Experts and others are counted separately, each as FP8 data only (`_fp8`) or as values.
    """

    experts_fp8: int
    experts: int
    fp8: int
    others: int


def block_elements(layer: LayerOutline) -> BlockElements:
    """Return the number of elements of a layer's parameters, by their storage."""

    def count(*, expert: bool, only_fp8: bool) -> int:
        return sum(p.elements for p in layer.parameters if (p.expert, p.only_fp8) == (expert, only_fp8))

    return BlockElements(*(count(expert=e, only_fp8=fp8) for e in (True, False) for fp8 in (True, False)))


def _table(config: Config) -> int:
    """Return the number of elements in a rank's shard of the embedding, or of the output layer."""
    return config.spec.stem.rows // config.parallel.tensor * config.spec.hidden_size


def fp8_weight_bytes(outline: ModelOutline, layers: range) -> int:
    """Return the bytes of FP8 weight copies: rowwise unless it is the weight itself, and columnwise for dgrad."""
    return sum(_fp8_copies(outline.batch, layer) for layer in outline.linears(layers).values())


def _fp8_copies(batch: MicroBatch, layer: LinearLayer) -> int:
    """Return the bytes of the FP8 copies of a layer's weight, including all identical layers."""
    (fprop, dgrad, _), k, n = layer.plan.gemms, layer.site.inputs, layer.site.outputs
    if fprop == dgrad == "high":
        return 0
    weight = batch.granularity(layer.plan.name, "weight")
    if weight is BLOCK_16X16:  # both orientations are views of the same data
        return layer.copies * fp8_bytes(weight, n, k)
    rowwise = fp8_bytes(weight, n, k) - (n * k if layer.only_fp8 else 0)
    return layer.copies * (rowwise + (0 if dgrad == "high" or layer.transposes else fp8_bytes(weight, k, n)))


def transposed_weight_bytes(outline: ModelOutline, layers: range) -> int:
    """Return the bytes of the largest FP8 weight that a backward pass transposes instead of keeping its transpose."""
    return max((x.weights for x in outline.linears(layers).values() if x.transposes), default=0)


def amax_history_bytes(outline: ModelOutline, layers: range) -> int:
    """Return the bytes of the fp32 amax histories of all operands of `layers`."""
    count, fp8 = 0, outline.fp8
    for layer in (x for x in outline.linears(layers).values() if not x.site.high_precision):
        name = layer.plan.name
        operands = fp8.recipe.operands(name) if fp8.recipe is not None and fp8.selects(name) else None
        count += layer.copies * sum(operand.history_len for operand in operands or ())
    return count * 4


def rank_memory(outline: ModelOutline, data: int, stages: Sequence[range], actions: Sequence[Action]) -> RankMemory:
    """Return the memory of a rank that holds the layers `stages` (one range per chunk) and takes `actions` in a step.

    `data` is the number of ranks that sum their gradients.
    """
    config, p = outline.config, outline.config.parallel
    parameters = [parameter for layers in stages for parameter in outline.parameters(layers)]
    width = config.spec.stream_width * outline.batch.element
    state = state_memory(config, parameters, data)
    static = RankMemory(
        **vars(state),
        fp8_weights=0 if gathers_blocks(config) else sum(fp8_weight_bytes(outline, layers) for layers in stages),
        amax_history=sum(amax_history_bytes(outline, layers) for layers in stages),
        # An activation and a gradient in flight each way; the received activation is the first block's input.
        communication=0 if p.pipeline == 1 else 3 * outline.stream_tokens * width,
        workspace=_WORKSPACES
        + _offload_buffers(config, state.host)
        + max(transposed_weight_bytes(outline, layers) for layers in stages),
    )
    overlaps = p.overlap_grad_reduce and any(action.microbatch for action in actions)
    memory = _peak(static, [_chunk(outline, layers, data, overlaps) for layers in stages], actions)
    pairs = config.fp8.paired_wgrad and len({action.microbatch for action in actions}) > 1
    if pairs and not data_parallel_plans(config, data)[1].gathers_blocks:
        kept = sum(outline.paired_wgrad(index) for layers in stages for index in layers)
        memory = replace(memory, activations=memory.activations + kept)
    return memory


class _Chunk(NamedTuple):
    """Bytes of one micro-batch in one chunk.

    `saved` and `offloaded`: activations on the device and on the host. `deferred`: operands of deferred weight
    gradients. `peak`: activations, loss and temporaries at the peak of backward.
    """

    saved: int
    offloaded: int
    deferred: int
    peak: tuple[int, int, int]


def _peak(static: RankMemory, chunks: Sequence[_Chunk], actions: Sequence[Action]) -> RankMemory:
    """Return the rank's memory at the peak of a step."""
    separate = split_backwards(actions)
    nbytes = offloaded = host = most = 0
    peak = (0, 0, 0)
    for action in actions:
        chunk = chunks[action.chunk]
        if action.kind is Kind.FORWARD:
            nbytes, offloaded = nbytes + chunk.saved, offloaded + chunk.offloaded
            host = max(host, offloaded)
        elif action.kind is Kind.BACKWARD:
            nbytes, offloaded = nbytes - chunk.saved, offloaded - chunk.offloaded
            activations, loss, backward = chunk.peak
            if nbytes + activations + loss + backward > most:
                most = nbytes + activations + loss + backward
                peak = (nbytes + activations, loss, backward)
            nbytes += chunk.deferred if (action.microbatch, action.chunk) in separate else 0
        elif action.kind is Kind.WEIGHT:
            nbytes -= chunk.deferred
    activations, loss, backward = peak
    return replace(static, activations=activations, loss=loss, backward=backward, host=static.host + host)


class _Gathered(NamedTuple):
    """Bytes under parallel.fsdp in the backward of each block, at the loss, and at the end of backward."""

    blocks: list[int]
    loss: int
    end: int


def _gathered(outline: ModelOutline, layers: range, data: int, overlaps: bool) -> _Gathered:
    """Return the bytes of gathered parameters and unreduced gradients under parallel.fsdp.

    Args:
        outline: Model in its layout.
        layers: Layers of the chunk.
        data: Number of ranks that sum their gradients.
        overlaps: Whether the last reduced gradients of a micro-batch stay until the next backward has begun.
    """
    config = outline.config
    if not gathers_blocks(config):
        return _Gathered([0] * len(layers), 0, 0)
    e, sent = ELEMENT[config.training.precision], state_bytes(config, config.optimizer.reduce_dtype)
    tied, table = config.spec.head.tied, _table(config)
    others_plan, experts_plan = data_parallel_plans(config, data)
    gathers_experts, apart = experts_plan.gathers_blocks, experts_plan.ranks != others_plan.ranks
    parameters = [[p for p in outline.layers[i].parameters if gathers_experts or not p.expert] for i in layers]
    elements = [sum(p.elements for p in block) for block in parameters]
    in_fp8 = [sum(p.elements for p in block if p.only_fp8) for block in parameters]
    values = [(count - fp8_count) * e for count, fp8_count in zip(elements, in_fp8)]
    experts_fp8 = [sum(p.elements for p in block if p.only_fp8 and p.expert and apart) for block in parameters]
    others_fp8 = [count - expert_count for count, expert_count in zip(in_fp8, experts_fp8)]
    # Buffers of FP8 weights exist from the first block's forward on. Experts gathered over other ranks have their own.
    buffers = 2 * (max(experts_fp8, default=0) + max(others_fp8, default=0))
    copies = [max((x.weights for x in outline.layers[i].linears if x.plan.fp8), default=0) for i in layers]
    first, last = layers.start == 0, layers.stop == len(config.spec.layers)
    shared = config.spec.embeds_on_last_stage
    shared_weights = sum(linear.weights for (layer, _), linear in outline.linears(layers).items() if layer < 0)
    stays = table * e * (shared and (first or last)) + shared_weights * e
    summed = table * sent * (shared and last) + shared_weights * sent  # from the last use's backward on
    blocks = []
    for at, unit in enumerate(elements):
        following = elements[at + 1] if at + 1 < len(elements) else table * (last and not tied)
        here = values[at] + (values[at - 1] if at else 0) + copies[at] + (unit + max(unit, following)) * sent
        blocks.append(here + buffers + stays + summed)
    end = table * (4 + sent)  # the embedding's gradient in fp32, and in the reduced dtype
    ends_with_table = first or bool(stays)
    late = table * sent * (overlaps and ends_with_table)
    blocks[-1] += late * (not last)
    loss = last * (table * (e + sent) + values[-1] + late + stays * (not tied)) + buffers
    return _Gathered(blocks, loss, ends_with_table * end + stays + buffers)


def _chunk(outline: ModelOutline, layers: range, data: int, overlaps: bool) -> _Chunk:
    """Return the bytes of one micro-batch in the chunk `layers`."""
    config = outline.config
    gathered, h, e = _gathered(outline, layers, data, overlaps), config.spec.hidden_size, outline.batch.element
    memory = block_memory(config.parallel, len(layers))
    saved = [outline.saved(i, layer_memory) for i, layer_memory in zip(layers, memory)]
    on_device = [0 if layer_memory.offload else size for size, layer_memory in zip(saved, memory)]
    offloaded = [size if layer_memory.offload else 0 for size, layer_memory in zip(saved, memory)]
    if layers.start == 0 and config.spec.stem.normalizes:  # input and statistics of the embedding's norm
        statistics = NORMS[config.spec.norm.kind].statistics
        on_device[0] += outline.stream_tokens * (h * e + outline.batch.statistic * statistics)
    predicted = (1 + config.spec.num_prediction_layers) * outline.batch_of(config.spec.num_blocks - 1).tokens
    parts = loss_parts(config)
    logits = parts.tokens * (config.spec.stem.rows // config.parallel.tensor) * e
    last = layers.stop == len(config.spec.layers)
    candidates = []
    for at, index in enumerate(layers):
        recomputed = 0
        if memory[at].full:  # the block's input is one of the saved tensors
            recomputed = outline.saved(index, replace(memory[at], full=False)) - saved[at]
        backward = outline.layers[index].block.backward_bytes(outline.batch_of(index))
        activations = sum(on_device[: at + 1]) + sum(offloaded[max(0, at - 1) : at + 1])
        candidates.append((activations, 0, recomputed + backward + gathered.blocks[at]))
    if last:
        loss = logits + loss_memory(config, parts.tokens).computed
        # Input of the final norm; input of the output layer, and its gradient; residual streams.
        shards = config.parallel.tensor if config.parallel.sequence_parallel else 1
        loss += (outline.batch.own_tokens + 2 * predicted // shards) * h * e
        loss += outline.batch.own_tokens * (config.spec.stream_width - h) * e
        if shards > 1:  # the gathered input of a part, and its gradient before the sum
            loss += 2 * parts.tokens * h * e
        if parts.number > 1 and gathers_blocks(config):  # the weight gradient of a part, which is added to the others
            loss += _table(config) * state_bytes(config, config.optimizer.reduce_dtype)
        candidates.append((sum(on_device) + sum(offloaded[-1:]), loss, gathered.loss))
    candidates.append((0, 0, gathered.end))
    deferred = sum(outline.deferred_wgrad(index) for index in layers)
    if last and parts.number == 1:  # the output layer's input, and the gradient of all logits
        deferred += predicted * h * e + logits
    return _Chunk(sum(on_device), sum(offloaded), deferred, max(candidates, key=sum))


def pipeline_memory(
    outline: ModelOutline, world_size: int, placement: StagePlacement, schedule: Schedule
) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline rank.

    `schedule` is the schedule of a step on `world_size` ranks in total.
    """
    config, p = outline.config, outline.config.parallel
    layers = layers_of_stages(config, placement)
    data = world_size // (p.tensor * p.pipeline)  # includes context-parallel ranks
    frozen = _frozen_memory(outline, data, placement)
    return [
        replace(rank_memory(outline, data, [layers[stage] for stage in stages], actions), frozen=frozen_chunks)
        for stages, actions, frozen_chunks in zip(placement.stages, schedule, frozen, strict=True)
    ]


def expert_room(
    outline: ModelOutline, world_size: int, placement: StagePlacement, schedule: Schedule, nbytes: int
) -> float:
    """Return the largest useful room for the rows of experts with which no rank needs more than `nbytes`.

    It is a multiple of an even load (`MicroBatch.expert_room`), and at least `MARGIN`. The other arguments are those of
    `pipeline_memory`.
    """

    def fits(room: float) -> bool:
        memories = pipeline_memory(outline.with_expert_room(room), world_size, placement, schedule)
        return max(memory.total for memory in memories) <= nbytes

    low, high = MARGIN, max(layer.block.ffn.most_room for layer in outline.layers.values())
    if high <= low or fits(high):
        return max(low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _frozen_memory(outline: ModelOutline, data: int, placement: StagePlacement) -> list[int]:
    """Return `RankMemory.frozen` of each pipeline rank."""
    config, frozen, totals = outline.config, outline.frozen, [0] * len(placement.stages)
    if frozen is not None:
        layers = layers_of_stages(frozen.config, placement)
        for rank, stages in enumerate(placement.stages):
            parameters = [parameter for stage in stages for parameter in frozen.parameters(layers[stage])]
            totals[rank] += _weight_bytes(frozen.config, parameters, data)
    t, tokens = config.training, outline.batch_of(config.spec.num_blocks - 1).tokens
    count = t.global_batch_size * config.parallel.context // (t.micro_batch_size * data)
    totals[placement.homes[-1][0]] += count * loss_memory(config, tokens).reference
    return totals


def memory_unit(sizes: Iterable[float]) -> tuple[str, int]:
    """Return the unit in which sizes are printed, and its bytes: MiB if all sizes are below 1 GiB, else GiB."""
    return ("GiB", 2**30) if max(sizes) >= 2**30 else ("MiB", 2**20)


def size_text(size: float) -> str:
    """Return a size in bytes as text, in MiB or GiB."""
    unit, scale = memory_unit([size])
    return f"{size / scale:,.1f} {unit}"


def memory_table(memories: Sequence[RankMemory]) -> str:
    """Return a table of the memory of each pipeline rank, with the frozen model if there is one."""
    has_frozen = any(memory.frozen for memory in memories)
    names = [x.name for x in fields(RankMemory) if x.name != "host" and (x.name != "frozen" or has_frozen)]
    columns = [*names, "total", "host"]
    unit, scale = memory_unit(memory.total for memory in memories)
    lines = [
        f"memory of a rank in {unit}, by formula; CUDA's context and NCCL's buffers come on top; total is without host",
        "pipeline rank  " + "  ".join(column.replace("_", " ") for column in columns),
    ]
    for rank, memory in enumerate(memories):
        cells = (f"{getattr(memory, column) / scale:>{len(column)}.2f}" for column in columns)
        lines.append(f"{rank:>13}  " + "  ".join(cells))
    return "\n".join(lines)
