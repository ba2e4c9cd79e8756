"""Part of one replica in a job of several: quorum before each step, exchange and vote at its end, copies of the state.

    begin      rank 0 asks the lighthouse for a quorum; if the members have changed, all ranks reconnect to their
               peers; members with the newest state send it to members without it
    exchange   gradients and statistics of the step are combined over the members, in place
    vote       the step counts if all ranks of all members have combined everything; otherwise none of it counts

The computation of a step does not change the state before the vote. If a replica is lost, the others compute the step
again, with its share of the batch divided among them. All processes go on.

*A vote can fail in part*: a replica that is lost while votes are counted may have voted at some of the others and not
at the rest. The members that have counted all votes have completed the step, and the others have not; in the next
quorum the others are one step behind and copy the state, like a replica that rejoins. If the others repeat the step
before that, because the members that completed it do not answer, there are two states of one step. Their lineages
distinguish them, and one of them is given up (`Quorum.lineage`).

*A rank that hangs* answers neither its peers within the time limit, nor the other ranks of its own replica. These end
with an error, and the launch agent restarts the replica. Its heartbeats end with it.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.parallel import activity
from megafp8.parallel.collectives import all_reduce, broadcast_object
from megafp8.parallel.parallel_state import host_group
from megafp8.parallel.replicas.group import Failed, ReplicaGroup, wait_for_watches
from megafp8.parallel.replicas.lighthouse import Lighthouse, ReplicaEndpoint
from megafp8.parallel.replicas.quorum import NEW, Member, Quorum

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_SECONDS = 10.0
"""Maximum wait for a member's connections, which all members make at the same time."""


class ReplicaLost(Exception):
    """Loss of a member before the end of a step, which therefore does not count.

    Raised on all ranks of this replica.
    """


class StopAsked(Exception):
    """Request to stop this process that arrives while it waits for other replicas.

    Raised on all ranks of this replica.
    """


class ReplicaStopped(RuntimeError):
    """Error after which this replica cannot go on: one of its ranks hangs, or it has been too slow for too long."""


class ReplicaLimits(NamedTuple):
    """Time limits, in seconds, and the rule for slow replicas.

    Attributes:
        exchange: Limit of one operation between replicas, and so of the wait for the slowest replica.
        quorum: Limit of the wait for enough replicas.
        slow_ratio: A replica is logged as slow if its own time in a step exceeds this multiple of the median.
        slow_steps: Number of consecutive slow steps after which a replica ends; 0 means that it stays.
    """

    exchange: float
    quorum: float
    slow_ratio: float = 2.0
    slow_steps: int = 0


class StateTensors(NamedTuple):
    """Tensors of a rank's state, live. Forward and backward passes also change the tensors in `recorded`."""

    stable: Sequence[Tensor]
    recorded: Sequence[Tensor]


class Membership:
    """Membership of this rank's replica. All methods except `close` are collective over the ranks of the replica.

    Call `begin`, then `exchange`.

    Attributes:
        quorum: Quorum of the running step, or of the latest one.

    Args:
        place: Endpoint of the replica.
        is_main: Whether this is rank 0 of the replica.
        device: Device of the tensors.
        limits: Time limits.
        state: Returns the tensors that make up this rank's state.
        metadata: Returns the rest of the state as JSON, equal on all ranks.
        restore: Adopts the metadata of a peer, after its tensors have been received into `state`. This function and the
            two above are called between two steps.
        stops: Returns whether a signal has asked this rank to stop.
    """

    def __init__(
        self,
        place: ReplicaEndpoint,
        is_main: bool,
        device: torch.device,
        limits: ReplicaLimits,
        *,
        state: Callable[[], StateTensors],
        metadata: Callable[[], Mapping[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self.index, self.quorum = place.replica, Quorum((), 0)
        self._device, self._limits = device, limits
        self._state, self._metadata, self._restore, self._stops = state, metadata, restore, stops
        # The other ranks of this replica notice a rank that hangs in an exchange before the hang watch does.
        self._inner = host_group(3 * limits.exchange + 5)
        self._is_main = is_main
        self._id, self._store = broadcast_object(
            (f"{place.replica}:{uuid.uuid4().hex[:12]}", _store_address()) if is_main else None, self._inner
        )
        self._nonce = self._new_nonce()
        self._lineage = ""
        self._writes = False
        self._group: ReplicaGroup | None = None
        self._copies: ReplicaGroup | None = None
        self._asking: threading.Thread | None = None
        self._sending: threading.Thread | None = None
        self._send_error: Exception | None = None
        self._progress = time.monotonic()
        self._step_seconds = 0.0
        self._began = 0.0
        self._slow_steps = 0
        self._place = place
        self._lighthouse: Lighthouse | None = None

    def _is_alive(self) -> bool:
        """Return whether this rank has made progress lately: a rank that hangs must not keep others waiting for it."""
        record = activity.record
        if record is not None and record.marks != self._marks:
            self._marks, self._progress = record.marks, time.monotonic()
        patience = max(2 * self._limits.exchange, 2 * self._step_seconds)
        return time.monotonic() - self._progress < patience

    _marks = 0

    def _new_nonce(self) -> str:
        """Return a random word for a member without connections."""
        return uuid.uuid4().hex[:8]

    def begin(self, step: int) -> Quorum:
        """Take part in the quorum of the step after the first `step` steps, and connect to its members.

        `step` is `NEW` for a replica without a state. When this returns, a member without the newest state has received
        it.

        Raises:
            ReplicaStopped: If there is no quorum in time.
        """
        activity.enter("quorum")
        while True:
            self._progress = time.monotonic()
            member = Member(self._id, self.index, step, self._lineage, self._nonce, self._writes, self._store)
            before, quorum = self.quorum, Quorum.from_members(self._members_with(member), self._id)
            if quorum.key != self._nonce and not self._connect(quorum):
                continue
            self._log_changes(before, quorum)
            self.quorum, self._writes = quorum, quorum.writer == quorum.rank and quorum.step != NEW
            if quorum.sources and quorum.step != NEW and not self._copy(quorum):
                continue
            self._began = time.monotonic()
            return self.quorum

    def _members_with(self, own: Member) -> list[Member]:
        """Return the members of the next quorum, on all ranks.

        While rank 0 waits, it sends messages to the other ranks, so that they notice if it hangs. The request itself is
        not repeated in the meantime: the lighthouse may just be answering it, and other members would wait for a member
        that asks again.

        Raises:
            ReplicaStopped: If there is no quorum in time.
            StopAsked: If this replica is asked to stop before.
        """
        deadline, warned, answer = time.monotonic() + self._limits.quorum, False, None
        while True:
            outcome = None
            if self._is_main:
                if answer is None:
                    answer, self._asking = _in_thread(lambda: self._ask(own))
                wait([answer], min(self._limits.exchange, 5.0))
                outcome = answer.result() if answer.done() else None
            outcome = broadcast_object(outcome, self._inner)
            self._progress = time.monotonic()
            if outcome is not None:
                members, error = outcome
                if error is None:
                    return list(members)
                if isinstance(error, ValueError):
                    raise error
                answer = None
                if self._is_main and not warned:
                    logger.warning(f"replica {self.index}: {error}; trying again")
                    warned = True
            if not self._all_succeeded(not self._stops()):
                raise StopAsked
            if time.monotonic() >= deadline:
                raise ReplicaStopped(f"replica {self.index} has waited {self._limits.quorum:g} s for enough others")

    def _ask(self, own: Member) -> tuple[list[Member], Exception | None]:
        """Return the members of the next quorum, or the reason why the lighthouse has not answered."""
        try:
            if self._lighthouse is None:
                self._lighthouse = Lighthouse(self._place, self._id, self._is_alive)
            return self._lighthouse.quorum(own, self._limits.quorum), None
        except (TimeoutError, ConnectionError) as error:
            time.sleep(0.1)
            return [], error
        except ValueError as error:
            return [], error

    def _connect(self, quorum: Quorum) -> bool:
        """Connect to the peers in `quorum`, and return whether this succeeded on all ranks.

        If it failed, a new quorum is needed.
        """
        self._disconnect()
        host, _, port = quorum.store.rpartition(":")
        rank = 0 if not dist.is_initialized() else dist.get_rank()
        name = f"replicas/{quorum.key}/{rank}"
        error: Exception | None = None
        try:
            store = _connected(host, int(port), min(self._limits.exchange, _CONNECT_SECONDS))
            size = len(quorum.members)
            self._group = ReplicaGroup(store, name, quorum.rank, size, self._device, self._limits.exchange)
            if quorum.sources and quorum.step != NEW:
                copies = f"{name}/copies"
                self._copies = ReplicaGroup(store, copies, quorum.rank, size, self._device, self._limits.exchange)
        except Failed as failed:
            error = failed
        if self._all_succeeded(error is None):
            self._nonce = quorum.key
            return True
        self._lose(f"not connected to all members: {_first_line(error)}")
        return False

    def _log_changes(self, before: Quorum, quorum: Quorum) -> None:
        """Log the replicas that have left or joined."""
        left = [x.index for x in before.members if x.id not in {y.id for y in quorum.members}]
        joined = [x.index for x in quorum.members if x.id not in {y.id for y in before.members}]
        if left:
            logger.warning(f"step {quorum.step + 1}: replica {_listed(left)} has left; continuing with {_all(quorum)}")
        if joined:
            logger.info(f"step {max(quorum.step, 0) + 1}: replica {_listed(joined)} has joined; now {_all(quorum)}")

    def _copy(self, quorum: Quorum) -> bool:
        """Begin to send the state to members without it, or receive it; return whether this succeeded on all ranks."""
        if quorum.trains:
            targets = [rank for rank, source in quorum.sources.items() if source == quorum.rank]
            if targets:
                self._send(targets)
            return True
        error: Exception | None = None
        metadata: Mapping[str, Any] = {}
        source = quorum.sources[quorum.rank]
        copies, began = self._copies, time.monotonic()
        assert copies is not None
        try:
            metadata = copies.receive_object(source)
            live = [*self._state().stable, *self._state().recorded]
            received = [x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in live]
            copies.receive(received, source)
            for x, values in zip(live, received):
                if x is not values:
                    x.copy_(values)
        except Failed as failed:
            error = failed
        if not self._all_succeeded(error is None):
            self._lose(f"the state was not received: {_first_line(error)}")
            return False
        self._restore(metadata)
        self._lineage = quorum.lineage
        size = sum(x.nbytes for x in received) / 2**30
        peer = quorum.members[source].index
        logger.info(
            f"state after step {quorum.step} copied from replica {peer}: {size:.2f} GiB per rank in "
            f"{time.monotonic() - began:.1f} s"
        )
        return True

    def _send(self, targets: Sequence[int]) -> None:
        """Send the state in the background. Code that changes the state must call `wait_copied` before."""
        metadata, state, copies = self._metadata(), self._state(), self._copies
        assert copies is not None
        tensors = [x.contiguous() for x in state.stable] + [x.clone() for x in state.recorded]
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def work() -> None:
            try:
                with torch.cuda.stream(stream):
                    for target in targets:
                        copies.send_object(metadata, target)
                        copies.send(tensors, target)
            except Failed as error:
                self._send_error = error
                copies.close()

        self._send_error = None
        self._sending = threading.Thread(target=work, name="copy of the state", daemon=True)
        self._sending.start()

    def wait_copied(self) -> None:
        """Wait until a running transfer of the state has ended."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def exchange(self, sums: Sequence[Tensor], maxima: Sequence[Tensor]) -> None:
        """Sum and maximize the tensors of a step over the members, in place, and vote on the step.

        A state that is being sent is waited for, so that the update may change it.

        Raises:
            ReplicaLost: On all ranks, if the step does not count. The values are then undefined, and the step must
                begin again.
        """
        activity.enter("exchange")
        group, quorum, own_seconds = self._group, self.quorum, time.monotonic() - self._began
        assert group is not None
        error: Exception | None = None
        try:
            for x in sums:
                group.sum_(x, quorum.trainers)
            for x in maxima:
                group.max_(x)
            group.synchronize()
        except Failed as failed:
            error = failed
            group.close()  # so that peers do not wait for this rank
        self.wait_copied()
        error = error or self._send_error
        counts = self._all_succeeded(error is None)
        seconds: list[float] = []
        if self._is_main:
            try:
                if counts:
                    seconds = group.gather(torch.tensor([own_seconds], dtype=torch.float64)).view(-1).tolist()
            except Failed as failed:
                counts, error = False, failed
            if not counts:
                group.close()
        counts, seconds = broadcast_object((counts, seconds), self._inner)
        self._progress = time.monotonic()
        if not counts:
            self._lose(_first_line(error))
            raise ReplicaLost(f"step {quorum.step + 1} does not count: {_first_line(error)}")
        self._step_seconds = time.monotonic() - self._began
        self._lineage = quorum.after_step()
        self._judge(seconds)
        self._copies = self._closed(self._copies)

    def _judge(self, seconds: Sequence[float]) -> None:
        """Log this replica if its own time until the exchange is slow, and end it if it is slow too often."""
        by_rank = {rank: seconds[rank] for rank in self.quorum.trainers}
        median = statistics.median(by_rank.values())
        slow = [rank for rank, x in by_rank.items() if x > self._limits.slow_ratio * median and x - median > 0.05]
        is_slow = self.quorum.rank in slow
        self._slow_steps = self._slow_steps + 1 if is_slow else 0
        if self._slow_steps == 1:
            own_seconds = by_rank[self.quorum.rank]
            logger.warning(
                f"replica {self.index} is slow: {own_seconds:.2f} s until the exchange, the median is {median:.2f} s"
            )
        if self._limits.slow_steps and self._slow_steps >= self._limits.slow_steps and len(by_rank) > 1:
            raise ReplicaStopped(
                f"replica {self.index} has been more than {self._limits.slow_ratio:g} times as slow as the median for "
                f"{self._slow_steps} steps (resilience.replicas.slow_steps) and leaves"
            )

    def gather(self, row: Tensor) -> Tensor:
        """Gather the rows of this rank's peers on the host, in the order of the members: `[n]` to `[members, n]`.

        Raises:
            ReplicaLost: On all ranks of the replica, if a peer does not answer.
        """
        group, error, rows = self._group, None, row
        assert group is not None
        try:
            rows = group.gather(row)
        except Failed as failed:
            error = failed
            group.close()
        if not self._all_succeeded(error is None):
            self._lose(_first_line(error))
            raise ReplicaLost(_first_line(error))
        return rows

    def _all_succeeded(self, succeeded: bool) -> bool:
        """Return whether all ranks of this replica have succeeded; raise ReplicaStopped if a rank does not answer."""
        try:
            return bool(all_reduce(torch.tensor([float(succeeded)]), self._inner, "min").item())
        except RuntimeError as error:
            raise ReplicaStopped(f"a rank of replica {self.index} does not answer: {_first_line(error)}") from error

    def _lose(self, reason: str) -> None:
        """Drop the connections, which are made again for the next quorum."""
        self._disconnect()
        self._nonce = self._new_nonce()
        if self._is_main:
            logger.warning(f"replica {self.index}: {reason}")

    def _disconnect(self) -> None:
        """Close all connections, and wait for a transfer of the state to end."""
        self._group, copies = self._closed(self._group), self._copies
        self._copies = self._closed(copies)
        self.wait_copied()

    @staticmethod
    def _closed(group: ReplicaGroup | None) -> None:
        """Close `group` and return None."""
        if group is not None:
            group.close()

    def close(self) -> None:
        """Leave the job. The other replicas go on without this one."""
        self._disconnect()
        if self._lighthouse is not None:
            self._lighthouse.close()
        if self._asking is not None:  # see `Lighthouse.close`
            self._asking.join(_CONNECT_SECONDS)
        wait_for_watches()


def _in_thread(action: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    """Run `action` in a daemon thread, and return the future of its result and the thread."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="quorum", daemon=True)
    thread.start()
    return future, thread


def _connected(host: str, port: int, seconds: float) -> dist.Store:
    """Connect to the store at an address; raise RuntimeError if it does not answer in time."""
    limit = timedelta(seconds=seconds)
    # Limit the wait here as well: for a stopped process, torch waits several times as long.
    store, _ = _in_thread(lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
    wait([store], seconds)
    if not store.done():
        raise RuntimeError(f"the store at {host}:{port} does not answer")
    return store.result()


def _store_address() -> str:
    """Return the address at which peers reach the store of this replica's process groups."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _first_line(error: Exception | None) -> str:
    """Return the first line of an error's message."""
    return "another rank of this replica lost its peer" if error is None else str(error).partition("\n")[0]


def _listed(indices: Sequence[int]) -> str:
    """Format indices in ascending order."""
    return ", ".join(map(str, sorted(indices)))


def _all(quorum: Quorum) -> str:
    """Format the number and the indices of all members."""
    return f"{len(quorum.members)} replicas: {_listed([x.index for x in quorum.members])}"
