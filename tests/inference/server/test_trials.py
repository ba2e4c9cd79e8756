"""Servers under unkind use: refits under load, refits at once, senders that misbehave, readers that are slow."""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.generator import CacheOptions
from tests.inference.server.senders import KINDS, sender
from tests.inference.server.serving import served, server_process, until, write_model
from tests.inference.server.test_refit import Client, _train
from tests.training.presets import NONE
from tests.world import World

pytestmark = pytest.mark.slow

CACHE = CacheOptions(page_size=4, cache_tokens=2048, max_sequences=32)
PROMPTS = ("abc", "def f(", "x = 1", "0 1 2 3", "The ")
TOKENS = 24


@pytest.fixture(scope="module")
def runs(world2: World, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one model; even versions of weights are those of the first one, odd ones those of the second."""
    folders = [tmp_path_factory.mktemp(name) for name in ("even", "odd")]
    for folder, steps in zip(folders, (1, 5), strict=True):
        world2.run(_train, NONE, str(folder), steps, ranks=1)
    return folders


class Texts:
    """Texts that the weights of two runs give, in turn."""

    def __init__(self, runs: list[Path]) -> None:
        self._generators = [Generator.from_checkpoint(run, device="cpu", cache=CACHE) for run in runs]
        self._known: dict[tuple[str, tuple[int, ...]], set[str]] = {}

    def of(self, prompt: str, versions: list[int]) -> set[str]:
        """Return the texts that weights of these versions can give one after the other, by the place of the change."""
        key = prompt, tuple(version % 2 for version in versions)
        if key not in self._known:
            first = self._generators[key[1][0]]
            tokens = first.encode(prompt)
            if len(versions) == 1:
                found = {first.generate(prompt, SamplingOptions(max_tokens=TOKENS, ignore_end=True))[0].text}
            else:
                before = first.generate(prompt, SamplingOptions(max_tokens=TOKENS, ignore_end=True))[0].tokens
                second = self._generators[key[1][1]]
                found = set()
                for k in range(1, TOKENS):
                    options = SamplingOptions(max_tokens=TOKENS - k, ignore_end=True)
                    after = second.generate([tokens + before[:k]], options)[0].tokens
                    assert first.tokenizer is not None
                    found.add(first.tokenizer.decode(before[:k] + after))
            self._known[key] = found
        return self._known[key]


@pytest.mark.parametrize("running", ["finish", "hold"])
def test_refits_while_20_clients_ask(runs: list[Path], running: str) -> None:
    """Every answer is the text of the weights that it names."""
    answers: list[tuple[str, str, list[int]]] = []
    ends = threading.Event()

    def ask(url: str, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_end": True}
        while not ends.is_set():
            answers.append((prompt, *Client(url).complete(body)))

    generator = Generator.from_checkpoint(runs[0], device="cpu", cache=CACHE)
    with served(generator, None, allow_refit=True, client_texts=100) as (url, service), ThreadPoolExecutor(20) as pool:
        asking = [pool.submit(ask, url, number) for number in range(20)]
        try:
            for version in range(1, 13):
                enough = len(answers) + 25  # few texts meet more than one refit
                until(lambda: len(answers) >= enough and service.engine.load.running >= 5)  # noqa: B023
                assert Client(url).post("pause", running=running).json()["paused"]
                refit = Client(url).post("refit", checkpoint=str(runs[version % 2]), version=version)
                assert refit.json() == {"weight_version": version, "paused": True}
                assert Client(url).post("resume").json()["paused"] is False
        finally:
            ends.set()
        for done in asking:
            done.result()
        assert service.engine.load == (0, 0, 0, 512)
    texts, counts = Texts(runs), Counter[int]()
    for prompt, text, versions in answers:
        counts[len(versions)] += 1
        assert versions == sorted(set(versions))
        if len(versions) <= 2:
            assert text in texts.of(prompt, versions), (prompt, versions)
    print(f"{running}: {len(answers)} answers, by the number of versions: {dict(counts)}")
    assert counts[1] >= 20
    assert (counts[2] > 0) == (running == "hold")


def test_two_refits_at_once(runs: list[Path]) -> None:
    """One is done and the other one is refused; the weights are those of the last one that was done."""
    generator = Generator.from_checkpoint(runs[0], device="cpu", cache=CACHE)
    statuses = Counter[int]()
    texts = Texts(runs)
    with served(generator, None, allow_refit=True) as (url, _), ThreadPoolExecutor(4) as pool:
        client = Client(url)
        for first in range(1, 41, 4):
            client.post("pause")
            refits = {
                version: pool.submit(client.post, "refit", checkpoint=str(runs[version % 2]), version=version)
                for version in range(first, first + 4)
            }
            done = [version for version, refit in refits.items() if refit.result().status_code == 200]
            statuses.update(refit.result().status_code for refit in refits.values())
            version = client.post("resume").json()["weight_version"]
            assert version in done
            body = {"model": "tiny", "prompt": "abc", "max_tokens": TOKENS, "temperature": 0, "ignore_end": True}
            text, versions = client.complete(body)
            assert versions == [version]
            assert text in texts.of("abc", versions)
    print(f"two refits at once: {dict(statuses)}")
    assert set(statuses) == {200, 409}


def test_senders_that_misbehave(runs: list[Path]) -> None:
    """Each is refused with one line within the time limit, and the server goes on with its weights."""
    (text,) = Texts(runs[:1]).of("abc", [0])
    body = {"model": "tiny", "prompt": "abc", "max_tokens": TOKENS, "temperature": 0, "ignore_end": True}
    seconds = 8.0
    with server_process(runs[0], "--allow-refit", "--request-seconds", str(seconds)) as (url, process):
        client = Client(url)
        for kind in KINDS:
            with sender(kind) as address:
                client.post("pause")
                began = time.monotonic()
                answer = client.post("refit", trainer=address)
                took = time.monotonic() - began
                message = answer.json()["error"]["message"]
                client.post("resume")
                print(f"{kind}: {answer.status_code} after {took:.1f} s: {message[:150]}", flush=True)
                assert (answer.status_code, "\n" in message) == (400, False), kind
                assert message.startswith("the weights stay as they are: "), kind
                assert took < seconds + 10, kind
                assert client.complete(body) == (text, [0]), kind
        client.post("pause")
        until(lambda: client.post("refit", checkpoint=str(runs[1])).is_success, 90)
        client.post("resume")
        assert client.complete(body)[1] == [1]
        assert process.poll() is None


def _median_seconds(ask: Callable[[], Any], count: int) -> float:
    seconds = []
    for _ in range(count):
        began = time.monotonic()
        ask()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_slow_readers_delay_nobody(folder: Path) -> None:
    """A short request beside 40 streams that nobody reads takes as long as alone, once their texts are generated."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 90, "ignore_end": True, "n": 8, "stream": True}
    body |= {"logprobs": 5}  # long events, so that they fill the buffers of the sockets
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    )
    with (
        server_process(folder, "--max-client-texts", "1000", "--max-waiting", "1000") as (url, _),
        ExitStack() as stack,
    ):
        short = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        client = stack.enter_context(httpx.Client(base_url=url, timeout=120))

        def ask() -> None:
            assert client.post("/v1/completions", json=short).status_code == 200

        alone = _median_seconds(ask, 9)
        address = url.removeprefix("http://").rsplit(":", 1)
        for _ in range(40):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect((address[0], int(address[1])))
            reader.sendall(head.encode() + b"\r\n" + raw)

        def is_idle() -> bool:
            lines = client.get("/metrics").text.splitlines()
            return {"megafp8_running 0.0", "megafp8_waiting 0.0", "megafp8_pages_used 0.0"} <= set(lines)

        until(lambda: not is_idle())
        until(is_idle, 120)
        beside = _median_seconds(ask, 9)
    print(f"short request: alone {alone:.3f} s, beside slow readers {beside:.3f} s")
    assert beside < 5 * alone + 0.5
