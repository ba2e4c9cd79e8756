"""Optimizer section of the config, with a name and a section of options for each optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megafp8.optimizer.adamw import AdamW
from megafp8.optimizer.base import MatrixUpdate, Update
from megafp8.optimizer.lion import Lion
from megafp8.optimizer.muon import Muon
from megafp8.optimizer.param_groups import ParamGroup
from megafp8.section import Decay, NonNegative, PositiveFloat, PositiveInt, Quantity, Section, Steps


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    choices: ClassVar[tuple[str, ...]] = ("name", "schedule")
    name: Literal["adamw", "lion", "muon"] = "adamw"
    """Optimizer. muon updates the matrices of blocks, and adamw all other weights (docs/optimizers.md)."""
    lion: Lion = Lion()
    muon: Muon = Muon()
    groups: list[ParamGroup] = []
    """Groups of weights with a separate learning rate or weight decay. Default: no groups."""
    learning_rate: PositiveFloat
    """Peak learning rate, reached at the end of the warm-up."""
    min_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the schedule after warm-up. wsd means warm-up, stable, decay."""
    warmup_steps: Steps = 0
    """Number of steps of linear warm-up."""
    warmup_from: NonNegative = 0.0
    """Learning rate at the start of the warm-up. To continue after a schedule has ended, set it, for example, to that
    schedule's min_learning_rate."""
    schedule_from: Steps = 0
    """Step at which the schedule begins with its warm-up. Earlier steps have the learning rate of this step. Set it for
    the schedule of a training stage, or to continue a run after its schedule has ended."""
    decay_until: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """Step at which the schedule reaches min_learning_rate, where it stays. Default: training.steps. Set it to train
    longer or shorter than planned without changing the schedule."""
    decay_steps: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """Number of steps of the final decay of the wsd schedule. Default: a tenth of decay_until."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices. Norms and biases have no weight decay."""
    beta1: Decay = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Decay = 0.95
    """Decay rate of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon, added to the root of the second moment."""
    clip_grad_norm: NonNegative = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down to it. 0 turns clipping off."""
    qk_clip: PositiveFloat | None = None
    """Limit of attention logits (MuonClip of Kimi K2, arXiv:2507.20534, with 100), for runs in which logits grow
    without bound. If the largest logit of a head in a step exceeds the limit, the head's query and key weights are
    scaled down after the update so that this logit would have been equal to the limit. It costs a second product of
    queries and keys in forward (docs/optimizers.md). Default: no clipping and no extra cost."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients in communication between data-parallel ranks. bf16 halves the traffic; sums over ranks are
    then rounded to 8 bits, while sums over a rank's micro-batches stay fp32."""
    moments_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Storage dtype of moments: two of Adam, one of Lion and Muon. bf16 saves 2 bytes per moment and parameter; fp8
    saves 3, with a scale per block of 128 and stochastic rounding (not with muon). A resumed run can change it only
    between bf16 and fp8."""
    store_param_remainders: bool = False
    """Store only the 16 bits of each fp32 master weight that its bf16 weight lacks. This saves 2 bytes per parameter
    without loss. Checkpoints hold fp32 masters either way. Not supported with fp8.param_gather or parallel.fsdp."""
    offload: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the optimizer state that is in pinned host memory between steps. Each step streams it through the
    GPU, with the same bits. 1 saves all 12 bytes per parameter of fp32 state, or a rank's part of them. It costs time
    in proportion to the state, so use it with many tokens per step (docs/optimizers.md). Masters stay on the GPU if
    parallel.fsdp gathers from them (without fsdp_replicas) and for weights gathered in FP8; there only moments are
    offloaded. Not supported with muon, average_decay, qk_clip and resilience.replicas. Default: 0."""
    average_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay rate of an exponential moving average (EMA) of the weights, such as 0.9999. Checkpoints hold the average in
    addition to the weights. It takes 4 bytes per parameter, sharded like the optimizer state. Training does not use it;
    megafp8 average --moving writes it as weights (docs/stages.md). Default: no average."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Return the keys that apply to the chosen optimizer or schedule.

        Args:
            choice: Key of the choice, `name` or `schedule`.
            values: Values of the section's keys that are set.
        """
        chosen = values.get(choice, cls.model_fields[choice].default)
        if choice == "schedule":
            return {"constant": (), "wsd": ("decay_until", "decay_steps")}.get(chosen, ("decay_until",))
        update = cls.model_fields[chosen].default if chosen in cls.model_fields else None  # adamw has no section
        chosen_options = () if update is None else (chosen,)
        return (
            (*chosen_options, "moments_dtype")
            if isinstance(update, MatrixUpdate)
            else (*chosen_options, "moments_dtype", "store_param_remainders", "offload")
        )

    @property
    def adamw(self) -> AdamW:
        """AdamW, for all weights or for the weights that the chosen optimizer does not update."""
        return AdamW(beta1=self.beta1, beta2=self.beta2, eps=self.eps)

    @property
    def chosen(self) -> Update:
        """Optimizer that `name` chooses."""
        update: Update = getattr(self, self.name)
        return update

    def update(self, *, hidden_matrix: bool) -> Update:
        """Return the update rule of a weight, given whether it is a hidden matrix (`param_groups.is_hidden_matrix`)."""
        return self.chosen if hidden_matrix or not isinstance(self.chosen, MatrixUpdate) else self.adamw
