"""Seconds of a block, of the output layer and of their communication on one rank, for one micro-batch.

Three kinds of work, each with one rate: GEMMs and attention (FLOPs), everything else on the GPU (bytes of the tensors
that kernels read and write), and communication (bytes over a link). The formulas of GEMMs and casts are those of
`megafp8.fp8.speed_model`; what is cast, gathered and fused is read from the layers' plans (`megafp8.plan`), so no rule
about layouts or recipes stands here a second time.

What it gives up: kernels slow down gradually towards small sizes; the load of experts is taken as even; attention
across documents counts as whole causal attention. Tensors as in `activations`, whose Shapes hold here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.config.activations import ACTIVATIONS
from megafp8.fp8.recipes.base import GEMMS
from megafp8.fp8.speed_model import BF16, FP8, LinearSize, cast_seconds, gemm_seconds, granularities
from megafp8.fp8.tensor import TENSOR
from megafp8.models.recompute import BlockMemory
from megafp8.plan import LinearPlan
from megafp8.planner.activations import ELEMENT, at_layer, expert_layers, granularity, sizes, tokens_of
from megafp8.planner.hardware import Cluster
from megafp8.planner.memory import BlockElements, block_elements
from megafp8.planner.outline import LinearLayer, ModelOutline


@dataclass(frozen=True)
class Phases:
    """Seconds of forward, of the gradients of inputs, and of those of weights."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Phases) -> Phases:
        return Phases(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, factor: float) -> Phases:
        return Phases(self.forward * factor, self.backward * factor, self.weight * factor)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


Costs = dict[str, Phases]
"""Seconds by term: "GEMMs", "attention", "elementwise", "experts", "output layer", "recompute", and communication:
"tensor", "context", "expert", "fsdp"."""


def summed(costs: Iterator[Costs] | list[Costs]) -> Costs:
    total: Costs = {}
    for own in costs:
        for term, phases in own.items():
            total[term] = total.get(term, Phases()) + phases
    return total


def block_costs(outline: ModelOutline, cluster: Cluster, index: int, memory: BlockMemory) -> Costs:
    """Of block `index` and what it communicates, as `memory` recomputes it."""
    return _Block(outline, cluster, index).costs(memory)


class _Block:
    """The terms of one block."""

    def __init__(self, outline: ModelOutline, cluster: Cluster, index: int) -> None:
        config, self.outline, self.layer = outline.config, outline, outline.layers[index]
        self.whole, self.config, self.fp8, self.cluster = config, at_layer(config, index), outline.fp8, cluster
        self.index, self.gpu, self.x = index, cluster.gpu, sizes(self.config)
        self.layers = [(self._size(x), x.plan) for x in self.layer.in_block]
        self.experts = expert_layers(outline, index)
        if self.experts is not None and config.model.moe is not None:  # buffers have room for more rows than there are
            rows = self.x.m_own * config.model.moe.top_k * config.parallel.expert_tensor
            self.experts = self.experts._replace(rows=rows)
        # Widths of the MLP's activation, of a shared expert where the layer has experts; 0 if it has neither.
        up_layer = ACTIVATIONS[config.model.activation].up_layer
        self.up = sum(size.n for size, plan in self.layers if plan.name.endswith(f".{up_layer}"))
        self.f = sum(size.k for size, plan in self.layers if plan.name.endswith(".down"))
        self.copy = self.gpu.ceilings.bandwidth * self.gpu.elementwise

    def _size(self, layer: LinearLayer) -> LinearSize:
        return LinearSize(tokens_of(layer.site, self.x), layer.site.inputs, layer.site.outputs)

    def costs(self, memory: BlockMemory) -> Costs:
        found: Costs = {
            "GEMMs": self.gemms(),
            "attention": self.attention(),
            "elementwise": self.elementwise(),
            "tensor": self.tensor(),
            "context": self.context(),
        }
        if self.experts is not None:
            found |= {"experts": self.expert_gemms(), "expert": self.exchange()}
        if self.config.parallel.fsdp:
            compute = summed([found])
            found["fsdp"] = self.fsdp(sum((phases for phases in compute.values()), Phases()))
        found["recompute"] = Phases(backward=self.recompute(found, memory))
        return {term: phases for term, phases in found.items() if phases.total}

    def recompute(self, found: Costs, memory: BlockMemory) -> float:
        if memory.full:
            return sum(phases.forward for term, phases in found.items() if term != "fsdp")
        x, again = self.x, 0.0
        again += 2 * x.m_own * x.h * 2 * x.e / self.copy if memory.norms else 0.0
        again += x.m * (self.up + self.f) * x.e / self.copy if memory.activation else 0.0
        return again + (self.attention().forward if memory.attention else 0.0)

    # --- computation ------------------------------------------------------------------------------------------------

    def gemms(self) -> Phases:
        total = Phases()
        for size, plan in self.layers:
            total += self._linear(size, plan)
        for size in self._high_precision():
            total += self._in_bf16(size)
        return total

    def _high_precision(self) -> Iterator[LinearSize]:
        """Linear layers that are never FP8."""
        model, x = self.config.model, self.x
        yield from (self._size(layer) for layer in self.layer.linears if layer.site.high_precision)
        if self.experts is not None and model.moe is not None:
            yield LinearSize(x.m_own, x.h, 3 * model.moe.num_experts)  # three bf16 products make one of fp32

    def _in_bf16(self, size: LinearSize) -> Phases:
        return in_high_precision(self.config, self.cluster, size)

    def _linear(self, size: LinearSize, plan: LinearPlan) -> Phases:
        return Phases(*(self._gemm(size, plan, gemm, how) for gemm, how in zip(GEMMS, plan.gemms, strict=True)))

    def _gemm(self, size: LinearSize, plan: LinearPlan, gemm: str, how: str) -> float:
        element, rate = self._rate(plan, gemm, how)
        return gemm_seconds(size, gemm, element, rate, self.gpu.ceilings)

    def _rate(self, plan: LinearPlan, gemm: str, how: str) -> tuple[int, float]:
        """Bytes of an operand's element, and FLOP/s."""
        ceilings = self.gpu.ceilings
        if how == "high":
            element = ELEMENT[self.config.training.precision]
            return element, self.gpu.load_bf16 * ceilings.bf16 * BF16 / element
        recipes = self.fp8.recipe.operands(plan.name) if self.fp8.recipe is not None else None
        assert recipes is not None
        kind = granularities(recipes, GEMMS[gemm])
        fast = self.gpu.fast_accumulation if how == "fp8 fast" and kind == "tensor·tensor" else 1.0
        return FP8, self.gpu.load_fp8 * ceilings.fp8[kind] * fast

    def attention(self) -> Phases:
        config, model, gpu, x = self.config, self.config.model, self.gpu, self.x
        s, window = config.training.seq_length, model.window_of(self.index)
        pairs = s * s / 2 if model.causal else s * s
        if window is not None and window < s:
            pairs = s * window - window * window / 2
        pairs += s * gpu.attention_tile
        flops = 4 * pairs * config.training.micro_batch_size / config.parallel.context * x.a * x.d
        forward, backward = gpu.attention_forward, gpu.attention_backward
        scored = model.attention_softcap is not None or model.attention_sinks or model.position_embedding == "alibi"
        if scored or x.d > 128:
            wide = min(1.0, 128 / x.d)
            forward, backward = gpu.scored_forward, gpu.scored_backward * wide
        slower = (1 / gpu.narrow_heads if x.d <= 64 else 1.0) * (gpu.deterministic if config.deterministic else 1.0)
        slower *= x.e / BF16
        launch = gpu.ceilings.launch
        return Phases(flops / forward * slower + launch, 2 * flops / backward * slower + 4 * launch)

    def elementwise(self) -> Phases:
        """Norms, rotation, activations, casts, permutations of experts' rows, and sums of tensor-parallel shards."""
        model, x, gpu = self.config.model, self.x, self.gpu
        norms = 4 if model.norm_position == "both" else 2
        stream = norms * x.m_own * x.h * x.e
        # A norm reads the stream and a branch and writes their sum and its output; backward reads two gradients and the
        # input, and writes one.
        forward, backward = 4.0 * stream, 4.0 * stream
        heads = x.m * (x.a + x.g) * x.d * x.e * (2 if model.qk_norm and model.qk_norm != "projection" else 1)
        if model.position_embedding == "rope" or model.qk_norm:
            forward, backward = forward + 2 * heads, backward + 2 * heads
        if model.qk_norm == "projection":  # of separate kernels in fp32: bytes of an element of q and k, both ways
            count = x.m * (x.a + x.g) * x.d
            forward, backward = forward + 56 * count, backward + 96 * count
        passes = 1 if ACTIVATIONS[model.activation].fused else 2
        forward += passes * x.m * (self.up + self.f) * x.e
        backward += passes * x.m * (2 * self.up + self.f) * x.e
        if model.linear_bias:  # each output gradient is read again for the sum of its rows
            share = gpu.elementwise / gpu.column_sums
            backward += share * sum(size.m * size.n for size, _ in self.layers) * x.e
        kernels = 6 + 2 * norms
        if (own := self.experts) is not None:
            up, f = own.up.site.outputs, own.down.site.inputs
            forward += own.rows * (up + f) * x.e + 4 * own.rows * x.h * x.e
            backward += own.rows * (2 * up + f) * x.e + 4 * own.rows * x.h * x.e
            kernels += 10
        seconds = Phases(forward / self.copy, backward / self.copy)
        seconds += self._casts()
        seconds += self._sharding()
        return seconds + Phases(kernels * gpu.small_kernel, kernels * gpu.small_kernel)

    def _casts(self) -> Phases:
        """Casts of inputs and output gradients. A fused one writes FP8 instead of bf16, which is as many bytes."""
        total = Phases()
        every = [(size.m * size.k, size.m * size.n, plan) for size, plan in self.layers]
        if self.experts is not None:
            rows = self.experts.rows
            every += [(rows * x.site.inputs, rows * x.site.outputs, x.plan) for x in self.layer.of_experts]
        for inputs, outputs, plan in every:
            if plan.input == "layer":
                total += Phases(forward=self._cast(plan, inputs))
            if plan.grad_output.startswith("layer") and plan.fp8:
                total += Phases(backward=self._cast(plan, outputs))
        return total

    def _cast(self, plan: LinearPlan, elements: int) -> float:
        recipes = self.fp8.recipe.operands(plan.name) if self.fp8.recipe is not None else None
        assert recipes is not None
        share = self.gpu.elementwise if granularity(self.fp8, plan.name, "input") is TENSOR else self.gpu.fine_casts
        return cast_seconds(elements, recipes.input.capabilities.cast_passes, 2, self.gpu.ceilings) / share

    def _sharding(self) -> Phases:
        """What sequence parallelism moves in memory: shards that are summed, and copies of gathered ones."""
        x, p = self.x, self.config.parallel
        if p.tensor == 1 or not p.sequence_parallel:
            return Phases()
        tokens = 2 * x.m * x.h * (x.e + x.e)
        return Phases(tokens / self.copy, tokens / self.copy)

    def expert_gemms(self) -> Phases:
        """Grouped GEMMs: a tile of 128 rows belongs to one expert, and sums of weight gradients are added after the
        product, not beside it."""
        own, ceilings = self.experts, self.gpu.ceilings
        assert own is not None
        total = Phases()
        for layer in self.layer.of_experts:
            rows = own.rows + 64 * own.experts
            seconds = []
            for gemm, how in zip(GEMMS, layer.plan.gemms, strict=True):
                element, rate = self._rate(layer.plan, gemm, how)
                weights = layer.weights * (8 if gemm == "wgrad" else element) / ceilings.bandwidth
                product = 2 * rows * layer.site.inputs * layer.site.outputs / rate
                seconds.append((product + weights if gemm == "wgrad" else max(product, weights)) + ceilings.launch)
            total += Phases(*seconds)
        return total

    # --- communication ----------------------------------------------------------------------------------------------

    def tensor(self) -> Phases:
        """Exchanges of tensor-parallel ranks that nothing hides, and what hidden ones cost."""
        p, x, gpu = self.config.parallel, self.x, self.gpu
        t = p.tensor
        if t == 1:
            return Phases()
        values = x.m * x.h * x.e * (t - 1) / t
        if not p.sequence_parallel:
            sums = sum(plan.name.endswith(("proj", "down")) for _, plan in self.layers)
            each = sums * self.cluster.collective(t, 1, 2 * values)
            return Phases(each, each * gpu.hidden)
        symmetric = p.overlap_tensor in ("auto", "symmetric") and self.cluster.ranks_of_node(t, 1) == t
        if symmetric:
            exposed = gpu.hidden_copies
        elif p.overlap_tensor == "chunked":
            exposed = gpu.chunked
        else:
            exposed = 1.0
        forward = backward = 0.0
        for _, plan in self.layers:
            column = plan.gather is not None
            row = plan.name.endswith(("proj", "down"))
            fp8_share = FP8 / x.e
            if column:
                forward += self.cluster.collective(t, 1, values * (fp8_share if plan.gather == "fp8" else 1)) * exposed
                again = plan.saved in ("columnwise shard", "recompute")
                hidden = self.cluster.collective(t, 1, values) + (
                    self.cluster.collective(t, 1, values * fp8_share) if again else 0.0
                )
                backward += hidden * (gpu.hidden_copies if symmetric else gpu.hidden)
            elif row:
                forward += self.cluster.collective(t, 1, values) * exposed
                gathered = values * (fp8_share if plan.grad_output == "layer, then gather" else 1)
                backward += self.cluster.collective(t, 1, gathered) * exposed
        return Phases(forward, backward)

    def context(self) -> Phases:
        """Keys and values gathered forward and again backward, and their gradients summed."""
        p, x = self.config.parallel, self.x
        c = p.context
        received = 2 * x.m * (c - 1) * x.g * x.d * x.e
        each = self.cluster.collective(c, p.tensor, received)
        return Phases(each, 2 * each)

    def exchange(self) -> Phases:
        """Tokens to experts and back, forward and backward."""
        p, x, model = self.config.parallel, self.x, self.config.model
        ranks, moe = p.expert_ranks, model.moe
        if ranks == 1 or moe is None:
            return Phases()
        tokens = x.m_own * x.h * x.e
        gathers = self.config.gathers_tokens
        received = tokens * (ranks - 1) if gathers else tokens * moe.top_k * (ranks - 1) / ranks
        near = self.cluster.ranks_of_node(ranks, 1) == ranks
        copies = gathers and near and p.overlap_tensor in ("auto", "symmetric")
        each = self.cluster.collective(ranks, 1, received)
        each *= (1 + self.gpu.hidden_copies) / 2 if copies else 1.0
        each += 2 * (received + tokens) / self.copy  # written and read once more on either side
        return Phases(2 * each, 2 * each)

    def fsdp(self, compute: Phases) -> Phases:
        elements = block_elements(self.layer)
        quantized = sum(x.weights for x in self.layer.linears if x.plan.fp8) - elements.fp8
        return fsdp_seconds(self.whole, self.cluster, elements, quantized, compute)


def fsdp_seconds(config: Config, cluster: Cluster, elements: BlockElements, quantized: int, compute: Phases) -> Phases:
    """Weights gathered before forward and before backward, and gradients reduced, beside computation if that is long
    enough. Copies into and out of buffers, and casts of `quantized` elements, are not beside it."""
    p, gpu, e = config.parallel, cluster.gpu, ELEMENT[config.training.precision]
    ranks = cluster.gpus // (p.tensor * p.pipeline * p.fsdp_replicas)
    of_experts = max(1, ranks * p.tensor // p.expert_ranks)
    gathered = sent = own = alone = 0.0
    for values, in_fp8, size in ((elements.others, elements.fp8, ranks), (elements.experts, 0, of_experts)):
        gathered += (values * e + in_fp8 * FP8) * (size - 1) / size
        sent += (values + in_fp8) * ELEMENT[config.optimizer.reduce_dtype] * (size - 1) / size
        own += (values + in_fp8) / size
        alone += values + in_fp8 if size == 1 else 0
    gather = cluster.collective(ranks, p.tensor, gathered)
    reduce = cluster.collective(ranks, p.tensor, sent)
    copy, every = gpu.ceilings.bandwidth * gpu.elementwise, sum(elements)
    # A shard is read in fp32 and written as it travels, and what has arrived copied once; gradients are copied into the
    # buffer that is reduced. Where a rank has all of a weight, torch copies that buffer, in fp32.
    once = (own * (4 + e) + (every - elements.fp8) * 2 * e + quantized * (e + 2 * FP8)) / copy
    back = once + (every * (e + 2 * 4) + alone * 2 * 4) / copy

    def beside(communication: float, computation: float) -> float:
        hidden = min(communication, computation)
        return communication - hidden + gpu.hidden * hidden

    return Phases(
        beside(gather, compute.forward) + once, beside(gather + reduce, compute.backward + compute.weight) + back
    )


def in_high_precision(config: Config, cluster: Cluster, size: LinearSize) -> Phases:
    """A linear layer in `training.precision`."""
    element, ceilings = ELEMENT[config.training.precision], cluster.gpu.ceilings
    rate = cluster.gpu.load_bf16 * ceilings.bf16 * BF16 / element
    return Phases(*(gemm_seconds(size, gemm, element, rate, ceilings) for gemm in GEMMS))


def ends_costs(config: Config, cluster: Cluster, *, first: bool, last: bool) -> Costs:
    """Of the embedding on the first stage; of the output layer, its loss and multi-token prediction on the last."""
    x, model, gpu = sizes(config), config.model, cluster.gpu
    copy = gpu.ceilings.bandwidth * gpu.elementwise
    found: Costs = {}
    if first:
        moved = x.m_own * x.h
        found["elementwise"] = Phases(2 * moved * x.e / copy, moved * (x.e + 8) / copy)
    if last:
        tokens = (1 + model.mtp_num_layers) * sizes(at_layer(config, model.num_blocks - 1)).m
        v = model.padded_vocab_size // config.parallel.tensor
        output = in_high_precision(config, cluster, LinearSize(tokens, x.h, v))
        logits = tokens * v * x.e
        # The loss reads logits twice; their gradient overwrites them.
        output += Phases(2 * logits / copy, 2 * logits / copy)
        p = config.parallel
        if p.tensor > 1 and p.sequence_parallel:
            values = x.m * x.h * x.e * (p.tensor - 1) / p.tensor
            each = cluster.collective(p.tensor, 1, values)
            output += Phases(each, each)
        found["output layer"] = output
    if config.parallel.fsdp:
        table = model.padded_vocab_size // config.parallel.tensor * x.h
        compute = summed([found]).get("output layer", Phases())
        for present in (first, last and not model.tie_embeddings):
            if present:
                more = fsdp_seconds(config, cluster, BlockElements(0, 0, table), 0, compute)
                found["fsdp"] = found.get("fsdp", Phases()) + more
    return found
