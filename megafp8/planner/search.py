"""Search for the fastest layouts that fit a cluster, with reasons why the others lose.

The search covers all combinations of tensor, pipeline, context and expert parallelism, schedule, micro-batch size,
recomputation, and ZeRO stage or FSDP. It first computes cheap lower bounds, then makes full predictions in the order of
the bounds, until no remaining layout can be among the best. The time bound of a layout is a rank's mean work, the
bubble of a schedule with equal stages, and the end of the step. The memory bound is the parameters with their optimizer
state, and the saved activations. `check_layout` decides which layouts can run.

The global batch, the model, the recipe and all other keys keep the values of the config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from megafp8.config import Config, ConfigError, check_layout
from megafp8.config.checks import split_widths
from megafp8.config.frozen import frozen_run
from megafp8.fp8 import Fp8Manager
from megafp8.host.cluster import Cluster
from megafp8.layers.costs import ELEMENT
from megafp8.layers.recompute import block_memory
from megafp8.parallel.pipeline.registry import SCHEDULES, place_stages
from megafp8.planner.block_time import Phases, ends_costs, summed
from megafp8.planner.memory import least_moment_bytes, size_text
from megafp8.planner.outline import ModelOutline, ModelOutlines
from megafp8.planner.predict import (
    Held,
    Prediction,
    held,
    micro_batches,
    most_in_flight,
    predicted_memory,
    stage_costs,
    step_end,
    step_terms,
)
from megafp8.planner.stages import data_parallel_plans
from megafp8.spec import ModelSpec

_CHUNKS = (2, 4)
_MICRO_BATCHES = (1, 2, 4, 8)
_SHORTEST = 4096
"""Sequence length per rank, in tokens, below which context parallelism is not tried."""
_TRIES_OF_GROUP = 2
_GROUPS_EXPLAINED = 8


_Predict = Callable[["CandidateLayout"], "Candidate | Misfit | None"]


class CandidateLayout(NamedTuple):
    """Layout to try, by the searched config keys."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    schedule: str
    virtual_pipeline: int
    micro_batch_size: int
    recompute: str
    fsdp: bool
    fsdp_replicas: int

    @property
    def group(self) -> str:
        """Sizes of the parallel axes, such as "TP2·PP4". The list of losers has one line per group."""
        names = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
        sizes = (f"{short}{getattr(self, key)}" for key, short in names.items() if getattr(self, key) > 1)
        return "·".join(sizes) or "DP"


@dataclass(frozen=True)
class Candidate:
    """Layout that fits, with its prediction."""

    layout: CandidateLayout
    config: Config
    prediction: Prediction


@dataclass(frozen=True)
class Misfit:
    """Layout that needs `excess` bytes more than available."""

    excess: int


@dataclass
class Found:
    """Result of a search.

    `best`: layouts that fit, fastest first. `losers`: other sizes, and the reason why the best layout with these sizes
    loses, nearest first.
    """

    best: list[Candidate] = field(default_factory=list)
    losers: list[tuple[str, str]] = field(default_factory=list)
    layouts: int = 0
    predicted: int = 0


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(config: Config, cluster: Cluster) -> Iterator[CandidateLayout]:
    """Yield all combinations into which ranks and heads can be divided. `check_layout` decides which can run."""
    model, t = config.spec, config.training
    counts = [record.num_experts for record in model.expert_records]
    widths = [*split_widths(config.model).values()]
    for tensor in _powers(min([cluster.gpus_per_node, *widths])):
        if cluster.gpus % tensor or any(width % tensor for width in widths):
            continue
        for context in _powers(max(1, t.seq_length // _SHORTEST)):
            for pipeline in _divisors(cluster.gpus // tensor) if cluster.gpus % (tensor * context) == 0 else ():
                if pipeline > model.num_blocks or cluster.gpus % (tensor * context * pipeline):
                    continue
                data = cluster.gpus // (tensor * context * pipeline)
                experts = [e for e in _powers(min([64, *counts])) if not any(n % e for n in counts)] if counts else [1]
                for expert in experts:
                    for expert_tensor in (1, 2) if counts and max(counts) <= 16 else (1,):
                        if data * context * tensor % (expert * expert_tensor):
                            continue
                        for rest in _options(config, cluster, tensor, pipeline, data, context):
                            yield CandidateLayout(tensor, pipeline, context, expert, expert_tensor, *rest)


def _options(
    config: Config, cluster: Cluster, tensor: int, pipeline: int, data: int, context: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the combinations of schedule, micro-batch size, recomputation and sharding."""
    rank_batch, rest = divmod(config.training.global_batch_size, data)
    if rest:
        return
    schedules = [("1f1b", 1)]
    if pipeline > 1:
        for name, record in SCHEDULES.items():
            for chunks in (record.chunks,) if record.chunks else _CHUNKS:
                if (name, chunks) not in schedules and pipeline * chunks <= config.spec.num_blocks:
                    schedules.append((name, chunks))
    ranks = data * context
    node_groups = max(1, cluster.gpus_per_node // tensor)
    replicas = [n for n in (1, ranks // node_groups) if n and ranks % n == 0]
    sharding = [(False, 1), *((True, n) for n in dict.fromkeys(replicas))] if ranks > 1 else [(False, 1)]
    for size in _MICRO_BATCHES:
        if rank_batch % size or (pipeline > 1 and rank_batch // size < 2):
            continue
        for schedule, chunks in schedules:
            for recompute in ("none", "selective", "full"):
                for fsdp, count in sharding:
                    if not (fsdp and SCHEDULES[schedule].splits_wgrad):
                        yield schedule, chunks, size, recompute, fsdp, count


def applied(config: Config, layout: CandidateLayout, gpus: int) -> Config:
    """Return `config` with the keys of `layout`."""
    changes = layout._asdict()
    size = changes.pop("micro_batch_size")
    alone = gpus == layout.tensor * layout.pipeline
    changes |= {
        "zero": 0 if layout.fsdp or alone else 1,
        "layers_per_stage": "balanced" if layout.pipeline > 1 else None,
    }
    if config.parallel.recompute != layout.recompute:
        changes |= {"recompute_blocks": None, "recompute_ops": type(config.parallel)().recompute_ops}
    changes["placement"] = None
    if config.fp8.param_gather and not (changes["zero"] or layout.fsdp):
        config = config.model_copy(update={"fp8": config.fp8.model_copy(update={"param_gather": False})})
    parallel = config.parallel.model_copy(update=changes)
    training = config.training.model_copy(update={"micro_batch_size": size})
    return config.model_copy(update={"parallel": parallel, "training": training})


def changed_keys(before: Config, after: Config) -> dict[str, dict[str, Any]]:
    """Return the keys of `after` that differ from `before`, by section."""
    changes: dict[str, dict[str, Any]] = {}
    for section in ("parallel", "training", "fp8"):
        old, new = getattr(before, section), getattr(after, section)
        for key in type(new).model_fields:
            if getattr(old, key) != getattr(new, key):
                changes.setdefault(section, {})[key] = getattr(new, key)
    return changes


class _Bound(NamedTuple):
    """Lower bounds of time and memory."""

    seconds: float
    memory: float


class _Work(NamedTuple):
    """Cost of a micro-batch on all stages.

    `phases`: seconds. `blocks`: seconds of the blocks alone. `saved`: bytes that blocks save. `frozen`,
    `frozen_elements`: seconds of the frozen model, and its elements on a tensor-parallel rank (under FSDP, in its
    shard).
    """

    phases: Phases
    blocks: float
    saved: float
    frozen: float
    frozen_elements: float


def _on_one_stage(config: Config) -> Config:
    changes = {"pipeline": 1, "virtual_pipeline": 1, "schedule": "1f1b", "layers_per_stage": None}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})


class _Search:
    """Bounds and predictions of one search. Results that several layouts share are computed once."""

    def __init__(self, config: Config, fp8: Fp8Manager, cluster: Cluster, teacher: ModelSpec | None) -> None:
        self.config, self.cluster, self.teacher = config, cluster, teacher
        self.outlines = ModelOutlines(config, fp8, teacher)
        self._works: dict[tuple[Any, ...], _Work] = {}
        self._held: dict[tuple[Any, ...], Held] = {}

    @cached_property
    def element(self) -> int:
        """Bytes of an element in `training.precision`."""
        return ELEMENT[self.config.training.precision]

    def bound(self, layout: CandidateLayout) -> _Bound:
        """Return the lower bounds of a layout. Raises ConfigError for most layouts that cannot run."""
        p, config = layout, applied(self.config, layout, self.cluster.gpus)
        key: tuple[Any, ...] = (p.tensor, p.context, p.expert, p.expert_tensor, p.micro_batch_size, p.recompute, p.fsdp)
        key += (p.fsdp_replicas, p.pipeline) if p.fsdp else ()
        if key not in self._works:
            self._check(config)
            self._works[key] = self._work(config)
        size = (p.tensor, p.expert, p.expert_tensor)
        if size not in self._held:
            one = _on_one_stage(config)
            self._held[size] = held(self.outlines.outline(one), [one.spec.indices])
        work, block_work, saved, frozen, frozen_elements = self._works[key]
        share = 1 / p.pipeline
        mine = Held(*(part * share for part in self._held[size]))
        count = micro_batches(config, self.cluster.gpus)
        # One rank has the remaining blocks of an uneven division. The last rank waits for the first micro-batch. The
        # first rank waits for its gradient unless backward is split. Unequal stages may wait a little less.
        blocks = config.spec.num_blocks
        busiest = max(share * work.total, -(-blocks // p.pipeline) / blocks * block_work)
        before = work.forward if SCHEDULES[p.schedule].splits_wgrad else work.total
        waiting = 0.9 * before * share * (p.pipeline - 1) / p.virtual_pipeline
        end = sum(step_end(config, self.cluster, mine, work * share).values())
        memory = self._memory(config, layout, mine, saved, count) + share * frozen_elements * self.element
        return _Bound((busiest + share * frozen) * count + waiting + end, memory)

    def _check(self, config: Config) -> None:
        """Raise ConfigError if the model, or the frozen one, cannot run in this layout."""
        check_layout(config, self.cluster.gpus)
        frozen = frozen_run(config, self.teacher)
        if frozen is not None:
            check_layout(frozen, self.cluster.gpus)

    def _work(self, config: Config) -> _Work:
        one, ranks = _on_one_stage(config), self.cluster.gpus // config.parallel.pipeline
        # The parameters are sharded over the ranks of one stage.
        outline, near = self.outlines.outline(one), Cluster(self.cluster.gpu, ranks, self.cluster.gpus_per_node)
        work = sum(summed(stage_costs(outline, near)).values(), Phases())
        ends = sum(ends_costs(outline, near, first=True, last=True).values(), Phases())
        frozen, elements = 0.0, 0.0
        if outline.frozen is not None:
            frozen = sum(summed(stage_costs(outline.frozen, near)).values(), Phases()).forward
            rank = held(outline.frozen, [outline.frozen.config.spec.indices])
            plans = data_parallel_plans(outline.frozen.config, ranks // config.parallel.tensor)
            elements = rank.others / plans[0].weight_shards + rank.experts / plans[1].weight_shards
        return _Work(work, work.total - ends.total, self._saved(outline), frozen, elements)

    def _saved(self, outline: ModelOutline) -> float:
        """Return the bytes that all blocks save for one micro-batch."""
        layers = outline.config.spec.indices
        memory = block_memory(outline.config.parallel, len(layers))
        return sum(outline.saved(index, layer_memory) for index, layer_memory in zip(layers, memory, strict=True))

    def _memory(self, config: Config, layout: CandidateLayout, mine: Held, saved: float, count: int) -> float:
        plans = data_parallel_plans(config, self.cluster.gpus // (layout.tensor * layout.pipeline))
        values = 1 if config.fp8.param_gather else self.element
        state = (2 if config.optimizer.store_param_remainders else 4) + least_moment_bytes(config)
        on_device = state * (1 - config.optimizer.offload)
        total = 0.0
        for plan, elements in zip(plans, (mine.others, mine.experts), strict=True):
            only_masters = plan.gathers_blocks and plan.replicas == 1
            between_uses = 4 + (0 if only_masters else values)  # gradients and weights
            total += elements * (between_uses / plan.weight_shards + on_device / plan.ranks)
        placement = place_stages(layout.schedule, layout.pipeline, layout.virtual_pipeline)
        # A stage has an equal part of the blocks, or one block fewer if they do not divide evenly.
        blocks = config.spec.num_blocks
        stage_fraction = max(1, blocks // placement.num_stages - 1) / blocks if placement.num_stages > 1 else 1.0
        return total + saved * stage_fraction * most_in_flight(layout.schedule, placement, count)

    def predict(self, layout: CandidateLayout) -> Candidate | Misfit | None:
        """Return the candidate with its prediction, a misfit, or None if the layout cannot run."""
        config = applied(self.config, layout, self.cluster.gpus)
        try:
            self._check(config)
            outline = self.outlines.outline(config)
            memory = predicted_memory(outline, self.cluster)
        except ConfigError:
            return None
        excess = max(rank.total for rank in memory) - self.cluster.memory
        if excess > 0:
            return Misfit(excess)
        tokens = config.training.global_batch_size * config.training.seq_length
        steps = step_terms(outline, self.cluster)
        return Candidate(layout, config, Prediction(*steps, memory, tokens, self.cluster.gpus))


def search(config: Config, fp8: Fp8Manager, cluster: Cluster, keep: int = 5, teacher: ModelSpec | None = None) -> Found:
    """Return the `keep` fastest layouts of `config` that fit `cluster`, and the reasons why others lose.

    Raises ValueError for LoRA, and for recipes with block scales that only Blackwell supports.

    Args:
        config: Config of the run.
        fp8: Selection of FP8 layers, as the config specifies it.
        cluster: GPUs and links.
        keep: Number of layouts to return.
        teacher: Network of the teacher, for `frozen_run`.
    """
    searched = _Search(config, fp8, cluster, teacher)
    bounds: dict[CandidateLayout, _Bound] = {}
    for layout in layouts(config, cluster):
        with suppress(ConfigError):  # a layout that cannot run
            bounds[layout] = searched.bound(layout)
    result = Found(layouts=len(bounds))
    order = sorted(bounds, key=lambda layout: bounds[layout].seconds)
    known: dict[CandidateLayout, Candidate | Misfit | None] = {}

    def prediction(layout: CandidateLayout) -> Candidate | Misfit | None:
        if layout not in known:
            known[layout] = searched.predict(layout)
        return known[layout]

    limit = cluster.memory
    for layout in order:
        if len(result.best) >= keep and result.best[-1].prediction.seconds <= bounds[layout].seconds:
            break
        if bounds[layout].memory > limit:
            continue
        candidate = prediction(layout)
        if isinstance(candidate, Candidate):
            result.best = sorted([*result.best, candidate], key=lambda c: c.prediction.seconds)[:keep]
    if result.best:
        result.losers = list(_losers(result.best, order, bounds, prediction, limit))
    result.predicted = len(known)
    return result


def _losers(
    best: list[Candidate],
    order: list[CandidateLayout],
    bounds: dict[CandidateLayout, _Bound],
    prediction: _Predict,
    limit: int,
) -> Iterator[tuple[str, str]]:
    """Yield other divisions of the ranks and the reasons why they lose, in the order of their bounds."""
    winner, groups = best[0], dict[str, list[CandidateLayout]]()
    for layout in order:
        groups.setdefault(layout.group, []).append(layout)
    groups.pop(winner.layout.group)
    fitting = {name: [x for x in members if bounds[x].memory <= limit] for name, members in groups.items()}
    by_bound = sorted((name for name in groups if fitting[name]), key=lambda name: bounds[fitting[name][0]].seconds)
    slower: list[tuple[float, str, str]] = []
    for name in by_bound[:_GROUPS_EXPLAINED]:
        leanest = min(fitting[name], key=lambda layout: bounds[layout].memory)
        tried = [prediction(layout) for layout in dict.fromkeys([*fitting[name][:_TRIES_OF_GROUP], leanest])]
        tried += [candidate for candidate in best if candidate.layout.group == name]
        fits = [candidate.prediction for candidate in tried if isinstance(candidate, Candidate)]
        excesses = [candidate.excess for candidate in tried if isinstance(candidate, Misfit)]
        if fits:
            nearest = min(fits, key=lambda p: p.seconds)
            why = why_slower(nearest, winner.prediction)
            if excesses:  # others of the same sizes may fit, too
                why = f"its fastest need {size_text(min(excesses))} too much; one that fits is {why}"
            slower.append((nearest.seconds, name, why))
        elif excesses:
            slower.append((math.inf, name, f"does not fit: {size_text(min(excesses))} too much"))
    yield from (line[1:] for line in sorted(slower))
    for name in [name for name in groups if not fitting[name]][:_GROUPS_EXPLAINED]:
        excess = min(bounds[layout].memory for layout in groups[name]) - limit
        yield name, f"does not fit: at least {size_text(excess)} too much"


def why_slower(loser: Prediction, winner: Prediction) -> str:
    """Describe how much longer a step is, and the terms that make it longer, in percent of the winner's step."""
    slower = loser.seconds / winner.seconds - 1
    names = dict.fromkeys([*loser.terms, *winner.terms])
    excess = {name: (loser.terms.get(name, 0.0) - winner.terms.get(name, 0.0)) / winner.seconds for name in names}
    largest = [
        name for name in sorted(excess, key=lambda name: -excess[name])[:3] if excess[name] > min(0.005, slower / 2)
    ]
    terms = ", ".join(f"{name} +{excess[name]:.1%}" for name in largest)
    return f"{slower:.1%} slower" + (f": {terms}" if terms else "")
