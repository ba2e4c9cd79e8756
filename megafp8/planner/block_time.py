"""Time of a block, of the output layer, and of their communication, on one rank and for one micro-batch.

There are three kinds of work, each with its own rate: GEMMs and attention (FLOPs), all other work on the GPU (bytes of
the tensors that kernels read and write), and communication (bytes over a link). `megafp8.fp8.speed_model` has the
formulas of GEMMs and casts. The layers' plans (`megafp8.plan`) say what is cast, gathered and fused, so this module
repeats no rule about layouts or recipes.

Simplifications: kernels slow down gradually towards small sizes; experts have equal loads; attention across documents
counts as whole causal attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.fp8.speed_model import BF16, FP8, LinearSize, cast_seconds, gemm_seconds, granularities, is_dequantized
from megafp8.host.cluster import Cluster
from megafp8.layers.costs import ELEMENT, AttentionWork
from megafp8.layers.recompute import BlockMemory
from megafp8.numerics.recipes.base import GEMMS, OPERANDS
from megafp8.numerics.tensor import TENSOR
from megafp8.objectives.registry import loss_parts
from megafp8.plan import LinearPlan
from megafp8.planner.memory import BlockElements, block_elements, sum_bytes
from megafp8.planner.outline import LinearLayer, ModelOutline
from megafp8.planner.stages import data_parallel_plans, gathers_blocks


@dataclass(frozen=True)
class Phases:
    """Seconds of the forward pass, of input gradients, and of weight gradients."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Phases) -> Phases:
        return Phases(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, factor: float) -> Phases:
        return Phases(self.forward * factor, self.backward * factor, self.weight * factor)

    @property
    def total(self) -> float:
        """Sum of the three phases, in seconds."""
        return self.forward + self.backward + self.weight


Costs = dict[str, Phases]
"""Seconds by term. Computation: "GEMMs", "attention", "elementwise", "experts", "output layer", "recompute".
Communication: "tensor", "context", "expert", "fsdp"."""


def summed(costs: Iterator[Costs] | list[Costs]) -> Costs:
    """Return the sum of several costs, term by term."""
    total: Costs = {}
    for part in costs:
        for term, phases in part.items():
            total[term] = total.get(term, Phases()) + phases
    return total


def block_costs(outline: ModelOutline, cluster: Cluster, index: int, memory: BlockMemory) -> Costs:
    """Return the seconds of block `index` and of its communication, with recomputation as `memory` describes."""
    return _Block(outline, cluster, index).costs(memory)


class _Block:
    """Costs of one block."""

    def __init__(self, outline: ModelOutline, cluster: Cluster, index: int) -> None:
        self.config, self.outline, self.cluster = outline.config, outline, cluster
        self.layer, self.batch, self.gpu = outline.layers[index], outline.batch_of(index), cluster.gpu
        self.block, self.ffn = self.layer.block, self.layer.block.ffn
        self.in_block = [(self._size(x), x) for x in self.layer.in_block]
        self.work = self.block.work(self.batch)
        self.copy = self.gpu.ceilings.bandwidth * self.gpu.elementwise

    def _size(self, layer: LinearLayer) -> LinearSize:
        return LinearSize(self.batch.tokens_of(layer.site), layer.site.inputs, layer.site.outputs)

    @property
    def _values(self) -> int:
        """Bytes of the hidden states of all tokens within tensor-parallel regions."""
        return self.batch.tokens * self.config.spec.hidden_size * self.batch.element

    def costs(self, memory: BlockMemory) -> Costs:
        """Return all terms of the block that are not zero."""
        costs: Costs = {
            "GEMMs": self.gemms(),
            "attention": self.attention(),
            "elementwise": self.elementwise(),
            "tensor": self.tensor(),
            "context": self.context(),
            "experts": self.expert_gemms(),
            "expert": self.dispatch(),
        }
        if gathers_blocks(self.config):
            costs["fsdp"] = self.gathers(sum(costs.values(), Phases()))
        costs["recompute"] = Phases(backward=self.recompute(costs, memory))
        return {term: phases for term, phases in costs.items() if phases.total}

    def recompute(self, found: Costs, memory: BlockMemory) -> float:
        """Return the seconds of recomputation in backward, given the other terms of the block."""
        if memory.full:
            return sum(phases.forward for term, phases in found.items() if term != "fsdp")
        again = self.block.recomputed_bytes(self.batch, memory) / self.copy
        return again + (self.attention().forward if memory.attention else 0.0)

    # --- computation ------------------------------------------------------------------------------------------------

    def gemms(self) -> Phases:
        """Return the seconds of the GEMMs of linear layers, except experts."""
        total = Phases()
        for size, layer in self.in_block:
            total += self._linear(size, layer.plan)
        for size in self._high_precision():
            total += in_high_precision(self.config, self.cluster, size)
        return total

    def _high_precision(self) -> Iterator[LinearSize]:
        """Yield the sizes of linear layers that are never FP8."""
        yield from (self._size(layer) for layer in self.layer.linears if layer.site.high_precision)
        yield from self.ffn.router_gemms(self.batch)

    def _linear(self, size: LinearSize, plan: LinearPlan) -> Phases:
        return Phases(*(self._gemm(size, plan, gemm, how) for gemm, how in zip(GEMMS, plan.gemms, strict=True)))

    def _gemm(self, size: LinearSize, plan: LinearPlan, gemm: str, how: str) -> float:
        element, rate = self._rate(plan, gemm, how)
        return gemm_seconds(size, gemm, element, rate, self.gpu.ceilings)

    def _rate(self, plan: LinearPlan, gemm: str, how: str) -> tuple[int, float]:
        """Return the bytes per element of a GEMM's operands, and its rate in FLOP/s."""
        ceilings = self.gpu.ceilings
        if how == "high":
            element = ELEMENT[self.config.training.precision]
            return element, self.gpu.load_bf16 * ceilings.bf16 * BF16 / element
        recipe = self.outline.fp8.recipe
        recipes = None if recipe is None else recipe.operands(plan.name)
        assert recipes is not None
        if is_dequantized(recipes, GEMMS[gemm]):
            return BF16, self.gpu.load_bf16 * ceilings.bf16
        kind = granularities(recipes, GEMMS[gemm])
        fast = self.gpu.fast_accumulation if how == "fp8 fast" and kind == "tensor·tensor" else 1.0
        return FP8, self.gpu.load_fp8 * ceilings.fp8[kind] * fast

    def attention(self) -> Phases:
        """Return the seconds of attention kernels."""
        works = self.block.attentions(self.batch)
        return sum((self._attention(work) for work in works), Phases())

    def _attention(self, work: AttentionWork) -> Phases:
        config, gpu, batch = self.config, self.gpu, self.batch
        pairs = work.pairs + work.queries * gpu.attention_tile
        channels = work.width + work.value_width
        flops = 2 * pairs * batch.sequences / config.parallel.context * work.heads * channels
        forward, backward = gpu.attention_forward, gpu.attention_backward
        if work.modified or work.value_width > 128:
            wide = min(1.0, 128 / work.value_width)
            forward, backward = gpu.scored_forward, gpu.scored_backward * wide
        slower = (1 / gpu.narrow_heads if work.width <= 64 else 1.0) * (
            gpu.deterministic if config.deterministic else 1.0
        )
        slower *= batch.element / BF16
        launch = gpu.ceilings.launch
        phases = Phases(flops / forward * slower + launch, 2 * flops / backward * slower + 4 * launch)
        if config.optimizer.qk_clip is None:
            return phases
        return phases + Phases(
            forward=flops / 2 / gpu.scored_forward * slower + 2 * launch
        )  # computes the largest logits

    def elementwise(self) -> Phases:
        """Return the seconds of memory-bound work.

        It consists of norms, rotation, activations, casts, permutations of experts' rows, and sums of tensor-parallel
        shards.
        """
        forward, backward, kernels, column_sums, more_in_backward = self.work
        backward += column_sums * self.gpu.elementwise / self.gpu.column_sums
        seconds = Phases(forward / self.copy, backward / self.copy)
        seconds += self._casts()
        seconds += self._sharding()
        return seconds + Phases(kernels, kernels + more_in_backward) * self.gpu.small_kernel

    def _casts(self) -> Phases:
        """Return the seconds of casts of inputs and output gradients, and of transposes of weights."""
        total = Phases()
        rows = self.ffn.rows(self.batch)
        every = [(size.m * size.k, size.m * size.n, layer.plan) for size, layer in self.in_block]
        every += [(rows * x.site.inputs, rows * x.site.outputs, x.plan) for x in self.layer.expert_layers]
        for inputs, outputs, plan in every:
            if plan.input != "high":
                total += Phases(forward=self._cast(plan, inputs, fused=plan.input == "fused"))
            if plan.grad_output != "high" and plan.fp8:
                total += Phases(backward=self._cast(plan, outputs, fused=plan.grad_output == "fused"))
        transposed = sum(x.weights for x in self.layer.linears if x.transposes)
        return total + Phases(backward=2 * FP8 * transposed / self.copy)

    def _cast(self, plan: LinearPlan, elements: int, *, fused: bool) -> float:
        """Return the seconds of a cast.

        A fused cast writes two FP8 copies where the operation without it would write bf16, which is the same number of
        bytes. Dequantized operands are bf16. NVFP4 reads the input once more for its amaxes.
        """
        recipe = self.outline.fp8.recipe
        recipes = None if recipe is None else recipe.operands(plan.name)
        assert recipes is not None
        dequantized = is_dequantized(recipes, OPERANDS)
        if fused and not dequantized:
            return 0.0
        passes, element = recipes.input.capabilities.cast_passes, BF16 if dequantized else FP8
        share = self.gpu.elementwise if self.batch.granularity(plan.name, "input") is TENSOR else self.gpu.fine_casts
        passes, copies = (passes - 1, 1) if fused else (passes, 2)
        return cast_seconds(elements, passes, copies, self.gpu.ceilings, element) / share

    def _sharding(self) -> Phases:
        """Return the seconds of memory traffic of sequence parallelism: sums and copies of shards."""
        p = self.config.parallel
        if p.tensor == 1 or not p.sequence_parallel:
            return Phases()
        tokens = 4 * self._values
        return Phases(tokens / self.copy, tokens / self.copy)

    def expert_gemms(self) -> Phases:
        """Return the seconds of the grouped GEMMs of experts.

        A tile of 128 rows belongs to one expert. Weight gradients are assumed to be accumulated after the product,
        although kernels for Hopper overlap part of the accumulation.
        """
        ceilings, total = self.gpu.ceilings, Phases()
        for layer in self.layer.expert_layers:
            rows = self.ffn.rows(self.batch) + 64 * layer.copies
            seconds = []
            for gemm, how in zip(GEMMS, layer.plan.gemms, strict=True):
                element, rate = self._rate(layer.plan, gemm, how)
                sums = 4 if self.config.fp8.paired_wgrad and how != "high" else 8
                weights = layer.weights * (sums if gemm == "wgrad" else element) / ceilings.bandwidth
                product = 2 * rows * layer.site.inputs * layer.site.outputs / rate
                seconds.append((product + weights if gemm == "wgrad" else max(product, weights)) + ceilings.launch)
            total += Phases(*seconds)
        return total

    # --- communication ----------------------------------------------------------------------------------------------

    def tensor(self) -> Phases:
        """Return the seconds of exposed tensor-parallel communication, plus the slowdown by hidden communication."""
        p, gpu = self.config.parallel, self.gpu
        t = p.tensor
        if t == 1:
            return Phases()
        values = self._values * (t - 1) / t
        if not p.sequence_parallel:
            sums = sum(layer.site.parallel == "row" for _, layer in self.in_block)
            each = sums * self.cluster.collective(t, 1, 2 * values)
            return Phases(each, each * gpu.hidden)
        symmetric = p.overlap_tensor in ("auto", "symmetric") and self.cluster.ranks_of_node(t, 1) == t
        exposed = gpu.hidden_copies if symmetric else 1.0
        forward = backward = 0.0
        for _, (site, plan, _) in self.in_block:
            fp8_share = FP8 / self.batch.element
            if plan.gather is not None:
                forward += self.cluster.collective(t, 1, values * (fp8_share if plan.gather == "fp8" else 1)) * exposed
                again = plan.saved in ("columnwise shard", "recompute")
                hidden = self.cluster.collective(t, 1, values) + (
                    self.cluster.collective(t, 1, values * fp8_share) if again else 0.0
                )
                backward += hidden * (gpu.hidden_copies if symmetric else gpu.hidden)
            elif site.parallel == "row":
                forward += self.cluster.collective(t, 1, values) * exposed
                gathered = values * (fp8_share if plan.grad_output == "layer, then gather" else 1)
                backward += self.cluster.collective(t, 1, gathered) * exposed
        return Phases(forward, backward)

    def context(self) -> Phases:
        """Return the seconds to gather keys and values in forward and again in backward, and to reduce gradients."""
        p, c = self.config.parallel, self.config.parallel.context
        received = (c - 1) * self.block.mixer.keys_and_values(self.batch)
        each = self.cluster.collective(c, p.tensor, received)
        return Phases(each, 2 * each)

    def dispatch(self) -> Phases:
        """Return the seconds to send tokens to their experts and back, in forward and backward."""
        sent = self.ffn.dispatch_traffic(self.batch)
        if sent is None:
            return Phases()
        near = self.cluster.ranks_of_node(sent.ranks, 1) == sent.ranks
        copies = sent.gathered and near and self.config.parallel.overlap_tensor in ("auto", "symmetric")
        send = self.cluster.collective if sent.gathered else self.cluster.all_to_all
        each = send(sent.ranks, 1, sent.received)
        each *= (1 + self.gpu.hidden_copies) / 2 if copies else 1.0
        each += 2 * (sent.received + sent.tokens) / self.copy  # written and read once more on either side
        return Phases(2 * each, 2 * each)

    def gathers(self, compute: Phases) -> Phases:
        """Return the seconds of FSDP communication and copies, overlapped with `compute`."""
        multiplied = sum(x.weights for x in self.layer.linears if x.plan.fp8)
        return gather_seconds(self.config, self.cluster, block_elements(self.layer), multiplied, compute)


def gather_seconds(
    config: Config, cluster: Cluster, elements: BlockElements, multiplied: int, compute: Phases
) -> Phases:
    """Return the seconds to gather weights before forward and backward, and to reduce gradients.

    Communication overlaps with computation if that takes long enough. Copies into and out of buffers do not overlap,
    nor do casts of weights that are gathered in high precision.

    Args:
        config: Config of the run.
        cluster: GPUs and links.
        elements: Parameters of the block on this rank.
        multiplied: Number of weights that GEMMs read in FP8.
        compute: Computation that can hide the communication.
    """
    p, gpu, e = config.parallel, cluster.gpu, ELEMENT[config.training.precision]
    others, experts = data_parallel_plans(config, cluster.gpus // (p.tensor * p.pipeline))
    sent = ELEMENT[config.optimizer.reduce_dtype]
    parts = [(others, elements.others, elements.fp8)]
    parts += [(experts, elements.experts, elements.experts_fp8)] if experts.gathers_blocks else []
    gathered = sum(plan.gathered(values * e + in_fp8 * FP8) for plan, values, in_fp8 in parts)
    reduced = sum(plan.gathered((values + in_fp8) * sent) for plan, values, in_fp8 in parts)
    shards = sum((values + in_fp8) / plan.weight_shards for plan, values, in_fp8 in parts)
    whole = sum(values + in_fp8 for plan, values, in_fp8 in parts if plan.weight_shards == 1)
    gather = cluster.collective(others.weight_shards, others.stride, gathered)
    reduce = cluster.collective(others.weight_shards, others.stride, reduced)
    copy = gpu.ceilings.bandwidth * gpu.elementwise
    every, sent_fp8 = (sum(counts) for counts in zip(*((values + in_fp8, in_fp8) for _, values, in_fp8 in parts)))
    # A shard is read, in fp32 unless it has replicas, and written in the gathered format, and gathered data is copied
    # once. Gradients are copied into the buffer that is reduced. If a rank holds a whole weight, torch copies that
    # buffer in fp32.
    shard_bytes = shards * (e + (4 if others.replicas == 1 else e))
    once = (shard_bytes + (every - sent_fp8) * 2 * e + (multiplied - sent_fp8) * (e + 2 * FP8)) / copy
    back = once + (every * (e + 2 * 4) + whole * 2 * 4) / copy

    def beside(communication: float, computation: float) -> float:
        hidden = min(communication, computation)
        return communication - hidden + gpu.hidden * hidden

    return Phases(
        beside(gather, compute.forward) + once, beside(gather + reduce, compute.backward + compute.weight) + back
    )


def in_high_precision(config: Config, cluster: Cluster, size: LinearSize) -> Phases:
    """Return the seconds of a linear layer in `training.precision`."""
    element, ceilings = ELEMENT[config.training.precision], cluster.gpu.ceilings
    rate = cluster.gpu.load_bf16 * ceilings.bf16 * BF16 / element
    return Phases(*(gemm_seconds(size, gemm, element, rate, ceilings) for gemm in GEMMS))


def ends_costs(outline: ModelOutline, cluster: Cluster, *, first: bool, last: bool) -> Costs:
    """Return the seconds of the two ends of the model.

    The first stage has the embedding; the last stage has the output layer with its loss, and multi-token prediction.
    """
    config, model, gpu, batch = outline.config, outline.config.spec, cluster.gpu, outline.batch
    h, e = model.hidden_size, batch.element
    copy = gpu.ceilings.bandwidth * gpu.elementwise
    costs: Costs = {}
    if first:
        moved = batch.own_tokens * h
        costs["elementwise"] = Phases(2 * moved * e / copy, moved * (e + 8) / copy)
    if last:
        tokens = (1 + model.num_prediction_layers) * outline.batch_of(model.num_blocks - 1).tokens
        v = model.stem.rows // config.parallel.tensor
        output = in_high_precision(config, cluster, LinearSize(tokens, h, v))
        logits = tokens * v * e
        # The loss reads logits twice; their gradient overwrites them. All parts but the first add to the fp32 gradient.
        parts = loss_parts(config).number
        sums = (parts - 1) * v * h * 2 * sum_bytes(config)
        output += Phases(2 * logits / copy, 2 * logits / copy, sums / copy)
        p = config.parallel
        if p.tensor > 1 and p.sequence_parallel:
            values = batch.tokens * h * e * (p.tensor - 1) / p.tensor
            each = cluster.collective(p.tensor, 1, values)
            output += Phases(each, each)
        costs["output layer"] = output
    if gathers_blocks(config):
        table = model.stem.rows // config.parallel.tensor * h
        compute = summed([costs]).get("output layer", Phases())
        for present in (first, last and not model.head.tied):
            if present:
                gather = gather_seconds(config, cluster, BlockElements(0, 0, 0, table), 0, compute)
                costs["fsdp"] = costs.get("fsdp", Phases()) + gather
    if last:  # the loss computes its gradients in the forward pass; a weight gradient in one part can be deferred
        deferred = output.weight if parts == 1 else 0.0
        costs["output layer"] = Phases(output.total - deferred, weight=deferred)
    return costs
