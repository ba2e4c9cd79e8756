"""A small model with a chat template, and servers over it: in a thread of the tests' process, or as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from megafp8.config import model_spec
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.data.chats import chat_prompt_encoder, read_chat_template
from megafp8.inference import Generator
from megafp8.inference.server.app import EncodeChat, ServerLimits, Service
from megafp8.inference.server.connections import LimitedProtocol
from megafp8.inference.server.engine import Engine
from tests.conversion.checkpoints import convert
from tests.conversion.families import SMALL, RandomSource
from tests.data.test_chats import CHATML, write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
LENGTH = 96
VOCABULARY = 340


def write_model(folder: Path) -> Path:
    """A folder of Hugging Face with random weights, a byte-level tokenizer and the template ChatML."""
    model = model_spec({**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH})
    convert(RandomSource(model), HfSink(folder))
    write_tokenizer(folder, CHATML)
    return folder


@contextmanager
def served(
    generator: Generator,
    folder: Path | None,
    api_key: str | None = None,
    max_connections: int | None = None,
    allow_refit: bool = False,
    **limits: Any,
) -> Iterator[tuple[str, Service]]:
    """The URL of a server in another thread, and its service. `folder`: with a chat template, if there is one."""
    assert generator.tokenizer is not None
    encode_chat: EncodeChat | str = "no template"
    if folder is not None:
        encode_chat = chat_prompt_encoder(generator.tokenizer, read_chat_template(str(folder / "tokenizer.json")))
    service = Service(
        Engine(generator), "tiny", encode_chat=encode_chat, limits=ServerLimits(**limits), api_key=api_key,
        allow_refit=allow_refit,
    )  # fmt: skip
    server = uvicorn.Server(
        uvicorn.Config(
            service.app(),
            port=0,
            http=LimitedProtocol,
            limit_concurrency=max_connections,
            lifespan="on",
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def server_process(folder: Path, *arguments: str, ranks: int = 1) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a server started by its command, under torchrun with several ranks, and its process."""
    module = ["megafp8", "serve", str(folder), "--name", "tiny", "--device", "cpu", "--port", "0", *arguments]
    command = [sys.executable, "-m", *module]
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        command = [sys.executable, "-m", *torchrun, *module, "--tensor", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError("".join(lines))
        threading.Thread(target=lambda: sys.stderr.write(process.stderr.read()), daemon=True).start()
        yield lines[-1].split()[-1], process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


def pages_used(service: Service) -> int:
    return service.engine.load.pages_used


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until `condition()`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def events(lines: Sequence[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line]
