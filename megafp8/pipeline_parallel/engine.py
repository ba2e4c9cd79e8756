"""Run a pipeline schedule on real ranks. Knows nothing of the model: a stage is a function from tensor to tensor.

The engine takes this rank's action list (`communication.with_communication`) and does what each action says, in order.
What is left to decide here is communicators, waiting, and memory.

*Two communicators.* Activations travel on `pipeline`, gradients on `pipeline_backward`. In the steady state of 1F1B
rank r sends an activation to r + 1 while r + 1 sends a gradient to r. NCCL runs what one communicator is given in
order, and a send ends only when its receive runs; with a communicator a direction neither waits for the other. Where
activations alone go both ways between two ranks, the order of the lists sees to it. The engine opens every connection
when it is made: the first transfer between two ranks blocks both hosts until the other is there, and inside a schedule,
where a rank may be held by a receive of its own, that could be for ever. Stages of one rank hand over without sending.

*Waiting.* A receive is waited for by the compute action that needs it. A send is waited for before the next one in its
direction, or at the end of the run: its buffer must stay alive until then, and this keeps one buffer a direction rather
than one a micro-batch. On CUDA waiting only makes the current stream wait, so the host runs ahead and enqueues. A stage
must not synchronise the whole device: a receive posted early runs there until the neighbour sends, and two neighbours
that each wait for that would never send.

*Memory.* Between its forward and its backward a micro-batch holds its input, for the gradient to come back to, and the
root of its graph: the `GradientEdge` of its output rather than the output. Once sent, an output is thus freed unless
an operation saved it, with nothing replaced behind autograd's back; Megatron-LM's `deallocate_output_tensor` is for the
same memory. A backward whose weight gradients have a WEIGHT action of their own leaves their operands in the store that
the layers' gradient sinks know (`megafp8.ops.deferred_wgrad`), and these live until then.

An error in a stage propagates and ends the process; ending the neighbours, who wait for it, is the launcher's task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafp8.distributed.collectives import DONE, Work, recv_async, send_async
from megafp8.ops import deferred_wgrad as deferred
from megafp8.parallel_state import Group
from megafp8.pipeline_parallel.schedules import (
    COMPUTE,
    DIRECTION,
    RECEIVE_BEFORE,
    SEND_AFTER,
    Action,
    Kind,
    Placement,
    splits,
)
from megafp8.pipeline_parallel.trace import Stopwatch


@dataclass(frozen=True)
class StageOutput:
    """What a stage's forward returns.

    `output` is the activation for the next stage (the engine's shape and dtype), or on the last stage the scalar to
    differentiate, already scaled by whatever the gradients are to be averaged over. `report` comes back from `run` on
    the rank of the last stage: a loss to log, logits, anything.
    """

    output: Tensor
    report: Any = None


class StageFunction(Protocol):
    """The forward of a stage. `x` is the activation of the stage before, None on the first stage."""

    def __call__(self, x: Tensor | None, microbatch: Any) -> StageOutput: ...


class PipelineEngine:
    """Runs action lists over one pipeline. Every activation has the same `shape` and `dtype` and lives on `device`.

    `wgrads`: where the layers leave weight gradients for schedules with WEIGHT actions. Making an engine is collective
    over the pipeline: it opens the connections between neighbours.
    """

    def __init__(
        self,
        pipeline: Group,
        pipeline_backward: Group,
        placement: Placement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        wgrads: deferred.WgradStore | None = None,
    ) -> None:
        assert pipeline.ranks == pipeline_backward.ranks
        assert placement.num_ranks == pipeline.size
        self.groups = {Kind.FORWARD: pipeline, Kind.BACKWARD: pipeline_backward}
        self.rank = pipeline.rank
        self.placement = placement
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.wgrads = wgrads
        for direction in self.groups:
            self._connect(direction)

    def _connect(self, direction: Kind) -> None:
        """Pass one number from stage to stage through the whole pipeline, in stage order: nobody waits in a ring."""
        x = torch.zeros(1, device=self.device)
        group = self.groups[direction]
        for rank, chunk in self.placement.homes:
            target = self.placement.peer(SEND_AFTER[direction], rank, chunk)
            if target is not None and rank == self.rank:
                send_async(x, group.group, target).wait()
            elif target == self.rank:
                recv_async(x, group.group, rank).wait()

    def run(
        self,
        actions: Sequence[Action],
        stages: Sequence[StageFunction],
        microbatches: Sequence[Any],
        *,
        backward: bool,
        stopwatch: Stopwatch | None = None,
    ) -> list[Any]:
        """Run this rank's `actions`; return the reports in micro-batch order on the last stage's rank, [] elsewhere.

        `stages[c]` is chunk c of this rank. `microbatches[i]` is handed to it with micro-batch i; every rank gives a
        list of the same length. Gradients accumulate into the parameters' `.grad`. `backward=False` runs without
        autograd and is for schedules without backward. `stopwatch` takes the time of every compute action.
        """
        counts = {kind: sum(action.kind is kind for action in actions) for kind in COMPUTE}
        work = len(microbatches) * len(stages)
        assert len(stages) == self.placement.num_chunks
        assert counts[Kind.FORWARD] == work, "a micro-batch for every forward"
        assert counts[Kind.BACKWARD] == (work if backward else 0), "backward=True is for schedules with backward"
        assert self.wgrads is not None or not counts[Kind.WEIGHT], "weight gradients apart need a store for them"
        run = _Run(self, actions, stages, microbatches, backward, stopwatch)
        with torch.set_grad_enabled(backward):
            for action in actions:
                run.perform(action)
        run.finish()
        return [run.reports[i] for i in sorted(run.reports)]


Key = tuple[int, int]
"""Micro-batch and chunk."""


class _Run:
    """The state of one pass through the actions."""

    def __init__(
        self,
        engine: PipelineEngine,
        actions: Sequence[Action],
        stages: Sequence[StageFunction],
        microbatches: Sequence[Any],
        trains: bool,
        stopwatch: Stopwatch | None,
    ) -> None:
        self.engine = engine
        self.stages = stages
        self.microbatches = microbatches
        self.trains = trains
        self.stopwatch = stopwatch
        self.splits = splits(actions)
        self.arriving: dict[tuple[Kind, Key], tuple[Tensor, Work]] = {}  # by what needs it: a forward or a backward
        self.to_send: dict[tuple[Kind, Key], Tensor] = {}
        self.sending: dict[Kind, tuple[Tensor, Work]] = {}  # the last send of each direction, its buffer kept alive
        self.inputs: dict[Key, Tensor] = {}
        self.roots: dict[Key, GradientEdge] = {}
        self.wgrads: dict[Key, deque[deferred.Wgrad]] = {}
        self.reports: dict[int, Any] = {}

    def perform(self, action: Action) -> None:
        if action.kind in RECEIVE_BEFORE.values():
            self.receive(action)
        elif action.kind in SEND_AFTER.values():
            self.send(action)
        else:
            self.compute(action)

    def compute(self, action: Action) -> None:
        """Wait for what the action needs, then do it; the stopwatch does not count the waiting."""
        x = self.take(action) if action.kind in RECEIVE_BEFORE else None
        if self.stopwatch is not None:
            self.stopwatch.start(action)
        key = (action.microbatch, action.chunk)
        if action.kind is Kind.FORWARD:
            self.forward(key, x)
        elif action.kind is Kind.BACKWARD:
            self.backward(key, x)
        else:
            deferred.run(self.wgrads.pop(key))
        if self.stopwatch is not None:
            self.stopwatch.stop()

    def forward(self, key: Key, x: Tensor | None) -> None:
        microbatch, chunk = key
        if x is not None and self.trains:
            self.inputs[key] = x.requires_grad_()
        result = self.stages[chunk](x, self.microbatches[microbatch])
        if self.trains:
            self.roots[key] = get_gradient_edge(result.output)
        if not self.hand_on(Kind.FORWARD, key, result.output.detach()):
            self.reports[microbatch] = result.report

    def backward(self, key: Key, gradient: Tensor | None) -> None:
        root = self.roots.pop(key)
        if key in self.splits:
            assert self.engine.wgrads is not None
            with self.engine.wgrads.collect() as self.wgrads[key]:
                torch.autograd.backward(root, gradient)
        else:
            torch.autograd.backward(root, gradient)
        if key in self.inputs:
            x_gradient = self.inputs.pop(key).grad
            assert x_gradient is not None, "the stage did not use its input"
            self.hand_on(Kind.BACKWARD, key, x_gradient)

    def hand_on(self, direction: Kind, key: Key, x: Tensor) -> bool:
        """Keep `x` to be sent, or give it to the neighbour where that is on this rank; False where there is none."""
        engine = self.engine
        target = engine.placement.neighbour(SEND_AFTER[direction], engine.rank, key[1])
        if target is not None and target[0] == engine.rank:
            self.arriving[direction, (key[0], target[1])] = (x, DONE)
        elif target is not None:
            self.to_send[direction, key] = x
        return target is not None

    def take(self, action: Action) -> Tensor | None:
        """The activation or gradient that a compute action needs, once it has come; None where nothing is to come."""
        if self.engine.placement.neighbour(RECEIVE_BEFORE[action.kind], self.engine.rank, action.chunk) is None:
            return None
        buffer, work = self.arriving.pop((action.kind, (action.microbatch, action.chunk)))
        work.wait()
        return buffer

    def receive(self, action: Action) -> None:
        direction, group, peer = self.route(action)
        buffer = torch.empty(self.engine.shape, dtype=self.engine.dtype, device=self.engine.device)
        work = recv_async(buffer, group.group, peer)
        self.arriving[direction, (action.microbatch, action.chunk)] = (buffer, work)

    def send(self, action: Action) -> None:
        direction, group, peer = self.route(action)
        x = self.to_send.pop((direction, (action.microbatch, action.chunk))).contiguous()
        expected = (self.engine.shape, self.engine.dtype)
        assert (tuple(x.shape), x.dtype) == expected, f"sending {tuple(x.shape)} {x.dtype}, expected {expected}"
        self.sending.get(direction, (x, DONE))[1].wait()
        self.sending[direction] = (x, send_async(x, group.group, peer))

    def route(self, action: Action) -> tuple[Kind, Group, int]:
        """Direction, communicator and the other rank of a transfer."""
        direction = DIRECTION[action.kind]
        peer = self.engine.placement.peer(action.kind, self.engine.rank, action.chunk)
        assert peer is not None
        return direction, self.engine.groups[direction], peer

    def finish(self) -> None:
        for _, work in self.sending.values():
            work.wait()
        left = [self.arriving, self.to_send, self.inputs, self.roots, self.wgrads]
        assert not any(left), "the schedule left something undone; check_schedule would have said what"
