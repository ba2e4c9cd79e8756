"""Engine of a server: a thread that owns the generator. Requests join and leave the running batch between steps.

On the first rank, the event loop calls `Engine.submit` and `Engine.cancel`. Before each step, the engine's thread
collects the changes since the last step in a `Command`, broadcasts it, and applies it. The other ranks run `follow`,
which receives and applies the same commands. So every rank makes the same calls of the generator, which is collective.

*Idle ranks.* Commands are sent over a separate gloo group. A rank that waits for a command sleeps in the receive call
of a socket, even on CUDA, where an NCCL collective would occupy the GPU. While there is nothing to do, the first rank
sends an empty command every `HEARTBEAT` seconds. This is far below the group's time-out, so a time-out really means
that the first rank hangs.

*Pauses.* While the engine is paused, new requests wait in its inbox. Running requests end before the pause (`finish`),
or they wait too (`hold`), and no steps are made. Weights can only be changed during a pause.

*Refits.* On each rank, new weights arrive in a separate thread (`IncomingWeights`), so a source that does not answer
delays neither a resume nor the end of the server. Meanwhile, the ranks exchange their states every `_REFIT_TICK`
seconds. They start to use the weights between two steps, once the weights are complete on all ranks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from megafp8.checkpoint.errors import on_all_ranks
from megafp8.inference.generator import FinishReason, Generator, Load, Submission
from megafp8.inference.options import SamplingOptions
from megafp8.inference.server.incoming_weights import IncomingWeights, NewWeights
from megafp8.inference.staged_weights import refused_weights
from megafp8.parallel.collectives import all_gather_objects, broadcast, broadcast_object, rank, size
from megafp8.parallel.parallel_state import host_group

HEARTBEAT = 30.0
"""Seconds between the commands that the first rank sends while there is nothing to do."""
_END_SECONDS = 2.0
"""Longest wait for the thread of a refit when the server ends."""
_REFIT_TICK = 0.05
"""Seconds between commands while new weights arrive."""

logger = logging.getLogger(__name__)


class TokenUpdate(NamedTuple):
    """New token of a text.

    `prompt`, `sample`, `top_logprobs` and `finish_reason` are as in `Completion`. `text` is the text that the token
    adds, which may be empty. `weight_version` is the version of the weights that computed the token.
    """

    prompt: int
    sample: int
    text: str
    token: int
    logprob: float
    top_logprobs: Sequence[tuple[int, float]]
    finish_reason: FinishReason | None
    weight_version: int = 0


class Added(NamedTuple):
    """New request: unique number, token ids of the prompts, options with a seed for each prompt, and the client."""

    number: int
    prompts: Sequence[Sequence[int]]
    options: Sequence[SamplingOptions]
    client: str = ""


class RefitConflict(ValueError):
    """A refit was requested while another one runs."""


class Command(NamedTuple):
    """Changes to apply before a step.

    Attributes:
        added: New requests.
        cancelled: Numbers of cancelled requests.
        stop: Whether the engine stops.
        steps: Whether a step follows.
        weights: New weights to wait for.
        refusal: Reason to give up the expected weights; empty if they are not given up.
    """

    added: Sequence[Added] = ()
    cancelled: Sequence[int] = ()
    stop: bool = False
    steps: bool = True
    weights: NewWeights | None = None
    refusal: str = ""


_NOTHING = Command()


def _share(command: Command, group: ProcessGroup | None) -> Command:
    """Return the first rank's command on all ranks. Most commands are empty and cost one small broadcast."""
    if size(group) == 1:
        return command
    is_something = broadcast(torch.tensor([command != _NOTHING]), group, 0)
    return broadcast_object(command, group) if is_something.item() else _NOTHING


class _Requests:
    """Requests and refits that a generator works on, the same on every rank of a group.

    Args:
        generator: Generator.
        group: Ranks that make the same calls; None: only this rank.
        on_refit: Function that is called at the end of a refit with the error that refused the weights, or None.
    """

    def __init__(
        self,
        generator: Generator,
        group: ProcessGroup | None = None,
        on_refit: Callable[[ValueError | None], None] = lambda _: None,
    ) -> None:
        self._generator, self._group, self._on_refit = generator, group, on_refit
        self._submissions: dict[int, Submission] = {}
        self._incoming: IncomingWeights | None = None
        self.receiver: threading.Thread | None = None
        """Thread of the last refit."""

    def __len__(self) -> int:
        return len(self._submissions)

    def step(self, command: Command) -> dict[int, list[TokenUpdate] | Exception]:
        """Apply a command and run the model once. Return the updates, or the error, of each request by its number.

        A request that fails on all ranks does not affect other requests. If a request fails on only some ranks, the
        engine fails, because the ranks would continue with different batches.
        """
        updates: dict[int, list[TokenUpdate] | Exception] = {}
        for number, prompts, options, client in command.added:
            try:
                self._submissions[number] = self._generator.submit(prompts, options, client)
            except Exception as error:
                updates[number] = error
        if command.added:
            self._check_agreement(updates)
        for number in command.cancelled:  # a request may be added and cancelled by the same command
            if (submission := self._submissions.pop(number, None)) is not None:
                self._generator.cancel(submission)
        if command.weights is not None:
            self._incoming = IncomingWeights(self._generator.model, command.weights, self.receiver)
            self.receiver = self._incoming.thread
        if self._incoming is not None:
            self._continue_refit(self._incoming, command.refusal)
        if command.steps:
            self._generator.step()
        for number, submission in list(self._submissions.items()):
            if submission.pieces:
                updates[number] = _updates(submission)
            if submission.failure is not None:
                logger.error("a request has failed", exc_info=submission.failure)
                updates[number] = submission.failure
            if submission.failure is not None or submission.finished:
                del self._submissions[number]
        return updates

    @property
    def weights_arrive(self) -> bool:
        """Whether a refit waits for its weights."""
        return self._incoming is not None

    def _continue_refit(self, incoming: IncomingWeights, refusal: str) -> None:
        """Use new weights once all ranks have them, or give them up once a rank cannot get them. Collective."""
        states = all_gather_objects(incoming.state, self._group)
        if not refusal and "failed" not in states and "arriving" in states:
            return
        try:
            if refusal:
                raise ValueError(refusal)
            staged = on_all_ranks(incoming.staged, self._group)
        except Exception as error:  # the same on all ranks
            refused = refused_weights(error)
            logger.error("refit: %s", refused)
            self.cancel_refit()
            self._on_refit(refused)
        else:
            assert staged is not None
            self._incoming = None
            self._generator.use(staged, incoming.new.version)
            self._on_refit(None)

    def cancel_refit(self) -> None:
        """Stop waiting for new weights."""
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None

    def _check_agreement(self, failures: Mapping[int, object]) -> None:
        """Raise an error if a request could be prepared on only some ranks."""
        failed = {number: str(error) for number, error in failures.items()}
        if any(other.keys() != failed.keys() for other in all_gather_objects(failed, self._group)):
            error = next((x for x in failures.values() if isinstance(x, Exception)), None)
            raise error or RuntimeError("another rank could not prepare a request")
        for number, message in failed.items():
            logger.error("request %d could not be prepared: %s", number, message)


def _updates(submission: Submission) -> list[TokenUpdate]:
    """Return the updates of one step. A step adds at most one token to a text: the last token of its completion."""
    updates = []
    while submission.pieces:
        text, so_far = submission.pieces.popleft()
        top = so_far.top_logprobs[-1] if so_far.top_logprobs else ()
        updates.append(
            TokenUpdate(
                so_far.prompt,
                so_far.sample,
                text,
                so_far.tokens[-1],
                so_far.logprobs[-1],
                top,
                so_far.finish_reason,
                so_far.weight_versions[-1],
            )
        )
    return updates


@dataclass(eq=False)
class Handle:
    """Handle of a request that the engine works on.

    Attributes:
        number: Number of the request.
        texts: Number of unfinished texts.
        updates: Queue with the updates of each step. If the request or the engine fails, the last item is the
            exception.
    """

    number: int
    texts: int
    updates: asyncio.Queue[list[TokenUpdate] | Exception] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Pause:
    """Pause of an engine, shared by all clients that ask for one before the next `resume`.

    Attributes:
        hold: Whether running texts wait instead of ending first.
        clients: Number of clients that wait for `reached`.
        reached: Set once no text runs.
    """

    hold: bool = False
    clients: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Owner of a generator, which runs in a separate thread on the first rank. Collective: created on every rank.

    All methods except the thread's function must be called from the event loop that calls `start`.

    Attributes:
        generator: Generator.
        open_texts: Number of unfinished texts.
        load: Load of the generator after the last step.
        failure: Exception that ended the thread, or None.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.open_texts = 0
        self.load: Load = generator.load
        self.failure: Exception | None = None
        self._group = host_group() if generator.model.parallel.world_size > 1 else None
        self._handles: dict[int, Handle] = {}
        self._last_number = 0
        self._inbox = threading.Condition()
        self._added: list[Added] = []
        self._cancelled: list[int] = []
        self._stopped = False
        self._pause: _Pause | None = None
        self._weights: NewWeights | None = None
        self._refit: asyncio.Future[None] | None = None  # the last one
        self._refusal = ""
        self._receiver: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which reports to the running event loop. If it fails, the loop calls `on_failure`."""
        assert rank(self._group) == 0, "the other ranks follow"
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and `follow` on the other ranks, after the current step. Block until the thread has ended."""
        with self._inbox:
            self._stopped = True
            self._inbox.notify()
        self._thread.join()

    def submit(self, prompts: Sequence[Sequence[int]], options: Sequence[SamplingOptions], client: str = "") -> Handle:
        """Generate texts for `client`. `Generator.check` must have accepted them, and all options must have a seed."""
        self._last_number += 1
        handle = Handle(self._last_number, sum(x.num_samples for x in options))
        if self.failure is not None:
            handle.updates.put_nowait(self.failure)
            return handle
        self._handles[handle.number] = handle
        self.open_texts += handle.texts
        with self._inbox:
            self._added.append(Added(handle.number, prompts, options, client))
            self._inbox.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End the unfinished texts of a request. Their pages are freed before the next step begins."""
        if self._handles.pop(handle.number, None) is None:
            return
        self.open_texts -= handle.texts
        with self._inbox:
            waiting = [added for added in self._added if added.number != handle.number]
            if len(waiting) < len(self._added):
                self._added = waiting
            else:
                self._cancelled.append(handle.number)
            self._inbox.notify()

    @property
    def weight_version(self) -> int:
        """Version of the generator's weights."""
        return self.generator.weight_version

    @property
    def paused(self) -> bool:
        """Whether a pause has been reached: nothing runs until `resume`."""
        return self._pause is not None and self._pause.reached.is_set()

    async def pause(self, *, hold: bool) -> None:
        """Stop all texts until `resume`, and return once none runs.

        A second call joins the pause of the first. If all callers are cancelled before a pause is reached, it is given
        up; a pause that was reached ends only by `resume`.

        Args:
            hold: Stop running texts at once instead of letting them end first.
        """
        with self._inbox:
            pause = self._pause = self._pause or _Pause()
            pause.hold = pause.hold or hold
            self._inbox.notify()
        pause.clients += 1
        try:
            await pause.reached.wait()
        finally:
            pause.clients -= 1
            if self._pause is pause and not pause.clients and not pause.reached.is_set():
                self.resume()

    def resume(self) -> None:
        """End a pause, or give up one that is not reached yet. A refit that still waits for weights is refused."""
        self._refuse("the server was resumed before they had arrived")
        with self._inbox:
            pause, self._pause = self._pause, None
            self._inbox.notify()
        if pause is not None:
            pause.reached.set()  # wakes clients that still wait for the pause

    async def refit(self, weights: NewWeights) -> None:
        """Generate with other weights from the next step on.

        Raises:
            RefitConflict: Another refit runs.
            ValueError: The engine is not paused, or the weights cannot be read or do not fit. The old weights stay in
                use.
        """
        if not self.paused:
            raise ValueError("weights can only be changed while the server is paused; POST /v1/weights/pause first")
        if self._refit_runs:
            raise RefitConflict("another refit runs; try again later")
        self._refit = self._loop.create_future()
        late = f"they have not arrived within {weights.seconds:g} s"
        timer = self._loop.call_later(weights.seconds, self._refuse, late)
        self._refit.add_done_callback(lambda _: timer.cancel())
        with self._inbox:
            self._weights, self._refusal = weights, ""
            self._inbox.notify()
        await asyncio.shield(self._refit)  # the refit continues even if no client waits for it

    @property
    def _refit_runs(self) -> bool:
        return self._refit is not None and not self._refit.done()

    def _refuse(self, reason: str) -> None:
        """Give up the running refit, if there is one."""
        if self._refit_runs:
            with self._inbox:
                self._refusal = reason
                self._inbox.notify()

    def abandon(self, error: Exception) -> None:
        """Cancel all requests; their handles receive `error`."""
        for handle in list(self._handles.values()):
            self.cancel(handle)
            handle.updates.put_nowait(error)

    def follow(self) -> None:
        """Apply the commands of the first rank until it stops. Called on every other rank."""
        assert rank(self._group) > 0
        requests = _Requests(self.generator, self._group)
        while not (command := _share(_NOTHING, self._group)).stop:
            requests.step(command)
        self._end(requests)

    @property
    def receives(self) -> bool:
        """Whether, after `stop` or `follow`, the thread of an abandoned refit is still running."""
        return self._receiver is not None and self._receiver.is_alive()

    def _end(self, requests: _Requests) -> None:
        requests.cancel_refit()
        self._receiver = requests.receiver
        if self._receiver is not None:
            self._receiver.join(_END_SECONDS)

    def _run(self) -> None:
        """Run the engine's thread."""
        device = self.generator.model.parallel.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                requests = _Requests(self.generator, self._group, self._report_refit)
                while not (command := _share(self._next_command(requests), self._group)).stop:
                    updates = requests.step(command)
                    self.load = self.generator.load
                    if updates:
                        self._loop.call_soon_threadsafe(self._deliver, updates)
                self._end(requests)
        except Exception as error:
            logger.exception("the generator failed; the server ends")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _next_command(self, requests: _Requests) -> Command:
        """Return the changes since the last command. Wait for changes if there is nothing to generate."""
        busy = len(requests) > 0
        with self._inbox:
            if self._pause is not None and (self._pause.hold or not busy):
                self._loop.call_soon_threadsafe(self._pause.reached.set)
                busy = False
            added = self._added if self._pause is None else []
            if not (busy or added or self._cancelled or self._stopped or self._weights or self._refusal):
                self._inbox.wait(_REFIT_TICK if requests.weights_arrive else HEARTBEAT)
            steps, added, cancelled, weights, refusal = (
                True, self._added, self._cancelled, self._weights, self._refusal
            )  # fmt: skip
            self._added, self._cancelled, self._weights, self._refusal = [], [], None, ""
            if self._pause is not None:
                steps, self._added, added = not self._pause.hold, added, []
            if steps and not (added or cancelled or self._stopped or weights or refusal):
                return _NOTHING
            return Command(added, cancelled, self._stopped, steps, weights, refusal)

    def _report_refit(self, refused: ValueError | None) -> None:
        """Report the end of a refit to the event loop."""
        self._loop.call_soon_threadsafe(self._refitted, refused)

    def _refitted(self, refused: ValueError | None) -> None:
        assert self._refit is not None
        if not self._refit.done():
            if refused is None:
                self._refit.set_result(None)
            else:
                self._refit.set_exception(refused)

    def _deliver(self, updates: Mapping[int, list[TokenUpdate] | Exception]) -> None:
        for number, arrived in updates.items():
            if (handle := self._handles.get(number)) is None:
                continue  # the request was cancelled in the meantime
            if isinstance(arrived, Exception):
                self.open_texts -= handle.texts
                del self._handles[number]
                handle.updates.put_nowait(arrived)
                continue
            ended = sum(update.finish_reason is not None for update in arrived)
            handle.texts -= ended
            self.open_texts -= ended
            if not handle.texts:
                del self._handles[number]
            handle.updates.put_nowait(arrived)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.abandon(error)
        self.resume()
        if self._refit is not None:
            self._refitted(ValueError("the generator has failed; the server ends"))
        self._on_failure()
