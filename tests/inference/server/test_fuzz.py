"""Random requests to a server; and that a status 500 or a wrong text is noticed."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path

import pytest

from benchmarks.bench_server import server, write_tiny_model
from tests.inference.server.fuzz import CHAT_TEMPLATE, COMPLETIONS, KINDS, RIGHT, Post, fuzz, request_of

METRICS = (
    "".join(f"# TYPE megafp8_{x} gauge\nmegafp8_{x} 0\n" for x in ("running", "waiting", "pages_used")) + "# EOF\n"
)


async def _run(status: int, texts: list[str]) -> list[str]:
    """The failures that are found in a server which answers the fixed request by `texts` and all others by `status`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(2**22):
            wanted = RIGHT["prompt"].encode() in head
            body = METRICS if b"/metrics" in head else json.dumps({"choices": [{"text": "x"}]})
            if wanted:
                body = json.dumps({"choices": [{"text": texts.pop(0)}]})
            code = 200 if wanted or b"/metrics" in head or b"GET /health" in head else status
            if b"HEAD /" in head:
                body = ""
            header = f"HTTP/1.1 {code} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((header + body).encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    indices = [i for i in range(60) if _is_small(i)][:10]
    tally = await fuzz(url, 0, indices, 1, 5, half_sent=2)
    server.close()
    return tally.failures


def _is_small(index: int) -> bool:
    kind, request = request_of(0, index)
    return kind in ("right", "wrong options") and isinstance(request, Post) and request.path == COMPLETIONS


@pytest.mark.parametrize(
    ("status", "texts", "failures"),
    [(200, ["a"] * 4, 0), (500, ["a"] * 4, 10), (200, ["a", "a", "b", "a"], 1)],
)
def test_failures(status: int, texts: list[str], failures: int) -> None:
    found = asyncio.run(_run(status, texts))
    assert len(found) == failures, found
    assert all(("of seed" in line) == (status == 500) for line in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_requests(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    options = argparse.Namespace(tensor=1, device="cpu", server="--max-waiting 64 --cache-tokens 4096")
    with server(tmp_path, options) as (url, process):
        tally = asyncio.run(fuzz(url, 0, list(range(1000)), 8, 500, half_sent=1100))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert tally.failures == []
    assert tally.statuses.keys() == KINDS.keys()
