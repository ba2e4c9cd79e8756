"""Run a pipeline schedule on real ranks. Knows nothing of the model: a stage is a function from tensor to tensor.

The engine takes this rank's action list (`schedules.with_communication`) and does what each action says, in order. What
is left to decide here is communicators, waiting, and memory.

*Two communicators.* Activations travel on `pipeline`, gradients on `pipeline_backward`. In the steady state rank r
sends an activation to r + 1 while r + 1 sends a gradient to r. NCCL runs what one communicator is given in order, and a
send ends only when its receive runs; on one communicator both sends would stand before the receives they need, for
ever. With a communicator a direction neither waits for the other. The engine opens every connection when it is made:
the first transfer between two ranks blocks both hosts until the other is there, and inside a schedule, where a rank may
be held by a receive of its own, that could be for ever.

*Waiting.* A receive is waited for by the compute action that needs it. A send is waited for before the next one in its
direction, or at the end of the run: its buffer must stay alive until then, and this keeps one buffer a direction rather
than one a micro-batch. On CUDA waiting only makes the current stream wait, so the host runs ahead and enqueues. A stage
must not synchronise the whole device: a receive posted early runs there until the neighbour sends, and two neighbours
that each wait for that would never send.

*Memory.* Between its forward and its backward a micro-batch holds its input, for the gradient to come back to, and the
root of its graph: the `GradientEdge` of its output rather than the output. Once sent, an output is thus freed unless
an operation saved it, with nothing replaced behind autograd's back; Megatron-LM's `deallocate_output_tensor` is for the
same memory.

An error in a stage propagates and ends the process; ending the neighbours, who wait for it, is the launcher's task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafp8.collectives import DONE, Work, recv_async, send_async
from megafp8.parallel_state import Group
from megafp8.pipeline_parallel.schedules import Action, Kind, peer


@dataclass(frozen=True)
class StageOutput:
    """What a stage's forward returns.

    `output` is the activation for the next stage (the engine's shape and dtype), or on the last stage the scalar to
    differentiate, already scaled by whatever the gradients are to be averaged over. `report` comes back from `run` on
    the last stage: a loss to log, logits, anything.
    """

    output: Tensor
    report: Any = None


class StageFunction(Protocol):
    """The forward of this rank's stage. `x` is the received activation, None on the first stage."""

    def __call__(self, x: Tensor | None, microbatch: Any) -> StageOutput: ...


class PipelineEngine:
    """Runs action lists over one pipeline. Every activation has the same `shape` and `dtype` and lives on `device`.

    Making one is collective over the pipeline: it opens the connections between neighbours.
    """

    def __init__(
        self,
        pipeline: Group,
        pipeline_backward: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert pipeline.ranks == pipeline_backward.ranks
        self.pipeline = pipeline
        self.pipeline_backward = pipeline_backward
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._connect(Kind.RECV_FORWARD, Kind.SEND_FORWARD, pipeline)
        self._connect(Kind.RECV_BACKWARD, Kind.SEND_BACKWARD, pipeline_backward)

    def _connect(self, receive: Kind, send: Kind, group: Group) -> None:
        """Pass one number along the whole pipeline in one direction."""
        x = torch.zeros(1, device=self.device)
        if 0 <= (source := peer(receive, group.rank)) < group.size:
            recv_async(x, group.group, source).wait()
        if 0 <= (target := peer(send, group.rank)) < group.size:
            send_async(x, group.group, target).wait()

    def run(
        self,
        actions: Sequence[Action],
        stage: StageFunction,
        microbatches: Sequence[Any],
        *,
        backward: bool,
        before_last_backward: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run this rank's `actions`; return the reports in micro-batch order on the last stage, [] elsewhere.

        `microbatches[i]` is handed to `stage` with micro-batch i; every rank gives a list of the same length.
        Gradients accumulate into the parameters' `.grad`. `backward=False` runs without autograd and is for schedules
        without backward. `before_last_backward` is called once, right before this rank's last backward: from then on
        every gradient that appears is final, so reducing it may overlap with what remains.
        """
        forwards = [action.microbatch for action in actions if action.kind is Kind.FORWARD]
        backwards = [action for action in actions if action.kind is Kind.BACKWARD]
        assert sorted(forwards) == list(range(len(microbatches))), "a micro-batch for every forward"
        assert len(backwards) == (len(forwards) if backward else 0), "backward=True is for schedules with backward"
        run = _Run(self, stage, microbatches, backward)
        with torch.set_grad_enabled(backward):
            for action in actions:
                if before_last_backward is not None and backwards and action is backwards[-1]:
                    before_last_backward()
                run.perform(action)
        run.finish()
        return [run.reports[i] for i in range(len(microbatches))] if self.pipeline.is_last else []


class _Run:
    """The state of one pass through the actions. All dictionaries are keyed by micro-batch."""

    def __init__(self, engine: PipelineEngine, stage: StageFunction, microbatches: Sequence[Any], trains: bool) -> None:
        self.engine = engine
        self.stage = stage
        self.microbatches = microbatches
        self.trains = trains
        self.received: dict[tuple[Kind, int], tuple[Tensor, Work]] = {}
        self.to_send: dict[tuple[Kind, int], Tensor] = {}
        self.sending: dict[Kind, tuple[Tensor, Work]] = {}  # the last send of each direction, its buffer kept alive
        self.inputs: dict[int, Tensor] = {}
        self.roots: dict[int, GradientEdge] = {}
        self.reports: dict[int, Any] = {}
        self.handlers: dict[Kind, Callable[[int], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.RECV_FORWARD: lambda i: self.receive(Kind.RECV_FORWARD, i, engine.pipeline),
            Kind.SEND_FORWARD: lambda i: self.send(Kind.SEND_FORWARD, i, engine.pipeline),
            Kind.RECV_BACKWARD: lambda i: self.receive(Kind.RECV_BACKWARD, i, engine.pipeline_backward),
            Kind.SEND_BACKWARD: lambda i: self.send(Kind.SEND_BACKWARD, i, engine.pipeline_backward),
        }

    def perform(self, action: Action) -> None:
        self.handlers[action.kind](action.microbatch)

    def forward(self, i: int) -> None:
        pipeline = self.engine.pipeline
        x = None if pipeline.is_first else self.take(Kind.RECV_FORWARD, i)
        if x is not None and self.trains:
            self.inputs[i] = x.requires_grad_()
        result = self.stage(x, self.microbatches[i])
        if self.trains:
            self.roots[i] = get_gradient_edge(result.output)
        if pipeline.is_last:
            self.reports[i] = result.report
        else:
            self.to_send[Kind.SEND_FORWARD, i] = result.output.detach()

    def backward(self, i: int) -> None:
        gradient = None if self.engine.pipeline.is_last else self.take(Kind.RECV_BACKWARD, i)
        torch.autograd.backward(self.roots.pop(i), gradient)
        if not self.engine.pipeline.is_first:
            x_gradient = self.inputs.pop(i).grad
            assert x_gradient is not None, "the stage did not use its input"
            self.to_send[Kind.SEND_BACKWARD, i] = x_gradient

    def receive(self, kind: Kind, i: int, group: Group) -> None:
        buffer = torch.empty(self.engine.shape, dtype=self.engine.dtype, device=self.engine.device)
        self.received[kind, i] = (buffer, recv_async(buffer, group.group, peer(kind, group.rank)))

    def take(self, kind: Kind, i: int) -> Tensor:
        """What `receive` was called for, once it has come."""
        buffer, work = self.received.pop((kind, i))
        work.wait()
        return buffer

    def send(self, kind: Kind, i: int, group: Group) -> None:
        x = self.to_send.pop((kind, i)).contiguous()
        expected = (self.engine.shape, self.engine.dtype)
        assert (tuple(x.shape), x.dtype) == expected, f"sending {tuple(x.shape)} {x.dtype}, expected {expected}"
        self.sending.get(kind, (x, DONE))[1].wait()
        self.sending[kind] = (x, send_async(x, group.group, peer(kind, group.rank)))

    def finish(self) -> None:
        for _, work in self.sending.values():
            work.wait()
        left = [self.received, self.to_send, self.inputs, self.roots]
        assert not any(left), "the schedule left something undone; check_schedule would have said what"
