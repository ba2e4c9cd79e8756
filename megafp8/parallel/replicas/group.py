"""Communication between the ranks that hold the same part of the model in different replicas, with time limits.

*A sum does not depend on the other members.* The sum of a step's gradients is

    ((x[0] + x[1]) + x[2]) + ...

over the replicas that have trained, in the order of their indices, regardless of which of them is slow, and whether
other members take part without gradients. The weights after a step are therefore a function of the weights before and
of the replicas that trained, and a run can be repeated bit for bit from the record of its members. The order of a ring
would depend on the number of ranks in it. Each rank adds up one slice of the tensor: it gets that slice from all others
(all-to-all), adds, and all ranks gather the results. A rank sends and receives 2 · (n - 1) / n of the tensor, as in a
ring.

*Every wait has a time limit.* Gloo has a limit for each operation. NCCL's watchdog would end the process, so the host
itself waits for an event, and aborts the communicator after the limit. A peer that has ended is detected at once,
because its connections are closed; gloo connections serve this purpose also while NCCL waits. A peer that hangs is
detected by the limit. A rank that detects an error closes its own connections, so the other ranks need not wait for
their limits.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLICE = 1 << 25
"""Number of elements that are summed at a time; the sum needs memory for the same number of elements."""
PART = 1 << 28
"""Bytes of a message. Each message has a time limit."""
_POLL_SECONDS = 0.0002
_CLOSE_SECONDS = 5.0

Failed = (RuntimeError, TimeoutError, ConnectionError)
"""Errors that operations raise if a peer is lost. torch's connection errors are RuntimeErrors."""
_CLOSES = 2  # tag of the message that a member closes its connections
_WATCH = "watch of a neighbour"


class ReplicaGroup:
    """Connections of this rank to its peers, the ranks with the same number in other replicas.

    The constructor is collective over the peers.

    Args:
        store: Store in which the peers meet.
        name: Name of the group in the store.
        rank, size: Number of this member, and number of members.
        device: Device of the tensors: NCCL on CUDA, gloo on the CPU. gloo also sends messages of the host.
        seconds: Maximum time of one operation.

    Raises:
        RuntimeError: If the peers do not meet in time.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device, seconds: float
    ) -> None:
        self.rank, self.size, self._device, self._seconds = rank, size, device, seconds
        limit = timedelta(seconds=seconds)
        self._lost = threading.Event()
        self._watches = False
        self._closing: Any = None
        self._host: Any = None
        self._device_group: Any = None
        if size == 1:
            return
        self._host = dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/host", store), rank, size, limit)
        self._device_group = self._host
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=1)  # the watchdog would end the process
            prefix = dist.PrefixStore(f"{name}/device", store)
            self._device_group = dist.ProcessGroupNCCL(prefix, rank, size, options)
            self.watch_neighbour()

    def watch_neighbour(self) -> None:
        """Learn in the background when the next member closes its connections, which NCCL does not notice.

        The neighbor sends a message, or its connection breaks. A member that learns this closes its own connections, so
        within moments all members do.
        """
        host, neighbour, lost = self._host, (self.rank + 1) % self.size, self._lost

        def wait() -> None:
            with contextlib.suppress(*Failed):
                host.recv([torch.zeros(1)], neighbour, _CLOSES).wait(timedelta(days=30))
            lost.set()

        self._watches = True
        threading.Thread(target=wait, name=_WATCH, daemon=True).start()

    def sum_(self, x: Tensor, ranks: Sequence[int]) -> None:
        """Replace the contiguous `x` on all members by the sum over `ranks`, added in that order.

        See `synchronize` for waiting.
        """
        if self.size == 1:
            return
        flat = x.view(-1)
        step = SLICE // self.size * self.size
        even = len(flat) // self.size * self.size
        for start in range(0, even, step):
            self._sum_slice(flat[start : min(start + step, even)], ranks)
        if even < len(flat):
            padded = flat.new_zeros(self.size)
            padded[: len(flat) - even] = flat[even:]
            self._sum_slice(padded, ranks)
            flat[even:] = padded[: len(flat) - even]

    def _sum_slice(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Sum a tensor like `sum_`; its number of elements must be a multiple of the number of members."""
        received = torch.empty_like(flat)
        self._device_group.alltoall_base(received, flat, [], []).wait()
        parts = received.view(self.size, -1)
        total = parts[ranks[0]]
        for rank in ranks[1:]:
            total += parts[rank]
        self._device_group._allgather_base(flat, total).wait()

    def max_(self, x: Tensor) -> None:
        """Replace `x` on all members by the elementwise maximum. See `synchronize`."""
        if self.size > 1:
            self._device_group.allreduce([x], dist.ReduceOp.MAX).wait()

    def gather(self, row: Tensor) -> Tensor:
        """Gather the rows of all members on the host: `[n]` to `[members, n]`."""
        if self.size == 1:
            return row.unsqueeze(0)
        rows = row.new_empty(self.size, *row.shape)
        self._host._allgather_base(rows.view(-1), row.contiguous().view(-1)).wait()
        return rows

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send contiguous `tensors` to member `to`, which receives into tensors of the same shapes."""
        for part in _parts(tensors):
            self._device_group.send([part], to, 0).wait()
            self.synchronize()

    def receive(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Receive the tensors that member `sender` sends into contiguous `tensors`."""
        for part in _parts(tensors):
            self._device_group.recv([part], sender, 0).wait()
            self.synchronize()

    def send_object(self, value: Any, to: int) -> None:
        """Send `value`, which must be JSON, to member `to`."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self._host.send([torch.tensor([len(data)])], to, 1).wait()
        self._host.send([data], to, 1).wait()

    def receive_object(self, sender: int) -> Any:
        """Receive the value that member `sender` sends with `send_object`."""
        size = torch.zeros(1, dtype=torch.int64)
        self._host.recv([size], sender, 1).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._host.recv([data], sender, 1).wait()
        return json.loads(bytes(data.numpy()))

    def synchronize(self) -> None:
        """Wait, with a time limit, until all work on the current stream is done. On the CPU, return at once."""
        if self._device.type == "cuda":
            bounded(torch.cuda.current_stream(self._device).record_event().query, self._seconds, self._lost.is_set)

    def close(self) -> None:
        """Close all connections. Running operations fail, here and at peers."""
        if self._watches:  # gloo's connections stay open as long as this rank waits for its neighbor
            with contextlib.suppress(*Failed):
                self._closing = self._host.send([torch.zeros(1)], (self.rank - 1) % self.size, _CLOSES)
            self._watches = False
        groups, self._host, self._device_group = {id(x): x for x in (self._host, self._device_group)}, None, None
        for group in groups.values():
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()


def wait_for_watches() -> None:
    """Wait, with a time limit, for the threads that have watched neighbors, after their groups have been closed.

    At exit, Python ends threads that return from native code, and torch's threads would then abort the process.
    """
    deadline = time.monotonic() + _CLOSE_SECONDS
    for thread in threading.enumerate():
        if thread.name == _WATCH:
            thread.join(max(0.0, deadline - time.monotonic()))


def bounded(done: Callable[[], bool], seconds: float, lost: Callable[[], bool] = lambda: False) -> None:
    """Wait until `done()`. Raise TimeoutError after `seconds`, and ConnectionError once `lost()`."""
    deadline = time.monotonic() + seconds
    while not done():
        if lost():
            raise ConnectionError("a replica has closed its connections")
        if time.monotonic() > deadline:
            raise TimeoutError(f"a replica has not answered for {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of `tensors` as views of at most `PART` bytes."""
    flat = [x.view(-1).view(torch.uint8) for x in tensors if x.numel()]
    return [part for x in flat for part in x.split(PART)]
