"""HTTP connections with a limit of the time in which headers must arrive, and of how many an address may leave waiting.

uvicorn limits neither: clients that send a part of their headers and no more hold connections until there are no others
left, and no health check is answered. Bodies, and what follows, are limited by `app.ServerLimits.seconds`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Time from the connection, or the first byte of a later request on it, to the end of its headers."""
INCOMPLETE_PER_ADDRESS = 64
"""Connections of one address that may be without whole headers; if there are more, the oldest is closed."""


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with these limits."""

    incomplete: ClassVar[dict[str, dict[LimitedProtocol, None]]] = {}
    """Connections whose headers have not arrived, by address, the oldest first."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._have_headers()

    def connection_lost(self, exc: Exception | None) -> None:
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
