"""Pause, refit and resume over HTTP, from checkpoints and from live trainers."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from megafp8.checkpoint import CheckpointReader, latest
from megafp8.data.tokenizers import build_tokenizer
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.generator import CacheOptions
from megafp8.inference.server.app import Service
from megafp8.inference.weight_transfer import send_weights
from megafp8.training.state import checkpoint_folder, save_state
from tests.inference.server.serving import served, server_process, until
from tests.inference.test_checkpoints import bytes_config
from tests.training.presets import DELAYED, DP2, NONE, TP2, WIDE, Preset
from tests.training.runs import start, steps_of
from tests.world import World

CACHE = CacheOptions(page_size=4, cache_tokens=256, max_sequences=4)
BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_end": True}
GREEDY = SamplingOptions(max_tokens=20, ignore_end=True)
OTHER_THETA = Preset(("theta",), {"model": {"rope_theta": 5e4}})
LONG = BODY | {"max_tokens": 60}


def _train(preset: Preset, folder: str, steps: int) -> None:
    config = bytes_config(preset)
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(steps))
    save_state(trainer, Path(folder), steps, build_tokenizer("bytes").fingerprint)


def _text(folder: Path) -> str:
    return Generator.from_checkpoint(folder, device="cpu", cache=CACHE).generate("abc", GREEDY)[0].text


@pytest.fixture(scope="module")
def two_runs(world2: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same model."""
    folders = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder, steps in zip(folders, (1, 5), strict=True):
        world2.run(_train, NONE, str(folder), steps, ranks=1)
    return folders


class Client:
    """Requests to a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, body: dict[str, Any] = BODY) -> tuple[str, list[int]]:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["text"], answer["weight_versions"]

    def post(self, action: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/weights/{action}", json=body, timeout=60)

    @contextmanager
    def while_it_asks(self, body: dict[str, Any]) -> Iterator[list[tuple[str, list[int]]]]:
        """A request in another thread, and its answer when the block has been left."""
        answers: list[tuple[str, list[int]]] = []
        thread = threading.Thread(target=lambda: answers.append(self.complete(body)))
        thread.start()
        yield answers
        thread.join()


@contextmanager
def _served(folder: Path, **options: Any) -> Iterator[tuple[Client, Service]]:
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE)
    with served(generator, None, allow_refit=True, **options) as (url, service):
        yield Client(url), service


def test_pause_refit_resume(two_runs: tuple[Path, Path]) -> None:
    """Texts that run end with the old weights; those that come meanwhile wait for the new ones."""
    old, new = (_text(folder) for folder in two_runs)
    assert old != new
    with _served(two_runs[0]) as (client, service):
        assert client.complete() == (old, [0])
        refused = client.post("refit", checkpoint=str(two_runs[1]))
        assert refused.status_code == 400
        assert "POST /v1/weights/pause first" in refused.json()["error"]["message"]
        with client.while_it_asks(LONG) as running:
            until(lambda: service.engine.load.running == 1)
            assert client.post("pause").json() == {"weight_version": 0, "paused": True}
            assert service.engine.load.running == 0
        assert running[0][1] == [0]
        with client.while_it_asks(BODY) as waiting:
            until(lambda: service.engine.open_texts == 1)
            assert client.post("refit", checkpoint=str(two_runs[1])).json() == {"weight_version": 1, "paused": True}
            assert waiting == []
            assert client.post("resume").json() == {"weight_version": 1, "paused": False}
        assert waiting == [(new, [1])]
        assert httpx.get(f"{client.url}/v1/weights").json() == {"weight_version": 1, "paused": False}
        assert "megafp8_weight_version 1.0" in httpx.get(f"{client.url}/metrics").text


def test_two_clients_pause(two_runs: tuple[Path, Path]) -> None:
    """Both are answered, although one asks for `hold` later, and only `resume` ends the pause."""
    with _served(two_runs[0], seconds=20.0) as (client, service), ThreadPoolExecutor(3) as pool:
        text = pool.submit(client.complete, LONG)
        until(lambda: service.engine.load.running == 1)
        pauses = [pool.submit(client.post, "pause", running=running) for running in ("finish", "hold")]
        assert [pause.result().json() for pause in pauses] == [{"weight_version": 0, "paused": True}] * 2
        assert client.post("pause").json()["paused"]
        assert client.post("resume").json() == {"weight_version": 0, "paused": False}
        assert text.result()[1] == [0]


def test_texts_that_are_held(two_runs: tuple[Path, Path]) -> None:
    """A text that runs is held and goes on with the new weights; one that is cancelled while it waits does not run."""
    with _served(two_runs[0]) as (client, service):
        with client.while_it_asks(LONG) as held:
            until(lambda: service.engine.load.running == 1)
            client.post("pause", running="hold")
            assert service.engine.load.running == 1
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{client.url}/v1/completions", json=BODY, timeout=0.3)
            until(lambda: service.engine.open_texts == 1)
            assert client.post("refit", checkpoint=str(two_runs[1]), version=7).json()["weight_version"] == 7
            client.post("resume")
        assert held[0][1] == [0, 7]
        stream = httpx.post(f"{client.url}/v1/completions", json=BODY | {"stream": True}).text
        assert stream.count('"weight_versions":[7]') == stream.count('"choices":') > 1
        assert service.engine.load.pages_used == 0


def test_weights_that_do_not_fit(two_runs: tuple[Path, Path], tmp_path: Path, world2: World) -> None:
    """Each is refused with one line, and the old weights serve on."""
    world2.run(_train, NONE, str(tmp_path / "damaged"), 5, ranks=1)
    newest = latest(checkpoint_folder(tmp_path / "damaged"))
    assert isinstance(newest, Path)
    (last,) = CheckpointReader(newest).rectangles["model.output.weight"]
    file = Path(str(last.file))
    content = bytearray(file.read_bytes())
    content[last.start + last.length // 2] ^= 1
    file.write_bytes(content)
    world2.run(_train, WIDE, str(tmp_path / "wider"), 1, ranks=1)
    world2.run(_train, OTHER_THETA, str(tmp_path / "theta"), 1, ranks=1)
    old = _text(two_runs[0])
    with _served(two_runs[0], seconds=2.0) as (client, _):
        client.post("pause")
        for body, message in (
            ({"checkpoint": str(tmp_path / "none")}, "none"),
            ({"checkpoint": str(tmp_path / "wider")}, "hidden_size"),
            ({"checkpoint": str(tmp_path / "theta")}, "is a checkpoint of another model: rope_theta"),
            ({"checkpoint": str(tmp_path / "damaged")}, "model.output.weight"),
            ({"trainer": "nowhere"}, "must be host:port"),
            ({"trainer": "127.0.0.1:1"}, "the weights stay as they are"),
            ({}, "give either checkpoint or trainer"),
            ({"checkpoint": ""}, "checkpoint: String should have at least 1 character"),
            ({"trainer": ""}, "trainer: String should have at least 1 character"),
            ({"checkpoint": "a", "layout": 1}, "layout: Extra inputs are not permitted"),
        ):
            answer = client.post("refit", **body)
            assert answer.status_code == 400, body
            text = answer.json()["error"]["message"]
            assert message in text
            assert "\n" not in text
        client.post("resume")
        assert client.complete() == (old, [0])


@pytest.fixture
def silent_trainer() -> Iterator[str]:
    """Address of a trainer that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_trainer_that_is_silent(two_runs: tuple[Path, Path], silent_trainer: str) -> None:
    """Its refit ends by a resume, by its time limit, and with the server; the next refit does not wait for it."""
    old, new = (_text(folder) for folder in two_runs)
    with _served(two_runs[0]) as (client, service), ThreadPoolExecutor(2) as pool:
        client.post("pause")
        refit = pool.submit(client.post, "refit", trainer=silent_trainer)
        until(lambda: service.engine._refit is not None)
        conflict = client.post("refit", checkpoint=str(two_runs[1]))
        assert (conflict.status_code, conflict.json()["error"]["message"]) == (
            409,
            "another refit runs; try again later",
        )
        assert client.post("resume").json() == {"weight_version": 0, "paused": False}
        assert refit.result().status_code == 400
        assert "the server was resumed before they had arrived" in refit.result().json()["error"]["message"]
        assert client.complete() == (old, [0])
        client.post("pause")
        assert client.post("refit", checkpoint=str(two_runs[1])).json() == {"weight_version": 1, "paused": True}
        client.post("resume")
        assert client.complete() == (new, [1])
    with _served(two_runs[0], seconds=0.5) as (client, service), ThreadPoolExecutor(1) as pool:
        client.post("pause")
        late = client.post("refit", trainer=silent_trainer)
        assert (late.status_code, late.json()["error"]["code"]) == (400, "weights_refused")
        assert "they have not arrived within 0.5 s" in late.json()["error"]["message"]
        service.limits = replace(service.limits, seconds=600.0)
        refit = pool.submit(client.post, "refit", trainer=silent_trainer)
        until(lambda: service.engine._refit_runs)
        began = time.monotonic()
        asyncio.run_coroutine_threadsafe(service.drain(), service.engine._loop).result(20)
        assert "the server was resumed before they had arrived" in refit.result(20).text
    assert time.monotonic() - began < 20
    until(lambda: not service.engine.receives)


def test_it_must_be_allowed(two_runs: tuple[Path, Path]) -> None:
    generator = Generator.from_checkpoint(two_runs[0], device="cpu", cache=CACHE)
    with served(generator, None) as (url, _):
        answer = Client(url).post("refit", checkpoint=str(two_runs[1]))
        assert answer.status_code == 403
        assert "start it with --allow-refit" in answer.json()["error"]["message"]
    with served(generator, None, api_key="key", allow_refit=True) as (url, service):
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "key"}):
            for action, body in (("pause", {}), ("refit", {"checkpoint": str(two_runs[1])}), ("resume", {})):
                answer = httpx.post(f"{url}/v1/weights/{action}", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert httpx.get(f"{url}/v1/weights", headers=headers).status_code == 401
        assert (service.engine.paused, service.engine.weight_version) == (False, 0)
        key = {"authorization": "Bearer key"}
        for action, body in (("pause", {}), ("refit", {"checkpoint": str(two_runs[1])}), ("resume", {})):
            assert httpx.post(f"{url}/v1/weights/{action}", json=body, headers=key).is_success
        assert service.engine.weight_version == 1


def _send(preset: Preset, url: str, folder: str) -> list[int]:
    """Weights after one step and after two more, of which the last are saved too."""
    trainer, parallel = start(bytes_config(preset))
    versions = []
    for steps in (range(1), range(1, 3)):
        steps_of(trainer, parallel, steps)
        versions.append(send_weights(trainer, url, seconds=60.0))
    save_state(trainer, Path(folder), 3, build_tokenizer("bytes").fingerprint)
    return versions


@pytest.mark.parametrize("preset", [TP2, DP2, pytest.param(TP2 | DELAYED, marks=pytest.mark.slow)], ids=str)
def test_a_trainer_sends(world2: World, tmp_path: Path, preset: Preset) -> None:
    """A server of one rank has the weights, and FP8 scales, of a trainer on two."""
    world2.run(_train, preset, str(tmp_path / "before"), 1)
    with _served(tmp_path / "before") as (client, _):
        assert world2.run(_send, preset, client.url, str(tmp_path / "sent")) == [[1, 3]] * 2
        assert client.complete() == (_text(tmp_path / "sent"), [3])


def _send_wrong(preset: Preset, url: str) -> str:
    trainer, _ = start(bytes_config(preset))
    try:
        send_weights(trainer, url, seconds=30.0)
    except ValueError as error:
        return str(error)
    return ""


def test_a_trainer_that_does_not_fit(world2: World, two_runs: tuple[Path, Path]) -> None:
    """Both sides say why, and the server goes on with its weights."""
    with _served(two_runs[0]) as (client, service):
        messages = world2.run(_send_wrong, WIDE | DP2, client.url)
        assert len(set(messages)) == 1
        assert (
            "the model has model.embedding.word.weight [320, 64], but the trainer has shape [320, 128]" in messages[0]
        )
        assert not service.engine.paused
        assert client.complete() == (_text(two_runs[0]), [0])
    with served(Generator.from_checkpoint(two_runs[0], device="cpu", cache=CACHE), None) as (url, _):
        assert "start it with --allow-refit" in world2.run(_send_wrong, NONE, url, ranks=1)[0]


def test_a_trainer_leaves_the_refit_of_another_one_alone(world2: World) -> None:
    """A resume would end that refit."""
    asked = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path.rpartition("/")[2])
            self.send_response(409 if asked[-1] == "refit" else 200)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "another refit runs; try again later"}}')

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (message,) = world2.run(_send_wrong, NONE, f"http://127.0.0.1:{server.server_port}", ranks=1)
        server.shutdown()
    assert message.endswith("/v1/weights/refit: another refit runs; try again later")
    assert asked == ["pause", "refit"]


@pytest.mark.slow
def test_a_trainer_sends_to_two_ranks(world2: World, tmp_path: Path, two_runs: tuple[Path, Path]) -> None:
    """From one rank to a server of two, under torchrun."""
    with server_process(two_runs[0], "--allow-refit", ranks=2) as (url, _):
        assert world2.run(_send, NONE, url, str(tmp_path), ranks=1) == [[1, 3]]
        assert Client(url).complete() == (_text(tmp_path), [3])
        shutil.rmtree(tmp_path)
        Client(url).post("pause")
        assert Client(url).post("refit", checkpoint=str(two_runs[1])).json()["weight_version"] == 4
        assert Client(url).post("refit", checkpoint=str(tmp_path)).status_code == 400
        Client(url).post("resume")
        assert Client(url).complete() == (_text(two_runs[1]), [4])
