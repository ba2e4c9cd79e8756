"""Predicted step time and memory of a config on a cluster, as a sum of terms that can each be printed.

The step time is the sum of: the pipeline (a simulation of its schedule with the times of each stage's blocks, from
`block_time`), the part of the gradient reduction that does not overlap with the last backward, the optimizer, and the
part of the parameter gather that does not overlap with the next forward. Without CUDA graphs, a step takes at least as
long as the host needs to launch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megafp8.config import Config
from megafp8.config.checks import cuda_graph_problems
from megafp8.host.cluster import Cluster
from megafp8.layers.costs import ELEMENT
from megafp8.layers.recompute import BlockMemory, block_memory
from megafp8.optimizer.base import Update
from megafp8.parallel.pipeline.actions import Kind, Schedule, StagePlacement
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.registry import SCHEDULES, training_schedule
from megafp8.parallel.pipeline.simulate import StageTimes, simulate
from megafp8.planner.block_time import Costs, Phases, block_costs, ends_costs, summed
from megafp8.planner.memory import RankMemory, masters_are_gathered, pipeline_memory, separate_master_bytes
from megafp8.planner.outline import LayerOutline, ModelOutline
from megafp8.planner.stages import data_parallel_plans, stages_of

_SIMULATED = 3
"""Number of simulated micro-batches per pipeline rank. The time of the last third is extrapolated to further ones."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of a step: `seconds`, `terms` that add up to them, and memory by pipeline rank.

    Terms of stages are means over the pipeline ranks. "bubble" is the rest of the schedule's time, including the time
    spent waiting for slower stages.
    """

    seconds: float
    terms: dict[str, float]
    memory: Sequence[RankMemory]
    tokens: int
    gpus: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most memory."""
        return max(memory.total for memory in self.memory)


def micro_batches(config: Config, gpus: int) -> int:
    """Return the number of micro-batches of each data-parallel rank in a step."""
    p, t = config.parallel, config.training
    return t.global_batch_size * p.tensor * p.pipeline * p.context // (t.micro_batch_size * gpus)


def predict(outline: ModelOutline, cluster: Cluster) -> Prediction:
    """Return the step time and memory of a model on `cluster.gpus` ranks. Its config must have passed `check_layout`.

    Raises ValueError for LoRA, and for recipes with block scales that only Blackwell supports.
    """
    memory = predicted_memory(outline, cluster)
    training = outline.config.training
    tokens = training.global_batch_size * training.seq_length
    return Prediction(*step_terms(outline, cluster), memory, tokens, cluster.gpus)


def predicted_memory(outline: ModelOutline, cluster: Cluster) -> Sequence[RankMemory]:
    """Return the memory of one rank of each pipeline rank, at the peak of a step."""
    placement, _ = stages_of(outline.config)
    schedule = short_schedule(outline.config, placement, cluster.gpus)
    return pipeline_memory(outline, cluster.gpus, placement, schedule)


def short_schedule(config: Config, placement: StagePlacement, gpus: int) -> Schedule:
    """Return the schedule with only those micro-batches of a step that affect its start and end."""
    return _schedule(config.parallel.schedule, placement, min(micro_batches(config, gpus), _simulated(placement)))


def _simulated(placement: StagePlacement) -> int:
    return _SIMULATED * placement.num_ranks


@lru_cache(maxsize=256)
def _schedule(source: str, placement: StagePlacement, count: int) -> Schedule:
    if source in SCHEDULES:  # built-in schedules need no check
        return SCHEDULES[source].build(placement, count)
    return training_schedule(source, placement, count)


@lru_cache(maxsize=256)
def most_in_flight(source: str, placement: StagePlacement, count: int) -> int:
    """Return the maximum number of micro-batches, times stages, that a rank holds for their backward."""
    most = 0
    for actions in _schedule(source, placement, min(count, _simulated(placement))):
        in_flight = 0
        for action in actions:
            in_flight += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            most = max(most, in_flight)
    return most


def stage_costs(outline: ModelOutline, cluster: Cluster) -> list[Costs]:
    """Return the seconds of each stage for one micro-batch, by term."""
    config = outline.config
    if config.lora is not None:
        raise ValueError("lora: the time of steps that train adapters is not predicted; leave the section lora out")
    known: dict[tuple[LayerOutline, BlockMemory], Costs] = {}
    stages = []
    for layers in stages_of(config)[1]:
        memories = block_memory(config.parallel, len(layers))
        kinds = Counter((outline.layers[index], memory) for index, memory in zip(layers, memories))
        first = {(outline.layers[index], memory): index for index, memory in [*zip(layers, memories)][::-1]}
        blocks = []
        for kind, count in kinds.items():
            if kind not in known:
                known[kind] = block_costs(outline, cluster, first[kind], kind[1])
            blocks.append({term: phases * count for term, phases in known[kind].items()})
        ends = ends_costs(outline, cluster, first=layers.start == 0, last=layers.stop == len(config.spec.layers))
        stages.append(summed([*blocks, ends]))
    return stages


def _pipeline_seconds(
    config: Config, placement: StagePlacement, times: Sequence[StageTimes], count: int, busiest: float
) -> float:
    """Return the seconds of `count` micro-batches. `busiest` is the time of one on the rank with most work."""
    source, simulated = config.parallel.schedule, min(count, _simulated(placement))
    whole = simulate(_schedule(source, placement, simulated), placement, times).duration
    if count == simulated:
        return whole
    fewer = simulated - placement.num_ranks
    further = (whole - simulate(_schedule(source, placement, fewer), placement, times).duration) / placement.num_ranks
    return whole + (count - simulated) * max(further, busiest)


def frozen_seconds(frozen: ModelOutline, cluster: Cluster) -> float:
    """Return the seconds of a step's forward passes through a frozen model."""
    config, (placement, _) = frozen.config, stages_of(frozen.config)
    count = micro_batches(config, cluster.gpus)
    times = [sum(stage.values(), Phases()).forward for stage in stage_costs(frozen, cluster)]
    busiest = max(sum(times[stage] for stage in stages) for stages in placement.stages)
    if config.parallel.pipeline == 1:
        return count * busiest
    sent = frozen.stream_tokens * config.spec.stream_width * frozen.batch.element
    p2p = cluster.transfer(cluster.gpus // config.parallel.pipeline, sent)
    simulated = min(count, _simulated(placement))
    stage_times = [StageTimes(time, 0.0, 0.0, p2p) for time in times]
    whole = simulate(forward_only(placement, simulated), placement, stage_times).duration
    return whole + (count - simulated) * busiest


def step_terms(outline: ModelOutline, cluster: Cluster) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and their terms."""
    config = outline.config
    placement, layers = stages_of(config)
    p, gpu = config.parallel, cluster.gpu
    count = micro_batches(config, cluster.gpus)
    costs = stage_costs(outline, cluster)
    times = [sum(stage.values(), Phases()) for stage in costs]
    works = [sum(times[stage].total for stage in stages) for stages in placement.stages]
    if p.pipeline > 1:
        sent = outline.stream_tokens * config.spec.stream_width * outline.batch.element
        p2p = cluster.transfer(cluster.gpus // p.pipeline, sent)
        stage_times = [StageTimes(time.forward, time.backward, time.weight, p2p) for time in times]
        pipeline = _pipeline_seconds(config, placement, stage_times, count, max(works))
    else:
        pipeline = count * works[0]
    ranks = p.pipeline
    terms = {term: phases.total * count / ranks for term, phases in summed(costs).items()}
    terms["bubble"] = pipeline - sum(works) * count / ranks

    ends: list[dict[str, float]] = [
        step_end(config, cluster, held(outline, [layers[s] for s in stages]), sum((times[s] for s in stages), Phases()))
        for stages in placement.stages
    ]
    longest = max(ends, key=lambda end: sum(end.values()))
    terms.update(longest)
    if outline.frozen is not None:
        terms["frozen model"] = frozen_seconds(outline.frozen, cluster)
    on_host = 0.0
    if config.training.cuda_graphs is False or [*cuda_graph_problems(config)]:
        blocks = max(sum(len(layers[s]) for s in stages) for stages in placement.stages)
        on_host = count * blocks * (gpu.host_block if outline.fp8.recipe is None else gpu.host_block_fp8)
    seconds = sum(terms.values())
    terms["host"] = max(0.0, on_host - seconds)
    return seconds + terms["host"], {term: value for term, value in terms.items() if value}


class Held(NamedTuple):
    """Contents of a rank.

    `others`, `experts`: elements of parameters. `casts`: bytes that casts of weights move. `update_flops`: FLOPs of the
    optimizer for the whole matrices of the rank's layers; the rank holds a part of these matrices.
    """

    others: float
    experts: float
    casts: float
    update_flops: float


def held(outline: ModelOutline, stages: Sequence[range]) -> Held:
    """Return the contents of a rank with the layers `stages`, one range for each stage."""
    config = outline.config
    parameters = [parameter for layers in stages for parameter in outline.parameters(layers)]
    experts = sum(x.elements for x in parameters if x.expert)
    layers = [outline.layers[index] for stage_layers in stages for index in stage_layers]
    update = config.optimizer.update(hidden_matrix=True)
    flops = sum(update_flops(update, layer, config.parallel.expert) for layer in layers)
    # A cast reads in training.precision, and writes rowwise and columnwise.
    element = ELEMENT[config.training.precision] + 2
    casts = element * sum(x.weights for layer in layers for x in layer.linears if x.plan.fp8)
    return Held(sum(x.elements for x in parameters) - experts, experts, casts, flops)


def update_flops(update: Update, layer: LayerOutline, expert_parallel: int) -> int:
    """Return the FLOPs to update all whole matrices of a layer. A fused weight is several matrices (decision 8).

    `expert_parallel` is the number of ranks over which the experts are divided.
    """
    return sum(
        update.flops(shape) * (expert_parallel if parameter.expert else 1)
        for parameter in layer.parameters
        for shape in parameter.matrices
    )


def step_end(config: Config, cluster: Cluster, rank: Held, micro_batch: Phases) -> dict[str, float]:
    """Return the seconds of the work that a rank does once per step, by term.

    `micro_batch` is the rank's work for one micro-batch, which can hide communication.
    """
    p, optimizer, gpu = config.parallel, config.optimizer, cluster.gpu
    data = cluster.gpus // (p.tensor * p.pipeline)
    plans, element = data_parallel_plans(config, data), ELEMENT[config.training.precision]
    sent = ELEMENT[optimizer.reduce_dtype]
    stored = ELEMENT[optimizer.moments_dtype]
    moment_bytes = 2 * stored if stored > 1 else gpu.fp8_moment
    moments = len(optimizer.update(hidden_matrix=False).moments) * moment_bytes
    # With FP8 weights, about nine tenths of the parameters are gathered in FP8.
    gathered = element - 0.9 * (element - 1) * config.fp8.param_gather
    reduce = gather = tail = owned = 0.0
    for plan, count in zip(plans, (rank.others, rank.experts), strict=True):
        group, received = plan.step_group, plan.received(count)
        owned += count / plan.state_shards
        reduce += cluster.collective(*group, received * sent) * plan.reductions
        gather += cluster.collective(*group, received * gathered) * plan.gathers
        if not plan.gathers_blocks:  # the last bucket is complete only at the end of backward
            tail = max(tail, cluster.collective(*group, min(count, plan.bucket_elements) * sent))
    costs = {
        "gradient reduction": _beside(
            reduce, micro_batch.backward + micro_batch.weight if p.overlap_grad_reduce else 0.0, gpu.hidden, tail
        ),
        "parameter gather": _beside(gather, micro_batch.forward if p.overlap_param_gather else 0.0, gpu.hidden, 0.0),
    }
    # Gradients are read for their norm and for the update, and zeroed under FSDP. Masters and moments are read and
    # written.
    average = 12 if optimizer.average_decay is not None else 0
    zeroed = (rank.others + rank.experts) / data if plans[0].gathers_blocks else 0.0
    moved = owned * (8 + 8 + moments + element + average) + 4 * zeroed
    costs["optimizer"] = moved / (gpu.ceilings.bandwidth * gpu.optimizer)
    if optimizer.offload:  # copies in both directions overlap with each other and with the update
        masters = separate_master_bytes(config) * (
            1 - (1.0 if masters_are_gathered(config) else 0.9 * config.fp8.param_gather)
        )
        streamed = owned * optimizer.offload * (masters + stored * len(optimizer.update(hidden_matrix=False).moments))
        costs["offload"] = max(0.0, streamed / gpu.host_link - costs["optimizer"])
    if rank.update_flops > 0:  # the ranks share the work; each sends its parts and receives the updated parts
        stage_gpus = cluster.gpus // p.pipeline
        exchanged = 2 * ELEMENT["bf16"] * (rank.others + rank.experts) / stage_gpus
        costs["matrix updates"] = rank.update_flops / stage_gpus / (gpu.ceilings.bf16 * gpu.load_bf16)
        costs["matrix updates"] += cluster.collective(stage_gpus, 1, exchanged)
    if not plans[0].gathers_blocks:
        costs["weight casts"] = rank.casts / (gpu.ceilings.bandwidth * gpu.fine_casts)
    return costs


def _beside(communication: float, computation: float, cost: float, tail: float) -> float:
    """Return the seconds that communication adds to overlapping computation; at least `tail` of it is exposed."""
    exposed = max(communication - computation, min(tail, communication))
    return exposed + cost * (communication - exposed)
