"""The trainer of a rank: model, gradients, optimizer and pipeline, built once from the config, and the training step.

The differentiated loss is the sum over a micro-batch's tokens divided by the *nominal* number of tokens in the global
batch; in fp16, times the loss scale. Gradients summed over micro-batches, data-parallel and context-parallel ranks are
then those of the mean over the whole batch, in any layout. If masks leave fewer tokens, the true number is known only
after all ranks have counted, and the gradients are multiplied by nominal / true once, before clipping. So they are with
outer steps: a replica trains by itself on its share of the batch, and its losses and tokens are those of the share.

An objective may have a loss of its own (`megafp8.objectives.ObjectiveLoss`), such as that of pairs of answers. Then its
number takes the place of that of tokens: gradients are those of the mean over the pairs of the whole batch. If it
compares the model with a frozen one, that one's forward passes over all micro-batches come before those of the model,
through the pipeline as in an evaluation; what the last stage makes of them is then `Batch.reference`.

The losses of multi-token prediction are divided by the same number (DeepSeek-V3, equation 24), though the last tokens
of a sample have none. So is that of BERT's binary head, which counts as often as its sample has tokens to predict.

A reported loss is nats per token of the data. Each regularizer is a metric of its own, as it enters the gradient: the
z-loss of the output layer, the losses of routers, the losses of indexers.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.distributed import activity
from megafp8.distributed.collectives import all_gather_objects, all_reduce
from megafp8.dtypes import DTYPES
from megafp8.expert_parallel.own_rows import RowBound
from megafp8.fp8.health import Record, Statistics
from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.models.build import build_stage
from megafp8.models.context import BuildContext, lora_of, tokens_per_rank, weight_storage
from megafp8.models.gpt import GPTStage
from megafp8.models.recompute import block_memory
from megafp8.objectives import ObjectiveLoss
from megafp8.objectives.registry import loss_of
from megafp8.optimizer.layer_norms import layers_of_model
from megafp8.optimizer.loss_scale import LossScaler
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.outer import OuterOptimizer
from megafp8.optimizer.step import OptimizerStep, StepResult
from megafp8.parallel_state import ParallelState
from megafp8.pipeline_parallel.engine import PipelineEngine, StageFunction, StageOutput
from megafp8.pipeline_parallel.simulate import Timeline
from megafp8.pipeline_parallel.trace import Stopwatch
from megafp8.tensor_parallel.cross_entropy import LabelLosses
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.tensor_parallel.lora import without_adapters
from megafp8.training.auto_filter import Choice, choose
from megafp8.training.cuda_graphs import EAGER_STEPS, Graphs, why_not
from megafp8.training.data_parallel import build_data_parallel, experts_are_whole
from megafp8.training.expert_load import ExpertLoad, LoadCollector
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import frozen_config
from megafp8.training.learning_rate import schedule_of
from megafp8.training.overlap import build_expert_overlap, build_tp_overlap
from megafp8.training.pipeline import PipelinePlan, plan_pipeline
from megafp8.training.qk_clip import QkClip

logger = logging.getLogger(__name__)


Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Sums the first tensors and maximizes the others over all replicas of the model, in place. Raises where one is lost;
then their values are undefined."""


class _Passes(NamedTuple):
    """Results of a step's forward and backward passes other than gradients.

    Attributes:
        report: float64 sums of this rank: `[sum of losses, tokens]`, the same pair for each further loss of the model,
            the z-loss, and the number of layers without room for all rows of experts. An objective with a loss of its
            own has its metrics in place of further losses and z-loss.
        statistics: Records of the FP8 report.
    """

    report: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class Loss:
    """Losses of a global batch.

    Attributes:
        mean: Mean cross-entropy of the unmasked tokens in nats; or the mean of an objective's own loss
            (`megafp8.objectives.ObjectiveLoss`).
        tokens: Number of unmasked tokens, or of what the objective's loss counts.
        more: Mean of the model's other losses (`ModelConfig.more_losses`): the loss of multi-token prediction over the
            tokens that have one to predict, averaged over depths, or the loss of the binary head.
        z_loss: z-loss of the output layer per token as it enters the gradient; None without `training.z_loss`.
        metrics: Means of the metrics of an objective's own loss, by name.
    """

    mean: float
    tokens: int
    more: float | None = None
    z_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """One rank's stages of the model, with optimizer and pipeline engine. Collective: build it on every rank.

    `choice`: earlier choice of fp8.auto_filter in this run; None lets it choose now. `exchange`: with which other
    replicas combine the gradients of a step, of which this one then has a share (`megafp8.replicas`). `frozen`: no
    weight is trained, and the model is only for `references`.

    Attributes: `loss`: of the objective, None for cross entropy. `frozen`: the model that the loss compares with, which
    has the initial values of its config until `megafp8.training.frozen` loads others; None where there is none, or it
    is this one without its adapters. `known_reference`: what that says of a micro-batch, where it is read. `stages`:
    one for each chunk of the pipeline placement; `model`: all of them. `strategy`: of data parallelism, which has their
    parameters and gradients. `outer`: of outer steps, if there are any. `expert_load`, `index_loss`,
    `max_attention_logit`: of the latest `train_step`. `timeline`: of the step `logging.pipeline_trace_step`, once it is
    done. `fp8_records`: FP8 health of all stages in the latest `train_step`, on rank 0, if that step was sampled; else
    empty.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelState,
        choice: Choice | None = None,
        exchange: Exchange | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.config, self.parallel, self._exchange = config, parallel, exchange
        self.loss = None if frozen else loss_of(config, parallel)
        p, t = config.parallel, config.training
        self.schedule = schedule_of(config.optimizer, t.steps)
        dtype = DTYPES[t.precision]
        self.fp8 = build_fp8(config, parallel)
        self.auto_filter = choose(config, self.fp8, parallel, dtype) if choice is None else choice
        self.fp8.leave_out(self.auto_filter.layers)
        self.fp8_records: list[Record] = []
        self.row_bound = RowBound(parallel.device)
        self.loss_scaler = LossScaler(parallel.device, **t.loss_scale.model_dump()) if t.precision == "fp16" else None
        self.auxiliary_loss_grad = torch.ones((), device=parallel.device)
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
            expert=parallel.expert.group,
            expert_tensor=parallel.expert_tensor.group,
            expert_amax=parallel.expert_amax.group,
            expert_rows=parallel.expert_rows.group,
            whole_experts=experts_are_whole(config, parallel),
            gathers_tokens=config.gathers_tokens,
            expert_overlap=build_expert_overlap(config, parallel, os.environ),
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
        self.load_collector = self._load_collector()
        self.expert_load: ExpertLoad | None = None
        self._index_losses = [x for stage in self.stages for x in stage.index_losses.values()]
        self.index_loss: float | None = None
        mixers = [mixer for stage in self.stages for mixer in stage.recording_mixers]
        threshold = config.optimizer.qk_clip
        self.qk_clip = None if threshold is None else QkClip(mixers, threshold, parallel)
        self.max_attention_logit: float | None = None
        wgrads = WgradStore()
        self.strategy = build_data_parallel(config, parallel, self.model, wgrads, os.environ)
        self.update = self._build_update()
        self.optimizer = self.update.optimizer
        self.strategy.begin(self.optimizer.master_of)
        self.outer: OuterOptimizer | None = None
        if (o := config.outer) is not None:
            self.outer = OuterOptimizer(self.optimizer, self.strategy.owned, o.learning_rate, o.momentum)
        b = t.micro_batch_size
        rows = self.stages[0].stream_rows(t.seq_length // p.context, b, config.decoder_length or 0)
        self.engine = PipelineEngine(
            parallel.pipeline,
            parallel.pipeline_backward,
            self.plan.placement,
            (rows, b, config.model.stream_width),
            dtype,
            parallel.device,
            wgrads,
        )
        self.nominal_tokens = t.global_batch_size * t.seq_length
        self.timeline: Timeline | None = None
        self._room = 0  # documents of a sample
        self.why_no_graphs = why_not(config, parallel.device.type)
        self.graphs: Graphs | None = None
        if not self.why_no_graphs:
            self.graphs = Graphs(parallel.device)
        for module in self.model.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not module.weight.requires_grad:
                # Each graph has FP8 copies of its own in its memory.
                module.state.freeze_weight(keep_copies=self.graphs is None)
        other = None if self.loss is None else frozen_config(config)
        self.frozen = None if other is None else Trainer(other, parallel, frozen=True)
        self.known_reference: Callable[[Batch], Tensor] | None = None

    def _build_update(self) -> OptimizerStep:
        """The optimizer step, with clipping and reductions."""
        parallel, o, strategy = self.parallel, self.config.optimizer, self.strategy
        measures_layers = self.config.logging.layer_norms_interval > 0
        return OptimizerStep(
            buffer=strategy,
            optimizer=MixedPrecisionOptimizer(
                strategy.shards,
                o,
                device=parallel.device,
                seed=self.config.seed,
                width=self.config.model.width_multiplier,
                released=strategy.released,
                masters=strategy.masters,
                matrix_group=parallel.amax.group,  # all ranks that have parts of this rank's stages
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
        """Free CUDA graphs, which must not outlive the process groups whose communication they hold."""
        if self.graphs is not None:
            self.graphs.drop()

    def _build(self, stage: int, context: BuildContext) -> GPTStage:
        layers = self.plan.layers[stage]
        return build_stage(
            self.config.model,
            context,
            layers=layers,
            positions=self.config.position_rows,
            memory=block_memory(self.config.parallel, len(layers)),
            z_loss=self.config.training.z_loss,
        )

    def _load_collector(self) -> LoadCollector | None:
        model = self.config.model
        if model.moe is None:
            return None
        routers = {layer: router for stage in self.stages for layer, router in stage.routers.items()}
        layers = [i for i in model.layers if model.moe_of(i) is not None]
        return LoadCollector(routers, layers, model.moe.num_experts, self.parallel)

    def _sum_of_index_losses(self) -> Tensor:
        """Of all layers and tokens of a step, float64 `[1]`. Collective."""
        total = torch.zeros(1, dtype=torch.float64, device=self.parallel.device)
        for index_loss in self._index_losses:
            total += index_loss
        all_reduce(total, self.parallel.amax.group)  # data × context × tensor: all tokens of a layer
        return all_reduce(total, self.parallel.pipeline.group)

    @property
    def _has_loss(self) -> bool:
        return self.parallel.pipeline.rank == self.plan.last_rank

    @property
    def compared(self) -> Config | None:
        """The config of the model that each step compares this one with; None without one."""
        if self.loss is None or not self.config.data.compares:
            return None
        return self.config if self.frozen is None else self.frozen.config

    @property
    def constants(self) -> dict[str, Tensor]:
        """By global name, this rank's tensors that belong to the weights but have no gradient."""
        return {name: values for stage in self.stages for name, values in stage.constants.items()}

    @property
    def router_shares(self) -> dict[str, Tensor]:
        """By global name, what routers remember of the step before (`Router.shares`)."""
        return {name: values for stage in self.stages for name, values in stage.router_shares.items()}

    @property
    def loss_scale(self) -> dict[str, Tensor]:
        """By name, the state of the loss scale, if there is one; the same on all ranks."""
        return {} if self.loss_scaler is None else self.loss_scaler.state_dict()

    def learning_rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        return self.schedule.at(step)

    def _forward(self, stage: GPTStage, x: Tensor | None, microbatch: Batch) -> StageOutput:
        """Run a micro-batch through a stage; on the last stage the report is `[sum of losses, tokens, ...]`."""
        if self.loss is not None:
            y = self._objective_output(stage, x, microbatch, self.loss)
            if stage.head is None:
                return StageOutput(y)
            loss, report = self.loss(y, microbatch)
        else:
            output: Tensor | LabelLosses = stage(x, microbatch)
            if not isinstance(output, LabelLosses):
                return StageOutput(output)
            loss, report = self._label_loss(output, microbatch)
        if self.loss_scaler is not None:
            loss = loss * self.loss_scaler.scale
        return StageOutput(loss / self.nominal_tokens, report)

    def _label_loss(self, losses: LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch to be differentiated, and its report, float64.

        The report has the sum and the number of the losses of tokens, then of each further loss, and last the z-loss.
        """
        mask_sb, b = torch.ones_like(losses.cross_entropy), len(microbatch.tokens)
        if microbatch.loss_mask is not None:
            mask_sb = microbatch.loss_mask.transpose(0, 1)
        masked_losses = (losses.cross_entropy * mask_sb, losses.z_loss * mask_sb)
        entropies, z_losses, counts = ([part.sum() for part in x.split(b, dim=1)] for x in (*masked_losses, mask_sb))
        loss, z_loss = self._weighted(entropies), self._weighted(z_losses)
        sums = [*(x for pair in zip(entropies, counts) for x in pair), z_loss]
        return loss, torch.stack([x.detach().double() for x in sums])

    def _weighted(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the model's own loss plus the weighted mean of its further losses."""
        loss, *later = losses
        return loss + self.config.model.more_losses_factor * torch.stack(later).mean() if later else loss

    @staticmethod
    def _objective_output(stage: GPTStage, x: Tensor | None, microbatch: Batch, loss: ObjectiveLoss) -> Tensor:
        """Return a stage's output as an objective's own loss reads it from the last stage."""
        y: Tensor | LabelLosses = stage(x, microbatch, logits=loss.reads_logits)
        return y.cross_entropy if isinstance(y, LabelLosses) else y

    def references(self, batches: Sequence[Batch], loss: ObjectiveLoss) -> list[Tensor]:
        """What `loss` makes of the last stage's output for each micro-batch, on its ranks; [] on others.

        `batches`: on the device, this context-parallel rank's tokens. Without gradients or dropout. Collective.
        """
        self.strategy.gather()
        actions = self._plan_of(batches).evaluate[self.parallel.pipeline.rank]

        def forward(stage: GPTStage, x: Tensor | None, microbatch: Batch) -> StageOutput:
            y = self._objective_output(stage, x, microbatch, loss)
            return StageOutput(y, None if stage.head is None else loss.of_reference(y, microbatch))

        microbatches = [replace(batch, samples=None) for batch in batches]
        with self.fp8.recording(False):
            functions = [partial(forward, stage) for stage in self.stages]
            return self.engine.run(actions, functions, microbatches, backward=False)

    def _with_reference(self, shards: list[Batch]) -> list[Batch]:
        """With what the frozen model says of each micro-batch, on the ranks of the last stage. Collective."""
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
        """The sum of all ranks' reports: `[sum of losses, tokens, ...]` of the global batch. Does not wait.

        All ranks of a model take part: on none of them does later work begin before all have finished earlier work,
        which replayed graphs rely on (`cuda_graphs`).
        """
        total = report.clone()
        if not self.parallel.tensor.is_first:
            total[:-1] = 0
        all_reduce(total, self.parallel.data_context.group)
        return all_reduce(total, self.parallel.model.group)

    def _with_room(self, batches: Sequence[Batch]) -> list[Batch]:
        """With room for as many documents as any batch so far has had, so that shapes hardly ever change."""
        self._room = max([self._room, *(batch.room for batch in batches)])
        return [batch.with_room(self._room) for batch in batches]

    def train_step(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        before_update: Callable[[], None] = lambda: None,
        loss_limit: float | None = None,
    ) -> tuple[Loss, StepResult]:
        """One optimizer step, counted from 0, on this rank's micro-batches of the global batch.

        With replicas these are a share of it, none while this one gets its state from a peer (`Membership.begin`).
        `before_update` is called after the backward passes are queued, and before weights and optimizer state change.
        If the loss is above `loss_limit`, the step is skipped as if its gradients were not finite.
        On return the update is queued, not done: the next step is queued behind it, so that the device does not idle.
        """
        model = self.config.model
        if model.hidden_dropout or model.attention_dropout:
            assert all(batch.samples is not None for batch in batches), "dropout is a function of samples' indices"
        batches = self._with_room(batches)
        sampled = self.fp8.begin_step(step + 1)
        activity.enter("forward and backward")
        passes = self._run_passes(step, batches, sampled, before_update) if batches else self._no_passes()
        amaxes = [] if self._exchange is None else self._combine(self._exchange, passes)
        total = self._total(passes.report)
        report = total.to("cpu", non_blocking=True)  # complete once the update has waited for the norm
        # Replicas may train on fewer samples than the batch has, and one without samples must scale as the others do.
        varies = self.outer is not None or self._exchange is not None or batches[0].loss_mask is not None
        scale = self.nominal_tokens / total[1].clamp(min=1) if varies else None
        if self.graphs is not None and self.load_collector is not None:  # what is not finite is skipped
            scale = torch.where(total[-1] > 0, torch.nan, 1.0 if scale is None else scale)
        if loss_limit is not None:
            spikes = total[0] > loss_limit * total[1].clamp(min=1)
            scale = torch.where(spikes, torch.nan, 1.0 if scale is None else scale)
        load = None if self.load_collector is None else self.load_collector.sum()
        load_on_host = None if load is None else load.to("cpu", non_blocking=True)
        index_loss = self._sum_of_index_losses().to("cpu", non_blocking=True) if model.has_indexers else None
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
        self.fp8.end_step(amaxes)
        self.index_loss = None if index_loss is None else index_loss.item()
        self.max_attention_logit = None if largest is None else largest.item()
        if load is not None and load_on_host is not None and self.load_collector is not None:
            self.expert_load = self.load_collector.load(load_on_host)
            if not result.skipped:
                self.load_collector.update_routers(load)
        self.fp8_records = self._gather_fp8_records(passes.statistics) if sampled and batches else []
        return self._loss(report), result

    def _no_passes(self) -> _Passes:
        """What is left of passes without a micro-batch: gradients that are zero, and no losses. Collective."""
        self._begin_passes()
        self.strategy.complete()
        self.strategy.finish()
        return _Passes(self._sum([]), {})

    def _combine(self, exchange: Exchange, passes: _Passes) -> list[Tensor]:
        """Combine what the passes of all replicas have left; returns the amaxes of FP8 scaling.

        Nothing else has been changed when this raises; then the step may be begun again.
        """
        amaxes = self.fp8.newest_amaxes()
        counts = [passes.report, *self._index_losses]
        if self.load_collector is not None:
            counts += self.load_collector.own_sums
        maxima = amaxes if self.qk_clip is None else [*amaxes, *self.qk_clip.recorded]
        packed_counts, packed_maxima = (torch.cat([x.view(-1) for x in xs]) if xs else None for xs in (counts, maxima))
        try:
            exchange(
                [*self.strategy.owned, *([] if packed_counts is None else [packed_counts])],
                [] if packed_maxima is None else [packed_maxima],
            )
        except Exception:
            self.fp8.discard_step()
            raise
        for xs, packed in ((counts, packed_counts), (maxima, packed_maxima)):
            if packed is not None:
                for x, values in zip(xs, packed.split([x.numel() for x in xs])):
                    x.copy_(values.view(x.shape))
        return amaxes

    def _plan_of(self, batches: Sequence[Batch]) -> PipelinePlan:
        """The plan of a pipeline with so many micro-batches."""
        if len(batches) not in self._plans:
            self._plans[len(batches)] = plan_pipeline(self.config, len(batches))
        return self._plans[len(batches)]

    def _run_passes(
        self, step: int, batches: Sequence[Batch], sampled: bool, before_capture: Callable[[], None]
    ) -> _Passes:
        """Forward and backward passes of a step, replayed from a CUDA graph where there is one."""
        traced = step + 1 == self.config.logging.pipeline_trace_step
        if self.graphs is None or self.fp8.calibrating or traced:
            if self.graphs is not None:
                self.graphs.drop()  # two steps' activations may not fit
            stopwatch = Stopwatch(self.parallel.pipeline, self.parallel.device) if traced else None
            passes = self._forward_and_backward(self._to_device(batches), stopwatch)
            if stopwatch is not None:
                self.timeline = stopwatch.timeline()
            return passes
        self.strategy.invalidate()  # a graph gathers in every replay, so it must when it is captured
        return self.graphs.run(
            "sampled step" if sampled else "step",
            self._forward_and_backward,
            batches,
            eager_runs=1 if sampled else EAGER_STEPS,
            before_capture=before_capture,
            capturing=self.row_bound.fixed,
        )

    def local_passes(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
        """Passes of `step`, counted from 0, whose gradients are not summed over data parallelism, and no update.

        Returns this rank's report and the flat gradients of its micro-batches, which stay in the buffer. Leaves
        FP8 scaling as it was. Not with FSDP, which sums them in the backward pass.
        """
        if self.graphs is not None:
            self.graphs.drop()  # two steps' activations may not fit
        self.fp8.begin_step(step + 1)
        passes = self._forward_and_backward(self._to_device(self._with_room(batches)), reduce=False)
        self.fp8.discard_step()
        return passes.report, self.strategy.gradients

    def _exceeded(self, report: Tensor) -> bool:
        """Whether a replayed graph had no room for all rows of experts; drops all graphs then. `report`: on host."""
        if not report[-1]:
            return False
        assert self.graphs is not None
        logger.info("CUDA graphs: experts had more rows than there was room for; computed again, with room for more")
        self.graphs.restart()
        return True

    def _forward_and_backward(
        self, batches: Sequence[Batch], stopwatch: Stopwatch | None = None, *, reduce: bool = True
    ) -> _Passes:
        """From no gradients to their sums over data parallelism; batches `[b, s]` are on the device.

        `reduce=False` leaves out the sums over data parallelism.
        """
        shards = self._with_reference(self._own_tokens(batches))
        self._begin_passes()
        self._set_auxiliary_loss_grad(batches)
        self.strategy.gather()
        if reduce and self.config.parallel.overlap_grad_reduce:
            self.strategy.start_overlap(len(batches))
        actions = self._plan_of(batches).train[self.parallel.pipeline.rank]
        reports = self.engine.run(actions, self._stage_functions(), shards, backward=True, stopwatch=stopwatch)
        self.strategy.wait()
        if reduce:
            self.strategy.finish()
        else:
            self.strategy.complete()
        recorder = self.fp8.recorder
        return _Passes(self._sum(reports), {} if recorder is None else recorder.observed)

    def _begin_passes(self) -> None:
        """Forget the gradients and counts of the step before."""
        self.strategy.clear()
        self.row_bound.exceeded.zero_()
        if self.load_collector is not None:
            self.load_collector.zero()
        for index_loss in self._index_losses:
            index_loss.zero_()
        if self.qk_clip is not None:
            self.qk_clip.zero()

    def _set_auxiliary_loss_grad(self, batches: Sequence[Batch]) -> None:
        """Undo in the gradients of auxiliary losses what all gradients are multiplied by, and apply the loss scale.

        These losses are means over all tokens, but where masks leave out some, the step multiplies its gradients by
        nominal / true tokens. `batches`: this data-parallel rank's, whole. Collective over data parallelism with masks.
        """
        grad = self.auxiliary_loss_grad
        if not self.config.model.has_auxiliary_loss:
            return
        grad.fill_(1.0) if self.loss_scaler is None else grad.copy_(self.loss_scaler.scale)
        masks = [batch.loss_mask for batch in batches if batch.loss_mask is not None]
        if masks:
            if self.config.resilience.replicas is not None:
                raise ValueError(
                    "resilience.replicas: auxiliary losses of experts are divided by the number of tokens that count "
                    "in the global batch, which no replica knows before the backward pass where masks leave out some; "
                    "set model.moe.aux_loss=0 and balance by moe.bias_update_rate, or train on all tokens"
                )
            count = (lambda batch: batch.loss_mask.sum(dtype=torch.float64)) if self.loss is None else self.loss.count
            counted = torch.stack([count(batch) for batch in batches]).sum()
            grad *= all_reduce(counted, self.parallel.data.group).clamp(min=1) / self.nominal_tokens
            grad *= self.num_microbatches / len(batches)  # sampled texts may fill fewer

    def _to_device(self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.to(self.parallel.device) for batch in batches]

    def own_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """The tokens of this context-parallel rank of micro-batches, on the device."""
        return self._own_tokens(self._to_device(self._with_room(batches)))

    def _own_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """The tokens of this context-parallel rank, with the labels of all depths."""
        context, depths = self.parallel.context, self.config.model.mtp_num_layers
        cut = self.config.model.cuts_documents
        later = (batch.with_later_labels(depths) for batch in batches)
        return [batch.shard(context.rank, context.size, cuts_documents=cut) for batch in later]

    def _sum(self, reports: Sequence[Tensor]) -> Tensor:
        """Return the report of this rank's micro-batches, float64; zeros for all losses if no stage has a loss."""
        further = 2 * self.config.model.more_losses + 1 if self.loss is None else len(self.loss.metrics)
        total = torch.zeros(2 + further + 1, dtype=torch.float64, device=self.parallel.device)
        if self._has_loss and reports:
            torch.sum(torch.stack(list(reports)), dim=0, out=total[:-1])
        total[-1] = self.row_bound.exceeded
        return total

    def _stage_functions(self) -> list[StageFunction]:
        return [partial(self._forward, stage) for stage in self.stages]

    def _gather_fp8_records(self, statistics: Statistics) -> list[Record]:
        """The records of this step: those of all stages on rank 0, none elsewhere."""
        assert self.fp8.recorder is not None
        self.fp8.recorder.observed = statistics  # of the graph that was replayed, else its own
        own_records, parallel = self.fp8.recorder.end_step(), self.parallel
        if not (parallel.tensor.is_first and parallel.data_context.is_first):
            return []
        stages = all_gather_objects(own_records, parallel.pipeline.group)
        return [record for stage in stages for record in stage] if parallel.is_first_stage else []

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Loss:
        """Loss of a global batch without training or dropout; does not update FP8 statistics."""
        batches = [replace(batch, samples=None) for batch in batches]
        if self.graphs is None or self.fp8.calibrating:
            report = self._forward_only(self._to_device(batches))
        else:
            self.strategy.wait()  # a graph cannot wait for a gather that began outside it
            self.fp8.forget_weights()  # a graph makes FP8 copies of its own, and leaves them in its memory
            report = self.graphs.run(
                "evaluation", self._forward_only, self._with_room(batches), capturing=self.row_bound.fixed
            )
            self.fp8.forget_weights()
        total = self._total(report).cpu()
        return self.evaluate(batches) if self._exceeded(total) else self._loss(total)

    def _forward_only(self, batches: Sequence[Batch]) -> Tensor:
        """The report of forward passes; batches `[b, s]` are on the device."""
        self.row_bound.exceeded.zero_()
        self.strategy.gather()
        actions = self._plan_of(batches).evaluate[self.parallel.pipeline.rank]
        shards = self._with_reference(self._own_tokens(batches))
        with self.fp8.recording(False):
            return self._sum(self.engine.run(actions, self._stage_functions(), shards, backward=False))

    def _loss(self, total: Tensor) -> Loss:
        loss, tokens, *further, _ = total.tolist()
        count = max(tokens, 1.0)
        if self.loss is not None:
            metrics = {name: x / count for name, x in zip(self.loss.metrics, further, strict=True)}
            return Loss(loss / count, int(tokens), metrics=metrics)
        *later, z_loss = further
        means = [loss_sum / max(number, 1.0) for loss_sum, number in zip(later[::2], later[1::2])]
        return Loss(
            loss / count,
            int(tokens),
            more=sum(means) / len(means) if means else None,
            z_loss=z_loss / count if self.config.training.z_loss else None,
        )
