"""Peak memory of each rank, from the config alone.

In bytes of torch's allocator (`torch.cuda.max_memory_allocated`): what stays from step to step, and what is allocated
at the point of the schedule where most is. CUDA's context and NCCL's buffers, one to three GB, come on top, and so does
fragmentation.

A micro-batch holds its activations between its forward and its backward, and the operands of its weight gradients
between these, where the schedule separates them, and its backward. Backward frees what it has passed, so its peak is
one of these:

- the loss: all blocks' activations, the logits (their gradient overwrites them), and the output layer's input and its
  gradient;
- the backward of block i: the activations of blocks up to i, those of i that are recomputed, and temporaries. Offloaded
  blocks count where they are on the device: i and the one before.

Under parallel.fsdp a rank holds its shard; gathered parameters are transient: two blocks' weights, as the next is
prefetched; a block's whole gradients, and those of the blocks before that are being sent; FP8 copies of one layer. FP8
weights have buffers for two blocks throughout. Torch keeps what it sent last until it sends again.

Shapes as in `activations`; n parameters of a rank, v vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple

from megafp8.config import Config
from megafp8.config.activations import ACTIVATIONS
from megafp8.data_parallel.buckets import bucket_layout
from megafp8.fp8 import Fp8Manager
from megafp8.models.gpt import cross_layer_sizes, fp8_layer_sizes
from megafp8.models.recompute import BlockMemory, block_memory
from megafp8.optimizer.fp8_moments import BLOCK
from megafp8.pipeline_parallel.actions import Action, Kind, Placement, Schedule, split_backwards
from megafp8.planner.activations import (
    ELEMENT,
    at_layer,
    block_backward,
    deferred_wgrad,
    expert_layers,
    fp8_bytes,
    granularity,
    kind_of,
    layer_plans,
    own_decoder_tokens,
    saved_by_block,
    sizes,
)
from megafp8.planner.stages import layers_of_stages

_WORKSPACES = 2 * 32 * 2**20
"""cuBLAS's and cuBLASLt's on Hopper, one for each stream."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of parameters, and of what exists for each of them from the first step to the last, on a rank.

    `weights`: FP8 data where fp8.param_gather leaves nothing else; `fp8_weights` are then the columnwise copies. With
    parallel.fsdp the high-precision weights are the masters. `moments`: and the moving average of the weights.
    """

    weights: int
    gradients: int
    masters: int
    moments: int


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Bytes of a rank at its peak. `host` is pinned memory of the host and not in the total."""

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
    config: Config,
    numels: Sequence[int],
    data: int,
    own_bucket: Sequence[int] = (),
    fp8: Collection[int] = (),
    experts: Collection[int] = (),
    trained: Collection[int] | None = None,
    matrices: Collection[int] = (),
) -> StateMemory:
    """State of parameters of `numels` elements on one of `data` ranks that sum their gradients; under ZeRO the maximum.

    `own_bucket`, `fp8`, `experts`: indices of the parameters that have buckets of their own, of those that are FP8
    data, and of the weights of experts. The gradients of these are summed over as many ranks as hold the same experts.
    `trained`: of those that are not frozen; None: all. `matrices`: of those that Muon updates.
    """
    p = config.parallel
    if trained is not None:
        state = _state_memory(config, [numels[i] for i in trained], data)
        ranks = data // p.fsdp_replicas if p.fsdp else 1
        frozen = sum(-(-count // ranks) for i, count in enumerate(numels) if i not in trained)
        return replace(state, weights=state.weights + frozen * ELEMENT[config.training.precision])
    expert_data = data * p.tensor // p.expert_ranks
    if not experts or expert_data == data:
        return _state_memory(config, numels, data, own_bucket, fp8, matrices)
    others = [i for i in range(len(numels)) if i not in experts]
    place = {index: at for at, index in enumerate(others)}
    parts = [
        _state_memory(
            config,
            [numels[i] for i in others],
            data,
            [place[i] for i in own_bucket],
            [place[i] for i in fp8],
            [place[i] for i in matrices if i in place],
        ),
        _state_memory(
            config,
            [numels[i] for i in experts],
            expert_data,
            matrices=[at for at, i in enumerate(experts) if i in matrices],
        ),
    ]
    return StateMemory(*(sum(values) for values in zip(*map(astuple, parts))))


def _state_memory(
    config: Config,
    numels: Sequence[int],
    data: int,
    own_bucket: Sequence[int] = (),
    fp8: Collection[int] = (),
    matrices: Collection[int] = (),
) -> StateMemory:
    """`state_memory` of parameters whose gradients are summed over the same ranks."""
    p, dtype = config.parallel, config.training.precision
    if p.fsdp:
        shards = [-(-count // (data // p.fsdp_replicas)) for count in numels]
        return StateMemory(
            weights=sum(shards[i] for i in fp8),
            gradients=4 * sum(-(-count // 64) * 64 for count in shards),
            masters=4 * sum(shards),
            moments=_moments(config, shards) - 4 * sum(shards[i] for i in matrices),
        )
    ranks, count = data if p.zero else 1, sum(numels)
    layout = bucket_layout(
        numels, max(1, int(p.bucket_mib * 2**20 / 4)), ranks=ranks, own_bucket=own_bucket, fp8_bucket=fp8
    )
    in_fp8 = sum(bucket.end - bucket.start for bucket in layout.buckets if bucket.params[0] in fp8)
    owned = min(count, layout.numel // ranks)
    owned_fp8 = min(sum(numels[i] for i in fp8), in_fp8 // ranks)
    of_muon = sum(numels[i] for i in matrices)
    of_muon = max(0, owned - (count - of_muon)) if p.zero else of_muon
    return StateMemory(
        weights=((layout.numel if p.zero else count) - in_fp8) * ELEMENT[dtype] + in_fp8,
        gradients=layout.numel * 4,
        masters=(2 if config.optimizer.store_param_remainders else 4) * (owned_fp8 if dtype == "fp32" else owned),
        moments=_moments(config, [owned] if p.zero else numels) - 4 * of_muon,
    )


def least_moment_bytes(config: Config) -> int:
    """Bytes of moments and moving average of an element, at least: a matrix has one moment under Muon, else two."""
    moments = 1 if config.optimizer.name == "muon" else 2
    return moments * ELEMENT[config.optimizer.moments_dtype] + _average_bytes(config)


def _moments(config: Config, numels: Sequence[int]) -> int:
    """Bytes of both moments of tensors of `numels` elements under AdamW, and of their moving average."""
    dtype, average = config.optimizer.moments_dtype, sum(numels) * _average_bytes(config)
    if dtype == "fp8":
        return 2 * sum(count + -(-count // BLOCK) for count in numels) + average
    return 2 * sum(numels) * ELEMENT[dtype] + average


def _average_bytes(config: Config) -> int:
    """Of an element's moving average."""
    return 4 if config.optimizer.average_decay is not None else 0


class _Parameter(NamedTuple):
    """Elements on a rank; the name of its linear layer if that may be FP8; whether it is the weights of experts, or of
    LoRA; whether it is matrices of a block (`param_groups.is_hidden_matrix`)."""

    elements: int
    layer: str = ""
    expert: bool = False
    lora: bool = False
    matrix: bool = False


def _column_lora(config: Config, parts: Mapping[str, int], inputs: int) -> list[_Parameter]:
    """A and B's of a column-parallel layer of `parts`, with their sizes on a rank."""
    found: list[int] = []
    lora = config.lora
    if lora is not None and (adapted := [size for name, size in parts.items() if name in config.lora_targets]):
        found = [len(adapted) * lora.rank * inputs, *(size * lora.rank for size in adapted)]
    return [_Parameter(count, lora=True) for count in found]


def _row_lora(config: Config, name: str, inputs: int, outputs: int) -> list[_Parameter]:
    """A and B of a row-parallel layer with so many inputs on a rank."""
    lora = config.lora
    if lora is None or name not in config.lora_targets:
        return []
    return [_Parameter(lora.rank * inputs, lora=True), _Parameter(outputs * lora.rank, lora=True)]


def _lora_of_latent(config: Config, name: str, inputs: int, outputs: int) -> list[_Parameter]:
    """A and B of a layer of latent attention."""
    if name == "proj":
        return _row_lora(config, name, inputs, outputs)
    return _column_lora(config, {name: outputs}, inputs)


def _norm(config: Config) -> list[_Parameter]:
    return [_Parameter(config.model.hidden_size)] * (2 if config.model.normalization == "layernorm" else 1)


def _block(config: Config, index: int) -> list[_Parameter]:
    """The parameters of block `index`."""
    model, x, norm = config.model, sizes(config), _norm(config)
    attention, mlp = _attention(config, index)
    before, after = norm * (model.norm_position != "output"), norm * (model.norm_position in ("output", "both"))
    if model.moe_of(index) is not None:
        mlp = [*_experts(config), *mlp]
    else:
        (up, down), bias = mlp, [_Parameter(x.h)] * model.linear_bias
        parts = {"gate": x.f, "up": x.f} if ACTIVATIONS[model.activation].gated else {"up": x.f}
        of_up, of_down = _column_lora(config, parts, x.h), _row_lora(config, "down", x.f, x.h)
        mlp = [up, *[_Parameter(x.up)] * model.linear_bias, *of_up, down, *bias, *of_down]
    block = [*before, *attention, *after, *before, *mlp, *after]
    for name, (k, n) in cross_layer_sizes(model, config.parallel.tensor, range(index, index + 1)).items():
        more = [*norm * name.endswith(".q"), _Parameter(k * n, name, matrix=True)]
        block += [*more, *[_Parameter(n)] * model.linear_bias]
    ahead = index >= model.num_blocks  # multi-token prediction
    return [_Parameter(2 * x.h * x.h, matrix=True), *norm, *norm, *block, *norm] if ahead else block


class BlockElements(NamedTuple):
    """Elements of a block's parameters on a rank: of the weights of experts, of FP8 data and nothing else, others."""

    experts: int
    fp8: int
    others: int


def block_elements(config: Config, fp8: Fp8Manager, index: int) -> BlockElements:
    parameters = _block(config, index)
    experts = sum(p.elements for p in parameters if p.expert)
    in_fp8 = sum(p.elements for p in parameters if _is_fp8(config, fp8, p.layer))
    return BlockElements(experts, in_fp8, sum(p.elements for p in parameters) - experts - in_fp8)


def _attention(config: Config, index: int) -> tuple[list[_Parameter], list[_Parameter]]:
    """The parameters of the attention of block `index`, and the weights of its MLP or shared expert."""
    model, x, latent = config.model, sizes(config), config.model.latent_attention
    weights = _layer_weights(config, index)
    if latent is not None:
        ranks = [rank for rank in (latent.q_rank, latent.kv_rank) if rank is not None]
        down = _Parameter((sum(ranks) + latent.rope_head_dim) * x.h, matrix=True)
        sizes_of = fp8_layer_sizes(model, config.parallel.tensor, range(index, index + 1))
        layers = zip(weights[:3], ((name.rpartition(".")[2], k, n) for name, (k, n) in sizes_of.items()))
        up = [p for own, (name, k, n) in layers for p in (own, *(_lora_of_latent(config, name, k, n)))]
        return [down, *map(_Parameter, ranks), *up], weights[3:]
    qkv, proj, *mlp = weights
    bias, qk_norms = [_Parameter(x.h)] * model.linear_bias, [_Parameter(x.d)] * 2 if model.qk_norm else []
    if model.qk_norm == "projection":
        qk_norms = [_Parameter(x.a * x.d), _Parameter(x.g * x.d)]
    qkv_bias = [_Parameter((x.a + 2 * x.g) * x.d)] * (model.linear_bias or model.qkv_bias)
    parts = {"q": x.a * x.d, "k": x.g * x.d, "v": x.g * x.d}
    of_qkv, of_proj = _column_lora(config, parts, x.h), _row_lora(config, "proj", x.a * x.d, x.h)
    sinks = [_Parameter(x.a)] * model.attention_sinks
    return [*sinks, qkv, *qkv_bias, *of_qkv, proj, *bias, *of_proj, *qk_norms], mlp


def _layer_weights(config: Config, index: int) -> list[_Parameter]:
    """The weights of the linear layers of block `index` that may be FP8."""
    layers = fp8_layer_sizes(config.model, config.parallel.tensor, range(index, index + 1))
    return [_Parameter(k * n, name, matrix=True) for name, (k, n) in layers.items()]


def _experts(config: Config) -> list[_Parameter]:
    """The parameters of a layer's router and experts, and the gate of its shared expert."""
    model, moe, f = config.model, config.model.moe, config.model.expert_size // config.parallel.expert_tensor
    assert moe is not None
    count, h, up = moe.num_experts // config.parallel.expert, model.hidden_size, ACTIVATIONS[model.activation].up_width
    experts = [_Parameter(count * h * n, expert=True, matrix=True) for n in (up(f), f)]
    biases = [_Parameter(count * n, expert=True) for n in (up(f), h)] * model.linear_bias
    router = [_Parameter(moe.num_experts * h), *[_Parameter(moe.num_experts)] * model.linear_bias]
    return [*router, *experts, *biases, *[_Parameter(h)] * moe.shared_gate]


def _stage(config: Config, layers: range) -> list[_Parameter]:
    """The parameters of a stage of `layers` on a rank, in the order of its constructor."""
    model, h = config.model, config.model.hidden_size
    table = [_Parameter(_table(config))]
    first, last = layers.start == 0, layers.stop == model.layers.stop
    positions = _Parameter((model.max_position_embeddings or config.training.seq_length) * h)
    embedding = [*table * (first or (last and model.embeds_on_last_stage))]
    biases = [_Parameter(model.relative_attention_num_buckets * sizes(config).a)] * 2
    embedding += [positions] * (first and model.position_embedding == "learned")
    embedding += [_Parameter(model.token_types * h)] * (first and model.token_types > 0)
    embedding += _norm(config) * (first and model.embedding_norm)
    blocks = [parameter for index in layers for parameter in _block(config, index)]
    head = [*_norm(config) * (model.norm_position != "post"), *_bert_head(config), *table * (not model.tie_embeddings)]
    bias = [_Parameter(model.padded_vocab_size // config.parallel.tensor)] * (model.architecture == "bert")
    encoder_norm = _norm(config) * (model.architecture == "t5" and model.num_layers - 1 in layers)
    return [
        *embedding,
        *blocks,
        *(*head, *bias) * last,
        *encoder_norm,
        *biases * (first and model.architecture == "t5"),
    ]


def _bert_head(config: Config) -> list[_Parameter]:
    """The parameters of the head but for the output layer's."""
    model, h = config.model, config.model.hidden_size
    if model.architecture != "bert":
        return []
    dense = [_Parameter(h * h), _Parameter(h)]
    return [*dense, *_norm(config), *[*dense, _Parameter(2 * h), _Parameter(2)] * model.binary_head]


def _table(config: Config) -> int:
    """Elements of a rank's shard of the embedding, or of the output layer."""
    return config.model.padded_vocab_size // config.parallel.tensor * config.model.hidden_size


def parameter_sizes(config: Config, layers: range) -> list[int]:
    """Elements of each parameter of a stage of `layers` on a rank, in the order of its constructor."""
    return [parameter.elements for parameter in _stage(config, layers)]


def expert_parameters(config: Config, layers: range) -> list[int]:
    """Indices of the parameters of a stage that are weights of experts."""
    return [i for i, parameter in enumerate(_stage(config, layers)) if parameter.expert]


def muon_parameters(config: Config, layers: range) -> list[int]:
    """Indices of the parameters of a stage that Muon updates."""
    if config.optimizer.name != "muon":
        return []
    return [i for i, parameter in enumerate(_stage(config, layers)) if parameter.matrix]


def trained_parameters(config: Config, layers: range) -> list[int] | None:
    """Indices of the parameters of a stage that are trained; None: all."""
    return None if config.lora is None else [i for i, parameter in enumerate(_stage(config, layers)) if parameter.lora]


def fp8_parameters(config: Config, fp8: Fp8Manager, layers: range) -> list[int]:
    """Indices of those parameters of a stage that are FP8 data and nothing else."""
    return [i for i, parameter in enumerate(_stage(config, layers)) if _is_fp8(config, fp8, parameter.layer)]


def _is_fp8(config: Config, fp8: Fp8Manager, layer: str) -> bool:
    """Whether the layer's weight is FP8 data and nothing else."""
    return bool(layer) and layer_plans(config, fp8)[layer].weight in ("zero fp8", "fsdp fp8")


def fp8_weight_bytes(config: Config, fp8: Fp8Manager, layers: range) -> int:
    """FP8 copies of the weights of `layers`: rowwise unless they are the weights, and columnwise for dgrad."""
    total = 0
    t = config.parallel.tensor
    for name, (k, n) in (fp8_layer_sizes(config.model, t, layers) | cross_layer_sizes(config.model, t, layers)).items():
        fprop, dgrad, _ = layer_plans(config, fp8)[name].gemms
        if fprop == dgrad == "high":
            continue
        weight = granularity(fp8, name, "weight")
        total += fp8_bytes(weight, n, k) - (n * k if _is_fp8(config, fp8, name) else 0)
        total += 0 if dgrad == "high" else fp8_bytes(weight, k, n)
    for own in filter(None, (expert_layers(config, fp8, index) for index in layers)):
        for (k, n), plan in own.layers:
            fprop, dgrad, _ = plan.gemms
            if not fprop == dgrad == "high":
                weight = granularity(fp8, plan.name, "weight")
                copies = fp8_bytes(weight, n, k) + (0 if dgrad == "high" else fp8_bytes(weight, k, n))
                total += own.experts * copies
    return total


def amax_history_bytes(config: Config, fp8: Fp8Manager, layers: range) -> int:
    """Amax histories of the operands of a stage's layers, fp32."""
    count = 0
    t = config.parallel.tensor
    held = dict.fromkeys([*fp8_layer_sizes(config.model, t, layers), *cross_layer_sizes(config.model, t, layers)], 1)
    for experts in filter(None, (expert_layers(config, fp8, index) for index in layers)):
        held |= {experts.up_plan.name: experts.experts, experts.down_plan.name: experts.experts}
    for name, copies in held.items():
        operands = fp8.recipe.operands(name) if fp8.recipe is not None and fp8.selects(name) else None
        count += copies * sum(operand.history_len for operand in operands or ())
    return count * 4


def rank_memory(
    config: Config, fp8: Fp8Manager, data: int, stages: Sequence[range], actions: Sequence[Action]
) -> RankMemory:
    """Memory of a rank that has the layers `stages`, one range for each chunk, and takes `actions` in a step.

    `fp8`: which layers are FP8, as the config says. `data`: ranks that sum their gradients.
    """
    p, x = config.parallel, sizes(config)
    numels: list[int] = []
    own_bucket: list[int] = []
    in_fp8: list[int] = []
    experts: list[int] = []
    matrices: list[int] = []
    trained: list[int] | None = None if config.lora is None else []
    for layers in stages:
        at_an_end = layers.start == 0 or layers.stop == config.model.layers.stop
        if config.model.embeds_on_last_stage and p.pipeline > 1 and at_an_end:
            own_bucket.append(len(numels))
        in_fp8 += [len(numels) + i for i in fp8_parameters(config, fp8, layers)]
        experts += [len(numels) + i for i in expert_parameters(config, layers)]
        matrices += [len(numels) + i for i in muon_parameters(config, layers)]
        if trained is not None:
            trained += [len(numels) + i for i in trained_parameters(config, layers) or ()]
        numels += parameter_sizes(config, layers)
    static = RankMemory(
        **vars(state_memory(config, numels, data, own_bucket, in_fp8, experts, trained, matrices)),
        fp8_weights=0 if p.fsdp else sum(fp8_weight_bytes(config, fp8, layers) for layers in stages),
        amax_history=sum(amax_history_bytes(config, fp8, layers) for layers in stages),
        # An activation and a gradient in flight each way; the received activation is the first block's input.
        communication=0 if p.pipeline == 1 else 3 * (x.m_own + own_decoder_tokens(config)) * x.h * x.e,
        workspace=_WORKSPACES,
    )
    overlaps = p.overlap_grad_reduce and any(action.microbatch for action in actions)
    return _peak(static, [_chunk(config, fp8, layers, overlaps) for layers in stages], actions)


class _Chunk(NamedTuple):
    """Bytes of a micro-batch in a chunk.

    Saved on the device and on the host, deferred for weight gradients, and at the peak of its backward those of
    activations, loss and backward.
    """

    saved: int
    offloaded: int
    deferred: int
    peak: tuple[int, int, int]


def _peak(static: RankMemory, chunks: Sequence[_Chunk], actions: Sequence[Action]) -> RankMemory:
    """The rank's memory at the peak of a step."""
    separate = split_backwards(actions)
    held = offloaded = host = most = 0
    peak = (0, 0, 0)
    for action in actions:
        chunk = chunks[action.chunk]
        if action.kind is Kind.FORWARD:
            held, offloaded = held + chunk.saved, offloaded + chunk.offloaded
            host = max(host, offloaded)
        elif action.kind is Kind.BACKWARD:
            held, offloaded = held - chunk.saved, offloaded - chunk.offloaded
            activations, loss, backward = chunk.peak
            if held + activations + loss + backward > most:
                most = held + activations + loss + backward
                peak = (held + activations, loss, backward)
            held += chunk.deferred if (action.microbatch, action.chunk) in separate else 0
        elif action.kind is Kind.WEIGHT:
            held -= chunk.deferred
    activations, loss, backward = peak
    return replace(static, activations=activations, loss=loss, backward=backward, host=host)


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
    tied, table = config.model.tie_embeddings, _table(config)
    parameters = [_block(config, i) for i in layers]
    elements = [sum(p.elements for p in block) for block in parameters]
    in_fp8 = [sum(p.elements for p in block if _is_fp8(config, fp8, p.layer)) for block in parameters]
    values = [(count - fp8_count) * e for count, fp8_count in zip(elements, in_fp8)]
    buffers = 2 * max(in_fp8, default=0)  # of FP8 weights, from the first block's forward on
    plans = layer_plans(config, fp8)
    quantized = [[p.elements for p in b if p.layer and plans[p.layer].fp8] for b in parameters]
    for counts, experts in zip(quantized, (expert_layers(config, fp8, index) for index in layers)):
        if experts is not None:
            counts += [experts.experts * k * n for (k, n), plan in experts.layers if plan.fp8]
    copies = [max(counts, default=0) for counts in quantized]
    first, last = layers.start == 0, layers.stop == config.model.layers.stop
    shared = config.model.embeds_on_last_stage
    stays = table * e * (shared and (first or last))
    summed = table * sent * (shared and last)  # from the backward of its last use to the end
    blocks = []
    for at, own in enumerate(elements):
        following = elements[at + 1] if at + 1 < len(elements) else table * (last and not tied)
        here = values[at] + (values[at - 1] if at else 0) + copies[at] + (own + max(own, following)) * sent
        blocks.append(here + buffers + stays + summed)
    end = table * (4 + sent)  # the embedding's gradient in fp32, and as it is sent
    ends_with_table = first or bool(stays)
    late = table * sent * (overlaps and ends_with_table)
    blocks[-1] += late * (not last)
    loss = last * (table * (e + sent) + values[-1] + late + stays * (not tied)) + buffers
    return _Gathered(blocks, loss, ends_with_table * end + stays + buffers)


def _chunk(config: Config, fp8: Fp8Manager, layers: range, overlaps: bool) -> _Chunk:
    x, gathered = sizes(config), _gathered(config, fp8, layers, overlaps)
    memory = block_memory(config.parallel, len(layers))
    saved_by_kind: dict[tuple[int, BlockMemory], int] = {}

    def saved_by(index: int, own: BlockMemory) -> int:
        kind = (kind_of(fp8, index), own)
        if kind not in saved_by_kind:
            saved_by_kind[kind] = sum(saved_by_block(config, fp8, index, own).values())
        return saved_by_kind[kind]

    saved = [saved_by(i, own) for i, own in zip(layers, memory)]
    on_device = [0 if own.offload else size for size, own in zip(saved, memory)]
    offloaded = [size if own.offload else 0 for size, own in zip(saved, memory)]
    if layers.start == 0 and config.model.embedding_norm:  # its input and statistics
        tokens, statistics = x.m_own + own_decoder_tokens(config), 2 if config.model.normalization == "layernorm" else 1
        on_device[0] += tokens * (x.h * x.e + x.w * statistics)
    predicted = (1 + config.model.mtp_num_layers) * sizes(at_layer(config, config.model.num_blocks - 1)).m
    logits = predicted * (config.model.padded_vocab_size // config.parallel.tensor) * x.e
    last = layers.stop == config.model.layers.stop
    candidates = []
    for at, index in enumerate(layers):
        recomputed = 0
        if memory[at].full:  # the block's input is one of the saved tensors
            recomputed = saved_by(index, replace(memory[at], full=False)) - saved[at]
        activations = sum(on_device[: at + 1]) + sum(offloaded[max(0, at - 1) : at + 1])
        candidates.append((activations, 0, recomputed + block_backward(config, fp8, index) + gathered.blocks[at]))
    if last:
        ends = (x.m_own + 2 * predicted) * x.h * x.e  # the final norm's input; the output layer's, and its gradient
        candidates.append((sum(on_device) + sum(offloaded[-1:]), logits + ends, gathered.loss))
    candidates.append((0, 0, gathered.end))
    deferred = sum(deferred_wgrad(config, fp8, index) for index in layers)
    deferred += (predicted * x.h * x.e + logits) * last  # the output layer's input, and the logits' gradient
    return _Chunk(sum(on_device), sum(offloaded), deferred, max(candidates, key=sum))


def pipeline_memory(
    config: Config, fp8: Fp8Manager, world_size: int, placement: Placement, schedule: Schedule
) -> list[RankMemory]:
    """Memory of one rank of each pipeline rank; `schedule` is that of a step on `world_size` ranks in all."""
    p = config.parallel
    layers = layers_of_stages(config, placement)
    data = world_size // (p.tensor * p.pipeline)  # context-parallel ranks among them
    return [
        rank_memory(config, fp8, data, [layers[stage] for stage in stages], actions)
        for stages, actions in zip(placement.stages, schedule, strict=True)
    ]


def memory_table(memories: Sequence[RankMemory]) -> str:
    """`pipeline_memory` as text, in GiB."""
    names = [field.name for field in fields(RankMemory)]
    columns = [*names[:-1], "total", names[-1]]
    lines = [
        "memory of a rank in GiB, by formula; CUDA's context and NCCL's buffers come on top; total is without host",
        "pipeline rank  " + "  ".join(column.replace("_", " ") for column in columns),
    ]
    for rank, memory in enumerate(memories):
        cells = (f"{getattr(memory, column) / 2**30:>{len(column)}.2f}" for column in columns)
        lines.append(f"{rank:>13}  " + "  ".join(cells))
    return "\n".join(lines)
