"""The server over HTTP: answers are the generator's, whatever else clients do; limits, errors and shutdown."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from megafp8.data.chats import chat_prompt_encoder, read_chat_template
from megafp8.inference import Completion, Generator, SamplingOptions
from megafp8.inference import generator as generator_module
from megafp8.inference.generator import CacheOptions
from megafp8.inference.server import connections
from megafp8.inference.server.app import ServerLimits
from megafp8.inference.server.protocol import Response
from tests.inference.server.serving import LENGTH, events, pages_used, served, until, write_model
from tools.serve import parse_arguments

if TYPE_CHECKING:
    from openai import OpenAI

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
FINISH = {"end": "stop", "stop": "stop", "length": "length"}
SMALL_CACHE = CacheOptions(page_size=4, cache_tokens=320, max_batch_tokens=32, max_sequences=8)
"""Requests wait for each other, and give their pages back."""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie groß?"}]
ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": LENGTH - 1, "ignore_end": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator.from_checkpoint(folder, device="cpu", cache=SMALL_CACHE)


def client_of(url: str) -> OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_completions_through_the_client_of_openai(generator: Generator, folder: Path) -> None:
    sampled = SamplingOptions(max_tokens=12, temperature=0.9, top_p=0.8, top_k=50, seed=3, num_samples=2, logprobs=2)
    expected = generator.generate(["one", "two two"], sampled)
    stop = expected[0].text[3:6]
    stopped = generator.generate(["one"], replace(sampled, stop=(stop,), num_samples=1))[0]
    plain = generator.generate("one", SamplingOptions(max_tokens=16, temperature=1.0, seed=1))[0]
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["one", "two two"], "max_tokens": 12, "temperature": 0.9}
    asked |= {"top_p": 0.8, "seed": 3, "n": 2, "logprobs": 2, "extra_body": {"top_k": 50}}
    with served(generator, folder) as (url, _):
        complete = client_of(url).completions.create
        whole = complete(**asked)
        assert [(x.index, x.text) for x in whole.choices] == [(i, x.text) for i, x in enumerate(expected)]
        assert [x.finish_reason for x in whole.choices] == [FINISH[str(x.finish_reason)] for x in expected]
        for choice, own in zip(whole.choices, expected, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == own.logprobs
            tops = choice.logprobs.top_logprobs
            assert tops is not None
            assert [max(top.values()) for top in tops] == [max(x for _, x in pairs) for pairs in own.top_logprobs]
        counts = len(expected[0].prompt_tokens) + len(expected[2].prompt_tokens), sum(len(x.tokens) for x in expected)
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == counts
        texts, usage = [""] * 4, None
        for chunk in complete(**asked, stream=True, stream_options={"include_usage": True}):
            for part in chunk.choices:
                texts[part.index] += part.text
            usage = chunk.usage or usage
        assert texts == [x.text for x in expected]
        assert usage == whole.usage
        found = complete(**asked | {"prompt": "one", "stop": stop, "n": 1}).choices[0]
        assert (found.text, found.finish_reason) == (stopped.text, "stop")
        defaults = complete(model="tiny", prompt=plain.prompt_tokens, seed=1)
        assert defaults.choices[0].text == plain.text
        unseeded = [complete(model="tiny", prompt="one", max_tokens=40).choices[0].text for _ in range(2)]
        assert unseeded[0] != unseeded[1]


def test_chats_through_the_client_of_openai(generator: Generator, folder: Path) -> None:
    import openai

    """A chat without max_tokens goes on as long as there is room; prompts have the tokens of transformers."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    options = SamplingOptions(max_tokens=10, temperature=1.0, seed=5, logprobs=3)
    (expected,) = generator.generate([prompt], options)
    (long,) = generator.generate([prompt], replace(options, max_tokens=LENGTH - len(prompt), ignore_end=True))
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 5}
    parts = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": x} for x in ("Wie ", "groß?")]}]
    with served(generator, folder) as (url, _):
        complete = client_of(url).chat.completions.create
        whole = complete(**asked, max_completion_tokens=10, logprobs=True, top_logprobs=3)
        assert (whole.choices[0].message.content, whole.choices[0].message.role) == (expected.text, "assistant")
        assert whole.choices[0].finish_reason == FINISH[str(expected.finish_reason)]
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [x.logprob for x in logprobs.content] == expected.logprobs
        tops = [[x for _, x in pairs] for pairs in expected.top_logprobs]
        assert [[x.logprob for x in entry.top_logprobs] for entry in logprobs.content] == tops
        chunks = list(complete(**asked | {"messages": parts}, max_tokens=10, stream=True))
        assert "".join(x.choices[0].delta.content or "" for x in chunks) == expected.text
        assert [x.choices[0].delta.role for x in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == FINISH[str(expected.finish_reason)]
        endless = complete(**asked, extra_body={"ignore_end": True})
        assert endless.choices[0].message.content == long.text
        assert endless.usage is not None
        assert endless.usage.total_tokens == LENGTH
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            complete(**asked, tools=[{"type": "function", "function": {"name": "f"}}])


class Case(NamedTuple):
    """A request, and the texts of its choices."""

    path: str
    body: dict[str, Any]
    texts: list[str]


def random_cases(generator: Generator, folder: Path, count: int) -> list[Case]:
    """Requests of random lengths and options, and what the generator gives for each alone."""
    assert generator.tokenizer is not None
    encode = chat_prompt_encoder(generator.tokenizer, read_chat_template(str(folder / "tokenizer.json")))
    draw, found = random.Random(0), []
    for i in range(count):
        prompt = "".join(draw.choice("abc 12\né東") for _ in range(draw.randint(1, 30)))
        options: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.2]), "seed": i, "n": draw.choice([1, 1, 2])}
        options |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05, "repetition_penalty": 1.2}])
        options |= draw.choice([{}, {"stop": ["\n", "a"]}, {"ignore_end": True}])
        own = options | {"num_samples": options["n"], "stop": tuple(options.get("stop", ()))}
        given = SamplingOptions(max_tokens=draw.randint(1, 24), **{key: x for key, x in own.items() if key != "n"})
        body = options | {"model": "tiny", "max_tokens": given.max_tokens}
        if i % 3:
            completions, path = generator.generate(prompt, given), COMPLETIONS
            body["prompt"] = prompt if i % 3 == 1 else completions[0].prompt_tokens
        else:
            body["messages"], path = [{"role": "user", "content": prompt}], CHATS
            completions = generator.generate([encode(body["messages"])], given)
        found.append(Case(path, body, [x.text for x in completions]))
    return found


MALFORMED = (b"", b"{", b"[]", b"\xff\xfe", b'{"model":"tiny"}', b'{"model":"tiny","prompt":[[1],"a"]}', b"[" * 9999)


async def _ask(client: httpx.AsyncClient, case: Case, stream: bool) -> list[str]:
    """The texts of a response."""
    if not stream:
        answer = await client.post(case.path, json=case.body)
        assert answer.status_code == 200, answer.text
        return [x["text"] if "text" in x else x["message"]["content"] for x in answer.json()["choices"]]
    texts = [""] * len(case.texts)
    async with client.stream("POST", case.path, json=case.body | {"stream": True}) as answer:
        assert answer.status_code == 200
        found = events([line async for line in answer.aiter_lines()])
    assert found.pop() == "[DONE]"
    for event in found:
        for x in json.loads(event)["choices"]:
            texts[x["index"]] += x["text"] if "text" in x else x["delta"]["content"]
    return texts


async def _leave(client: httpx.AsyncClient, stream: bool, seconds: float) -> None:
    """Close the connection in the middle of a response, or before it."""
    body = ENDLESS | {"stream": stream, "n": 2}
    with anyio.move_on_after(seconds), suppress(httpx.HTTPError):
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            async for _ in answer.aiter_lines():
                pass


async def _crowd(url: str, cases: Sequence[Case], count: int) -> int:
    """`count` requests at once: cases, some of which are malformed or cancelled. Returns how many were answered."""
    draw, answered = random.Random(1), 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal answered
        await asyncio.sleep(draw.random() * count / 100)
        kind, stream = draw.random(), draw.random() < 0.5
        if kind < 0.1:
            bad = await client.post(draw.choice([COMPLETIONS, CHATS]), content=draw.choice(MALFORMED), headers=JSON)
            assert (bad.status_code, list(bad.json())) == (400, ["error"])
        elif kind < 0.3:
            await _leave(client, stream, draw.random() * 0.3)
        else:
            case = draw.choice(cases)
            assert await _ask(client, case, stream) == case.texts, case.body
            answered += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(count)))
    return answered


JSON = {"content-type": "application/json"}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "distinct"), [(10, 4), (200, 60)])
def test_a_crowd_of_requests(generator: Generator, folder: Path, count: int, distinct: int) -> None:
    """Random lengths, cancelled and malformed ones: right answers, and no page is lost."""
    cases = random_cases(generator, folder, distinct)
    with served(generator, folder, waiting=2 * count, client_texts=3 * count) as (url, service):
        assert asyncio.run(_crowd(url, cases, count)) > count // 2
        until(lambda: not service.engine.open_texts and not pages_used(service))
        assert httpx.get(f"{url}/health").status_code == 200
    assert generator.load == (0, 0, 0, 80)
    assert cases[0].texts == [x.text for x in _alone(generator, cases[0])], "pages have kept something"


def _alone(generator: Generator, case: Case) -> list[Completion]:
    again = {key: case.body[key] for key in ("max_tokens", "temperature", "seed", "top_p", "top_k") if key in case.body}
    more = {key: case.body[key] for key in ("min_p", "repetition_penalty", "ignore_end") if key in case.body}
    assert generator.tokenizer is not None
    prompt = "<|im_start|>user\n" + case.body["messages"][0]["content"] + "<|im_end|>\n<|im_start|>assistant\n"
    stop = tuple(case.body.get("stop", ()))
    options = SamplingOptions(**again, **more, stop=stop, num_samples=case.body["n"])
    return generator.generate([generator.tokenizer.encode(prompt)], options)


# --- limits and errors -----------------------------------------------------------------------------------------------


def test_limits(generator: Generator, folder: Path) -> None:
    limits = {"body_bytes": 2000, "prompt_tokens": 20, "max_tokens": 30, "texts": 3}
    with served(generator, folder, api_key="secret", **limits) as (url, _):
        client = httpx.Client(base_url=url, headers={"authorization": "Bearer secret"})
        base = {"model": "tiny", "prompt": "a"}
        for body, status, param, message in (
            (base | {"max_tokens": 31}, 400, "max_tokens", "at most 30"),
            (base | {"prompt": [1] * 21}, 400, "prompt", "has 21 tokens, but at most 20"),
            (base | {"n": 4}, 400, "n", "4 texts"),
            (base | {"prompt": ["a"] * 4}, 400, "prompt", "4 texts"),
            (base | {"prompt": "a" * 2000}, 413, None, "more than 2000 bytes"),
            (base | {"model": "other"}, 404, "model", "does not exist"),
        ):
            found = client.post(COMPLETIONS, json=body)
            error = found.json()["error"]
            assert (found.status_code, error["param"]) == (status, param), error
            assert message in error["message"]
        assert client.post(CHATS, json={"model": "tiny", "messages": MESSAGES[1:]}).json()["usage"]["total_tokens"] < 96
        assert client.post(
            COMPLETIONS, content=json.dumps(base), headers={"content-type": "text/plain"}
        ).is_client_error
        moved = client.post(COMPLETIONS + "/", json=base, headers={"host": "elsewhere.example"})
        assert (moved.status_code, moved.headers.get("location")) == (404, None), "no redirection to the client's host"
        for value in ("", "Bearer public", "secret", "Basic secret", "Bearersecret", "Bearer Bearer secret", "Bearer"):
            headers = {"authorization": value}
            for found in (
                httpx.post(url + COMPLETIONS, json=base, headers=headers),
                httpx.get(f"{url}/v1/models", headers=headers),
            ):
                assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/v1/models", headers={"authorization": "bearer secret"}).is_success, "schemes have no case"
        assert client.post(COMPLETIONS, json=base).is_success
    with pytest.raises(ValueError, match=r"the limit texts = 0: must be above 0"):
        ServerLimits(texts=0)


@pytest.mark.parametrize("where", ["prepared", "decoded"])
def test_a_request_that_fails_does_not_concern_others(
    generator: Generator, folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while a text is prepared, or its tokens are decoded, is that request's 500."""
    stream, bad = generator_module.stream_of, [9, 8, 7]

    def failing_stream(seed: int, prompt: Sequence[int], sample: int) -> Any:
        if where == "prepared" and prompt == bad and sample == 1:
            raise RuntimeError("of one text")
        return stream(seed, prompt, sample)

    class FailingText(generator_module.TextStream):
        def add(self, token: int) -> str:
            if where == "decoded" and self.fails and token != bad[0]:
                raise RuntimeError("of one text")
            return super().add(token)

        def __init__(self, decode: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
            super().__init__(decode, prompt, stop)
            self.fails = list(prompt) == bad

    monkeypatch.setattr(generator_module, "stream_of", failing_stream)
    monkeypatch.setattr(generator_module, "TextStream", FailingText)
    good = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_end": True}
    with served(generator, folder) as (url, service):
        expected = httpx.post(url + COMPLETIONS, json=good, timeout=60).json()["choices"]
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(httpx.post, url + COMPLETIONS, json=good, timeout=60)
            failed = httpx.post(url + COMPLETIONS, json=good | {"prompt": bad, "n": 2}, timeout=60)
            assert (failed.status_code, list(failed.json())) == (500, ["error"])
            assert running.result().json()["choices"] == expected
        assert httpx.post(url + COMPLETIONS, json=good, timeout=60).json()["choices"] == expected
        until(lambda: not service.engine.open_texts and not pages_used(service), 5)


def test_a_chat_whose_text_cannot_be_tokenized_is_refused(generator: Generator, folder: Path, tmp_path: Path) -> None:
    """A template may render a lone surrogate, which is the tokenizer's TypeError."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "chat_template.jinja").write_text(r'{{ "\ud800" }}')
    with served(generator, own) as (url, _):
        found = httpx.post(url + CHATS, json={"model": "tiny", "messages": MESSAGES})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "messages")
        assert found.json()["error"]["message"].startswith("messages: ")


@pytest.mark.slow
def test_a_client_with_long_texts_does_not_let_others_wait(generator: Generator, folder: Path) -> None:
    """Of two requests of one address the second runs at once, and both have the texts that they have alone."""
    long = {"model": "tiny", "prompt": "a", "n": 16, "max_tokens": 60, "temperature": 0, "ignore_end": True}
    short = long | {"prompt": "b", "n": 1, "max_tokens": 2}
    with served(generator, folder, client_texts=100) as (url, service), ThreadPoolExecutor(1) as pool:
        alone = [httpx.post(url + COMPLETIONS, json=body, timeout=60).json()["choices"] for body in (long, short)]
        running = pool.submit(httpx.post, url + COMPLETIONS, json=long, timeout=60)
        until(lambda: service.engine.load.running == 8)
        assert httpx.post(url + COMPLETIONS, json=short, timeout=60).json()["choices"] == alone[1]
        assert service.engine.load.waiting >= 7, "it had to wait"
        assert running.result().json()["choices"] == alone[0]


def test_headers_that_do_not_end_keep_nobody_out(
    generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the default limit of connections; each is closed in time, also behind a first request."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    limit = parse_arguments(["a"]).max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * limit:  # both ends of each connection, and others
        pytest.skip(f"{hard} open files are allowed")
    with served(generator, folder, max_connections=limit + 1) as (url, _), ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * limit), hard))
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        half = [stack.enter_context(socket.create_connection(address)) for _ in range(limit + 76)]
        for connection in half:
            with suppress(OSError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        assert httpx.get(f"{url}/health").status_code == 200
        second = stack.enter_context(socket.create_connection(address))
        second.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += second.recv(1000)
        second.sendall(b"GET /hea")
        for connection in (*half, second):
            connection.settimeout(5)
            with suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
        assert not connections.LimitedProtocol.incomplete
        slow = stack.enter_context(socket.create_connection(address))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 2\r\n\r\n")
        time.sleep(0.7)
        slow.sendall(b"{}")
        assert slow.recv(1000).startswith(b"HTTP/1.1 400"), "bodies have the time of the request"


def test_keys_that_are_not_ascii(generator: Generator, folder: Path) -> None:
    with served(generator, folder, api_key="schlüssel") as (url, _):
        for key, status in (("schlüssel", 200), ("schlussel", 401), ("schl\udcfcssel", 401)):
            headers = {b"authorization": b"Bearer " + key.encode("utf-8", "surrogateescape")}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status


def test_a_full_queue_and_clients_that_leave(generator: Generator, folder: Path) -> None:
    """8 texts run and 2 may wait; those who leave make room at once, with all pages."""

    async def fill(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            leaving = [asyncio.create_task(_leave(client, stream, 60)) for stream in (True, False) * 5]
            await asyncio.to_thread(until, lambda: service.engine.load.running == 8)
            refused = await client.post(COMPLETIONS, json=ENDLESS | {"n": 2})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)

    with served(generator, folder, waiting=2, client_texts=100) as (url, service):
        asyncio.run(fill(url))
        until(lambda: not service.engine.open_texts and not pages_used(service), 5)
        assert httpx.post(url + COMPLETIONS, json=ENDLESS | {"max_tokens": 2}).is_success
        text = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    statuses = {x.labels["status"]: x.value for x in families["megafp8_requests"].samples if x.name.endswith("_total")}
    assert statuses["200"] == 1
    assert statuses["499"] + statuses["429"] == 11
    assert statuses["499"] >= 4
    values = {x.name: x.value for family in families.values() for x in family.samples if not x.labels}
    assert (values["megafp8_pages_used"], values["megafp8_pages_free"]) == (0, 80)
    assert (values["megafp8_running"], values["megafp8_waiting"]) == (0, 0)
    assert values["megafp8_generated_tokens_total"] >= 2
    assert values["megafp8_time_to_first_token_seconds_count"] >= 1
    assert values["megafp8_time_between_tokens_seconds_sum"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(generator: Generator, folder: Path, stream: bool) -> None:
    with served(generator, folder, seconds=0.2) as (url, service):
        found = httpx.post(url + COMPLETIONS, json=ENDLESS | {"stream": stream, "n": 8})
        error = json.loads(events(found.text.splitlines())[-1]) if stream else found.json()
        assert found.status_code == (200 if stream else 504)
        assert error["error"]["message"] == "not finished after 0.2 seconds"
        until(lambda: not service.engine.open_texts and not pages_used(service), 5)


def test_a_stream_that_lags_leaves_turns_to_others(
    generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health checks are answered although more is generated than can be encoded."""
    chunk = Response.chunk
    monkeypatch.setattr(Response, "chunk", lambda self, update: (time.sleep(0.005), chunk(self, update))[1])
    with served(generator, folder) as (url, service), ThreadPoolExecutor(1) as pool:
        stream = pool.submit(httpx.post, url + COMPLETIONS, json=ENDLESS | {"stream": True, "n": 8}, timeout=60)
        until(lambda: service.engine.open_texts > 0)
        answered = 0
        while not stream.done():
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            answered += not stream.done()
    assert stream.result().text.endswith("data: [DONE]\n\n")
    assert answered >= 5


def test_draining(generator: Generator, folder: Path) -> None:
    """Those that run end; others are refused."""
    with served(generator, folder) as (url, service):
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(httpx.post(url + COMPLETIONS, json=ENDLESS, timeout=60)))
        thread.start()
        until(lambda: service.engine.open_texts == 1)
        service.draining = True
        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(url + COMPLETIONS, json=ENDLESS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        thread.join()
        assert found[0].json()["usage"]["completion_tokens"] == LENGTH - 1


def test_a_generator_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests get an error, and so do later ones."""
    broken = Generator.from_checkpoint(folder, device="cpu")
    steps = iter(range(5))
    step = broken.step
    monkeypatch.setattr(broken, "step", lambda: (next(steps), step()))
    with served(broken, folder) as (url, service):
        answers = [httpx.post(url + COMPLETIONS, json=ENDLESS | {"stream": stream}) for stream in (True, False)]
        assert [x.status_code for x in answers] == [200, 500]
        assert json.loads(events(answers[0].text.splitlines())[-1])["error"]["type"] == "server_error"
        assert httpx.get(f"{url}/health").status_code == 500
        assert isinstance(service.engine.failure, StopIteration)
