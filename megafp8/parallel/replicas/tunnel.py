"""Connections to the lighthouse that begin with a proof of the token in both directions.

torchft's lighthouse answers every client that reaches its port: it shows the members, and ends them if asked. It
therefore listens only on the loopback interface, and `serve` forwards connections from a public address to it if they
have proven the token:

    server -> client    32 random bytes a
    client -> server    32 random bytes b, HMAC-SHA256(token, "client" a b)
    server -> client    HMAC-SHA256(token, "server" a b)

The token itself is never sent, and a recording of one connection does not open another. All following bytes are
forwarded unencrypted: like the connections between ranks, they need a network with users who are trusted not to listen.
`connect` listens on the loopback interface of a rank's machine and forwards to the server.

Clients without the token cannot keep others out: a handshake must end within `_HANDSHAKE_SECONDS`, and each end limits
the number of its connections (`_Connections`).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

_SIZE = 32
_HANDSHAKE_SECONDS = 5.0
_MAX_CONNECTIONS = 1024
_MAX_LOOPBACK_CONNECTIONS = 64
"""Maximum number of connections at a rank's end, where all clients belong to the rank."""
_RESERVED_FILES = 32
_RETRY_SECONDS = 0.1
_WARNING_SECONDS = 60.0
"""Minimum time between two warnings of a listener."""

logger = logging.getLogger(__name__)


def _proof(token: str, side: str, a: bytes, b: bytes) -> bytes:
    """Return the HMAC that proves the token for one side of a connection."""
    return hmac.digest(token.encode(), side.encode() + a + b, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive `size` bytes; raise TimeoutError at `deadline`, a time of `time.monotonic`."""
    data = b""
    while len(data) < size:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(remaining)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed during the handshake")
        data += part
    return data


def prove_as_server(connection: socket.socket, token: str) -> None:
    """Run the server's side of the handshake.

    Raises:
        PermissionError: If the client has another token.
        OSError: If the client has closed the connection or has not proven the token in time.
    """
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    connection.settimeout(_HANDSHAKE_SECONDS)
    a = os.urandom(_SIZE)
    connection.sendall(a)
    answer = _receive(connection, 2 * _SIZE, deadline)
    b, proof = answer[:_SIZE], answer[_SIZE:]
    if not hmac.compare_digest(proof, _proof(token, "client", a, b)):
        raise PermissionError("the client has another token")
    connection.sendall(_proof(token, "server", a, b))
    connection.settimeout(None)


def prove_as_client(connection: socket.socket, token: str) -> None:
    """Run the client's side of the handshake.

    Raises:
        PermissionError: If either side has another token.
        OSError: If the server has closed the connection or has not answered in time.
    """
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    connection.settimeout(_HANDSHAKE_SECONDS)
    a, b = _receive(connection, _SIZE, deadline), os.urandom(_SIZE)
    connection.sendall(b + _proof(token, "client", a, b))
    try:
        proof = _receive(connection, _SIZE, deadline)
    except ConnectionError:
        raise PermissionError("the lighthouse refused the token") from None
    if not hmac.compare_digest(proof, _proof(token, "server", a, b)):
        raise PermissionError("the server that answers is not a lighthouse with this token")
    connection.settimeout(None)


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes from `source` to `target` until either closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _join(one: socket.socket, other: socket.socket) -> None:
    """Forward in both directions until either side closes."""
    back = threading.Thread(target=_forward, args=(other, one), daemon=True)
    back.start()
    _forward(one, other)
    back.join()


class _Connections:
    """Connections of one listener, each forwarded by a separate thread.

    A connection is pending until its other end is open, which includes the handshake. If there are more than `limit`
    connections, the oldest pending connection is closed, from the address that has the most pending ones. Connections
    that are being forwarded stay open.

    Args:
        open_target: Returns the other end of a connection, or raises OSError.
        limit: Maximum number of open connections.
    """

    def __init__(self, open_target: Callable[[socket.socket], socket.socket], limit: int) -> None:
        self._open_target, self._limit = open_target, limit
        self._lock = threading.Lock()
        self._num_open = 0
        self._pending: dict[socket.socket, str] = {}  # host of each connection, oldest first
        self._warned = -_WARNING_SECONDS

    def start(self, connection: socket.socket, host: str) -> None:
        """Forward a new connection from `host` in a new thread."""
        with self._lock:
            self._num_open += 1
            self._pending[connection] = host
            if self._num_open > self._limit:
                self._close_oldest()
        try:
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()
        except RuntimeError as error:  # too many threads
            self._end(connection)
            self.warn("a connection is closed: %s", error)

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, unless there was one shortly before: many connections must not flood the log."""
        if time.monotonic() - self._warned >= _WARNING_SECONDS:
            self._warned = time.monotonic()
            logger.warning(message, *arguments)

    def _close_oldest(self) -> None:
        """Close the oldest pending connection of the host that has the most pending connections."""
        ((host, _),) = Counter(self._pending.values()).most_common(1)
        oldest = next(x for x, its_host in self._pending.items() if its_host == host)
        del self._pending[oldest]
        self.warn("more than %d connections are open; closing one from %s", self._limit, host)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread ends

    def _run(self, connection: socket.socket) -> None:
        """Open the other end of a connection and forward until either side closes."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._open_target(connection) as target:
                with self._lock:
                    is_pending = self._pending.pop(connection, None) is not None
                if is_pending:
                    _join(connection, target)
        except OSError:
            pass
        except RuntimeError as error:  # too many threads
            self.warn("a connection is closed: %s", error)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Close a connection and stop counting it."""
        connection.close()
        with self._lock:
            self._pending.pop(connection, None)
            self._num_open -= 1


def listen(listener: socket.socket, open_target: Callable[[socket.socket], socket.socket], limit: int) -> None:
    """Forward each connection to the socket that `open_target` returns for it, until `listener` is closed."""
    connections = _Connections(open_target, limit)

    def accept() -> None:
        while True:
            try:
                connection, (host, *_) = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):  # the listener was closed
                    return
                connections.warn("a connection cannot be accepted: %s", error)
                time.sleep(_RETRY_SECONDS)
            else:
                connections.start(connection, host)

    threading.Thread(target=accept, name="tunnel", daemon=True).start()


def _max_connections() -> int:
    """Return the maximum number of a server's connections that the limit of open files allows.

    Each connection takes three files: both ends of the tunnel, and the end of torchft's server in the same process.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, (files - _RESERVED_FILES) // 3))


def serve(bind: tuple[str, int], target: tuple[str, int], token: str) -> socket.socket:
    """Forward connections to `bind` that prove `token` to `target`, and return the listening socket.

    The caller closes the socket.

    Raises:
        OSError: If the address is not available for listening.
    """
    family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
    listener = socket.create_server(bind, family=family, backlog=4096)

    def open_target(connection: socket.socket) -> socket.socket:
        prove_as_server(connection, token)
        return socket.create_connection(target)

    listen(listener, open_target, _max_connections())
    return listener


def connect(server: tuple[str, int], token: str) -> socket.socket:
    """Listen on a free port of the loopback interface, forward to `server` with the handshake, and return the socket.

    The connection is tried once immediately.

    Raises:
        OSError: If no server answers.
        PermissionError: If the server has another token.
    """

    def open_server() -> socket.socket:
        connection = socket.create_connection(server, timeout=_HANDSHAKE_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_as_client(connection, token)
        except OSError:
            connection.close()
            raise
        return connection

    open_server().close()
    listener = socket.create_server(("127.0.0.1", 0))
    listen(listener, lambda _: open_server(), _MAX_LOOPBACK_CONNECTIONS)
    return listener


def close(listener: socket.socket) -> None:
    """Stop listening. Open connections stay open."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()
