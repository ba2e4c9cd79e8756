"""torchft's lighthouse behind a token, and a replica's place in the environment."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from megafp8.parallel.replicas import lighthouse, tunnel
from megafp8.parallel.replicas.lighthouse import (
    ADDRESS,
    REPLICA,
    TOKEN,
    Lighthouse,
    ReplicaEndpoint,
    address_of,
    place_of,
    token_of,
)
from megafp8.parallel.replicas.quorum import Member
from tests.ports import free_port
from tools import lighthouse as command

WORD = "a token of tests"


@pytest.fixture
def port() -> Iterator[int]:
    pytest.importorskip("torchft")
    number = free_port()
    stop = lighthouse.start(("127.0.0.1", number), WORD, 1, join_seconds=0.5, heartbeat_seconds=0.5)
    yield number
    stop()


def own(index: int, step: int = 0) -> Member:
    return Member(f"{index}:id", index, step, "", "", False, "")


def test_members_ask_together_and_one_that_is_gone_is_left_out(port: int) -> None:
    replicas = [Lighthouse(ReplicaEndpoint("127.0.0.1", port, WORD, i), f"{i}:id") for i in range(3)]
    with ThreadPoolExecutor(3) as pool:

        def ask(step: int, indices: range) -> list[list[int]]:
            answers = list(pool.map(lambda i: replicas[i].quorum(own(i, step), 10.0), indices))
            return [sorted(x.index for x in answer) for answer in answers]

        def ask_until_all_are_there(i: int) -> None:  # the first may be alone
            deadline = time.monotonic() + 60
            while len(replicas[i].quorum(own(i), 30.0)) < 3:
                assert time.monotonic() < deadline

        list(pool.map(ask_until_all_are_there, range(3)))
        assert ask(1, range(3)) == [[0, 1, 2]] * 3
        replicas[2].close()
        assert ask(2, range(2)) == [[0, 1]] * 2
    for replica in replicas:
        replica.close()


def test_without_enough_replicas_there_is_no_quorum() -> None:
    pytest.importorskip("torchft")
    number = free_port()
    stop = lighthouse.start(("127.0.0.1", number), WORD, 2, join_seconds=0.1, heartbeat_seconds=0.5)
    replica = Lighthouse(ReplicaEndpoint("127.0.0.1", number, WORD, 0), "0:id")
    with pytest.raises(TimeoutError, match="no quorum"):
        replica.quorum(own(0), 0.5)
    replica.close()
    stop()


@pytest.mark.slow
def test_two_lighthouses_do_not_meet() -> None:
    """On different ports of one host, two jobs with the same ids have quorums of their own."""
    pytest.importorskip("torchft")
    jobs = []
    for token in (WORD, "a token of others"):
        number = free_port()
        stop = lighthouse.start(("127.0.0.1", number), token, 2, join_seconds=0.5, heartbeat_seconds=5.0)
        jobs.append(
            ([Lighthouse(ReplicaEndpoint("127.0.0.1", number, token, i), f"{i}:id") for i in range(2)], stop, number)
        )
    with ThreadPoolExecutor(4) as pool:
        for step in range(20):
            asked = [
                [pool.submit(replica.quorum, own(i, 100 * job + step), 20.0) for i, replica in enumerate(replicas)]
                for job, (replicas, _, _) in enumerate(jobs)
            ]
            for job, answers in enumerate(asked):
                for answer in answers:
                    assert sorted((x.index, x.step) for x in answer.result()) == [
                        (i, 100 * job + step) for i in range(2)
                    ]
    with pytest.raises(ConnectionError, match="refused the token"):
        Lighthouse(ReplicaEndpoint("127.0.0.1", jobs[1][2], WORD, 0), "0:id")
    for replicas, stop, _ in jobs:
        for replica in replicas:
            replica.close()
        stop()


def test_no_heartbeat_is_being_sent_after_the_end(port: int) -> None:
    replica = Lighthouse(ReplicaEndpoint("127.0.0.1", port, WORD, 0), "0:id")
    sending, sent = threading.Event(), threading.Event()

    class Slow:
        def heartbeat(self, *arguments: object, **options: object) -> None:
            sending.set()
            time.sleep(0.5)
            sent.set()

    replica._beats = Slow()
    replica.quorum(own(0), 10.0)
    assert sending.wait(10)
    replica.close()
    assert sent.is_set()


def test_another_token_is_refused_by_either_side(port: int) -> None:
    with pytest.raises(ConnectionError, match="refused the token"):
        Lighthouse(ReplicaEndpoint("127.0.0.1", port, "another token...", 0), "0:id")
    with socket.create_connection(("127.0.0.1", port)) as intruder:
        intruder.sendall(b"GET /status HTTP/1.1\r\n\r\n" + bytes(64))
        intruder.settimeout(10)
        assert len(intruder.recv(32)) == 32, "the challenge"
        assert _rest(intruder) == b"", "nothing else"


def test_connections_without_the_token_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the address that has most of them are closed; a connection that has proven the token stays."""
    monkeypatch.setattr(tunnel, "_max_connections", lambda: 6)
    monkeypatch.setattr(tunnel, "_HANDSHAKE_SECONDS", 60.0)
    echo = socket.create_server(("127.0.0.1", 0))
    listener = tunnel.serve(("127.0.0.1", 0), echo.getsockname(), WORD)
    address = listener.getsockname()
    with ExitStack() as stack:
        member = stack.enter_context(socket.create_connection(address))
        tunnel.prove_as_client(member, WORD)
        target = stack.enter_context(echo.accept()[0])
        member.sendall(b"a heartbeat")
        assert target.recv(100) == b"a heartbeat"
        other_host = stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for connection in (*silent, other_host, member):
            connection.settimeout(10)
        for connection in silent[:16]:
            while _rest(connection):
                pass
        assert len(other_host.recv(32)) == 32
        other_host.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other_host.recv(1)
        member.sendall(b"a step")
        assert target.recv(100) == b"a step"
        late = stack.enter_context(socket.create_connection(address))
        tunnel.prove_as_client(late, WORD)
    tunnel.close(listener)
    echo.close()


def test_a_lack_of_open_files_does_not_end_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "Connection aborted")]

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if errors:
                raise errors.pop(0)
            return super().accept()

    with Exhausted() as listener, socket.create_server(("127.0.0.1", 0)) as target:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tunnel.listen(listener, lambda _: socket.create_connection(target.getsockname()), 4)
        with socket.create_connection(listener.getsockname()) as client, target.accept()[0] as end:
            client.sendall(b"a step")
            assert end.recv(100) == b"a step"
        tunnel.close(listener)
    assert errors == []
    assert "cannot be accepted: [Errno 24] Too many open files" in caplog.text


def test_a_handshake_has_a_limit_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that arrive one by one do not prolong it, on either side."""
    monkeypatch.setattr(tunnel, "_HANDSHAKE_SECONDS", 0.5)
    for prove in (tunnel.prove_as_server, tunnel.prove_as_client):
        here, there = socket.socketpair()
        with here, there, ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            proof = pool.submit(prove, here, WORD)
            while not proof.done() and time.monotonic() - began < 5:
                there.sendall(b"a")
                time.sleep(0.2)
            assert proof.done()
            with pytest.raises(TimeoutError):
                proof.result()


def test_numbers_that_a_lighthouse_cannot_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN, WORD)
    monkeypatch.setattr(lighthouse, "start", lambda *_: pytest.fail("started"))
    for option, values in (
        ("--join-seconds", ("-1", "1e300", "nan")),
        ("--heartbeat-seconds", ("inf", "0", "1e-9")),
        ("--min", ("0", "99999999999999999999999")),
    ):
        for value in values:
            monkeypatch.setattr("sys.argv", ["lighthouse", option, value])
            with pytest.raises(SystemExit, match="2"):
                command.main()
            assert capsys.readouterr().err.startswith(f"error: {option}: {value} is out of range; give a number from ")


def _rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_server_without_the_token_is_not_believed() -> None:
    here, there = socket.socketpair()

    def impostor() -> None:
        there.sendall(bytes(32))
        there.recv(64)
        there.sendall(bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PermissionError, match="not a lighthouse with this token"):
        tunnel.prove_as_client(here, WORD)
    thread.join()


def test_a_port_in_use_is_one_clear_error(port: int) -> None:
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
        lighthouse.start(("127.0.0.1", port), WORD, 1, 1.0, 1.0)


def test_the_place_of_a_process() -> None:
    environment = {ADDRESS: "head", TOKEN: WORD, REPLICA: "3"}
    assert place_of(environment, 4) == ReplicaEndpoint("head", 29510, WORD, 3)
    for changed, message in (
        ({REPLICA: ""}, "needs MEGAFP8_REPLICA"),
        ({REPLICA: "4"}, "MEGAFP8_REPLICA is 4, but the replicas of the job are numbered from 0 to 3"),
        ({REPLICA: "-1"}, "MEGAFP8_REPLICA is -1"),
        ({TOKEN: "short"}, "has 5 characters and needs 16"),
        ({ADDRESS: "head:x"}, "head:x is not the address"),
    ):
        with pytest.raises(ValueError, match=message):
            place_of(environment | changed, 4)
    with pytest.raises(ValueError, match="has 0 characters"):
        token_of({})


@pytest.mark.parametrize(
    ("text", "address"),
    [("head", ("head", 29510)), ("10.0.0.1:5", ("10.0.0.1", 5)), ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 29510))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address
