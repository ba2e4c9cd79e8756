"""Strategies of data parallelism: the state that each data-parallel rank holds, and the data that ranks send in a step.

                    weights             gradients           optimizer state     sent in a step
    Replicated      all                 all                 all                 sums of gradients
    Zero1           all                 all, then a shard   a shard             sums of a shard; updated weights
    FullySharded    a shard             a shard             a shard             in each micro-batch: weights of each
                    (experts on one rank: as Zero1)                             block, twice; sums of a shard
                                                            with replicas: a    once, between replicas: as Zero1, of
                                                            slice of the shard  the shard

The training loop, checkpoints, optimizer and consistency check use only the interface (`DataParallelStrategy`).

*FP8 weights* (`fp8.param_gather`). If a rank updates a shard of the weights, it can quantize the shard, and ranks
gather FP8 data: half the bytes, bitwise equal, and nothing to quantize in between (`fp8_weight_shards`). This applies
to the weights of FP8 layers with one scale per tensor, and to experts that all have such scales. Embeddings, the output
layer, norms, biases and high-precision layers are gathered as values. All other readers of such a weight read the fp32
masters: a checkpoint's `model.<name>` is each rank's shard of the masters, rounded, so it equals the checkpoint of any
other run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.linear.group_state import GroupState
from megafp8.linear.state import LinearState
from megafp8.numerics.formats import Format
from megafp8.parallel.collectives import size
from megafp8.parallel.data.buckets import Slot
from megafp8.parallel.data.fp8_weight_gather import Fp8WeightGather, GatheredWeight, open_transport
from megafp8.parallel.data.fp8_weight_shards import WeightShard, WeightShards
from megafp8.parallel.data.fsdp import RowShard, ShardedStages
from megafp8.parallel.data.grad_buffer import GradBuffer
from megafp8.parallel.data.param_buffer import ParamBuffer
from megafp8.parallel.sharding import FlatShard, spec_of

Fp8Weights = Mapping[nn.Parameter, tuple[LinearState | GroupState, Format]]
"""Weights that are gathered in FP8, with their layers and formats."""


class DataParallelStrategy:
    """Division of the parameters, gradients and optimizer state of this rank's stages between data-parallel ranks.

    One step calls `gather`, `clear`, then the backward passes, with `start_overlap` before or between them (or never),
    then `finish`, the update of `shards` by their gradients in `owned`, and `end_step`.

    Attributes:
        sharded: Whether each rank of `group` has a shard of `shards`; otherwise every rank has all of them.
        param_axis: Axis over which parameters that have values are replicated; empty if none.
        state_axis: Axis over which optimizer state is replicated; empty if none.
        weights: Buffers of weights that are gathered once per step.
        params: Parameters of this rank.
        trained: Parameters that are not frozen.
        tied: Parameters that stages share.
        fp8_weights: Parameters that exist only in FP8.
        group: Data-parallel ranks.
        expert_group: Ranks that hold the same experts, if they differ from `group`.
        gradients: Flat fp32 buffers of all gradients, before sums over ranks.
        shards: Parts of parameters that this rank updates.
        owned: Gradients of `shards`, fp32, valid after `finish`.
    """

    sharded: ClassVar[bool] = True
    param_axis: ClassVar[str] = "data"
    state_axis: ClassVar[str] = ""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        buffers: Sequence[GradBuffer | ShardedStages],
        *,
        tied: Sequence[nn.Parameter],
        fp8_weights: Fp8Weights,
        group: ProcessGroup | None,
        expert_group: ProcessGroup | None,
        amax_group: ProcessGroup | None,
        overlaps_gather: bool,
    ) -> None:
        """Collect the shards and gradients of `buffers`.

        Each of `buffers` holds gradients of some of `params`, and sums them over its own group of ranks. All ranks of a
        stage run the same backward passes, so ranks in several groups start the sums in the same order. `amax_group`
        are all ranks with shards of the same weights. With `overlaps_gather`, modules wait for their own weights;
        otherwise `gather` waits for all. The other arguments are described under the attributes.
        """
        self.params, self.trained = list(params), [param for param in params if param.requires_grad]
        self.tied, self.fp8_weights, self.group, self.expert_group = tied, fp8_weights, group, expert_group
        self._buffers, self._amax_group, self._overlaps_gather = buffers, amax_group, overlaps_gather
        self.weights: list[ParamBuffer] = []
        self._weight_shards: WeightShards | None = None
        self._updated = False  # whether weights have changed since they were gathered
        self.gradients = [buffer.flat for buffer in buffers]
        self.shards = [shard for buffer in buffers for shard in buffer.shards]
        self.owned = [owned for buffer in buffers for owned in buffer.owned]

    def clear(self) -> None:
        """Discard all gradients. Call this before the first backward pass of a step."""
        for buffer in self._buffers:
            buffer.clear()

    def complete(self) -> None:
        """Set the gradients of parameters that got none in this step to zero; `finish` also does this."""
        for buffer in self._buffers:
            buffer.complete()

    def start_overlap(self, micro_batches: int = 1) -> None:
        """Reduce gradients from now on as soon as they are complete: after `micro_batches` more backward passes."""
        for buffer in self._buffers:
            buffer.start_overlap(micro_batches)

    def finish(self) -> None:
        """Wait until `owned` holds sums over data parallelism."""
        for buffer in self._buffers:
            buffer.finish()

    @property
    def released(self) -> AbstractSet[nn.Parameter]:
        """Parameters with values only in the optimizer's masters."""
        return self.fp8_weights.keys()

    @property
    def masters(self) -> Mapping[nn.Parameter, Tensor]:
        """Masters that exist before the optimizer, fp32 and flat, to be updated in place."""
        return {}

    @property
    def fp8_data(self) -> Mapping[nn.Parameter, Tensor]:
        """FP8 data of whole weights that all ranks hold between steps."""
        return {}

    def begin(self, master_of: Callable[[FlatShard], Tensor]) -> None:
        """Start training once the optimizer has its masters, fp32 and flat. Collective.

        From now on, FP8 weights exist only in FP8.
        """
        if self.fp8_weights:
            self.invalidate()
            self.gather()

    def gather(self) -> None:
        """Start to gather weights that have been updated since the last gather. Collective.

        Modules wait for their weights.
        """
        if self._updated:
            self._gather()
            self._updated = False

    def _gather(self) -> None:
        """Start to gather all weights."""
        for buffer in self.weights:
            buffer.start_gather()
        if not self._overlaps_gather:
            self._finish_gather()

    def _finish_gather(self) -> None:
        """Wait for all weights."""
        for buffer in self.weights:
            buffer.wait()

    def wait(self) -> None:
        """Gather weights that have been updated since the last gather, and wait for them. Collective.

        Call this before reading the weights.
        """
        self.gather()
        self._finish_gather()

    def invalidate(self) -> None:
        """Make the next `gather` gather all weights.

        This is needed after weights were loaded, or before a CUDA graph of the gather is captured. A running gather is
        waited for, because a graph cannot wait for a gather that began outside it.
        """
        self._finish_gather()
        self._updated = True

    def end_step(self) -> None:
        """Mark the weights as updated once the update is queued. Call this before `Fp8Manager.end_step`."""
        if self._weight_shards is not None:
            self._weight_shards.record_amaxes()
        self.invalidate()

    def describe(self) -> str:
        """Return the memory and traffic of the weights on a rank for the log; empty by default."""
        return ""


class Replicated(DataParallelStrategy):
    """Strategy in which every rank holds and updates all parameters; gradients are summed by bucket (`GradBuffer`)."""

    sharded = False
    state_axis = "data"


class Zero1(DataParallelStrategy):
    """Strategy in which each rank updates a shard, which all ranks then gather (ZeRO stage 1; `ParamBuffer`)."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        buffers: Sequence[GradBuffer],
        *,
        overlapped: Sequence[nn.Module],
        **options: Any,
    ) -> None:
        """Move the parameters to buckets that can be gathered.

        `overlapped` are modules that together have all parameters. `options` are arguments of `DataParallelStrategy`.
        """
        super().__init__(params, buffers, **options)
        dtypes = {param: fmt.dtype for param, (_, fmt) in self.fp8_weights.items()}
        self.weights = [ParamBuffer(buffer.params, buffer.layout, buffer.group, dtypes) for buffer in buffers]
        for weights in self.weights if self._overlaps_gather else ():
            weights.wait_before(overlapped)

    @property
    def fp8_data(self) -> Mapping[nn.Parameter, Tensor]:
        """FP8 data of whole weights that all ranks hold between steps."""
        return dict(chain.from_iterable(buffer.fp8_data.items() for buffer in self.weights))

    def begin(self, master_of: Callable[[FlatShard], Tensor]) -> None:
        """Release the values of FP8 weights, then quantize and gather their shards. Collective."""
        if self.fp8_weights:
            updated, data, shards = {shard.param: shard for shard in self.shards}, self.fp8_data, []
            for param, (state, _) in self.fp8_weights.items():
                shard = updated.get(param)  # None if other ranks update the whole weight
                start, master_f = (0, param.new_empty(0)) if shard is None else (shard.start, master_of(shard))
                shards.append(WeightShard(state, data[param], start, master_f, param.dtype))
            self._weight_shards = WeightShards(shards, self._amax_group, shards[0].fp8_data_nk.device)
            for buffer in self.weights:
                buffer.release_fp8_params()
        super().begin(master_of)

    def _gather(self) -> None:
        if self._weight_shards is not None:
            self._weight_shards.quantize()
        super()._gather()

    def describe(self) -> str:
        """Return the memory and traffic saved by FP8 weights, for the log; empty without FP8 weights."""
        rowwise = sum(data.nbytes for data in self.fp8_data.values())
        if not rowwise:
            return ""
        gib, ranks = 2**30, size(self.group)
        nbytes, unquantized = (sum(getattr(x, name) for x in self.weights) for name in ("nbytes", "nbytes_unquantized"))
        stored, without = nbytes + rowwise, unquantized + 2 * rowwise  # with the columnwise copies
        received, instead = (count * (ranks - 1) // ranks for count in (nbytes, unquantized))
        return (
            f"FP8 parameters: {len(self.fp8_weights)} weights are gathered in FP8; this rank holds {stored / gib:.3f} "
            f"GiB of weights and their FP8 copies instead of {without / gib:.3f}, and receives {received / gib:.3f} "
            f"GiB of weights per step instead of {instead / gib:.3f}"
        )


class FullySharded(DataParallelStrategy):
    """Strategy in which each rank holds a shard of everything; weights are gathered by block (ZeRO stage 3).

    `ShardedStages` implements the gathers. Weights of experts that a rank would share with no other rank of its replica
    are held whole, as by `Zero1`. FP8 layers keep no copies of weights, because the copies would use the memory that
    sharding saves.
    """

    param_axis = "fsdp_replicate"

    def __init__(
        self,
        stages: ShardedStages,
        whole: Sequence[nn.Parameter],
        whole_gradients: Sequence[GradBuffer],
        *,
        experts: Sequence[nn.Module],
        tied: Sequence[nn.Parameter],
        fp8_weights: Fp8Weights,
        replicas: int,
        one_host: AbstractSet[ProcessGroup],
        **options: Any,
    ) -> None:
        """Set up the gathers of FP8 weights. Collective.

        Args:
            stages: Sharded parameters.
            whole: Parameters that are not in `stages`.
            whole_gradients: Gradients of the trained parameters in `whole`.
            experts: Modules with the parameters in `whole`.
            tied: Parameters that stages share, as they were before sharding.
            fp8_weights: Weights gathered in FP8, by the parameters before sharding.
            replicas: Number of replicas of the shards.
            one_host: Groups of ranks with shards that are on one host.
            **options: Further arguments of `DataParallelStrategy`.
        """
        rows_of = stages.row_shards
        super().__init__(
            [*stages.params, *whole],
            [stages, *whole_gradients],
            tied=[rows_of[param].param for param in tied],
            fp8_weights={rows_of[param].param: how for param, how in fp8_weights.items()},
            **options,
        )
        self.stages, self.whole, self._replicas = stages, whole, replicas
        self._shard_group, self._one_host = stages.units[-1][0], stages.units[-1][0] in one_host
        self.weights = [ParamBuffer(buffer.params, buffer.layout, buffer.group) for buffer in whole_gradients]
        for weights in self.weights if self._overlaps_gather else ():
            weights.wait_before(experts)
        self.weights += [] if stages.weights is None else [stages.weights]
        self._fp8_rows: list[tuple[RowShard, Tensor]] = []  # with the FP8 data of the rows and their padding
        self._fp8_buckets: dict[int, Tensor] = {}
        groups = dict.fromkeys(ranks for ranks, _ in stages.units)
        self._fp8_gathers = [gather for ranks in groups for gather in self._fp8_gather(ranks, one_host)]

    def _fp8_gather(self, ranks: ProcessGroup, one_host: AbstractSet[ProcessGroup]) -> list[Fp8WeightGather]:
        """Return the gather of the FP8 weights that are sharded over `ranks`, if there are any. Collective.

        Weights of a bucket are adjacent in its memory, so that replicas can gather the bucket.
        """
        stages, size = self.stages, 0
        units = [[stages.row_shards[x] for x in unit] for unit_ranks, unit in stages.units if unit_ranks is ranks]
        units = [[rows for rows in unit if rows.param in self.fp8_weights] for unit in units]
        units = [unit for unit in units if unit]
        shards = [*chain.from_iterable(units)]
        if not shards:
            return []
        params, starts, places = {rows.param for rows in shards}, dict[nn.Parameter, int](), dict[int, Slot]()
        for index, bucket in enumerate(stages.layout.buckets):
            members = {stages.trained[i]: stages.layout.slots[i] for i in bucket.params}
            if members.keys() <= params:
                starts |= {param: size + slot.start - bucket.start for param, slot in members.items()}
                places[index] = Slot(size, size := size + bucket.end - bucket.start)
        slots = [Slot(starts[rows.param], starts[rows.param] + rows.padded_numel) for rows in shards]
        transport = open_transport(slots, size, ranks, stages.flat.device, ranks in one_host)
        self._fp8_buckets |= {index: transport.memory[start:end] for index, (start, end) in places.items()}
        for rows, shard in zip(shards, transport.shards, strict=True):
            _, fmt = self.fp8_weights[rows.param]
            self._fp8_rows.append((rows, shard.view(fmt.dtype).view(-1, rows.global_shape[1])))
        blocks, arrivals = [], []
        for unit in units:
            layers = [(rows, *self.fp8_weights[rows.param]) for rows in unit]
            blocks.append([GatheredWeight(rows, fmt.dtype, state.set_gathered_data) for rows, state, fmt in layers])
            if stages.weights is not None:
                arrivals.append(partial(stages.weights.wait, stages.weights.buckets_of(rows.param for rows in unit)))
        return [Fp8WeightGather(blocks, transport, ranks.size(), stages.flat.device, arrivals or None)]

    @property
    def released(self) -> AbstractSet[nn.Parameter]:
        """Parameters with values only in the optimizer's masters."""
        return {x for x in self.stages.trained if self.stages.weights is None or x in self.fp8_weights}

    @property
    def masters(self) -> Mapping[nn.Parameter, Tensor]:
        """Masters of the sharded parameters that exist before the optimizer, fp32 and flat."""
        return self.stages.masters

    @property
    def fp8_data(self) -> Mapping[nn.Parameter, Tensor]:
        """FP8 data of the row shards that exist only in FP8, which all replicas hold between steps."""
        return {rows.param: data[: len(rows.values)] for rows, data in self._fp8_rows}

    def begin(self, master_of: Callable[[FlatShard], Tensor]) -> None:
        """Release the values of FP8 weights, then quantize their shards and gather them from replicas. Collective."""
        if self._fp8_rows:
            updated, shards = {shard.param: shard for shard in self.shards}, []
            for rows, data_mk in self._fp8_rows:
                (state, _), shard = self.fp8_weights[rows.param], updated.get(rows.param)
                start, master_f = (0, rows.values.new_empty(0)) if shard is None else (shard.start, master_of(shard))
                shards.append(WeightShard(state, data_mk, start, master_f, rows.param.dtype, rows.first))
            self._weight_shards = WeightShards(shards, self._amax_group, self.stages.flat.device)
            if self.stages.weights is not None:
                for index, memory in self._fp8_buckets.items():
                    self.stages.weights.hold_in_fp8(index, memory)
        super().begin(master_of)

    def gather(self) -> None:
        """Start to gather updated weights, and make FP8 gathers wait for all work that is queued so far. Collective."""
        super().gather()
        for gather in self._fp8_gathers:
            gather.record_reads()

    def wait(self) -> None:
        """Gather updated weights and wait for them, and allow single modules to be called. Collective."""
        super().wait()
        self.stages.make_callable()

    def _gather(self) -> None:
        """Free gathered weights, and gather the updated shards of replicas; torch gathers a block's when it runs."""
        self.stages.reshard()
        for gather in self._fp8_gathers:
            gather.synchronize()  # no rank may still read data that is about to be overwritten
        if self._weight_shards is not None:
            self._weight_shards.quantize()
        super()._gather()
        for gather in self._fp8_gathers:
            gather.synchronize()

    def _finish_gather(self) -> None:
        for gather in self._fp8_gathers:
            gather.arrive()
        super()._finish_gather()

    def describe(self) -> str:
        """Return the memory and traffic of the sharded weights on this rank, for the log."""
        gib, sharded, values, gathered = 2**30, 0, 0.0, 0.0
        for rows in self.stages.row_shards.values():
            fp8, element = rows.param in self.fp8_weights, rows.param.element_size()
            received = rows.global_shape.numel() * (rows.ranks - 1) / rows.ranks
            sharded += rows.values.nbytes * (not fp8 or self._replicas == 1) + rows.padded_numel * fp8
            values += received * element
            gathered += received * (1 if fp8 else element)
        in_fp8 = len(self.fp8_weights)
        instead = f", {in_fp8} of them in FP8, instead of {values / gib:.3f} without" if in_fp8 else ""
        lines = [
            f"parallel.fsdp: this rank holds {sharded / gib:.3f} GiB of {len(self.stages.params)} weights; gathering "
            f"all of them receives {gathered / gib:.3f} GiB{instead}"
        ]
        experts = [rows for rows in self.stages.row_shards.values() if spec_of(rows.param).expert]
        for count in {rows.ranks for rows in experts}:
            as_values = in_fp8 and not any(rows.param in self.fp8_weights for rows in experts)
            how = ", and gathered in high precision" if as_values else ""
            lines.append(f"parallel.fsdp: weights of experts have {count} shard{'s' if count > 1 else ''}{how}")
        if self.whole:
            nbytes = sum(param.nbytes for param in self.whole)
            lines.append(f"parallel.fsdp: weights of experts are not sharded, {nbytes / gib:.3f} GiB more")
        if self._replicas > 1:
            hosts = "one host" if self._one_host else "several hosts"
            lines.append(
                f"parallel.fsdp_replicas: {self._replicas} replicas of the shards, each on {size(self._shard_group)} "
                f"ranks of {hosts}, share the optimizer state"
            )
        return "\n".join(lines)
