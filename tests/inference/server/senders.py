"""Trainers of tests that misbehave while they send weights to a server, each in a process of its own.

A sender plays the single rank of a trainer: it opens a store, and speaks as `weight_transfer.send_weights` does until
it misbehaves.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megafp8.inference.refit import RankTensors, plan_refit
from megafp8.inference.weight_transfer import _holding
from tests.ports import free_port

_LIMIT = timedelta(seconds=60)
_SECONDS = 120.0


def _answer_bytes(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            connection.sendall(os.urandom(4096))


def _number(value: str) -> Callable[[dist.TCPStore], None]:
    return lambda store: store.set("senders", value)


def _description(text: str) -> Callable[[dist.TCPStore], None]:
    def describe(store: dist.TCPStore) -> None:
        store.set("senders", "1")
        store.set("rank/0", text)
        group = dist.ProcessGroupGloo(dist.PrefixStore("host", store), 0, 2, _LIMIT)
        time.sleep(_SECONDS)
        del group

    return describe


def _no_group(store: dist.TCPStore) -> None:
    store.set("senders", "1")
    store.set("rank/0", json.dumps(["", json.loads(store.get("rank/1"))[2], {}]))


def _transfers(store: dist.TCPStore) -> tuple[Any, list[int]]:
    """Claim to have what the server wants; return the group of both jobs and the bytes of each message."""
    store.set("senders", "1")
    _, _, wants = json.loads(store.get("rank/1"))
    store.set("rank/0", json.dumps(["", wants, {}]))
    wanted = {name: _holding(x) for name, x in wants.items()}
    group = dist.ProcessGroupGloo(dist.PrefixStore("host", store), 0, 2, _LIMIT)
    transfers = plan_refit([RankTensors(wanted, {}), RankTensors({}, wanted)])
    return group, [math.prod(x.shape) * getattr(torch, x.dtype).itemsize for x in transfers]


def _stops(end: Callable[[], None]) -> Callable[[dist.TCPStore], None]:
    """Return a sender that calls `end` after three messages."""

    def send(store: dist.TCPStore) -> None:
        group, sizes = _transfers(store)
        for size in sizes[:3]:
            group.send([torch.zeros(size, dtype=torch.uint8)], 1, 0).wait()
        end()

    return send


_MISBEHAVIOR: dict[str, Callable[[dist.TCPStore], None]] = {
    "says nothing": lambda store: None,
    "leaves": lambda store: os._exit(0),
    "-1 ranks": _number("-1"),
    "a billion ranks": _number("1000000000"),
    "no number of ranks": _number("many"),
    "no JSON": _description("{"),
    "null": _description("null"),
    "a shape of strings": _description('["", {"model.output.weight": [["a"], "bfloat16", [[["x"], ["y"]]]]}, {}]'),
    "tensors of another model": _description('["", {"model.output.weight": [[4, 4], "bfloat16", []]}, {}]'),
    "negative sizes": _description('["", {"model.output.weight": [[320, 64], "bfloat16", [[[0, 0], [-9, -9]]]]}, {}]'),
    "no group": _no_group,
    "killed after 3 tensors": _stops(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "silent after 3 tensors": _stops(lambda: time.sleep(_SECONDS)),
}
KINDS = ("random bytes", *_MISBEHAVIOR)


def _run(kind: str, port: int) -> None:
    if kind not in _MISBEHAVIOR:
        _answer_bytes(port)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_LIMIT)
    _MISBEHAVIOR[kind](store)
    time.sleep(_SECONDS)


@contextmanager
def sender(kind: str) -> Iterator[str]:
    """Start a sender, and yield the address of its store once it accepts connections."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(kind, port), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + _SECONDS
        while process.is_alive() and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()
