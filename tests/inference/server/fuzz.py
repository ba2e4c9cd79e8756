"""Send random requests to a server, most of them wrong: each is answered by 2xx or 4xx, and the server keeps working.

A request is drawn from its seed and index: a body with options at and beyond their bounds, of wrong types or unknown;
JSON with changed bytes, nested deeply or too large; wrong headers, methods, paths and HTTP; a body or a stream that the
client leaves. Between requests, and at the end, one fixed request must get the text that it got at first, and /health
must answer. At the end no text runs or waits, all pages of the cache are free, and connections whose headers never end
do not keep others out. Each failure names the seed and the index of its request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from benchmarks.bench_server import read_metrics

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
SECONDS = 60.0
"""In which each request must be answered."""
RIGHT = {"model": "soak", "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}

Draw = random.Random


@dataclass
class Raw:
    """Bytes to send as they are. `complete`: they are a whole request, so there must be an answer."""

    content: bytes
    complete: bool = True


@dataclass
class Post:
    """A request in correct HTTP. `leave_after`: bytes of the response after which the client goes away."""

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    method: str = "POST"
    leave_after: int | None = None


Request = Raw | Post


def odd_value(draw: Draw, depth: int = 0) -> Any:
    """A value at or beyond what some field takes."""
    numbers = [
        -1, 0, 1, 2, 3, 64, 65, 255, 256, 257, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    ]  # fmt: skip
    floats = [0.0, -0.0, 1e-9, 0.5, 1.0, 1.0000001, 2.0, 2.0000001, -1.0, 1e308, -1e308, 5e-324]
    others = [10**400, float("nan"), float("inf"), -float("inf"), True, False, None]
    texts = ["", "a", "\0", "\ud800", "\ufdd0", "é東", "1", "<|endoftext|>", "a" * 300, "a b" * 20_000, "{{ 7 * 7 }}"]
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice(numbers), lambda: draw.choice(floats), lambda: draw.choice(others),
        lambda: draw.choice(texts), lambda: draw.randint(-(2**70), 2**70),
    ]  # fmt: skip
    if depth < 3:
        kinds += [
            lambda: [odd_value(draw, depth + 1) for _ in range(draw.choice([0, 1, 2, 5]))],
            lambda: {str(odd_value(draw, 3)): odd_value(draw, depth + 1) for _ in range(draw.choice([0, 1, 3]))},
        ]
    return draw.choice(kinds)()


def right_body(draw: Draw) -> tuple[str, dict[str, Any]]:
    """A path and a body that is right, with some options."""
    options: dict[str, Any] = {
        "model": "soak", "temperature": draw.choice([0, 0.7, 2]), "seed": draw.randint(-(2**63), 2**63 - 1),
        "max_tokens": draw.randint(1, 8),
    }  # fmt: skip
    extra = {
        "n": draw.choice([1, 2, 5]), "top_p": draw.choice([1e-12, 0.5, 1]), "top_k": draw.choice([0, 1, 20, 2**31 - 1]),
        "min_p": draw.choice([0, 0.5, 1]), "repetition_penalty": draw.choice([0.5, 1, 1.5, 2]),
        "ignore_end": draw.random() < 0.5, "stop": draw.choice(["a", ["b", "é"], [], "x" * 256]),
        "stream": draw.random() < 0.5, "presence_penalty": 0, "user": "someone",
    }  # fmt: skip
    options |= {name: extra[name] for name in draw.sample(list(extra), draw.randint(0, 4))}
    if draw.random() < 0.5:
        prompts: list[Any] = ["abc", ["a", "b c"], [1, 2, 3], [[4], [5, 6]], "é東" * 20]
        options |= {"prompt": draw.choice(prompts)} | draw.choice([{}, {"logprobs": 0}, {"logprobs": 5}])
        return COMPLETIONS, options
    roles = ["system", "user", "assistant", "developer"]
    content: Callable[[], Any] = lambda: draw.choice(["hi", "é" * 9, [{"type": "text", "text": "x"}]])  # noqa: E731
    options["messages"] = [{"role": draw.choice(roles), "content": content()} for _ in range(draw.randint(1, 4))]
    options |= draw.choice([{}, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True}])
    return CHATS, options


FIELDS = [
    "model", "prompt", "messages", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "ignore_end", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "logit_bias", "echo", "best_of", "suffix", "user", "metadata", "tools",
    "tool_choice", "response_format", "functions", "audio", "service_tier", "modalities", "store",
]  # fmt: skip


def wrong_options(draw: Draw) -> Request:
    path, body = right_body(draw)
    for name in draw.sample(FIELDS, draw.randint(1, 3)):
        body[name] = odd_value(draw)
    return Post(path, json.dumps(body).encode())


def wrong_messages(draw: Draw) -> Request:
    keys = ["role", "content", "name", "tool_calls", "refusal", "audio"]
    messages = [{key: odd_value(draw) for key in draw.sample(keys, draw.randint(0, 4))} for _ in range(3)]
    parts = [{"type": draw.choice(["text", "image_url", 3]), "text": odd_value(draw)}]
    messages[0] |= {"role": draw.choice(["user", "tool", "function", odd_value(draw)])}
    messages[1] |= {"role": "user", "content": parts}
    chosen = messages[: draw.randint(0, 3)]
    return Post(CHATS, json.dumps({"model": "soak", "max_tokens": 3, "messages": chosen}).encode())


def unknown_option(draw: Draw) -> Request:
    path, body = right_body(draw)
    body[draw.choice(["", "temprature", "\ud800", "a" * 5000, "__class__", "model_config", "é"])] = odd_value(draw)
    return Post(path, json.dumps(body).encode())


def changed_bytes(draw: Draw) -> Request:
    path, body = right_body(draw)
    content = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass"))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content))
        change = draw.randrange(4)
        if change == 0:
            content[at] = draw.randrange(256)
        elif change == 1:
            content[at:at] = draw.choice([b"\xff", b"\xed\xa0\x80", b"{", b"]", b'"', b"\\u0000", b"1e999", b"\0"])
        elif change == 2:
            del content[at:]
            content += b" "
        else:
            content[at:at] = content[: draw.randrange(len(content))]
    return Post(path, bytes(content))


def bomb(draw: Draw) -> Request:
    depth = draw.choice([50, 1000, 100_000])
    return Post(
        draw.choice([COMPLETIONS, CHATS]),
        draw.choice(
            [
                b"[" * depth,
                b"[" * depth + b"]" * depth,
                b'{"a":' * depth + b"1" + b"}" * depth,
                b'{"model":"soak","prompt":' + b"[" * depth + b"]" * depth + b"}",
                b'{"model":"soak","seed":' + b"9" * depth + b"}",
                b'{"model":"soak","prompt":"' + b"a" * (2**20 - 100) + b'"}',
                b'{"model":"soak","prompt":[' + b'"a",' * 200_000 + b'"a"]}',
                b'{"model":"soak","prompt":[' + b"1," * 400_000 + b"1]}",
                b"{" + b'"n":1,' * 100_000 + b'"n":1}',
                b" " * (2**20 + 1),
                b'{"model":"soak","messages":[' + b'{"role":"user","content":"a"},' * 30_000 + b"1]}",
                b'{"model":"soak","prompt":"' + "東".encode() * 300_000 + b'"}',
            ]
        ),
    )


def wrong_headers(draw: Draw) -> Request:
    path, body = right_body(draw)
    content = json.dumps(body).encode()
    headers = {
        "content-type": draw.choice(
            [
                "application/json",
                "application/json; charset=utf-16",
                "text/plain",
                "",
                "application/json;" * 50,
                "x" * 5000,
            ]
        ),
        "content-encoding": draw.choice(["gzip", "identity", "deflate", "x"]),
        "authorization": draw.choice(["Bearer", "Bearer x", "Basic \xff\xfe", "b" * 9000]),
        "accept": draw.choice(["*/*", "text/event-stream", "a" * 2000]),
        "expect": draw.choice(["100-continue", "x"]),
        "x-forwarded-for": draw.choice(["127.0.0.1", "\xff", "a" * 1000]),
        "origin": "https://elsewhere.example",
    }
    kept = draw.sample(list(headers), draw.randint(1, 4))
    return Post(path, content, {name: headers[name] for name in kept})


def wrong_path(draw: Draw) -> Request:
    paths = [
        "/", "/v1", "/v1/models/", "/v1/models/other", "/v1/models/%00", "/v1/models/" + "a" * 5000, "/v1//completions",
        "/../etc/passwd", "/%2e%2e/", "/v1/completions/", "/health", "/metrics", COMPLETIONS, CHATS, "/v1/models?x=%ff",
        "/v1/embeddings", "/docs",
    ]  # fmt: skip
    methods = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "POST", "FOO"]
    return Post(draw.choice(paths), b"{}", method=draw.choice(methods))


def wrong_http(draw: Draw) -> Request:
    path, body = right_body(draw)
    content = json.dumps(body | {"stream": False}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    end = b"connection: close\r\n\r\n"
    return draw.choice(
        [
            Raw(b"\r\n\r\n\r\n", complete=False),
            Raw(draw.randbytes(200) + b"\r\n\r\n", complete=False),
            Raw(b"\x16\x03\x01\x02\x00" + draw.randbytes(300), complete=False),
            Raw(b"POST " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n"),
            Raw(b"GET /health HTTP/9.9\r\n\r\n"),
            Raw(b"GET /health HTTP/1.0\r\n\r\n"),
            Raw(b"GET /health HTTP/1.1\r\n\r\n"),  # without a host
            Raw(b"GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n"),
            Raw(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000 + b"\r\n"),
            Raw(head + b"content-length: -1\r\n\r\n"),
            Raw(head + b"content-length: 99999999999999999999\r\n\r\n", complete=False),
            Raw(head + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd"),
            Raw(head + f"content-length: {len(content) + 50}\r\n\r\n".encode() + content, complete=False),
            Raw(head + f"content-length: {len(content) // 2}\r\n".encode() + end + content),
            Raw(chunked + b"zz\r\n\r\n"),
            Raw(chunked + b"ffffffffffffffff\r\nabc", complete=False),
            Raw(chunked + f"{len(content):x}\r\n".encode() + content, complete=False),
            Raw(
                head + f"content-length: {len(content)}\r\n\r\n".encode() + content[: len(content) // 2], complete=False
            ),
            Raw(head[: draw.randrange(1, len(head))], complete=False),
            Raw(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 20),
            Raw(head + f"content-length: {len(content)}\r\n".encode() + end + content),
        ]
    )


def left_stream(draw: Draw) -> Request:
    path, body = right_body(draw)
    long = {"stream": draw.random() < 0.8, "max_tokens": draw.randint(20, 100), "ignore_end": True}
    return Post(path, json.dumps(body | long).encode(), leave_after=draw.choice([0, 0, 1, 200, 2000]))


def many_texts(draw: Draw) -> Request:
    _, body = right_body(draw)
    counts = {"n": draw.choice([32, 64, 65, 1000, 10**9]), "max_tokens": draw.choice([1, 30, 200])}
    return Post(COMPLETIONS, json.dumps(body | {"prompt": "a"} | counts).encode())


def right_request(draw: Draw) -> Request:
    path, body = right_body(draw)
    return Post(path, json.dumps(body).encode())


KINDS: dict[str, tuple[Callable[[Draw], Request], int]] = {
    "wrong options": (wrong_options, 35),
    "wrong messages": (wrong_messages, 10),
    "unknown option": (unknown_option, 5),
    "changed bytes": (changed_bytes, 15),
    "deep, long or large": (bomb, 4),
    "wrong headers": (wrong_headers, 8),
    "wrong path or method": (wrong_path, 5),
    "wrong HTTP": (wrong_http, 8),
    "left by the client": (left_stream, 5),
    "many texts": (many_texts, 1),
    "right": (right_request, 4),
}
"""By kind of request: the function that makes one, and how often it is drawn, in percent."""


def request_of(seed: int, index: int) -> tuple[str, Request]:
    """The kind of request `index`, and the request."""
    draw = Draw(f"{seed}-{index}")
    (kind,) = draw.choices(list(KINDS), [weight for _, weight in KINDS.values()])
    return kind, KINDS[kind][0](draw)


async def send_raw(host: str, port: int, request: Raw) -> str:
    """The first status of the answer; "none" if the connection was closed without one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.content)
        await writer.drain()
        if not request.complete:
            with anyio.move_on_after(0.05):
                return _status(await reader.read(100))
            return "none"
        return _status(await reader.read(100))
    except ConnectionError:
        return "none"
    finally:
        writer.transport.abort()


def _status(answer: bytes) -> str:
    return answer.split()[1].decode() if answer.startswith(b"HTTP/") else "none"


async def send_post(http: httpx.AsyncClient, request: Post) -> tuple[str, str | None]:
    """The status, and what is wrong with the answer beside it."""
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in request.headers.items()]
    call = http.stream(request.method, request.path, content=request.content, headers=headers)
    async with call as answer:
        taken = b""
        async for part in answer.aiter_raw():
            taken += part
            if request.leave_after is not None and len(taken) >= request.leave_after:
                return str(answer.status_code), None
    problem = None
    if request.method == "POST" and request.path in (COMPLETIONS, CHATS):
        if answer.headers["content-type"].startswith("text/event-stream"):
            problem = None if taken.rstrip().endswith(b"data: [DONE]") else f"a stream that ends with {taken[-100:]!r}"
        else:
            found = json.loads(taken)
            if not (found["choices"] if answer.status_code == 200 else found["error"]["message"]):
                problem = f"an answer without content: {taken[:100]!r}"
    return str(answer.status_code), problem


@dataclass
class Tally:
    """Statuses by kind of request, and what went wrong."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    checks: int = 0


async def one(http: httpx.AsyncClient, seed: int, index: int, tally: Tally) -> None:
    """Send request `index` and judge the answer."""
    kind, request = request_of(seed, index)
    status, problem = "none", None
    try:
        with anyio.fail_after(SECONDS):
            if isinstance(request, Raw):
                status = await send_raw(http.base_url.host, http.base_url.port or 80, request)
                problem = "closed without an answer" if status == "none" and request.complete else None
            else:
                status, problem = await send_post(http, request)
    except TimeoutError:
        problem = f"no answer within {SECONDS:g} s"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    tally.statuses.setdefault(kind, Counter())[status] += 1
    if kind == "right" and status not in ("200", "429"):
        problem = problem or "a right request is refused"
    if problem is not None or status[0] not in "n24":
        tally.failures.append(
            f"request {index} of seed {seed} ({kind}): status {status}, {problem}: {str(request)[:300]}"
        )


async def right_text(http: httpx.AsyncClient) -> str:
    """The text of the fixed request; tries again while too many others wait."""
    for _ in range(100):
        answer = await http.post(COMPLETIONS, json=RIGHT)
        if answer.status_code != 429:
            return str(answer.json()["choices"][0]["text"])
        await asyncio.sleep(0.1)
    raise TimeoutError("the fixed request is refused for 10 s")


async def fuzz(url: str, seed: int, indices: list[int], clients: int, check: int, *, half_sent: int) -> Tally:
    """Send all requests, `clients` at a time."""
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as http:
        expected = await right_text(http)

        async def check_server(after: str) -> None:
            tally.checks += 1
            try:
                text, health = await right_text(http), (await http.get("/health")).status_code
                if (text, health) != (expected, 200):
                    tally.failures.append(
                        f"{after}: the fixed request gives {text!r}, not {expected!r}; /health {health}"
                    )
            except (httpx.HTTPError, TimeoutError, KeyError) as error:
                tally.failures.append(f"{after}: the fixed request gets {type(error).__name__}: {error}")

        for start in range(0, len(indices), check):
            waiting = iter(indices[start : start + check])

            async def client(own: Any = waiting) -> None:
                for index in own:
                    await one(http, seed, index, tally)

            await asyncio.gather(*(client() for _ in range(clients)))
            await check_server(f"after {start + check} requests")
        writers = []
        for _ in range(half_sent):
            writers.append((await asyncio.open_connection(http.base_url.host, http.base_url.port))[1])
            writers[-1].write(b"GET /health HTTP/1.1\r\nhost: a\r\n")
        await check_server(f"beside {half_sent} connections whose headers do not end")
        for writer in writers:
            writer.transport.abort()
        for _ in range(50):  # requests that their clients have just left
            found = read_metrics((await http.get("/metrics")).text)
            open_texts = {name: found[f"megafp8_{name}"] for name in ("running", "waiting", "pages_used")}
            if not any(open_texts.values()):
                break
            await asyncio.sleep(0.2)
        else:
            tally.failures.append(f"at the end: {open_texts}")
    return tally
