"""HTTP connections with two limits: the time until headers arrive, and the number of incomplete requests per address.

uvicorn limits neither. Clients that send only a part of their headers would hold connections until none is left and no
health check is answered. Bodies and responses are limited by `app.ServerLimits.seconds`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Time limit from the connection, or from the first byte of a later request on it, to the end of the headers."""
INCOMPLETE_PER_ADDRESS = 64
"""Number of connections of one address that may have incomplete headers. Beyond it, the oldest is closed."""


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on incomplete headers."""

    incomplete: ClassVar[dict[str, dict[LimitedProtocol, None]]] = {}
    """Connections that wait for headers, by address, the oldest first."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of a new connection."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Start the time limit at the first byte of a later request."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop the time limit when the headers of a request are complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._have_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit when the connection ends."""
        self._have_headers()
        super().connection_lost(exc)

    @property
    def _address(self) -> str:
        return "" if self.client is None else self.client[0]

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        same_address = self.incomplete.setdefault(self._address, {})
        same_address[self] = None
        if len(same_address) > INCOMPLETE_PER_ADDRESS:
            oldest = next(iter(same_address))
            oldest._have_headers()
            oldest.transport.abort()

    def _have_headers(self) -> None:
        """Stop waiting for headers: they have arrived, or the connection has ended."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        same_address = self.incomplete[self._address]
        del same_address[self]
        if not same_address:
            del self.incomplete[self._address]
