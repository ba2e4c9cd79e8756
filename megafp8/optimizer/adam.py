"""AdamW in fp32 for a model in bf16, and Muon for its hidden matrices if asked for.

A bf16 weight has 8 significant bits, so an update below 1/256 of it would be lost by rounding. Each parameter that is
not fp32 therefore has an fp32 master copy; moments and update are fp32 and the model gets the rounded result. fp32
parameters are their own masters.

The arithmetic is torch's fused AdamW (one kernel over all tensors, on CUDA and CPU), or NVIDIA apex's `FusedAdam` where
that is installed. Both are ordinary torch optimizers over the masters; the gradients are set once, as views of the
gradient buffer. Masters and moments exist before the first step, so a checkpoint always has a place to load into. Muon
(`megafp8.optimizer.muon`) is a torch optimizer over masters too.

The optimizer works on flat shards of the parameters and holds their state only. A shard is a whole parameter, or under
ZeRO what this rank owns of it; Adam is elementwise, so this makes no difference, and Muon puts matrices together.

A parameter may be released: its values are in the masters only, and what needs them rounded takes them from there
(FP8 parameters, `megafp8.data_parallel.fp8_weight_shards`; FSDP, `megafp8.data_parallel.fsdp`).

State may be stored in less between steps (`StateStorage`): moments in bf16, as DeepSeek-V3 does (arXiv:2412.19437,
section 3.3.3), or in FP8 (`fp8_moments`), and masters as remainders of their bf16 parameters (`state_storage`). The
kernels need fp32, so a batch of shards at a time is loaded in fp32, updated, and stored. A bf16 moment that a step
shrinks by less than 1/256 might never change; so betas are at most 1 - 1/256 then.

A moving average of the weights may be kept beside the masters, in fp32 (`average_decay`). After n updates

    average ← d · average + (1 - d) · master        d = min(average_decay, (n - 1) / (n + 9))

so it begins with the weights after the first update, and then spans about the last tenth of all updates until that is
1 / (1 - average_decay) (as TensorFlow's ExponentialMovingAverage with `num_updates`, one update later).

Memory: 12 bytes an element (8 where the parameter is fp32; 4 fewer with moments in bf16, 6 with FP8 but for 1/64 of a
byte; 2 fewer with remainders; Muon's have one moment, 4 fewer; 4 more with an average), on top of the model and its
fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW, Optimizer

from megafp8.data_parallel.grad_buffer import gradient_of
from megafp8.distributed.sharding import FlatShard, ParamSpec, spec_of
from megafp8.optimizer.fp8_moments import FIRST, SECOND, Fp8MomentStorage
from megafp8.optimizer.layer_norms import Watch
from megafp8.optimizer.muon import MOMENTUM, Muon, MuonSettings
from megafp8.optimizer.param_groups import ParamGroup, Rates, is_hidden_matrix, rates_of
from megafp8.optimizer.state_storage import PlainStorage, RemainderStorage, StateStorage

BATCH = 1 << 24
"""Elements whose state is fp32 at a time where it is stored in less; or one shard, if it has more."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"
"""Name in the state of the moving average of weights."""

_KEYS = ("master", *_MOMENTS, MOMENTUM, AVERAGE)

State = dict[str, list[tuple[FlatShard, Tensor]]]
"""By name, shards and their state, flat."""


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


def _batches(shards: Sequence[FlatShard], elements: int) -> list[list[FlatShard]]:
    """`shards` in order, in lists of up to `elements` elements; a shard that has more is a list of its own."""
    batches: list[list[FlatShard]] = [[]]
    free = elements
    for shard in shards:
        if batches[-1] and len(shard) > free:
            batches.append([])
            free = elements
        batches[-1].append(shard)
        free -= len(shard)
    return batches


def _moments(shard: FlatShard, dtype: torch.dtype, seed: int) -> dict[str, StateStorage]:
    """Adam's moments of a shard, zero."""
    if dtype == torch.float8_e4m3fn:
        return {name: Fp8MomentStorage(shard, name, fmt, seed) for name, fmt in zip(_MOMENTS, (FIRST, SECOND))}
    device = shard.param.device
    return {name: PlainStorage(torch.zeros(len(shard), dtype=dtype, device=device)) for name in _MOMENTS}


def _momentum(shard: FlatShard) -> dict[str, StateStorage]:
    """Muon's momentum of a shard, zero."""
    return {MOMENTUM: PlainStorage(torch.zeros(len(shard), dtype=torch.float32, device=shard.param.device))}


def _set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


class MixedPrecisionAdamW:
    """AdamW (Loshchilov & Hutter 2019) over `shards`, at most one of each parameter, as a `GradBuffer` gives them.

    `weight_decay` applies to parameters whose `spec.weight_decay` is set; not to others (norms, biases). `groups`:
    those with other rates; `hidden_learning_rate_scale`: of all hidden matrices. `muon`: update these with Muon; then
    all ranks of `matrix_group`, which together hold all parts of them, construct this and step at the same time, and
    state is fp32. `reason` says in one line which implementation runs and why; `step_count` is the number of updates
    made so far. `moments_dtype`: fp32, bf16, or float8_e4m3fn for `fp8_moments`, whose noise has the given `seed`.
    `store_param_remainders`: store masters of bf16 parameters that are not released as remainders. `released`:
    parameters whose values, read here for the last time, are in the masters from now on. `masters`: existing masters,
    fp32 and flat, updated in place. `average_decay`: keep a moving average of the weights, without remainders.
    """

    def __init__(
        self,
        shards: Sequence[FlatShard],
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
        groups: Sequence[ParamGroup] = (),
        hidden_learning_rate_scale: float = 1.0,
        muon: MuonSettings | None = None,
        matrix_group: ProcessGroup | None = None,
        average_decay: float | None = None,
    ) -> None:
        assert average_decay is None or not store_param_remainders
        self._average_decay = average_decay
        self.shards = list(shards)
        matrices = {shard for shard in shards if muon is not None and is_hidden_matrix(spec_of(shard.param))}
        self.released = released
        self._masters: dict[nn.Parameter, Tensor] = {}
        self.storage: dict[Tensor, dict[str, StateStorage]] = {}  # by master
        rounded: list[FlatShard] = []
        for shard in shards:
            param, master = shard.param, self._make_master(shard, masters)
            moments = _momentum(shard) if shard in matrices else _moments(shard, moments_dtype, seed)
            self._masters[param], self.storage[master] = master, moments
            if average_decay is not None:
                moments[AVERAGE] = PlainStorage(master.detach().clone())
            if store_param_remainders and param.dtype == torch.bfloat16 and param not in released:
                self.storage[master]["master"] = RemainderStorage(shard.view(param.detach()))
                master.data = master.data.new_empty(0)
            elif param.dtype != torch.float32:
                self.storage[master]["master"] = PlainStorage(master)
                rounded += [] if param in released else [shard]
        self._shard_of = {self._masters[shard.param]: shard for shard in shards}
        self._rounded_params = [shard.view(shard.param.detach()) for shard in rounded]
        self._rounded_masters = [self._masters[shard.param] for shard in rounded]
        self._loads_state = store_param_remainders or moments_dtype != torch.float32
        implementation, self.reason = choose_adam(device)
        self._apex = implementation is not AdamW
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps}
        options |= {"adam_w_mode": True} if self._apex else {"fused": True}
        self._adams: list[Optimizer] = []
        rates = partial(
            rates_of, weight_decay=weight_decay, groups=groups, hidden_learning_rate_scale=hidden_learning_rate_scale
        )
        others = [shard for shard in shards if shard not in matrices]
        for batch in _batches(others, BATCH) if self._loads_state else [others]:
            adam = implementation(self._param_groups(batch, rates), **options)
            for shard in batch:
                master = self._masters[shard.param]
                adam.state[master] = {} if self._loads_state else self._load_moments(master)
            self._adams.append(adam)
        self._muon: Muon | None = None
        if muon is not None:
            assert not self._loads_state, "Muon's state is fp32"
            ordered = [shard for shard in shards if shard in matrices]
            by_master = {self._masters[shard.param]: shard for shard in ordered}
            self._muon = Muon(self._param_groups(ordered, rates), by_master, muon, matrix_group, device)
            for master in by_master:
                self._muon.state[master] = {MOMENTUM: self.storage[master][MOMENTUM].load()}
            self.reason += f"; Muon for {len(self._muon.matrices)} hidden matrices"
        self.step_count = 0

    def _param_groups(
        self, shards: Sequence[FlatShard], rates_of_spec: Callable[[ParamSpec], Rates]
    ) -> list[dict[str, Any]]:
        """Torch's parameter groups of the masters of `shards`, one for each pair of rates."""
        alike: dict[Rates, list[Tensor]] = {}
        for shard in shards:
            alike.setdefault(rates_of_spec(spec_of(shard.param)), []).append(self._masters[shard.param])
        alike = alike or {Rates(1.0, 0.0): []}
        return [
            {"params": masters, "weight_decay": rates.weight_decay, "lr_scale": rates.learning_rate_scale}
            for rates, masters in alike.items()
        ]

    def _make_master(self, shard: FlatShard, given: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The fp32 tensor that the optimizer updates; it shares the memory of a parameter that is fp32 already."""
        param = shard.param
        master = given.get(param)
        if master is None:
            master = shard.view(param.detach()).to(torch.float32, copy=param in self.released)
        master.grad = gradient_of(shard)
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

    def master_of(self, shard: FlatShard) -> Tensor:
        """The fp32 values of a shard, flat, live."""
        return self._masters[shard.param].detach()

    def released_values(self) -> list[tuple[FlatShard, Tensor]]:
        """The shards of released parameters with their values, flat, in the parameters' dtype.

        The masters themselves where that is their dtype, so that a checkpoint loads into them; otherwise copies.
        """
        released = [shard for shard in self.shards if shard.param in self.released]
        return [(shard, self.master_of(shard).to(shard.param.dtype)) for shard in released]

    def state_tensors(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state of the shard of `param`, flat: the fp32 `master` if separate; `exp_avg` and `exp_avg_sq`, or Muon's
        `momentum_buffer`; `average`.

        Live tensors, or copies on the host (`StateStorage.checkpoint_tensor`).
        """
        storage = self.storage[self._masters[param]]
        return {key: storage[key].checkpoint_tensor() for key in _KEYS if key in storage}

    def stored_tensors(self, shard: FlatShard) -> dict[str, tuple[Tensor, ...]]:
        """The live tensors that hold a shard's `master` and moments between steps."""
        stored = {key: storage.tensors for key, storage in self.storage[self._masters[shard.param]].items()}
        if shard.param in self.released:  # also where it is fp32
            stored["master"] = (self.master_of(shard),)
        return stored

    def state(self) -> State:
        """`state_tensors` of all shards, by their names. A checkpoint loads into them, then calls `restore`."""
        found: State = {}
        for shard in self.shards:
            for key, tensor in self.state_tensors(shard.param).items():
                found.setdefault(key, []).append((shard, tensor))
        return found

    @torch.no_grad()
    def restore(self, state: State, step_count: int) -> None:
        """Take over a loaded `state` after `step_count` updates, and round the masters into the parameters."""
        self.step_count = step_count
        for key, found in state.items():
            for shard, tensor in found:
                storage, device = self.storage[self._masters[shard.param]][key], gradient_of(shard).device
                storage.store(tensor.to(device, torch.float32), step_count)
        self._copy_masters_to_params()

    @torch.no_grad()
    def _copy_masters_to_params(self) -> None:
        """Round the masters into the parameters, except released ones and those stored as remainders."""
        if self._rounded_params:
            torch._foreach_copy_(self._rounded_params, self._rounded_masters)

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a `skip`. apex counts steps on the host; storing state again may round it again; Muon
        has no such argument."""
        return not (self._apex or self._loads_state or self._muon is not None)

    def step(self, lr: float, *, skip: Tensor | None = None, watch: Watch | None = None) -> None:
        """One update from the gradients in the buffer, with learning rate `lr` times the scale of each group.

        `skip`: a bool scalar on the device; where it is true nothing changes, and `forget_step` must follow. `watch`:
        update in batches, each in a context that it makes.
        """
        assert skip is None or self.skips_on_device
        for adam in self._adams:
            if skip is not None:
                adam.found_inf = skip.float()  # type: ignore[attr-defined]  # torch's name, from gradient scaling
            _set_lr(adam, lr)
            if self._loads_state:
                self._load_step_store(adam, watch)
            elif watch is None:
                adam.step()
            else:
                self._step_in_batches(adam, watch)
        if self._muon is not None:
            _set_lr(self._muon, lr)
            self._muon.step(watch=watch)
        self._step_count += 1
        self._copy_masters_to_params()

    @torch.no_grad()
    def average_weights(self) -> None:
        """Add the weights after an update to their moving average, if there is one."""
        if self._average_decay is not None and self.shards:
            n = self._step_count
            decay = min(self._average_decay, (n - 1) / (n + 9))
            torch._foreach_lerp_(*self._averages_and_masters(), 1 - decay)

    @torch.no_grad()
    def restart_average(self) -> None:
        """Let the moving average begin with the weights as they are."""
        for average, master in zip(*self._averages_and_masters(), strict=True):
            average.copy_(master)

    def _averages_and_masters(self) -> tuple[list[Tensor], list[Tensor]]:
        masters = [self.master_of(shard) for shard in self.shards]
        return [self.storage[self._masters[shard.param]][AVERAGE].load() for shard in self.shards], masters

    def forget_step(self) -> None:
        """Uncount the last step, which the device has skipped."""
        self._step_count -= 1

    def _load_moments(self, master: Tensor) -> dict[str, Tensor]:
        return {key: self.storage[master][key].load() for key in _MOMENTS}

    def _watched(self, masters: Sequence[Tensor], watch: Watch | None) -> AbstractContextManager[None]:
        return nullcontext() if watch is None else watch([(self._shard_of[master], master) for master in masters])

    def _step_in_batches(self, adam: Optimizer, watch: Watch) -> None:
        """`adam.step()` of up to `BATCH` elements at a time; of all, where apex counts its calls."""
        groups = [group["params"] for group in adam.param_groups]
        shards = [self._shard_of[master] for masters in groups for master in masters]
        for batch in [shards] if self._apex else _batches(shards, BATCH):
            chosen = [self._masters[shard.param] for shard in batch]
            own = set(chosen)
            for group, masters in zip(adam.param_groups, groups):
                group["params"] = [master for master in masters if master in own]
            with self._watched(chosen, watch):
                adam.step()
        for group, masters in zip(adam.param_groups, groups):
            group["params"] = masters

    @torch.no_grad()
    def _load_step_store(self, adam: Optimizer, watch: Watch | None) -> None:
        """`adam.step()` with state that is loaded in fp32 and then stored."""
        masters = [master for group in adam.param_groups for master in group["params"]]
        remainders = {
            master: storage
            for master in masters
            if isinstance(storage := self.storage[master].get("master"), RemainderStorage)
        }
        for master in masters:
            adam.state[master] |= self._load_moments(master)
            if master in remainders:
                master.data = remainders[master].load()
        with self._watched(masters, watch):
            adam.step()
        for master in masters:
            for key in _MOMENTS:
                self.storage[master][key].store(adam.state[master].pop(key), self._step_count)
            if master in remainders:
                remainders[master].store(master.data, self._step_count)
                master.data = master.data.new_empty(0)
