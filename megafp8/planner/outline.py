"""Parameters and linear layers of a rank, read from layers that are built on PyTorch's meta device.

The constructors of the model are the only list of its parameters and linear layers. Code that needs this list before
the model exists (memory, step time, the names that FP8 patterns select) builds layers on the meta device, which takes
milliseconds and no memory, and reads them here. Only one layer of each kind is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from megafp8.config import Config
from megafp8.config.frozen import frozen_run
from megafp8.fp8.manager import Fp8Manager
from megafp8.layers.context import planning_context, weight_storage
from megafp8.layers.costs import MicroBatch
from megafp8.layers.experts.own_rows import MARGIN
from megafp8.layers.linear_weights import linear_weights
from megafp8.layers.recompute import KEEP_ALL, BlockMemory, block_memory
from megafp8.linear.group_state import states_of
from megafp8.models.block import Block, PredictionLayer
from megafp8.models.build import build_layer, build_stage
from megafp8.optimizer.base import MatrixUpdate
from megafp8.optimizer.param_groups import is_hidden_matrix
from megafp8.parallel.sharding import ParamSpec, Shape, spec_of
from megafp8.parallel.tensor.lora import freeze
from megafp8.plan import LinearPlan, LinearSite
from megafp8.planner.stages import stages_of
from megafp8.spec import ModelSpec


class Parameter(NamedTuple):
    """Parameter of a rank.

    `in_model`: number of elements in the whole model that this parameter is a part of; 0 if it is a copy. `expert`:
    whether it belongs to experts. `only_fp8`: whether a rank stores only FP8 data between steps. `shared`: whether it
    is an embedding weight that two pipeline stages use. `matrices`: global shapes of the block's matrices to which it
    belongs (`param_groups.is_hidden_matrix`).
    """

    elements: int
    in_model: int
    expert: bool
    trained: bool
    only_fp8: bool
    shared: bool
    matrices: tuple[Shape, ...]


class LinearLayer(NamedTuple):
    """Linear layer of a rank. Experts' identical layers appear once, and `copies` is their number."""

    site: LinearSite
    plan: LinearPlan
    copies: int = 1

    @property
    def only_fp8(self) -> bool:
        """Whether a rank stores only FP8 data of the weight between steps."""
        return self.plan.weight in ("zero fp8", "fsdp fp8")

    @property
    def transposes(self) -> bool:
        """Whether each backward pass transposes the FP8 weight."""
        return self.plan.gemms[1] != "high" and not self.plan.keeps_transpose

    @property
    def weights(self) -> int:
        """Number of weight elements in all copies."""
        return self.copies * self.site.inputs * self.site.outputs


@dataclass(frozen=True, eq=False)
class LayerOutline:
    """Layer of a rank. `module` is a `Block` or `PredictionLayer` on the meta device."""

    module: Block | PredictionLayer
    parameters: tuple[Parameter, ...]
    linears: tuple[LinearLayer, ...]

    @property
    def block(self) -> Block:
        """Mixer and feed-forward network of the layer, with their norms."""
        return self.module.block

    @property
    def in_block(self) -> list[LinearLayer]:
        """Linear layers that may be FP8, except experts."""
        return [x for x in self.linears if not x.site.expert and not x.site.high_precision]

    @property
    def expert_layers(self) -> list[LinearLayer]:
        """First and second linear layer of the experts; empty if the layer has an MLP."""
        return [x for x in self.linears if x.site.expert]


class ModelOutline:
    """Model in the layout of `config`, as the first rank of each stage holds it.

    `fp8`: selection of FP8 layers. `layers`: layers by index; identical layers are one object. `frozen`: frozen model
    with which the loss compares, if it is a different model. `expert_room`: `MicroBatch.expert_room`.
    """

    def __init__(
        self,
        config: Config,
        fp8: Fp8Manager,
        layers: Mapping[int, LayerOutline],
        frozen: ModelOutline | None = None,
        expert_room: float = MARGIN,
    ) -> None:
        self.config, self.fp8, self.layers, self.frozen = config, fp8, layers, frozen
        self.batch = replace(MicroBatch.from_config(config, fp8.recipe), expert_room=expert_room)
        self._decoder_batch = None
        if config.decoder_length is not None:
            self._decoder_batch = MicroBatch.from_config(config, fp8.recipe, decoder=True)
        self._ends: dict[range, tuple[list[Parameter], list[Parameter]]] = {}
        self._saved: dict[tuple[LayerOutline, BlockMemory], int] = {}

    def with_expert_room(self, room: float) -> ModelOutline:
        """Return the model with room for `room` times the rows that experts have if the load is even."""
        return ModelOutline(self.config, self.fp8, self.layers, self.frozen, room)

    def batch_of(self, index: int) -> MicroBatch:
        """Return the micro-batch that layer `index` processes; T5's decoder has a different one."""
        if self._decoder_batch is None or not self.config.spec.layers[index].is_decoder:
            return self.batch
        return self._decoder_batch

    @property
    def stream_tokens(self) -> int:
        """Tokens of a micro-batch that are sent between stages; for T5, the tokens of encoder and decoder."""
        others = 0 if self._decoder_batch is None else self._decoder_batch.own_tokens
        return self.batch.own_tokens + others

    def saved(self, index: int, memory: BlockMemory) -> int:
        """Return the bytes that layer `index` saves for its backward pass, offloaded or not."""
        layer, batch = self.layers[index], self.batch_of(index)
        if (layer, memory) not in self._saved:
            tensors = layer.module.input_bytes(batch) if memory.full else layer.module.saved(batch)
            self._saved[layer, memory] = sum(tensors.values())
        return self._saved[layer, memory]

    def linears(self, layers: range) -> dict[tuple[int, str], LinearLayer]:
        """Return the linear layers of `layers` by layer and name; a linear layer that layers share has the layer -1."""
        all_linears = ((index, x) for index in layers for x in self.layers[index].linears)
        return {(-1 if x.site.shared else index, x.site.name): x for index, x in all_linears}

    def deferred_wgrad(self, index: int) -> int:
        """Return the bytes of the operands of the weight gradients of layer `index`, for schedules that defer these.

        The operands of a linear layer are its input and its output gradient, columnwise in FP8.
        """
        layer, batch, total = self.layers[index], self.batch_of(index), 0
        for site, plan, _ in layer.linears:
            if not site.high_precision:
                tokens = layer.block.ffn.reserved_rows(batch) if site.expert else batch.tokens_of(site)
                total += tokens * (site.inputs + site.outputs) * (batch.element if plan.gemms[2] == "high" else 1)
        return total

    def paired_wgrad(self, index: int) -> int:
        """Return the bytes that fp8.paired_wgrad keeps in layer `index` for the next micro-batch.

        They are the FP8 operands of the weight gradients of experts. The rows of each expert are padded to a multiple
        of 128.
        """
        layer, batch = self.layers[index], self.batch_of(index)
        fp8 = [x for x in layer.expert_layers if x.plan.gemms[2] != "high"]
        rows = [layer.block.ffn.reserved_rows(batch) + 127 * x.copies for x in fp8]
        return sum(tokens * (x.site.inputs + x.site.outputs) for tokens, x in zip(rows, fp8))

    def parameters(self, layers: range) -> list[Parameter]:
        """Return the parameters of a stage with `layers`, in the order of its constructor."""
        if layers not in self._ends:
            self._ends[layers] = self._ends_of(layers)
        before, after = self._ends[layers]
        return [*before, *(x for index in layers for x in self.layers[index].parameters), *after]

    def _ends_of(self, layers: range) -> tuple[list[Parameter], list[Parameter]]:
        """Return the parameters of a stage before and after the parameters of its blocks."""
        config, context = self.config, planning_context(self.config, self.fp8.unbuilt())
        stage = build_stage(config.spec, context, layers=layers, positions=config.position_rows, blocks=False)
        stem = [x for x in (stage.embedding, stage.per_layer_embedding, *stage.shared) if x is not None]
        before = {*stage.parameters(recurse=False), *(param for x in stem for param in x.parameters())}
        several = self.config.parallel.pipeline > 1
        shared = {stage.shared_weight} if several else set()
        params = [(p, _parameter(config, p, only_fp8=fp8, shared=p in shared)) for p, fp8 in _parameters(stage)]
        return [x for p, x in params if p in before], [x for p, x in params if p not in before]


class ModelOutlines:
    """Outlines of one model and one selection of FP8 layers in several layouts. Shared parts are built once.

    `teacher` is the argument of `frozen_run`.
    """

    def __init__(self, config: Config, fp8: Fp8Manager, teacher: ModelSpec | None = None) -> None:
        self.fp8, self._teacher = fp8, teacher
        frozen = frozen_run(config, teacher)
        self._frozen = None if frozen is None else ModelOutlines(frozen, Fp8Manager(None, amax_group=None))
        self._built: dict[tuple[Any, ...], LayerOutline] = {}
        self._alike: dict[int, tuple[Any, ...]] = {}
        names: dict[int, list[str]] = {}
        for name, _ in linear_sites(config):
            names.setdefault(int(name.split(".")[1]), []).append(name)
        for index in config.spec.indices:
            # The first expert represents all experts.
            selected = [x for x in names[index] if ".experts." not in x or ".experts.0." in x]
            how = tuple((fp8.selects(x), fp8.recipe and fp8.recipe.operands(x)) for x in selected)
            self._alike[index] = (config.spec.kinds[index], how)

    def outline(self, config: Config) -> ModelOutline:
        """Return the model in the layout of `config`."""
        p, t = config.parallel, config.training
        layout: tuple[Any, ...] = (p.tensor, p.sequence_parallel, p.context, p.expert, p.expert_tensor)
        layout += (p.expert_dispatch, p.overlap_tensor, weight_storage(config), config.fp8.param_gather)
        layout += (t.micro_batch_size, t.seq_length)
        layers: dict[int, LayerOutline] = {}
        for stage_config in stages_of(config)[1]:
            for index, memory in zip(stage_config, block_memory(p, len(stage_config)), strict=True):
                key = (layout, self._alike[index], memory)
                if key not in self._built:
                    self._built[key] = layer_outline(config, self.fp8, index, memory)
                layers[index] = self._built[key]
        compared, frozen = frozen_run(config, self._teacher), None
        if compared is not None and self._frozen is not None:
            frozen = self._frozen.outline(compared)
        return ModelOutline(config, self.fp8, layers, frozen)


def model_outline(config: Config, fp8: Fp8Manager, teacher: ModelSpec | None = None) -> ModelOutline:
    """Return the outline of the model of `config`.

    Args:
        config: Config of the run.
        fp8: Selection of FP8 layers, as the config specifies it.
        teacher: Network of the teacher, for `frozen_run`.
    """
    return ModelOutlines(config, fp8, teacher).outline(config)


def layer_outline(config: Config, fp8: Fp8Manager, index: int, memory: BlockMemory) -> LayerOutline:
    """Return layer `index` in the layout of `config`, with the plans that `fp8` makes."""
    planned = fp8.unbuilt()
    module = build_layer(config.spec, planning_context(config, planned), index, memory)
    if config.lora is not None:
        freeze(module)
    copies = {state.site.name: len(group.states) for group in planned.groups for state in group.states[:1]}
    others = {state.site.name for group in planned.groups for state in group.states[1:]}
    linears = [
        LinearLayer(state.site, state.plan, copies.get(state.site.name, 1))
        for state in planned.layers
        if state.site.name not in others
    ]
    parameters = [_parameter(config, param, only_fp8=only_fp8) for param, only_fp8 in _parameters(module)]
    return LayerOutline(module, tuple(parameters), tuple(linears))


def linear_sites(config: Config) -> Iterator[tuple[str, LinearSite]]:
    """Yield the name and the place of all linear layers that an FP8 pattern can select.

    Sizes are per tensor-parallel rank. The place has the name of the first layer of the same kind.
    """
    # With expert-parallel size 1, the first rank has all experts.
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"expert": 1})})
    by_kind: dict[int, tuple[int, list[LinearSite]]] = {}
    for index in config.spec.indices:
        kind = config.spec.kinds[index]
        if kind not in by_kind:
            planned = Fp8Manager(None, amax_group=None)
            build_layer(config.spec, planning_context(whole, planned), index, KEEP_ALL)
            by_kind[kind] = index, [x.site for x in planned.layers if not x.site.high_precision]
        first, sites = by_kind[kind]
        prefix, layer_prefix = f"layers.{first}.", f"layers.{index}."
        for site in sites:
            if index == first or not site.shared:
                yield layer_prefix + site.name.removeprefix(prefix), site


def _parameters(module: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """Return the parameters of a module, and whether a rank stores only FP8 data of each between steps."""
    plans = {weight: states_of(state)[0].plan for weight, state in linear_weights(module)}
    only_fp8 = {weight for weight, plan in plans.items() if plan.weight in ("zero fp8", "fsdp fp8")}
    return [(param, param in only_fp8) for param in module.parameters()]


def _matrices(config: Config, spec: ParamSpec) -> tuple[Shape, ...]:
    """Return the shapes of the matrices that the optimizer updates as a whole, if it updates whole matrices."""
    update = config.optimizer.chosen
    per_head = isinstance(update, MatrixUpdate) and update.per_head
    return tuple(
        (len(rows), *shard.global_shape[1:])[-2:]
        for shard in spec.shards
        for rows in shard.matrix_rows(per_head=per_head)
    )


def _parameter(config: Config, param: nn.Parameter, *, only_fp8: bool = False, shared: bool = False) -> Parameter:
    spec, shapes = spec_of(param), tuple(shard.global_shape for shard in spec_of(param).shards)
    ranks = config.parallel.expert if spec.expert else 1  # each rank has different experts
    in_model = 0 if spec.is_copy else ranks * sum(map(math.prod, shapes))
    matrices = _matrices(config, spec) if is_hidden_matrix(spec) else ()
    return Parameter(param.numel(), in_model, spec.expert, param.requires_grad, only_fp8, shared, matrices)
