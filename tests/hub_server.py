"""An HTTP server in this process that stands in for the Hugging Face Hub: repositories are local folders."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from megafp8.data import hub

COMMIT = "c" * 40


class HubServer:
    """Repositories by name, of models and data sets; `gated` ones are refused. `requests`: paths."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                server.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/")
        self.requests.append(path)
        parts = path.split("/")
        api = parts[0] == "api"
        parts = parts[1 if api else 0 :]
        if parts[0] in ("models", "datasets"):
            parts = parts[1:]
        repository, rest = "/".join(parts[:2]), parts[2:]
        folder = self.repositories.get(repository)
        if folder is None:
            return _send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository in self.gated:
            return _send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return _send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if not api:
            file = folder.joinpath(*rest[2:])
            if not file.is_file():
                return _send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return _send(handler, 200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(file)}"'})
        kind = rest[0] if rest else "info"
        if kind == "tree":
            top = folder.joinpath(*rest[2:])
            answer: Any = [_entry(x, folder) for x in sorted(top.rglob("*")) if x.is_file()]
        elif kind == "paths-info":
            answer = [_entry(x, folder) for x in sorted(folder.rglob("*")) if x.is_file()]
        else:
            answer = {"id": repository, "sha": COMMIT, "siblings": []}
        return _send(handler, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _entry(file: Path, folder: Path) -> dict[str, Any]:
    return {
        "type": "file", "path": file.relative_to(folder).as_posix(), "size": file.stat().st_size, "oid": _oid(file),
    }  # fmt: skip


def _send(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    wanted = handler.headers.get("Range")
    if wanted is not None and status == 200:
        first, last = wanted.removeprefix("bytes=").split("-")
        stop = min(int(last or len(content) - 1) + 1, len(content))
        headers = {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"}
        status, content = 206, content[int(first) : stop]
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """The server, which huggingface_hub in this process and its children asks, with an empty cache."""
    server = HubServer()
    hub._downloaded.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    try:
        yield server
    finally:
        server.close()
