"""Trainer of one rank: model, gradients, optimizer and pipeline, built once from the config, and the training step.

A step runs all micro-batches forward and backward through the pipeline, sums the gradients over data-parallel ranks,
and updates the weights. `megafp8.training.loss` defines the loss that a step minimizes and reports.

If the loss compares the model with a frozen model, a step first runs the frozen model forward over all micro-batches,
through the pipeline as in an evaluation. The last stage keeps the result of each micro-batch in `Batch.reference`.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.fp8.health import Fp8Record, Statistics
from megafp8.layers.context import BuildContext, lora_of, tokens_per_rank, weight_storage
from megafp8.layers.experts.own_rows import MARGIN, RowBound
from megafp8.layers.recompute import block_memory
from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.models.build import build_stage
from megafp8.models.gpt import GPTStage
from megafp8.numerics.dtypes import DTYPES
from megafp8.objectives import ObjectiveLoss
from megafp8.objectives.registry import loss_of, loss_tokens_at_once
from megafp8.optimizer.layer_norms import layers_of_model
from megafp8.optimizer.loss_scale import LossScaler
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.step import OptimizerStep, StepResult
from megafp8.parallel import activity
from megafp8.parallel.collectives import all_gather_objects, all_reduce
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.pipeline.engine import PipelineEngine, StageFunction
from megafp8.parallel.pipeline.simulate import Timeline
from megafp8.parallel.pipeline.trace import Stopwatch
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.parallel.tensor.lora import without_adapters
from megafp8.planner.memory import expert_room
from megafp8.planner.outline import model_outline
from megafp8.training import cuda_graphs
from megafp8.training.auto_filter import FilterChoice, choose
from megafp8.training.cuda_graphs import EAGER_STEPS, Graphs, Part, in_parts, why_not
from megafp8.training.data_parallel import build_data_parallel, experts_are_whole
from megafp8.training.expert_load import ExpertLoad, LoadCollector
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import frozen_config
from megafp8.training.learning_rate import schedule_of
from megafp8.training.loss import BatchLoss, LabelLoss, OwnLoss, ReferenceStage, StepLoss, TrainedStage
from megafp8.training.overlap import build_expert_overlap, build_tp_overlap
from megafp8.training.pipeline import PipelinePlan, plan_pipeline
from megafp8.training.qk_clip import QkClip

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Passes(NamedTuple):
    """Results of a step's forward and backward passes, other than the gradients.

    Attributes:
        report: Sums over this rank's micro-batches, float64: the sum of losses and the number of tokens, the same pair
            for each further loss of the model, the z-loss, and the number of layers without room for all expert rows.
            If the objective has its own loss, its metrics replace the further losses and the z-loss.
        statistics: Records of the FP8 report.
        amaxes: Amaxes from which FP8 scales are updated, if they are maxima over more ranks than one model has.
    """

    report: Tensor
    statistics: Statistics
    amaxes: Sequence[Tensor] = ()


def _sum_of(reports: Sequence[Tensor]) -> Tensor:
    """Return the sum of the reports of parts."""
    return reports[0] if len(reports) == 1 else torch.stack(list(reports)).sum(dim=0)


class RankTrainer:
    """Model stages of one rank, with their optimizer and pipeline engine.

    Construction is collective: every rank must build its trainer.

    Args:
        config: Config of the run, or of one stage of the run.
        parallel: Process groups.
        choice: Layers that fp8.auto_filter chose earlier in this run; None makes it choose now.
        frozen: Train no weights; the model only computes `references`.

    Attributes:
        loss: The objective's own loss; None for cross-entropy.
        frozen: Trainer of the frozen model that the loss compares this model with. It has the initial values of its
            config until `megafp8.training.frozen` loads others. None if the loss compares nothing, or compares this
            model with itself without adapters.
        compared: Config of the model that each step compares this model with, or None.
        known_reference: Function that reads the frozen model's outputs for a micro-batch, if they were precomputed.
        stages: Model stages of this rank, one for each chunk of the pipeline placement.
        stage_functions: Forward passes of `stages` with the loss, in the form that the pipeline engine calls.
        model: All stages in one module.
        strategy: Data-parallel strategy, which holds the parameters and gradients of the stages.
        expert_load: Expert load of the latest `train_step`; None without experts.
        index_loss: Indexer loss of the latest `train_step`; None without indexers.
        max_attention_logit: Largest attention logit of the latest `train_step`; None without QK-clip.
        timeline: Timeline of the step `logging.pipeline_trace_step`, once that step is done.
        fp8_records: FP8 health of all stages in the latest `train_step`. Empty on ranks other than 0, and if the FP8
            report did not sample the step.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelState,
        choice: FilterChoice | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.config, self.parallel = config, parallel
        self.loss = None if frozen else loss_of(config, parallel)
        p, t = config.parallel, config.training
        self.schedule = schedule_of(config.optimizer, t.steps)
        dtype = DTYPES[t.precision]
        self.fp8 = build_fp8(config, parallel)
        self.auto_filter = choose(config, self.fp8, parallel, dtype) if choice is None else choice
        self.fp8.leave_out(self.auto_filter.layers)
        self.fp8_records: list[Fp8Record] = []
        self.row_bound = RowBound(parallel.device)
        self.loss_scaler = LossScaler(parallel.device, **t.loss_scale.model_dump()) if t.precision == "fp16" else None
        self.auxiliary_loss_grad = torch.ones((), device=parallel.device)
        wgrads = WgradStore()
        context = BuildContext(
            parallel.tensor.group,
            self.fp8,
            dtype,
            parallel.device,
            p.sequence_parallel,
            parallel.context.group,
            build_tp_overlap(p, parallel, os.environ),
            tokens=tokens_per_rank(config),
            encoder_tokens=tokens_per_rank(config, encoder=True),
            weight_storage=weight_storage(config),
            param_gather=config.fp8.param_gather,
            keeps_transposes=config.fp8.keep_weight_transposes,
            expert=parallel.expert.group,
            expert_tensor=parallel.expert_tensor.group,
            expert_amax=parallel.expert_amax.group,
            expert_rows=parallel.expert_rows.group,
            whole_experts=experts_are_whole(config, parallel),
            gathers_tokens=config.gathers_tokens,
            expert_overlap=build_expert_overlap(config, parallel, os.environ),
            during_exchange=wgrads.compute_during_exchange,
            row_bound=self.row_bound,
            sequence_group=parallel.tensor_context.group,
            global_batch=t.global_batch_size,
            global_tokens=t.global_batch_size * t.seq_length,
            seed=config.seed,
            auxiliary_loss_grad=self.auxiliary_loss_grad,
            lora=lora_of(config),
            records_logits=config.optimizer.qk_clip is not None,
        )
        self.num_microbatches = t.global_batch_size // (t.micro_batch_size * parallel.data.size)
        self.plan = plan_pipeline(config, self.num_microbatches)
        self._plans = {self.num_microbatches: self.plan}
        self.stages = [self._build(stage, context) for stage in self.plan.placement.stages[parallel.pipeline.rank]]
        self.model = nn.ModuleList(self.stages)
        if frozen:
            self.model.requires_grad_(False)
        self.fp8.materialize(parallel.device)
        self._has_loss = parallel.pipeline.rank == self.plan.last_rank
        self._loss = self._step_loss()
        self.nominal_tokens = t.global_batch_size * t.seq_length
        scale = None if self.loss_scaler is None else self.loss_scaler.scale
        self.stage_functions: list[StageFunction] = [
            TrainedStage(stage, self._loss, self.nominal_tokens, scale) for stage in self.stages
        ]
        model = config.spec
        self._label_depths, self._cuts_documents = model.num_prediction_layers, model.cuts_documents
        self._places_documents = model.causal and model.cuts_documents and self.parallel.context.size > 1
        self._needs_samples = bool(model.hidden_dropout or model.attention_dropout)
        self._has_auxiliary_loss, self._has_index_loss = model.has_auxiliary_loss, model.has_indexers
        self.load_collector = self._load_collector()
        self.expert_load: ExpertLoad | None = None
        self._index_losses = [x for stage in self.stages for x in stage.index_losses.values()]
        self.index_loss: float | None = None
        mixers = [mixer for stage in self.stages for mixer in stage.recording_mixers]
        threshold = config.optimizer.qk_clip
        self.qk_clip = None if threshold is None else QkClip(mixers, threshold, parallel)
        self.max_attention_logit: float | None = None
        self.strategy = build_data_parallel(config, parallel, self.model, wgrads, os.environ)
        self.update = self._build_update()
        self.optimizer = self.update.optimizer
        self.strategy.begin(self.optimizer.master_of)
        b = t.micro_batch_size
        rows = self.stages[0].stream_rows(t.seq_length // p.context, b, config.decoder_length or 0)
        self.engine = PipelineEngine(
            parallel.pipeline,
            parallel.pipeline_backward,
            self.plan.placement,
            (rows, b, model.stream_width),
            dtype,
            parallel.device,
            wgrads,
            fills_exchanges=self._fills_exchanges(),
        )
        self.timeline: Timeline | None = None
        self._room = 0  # documents per sample that batches have room for
        self.why_no_graphs = why_not(config, parallel.device.type)
        self.graphs: Graphs | None = None
        if not self.why_no_graphs:
            self.graphs = Graphs(parallel.device)
        for module in self.model.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not module.weight.requires_grad:
                # Each graph keeps its own FP8 copies in its memory.
                module.state.freeze_weight(keep_copies=self.graphs is None)
        other = None if self.loss is None else frozen_config(config)
        self.frozen = None if other is None else RankTrainer(other, parallel, frozen=True)
        self.compared: Config | None = None
        if self.loss is not None and config.data.compares:
            self.compared = config if self.frozen is None else self.frozen.config
        self.known_reference: Callable[[Batch], Tensor] | None = None

    @cached_property
    def expert_room(self) -> float:
        """Room for the rows of experts in CUDA graphs, as a multiple of an even load.

        A step with more rows than room is computed twice, so memory that nothing else needs becomes room. A frozen
        model's memory is not known here: beside one, there is no more room than necessary. Call this after eager steps,
        which create communicators and their buffers.
        """
        parallel = self.parallel
        on_gpu = self.graphs is not None and parallel.device.type == "cuda"
        if not on_gpu or parallel.expert.size == 1 or self.frozen is not None:
            return MARGIN
        fp8 = build_fp8(self.config, None)
        fp8.leave_out(self.auto_filter.layers)
        outline, memory = model_outline(self.config, fp8), cuda_graphs.usable_memory(parallel.device)
        room = expert_room(outline, parallel.world_size, self.plan.placement, self.plan.train, memory)
        logger.info(f"CUDA graphs: room for the rows of experts: {room:.3g} times an even load")
        return room

    def _fixed_rows(self) -> AbstractContextManager[None]:
        """Return a context in which the numbers of rows of experts are fixed, to record a graph."""
        return self.row_bound.fixed(self.expert_room)

    def _fills_exchanges(self) -> bool:
        """Return whether backward computes weight gradients while gradients travel between tokens and experts.

        Tensor-parallel layers compute theirs while their own gradients travel. The kernels of an all-to-all would take
        multiprocessors from weight gradients that run at the same time: Mixtral's steps became 3% slower.
        """
        gathers = self.config.spec.has_experts and self.config.gathers_tokens
        return gathers and self.parallel.expert.size > 1 and self.parallel.tensor.size == 1

    def _step_loss(self) -> StepLoss:
        """Return the loss that a step minimizes and reports."""
        head = self.config.spec.head
        if self.loss is not None:
            return OwnLoss(self.loss)
        return LabelLoss(head.extra_losses, head.extra_losses_factor, self.config.training.z_loss > 0)

    def _build_update(self) -> OptimizerStep:
        """Return the optimizer step, including gradient clipping and the reductions of norms."""
        parallel, o, strategy = self.parallel, self.config.optimizer, self.strategy
        measures_layers = self.config.logging.layer_norms_interval > 0
        return OptimizerStep(
            buffer=strategy,
            optimizer=MixedPrecisionOptimizer(
                strategy.shards,
                o,
                device=parallel.device,
                seed=self.config.seed,
                width=self.config.spec.width_multiplier,
                released=strategy.released,
                masters=strategy.masters,
                matrix_group=parallel.amax.group,  # all ranks that hold shards of this rank's stages
                outer=self.config.outer is not None,
            ),
            tensor_group=parallel.tensor.group,
            model_group=parallel.model.group,
            embedding_group=parallel.embedding.group if parallel.embedding is not None else None,
            shared_params=strategy.tied,
            max_norm=o.clip_grad_norm or None,
            sharded=strategy.sharded,
            data_group=strategy.group,
            expert_group=strategy.expert_group,
            scaler=self.loss_scaler,
            layers=layers_of_model(strategy.trained, parallel.model.group) if measures_layers else [],
            row_factors=None if self.qk_clip is None else self.qk_clip.row_factors,
        )

    def close(self) -> None:
        """Free the CUDA graphs. They hold communicators, so free them before destroying the process groups."""
        if self.graphs is not None:
            self.graphs.drop()

    def _build(self, stage: int, context: BuildContext) -> GPTStage:
        layers = self.plan.layers[stage]
        return build_stage(
            self.config.spec,
            context,
            layers=layers,
            positions=self.config.position_rows,
            memory=block_memory(self.config.parallel, len(layers)),
            z_loss=self.config.training.z_loss,
            tokens_at_once=loss_tokens_at_once(self.config),
        )

    def _load_collector(self) -> LoadCollector | None:
        layers = {i: layer.ffn.router_outputs for i, layer in enumerate(self.config.spec.layers) if layer.has_experts}
        if not layers:
            return None
        routers = {layer: router for stage in self.stages for layer, router in stage.routers.items()}
        return LoadCollector(routers, layers, self.parallel)

    def _sum_of_index_losses(self) -> Tensor:
        """Return the sum of the indexer losses over all layers and tokens of a step, float64 `[1]`. Collective."""
        total = torch.zeros(1, dtype=torch.float64, device=self.parallel.device)
        for index_loss in self._index_losses:
            total += index_loss
        all_reduce(total, self.parallel.amax.group)  # data × context × tensor: all tokens of a layer
        return all_reduce(total, self.parallel.pipeline.group)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors of this rank that belong to the weights but have no gradient, by global name."""
        return {name: values for stage in self.stages for name, values in stage.constants.items()}

    @property
    def router_shares(self) -> dict[str, Tensor]:
        """Shares of the experts in the previous step's choices (`Router.shares`), by global name."""
        return {name: values for stage in self.stages for name, values in stage.router_shares.items()}

    @property
    def loss_scale(self) -> dict[str, Tensor]:
        """State of the loss scale by name, equal on all ranks; empty without loss scaling."""
        return {} if self.loss_scaler is None else self.loss_scaler.state_dict()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        return self.schedule.at(step)

    def references(self, batches: Sequence[Batch], loss: ObjectiveLoss) -> list[Tensor]:
        """Run this model forward and return the reference outputs of `loss` for each micro-batch. Collective.

        The passes run without gradients and dropout. Ranks without the last stage return an empty list. `batches` are
        on the device and hold the tokens of this context-parallel rank.
        """
        self.strategy.gather()
        actions = self._plan_of(batches).evaluate[self.parallel.pipeline.rank]
        microbatches = [replace(batch, samples=None) for batch in batches]
        with self.fp8.recording(False):
            functions = [ReferenceStage(stage, loss) for stage in self.stages]
            return self.engine.run(actions, functions, microbatches, backward=False)

    def _with_reference(self, shards: list[Batch]) -> list[Batch]:
        """Attach the frozen model's outputs to each micro-batch, on the ranks of the last stage. Collective."""
        if self.known_reference is not None:
            known = self.known_reference
            return [replace(batch, reference=known(batch)) for batch in shards] if self._has_loss else shards
        if self.loss is None or self.compared is None:
            return shards
        model, within = (self, without_adapters(self.model)) if self.frozen is None else (self.frozen, nullcontext())
        with within:
            references = model.references(shards, self.loss)
        return [replace(batch, reference=x) for batch, x in zip(shards, references)] if references else shards

    def _total(self, report: Tensor) -> Tensor:
        """Return the report of the global batch: the sum of all ranks' reports. Does not wait for the device.

        All ranks of a model take part. No rank begins later work before all ranks have finished earlier work, and
        replayed graphs rely on that (`cuda_graphs`).
        """
        total = report.clone()
        if not self.parallel.tensor.is_first:
            total[:-1] = 0
        all_reduce(total, self.parallel.data_context.group)
        return all_reduce(total, self.parallel.model.group)

    def _with_room(self, batches: Sequence[Batch]) -> list[Batch]:
        """Give batches room for the largest number of documents seen so far, so that shapes rarely change.

        Documents are placed on context-parallel ranks.
        """
        self._room = max([self._room, *(batch.room for batch in batches)])
        if self._places_documents:
            batches = [batch.with_placement(self.parallel.context.size) for batch in batches]
        return [batch.with_room(self._room) for batch in batches]

    def _alike(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Give batches of documents equal shapes in all micro-batches and on all ranks, to record or replay a graph.

        If only some ranks had a graph for their shapes, the others would compute eagerly, and send other numbers of
        rows to experts. Collective, between hosts; the device does not wait.
        """
        if not self.config.data.reset_at_documents:
            return batches
        gathered = max((batch.gathered or 0 for batch in batches), default=0)
        largest = all_reduce(torch.tensor([self._room, gathered]), self.parallel.world.group, "max")
        self._room, gathered = largest.tolist()
        return [batch.with_room(self._room).with_gathered(gathered) for batch in batches]

    def train_step(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        before_update: Callable[[], None] = lambda: None,
        loss_limit: float | None = None,
    ) -> tuple[BatchLoss, StepResult]:
        """Run one optimizer step on this rank's micro-batches of the global batch. Collective.

        On return the update is queued on the device but not done. The next step is queued behind it, so the device does
        not idle.

        Args:
            step: Number of the step, counted from 0.
            batches: Micro-batches `[b, s]` of this data-parallel rank, in host memory.
            before_update: Called after the backward passes are queued, before weights and optimizer state change.
            loss_limit: Loss above which the step is skipped as if its gradients were not finite.

        Returns:
            Losses of the global batch, and the result of the update.
        """
        if self._needs_samples:
            assert all(batch.samples is not None for batch in batches), "dropout is a function of the sample indices"
        batches = self._with_room(batches)
        sampled = self.fp8.begin_step(step + 1)
        activity.enter("forward and backward")
        if self._replays(step):
            batches = self._alike(batches)
            passes = self._replay(batches, sampled, before_update)
        else:
            stopwatch = self._begin_eager(step)
            passes = self.run_passes(self._to_device(batches), stopwatch)
            if stopwatch is not None:
                self.timeline = stopwatch.timeline()
        return self._finish_step(
            step, batches, passes, sampled=sampled, before_update=before_update, loss_limit=loss_limit
        )

    def _finish_step(
        self,
        step: int,
        batches: Sequence[Batch],
        passes: Passes,
        *,
        sampled: bool,
        before_update: Callable[[], None],
        loss_limit: float | None,
    ) -> tuple[BatchLoss, StepResult]:
        """Update the weights from the gradients of `passes`, and return the results of `train_step`.

        `sampled` is True if the FP8 report samples this step.
        """
        total = self._total(passes.report)
        report = total.to("cpu", non_blocking=True)  # complete once the update has waited for the norm
        scale = self.nominal_tokens / total[1].clamp(min=1) if self._varies(batches) else None
        if self.graphs is not None and self.load_collector is not None:  # a NaN scale makes the update skip the step
            scale = torch.where(total[-1] > 0, torch.nan, 1.0 if scale is None else scale)
        if loss_limit is not None:
            spikes = total[0] > loss_limit * total[1].clamp(min=1)
            scale = torch.where(spikes, torch.nan, 1.0 if scale is None else scale)
        load = None if self.load_collector is None else self.load_collector.sum()
        load_on_host = None if load is None else load.to("cpu", non_blocking=True)
        index_loss = self._sum_of_index_losses().to("cpu", non_blocking=True) if self._has_index_loss else None
        largest = None if self.qk_clip is None else self.qk_clip.collect().to("cpu", non_blocking=True)
        before_update()
        activity.enter("update")
        interval = self.config.logging.layer_norms_interval
        measure = interval > 0 and (step + 1) % interval == 0
        scale = None if scale is None else scale.to(self.strategy.owned[0].dtype)
        result = self.update(self.learning_rate(step), grad_scale=scale, measure=measure)
        if self._exceeded(report):
            self.fp8.discard_step()
            return self.train_step(step, batches, before_update=before_update, loss_limit=loss_limit)
        self.strategy.end_step()
        self.fp8.end_step(passes.amaxes)
        self.index_loss = None if index_loss is None else index_loss.item()
        self.max_attention_logit = None if largest is None else largest.item()
        if load is not None and load_on_host is not None and self.load_collector is not None:
            self.expert_load = self.load_collector.load(load_on_host)
            if not result.skipped:
                self.load_collector.update_routers(load)
        self.fp8_records = self._gather_fp8_records(passes.statistics) if sampled else []
        return self._loss.mean(report.tolist()[:-1]), result

    def _varies(self, batches: Sequence[Batch]) -> bool:
        """Return whether the number of tokens in a global batch may differ from the nominal number."""
        return batches[0].loss_mask is not None

    def _plan_of(self, batches: Sequence[Batch]) -> PipelinePlan:
        """Return the plan of the pipeline for the number of micro-batches in `batches`."""
        if len(batches) not in self._plans:
            self._plans[len(batches)] = plan_pipeline(self.config, len(batches))
        return self._plans[len(batches)]

    def _is_traced(self, step: int) -> bool:
        return step + 1 == self.config.logging.pipeline_trace_step

    def _replays(self, step: int) -> bool:
        """Return whether a CUDA graph computes the passes of `step`."""
        return not (self.graphs is None or self.fp8.calibrating or self._is_traced(step))

    def _begin_eager(self, step: int) -> Stopwatch | None:
        """Free the graphs before an eager step, and return a stopwatch if the step is traced.

        The activations of a graph and the activations of an eager step may not fit into memory together.
        """
        if self.graphs is not None:
            self.graphs.drop()
        return Stopwatch(self.parallel.pipeline, self.parallel.device) if self._is_traced(step) else None

    def _replay(self, batches: Sequence[Batch], sampled: bool, before_capture: Callable[[], None]) -> Passes:
        """Replay the passes of a step from their CUDA graph, after capturing the graph if it does not exist yet."""
        assert self.graphs is not None
        self.strategy.invalidate()  # a graph gathers weights in every replay, so the capture must gather them too
        results: list[Passes] = []
        for passes in self.graphs.run_parts(
            "sampled step" if sampled else "step",
            self._parts(batches, self.run_passes),
            eager_runs=1 if sampled else EAGER_STEPS,
            before_capture=before_capture,
            capturing=self._fixed_rows,
        ):
            results.append(passes._replace(report=self._kept(passes.report, batches)))
        return results[0]._replace(report=_sum_of([passes.report for passes in results]))

    def _parts(self, batches: Sequence[Batch], work: Callable[..., T]) -> list[Part[T]]:
        """Return the parts of a step or evaluation, each of which has a graph."""
        return in_parts(batches, work) if self._is_divided(batches) else [Part("whole", work, batches)]

    def _kept(self, report: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Return the report of a part, and let the next part begin once all ranks have finished this one.

        The next replay may overwrite the report, and exchange buffers that other ranks still read (`_total`).
        """
        if not self._is_divided(batches):
            return report
        self._total(report)
        return report.clone()

    def _is_divided(self, batches: Sequence[Batch]) -> bool:
        """Return whether the passes of a step or evaluation are recorded in several graphs.

        Not divided are pipelines, FSDP, which sums the gradients of all micro-batches before it reduces them, and masks
        with auxiliary losses, which count the tokens of all micro-batches.
        """
        blocks = sum(len(stage.blocks) for stage in self.stages) * len(batches)
        alone = self.parallel.pipeline.size == len(self.stages) == 1 and not self.config.parallel.fsdp
        counts_tokens = self._has_auxiliary_loss and self._varies(batches)
        return alone and not counts_tokens and len(batches) >= 4 and blocks > cuda_graphs.MOST_BLOCKS

    def local_passes(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
        """Run the passes of `step`, counted from 0, but do not reduce the gradients and do not update the weights.

        FP8 scaling stays unchanged. FSDP is not supported, because it reduces gradients in the backward pass.

        Returns:
            This rank's report, and the flat gradients of its micro-batches, which stay in the buffer.
        """
        if self.graphs is not None:
            self.graphs.drop()  # activations of a graph and of an eager step may not fit together
        self.fp8.begin_step(step + 1)
        passes = self.run_passes(self._to_device(self._with_room(batches)), reduce=False)
        self.fp8.discard_step()
        return passes.report, self.strategy.gradients

    def _exceeded(self, report: Tensor) -> bool:
        """Return whether a replayed graph had no room for all rows of its experts; if so, make the next graphs larger.

        `report` is on the host.
        """
        if not report[-1]:
            return False
        assert self.graphs is not None
        logger.info(
            "CUDA graphs: experts had more rows than the graph has room for; the step is computed again with more room"
        )
        self.graphs.drop()
        self.row_bound.grow()
        return True

    def run_passes(
        self,
        batches: Sequence[Batch],
        stopwatch: Stopwatch | None = None,
        *,
        first: bool = True,
        last: bool = True,
        reduce: bool = True,
    ) -> Passes:
        """Zero the gradients, run all micro-batches, and reduce over data-parallel ranks. Collective.

        Args:
            batches: Micro-batches `[b, s]` of this data-parallel rank, on the device.
            stopwatch: Stopwatch that times every action of the pipeline, or None.
            first: Whether these are the first micro-batches of the step. Otherwise nothing is zeroed.
            last: Whether these are the last micro-batches of the step. Otherwise nothing is reduced.
            reduce: Whether to sum the gradients over data-parallel ranks.
        """
        shards = self._with_reference(self._own_tokens(batches))
        if first:
            self._begin_passes()
            self._set_auxiliary_loss_grad(batches)
            self.strategy.gather()
        if last and reduce and self.config.parallel.overlap_grad_reduce:
            self.strategy.start_overlap(len(batches))
        actions = self._plan_of(batches).train[self.parallel.pipeline.rank]
        reports = self.engine.run(actions, self.stage_functions, shards, backward=True, stopwatch=stopwatch)
        self.strategy.wait()
        if last:
            self.strategy.finish() if reduce else self.strategy.complete()
        recorder = self.fp8.recorder
        return Passes(self._sum(reports), {} if recorder is None else recorder.observed)

    def _begin_passes(self) -> None:
        """Zero the gradients and counters of the previous step."""
        self.strategy.clear()
        self.row_bound.surplus.zero_()
        if self.load_collector is not None:
            self.load_collector.zero()
        for index_loss in self._index_losses:
            index_loss.zero_()
        if self.qk_clip is not None:
            self.qk_clip.zero()

    def _set_auxiliary_loss_grad(self, batches: Sequence[Batch]) -> None:
        """Set the gradient of auxiliary losses so that the step's later gradient scaling cancels out.

        Auxiliary losses are means over all tokens. If masks leave out some tokens, the step multiplies all gradients by
        nominal / true tokens, so auxiliary losses get the inverse factor. In fp16 they also get the loss scale.
        `batches` are the whole micro-batches of this data-parallel rank. With masks, this is a collective over
        data-parallel ranks.
        """
        grad = self.auxiliary_loss_grad
        if not self._has_auxiliary_loss:
            return
        grad.fill_(1.0) if self.loss_scaler is None else grad.copy_(self.loss_scaler.scale)
        masks = [batch.loss_mask for batch in batches if batch.loss_mask is not None]
        if masks:
            counted = torch.stack([self._loss.count(batch) for batch in batches]).sum()
            grad *= all_reduce(counted, self.parallel.data.group).clamp(min=1) / self.nominal_tokens
            grad *= self.num_microbatches / len(batches)  # sampled texts may fill fewer micro-batches

    def _to_device(self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.to(self.parallel.device) for batch in batches]

    def own_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """Copy micro-batches to the device and return the tokens of this context-parallel rank."""
        return self._own_tokens(self._to_device(self._with_room(batches)))

    def _own_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the tokens of this context-parallel rank, with the labels of all multi-token prediction depths."""
        context, cuts = self.parallel.context, self._cuts_documents
        later = (batch.with_later_labels(self._label_depths) for batch in batches)
        return [batch.shard(context.rank, context.size, cuts_documents=cuts) for batch in later]

    def _sum(self, reports: Sequence[Tensor]) -> Tensor:
        """Return the sum of this rank's reports, float64, and the number of expert rows that had no room.

        All losses are zero if no stage of this rank computes the loss.
        """
        total = torch.zeros(self._loss.report_size + 1, dtype=torch.float64, device=self.parallel.device)
        if self._has_loss and reports:
            torch.sum(torch.stack(list(reports)), dim=0, out=total[:-1])
        total[-1] = self.row_bound.surplus.sum()
        return total

    def _gather_fp8_records(self, statistics: Statistics) -> list[Fp8Record]:
        """Return the FP8 records of this step: records of all stages on rank 0, an empty list on other ranks."""
        assert self.fp8.recorder is not None
        self.fp8.recorder.observed = statistics  # a replayed graph has its own statistics
        own_records, parallel = self.fp8.recorder.end_step(), self.parallel
        if not (parallel.tensor.is_first and parallel.data_context.is_first):
            return []
        stages = all_gather_objects(own_records, parallel.pipeline.group)
        return [record for stage in stages for record in stage] if parallel.pipeline.is_first else []

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> BatchLoss:
        """Return the loss of a global batch, computed without dropout. FP8 statistics stay unchanged. Collective."""
        batches = [replace(batch, samples=None) for batch in batches]
        if self.graphs is None or self.fp8.calibrating:
            report = self._forward_only(self._to_device(batches))
        else:
            self.strategy.wait()  # a graph cannot wait for a gather that began outside it
            self.fp8.forget_weights()  # a graph makes its own FP8 copies and leaves them in its memory
            batches = self._alike(self._with_room(batches))
            reports = self.graphs.run_parts(
                "evaluation", self._parts(batches, self._forward_only), capturing=self._fixed_rows
            )
            report = _sum_of([self._kept(report, batches) for report in reports])
            self.fp8.forget_weights()
        total = self._total(report).cpu()
        return self.evaluate(batches) if self._exceeded(total) else self._loss.mean(total.tolist()[:-1])

    def _forward_only(self, batches: Sequence[Batch], *, first: bool = True, last: bool = True) -> Tensor:
        """Run all micro-batches `[b, s]`, which are on the device, forward only, and return this rank's report.

        `first` and `last` say whether they begin or end an evaluation.
        """
        if first:
            self.row_bound.surplus.zero_()
            self.strategy.gather()
        actions = self._plan_of(batches).evaluate[self.parallel.pipeline.rank]
        shards = self._with_reference(self._own_tokens(batches))
        with self.fp8.recording(False):
            return self._sum(self.engine.run(actions, self.stage_functions, shards, backward=False))
