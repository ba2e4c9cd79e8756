"""torchft's lighthouse behind a token, and a replica's place in the environment."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megafp8.replicas import lighthouse, tunnel
from megafp8.replicas.lighthouse import ADDRESS, REPLICA, TOKEN, Lighthouse, Place, address_of, place_of, token_of
from megafp8.replicas.quorum import Member
from tests.ports import free_port

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
    replicas = [Lighthouse(Place("127.0.0.1", port, WORD, i), f"{i}:id") for i in range(3)]
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
    replica = Lighthouse(Place("127.0.0.1", number, WORD, 0), "0:id")
    with pytest.raises(TimeoutError, match="no quorum"):
        replica.quorum(own(0), 0.5)
    replica.close()
    stop()


def test_no_heartbeat_is_being_sent_after_the_end(port: int) -> None:
    replica = Lighthouse(Place("127.0.0.1", port, WORD, 0), "0:id")
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
        Lighthouse(Place("127.0.0.1", port, "another token...", 0), "0:id")
    with socket.create_connection(("127.0.0.1", port)) as intruder:
        intruder.sendall(b"GET /status HTTP/1.1\r\n\r\n" + bytes(64))
        intruder.settimeout(10)
        assert len(intruder.recv(32)) == 32, "the challenge"
        assert _rest(intruder) == b"", "nothing else"


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
    with pytest.raises(PermissionError, match="no lighthouse of this token"):
        tunnel.prove_as_client(here, WORD)
    thread.join()


def test_a_port_in_use_is_one_clear_error(port: int) -> None:
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
        lighthouse.start(("127.0.0.1", port), WORD, 1, 1.0, 1.0)


def test_the_place_of_a_process() -> None:
    environment = {ADDRESS: "head", TOKEN: WORD, REPLICA: "3"}
    assert place_of(environment, 4) == Place("head", 29510, WORD, 3)
    for changed, message in (
        ({REPLICA: ""}, "needs MEGAFP8_REPLICA"),
        ({REPLICA: "4"}, "MEGAFP8_REPLICA is 4, and the replicas of the job are numbered from 0 to 3"),
        ({REPLICA: "-1"}, "MEGAFP8_REPLICA is -1"),
        ({TOKEN: "short"}, "has 5 characters and needs 16"),
        ({ADDRESS: "head:x"}, "head:x is no address"),
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
