"""The command: what it refuses before it starts, SIGTERM, and ranks under torchrun."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from megafp8.inference import Generator, SamplingOptions
from tests.inference.server.serving import LENGTH, server_process, until, write_model
from tools.serve import main

LONG: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": LENGTH - 3, "ignore_end": True, "seed": 4}


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_model(tmp_path))
    monkeypatch.setenv("EMPTY", "")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            ([str(tmp_path / "none")], "error: there is no "),
            ([folder, "--api-key-env", "EMPTY"], "--api-key-env EMPTY: this environment variable is unset or empty"),
            ([folder, "--max-texts", "0"], "error: the limit texts = 0: must be above 0"),
            (
                [folder, "--port", str(taken.getsockname()[1])],
                f"error: --host 127.0.0.1 --port {taken.getsockname()[1]}: "
                "Address already in use; give another port, or 0 for a free one\n",
            ),
            ([folder, "--tensor", "2"], "start it with torchrun --nproc-per-node 2"),
            ([folder, "--chat-template", str(tmp_path / "broken.jinja")], "the chat template cannot be compiled"),
        ):
            assert main([*arguments, "--device", "cpu"] if "--port" in arguments else
                        [*arguments, "--device", "cpu", "--port", "0"]) == 2  # fmt: skip
            assert message in capsys.readouterr().err
        (tmp_path / "tokenizer.json").unlink()
        assert main([folder, "--device", "cpu", "--port", "0"]) == 2
        assert "has no tokenizer; use megafp8.inference.Generator with tokens" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder, and the text that its model gives for `LONG`."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    options = SamplingOptions(max_tokens=LONG["max_tokens"], temperature=1.0, ignore_end=True, seed=LONG["seed"])
    text = Generator.from_checkpoint(folder, device="cpu").generate(LONG["prompt"], options)[0].text
    return folder, text


@contextmanager
def sixty_texts(url: str) -> Iterator[list[httpx.Response]]:
    """A request that runs; its response, when the block has been left."""
    found: list[httpx.Response] = []
    body = LONG | {"n": 60}
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    thread.start()
    until(lambda: "megafp8_running 60.0" in httpx.get(f"{url}/metrics").text)
    yield found
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_lets_requests_end(model: tuple[Path, str], ranks: int) -> None:
    folder, text = model
    with server_process(folder, "--cache-tokens", "8192", ranks=ranks) as (url, process):
        assert httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"] == text
        with sixty_texts(url) as found:
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        assert found[0].json()["choices"][0]["text"] == text
        assert process.wait(timeout=30) == (0 if ranks == 1 else 1), "torchrun's own code after a signal is 1"


@pytest.mark.slow
def test_sigterm_ends_requests_that_take_too_long(model: tuple[Path, str]) -> None:
    folder, _ = model
    with server_process(folder, "--cache-tokens", "8192", "--shutdown-seconds", "0.1") as (url, process):
        with sixty_texts(url) as found:
            process.send_signal(signal.SIGTERM)
        assert (found[0].status_code, found[0].json()["error"]["message"]) == (503, "the server is shutting down")
        assert process.wait(timeout=30) == 0
