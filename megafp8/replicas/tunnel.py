"""Connections to the lighthouse that begin with a proof of the token, at both ends.

torchft's lighthouse answers whoever reaches its port: it shows the members, and ends them if asked. So it listens on
the loopback interface only, and `serve` forwards connections to it, from a public address, that have proven the token:

    server -> client    32 random bytes a
    client -> server    32 random bytes b, HMAC-SHA256(token, "client" a b)
    server -> client    HMAC-SHA256(token, "server" a b)

The token itself is never sent, and what was recorded of one connection opens no other. Bytes that follow are forwarded
as they are, not encrypted: like the connections between ranks, these need a network whose users are trusted not to
listen. `connect` listens on the loopback interface of a rank's machine and forwards to the server.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Callable

_SIZE = 32
_HANDSHAKE_SECONDS = 5.0


def _proof(token: str, side: str, a: bytes, b: bytes) -> bytes:
    return hmac.digest(token.encode(), side.encode() + a + b, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed during the handshake")
        data += part
    return data


def prove_as_server(connection: socket.socket, token: str) -> bool:
    """The server's side of the handshake; whether the client has the token."""
    a = os.urandom(_SIZE)
    connection.sendall(a)
    answer = _receive(connection, 2 * _SIZE)
    b, proof = answer[:_SIZE], answer[_SIZE:]
    if not hmac.compare_digest(proof, _proof(token, "client", a, b)):
        return False
    connection.sendall(_proof(token, "server", a, b))
    return True


def prove_as_client(connection: socket.socket, token: str) -> None:
    """The client's side; PermissionError if either side has another token."""
    a, b = _receive(connection, _SIZE), os.urandom(_SIZE)
    connection.sendall(b + _proof(token, "client", a, b))
    try:
        proof = _receive(connection, _SIZE)
    except ConnectionError:
        raise PermissionError("the lighthouse refused the token") from None
    if not hmac.compare_digest(proof, _proof(token, "server", a, b)):
        raise PermissionError("what answers is no lighthouse of this token")


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _join(one: socket.socket, other: socket.socket) -> None:
    """Forward both ways until either side closes."""
    back = threading.Thread(target=_forward, args=(other, one), daemon=True)
    back.start()
    _forward(one, other)
    back.join()
    one.close()
    other.close()


def _listen(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Call `handle` with each connection, in a thread of its own, until `listener` is closed."""

    def guarded(connection: socket.socket) -> None:
        try:
            handle(connection)
        except OSError:
            connection.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=guarded, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, name="tunnel", daemon=True).start()


def serve(bind: tuple[str, int], target: tuple[str, int], token: str) -> socket.socket:
    """Forward connections to `bind` that prove `token` to `target`; returns the listening socket, to be closed.

    OSError where the address cannot be listened at.
    """
    family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
    listener = socket.create_server(bind, family=family, backlog=4096)

    def handle(connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_SECONDS)
        if not prove_as_server(connection, token):
            connection.close()
            return
        connection.settimeout(None)
        _join(connection, socket.create_connection(target))

    _listen(listener, handle)
    return listener


def connect(server: tuple[str, int], token: str) -> socket.socket:
    """Listen on a free port of the loopback interface and forward to `server`, with the handshake; returns the socket.

    One connection is tried at once: OSError where nothing answers, PermissionError for another token.
    """

    def open_connection() -> socket.socket:
        connection = socket.create_connection(server, timeout=_HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove_as_client(connection, token)
        connection.settimeout(None)
        return connection

    open_connection().close()
    listener = socket.create_server(("127.0.0.1", 0))
    _listen(listener, lambda connection: _join(connection, open_connection()))
    return listener


def close(listener: socket.socket) -> None:
    """Stop listening; connections that are open stay so."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()
