"""The optimizer section of the config: the registry of optimizers, a name and a section of options for each."""

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
    """The optimizer, and the learning-rate schedule."""

    choices: ClassVar[tuple[str, ...]] = ("name", "schedule")
    name: Literal["adamw", "lion", "muon"] = "adamw"
    """adamw, lion, or muon for the matrices of blocks and adamw for all other weights (docs/optimizers.md)."""
    lion: Lion = Lion()
    muon: Muon = Muon()
    groups: list[ParamGroup] = []
    """Weights with a learning rate or weight decay of their own. Default: none."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    min_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the schedule after warm-up. wsd: warm-up, stable, decay."""
    warmup_steps: Steps = 0
    """Number of steps of linear warm-up."""
    warmup_from: NonNegative = 0.0
    """Learning rate from which the warm-up rises. After a schedule that has ended, for example its
    min_learning_rate."""
    schedule_from: Steps = 0
    """Step at which the schedule begins, with its warm-up; earlier steps have the learning rate of that one. For a
    schedule of a stage, or of a run that was continued after its schedule had ended."""
    decay_until: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """Step at which the schedule reaches min_learning_rate, where it stays. Default: training.steps. Give it to train
    longer or shorter than planned without changing the schedule."""
    decay_steps: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """wsd: number of steps of the final decay. Default: a tenth of decay_until."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Decay = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Decay = 0.95
    """Decay rate of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: NonNegative = 1.0
    """Maximum global gradient norm. 0: no clipping."""
    qk_clip: PositiveFloat | None = None
    """After an update, the query and key weights of heads whose largest attention logit of the step was above this are
    multiplied so that it would have been this (MuonClip of Kimi K2, arXiv:2507.20534, with 100), for runs in which
    logits grow without bound. Costs another product of queries and keys in forward (docs/optimizers.md). Default: no
    logits are computed twice, and no weights are clipped."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients travel between data-parallel ranks. bf16: half the traffic; sums over ranks are rounded
    to 8 bits, sums over the micro-batches of a rank stay fp32."""
    moments_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Dtype in which Adam's two moments are stored. bf16 saves 4 bytes per parameter; fp8 saves 6, with a scale per
    block of 128 and stochastic rounding. A resumed run may change it between bf16 and fp8 only."""
    store_param_remainders: bool = False
    """Store only the 16 bits of each fp32 master weight that its bf16 weight lacks: saves 2 bytes per parameter without
    loss. Checkpoints hold fp32 masters either way. Not supported with fp8.param_gather or parallel.fsdp."""
    average_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay rate of an exponential moving average of the weights (EMA), such as 0.9999, which checkpoints hold beside
    them; 4 bytes per parameter, divided as the optimizer's state is. Training does not use it:
    megafp8 average --moving writes it as weights (docs/stages.md). Default: none is kept."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        chosen = values.get(choice, cls.model_fields[choice].default)
        if choice == "schedule":
            return {"constant": (), "wsd": ("decay_until", "decay_steps")}.get(chosen, ("decay_until",))
        update = cls.model_fields[chosen].default if chosen in cls.model_fields else None  # adamw's have no section
        chosen_options = () if update is None else (chosen,)
        return (
            chosen_options
            if isinstance(update, MatrixUpdate)
            else (*chosen_options, "moments_dtype", "store_param_remainders")
        )

    @property
    def adamw(self) -> AdamW:
        """Of all weights, or those that the chosen optimizer does not update. Its options have no section."""
        return AdamW(beta1=self.beta1, beta2=self.beta2, eps=self.eps)

    @property
    def chosen(self) -> Update:
        """The optimizer that `name` chooses."""
        update: Update = getattr(self, self.name)
        return update

    def update(self, *, hidden_matrix: bool) -> Update:
        """What updates a weight, given whether it is a hidden matrix (`param_groups.is_hidden_matrix`)."""
        return self.chosen if hidden_matrix or not isinstance(self.chosen, MatrixUpdate) else self.adamw
