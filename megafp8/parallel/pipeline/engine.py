"""Engine that executes a pipeline schedule. A stage is any function from tensor to tensor.

The engine takes this rank's actions (`communication.with_communication`) and executes them in order. It manages
communicators, waiting and memory.

*Two communicators.* Activations are sent on `pipeline`, gradients on `pipeline_backward`. In the steady state of 1F1B,
rank r sends an activation to r + 1 while r + 1 sends a gradient to r. NCCL executes the operations of one communicator
in order, and a send ends only when its receive runs; with one communicator per direction, neither waits for the other.
If activations alone are sent both ways between two ranks, the order of the lists prevents a deadlock. All connections
are opened when the engine is constructed: the first transfer between two ranks blocks both hosts until the other has
joined. Within a schedule, this could deadlock, because a host may be blocked by another receive.

*Waiting.* The compute action that needs a receive waits for it. A send is waited for before the next send in its
direction, or at the end of the run: its buffer must stay alive until then, and this keeps one buffer per direction
instead of one per micro-batch. On CUDA, waiting only makes the current stream wait, so the host runs ahead. A stage
must not synchronize the whole device: an early receive runs there until the neighbor sends, and two neighbors that both
wait for such receives would deadlock.

*Memory.* Between its forward and its backward, a micro-batch holds its input, whose gradient is sent on, and the root
of its graph: the `GradientEdge` of its output instead of the output. An output that was sent is thus freed unless an
operation saved it (Megatron-LM: `deallocate_output_tensor`). A split backward leaves the operands of its weight
gradients until the WEIGHT action in the store that the layers' gradient sinks use (`megafp8.linear.deferred_wgrad`).

An error in a stage propagates and ends the process; the launcher ends the neighbors that wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafp8.linear import deferred_wgrad as deferred
from megafp8.parallel import activity
from megafp8.parallel.collectives import DONE, CollectiveWork, recv_async, send_async
from megafp8.parallel.parallel_state import Group
from megafp8.parallel.pipeline.actions import (
    COMPUTE,
    DIRECTION,
    RECEIVE_BEFORE,
    SEND_AFTER,
    Action,
    Kind,
    StagePlacement,
    split_backwards,
)
from megafp8.parallel.pipeline.trace import Stopwatch


@dataclass(frozen=True)
class StageOutput:
    """Results of a stage's forward pass.

    Attributes:
        output: Activation for the next stage, with the engine's shape and dtype. On the last stage, the scalar to
            differentiate, already divided by the number that gradients are averaged over.
        report: Value that `run` returns on the rank of the last stage: a loss to log, logits, or any other object.
    """

    output: Tensor
    report: Any = None


class StageFunction(Protocol):
    """Forward pass of a stage. `x` is the previous stage's activation; None on the first stage."""

    def __call__(self, x: Tensor | None, microbatch: Any) -> StageOutput:
        """Run the stage on one micro-batch."""
        ...


class PipelineEngine:
    """Engine that runs schedules over one pipeline.

    Every activation has the same `shape` and `dtype` and is on `device`. `wgrads` is the store for the operands of
    weight gradients, which schedules with WEIGHT actions need. With `fills_exchanges`, backward passes that are not
    split compute weight gradients while gradients travel between tokens and experts
    (`megafp8.linear.deferred_wgrad`). The constructor is collective over the pipeline: it opens the connections between
    neighbors.
    """

    def __init__(
        self,
        pipeline: Group,
        pipeline_backward: Group,
        placement: StagePlacement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        wgrads: deferred.WgradStore | None = None,
        *,
        fills_exchanges: bool = False,
    ) -> None:
        assert pipeline.ranks == pipeline_backward.ranks
        assert placement.num_ranks == pipeline.size
        self.groups = {Kind.FORWARD: pipeline, Kind.BACKWARD: pipeline_backward}
        self.rank = pipeline.rank
        self.placement = placement
        self.shape, self.dtype, self.device = shape, dtype, device
        self.wgrads, self.fills_exchanges = wgrads, fills_exchanges
        for direction in self.groups:
            self._connect(direction)

    def _connect(self, direction: Kind) -> None:
        """Send a number through all stages, one transfer after another, to open the connections."""
        x = torch.zeros(1, device=self.device)
        group = self.groups[direction].group
        for rank, chunk in self.placement.homes:
            target = self.placement.peer(SEND_AFTER[direction], rank, chunk)
            if target is not None and rank == self.rank:
                send_async(x, group, target).wait()
            elif target == self.rank:
                recv_async(x, group, rank).wait()

    def run(
        self,
        actions: Sequence[Action],
        stages: Sequence[StageFunction],
        microbatches: Sequence[Any],
        *,
        backward: bool,
        stopwatch: Stopwatch | None = None,
    ) -> list[Any]:
        """Run this rank's `actions`. Gradients accumulate into the parameters' `.grad`. Collective over the pipeline.

        Args:
            actions: Actions in the order in which they run.
            stages: Forward functions of this rank's chunks, called with `microbatches[i]` for micro-batch i.
            microbatches: Micro-batches; every rank passes a list of the same length.
            backward: Record for autograd; False for schedules without backward passes.
            stopwatch: Times every compute action.

        Returns:
            Reports in micro-batch order on the last stage's rank, [] on others.
        """
        counts = {kind: sum(action.kind is kind for action in actions) for kind in COMPUTE}
        work = len(microbatches) * len(stages)
        assert len(stages) == self.placement.num_chunks
        assert counts[Kind.FORWARD] == work, "a micro-batch for every forward"
        assert counts[Kind.BACKWARD] == (work if backward else 0), "backward=True is for schedules with backward"
        assert self.wgrads is not None or not counts[Kind.WEIGHT], "split backwards need a store for weight gradients"
        run = _Run(self, split_backwards(actions), stages, microbatches, backward)
        compute = {Kind.FORWARD: run.forward, Kind.BACKWARD: run.backward, Kind.WEIGHT: run.weight_gradients}
        with torch.set_grad_enabled(backward):
            for action in actions:
                if action.kind in DIRECTION:
                    run.transfer(action)
                else:
                    x = run.take(action)  # waits before the stopwatch starts
                    if stopwatch is not None:
                        stopwatch.start(action)
                    compute[action.kind]((action.microbatch, action.chunk), x)
                    del x  # free its memory
                    if stopwatch is not None:
                        stopwatch.stop()
                activity.mark()
        return run.finish()


Key = tuple[int, int]
"""Micro-batch and chunk."""


@dataclass
class _Run:
    """State of one execution of a rank's actions."""

    engine: PipelineEngine
    split: set[Key]
    stages: Sequence[StageFunction]
    microbatches: Sequence[Any]
    trains: bool
    received: dict[tuple[Kind, Key], tuple[Tensor, CollectiveWork]] = field(
        default_factory=dict
    )  # by the action that needs it
    to_send: dict[tuple[Kind, Key], Tensor] = field(default_factory=dict)
    sending: dict[Kind, tuple[Tensor, CollectiveWork]] = field(
        default_factory=dict
    )  # each direction's last send and its buffer
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    roots: dict[Key, GradientEdge] = field(default_factory=dict)
    wgrads: defaultdict[Key, deque[deferred.Wgrad]] = field(default_factory=lambda: defaultdict(deque))
    reports: dict[int, Any] = field(default_factory=dict)

    def forward(self, key: Key, x: Tensor | None) -> None:
        """Run a chunk's forward, and pass its output on or keep its report."""
        microbatch, chunk = key
        if x is not None and self.trains:
            self.inputs[key] = x.requires_grad_()
        store, defers = self.engine.wgrads, key in self.split or self.engine.fills_exchanges
        # A loss may compute gradients in the forward pass.
        with store.collect(self.wgrads[key]) if store is not None and self.trains and defers else nullcontext():
            result = self.stages[chunk](x, self.microbatches[microbatch])
        if self.trains and result.output.requires_grad:  # False before the first trainable weight
            self.roots[key] = get_gradient_edge(result.output)
        if not self.pass_on(Kind.FORWARD, key, result.output.detach()):
            self.reports[microbatch] = result.report

    def backward(self, key: Key, gradient: Tensor | None) -> None:
        """Run a chunk's backward, and pass the gradient of its input on."""
        root = self.roots.pop(key, None)
        if root is None:
            if key not in self.split:
                self.wgrads.pop(key, None)
            return
        # Stay in this thread: in autograd's thread, on another core, the Python code of Functions is a fifth slower.
        with torch.autograd.set_multithreading_enabled(False):
            store = self.engine.wgrads
            if key in self.split:
                assert store is not None
                with store.collect(self.wgrads[key]):
                    torch.autograd.backward(root, gradient)
            elif store is not None and self.engine.fills_exchanges:
                with store.collect(self.wgrads[key], for_exchanges=True):
                    torch.autograd.backward(root, gradient)
                deferred.run(self.wgrads.pop(key))
            else:
                torch.autograd.backward(root, gradient)
        if key in self.inputs:
            x_gradient = self.inputs.pop(key).grad
            assert x_gradient is not None, "the stage did not use its input"
            self.pass_on(Kind.BACKWARD, key, x_gradient)

    def weight_gradients(self, key: Key, _: Tensor | None) -> None:
        """Compute the weight gradients that a split backward has deferred."""
        deferred.run(self.wgrads.pop(key))

    def pass_on(self, direction: Kind, key: Key, x: Tensor) -> bool:
        """Store `x` for its send, or for a neighboring stage on this rank; return False if there is no neighbor."""
        engine = self.engine
        target = engine.placement.neighbour(SEND_AFTER[direction], engine.rank, key[1])
        if target is not None and target[0] == engine.rank:
            self.received[direction, (key[0], target[1])] = (x, DONE)
        elif target is not None:
            self.to_send[direction, key] = x
        return target is not None

    def take(self, action: Action) -> Tensor | None:
        """Return the activation or gradient that a compute action needs, once received; None if it needs none."""
        before = RECEIVE_BEFORE.get(action.kind)
        if before is None or self.engine.placement.neighbour(before, self.engine.rank, action.chunk) is None:
            return None
        buffer, work = self.received.pop((action.kind, (action.microbatch, action.chunk)))
        work.wait()
        return buffer

    def transfer(self, action: Action) -> None:
        """Issue a receive, or a send once the previous one in its direction has ended."""
        engine, direction, key = self.engine, DIRECTION[action.kind], (action.microbatch, action.chunk)
        group, peer = engine.groups[direction].group, engine.placement.peer(action.kind, engine.rank, action.chunk)
        assert peer is not None
        if action.kind is RECEIVE_BEFORE[direction]:
            buffer = torch.empty(engine.shape, dtype=engine.dtype, device=engine.device)
            self.received[direction, key] = (buffer, recv_async(buffer, group, peer))
            return
        x = self.to_send.pop((direction, key)).contiguous()
        expected = (engine.shape, engine.dtype)
        assert (tuple(x.shape), x.dtype) == expected, f"sending {tuple(x.shape)} {x.dtype}, expected {expected}"
        self.sending.get(direction, (x, DONE))[1].wait()
        self.sending[direction] = (x, send_async(x, group, peer))

    def finish(self) -> list[Any]:
        """Wait for the last sends, and return the reports in micro-batch order."""
        for _, work in self.sending.values():
            work.wait()
        left = [self.received, self.to_send, self.inputs, self.roots, self.wgrads]
        assert not any(left), "the schedule left actions unfinished; check_schedule reports which"
        return [self.reports[i] for i in sorted(self.reports)]
