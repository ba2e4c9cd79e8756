"""Server process: tokenizer, chat template, API key, socket, and the loop that runs until a signal."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megafp8.conversion.formats import open_source
from megafp8.conversion.huggingface.tokenizer import find_tokenizer
from megafp8.data.chats import chat_prompt_encoder, read_chat_template
from megafp8.data.packages import import_package
from megafp8.data.tokenizers import build_tokenizer
from megafp8.inference.arguments import load_generator
from megafp8.inference.server.engine import Engine
from megafp8.parallel.parallel_state import destroy_model_parallel

if TYPE_CHECKING:
    from megafp8.inference.server.app import EncodeChat, ServerLimits, Service

_KEEP_ALIVE_SECONDS = 75
"""Seconds after which an idle connection is closed. Clients and proxies mostly close it after 5 to 60 s. If the server
closed it first, a client could send a request on a connection that is being closed."""
_FLUSH_SECONDS = 5
"""Seconds for sending the last responses when the server ends."""

logger = logging.getLogger("megafp8.inference.server")


def limits_of(arguments: argparse.Namespace) -> ServerLimits:
    """Return the limits that the flags give."""
    from megafp8.inference.server.app import ServerLimits

    return ServerLimits(
        body_bytes=arguments.max_body_bytes,
        prompt_tokens=arguments.max_prompt_tokens,
        max_tokens=arguments.max_tokens,
        texts=arguments.max_texts,
        waiting=arguments.max_waiting,
        client_texts=arguments.max_client_texts,
        seconds=arguments.request_seconds,
        shutdown=arguments.shutdown_seconds,
    )


def chats_of(checkpoint: Path, template: Path | None) -> EncodeChat | str:
    """Return the function that tokenizes messages, or the reason that the model has no chats.

    Raises ValueError if the checkpoint has no tokenizer, or if a chat template was given and cannot be used.
    """
    tokenizer_path = find_tokenizer(open_source(checkpoint))
    if tokenizer_path is None:
        raise ValueError(f"{checkpoint} has no tokenizer; use megafp8.inference.Generator with tokens")
    tokenizer = build_tokenizer(**tokenizer_path)
    try:
        text = None if template is None else str(template)
        return chat_prompt_encoder(tokenizer, read_chat_template(tokenizer_path.get("path"), text))
    except ValueError as error:
        if template is not None:
            raise
        return f"this model does not support chats: {error}"


def key_of(variable: str | None) -> str | None:
    """Return the API key in an environment variable, or None. Raises ValueError if the variable is not set."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ValueError(f"--api-key-env {variable}: this environment variable is unset or empty")
    return key


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket with this address that does not listen yet. Raises ValueError if the address is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        works = "give another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "give another address"
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; {works}") from None
    return listener


def serve(service: Service, listener: socket.socket, *, max_connections: int) -> None:
    """Answer requests until SIGTERM or SIGINT, on the first rank. Raises the generator's exception if it failed."""
    import uvicorn

    from megafp8.inference.server.connections import LimitedProtocol

    class Server(uvicorn.Server):
        """uvicorn server that drains before it closes its sockets, so late requests and health checks get 503."""

        loop: asyncio.AbstractEventLoop
        drained: asyncio.Future[None]

        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            """Serve until the end, and remember the event loop for signals."""
            self.loop = asyncio.get_running_loop()
            await super().serve(sockets)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Start to listen, and log the address."""
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            logger.warning("serving %s at http://%s:%d", service.name, f"[{host}]" if ":" in host else host, port)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Start to drain at the first signal, and end at the second."""
            if service.draining:
                self.end()
            else:
                service.draining = True
                self.loop.call_soon_threadsafe(self.drain)

        def drain(self) -> None:
            """Drain the service, and end afterwards."""
            self.drained = asyncio.ensure_future(service.drain())
            self.drained.add_done_callback(self.end)

        def end(self, *_: object) -> None:
            """Make the server close its sockets and end."""
            self.should_exit = True

    config = uvicorn.Config(
        service.app(on_failure=lambda: server.end()),
        http=LimitedProtocol,
        lifespan="on",
        log_level="warning",
        access_log=False,
        limit_concurrency=max_connections + 1,  # uvicorn also counts the connection that it is about to accept
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    server = Server(config)
    server.run(sockets=[listener])
    if service.engine.failure is not None:
        raise service.engine.failure


def run(arguments: argparse.Namespace) -> None:
    """Serve a checkpoint as the flags of `megafp8 serve` say, until a signal. Collective."""
    import_package("uvicorn", "the server")
    from megafp8.inference.server.app import Service

    first = os.environ.get("RANK", "0") == "0"
    key, limits = key_of(arguments.api_key_env), limits_of(arguments)
    chats = chats_of(arguments.checkpoint, arguments.chat_template)
    listener = bound_socket(arguments.host, arguments.port) if first else None
    generator = load_generator(arguments)
    try:
        engine = Engine(generator)
        if listener is None:
            # Signals reach all ranks. The first rank decides when to end.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            engine.follow()
        else:
            name = arguments.name or arguments.checkpoint.resolve().name
            allow_refit = arguments.allow_refit
            service = Service(engine, name, encode_chat=chats, limits=limits, api_key=key, allow_refit=allow_refit)
            serve(service, listener, max_connections=arguments.max_connections)
    finally:
        destroy_model_parallel()
    if engine.receives:  # Python aborts if the thread returns from native code while the interpreter ends
        logging.shutdown()
        os._exit(0)
