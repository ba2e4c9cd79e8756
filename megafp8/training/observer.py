"""Interface of observers of the training loop, and the metrics of a step that observers produce and receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from megafp8.batch import Batch
from megafp8.fp8.health import Fp8Record


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step. Metrics that do not apply to the run or the step are None or empty.

    Attributes:
        step: Number of the step, counted from 1.
        loss: Training loss in nats per token of the data, without regularizers; or the mean of the objective's own
            loss.
        grad_norm: Norm of the gradient before clipping.
        learning_rate: Learning rate of the step.
        tokens: Number of tokens since the beginning of the run.
        tokens_per_second_per_gpu: Tokens per second per GPU (per process on CPU).
        tflops_per_gpu: Model TFLOP/s per GPU (per process on CPU).
        loss_tokens_per_second_per_gpu: Tokens in the loss per second per GPU; None if all tokens are, or if the
            objective counts other items.
        mfu: Model FLOPs utilization; None if the peak of the device is unknown.
        memory_gib: Peak memory of this rank in GiB.
        step_seconds: Duration of the step, including `data_seconds`, without `evaluation_seconds` and `save_seconds`.
        skipped: Whether the step made no update.
        time: End of the step, UTC, ISO 8601.
        consumed_samples: Position in the data: number of samples since the beginning of the run.
        data_seconds: Time spent waiting for data.
        evaluation_seconds: Duration of evaluations after the step.
        save_seconds: Time for which checkpoints stalled training since the previous record.
        skipped_in_a_row: Number of consecutive skipped steps that end with this step.
        loss_scale: Loss scale of the step in fp16.
        validation_loss: Loss of the documents for validation, in the units of `loss`.
        mtp_loss: Mean loss of multi-token prediction, unweighted.
        binary_loss: Mean loss of BERT's binary head.
        z_loss: z-loss of the output layer, scaled as in the gradient (`training.z_loss`).
        index_loss: Sum of the layers' indexer losses, scaled as in the gradient (`model.sparse_attention`).
        max_attention_logit: Largest attention logit of all heads before the update, with `optimizer.qk_clip`.
        router_aux_loss: Auxiliary loss of the routers (`megafp8.training.expert_load.ExpertLoad`).
        router_z_loss: z-loss of the routers.
        expert_imbalance: Tokens of the fullest expert over the mean of its layer, in the worst layer.
        router_entropy: Entropy of the routers' mean scores; 1 is even.
        expert_drop_rate: Share of choices dropped because an expert was full.
        loss_limit: Limit above which a loss counts as a spike, if spikes are detected.
        slowest_rank: Slowest rank since the previous comparison (`resilience.stragglers`).
        slowest_ratio: Step time of the slowest rank divided by the median.
        replicas: Indices of the replicas that trained the step, with `resilience.replicas`.
        objective: Metrics of the objective's own loss by name (`megafp8.objectives.ObjectiveLoss`).
        evaluations: Further results of evaluations after the step, by name: losses of `data.validation`
            (`valid/<name>`) and metrics of tasks (`eval/<task>/<metric>`).
        layer_norms: Norms of a measured step by name (`megafp8.optimizer.layer_norms`).
        section_seconds: Time since the previous record by section of the training loop, as far as known
            (`megafp8.training.section_times`). `as_dict` names it `seconds/<section>`.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    memory_gib: float
    step_seconds: float
    skipped: bool
    time: str
    consumed_samples: int
    data_seconds: float
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    skipped_in_a_row: int = 0
    loss_tokens_per_second_per_gpu: float | None = None
    loss_scale: float | None = None
    validation_loss: float | None = None
    mtp_loss: float | None = None
    binary_loss: float | None = None
    z_loss: float | None = None
    index_loss: float | None = None
    max_attention_logit: float | None = None
    router_aux_loss: float | None = None
    router_z_loss: float | None = None
    expert_imbalance: float | None = None
    router_entropy: float | None = None
    expert_drop_rate: float | None = None
    loss_limit: float | None = None
    slowest_rank: int | None = None
    slowest_ratio: float | None = None
    replicas: list[int] | None = None
    objective: Mapping[str, float] = field(default_factory=dict)
    evaluations: Mapping[str, float] = field(default_factory=dict)
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    section_seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all metrics by name, including the entries of mappings."""
        values = asdict(self)
        named = ("objective", "evaluations", "layer_norms")
        objective, evaluations, norms = (values.pop(key) for key in named)
        sections = values.pop("section_seconds")
        return (
            values
            | objective
            | evaluations
            | norms
            | {f"seconds/{key.replace(' ', '_')}": x for key, x in sections.items()}
        )

    @property
    def is_spike(self) -> bool:
        """Whether the step was skipped because its loss is above the limit."""
        return self.skipped and self.loss_limit is not None and self.loss > self.loss_limit

    @property
    def why_skipped(self) -> str:
        """Reason why the step was skipped, for the log."""
        return f"loss above {self.loss_limit:.4f}" if self.is_spike else "gradients not finite"

    @property
    def evaluated(self) -> bool:
        """Whether an evaluation followed the step."""
        return self.validation_loss is not None or bool(self.evaluations)


class Observer(AbstractContextManager["Observer"]):
    """Base class of observers, which the training loop calls at fixed points of each step.

    An observer is a context manager that the loop enters before its first step. The loop calls all observers in the
    order of `megafp8.training.observers`, on all ranks, so methods may run collectives. Any method may raise
    TrainingError, on all ranks, to end the job. Steps are counted from 1. By default every method does nothing.
    """

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release resources after the loop has ended."""

    def before_step(self, step: int) -> None:
        """Prepare for `step`, before its data are read."""

    def before_passes(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches to train on in `step`. `batches` are this rank's micro-batches as read."""
        return batches

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return fields for the `StepMetrics` of `step`, after its update is queued or was `skipped`."""
        return {}

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Write the metrics of a finished step, and its FP8 health `records` if the step was sampled."""

    def check_state(self, step: int) -> None:
        """Check the state after `step`, before it is saved or because it may be wrong."""
