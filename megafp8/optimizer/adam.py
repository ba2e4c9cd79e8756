"""AdamW in fp32 for a model in bf16.

A bf16 weight has 8 significant bits, so an update below 1/256 of it would round away. Each parameter that is not fp32
therefore has an fp32 master copy; the moments and the update are fp32 and the model gets the rounded result. fp32
parameters are their own masters.

The arithmetic is torch's fused AdamW (one kernel over all tensors, on CUDA and CPU), or NVIDIA apex's `FusedAdam` where
that is installed. Both are ordinary torch optimizers over the masters; the gradients are set once, as views of the
gradient buffer, and never move. Masters and moments exist from the start rather than from the first step, so a
checkpoint always has a place to load into.

It works on fragments: flat runs of elements of the parameters, whose state alone exists here. A fragment is a whole
parameter, or under ZeRO what this rank owns of it; Adam works on single elements and cannot tell.

A parameter may be hollow: its values are in the masters alone, and whoever needs them rounded takes them from there
(FP8 parameters, `megafp8.data_parallel.fp8_weight_shards`; weights that torch shards, `fully_sharded`).

State may be kept in less between steps (`kept`): moments in bf16, as DeepSeek-V3 does (arXiv:2412.19437, section
3.3.3), or in FP8 (`fp8_moments`), and of a master what its bf16 parameter leaves (`remainders`). The kernels want fp32,
so a batch of fragments at a time gets that, is updated, and has it taken back. A bf16 moment that a step shrinks by
less than 1/256 of itself could be rounded to what it was for ever; so betas are at most 1 - 1/256 then.

Memory: 12 bytes an element (8 where the parameter is fp32; 4 fewer with moments in bf16, 6 with FP8 but for 1/64 of a
byte; 2 fewer with remainders), on top of the model and its fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from megafp8.data_parallel.grad_buffer import gradient_of
from megafp8.distributed.sharding import FlatShard, spec_of
from megafp8.optimizer.fp8_moments import FIRST, SECOND, Fp8Moment
from megafp8.optimizer.remainders import SplitMaster
from megafp8.optimizer.state_storage import PlainStorage, StateStorage


def _apex_fused_adam() -> tuple[type[Optimizer] | None, str]:
    """NVIDIA apex's `FusedAdam` if it can run here, and what was found. PyPI's `apex` is an unrelated package."""
    try:
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers import FusedAdam
    except Exception as error:  # an unrelated or broken apex may fail in any way while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == "apex":
            return None, "NVIDIA apex is not installed"
        return None, f"the installed apex is not a working NVIDIA apex ({type(error).__name__})"
    if not multi_tensor_applier.available:
        return None, "NVIDIA apex was built without its CUDA extensions"
    return FusedAdam, "NVIDIA apex is installed"


def choose_adam(device: torch.device) -> tuple[type[Optimizer], str]:
    """The optimizer class to use on `device`, and the choice with its reason in one line for the log."""
    if device.type != "cuda":
        return AdamW, f"torch fused AdamW: apex has no kernels for {device.type}"
    apex_class, found = _apex_fused_adam()
    if apex_class is None:
        return AdamW, f"torch fused AdamW: {found}"
    return apex_class, f"apex FusedAdam: {found}"


BATCH = 1 << 24
"""Elements whose state is fp32 at a time where it is kept in less; or one fragment, if it has more."""

_MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, list[tuple[FlatShard, Tensor]]]
"""By name, fragments and their state, flat."""


def _batches(fragments: Sequence[FlatShard], elements: int) -> list[list[FlatShard]]:
    """`fragments` in order, in lists of up to `elements` elements; one that has more is a list of its own."""
    batches: list[list[FlatShard]] = [[]]
    free = elements
    for fragment in fragments:
        if batches[-1] and len(fragment) > free:
            batches.append([])
            free = elements
        batches[-1].append(fragment)
        free -= len(fragment)
    return batches


def _moments(fragment: FlatShard, dtype: torch.dtype, seed: int) -> dict[str, StateStorage]:
    """Adam's moments of a fragment, zero."""
    if dtype == torch.float8_e4m3fn:
        return {name: Fp8Moment(fragment, name, fmt, seed) for name, fmt in zip(_MOMENTS, (FIRST, SECOND))}
    device = fragment.param.device
    return {name: PlainStorage(torch.zeros(len(fragment), dtype=dtype, device=device)) for name in _MOMENTS}


class MixedPrecisionAdamW:
    """AdamW (Loshchilov & Hutter 2019) over `fragments`, at most one of each parameter, as a `GradBuffer` gives them.

    `weight_decay` holds for parameters whose `spec.weight_decay` is set; the others (norms, biases) have none. `reason`
    says in one line which implementation runs and why; `step_count` is the number of updates made so far.
    `moments_dtype`: fp32, bf16, or float8_e4m3fn for `fp8_moments`, whose noise is that of `seed`.
    `store_param_remainders`: keep masters as `remainders` of the parameters, which are bf16 and not hollow.
    `released`: parameters whose values, read here for the last time, are in the masters from now on; or for long, where
    `masters` has one, fp32 and as flat as the fragment, which is updated in place.
    """

    def __init__(
        self,
        fragments: Sequence[FlatShard],
        *,
        device: torch.device,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        moments_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        seed: int = 0,
        released: AbstractSet[nn.Parameter] = frozenset(),
        masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        self.shards = list(fragments)
        self.released = released
        self._masters: dict[nn.Parameter, Tensor] = {}
        self.kept: dict[Tensor, dict[str, StateStorage]] = {}
        low_precision: list[FlatShard] = []
        for fragment in fragments:
            param, master = fragment.param, self._make_master(fragment, masters)
            self._masters[param], self.kept[master] = master, _moments(fragment, moments_dtype, seed)
            if store_param_remainders and param.dtype == torch.bfloat16 and param not in released:
                self.kept[master]["master"] = SplitMaster(fragment.of(param.detach()))
                master.data = master.data.new_empty(0)
            elif param.dtype != torch.float32:
                self.kept[master]["master"] = PlainStorage(master)
                low_precision += [] if param in released else [fragment]
        self._low_precision = [fragment.of(fragment.param.detach()) for fragment in low_precision]
        self._their_masters = [self._masters[fragment.param] for fragment in low_precision]
        self._rounds = store_param_remainders or moments_dtype != torch.float32
        implementation, self.reason = choose_adam(device)
        self._apex = implementation is not AdamW
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps}
        options |= {"adam_w_mode": True} if self._apex else {"fused": True}
        self._adams: list[Optimizer] = []
        for batch in _batches(self.shards, BATCH) if self._rounds else [self.shards]:
            decaying = [self._masters[f.param] for f in batch if spec_of(f.param).weight_decay]
            others = [self._masters[f.param] for f in batch if not spec_of(f.param).weight_decay]
            groups = [
                {"params": decaying, "weight_decay": weight_decay, "decays": True},
                {"params": others, "weight_decay": 0.0, "decays": False},
            ]
            adam = implementation(groups, **options)
            for master in decaying + others:
                adam.state[master] = {} if self._rounds else self._moment_values(master)
            self._adams.append(adam)
        self.step_count = 0

    def _make_master(self, fragment: FlatShard, given: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """An fp32 tensor for the optimizer to update; it shares the memory of a parameter that is fp32 already."""
        param = fragment.param
        master = given.get(param)
        if master is None:
            master = fragment.of(param.detach()).to(torch.float32, copy=param in self.released)
        master.grad = gradient_of(fragment)
        return master

    @property
    def step_count(self) -> int:
        """Updates made so far; Adam's bias correction depends on it, so it belongs into a checkpoint."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        for adam in self._adams:
            for group in adam.param_groups:
                if self._apex:
                    group["step"] = count
                    continue
                for master in group["params"]:
                    step = torch.full((), float(count), dtype=torch.float32, device=master.device)
                    adam.state[master]["step"] = step

    def state_tensors(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state of the fragment of `param`, flat: the fp32 `master` if separate, `exp_avg`, `exp_avg_sq`.

        Live tensors, or copies on the host of what is kept in a form that no tensor has.
        """
        kept = self.kept[self._masters[param]]
        return {key: kept[key].saved() for key in ("master", *_MOMENTS) if key in kept}

    def stored_tensors(self, fragment: FlatShard) -> dict[str, tuple[Tensor, ...]]:
        """What is in memory of a fragment between steps beside the parameter's own values, by `master`, `exp_avg`,
        `exp_avg_sq`: live tensors, as they are stored."""
        master = self._masters[fragment.param]
        stored = {key: kept.tensors for key, kept in self.kept[master].items()}
        if fragment.param in self.released:  # also where it is fp32
            stored["master"] = (master.detach(),)
        return stored

    def state(self) -> State:
        """`state_tensors` of all fragments, by their names. A checkpoint loads into them, then calls `restore`."""
        found: State = {}
        for fragment in self.shards:
            for key, tensor in self.state_tensors(fragment.param).items():
                found.setdefault(key, []).append((fragment, tensor))
        return found

    @torch.no_grad()
    def restore(self, state: State, step_count: int) -> None:
        """Be as after `step_count` updates: `state` was loaded into, and the parameters get their rounded masters."""
        self.step_count = step_count
        for key, found in state.items():
            for fragment, tensor in found:
                kept, grad = self.kept[self._masters[fragment.param]][key], gradient_of(fragment)
                kept.keep(tensor.to(grad.device, torch.float32), step_count)
        self._copy_masters_to_params()

    def master_of(self, fragment: FlatShard) -> Tensor:
        """The fp32 values of a fragment, flat, live."""
        return self._masters[fragment.param].detach()

    def released_values(self) -> list[tuple[FlatShard, Tensor]]:
        """The fragments of hollow parameters with their values, flat, in the parameters' dtype: the masters themselves
        where that is theirs, so that a checkpoint loads into them, else a copy."""
        released = [fragment for fragment in self.shards if fragment.param in self.released]
        return [(fragment, self.master_of(fragment).to(fragment.param.dtype)) for fragment in released]

    @torch.no_grad()
    def _copy_masters_to_params(self) -> None:
        """Round the masters into the model's parameters, as far as the fragments go; not into hollow ones, nor
        into those that are part of their masters."""
        if self._low_precision:
            torch._foreach_copy_(self._low_precision, self._their_masters)

    def step(self, lr: float, weight_decay: float | None = None) -> None:
        """One update from the gradients in the buffer. `weight_decay` replaces the decay from here on."""
        for adam in self._adams:
            for group in adam.param_groups:
                group["lr"] = lr
                if weight_decay is not None and group["decays"]:
                    group["weight_decay"] = weight_decay
            if self._rounds:
                self._step_rounding(adam)
            else:
                adam.step()
        self._step_count += 1
        self._copy_masters_to_params()

    def _split_master(self, master: Tensor) -> SplitMaster | None:
        """Where a master is kept that has no memory between steps."""
        kept = self.kept[master].get("master")
        return kept if isinstance(kept, SplitMaster) else None

    def _moment_values(self, master: Tensor) -> dict[str, Tensor]:
        return {key: self.kept[master][key].values() for key in _MOMENTS}

    @torch.no_grad()
    def _step_rounding(self, adam: Optimizer) -> None:
        """`adam.step()` with state in fp32, which then goes back to how it is kept."""
        masters = [master for group in adam.param_groups for master in group["params"]]
        for master in masters:
            adam.state[master] |= self._moment_values(master)
            if (split := self._split_master(master)) is not None:
                master.data = split.values()
        adam.step()
        for master in masters:
            for key in _MOMENTS:
                self.kept[master][key].keep(adam.state[master].pop(key), self._step_count)
            if (split := self._split_master(master)) is not None:
                split.keep(master.data, self._step_count)
                master.data = master.data.new_empty(0)
