"""Transfer of weights from a trainer to a server, which is another job, without a file.

    send_weights(trainer, "http://10.0.0.7:8000")        # all ranks of the trainer call it

The first rank of the trainer opens a store. It asks the server to pause, to refit from the address of this store, and
to resume. All ranks of both jobs meet in the store, the trainer's ranks first, and exchange as JSON which tensors they
have and want. From this, all ranks compute the same plan (`megafp8.inference.refit`). If each rank has a different GPU,
messages are sent over NCCL, otherwise over gloo through host memory.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.errors import on_rank0
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.inference.model import Model
from megafp8.inference.refit import Holding, RankTensors, Refit
from megafp8.parallel.replicas import tunnel
from megafp8.training.state import weights
from megafp8.training.trainer import RankTrainer

Running = Literal["finish", "hold"]

SECONDS = 600.0
"""Time limit of an operation, such as waiting for the other job."""
_CONNECT_SECONDS = 10.0
_RELAYED_CONNECTIONS = 16
_STORE_RETRY_SECONDS = 1.0
"""Time in which torch reconnects to the relay after its connection was closed."""
_MAX_RANKS = 1 << 20


def send_weights(
    trainer: RankTrainer,
    url: str,
    *,
    version: int | None = None,
    running: Running = "finish",
    api_key: str | None = None,
    seconds: float = SECONDS,
) -> int:
    """Send the weights of a live trainer to the server at `url`, and return their version. Collective.

    Args:
        trainer: Trainer.
        url: URL of the server.
        version: Version of the weights. Default: number of optimizer steps.
        running: Whether running texts finish before the server pauses, or are held.
        api_key: Key of the server, if it has one.
        seconds: Time limit of each operation.

    Raises:
        ValueError: The server refuses the weights or does not answer, and keeps its old weights. Raised on all ranks.
    """
    world, limit = trainer.parallel.world, timedelta(seconds=seconds)
    server = _Server(url, api_key, seconds)
    version = trainer.optimizer.step_count if version is None else version
    stores: list[dist.TCPStore] = []

    def begin() -> tuple[str, int]:
        server.post("pause", {"running": running})
        host = server.own_address()
        stores.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit))
        return host, stores[0].port

    host, port = on_rank0(begin, world.group)
    has = weights(trainer) | as_rectangles(trainer.fp8.state_dict())
    replies: list[dict[str, Any] | ValueError] = []

    def ask() -> None:
        try:
            replies.append(server.post("refit", {"trainer": f"{host}:{port}", "version": version}))
        except ValueError as error:
            replies.append(error)
            stores[0].set("receivers", json.dumps([0, str(error)]))  # the server may not have set it

    asking = threading.Thread(target=ask, name="refit", daemon=True)
    failure: Exception | None = None
    try:
        if world.is_first:
            stores[0].set("senders", str(world.group.size()))
            asking.start()
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        receivers, refusal = json.loads(store.get("receivers"))
        if not receivers:
            raise ValueError(refusal)
        with TwoJobs(store, world.rank, world.group.size() + receivers, trainer.parallel.device, limit) as peers:
            Refit(has, {}, peers).run(has, {})
    except Exception as error:
        failure = error

    def end() -> int:
        if asking.ident is not None:
            asking.join(seconds)
        reply = replies[0] if replies else None
        if not isinstance(reply, _Conflict):  # a resume would end the refit of the other client
            server.post("resume", {})
        if isinstance(reply, ValueError):
            raise reply
        if failure is not None or reply is None:
            raise ValueError(f"{url} has not accepted the weights: {failure}")
        return int(reply["weight_version"])

    return on_rank0(end, world.group)


class Cancellation:
    """Request by another thread to end the reception of weights.

    Calls of torch's store wait without a limit for a peer that has accepted a connection and does not answer. They fail
    once the sockets that are registered here are shut down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._requested = False

    def register(self, connection: socket.socket) -> socket.socket:
        """Register `connection`, which a request shuts down, and return it."""
        with self._lock:
            self._sockets.append(connection)
            if self._requested:
                _shut_down(connection)
        return connection

    def request(self) -> None:
        """Request the end: shut down all registered connections, and those that are registered later."""
        with self._lock:
            self._requested = True
            for connection in self._sockets:
                _shut_down(connection)

    def check(self) -> None:
        """Raise ValueError after a request."""
        if self._requested:
            raise ValueError("the reception was cancelled")


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _relayed(address: tuple[str, int], cancellation: Cancellation) -> Iterator[int]:
    """Yield a port of the loopback interface that forwards to `address` until `cancellation` is requested.

    Raises OSError if nothing accepts connections at `address`.
    """

    def open_target(connection: socket.socket) -> socket.socket:
        cancellation.register(connection)
        target = socket.create_connection(address, _CONNECT_SECONDS)
        target.settimeout(None)
        return cancellation.register(target)

    socket.create_connection(address, _CONNECT_SECONDS).close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tunnel.listen(listener, open_target, _RELAYED_CONNECTIONS)
        try:
            yield listener.getsockname()[1]
        finally:
            tunnel.close(listener)


def receive_weights(
    address: str, seconds: float, cancellation: Cancellation, model: Model, tensors: Mapping[str, Rectangles]
) -> None:
    """Fill `tensors` with the weights that a trainer sends.

    Args:
        address: Host and port of the trainer's store.
        seconds: Time limit of each wait for the trainer.
        cancellation: Request that ends the reception early.
        model: Model that the tensors belong to.
        tensors: Views to fill.

    Raises:
        ValueError: The trainer has another model or does not accept the connection, or the reception was cancelled.
        Exception: The trainer stops answering, or sends something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"trainer = {address!r}: must be host:port")
    world, limit = model.parallel.world, timedelta(seconds=seconds)
    try:
        with _relayed((host, int(port)), cancellation) as local_port:
            retry = timedelta(seconds=_STORE_RETRY_SECONDS)
            store = dist.TCPStore("127.0.0.1", local_port, is_master=False, wait_for_workers=False, timeout=retry)
            store.set_timeout(limit)
            if world.is_first:
                store.set("receivers", json.dumps([world.group.size(), ""]))
            senders = int(store.get("senders"))
            if not 0 < senders <= _MAX_RANKS:
                raise ValueError(f"the trainer says that it has {senders} ranks")
            size = senders + world.group.size()
            rank, device = senders + world.rank, model.parallel.device
            with TwoJobs(store, rank, size, device, limit, cancellation) as peers:
                Refit({}, tensors, peers).run({}, tensors)
    except OSError as error:
        raise ValueError(f"the trainer at {address} does not answer: {error}") from None


class TwoJobs:
    """All ranks of both jobs, which meet in `store`, as `Peers` of a refit.

    `device` is the device of this rank's tensors. Leaving the context closes the connections, so peers that wait for
    this rank fail too. A cancellation ends the transfer before the next message.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        limit: timedelta,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._cancellation = cancellation or Cancellation()
        self.rank, self._store, self._size, self._device, self._limit = rank, store, size, device, limit
        self._group: Any = None
        self._on_host = True

    def exchange(self, own: RankTensors) -> Sequence[RankTensors]:
        """Exchange the tensors that all ranks have and want, and connect the ranks over NCCL or gloo."""
        cuda = self._device.type == "cuda"
        place = f"{socket.gethostname()}/{torch.cuda.get_device_properties(self._device).uuid}" if cuda else ""
        self._store.set(f"rank/{self.rank}", json.dumps([place, own.has, own.wants]))
        described = [json.loads(self._store.get(f"rank/{i}")) for i in range(self._size)]
        gpus = {place for place, *_ in described}
        self._on_host = "" in gpus or len(gpus) < self._size
        if self._on_host:
            store = dist.PrefixStore("host", self._store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self._size, self._limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            store = dist.PrefixStore("device", self._store)
            self._group = dist.ProcessGroupNCCL(store, self.rank, self._size, options)
        return [
            RankTensors(*({name: _holding(x) for name, x in part.items()} for part in parts)) for _, *parts in described
        ]

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to another rank, and wait until it is sent."""
        self._group.send([x.cpu() if self._on_host else x], to, 0).wait()

    def receive(self, x: Tensor, sender: int) -> None:
        """Receive `x` from another rank, and wait until it has arrived."""
        self._cancellation.check()
        received = torch.empty_like(x, device="cpu") if self._on_host and x.is_cuda else x
        self._group.recv([received], sender, 0).wait()
        if received is not x:
            x.copy_(received)

    def __enter__(self) -> TwoJobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._group is None:
            return
        try:
            if kind is None:  # wait until all ranks have received their messages
                options = dist.BarrierOptions()
                if self._device.index is not None:  # NCCL would otherwise use the device with this rank's number
                    options.device_ids = [self._device.index]
                self._group.barrier(options).wait()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        finally:
            with contextlib.suppress(RuntimeError):
                self._group.abort()


def _holding(given: Any) -> Holding:
    """Return the `Holding` of a JSON value, which has lists instead of tuples."""
    shape, dtype, parts = given
    return Holding(tuple(shape), str(dtype), [(tuple(offset), tuple(size)) for offset, size in parts])


class _Conflict(ValueError):
    """The server is busy with another client's request."""


class _Server:
    """Client of a server's endpoints for weights. Methods raise ValueError with the server's error message."""

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a POST request to an endpoint, and return the answer."""
        url, data = f"{self._url}/v1/weights/{action}", json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, self._headers)
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                reply: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            try:
                message = json.load(error)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"status {error.code}"
            kind = _Conflict if error.code == HTTPStatus.CONFLICT else ValueError
            raise kind(f"{url}: {message}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{url}: {error}") from None
        return reply

    def own_address(self) -> str:
        """Return the address under which the server reaches this host: the local address of a connection to it."""
        parts = urlsplit(self._url)
        with socket.create_connection((parts.hostname or "", parts.port or 80), self._seconds) as connection:
            address: str = connection.getsockname()[0]
        return address
