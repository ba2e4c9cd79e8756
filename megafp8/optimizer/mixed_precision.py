"""An optimizer in fp32 for a model in bf16: masters, storage of state, batches, and a moving average of the weights.

A bf16 weight has 8 significant bits, so an update below 1/256 of it would be lost by rounding. Each parameter that is
not fp32 therefore has an fp32 master copy; moments and update are fp32 and the model gets the rounded result. fp32
parameters are their own masters, and so are float64 ones, whose gradients and moments are float64 too: where this
says fp32, it is `megafp8.numerics.dtypes.sum_dtype`.

Each kind of update (`megafp8.optimizer.base.Update`) makes optimizers over the masters, as torch's are over parameters;
the gradients are set once, as views of the gradient buffer. Masters and moments exist before the first step, so a
checkpoint always has a place to load into.

The optimizer works on flat shards of the parameters and holds their state only. A shard is a whole parameter, or under
ZeRO what this rank owns of it; to an elementwise update this makes no difference, and others put matrices together.

A parameter may be released: its values are in the masters only, and what needs them rounded takes them from there
(FP8 parameters, `megafp8.parallel.data.fp8_weight_shards`; FSDP, `megafp8.parallel.data.fsdp`).

State may be stored in less between steps (`StateStorage`): moments in bf16, as DeepSeek-V3 does (arXiv:2412.19437,
section 3.3.3), or in FP8 (`fp8_moments`), and masters as remainders of their bf16 parameters (`state_storage`). Some
optimizers update it as it is stored, and round the masters themselves (`FusedAdamW`). Others need fp32, so a batch of
shards at a time is loaded in fp32, updated, and stored. A bf16 moment that a step shrinks by less than 1/256 might
never change; so betas are at most 1 - 1/256 then.

A moving average of the weights may be kept beside the masters, in fp32 (`average_decay`). After n updates

    average ← d · average + (1 - d) · master        d = min(average_decay, (n - 1) / (n + 9))

so it begins with the weights after the first update, and then spans about the last tenth of all updates until that is
1 / (1 - average_decay) (as TensorFlow's ExponentialMovingAverage with `num_updates`, one update later).

Memory: 4 bytes an element for a master (2 with remainders, none where the parameter is fp32), 4 for each moment (2 in
bf16, 1 and 1/128 in FP8), and 4 for an average, on top of the model and its fp32 gradients.
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

from megafp8.numerics.dtypes import state_dtype, sum_dtype
from megafp8.optimizer.base import MatrixUpdate, TensorOptimizer, Update
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.fp8_moments import FIRST, SECOND, Fp8MomentStorage
from megafp8.optimizer.fused_adamw import PARAM, REMAINDER, FusedAdamW
from megafp8.optimizer.layer_norms import Watch
from megafp8.optimizer.matrices import MatrixOptimizer
from megafp8.optimizer.param_groups import ParamRates, is_hidden_matrix, rates_of
from megafp8.optimizer.state_storage import PlainStorage, RemainderStorage, StateStorage
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import Box, FlatShard, ParamSpec, boxes_of, spec_of

BATCH = 1 << 24
"""Elements whose state is fp32 at a time where it is stored in less; or one shard, if it has more."""

AVERAGE = "average"
"""Name in the state of the moving average of weights."""

OUTER_MOMENTUM = "outer_momentum"
"""Name in the state of the momentum of outer steps (`megafp8.optimizer.outer`)."""

State = dict[str, list[tuple[FlatShard, Tensor]]]
"""Shards and their state, flat, by name of the state."""


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


def _moments(shard: FlatShard, update: Update, stored: str, seed: int) -> dict[str, StateStorage]:
    """The moments of a shard, zero; `stored`: the dtype that the config names."""
    dtype = state_dtype(stored, shard.param.dtype)
    if dtype == torch.float8_e4m3fn:
        formats = {name: FIRST if signed else SECOND for name, signed in update.moments.items()}
        return {name: Fp8MomentStorage(shard, name, fmt, seed) for name, fmt in formats.items()}
    device = shard.param.device
    return {name: PlainStorage(torch.zeros(len(shard), dtype=dtype, device=device)) for name in update.moments}


def round_masters(masters: Mapping[Tensor, Tensor]) -> None:
    """Round masters into the parameters that they are mapped to."""
    if masters:
        torch._foreach_copy_([*masters.values()], [*masters])


class MixedPrecisionOptimizer:
    """The optimizer of `config` over `shards`, at most one of each parameter, as a `GradBuffer` gives them.

    Weight decay applies to parameters whose `spec.weight_decay` is set; not to others (norms, biases). `width`: how
    many times as wide the model is as the one of muP. `matrix_group`: ranks which together hold all parts of matrices;
    where updates are of whole matrices, all of them construct this and step at the same time. `reason` says in one line
    which implementations run and why; `step_count` is the number of updates made so far. `seed`: of the noise of FP8
    moments. `released`: parameters whose values, read here for the last time, are in the masters from now on, and which
    have no remainders. `masters`: existing masters, fp32 and flat, updated in place. `outer`: hold the momentum of
    outer steps, too.
    """

    def __init__(
        self,
        shards: Sequence[FlatShard],
        config: OptimizerConfig,
        *,
        device: torch.device,
        seed: int = 0,
        width: float = 1.0,
        released: AbstractSet[nn.Parameter] = frozenset(),
        masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
        matrix_group: ProcessGroup | None = None,
        outer: bool = False,
    ) -> None:
        assert config.average_decay is None or not config.store_param_remainders
        self._average_decay = config.average_decay
        self.shards = list(shards)
        self.released = released
        self._masters: dict[nn.Parameter, Tensor] = {}
        self.storage: dict[Tensor, dict[str, StateStorage]] = {}  # by master
        rounded: list[FlatShard] = []
        in_fp32 = all(sum_dtype(shard.param.dtype) == torch.float32 for shard in shards)
        fits = in_fp32 and config.moments_dtype != "fp8"  # what `Update.updates_stored` is about
        by_update: dict[Update, list[FlatShard]] = {config.update(hidden_matrix=hidden): [] for hidden in (False, True)}
        for shard in shards:
            param, master = shard.param, self._make_master(shard, masters)
            update = config.update(hidden_matrix=is_hidden_matrix(spec_of(param)))
            by_update[update].append(shard)
            self._masters[param], self.storage[master] = master, {}
            storage = self.storage[master]
            average = {} if config.average_decay is None else {AVERAGE: PlainStorage(master.detach().clone())}
            if outer:
                average[OUTER_MOMENTUM] = PlainStorage(torch.zeros_like(master.detach()))
            if config.store_param_remainders and param.dtype == torch.bfloat16 and param not in released:
                storage["master"] = RemainderStorage(shard.view(param.detach()))
                master.data = master.data.new_empty(0)
            elif param.dtype != master.dtype:
                storage["master"] = PlainStorage(master)
                rounded += [] if param in released else [shard]
            storage |= {**_moments(shard, update, config.moments_dtype, seed), **average}
        self._shard_of = {self._masters[shard.param]: shard for shard in shards}
        stored = {update: fits and update.updates_stored(device) for update in by_update}
        in_less = config.store_param_remainders or config.moments_dtype != "fp32"
        self._loads_state = in_less and not all(stored.values())
        assert not (in_less and isinstance(config.chosen, MatrixUpdate))
        self._rounded = {self._masters[shard.param]: shard.view(shard.param.detach()) for shard in rounded}
        rates = partial(
            rates_of,
            weight_decay=config.weight_decay,
            groups=config.groups,
            hidden_learning_rate_scale=config.chosen.hidden_learning_rate_scale(config.learning_rate, width),
        )
        self._optimizers: list[tuple[Update, TensorOptimizer]] = []
        for update, chosen in by_update.items():
            for batch in _batches(chosen, BATCH) if self._loads_state else [chosen]:
                shard_by_master = {self._masters[shard.param]: shard for shard in batch}
                groups = self._param_groups(batch, rates)
                optimizer = (
                    MatrixOptimizer(update, groups, shard_by_master, matrix_group, device)
                    if isinstance(update, MatrixUpdate)
                    else update.make(groups, device, stored=stored[update])
                )
                for master in shard_by_master:
                    if stored[update]:
                        optimizer.state[master] = self._stored_state(master, update)
                    else:  # or loaded by each step
                        optimizer.state[master] = {} if self._loads_state else self._load_moments(master, update)
                self._optimizers.append((update, optimizer))
        by_others = [shard for update, chosen in by_update.items() if not stored[update] for shard in chosen]
        left = {self._masters[shard.param] for shard in by_others}
        self._rounded_by_step = {master: param for master, param in self._rounded.items() if master in left}
        self._boxes: dict[frozenset[str], list[tuple[FlatShard, list[Box]]]] = {}  # those of tensors with these names
        self.reason = "; ".join(update.describe(device, stored=stored[update]) for update in by_update)
        self.step_count = 0

    def _param_groups(
        self, shards: Sequence[FlatShard], rates_of_spec: Callable[[ParamSpec], ParamRates]
    ) -> list[dict[str, Any]]:
        """Torch's parameter groups of the masters of `shards`, one for each pair of rates."""
        alike: dict[ParamRates, list[Tensor]] = {}
        for shard in shards:
            alike.setdefault(rates_of_spec(spec_of(shard.param)), []).append(self._masters[shard.param])
        alike = alike or {ParamRates(1.0, 0.0): []}
        return [
            {"params": masters, "weight_decay": rates.weight_decay, "lr_scale": rates.learning_rate_scale}
            for rates, masters in alike.items()
        ]

    def _make_master(self, shard: FlatShard, given: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The fp32 tensor that the optimizer updates; it shares the memory of a parameter that is fp32 already."""
        param = shard.param
        master = given.get(param)
        if master is None:
            master = shard.view(param.detach()).to(sum_dtype(param.dtype), copy=param in self.released)
        master.grad = gradient_of(shard)
        return master

    @property
    def step_count(self) -> int:
        """Updates made so far; an update may depend on it, as Adam's bias correction does, so checkpoints hold it."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        for _, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["step"] = count  # where apex has it; torch has it in the state
                for master in group["params"]:
                    step = torch.full((), float(count), dtype=torch.float32, device=master.device)
                    optimizer.state[master]["step"] = step

    def master_of(self, shard: FlatShard) -> Tensor:
        """The fp32 values of a shard, flat, live."""
        return self._masters[shard.param].detach()

    def load_master(self, shard: FlatShard) -> Tensor:
        """The fp32 values of a shard, flat: live, or a copy where they are stored as remainders."""
        storage = self.storage[self._masters[shard.param]].get("master")
        return storage.load() if isinstance(storage, RemainderStorage) else self.master_of(shard)

    @torch.no_grad()
    def store_master(self, shard: FlatShard, values: Tensor) -> None:
        """Set the master of a shard to `values`, fp32 and flat, and round it into the parameter."""
        master = self._masters[shard.param]
        storage = self.storage[master].get("master")
        if isinstance(storage, RemainderStorage):
            storage.store(values, self._step_count)
            return
        master.detach().copy_(values)
        round_masters({key: param for key, param in self._rounded.items() if key is master})

    def released_values(self) -> list[tuple[FlatShard, Tensor]]:
        """The shards of released parameters with their values, flat, in the parameters' dtype.

        The masters themselves where that is their dtype, so that a checkpoint loads into them; otherwise copies.
        """
        released = [shard for shard in self.shards if shard.param in self.released]
        return [(shard, self.master_of(shard).to(shard.param.dtype)) for shard in released]

    def state_tensors(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state of the shard of `param`, flat: the fp32 `master` if separate, its moments by name, `average`.

        Live tensors, or copies on the host (`StateStorage.checkpoint_tensor`).
        """
        storage = self.storage[self._masters[param]]
        return {key: part.checkpoint_tensor() for key, part in storage.items()}

    def stored_tensors(self, shard: FlatShard) -> dict[str, tuple[Tensor, ...]]:
        """The live tensors that hold a shard's `master` and moments between steps."""
        stored = {key: storage.tensors for key, storage in self.storage[self._masters[shard.param]].items()}
        if shard.param in self.released:  # also where it is fp32
            stored["master"] = (self.master_of(shard),)
        return stored

    def state(self) -> State:
        """`state_tensors` of all shards, by their names. A checkpoint loads into them, then calls `restore`."""
        state: State = {}
        for shard in self.shards:
            for key, tensor in self.state_tensors(shard.param).items():
                state.setdefault(key, []).append((shard, tensor))
        return state

    @torch.no_grad()
    def restore(self, state: State, step_count: int) -> None:
        """Take over a loaded `state` after `step_count` updates, and round the masters into the parameters."""
        self.step_count = step_count
        for key, values in state.items():
            for shard, tensor in values:
                storage, gradient = self.storage[self._masters[shard.param]][key], gradient_of(shard)
                storage.store(tensor.to(gradient), step_count)
        round_masters(self._rounded)

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a `skip`: torch's fused optimizers do. Storing state again may round it again."""
        fused = (getattr(optimizer, "_step_supports_amp_scaling", False) for _, optimizer in self._optimizers)
        return not self._loads_state and all(fused)

    @property
    def takes_factor(self) -> bool:
        """Whether `step` takes a `factor`."""
        return all(isinstance(optimizer, FusedAdamW) for _, optimizer in self._optimizers)

    def step(
        self, lr: float, *, factor: Tensor | None = None, skip: Tensor | None = None, watch: Watch | None = None
    ) -> None:
        """One update from the gradients in the buffer, with learning rate `lr` times the scale of each group.

        `factor`: a scalar on the device that multiplies the gradients, which stay as they are in the buffer. `skip`: a
        bool scalar on the device; where it is true nothing changes, and `forget_step` must follow. `watch`: update in
        batches, each in a context that it makes.
        """
        assert skip is None or self.skips_on_device
        assert factor is None or self.takes_factor
        for update, optimizer in self._optimizers:
            if isinstance(optimizer, FusedAdamW):
                optimizer.count, optimizer.factor, optimizer.skip = self._step_count + 1, factor, skip
            elif skip is not None:
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # torch's name, from gradient scaling
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            if isinstance(optimizer, MatrixOptimizer):
                optimizer.step(watch=watch)
            elif self._loads_state:
                self._load_step_store(update, optimizer, watch)
            elif watch is None:
                optimizer.step()
            else:
                self._step_in_batches(optimizer, watch)
        self._step_count += 1
        round_masters(self._rounded_by_step)

    @torch.no_grad()
    def multiply_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of weights in their masters, and round these into the parameters.

        `factors`: by global name, a factor for each row; names that this rank has nothing of are ignored.
        """
        names = frozenset(factors)
        if names not in self._boxes:  # there are many experts
            boxes_by_shard = (
                (shard, [box for box in boxes_of(shard) if box.piece.name in names]) for shard in self.shards
            )
            self._boxes[names] = [(shard, boxes) for shard, boxes in boxes_by_shard if boxes]
        for shard, boxes in self._boxes[names]:
            master = self._masters[shard.param]
            storage = self.storage[master].get("master")
            remainder = storage if isinstance(storage, RemainderStorage) else None
            values = master.detach() if remainder is None else remainder.load()
            for box in boxes:
                rows_n = factors[box.piece.name].narrow(0, box.offset[0], box.shape[0]).to(values.dtype)
                values[box.start : box.end].view(*box.shape[:1], -1).mul_(rows_n.unsqueeze(1))
            if remainder is not None:
                remainder.store(values, self._step_count)
            elif storage is not None and shard.param not in self.released:
                shard.view(shard.param.detach()).copy_(values)

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

    def _stored_state(self, master: Tensor, update: Update) -> dict[str, Tensor]:
        """The live tensors that `FusedAdamW` updates."""
        storage = self.storage[master]
        state = {key: storage[key].tensors[0] for key in update.moments}
        remainder = storage.get("master")
        if isinstance(remainder, RemainderStorage):
            shard = self._shard_of[master]
            return state | {PARAM: shard.view(shard.param.detach()), REMAINDER: remainder.tensors[0]}
        return state | ({PARAM: self._rounded[master]} if master in self._rounded else {})

    def _load_moments(self, master: Tensor, update: Update) -> dict[str, Tensor]:
        return {key: self.storage[master][key].load().to(master.dtype) for key in update.moments}

    def _watched(self, masters: Sequence[Tensor], watch: Watch | None) -> AbstractContextManager[None]:
        return nullcontext() if watch is None else watch([(self._shard_of[master], master) for master in masters])

    def _remainders(self, masters: Sequence[Tensor]) -> dict[Tensor, RemainderStorage]:
        """Storage of those masters that are stored as remainders."""
        stored = ((master, self.storage[master].get("master")) for master in masters)
        return {master: storage for master, storage in stored if isinstance(storage, RemainderStorage)}

    @torch.no_grad()
    def _step_in_batches(self, optimizer: TensorOptimizer, watch: Watch) -> None:
        """`optimizer.step()` of up to `BATCH` elements at a time."""
        groups = [group["params"] for group in optimizer.param_groups]
        shards = [self._shard_of[master] for masters in groups for master in masters]
        for batch in _batches(shards, BATCH):
            chosen = [self._masters[shard.param] for shard in batch]
            in_batch = set(chosen)
            for group, masters in zip(optimizer.param_groups, groups):
                group["params"] = [master for master in masters if master in in_batch]
                group["step"] = self._step_count  # apex counts its calls
            remainders = self._remainders(chosen)
            for master, storage in remainders.items():
                master.data = storage.load()
            with self._watched(chosen, watch):
                optimizer.step()
                for master, storage in remainders.items():
                    master.data.copy_(storage.load())
            for master in remainders:
                master.data = master.data.new_empty(0)
        for group, masters in zip(optimizer.param_groups, groups):
            group["params"], group["step"] = masters, self._step_count + 1

    @torch.no_grad()
    def _load_step_store(self, update: Update, optimizer: TensorOptimizer, watch: Watch | None) -> None:
        """`optimizer.step()` with state that is loaded in fp32 and then stored."""
        state = optimizer.state
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        remainders = self._remainders(masters)
        for master in masters:
            state[master] |= self._load_moments(master, update)
            if master in remainders:
                master.data = remainders[master].load()
        with self._watched(masters, watch):
            optimizer.step()
        for master in masters:
            for key in update.moments:
                self.storage[master][key].store(state[master].pop(key), self._step_count)
            if master in remainders:
                remainders[master].store(master.data, self._step_count)
                master.data = master.data.new_empty(0)
