"""The lighthouse, torchft's server that decides which replicas take part in a step, and a replica's connection to it.

A replica asks for a quorum before each step, and sends heartbeats in the meantime. The lighthouse answers at once if
all members of the previous quorum ask. Otherwise it answers as soon as all replicas with a heartbeat ask, or
`join_seconds` after the first one. It never answers with fewer than `min_replicas` replicas, or with half or fewer of
the replicas that have a heartbeat. It stores nothing on disk: a restarted lighthouse learns about all replicas when
they next ask.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

from megafp8.host.shipped import install_command
from megafp8.parallel.replicas import tunnel
from megafp8.parallel.replicas.quorum import Member

ADDRESS = "MEGAFP8_LIGHTHOUSE"
"""Environment variable with the lighthouse's host and port."""
TOKEN = "MEGAFP8_LIGHTHOUSE_TOKEN"
"""Environment variable with the secret that proves that a connection belongs to this job."""
REPLICA = "MEGAFP8_REPLICA"
"""Environment variable with the index of the replica that a process belongs to."""
PORT = 29510
_SHORTEST_TOKEN = 16
_HEARTBEAT_SECONDS = 0.1
_CLOSE_SECONDS = 10.0
"""Maximum wait for a heartbeat that is being sent; the heartbeat itself has a shorter limit."""


class ReplicaEndpoint(NamedTuple):
    """Address, token and index that a process needs to belong to a replica."""

    host: str
    port: int
    token: str
    replica: int


def place_of(environment: Mapping[str, str], count: int) -> ReplicaEndpoint:
    """Return the endpoint of a process with these variables in a job of `count` replicas.

    Raises:
        ValueError: If a variable is missing or wrong.
    """
    missing = [name for name in (ADDRESS, TOKEN, REPLICA) if not environment.get(name)]
    if missing:
        raise ValueError(
            f"resilience.replicas needs {', '.join(missing)} in the environment: start the replicas by "
            "launch/replicas.sh, or see docs/resilience.md"
        )
    host, port = address_of(environment[ADDRESS])
    replica = environment[REPLICA]
    if not replica.isdecimal() or int(replica) >= count:
        raise ValueError(f"{REPLICA} is {replica}, but the replicas of the job are numbered from 0 to {count - 1}")
    return ReplicaEndpoint(host, port, token_of(environment), int(replica))


def token_of(environment: Mapping[str, str]) -> str:
    """Return the token in the environment; raise ValueError if it is missing, or short enough to be guessed."""
    token = environment.get(TOKEN, "")
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(
            f"{TOKEN} has {len(token)} characters and needs {_SHORTEST_TOKEN} or more; give the lighthouse and all "
            f"replicas the same token: export {TOKEN}=$(openssl rand -hex 16)"
        )
    return token


def address_of(text: str) -> tuple[str, int]:
    """Parse host and port of `host`, `host:port` or `[IPv6 address]:port`; raise ValueError for other texts."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"{text} is not the address of a lighthouse: give HOST or HOST:PORT")
    return host.strip("[]"), int(port)


def start(
    bind: tuple[str, int], token: str, min_replicas: int, join_seconds: float, heartbeat_seconds: float
) -> Callable[[], None]:
    """Start a lighthouse at the address `bind` for clients with `token`, and return a function that ends it."""
    server = _coordination().LighthouseServer(
        "127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=int(1000 * join_seconds),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * heartbeat_seconds),
    )
    inner = int(server.address().rpartition(":")[2])
    try:
        listener = tunnel.serve(bind, ("127.0.0.1", inner), token)
    except OSError as error:
        server.shutdown()
        raise ValueError(f"the lighthouse cannot listen at {bind[0]}:{bind[1]}: {error.strerror}") from None

    def stop() -> None:
        tunnel.close(listener)
        server.shutdown()

    return stop


def _coordination() -> Any:
    """Import torchft's coordination module; raise ValueError if torchft is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # the default level writes several lines per step
    try:
        from torchft import coordination  # type: ignore[import-untyped]  # an optional package
    except ImportError as error:
        raise ValueError(
            f"resilience.replicas needs torchft, which is not installed ({error}): {install_command('replicas')}"
        ) from None
    return coordination


class Lighthouse:
    """Connection of a replica's rank 0 to the lighthouse. It sends heartbeats from the first `quorum` until `close`.

    `alive` is called before each heartbeat. If it returns False, for example because a rank of this replica hangs, the
    heartbeat is not sent.
    """

    def __init__(self, place: ReplicaEndpoint, id: str, alive: Callable[[], bool] = lambda: True) -> None:
        coordination = _coordination()
        self._id, self._alive = id, alive
        try:
            self._tunnel = tunnel.connect((place.host, place.port), place.token)
        except OSError as error:
            raise ConnectionError(f"the lighthouse at {place.host}:{place.port} does not answer: {error}") from None
        address = f"http://127.0.0.1:{self._tunnel.getsockname()[1]}"
        patience = timedelta(seconds=10)
        self._client = coordination.LighthouseClient(address, connect_timeout=patience)
        self._beats = coordination.LighthouseClient(address, connect_timeout=patience)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def quorum(self, member: Member, seconds: float) -> list[Member]:
        """Return the members of the quorum that `member` takes part in, once it is complete.

        Raises:
            TimeoutError: If the quorum is not complete within `seconds`.
            ConnectionError: If the lighthouse does not answer.
        """
        if not self._thread.is_alive():
            self._thread.start()
        began = time.monotonic()
        try:
            quorum = self._client.quorum(
                self._id, timeout=timedelta(seconds=seconds), step=max(member.step, 0), data=asdict(member)
            )
        except TimeoutError:
            raise TimeoutError(f"no quorum for {seconds:.0f} s") from None
        except RuntimeError as error:
            if time.monotonic() - began >= 0.9 * seconds:
                raise TimeoutError(f"no quorum for {seconds:.0f} s") from None
            raise ConnectionError(f"the lighthouse does not answer: {str(error).partition(chr(10))[0]}") from None
        return [Member(**participant.data) for participant in quorum.participants]

    def _beat(self) -> None:
        """Send heartbeats until `close`."""
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            if self._alive():
                with contextlib.suppress(RuntimeError, TimeoutError):  # the next heartbeat may arrive
                    self._beats.heartbeat(self._id, timeout=timedelta(seconds=5))

    def close(self) -> None:
        """End the heartbeats, and wait for a heartbeat that is being sent.

        At exit, Python ends threads that return from native code, and torchft's thread would then abort the process.
        """
        self._closed.set()
        tunnel.close(self._tunnel)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
