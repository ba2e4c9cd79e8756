"""Mixed-precision optimizer: fp32 masters for a bf16 model, storage of state, batches, and a moving average.

A bf16 weight has 8 significant bits, so rounding would lose an update below 1/256 of the weight. Each parameter that is
not fp32 therefore has an fp32 master copy. Moments and updates are fp32, and the model gets the rounded result. fp32
parameters are their own masters. So are float64 parameters, and their gradients and moments are float64 too: "fp32" in
this file means `megafp8.numerics.dtypes.sum_dtype`.

Each kind of update (`megafp8.optimizer.base.Update`) builds optimizers over the masters, as PyTorch's optimizers are
built over parameters. The gradients are set once, as views of the gradient buffer. Masters and moments exist before the
first step, so that a checkpoint can always be loaded into them.

The optimizer works on flat shards of the parameters and holds only their state. A shard is a whole parameter or, under
ZeRO, the part that this rank owns. An elementwise update does not notice the difference; other updates assemble the
matrices.

A parameter may be released. Its values are then only in the masters, and code that needs rounded values takes them from
there (FP8 parameters, `megafp8.parallel.data.fp8_weight_shards`; FSDP, `megafp8.parallel.data.fsdp`).

State may be stored with less precision between steps (`StateStorage`): moments in bf16, as in DeepSeek-V3
(arXiv:2412.19437, section 3.3.3), or in FP8 (`fp8_moments`), and masters as remainders of their bf16 parameters
(`state_storage`). Some optimizers update the stored form and round the masters themselves (`FusedOptimizer`). Other
optimizers need fp32, so one batch of shards at a time is loaded in fp32, updated, and stored. A bf16 moment that a step
shrinks by less than 1/256 might never change, so betas are then limited to 1 - 1/256.

A fraction of the state may be in host memory between steps (`optimizer.offload`). A shard may then be divided in two,
and a step updates each piece of the offloaded shards as a batch (`megafp8.optimizer.offload`). Masters that other code
reads on the device stay there: masters of released parameters, and fp32 parameters, which are their own masters.

An fp32 moving average of the weights may be kept in addition to the masters (`average_decay`). After n updates

    average ← d · average + (1 - d) · master        d = min(average_decay, (n - 1) / (n + 9))

so it begins with the weights after the first update. It then spans about the last tenth of all updates, until that
tenth reaches 1 / (1 - average_decay) updates. (TensorFlow's ExponentialMovingAverage with `num_updates` does the same,
one update later.)

Memory per element: 4 bytes for a master (2 with remainders, none if the parameter is fp32), 4 for each moment (2 in
bf16, 1 and 1/128 in FP8), and 4 for an average, in addition to the model and its fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.numerics.dtypes import state_dtype, sum_dtype
from megafp8.numerics.moments import FIRST, SECOND
from megafp8.optimizer.base import MatrixUpdate, TensorOptimizer, Update
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.fp8_moments import Fp8MomentStorage
from megafp8.optimizer.fused import PARAM, REMAINDER, FusedOptimizer
from megafp8.optimizer.layer_norms import Watch
from megafp8.optimizer.matrices import MatrixOptimizer
from megafp8.optimizer.offload import OffloadedShard, OffloadedState, Piece, offloaded_elements
from megafp8.optimizer.param_groups import ParamRates, is_hidden_matrix, rates_of
from megafp8.optimizer.state_storage import PlainStorage, RemainderStorage, StateStorage
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import Box, FlatShard, ParamSpec, boxes_of, spec_of

BATCH = 1 << 24
"""Number of elements loaded in fp32 at a time if state is stored with less precision. A larger shard is one batch."""

AVERAGE = "average"
"""State name of the moving average of weights."""

OUTER_MOMENTUM = "outer_momentum"
"""State name of the momentum of outer steps (`megafp8.optimizer.outer`)."""

State = dict[str, list[tuple[FlatShard, Tensor]]]
"""Shards and their flat state tensors, by state name."""

_META = torch.device("meta")


class _LiveShard(NamedTuple):
    """Shard with its state on the device, where a step updates it.

    Attributes:
        shard: Elements.
        storage: State by name.
        rounded: Elements of the parameter, into which the master is rounded; None if the parameter has no other values.
    """

    shard: FlatShard
    storage: Mapping[str, StateStorage]
    rounded: Tensor | None


class _Batch(NamedTuple):
    """Shards that one optimizer updates together.

    Attributes:
        update: Rule of the update.
        optimizer: Optimizer of the masters.
        rounded: Masters that the optimizer does not round, and the parameters into which they are rounded.
        piece: Piece of offloaded state with these shards; None if their state stays on the device.
    """

    update: Update
    optimizer: TensorOptimizer
    rounded: Mapping[Tensor, Tensor]
    piece: Piece | None


def _part_of(kept: Mapping[nn.Parameter, tuple[int, Tensor]], shard: FlatShard) -> Tensor | None:
    """Return the elements of `shard` in the master of its parameter in `kept`, or None if there is none."""
    if shard.param not in kept:
        return None
    start, master = kept[shard.param]
    return master[shard.start - start : shard.end - start]


def _batches(shards: Sequence[FlatShard], elements: int) -> list[list[FlatShard]]:
    """Divide `shards`, in order, into lists of up to `elements` elements. A larger shard is one list."""
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
    """Return the moments of a shard on the meta device. `stored` is the config's name of their dtype."""
    dtype = state_dtype(stored, shard.param.dtype)
    if dtype == torch.float8_e4m3fn:
        formats = {name: FIRST if signed else SECOND for name, signed in update.moments.items()}
        return {name: Fp8MomentStorage(shard, fmt, seed, _META) for name, fmt in formats.items()}
    return {name: PlainStorage(torch.empty(len(shard), dtype=dtype, device=_META)) for name in update.moments}


def _allocated(storage: StateStorage, start: int, end: int, device: torch.device) -> StateStorage:
    """Return the storage of elements `[start, end)` on `device`, initially zero."""
    like = zip(storage.tensors, storage.blocks, strict=True)
    return storage.part(
        start, end, [torch.zeros(-(-(end - start) // block), dtype=x.dtype, device=device) for x, block in like]
    )


def round_masters(masters: Mapping[Tensor, Tensor]) -> None:
    """Round masters into their parameters; `masters` maps masters to parameters."""
    if masters:
        torch._foreach_copy_([*masters.values()], [*masters])


class MixedPrecisionOptimizer:
    """Optimizer of flat shards of parameters, with fp32 masters.

    Weight decay applies only to parameters with `spec.weight_decay`, which norms and biases do not have.

    Args:
        shards: Shards to update, at most one of each parameter, as a `GradBuffer` provides them.
        config: Optimizer section of the config.
        device: Device of the parameters.
        seed: Seed of the noise of FP8 moments.
        width: Width of the model as a multiple of muP's base width.
        released: Parameters whose values live only in the masters from now on. Their values are read here for the last
            time. They have no remainders.
        masters: Existing masters, fp32 and flat, which are updated in place.
        matrix_group: Ranks that together hold all parts of matrices. If updates are of whole matrices, all these ranks
            must construct the optimizer and step at the same time.
        outer: Whether to hold the momentum of outer steps.

    Attributes:
        shards: `shards`, of which one may be divided in two (`optimizer.offload`).
        storage: State of each of them between steps by name. Copies from the host may still be running.
        reason: One line that says which implementations run, and why.
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
        self.released = released
        self.shards: list[FlatShard] = []
        self.storage: dict[FlatShard, dict[str, StateStorage]] = {}
        self._masters: dict[FlatShard, Tensor] = {}
        self._live: dict[Tensor, _LiveShard] = {}
        kept: dict[nn.Parameter, tuple[int, Tensor]] = {}
        offloaded: list[OffloadedShard] = []
        in_fp32 = all(sum_dtype(shard.param.dtype) == torch.float32 for shard in shards)
        by_update: dict[Update, list[Tensor]] = {config.update(hidden_matrix=hidden): [] for hidden in (False, True)}
        for shard, count in zip(shards, offloaded_elements(shards, config.offload), strict=True):
            param, n = shard.param, len(shard)
            update = config.update(hidden_matrix=is_hidden_matrix(spec_of(param)))
            whole = _moments(shard, update, config.moments_dtype, seed)
            if param in masters or param in released or param.dtype == sum_dtype(param.dtype):
                self._masters[shard] = self._make_master(shard, masters)
                kept[param] = shard.start, self._masters[shard]
            elif config.store_param_remainders and param.dtype == torch.bfloat16:
                remainder_n = torch.empty(n, dtype=torch.int16, device=_META)
                whole = {"master": RemainderStorage(shard.view(param.detach()), remainder_n), **whole}
            else:
                whole = {"master": PlainStorage(torch.empty(n, dtype=sum_dtype(param.dtype), device=_META)), **whole}
            if count:
                part = shard if count == n else FlatShard(param, shard.start, shard.start + count)
                offloaded.append(OffloadedShard(part, whole))
            if count < n or not n:
                part = shard if not count else FlatShard(param, shard.start + count, shard.end)
                self._add(part, {key: _allocated(x, count, n, param.device) for key, x in whole.items()}, kept)
                live = self._make_live(part, self.storage[part], kept)
                by_update[update].append(live)
                if config.average_decay is not None:
                    self.storage[part][AVERAGE] = PlainStorage(live.detach().clone())
                if outer:
                    self.storage[part][OUTER_MOMENTUM] = PlainStorage(torch.zeros_like(gradient_of(part)))
        self._offload = OffloadedState(offloaded, device) if offloaded else None
        for one in offloaded:
            assert self._offload is not None
            self._add(one.shard, self._offload.storage[one.shard], kept)
        in_less = config.store_param_remainders or config.moments_dtype != "fp32"
        stored = {update: in_fp32 and update.updates_stored(device, in_less=in_less) for update in by_update}
        matrix_updates = {update for update in by_update if isinstance(update, MatrixUpdate)}
        assert not (matrix_updates and (config.store_param_remainders or config.moments_dtype == "fp8"))
        assert not (offloaded and (matrix_updates or outer or config.average_decay is not None))
        self._loads_state = in_less and not all(stored[update] for update in by_update if update not in matrix_updates)
        rates = partial(
            rates_of,
            weight_decay=config.weight_decay,
            groups=config.groups,
            hidden_learning_rate_scale=config.chosen.hidden_learning_rate_scale(config.learning_rate, width),
            score_learning_rate_scale=1 / width,  # matrix updates leave these weights to AdamW
        )
        self._batches: list[_Batch] = []

        def add_batch(update: Update, batch: Sequence[Tensor], piece: Piece | None = None) -> None:
            loads_state = self._loads_state and update not in matrix_updates
            groups = self._param_groups(batch, rates)
            optimizer = (
                MatrixOptimizer(update, groups, {x: self._live[x].shard for x in batch}, matrix_group, device)
                if isinstance(update, MatrixUpdate)
                else update.make(groups, device, stored=stored[update])
            )
            for master in batch:
                if update in matrix_updates:
                    optimizer.state[master] = self._live_moments(master, update)
                elif stored[update]:
                    optimizer.state[master] = self._stored_state(master, update)
                else:  # each step loads it if `loads_state`
                    optimizer.state[master] = {} if loads_state else self._load_moments(master, update)
            by_caller = {} if stored[update] else {master: self._live[master].rounded for master in batch}
            rounded = {master: param for master, param in by_caller.items() if param is not None}
            self._batches.append(_Batch(update, optimizer, rounded, piece))

        for piece in () if self._offload is None else self._offload.pieces:
            add_batch(config.chosen, [self._make_live(part, storage, kept) for part, storage in piece.shards], piece)
        for update, chosen in by_update.items():
            if self._loads_state and update not in matrix_updates:
                master_of = {self._live[master].shard: master for master in chosen}
                for batch in _batches([*master_of], BATCH):
                    add_batch(update, [master_of[shard] for shard in batch])
            else:
                add_batch(update, chosen)
        self._boxes: dict[frozenset[str], list[tuple[FlatShard, list[Box]]]] = {}  # by tensor names
        self.reason = "; ".join(update.describe(device, stored=stored[update]) for update in by_update)
        if offloaded:
            self.reason += f"; the state of {sum(len(x.shard) for x in offloaded):,} weights is in host memory"
        self.step_count = 0

    def _add(
        self, shard: FlatShard, storage: dict[str, StateStorage], kept: Mapping[nn.Parameter, tuple[int, Tensor]]
    ) -> None:
        """Add a shard with its initial state: moments are zero, and the master is equal to the parameter.

        `kept` are the masters that stay on the device, each with the position of its first element in the parameter.
        """
        param = shard.param
        master = _part_of(kept, shard)
        if master is not None:
            self._masters[shard] = master
            if param.dtype != master.dtype:
                storage = {"master": PlainStorage(master), **storage}
        elif isinstance(storage["master"], PlainStorage):
            (self._masters[shard],) = storage["master"].tensors
            self._masters[shard].copy_(shard.view(param.detach()))
        self.shards.append(shard)
        self.storage[shard] = storage

    def _make_live(
        self,
        shard: FlatShard,
        storage: Mapping[str, StateStorage],
        kept: Mapping[nn.Parameter, tuple[int, Tensor]],
    ) -> Tensor:
        """Return the tensor of a shard that an optimizer updates, and record its state `storage` on the device.

        The tensor is the master; it is empty between steps if the master is stored as a remainder.
        """
        param, stored, gradient = shard.param, storage.get("master"), gradient_of(shard)
        master = _part_of(kept, shard)
        if master is None:
            assert stored is not None
            master = gradient.detach() if isinstance(stored, RemainderStorage) else stored.tensors[0]
        master.grad = gradient
        if isinstance(stored, RemainderStorage):
            master.data = master.data.new_empty(0)
        rounds = param.dtype != master.dtype and param not in self.released and not isinstance(stored, RemainderStorage)
        self._live[master] = _LiveShard(shard, storage, shard.view(param.detach()) if rounds else None)
        return master

    def _param_groups(
        self, masters: Sequence[Tensor], rates_of_spec: Callable[[ParamSpec], ParamRates]
    ) -> list[dict[str, Any]]:
        """Return PyTorch parameter groups of live masters, one for each pair of rates."""
        alike: dict[ParamRates, list[Tensor]] = {}
        for master in masters:
            alike.setdefault(rates_of_spec(spec_of(self._live[master].shard.param)), []).append(master)
        alike = alike or {ParamRates(1.0, 0.0): []}
        return [
            {"params": masters, "weight_decay": rates.weight_decay, "lr_scale": rates.learning_rate_scale}
            for rates, masters in alike.items()
        ]

    def _make_master(self, shard: FlatShard, given: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Return the fp32 values of a shard that stay on the device. They share the memory of an fp32 parameter."""
        param = shard.param
        if param in given:
            return given[param]
        return shard.view(param.detach()).to(sum_dtype(param.dtype), copy=param in self.released)

    @property
    def step_count(self) -> int:
        """Number of updates so far. Checkpoints hold it, because updates may depend on it (Adam's bias correction)."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        for batch in self._batches:
            optimizer = batch.optimizer
            for group in optimizer.param_groups:
                group["step"] = count  # apex keeps the count here; torch keeps it in the state
                for master in group["params"]:
                    step = torch.full((), float(count), dtype=torch.float32, device=master.device)
                    optimizer.state[master]["step"] = step

    def master_of(self, shard: FlatShard) -> Tensor:
        """Return the live, flat fp32 values of a shard, which are on the device unless they are offloaded."""
        return self._masters[shard].detach()

    def load_master(self, shard: FlatShard) -> Tensor:
        """Return the flat fp32 values of a shard: live, or a copy if they are stored as remainders."""
        storage = self.storage[shard].get("master")
        return storage.load() if isinstance(storage, RemainderStorage) else self.master_of(shard)

    @torch.no_grad()
    def store_master(self, shard: FlatShard, values: Tensor) -> None:
        """Set the master of a shard to `values`, fp32 and flat, and round it into the parameter."""
        storage = self.storage[shard].get("master")
        if isinstance(storage, RemainderStorage):
            storage.store(values, self._step_count)
            return
        self._masters[shard].copy_(values)
        self._round([shard])

    def _round(self, shards: Iterable[FlatShard]) -> None:
        """Round the masters of `shards` into their parameters, unless the parameters have no other values."""
        separate = ((shard, self.storage[shard].get("master")) for shard in shards if shard.param not in self.released)
        round_masters(
            {self._masters[x]: x.view(x.param.detach()) for x, master in separate if isinstance(master, PlainStorage)}
        )

    def released_values(self) -> list[tuple[FlatShard, Tensor]]:
        """Return the shards of released parameters with their flat values in the parameters' dtype.

        The values are the masters themselves if these have that dtype, so that a checkpoint loads into them. Otherwise
        they are copies.
        """
        released = [shard for shard in self.shards if shard.param in self.released]
        return [(shard, self.master_of(shard).to(shard.param.dtype)) for shard in released]

    def prefetch(self) -> None:
        """Start to copy offloaded state to the device. Call this before a step, as early as the host allows."""
        if self._offload is not None:
            self._offload.prefetch()

    def _wait(self) -> None:
        """Wait until offloaded state on the host is complete."""
        if self._offload is not None:
            self._offload.wait()

    def stored_tensors(self, shard: FlatShard) -> dict[str, tuple[Tensor, ...]]:
        """Return the live tensors that hold a shard's `master` and moments between steps, on the host if offloaded."""
        self._wait()
        stored = {key: storage.tensors for key, storage in self.storage[shard].items()}
        if shard.param in self.released:  # even if it is fp32
            stored["master"] = (self.master_of(shard),)
        return stored

    def state(self) -> State:
        """Return the flat state of all shards by name: `master` if it is separate, moments, `average`.

        The tensors are live, or copies on the host (`StateStorage.checkpoint_tensor`). They do not change before the
        next step. A checkpoint loads into them, then calls `restore`.
        """
        self._wait()
        state: State = {}
        for shard in self.shards:
            for key, storage in self.storage[shard].items():
                state.setdefault(key, []).append((shard, storage.checkpoint_tensor()))
        return state

    @torch.no_grad()
    def restore(self, state: State, step_count: int) -> None:
        """Store a loaded `state` after `step_count` updates, and round the masters into the parameters."""
        self._wait()
        self.step_count = step_count
        for key, values in state.items():
            for shard, tensor in values:
                self.storage[shard][key].store(tensor.to(gradient_of(shard).dtype), step_count)
        self._round(self.shards)

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a `skip`, as fused optimizers do.

        It does not if each step loads and stores state, because storing may round the state again.
        """
        fused = (getattr(batch.optimizer, "_step_supports_amp_scaling", False) for batch in self._batches)
        return not self._loads_state and all(fused)

    @property
    def takes_factor(self) -> bool:
        """Whether `step` takes a `factor`."""
        return all(isinstance(batch.optimizer, FusedOptimizer) for batch in self._batches)

    def step(
        self, lr: float, *, factor: Tensor | None = None, skip: Tensor | None = None, watch: Watch | None = None
    ) -> None:
        """Update the weights once from the gradients in the buffer.

        Args:
            lr: Learning rate, which is multiplied by the scale of each group.
            factor: Scalar on the device by which the update multiplies the gradients. The buffer does not change.
            skip: Bool scalar on the device. If it is true, nothing changes, and the caller must call `forget_step`.
            watch: Function that makes a context for each batch of the update. If given, the update runs in batches.
        """
        assert skip is None or self.skips_on_device
        assert factor is None or self.takes_factor
        for update, optimizer, rounded, piece in self._batches:
            if isinstance(optimizer, FusedOptimizer):
                optimizer.count, optimizer.factor, optimizer.skip = self._step_count + 1, factor, skip
            elif skip is not None:
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # torch's name, from gradient scaling
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            with nullcontext() if piece is None or self._offload is None else self._offload.on_device(piece):
                if isinstance(optimizer, MatrixOptimizer):
                    optimizer.step(watch=watch)
                elif self._loads_state:
                    self._load_step_store(update, optimizer, watch)
                elif watch is None:
                    optimizer.step()
                else:
                    self._step_in_batches(optimizer, watch)
                round_masters(rounded)
        self._step_count += 1

    @torch.no_grad()
    def multiply_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of weights in their masters, and round the masters into the parameters.

        `factors` has a factor for each row of a tensor, by global name. Names of tensors that this rank does not hold
        are ignored.
        """
        names = frozenset(factors)
        if names not in self._boxes:  # cached, because there may be many experts
            boxes_by_shard = (
                (shard, [box for box in boxes_of(shard) if box.piece.name in names]) for shard in self.shards
            )
            self._boxes[names] = [(shard, boxes) for shard, boxes in boxes_by_shard if boxes]
        for shard, boxes in self._boxes[names]:
            storage = self.storage[shard].get("master")
            remainder = storage if isinstance(storage, RemainderStorage) else None
            values = self.load_master(shard)
            for box in boxes:
                rows_n = factors[box.piece.name].narrow(0, box.offset[0], box.shape[0]).to(values.dtype)
                values[box.start : box.end].view(*box.shape[:1], -1).mul_(rows_n.unsqueeze(1))
            if remainder is not None:
                remainder.store(values, self._step_count)
            elif storage is not None and shard.param not in self.released:
                shard.view(shard.param.detach()).copy_(values)

    @torch.no_grad()
    def average_weights(self) -> None:
        """Add the weights to their moving average after an update, if there is an average."""
        if self._average_decay is not None and self.shards:
            n = self._step_count
            decay = min(self._average_decay, (n - 1) / (n + 9))
            torch._foreach_lerp_(*self._averages_and_masters(), 1 - decay)

    @torch.no_grad()
    def restart_average(self) -> None:
        """Restart the moving average with the current weights."""
        for average, master in zip(*self._averages_and_masters(), strict=True):
            average.copy_(master)

    def _averages_and_masters(self) -> tuple[list[Tensor], list[Tensor]]:
        masters = [self.master_of(shard) for shard in self.shards]
        return [self.storage[shard][AVERAGE].load() for shard in self.shards], masters

    def forget_step(self) -> None:
        """Decrement the step count, because the device has skipped the last step."""
        self._step_count -= 1

    def _stored_state(self, master: Tensor, update: Update) -> dict[str, StateStorage | Tensor]:
        """Return the state that `FusedOptimizer` updates."""
        shard, storage, rounded = self._live[master]
        remainder = storage.get("master")
        state: dict[str, StateStorage | Tensor] = {key: storage[key] for key in update.moments}
        if isinstance(remainder, RemainderStorage):
            return state | {PARAM: shard.view(shard.param.detach()), REMAINDER: remainder.tensors[0]}
        return state if rounded is None else state | {PARAM: rounded}

    def _live_moments(self, master: Tensor, update: Update) -> dict[str, Tensor]:
        """Return the live tensors of moments that are stored as one tensor."""
        return {key: self._live[master].storage[key].tensors[0] for key in update.moments}

    def _load_moments(self, master: Tensor, update: Update) -> dict[str, Tensor]:
        return {key: self._live[master].storage[key].load().to(master.dtype) for key in update.moments}

    def _watched(self, masters: Sequence[Tensor], watch: Watch | None) -> AbstractContextManager[None]:
        return nullcontext() if watch is None else watch([(self._live[master].shard, master) for master in masters])

    def _remainders(self, masters: Sequence[Tensor]) -> dict[Tensor, RemainderStorage]:
        """Return the storage of the masters that are stored as remainders."""
        stored = ((master, self._live[master].storage.get("master")) for master in masters)
        return {master: storage for master, storage in stored if isinstance(storage, RemainderStorage)}

    @torch.no_grad()
    def _step_in_batches(self, optimizer: TensorOptimizer, watch: Watch) -> None:
        """Run `optimizer.step()` with up to `BATCH` elements at a time."""
        groups = [group["params"] for group in optimizer.param_groups]
        master_of = {self._live[master].shard: master for masters in groups for master in masters}
        for batch in _batches([*master_of], BATCH):
            chosen = [master_of[shard] for shard in batch]
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
        """Load state in fp32, run `optimizer.step()`, and store the state."""
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
                self._live[master].storage[key].store(state[master].pop(key), self._step_count)
            if master in remainders:
                remainders[master].store(master.data, self._step_count)
                master.data = master.data.new_empty(0)
