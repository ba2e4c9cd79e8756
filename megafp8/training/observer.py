"""The interface of what watches the training loop, and the record of a step that it makes and receives."""

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
    """Metrics of one optimizer step. Rates are per GPU (per process on CPU); `mfu` is None if the peak is unknown.

    `time`: end of the step, UTC, ISO 8601. `tokens`, `consumed_samples`: since the beginning of the run.
    `step_seconds`: of the step alone, including `data_seconds` of waiting for data. Not included: `evaluation_seconds`
    after the step, and `save_seconds` for which training stalled for checkpoints since the previous record.
    `loss_scale`: of the step, in fp16; else None.
    `loss`, `validation_loss`: nats per token of the data, without regularizers; of an objective with a loss of its own,
    the mean of that loss. `skipped_in_a_row`: number of consecutive skipped steps that end with this one. `mtp_loss`,
    `binary_loss`: mean loss of multi-token prediction, unweighted, and of BERT's binary head; `z_loss`: the z-loss of
    the output layer as it enters the gradient (`training.z_loss`); `index_loss`: the sum of the layers' losses of
    indexers (`model.sparse_attention`) as it enters the gradient; `max_attention_logit`: the largest of all heads
    before the update, with `optimizer.qk_clip`; None without. Of a model with experts, as
    `megafp8.training.expert_load.ExpertLoad` has them: `router_aux_loss`, `router_z_loss`, `expert_imbalance` and
    `router_entropy`; else None. `loss_limit`: a loss above it is a spike, if they are detected. `slowest_rank`,
    `slowest_ratio`: the slowest rank since the last comparison, and its time over the median (`resilience.stragglers`).
    `replicas`: those that have trained the step, by index, with `resilience.replicas`.
    `objective`: by name, what a loss of the objective's own reports (`megafp8.objectives.ObjectiveLoss`).
    `evaluations`: by name, the other numbers of evaluations after the step: losses of `data.validation`
    (`valid/<name>`) and metrics of tasks (`eval/<task>/<metric>`). `layer_norms`: by name, norms of a step that was
    measured (`megafp8.optimizer.layer_norms`). `section_seconds`: time since the record before by section of the
    training loop, as far as known (`megafp8.training.section_times`): `seconds/<section>`.
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
        """All metrics by name, those of mappings among them."""
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
        return f"loss above {self.loss_limit:.4f}" if self.is_spike else "gradients not finite"

    @property
    def evaluated(self) -> bool:
        return self.validation_loss is not None or bool(self.evaluations)


class Observer(AbstractContextManager["Observer"]):
    """Watches the training loop: a context of it, which it calls at the points of each step; steps count from 1.

    The loop calls all observers in the order of `megafp8.training.observers`, on all ranks, so that what they do may be
    collective. TrainingError from any method, on all ranks, ends the job.
    """

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """The loop has ended."""

    def before_step(self, step: int) -> None:
        """`step` begins: its data are about to be read."""

    def before_passes(self, step: int, batches: list[Batch]) -> list[Batch]:
        """`batches` are this rank's micro-batches of `step`; returns those to train on."""
        return batches

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """The update of `step` is queued, or `skipped`; returns fields of its `StepMetrics`."""
        return {}

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """A step is done, with these metrics and, if it was sampled, FP8 health `records`."""

    def check_state(self, step: int) -> None:
        """The state after `step` is about to be saved, or is suspected to be wrong."""
