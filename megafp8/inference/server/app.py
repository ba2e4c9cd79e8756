"""HTTP side of the server, an ASGI application: OpenAI's endpoints, health, metrics, limits, shutdown."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from megafp8.inference.options import SamplingOptions
from megafp8.inference.server.engine import Engine, Handle, RefitConflict, TokenUpdate
from megafp8.inference.server.incoming_weights import NewWeights
from megafp8.inference.server.metrics import Metrics
from megafp8.inference.server.protocol import (
    AnyBody,
    ApiError,
    ChatBody,
    CompletionBody,
    Control,
    PauseBody,
    RefitBody,
    Response,
    ResumeBody,
    parse,
    parse_control,
    to_json,
)

_CLOSED = 499  # status that nginx uses if the client closed the connection
_FAREWELL = 5.0
"""Seconds that a client has to receive the last event after its request was cut off."""

Result = TypeVar("Result")
EncodeChat = Callable[[Sequence[dict[str, Any]]], list[int]]


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests. Raises ValueError for a limit that is not above 0.

    Attributes:
        body_bytes: Size of a request's body in bytes.
        prompt_tokens: Number of tokens of each prompt. Default: the limit of the model and the cache.
        max_tokens: Number of tokens of each generated text. Default: the limit of the model and the cache.
        texts: Number of texts of a request, prompts times n.
        waiting: Number of texts that may wait, in addition to the running ones. A request beyond it gets status 429.
        client_texts: Number of texts that an address may have in several requests; beyond it, a request gets status
            429. Default: three quarters of the texts that may run and wait.
        seconds: Time from the first byte of a request to the last byte of its response.
        shutdown: Time in seconds that running requests have to end after SIGTERM.
    """

    body_bytes: int = 2**20
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    texts: int = 64
    waiting: int = 256
    client_texts: int | None = None
    seconds: float = 600.0
    shutdown: float = 20.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"the limit {name} = {value}: must be above 0")


class Accepted(NamedTuple):
    """Accepted request: the token ids of each prompt, and its options."""

    prompts: list[list[int]]
    options: list[SamplingOptions]


class Service:
    """State that all requests share.

    Args:
        engine: Engine that generates.
        name: Name of the model.
        encode_chat: Function that tokenizes messages, or the reason that the model has no chats.
        limits: Limits of requests.
        api_key: Key that requests must have; None: no key.
        allow_refit: Let requests pause the server and change its weights, from any folder that the server can read.

    Attributes:
        draining: Whether the server no longer accepts requests.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        encode_chat: EncodeChat | str,
        limits: ServerLimits,
        api_key: str | None = None,
        allow_refit: bool = False,
    ) -> None:
        self.engine, self.name, self.limits, self._allow_refit = engine, name, limits, allow_refit
        self._encode_chat, self._api_key = encode_chat, api_key
        self.metrics = Metrics(lambda: engine.load, lambda: engine.weight_version)
        self.draining = False
        self._reserved = 0
        self._texts_of = Counter[str]()  # texts of unfinished requests, by client
        self._threads = anyio.CapacityLimiter(2)
        """Limiter of the threads outside the event loop that parse and tokenize requests."""
        self.encoding = asyncio.Lock()
        """Lock that a stream holds for one turn of the event loop, so that many streams do not block short requests."""
        self._started = int(time.time())

    def app(self, on_failure: Callable[[], None] = lambda: None) -> Starlette:
        """Return the application, which starts and stops the engine. `on_failure` is called if the engine fails."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.engine.start(on_failure)
            yield
            await to_thread.run_sync(self.engine.stop)

        routes = [
            Route("/v1/completions", _Generate(self, CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", _Generate(self, ChatBody), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/weights", self._weights),
            Route("/v1/weights/pause", self._pause, methods=["POST"]),
            Route("/v1/weights/refit", self._refit, methods=["POST"]),
            Route("/v1/weights/resume", self._resume, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _other_error}
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        app.router.redirect_slashes = False  # the URL of a redirect would contain the client's Host header
        return app

    async def drain(self) -> None:
        """Accept no more requests, wait for the running ones, and cancel them after `ServerLimits.shutdown` seconds."""
        self.draining = True
        self.engine.resume()
        with anyio.move_on_after(self.limits.shutdown):
            while self.engine.open_texts or self._reserved:
                await anyio.sleep(0.02)
        self.engine.abandon(_shutting_down())

    # --- checks of requests ------------------------------------------------------------------------------------------

    def check_key(self, request: Request) -> None:
        """Raise ApiError if this server has a key and the request lacks the header `Authorization: Bearer KEY`."""
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(key.encode("latin-1"), self._api_key.encode())  # bytes as they were sent
        if scheme.lower() != "bearer" or not is_key:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")

    def check_open(self) -> None:
        """Raise ApiError if the server has failed or is shutting down."""
        if self.engine.failure is not None:
            raise ApiError(500, "the generator has failed; the server ends")
        if self.draining:
            raise _shutting_down()

    def check_model(self, name: str) -> None:
        """Raise ApiError if this server does not have the model `name`."""
        if name != self.name:
            message = f"The model {name[:100]!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @contextmanager
    def counted(self, client: str, texts: int) -> Iterator[None]:
        """Context manager that counts the texts of a client's request. Raises ApiError if the client has too many."""
        room = self.engine.generator.cache.max_sequences + self.limits.waiting
        most = room * 3 // 4 if self.limits.client_texts is None else self.limits.client_texts
        if self._texts_of[client] and self._texts_of[client] + texts > most:
            message = "too many texts of this client are running or waiting; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", retry=True)
        self._texts_of[client] += texts
        try:
            yield
        finally:
            self._texts_of[client] -= texts
            if not self._texts_of[client]:
                del self._texts_of[client]

    def reserve(self, texts: int, field: str) -> None:
        """Reserve room for texts that are not yet submitted. Raises ApiError, which names the request's `field`."""
        room = self.engine.generator.cache.max_sequences + self.limits.waiting
        if texts > (most := min(self.limits.texts, room)):
            message = f"the request is for {texts} texts (prompts times n), but at most {most} are allowed"
            raise ApiError(400, message, param=field, code="invalid_value")
        if self.engine.open_texts + self._reserved + texts > room:
            raise ApiError(
                429, "too many requests are waiting; try again later", code="rate_limit_exceeded", retry=True
            )
        self._reserved += texts

    def release(self, texts: int) -> None:
        """Release reserved room."""
        self._reserved -= texts

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread outside the event loop, and return its result."""
        return await to_thread.run_sync(function, *arguments, limiter=self._threads)

    def tokenize(self, body: AnyBody) -> Accepted:
        """Tokenize the prompts of a request, and check them with their options. Raises ApiError."""
        generator = self.engine.generator
        field = "prompt" if isinstance(body, CompletionBody) else "messages"
        try:
            if isinstance(body, CompletionBody):
                requested = list[str | list[int]](body.prompt)
                prompts = [generator.encode(prompt, i) for i, prompt in enumerate(requested)]
            elif isinstance(self._encode_chat, str):
                raise ApiError(400, self._encode_chat, param=field, code="unsupported_parameter")
            else:
                prompts = [self._encode_chat([message.model_dump(exclude_none=True) for message in body.messages])]
        except ApiError:
            raise
        except Exception as error:  # tokenizers can raise any exception
            raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from None
        options = []
        for i, prompt in enumerate(prompts):
            most = self._most_tokens(body, field, len(prompt))
            options.append(body.sampling(most, secrets.randbits(32) if body.seed is None else body.seed))
            try:
                generator.check(prompt, options[-1], i)
            except ValueError as error:
                raise ApiError(400, str(error), param=field, code="invalid_value") from None
        return Accepted(prompts, options)

    def _most_tokens(self, body: AnyBody, field: str, prompt: int) -> int:
        """Return the largest number of tokens of a text, from the request or the room that is left. Raises ApiError.

        `field` is the name of the prompt's field, and `prompt` the prompt's number of tokens.
        """
        limits, room = self.limits, self.engine.generator.room(prompt)
        name, limit = body.most_tokens
        if limits.max_tokens is not None and limit is not None and limit > limits.max_tokens:
            message = f"{name} = {limit}: at most {limits.max_tokens} are allowed"
            raise ApiError(400, message, param=name, code="invalid_value")
        longest = room + prompt - 1 if limits.prompt_tokens is None else limits.prompt_tokens
        if prompt > longest:
            message = f"{field}: has {prompt} tokens, but at most {longest} are allowed"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        if limit is None:
            return room if limits.max_tokens is None else min(room, limits.max_tokens)
        if limit > room:
            message = f"{name} = {limit}: after a prompt of {prompt} tokens there is room for {room}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        return limit

    # --- other endpoints ---------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> HttpResponse:
        self.check_key(request)
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "megafp8"}
        if (name := request.path_params.get("name")) is None:
            return _json({"object": "list", "data": [model]})
        self.check_model(name)
        return _json(model)

    async def _weights(self, request: Request) -> HttpResponse:
        self.check_key(request)
        return self._state_of_weights()

    def _state_of_weights(self) -> HttpResponse:
        return _json({"weight_version": self.engine.weight_version, "paused": self.engine.paused})

    async def _control(self, kind: type[Control], request: Request) -> Control:
        """Check a request that changes the weights, and return its body. Raises ApiError."""
        self.check_key(request)
        if not self._allow_refit:
            raise ApiError(403, "this server does not change its weights; start it with --allow-refit")
        self.check_open()
        check_json(request)
        return parse_control(kind, await read_body(request, self.limits.body_bytes))

    async def _pause(self, request: Request) -> HttpResponse:
        body = await self._control(PauseBody, request)
        with anyio.move_on_after(self.limits.seconds) as scope:
            await self.engine.pause(hold=body.running == "hold")
        if scope.cancelled_caught and not self.engine.paused:
            raise ApiError(504, f"texts have run for more than {self.limits.seconds:g} seconds; the pause is given up")
        return self._state_of_weights()

    async def _refit(self, request: Request) -> HttpResponse:
        body = await self._control(RefitBody, request)
        try:
            await self.engine.refit(NewWeights(body.checkpoint, body.trainer, body.version, self.limits.seconds))
        except ValueError as error:
            status = 409 if isinstance(error, RefitConflict) else 400
            raise ApiError(status, str(error), code="weights_refused") from None
        return self._state_of_weights()

    async def _resume(self, request: Request) -> HttpResponse:
        await self._control(ResumeBody, request)
        self.engine.resume()
        return self._state_of_weights()

    async def _health(self, request: Request) -> HttpResponse:
        self.check_open()
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> HttpResponse:
        return HttpResponse(self.metrics.text(), headers={"content-type": self.metrics.content_type})


class _Generate:
    """Endpoint that generates texts for requests of one kind."""

    def __init__(self, service: Service, kind: type[AnyBody]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self._service, Request(scope, receive), send)
        try:
            await exchange.run(self._kind)
        finally:
            self._service.metrics.requests.labels(scope["path"], str(exchange.status)).inc()


class _Exchange:
    """A request and its response. `status` is the final HTTP status."""

    def __init__(self, service: Service, request: Request, send: Send) -> None:
        self._service, self._request, self._asgi_send = service, request, send
        self._arrived = time.monotonic()
        self._streams = False
        self._begun = False  # the response's headers have been sent
        self._gone = False
        self.status = 500

    async def run(self, kind: type[AnyBody]) -> None:
        """Answer the request, unless the client disconnects."""
        with anyio.move_on_after(self._service.limits.seconds) as scope:
            try:
                await self._answer(kind, scope)
            except ClientDisconnect:
                self._gone = True
            except ApiError as error:
                await self._fail(error)
        if scope.cancelled_caught and not self._gone and (self._streams or not self._begun):
            with anyio.move_on_after(_FAREWELL), suppress(ClientDisconnect):
                await self._fail(ApiError(504, f"not finished after {self._service.limits.seconds:g} seconds"))
        if self._gone:
            self.status = _CLOSED

    async def _answer(self, kind: type[AnyBody], scope: anyio.CancelScope) -> None:
        service = self._service
        service.check_key(self._request)
        service.check_open()
        check_json(self._request)
        raw = await read_body(self._request, service.limits.body_bytes)
        body: AnyBody = await service.in_thread(parse, kind, raw)
        self._streams = body.stream
        service.check_model(body.model)
        prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        texts = prompts * body.n
        client = "" if self._request.client is None else self._request.client.host
        with service.counted(client, texts):
            service.reserve(texts, "prompt" if prompts > body.n else "n")
            try:
                accepted = await service.in_thread(service.tokenize, body)
                service.check_open()
            finally:
                service.release(texts)
            handle = service.engine.submit(*accepted, client)
            watcher = asyncio.ensure_future(self._watch(scope))
            try:
                await self._generate(body, accepted, handle)
            finally:
                watcher.cancel()
                service.engine.cancel(handle)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancel the request when the client closes the connection."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        scope.cancel()

    async def _generate(self, body: AnyBody, accepted: Accepted, handle: Handle) -> None:
        service = self._service
        service.metrics.prompt_tokens.inc(sum(map(len, accepted.prompts)))
        tokenizer = service.engine.generator.tokenizer
        assert tokenizer is not None
        response = Response(body, accepted.prompts, tokenizer.decode)
        last: dict[tuple[int, int], float] = {}
        while not response.finished:
            updates = await handle.updates.get()
            if isinstance(updates, Exception):
                raise (
                    updates if isinstance(updates, ApiError) else ApiError(500, "internal error; see the server's log")
                )
            self._observe(updates, last)
            if not body.stream:
                for update in updates:
                    response.add(update)
                continue
            async with service.encoding:
                chunks = [to_json(chunk) for update in updates if (chunk := response.chunk(update)) is not None]
                await asyncio.sleep(0)
            if chunks:
                await self._send_events(chunks)
        if not body.stream:
            self.status = 200
            await self._send_whole(_json(response.whole()))
            return
        usage = response.last_chunk()
        await self._send_events([b"[DONE]"] if usage is None else [to_json(usage), b"[DONE]"], more=False)

    def _observe(self, updates: Sequence[TokenUpdate], last: dict[tuple[int, int], float]) -> None:
        """Record metrics of updates. `last` has the time of each text's last token."""
        now, metrics = time.monotonic(), self._service.metrics
        metrics.generated_tokens.inc(len(updates))
        for update in updates:
            key = update.prompt, update.sample
            if key in last:
                metrics.between_tokens.observe(now - last[key])
            elif not last:
                metrics.first_token.observe(now - self._arrived)
            last[key] = now

    async def _send(self, message: Message) -> None:
        """Send an ASGI message. Raises ClientDisconnect if the server notices a closed connection."""
        try:
            await self._asgi_send(message)
        except OSError:
            raise ClientDisconnect from None

    async def _send_whole(self, response: HttpResponse) -> None:
        self._begun = True
        await response(self._request.scope, self._request.receive, self._send)

    async def _send_events(self, events: Sequence[bytes], *, more: bool = True) -> None:
        """Send server-sent events, preceded by the headers of the response if they were not sent yet."""
        if not self._begun:
            self._begun, self.status = True, 200
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(b"data: %b\n\n" % event for event in events)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: ApiError) -> None:
        """End with an error: as the response, or as the last event of a stream."""
        self.status = error.status
        if not self._begun:
            await self._send_whole(_json(error.content(), error))
        else:
            await self._send_events([to_json(error.content())], more=False)


def check_json(request: Request) -> None:
    """Raise ApiError unless the body is JSON: browsers send other types across origins without asking the server."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises ApiError if it has more than `limit` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise ApiError(413, f"the body has more than {limit} bytes, the largest size allowed")
    return bytes(body)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", retry=True)


def _json(content: Any, error: ApiError | None = None) -> HttpResponse:
    status, headers = (200, {}) if error is None else (error.status, error.headers)
    return HttpResponse(to_json(content), status, headers, "application/json")


async def _api_error(request: Request, error: ApiError) -> HttpResponse:
    return _json(error.content(), error)


async def _http_error(request: Request, error: HTTPException) -> HttpResponse:
    wrong = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
    response = _json(wrong.content(), wrong)
    response.headers.update(error.headers or {})
    return response


async def _other_error(request: Request, error: Exception) -> HttpResponse:
    wrong = ApiError(500, "internal error; see the server's log")
    return _json(wrong.content(), wrong)
