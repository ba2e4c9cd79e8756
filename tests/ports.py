"""Ports for processes that are told where to listen."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nothing listens on, below those (from 32768) that Linux gives to connections: another process would
    have taken one of these before the process that was told to listen does."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            return port
