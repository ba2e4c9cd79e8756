"""The interpreter of pickles: plain data as `pickle` reads them; what a file names is inert; costs are bounded."""

from __future__ import annotations

import pathlib
import pickle
import tracemalloc
from fractions import Fraction
from typing import Any

import pytest

from megafp8.checkpoint.pickle_reader import Global, PickledObject, PickleError, check_tree, read_pickle

SHARED = ["x", 2.5]
PLAIN = {
    "numbers": [0, 255, 256, 65536, -1, -(2**40), 2**2000, 1.5, float("inf"), True, False, None],
    "text": ("", "Text", "τ" * 300, b"", b"\xff" * 300),
    3: {"a": SHARED, "b": SHARED, (1, "x"): (), None: ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))},
    "long": list(range(3000)),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data(protocol: int) -> None:
    value = PLAIN if protocol > 2 else PLAIN | {"text": "without bytes, which Python 2 did not have"}
    found = read_pickle(pickle.dumps(value, protocol))
    assert repr(found) == repr(value)
    assert found[3]["a"] is found[3]["b"]
    more = {"set": {1, "a"}, "frozen": frozenset({2}), "array": bytearray(b"abc")}
    if protocol == 5:
        assert read_pickle(pickle.dumps(more, protocol)) == more


def test_names_are_records_and_only_the_callers_functions_are_called() -> None:
    found = read_pickle(pickle.dumps([Fraction(1, 3), pathlib.Path, pathlib.PurePosixPath("/etc")]))
    assert isinstance(found[0], PickledObject)
    assert (found[0].of, found[0].arguments) == (
        ("fractions", "Fraction"),
        ("1/3",) if len(found[0].arguments) == 1 else (1, 3),
    )
    assert found[1] == Global("pathlib", "Path")
    assert found[2].arguments == ("/", "etc")
    called = read_pickle(pickle.dumps(Fraction(1, 3)), builders={("fractions", "Fraction"): lambda *given: given})
    assert called == found[0].arguments
    assert read_pickle(b"cos\nsystem\n.", constants={("os", "system"): 7}) == 7


NESTED = b"\x80\x04" + b"]" * 300 + b"a" * 299 + b"."
DOUBLING = b"\x80\x04]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(60)) + b"h\x3c."
CYCLE = b"\x80\x04]q\x00h\x00a."


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x80\x04cpathlib\nPosixPath\nN}X\x04\x00\x00\x00openK\x01s\x86b.", "sets the state of a Global"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R}b", "truncated"),
        (b"\x80\x02]q\x00j\xff\xff\xff\x7f.", "value 2147483647 of the memo, which was never stored"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "bytes are announced, but 1 follow"),
        (b"\x80\x04\x8b\x00\x01\x00\x00" + bytes(256) + b".", "an integer of 256 bytes"),
        (b"\x80\x02\x82\x01.", "opcode 0x82, which plain data does not need"),
        (b"(ios\nsystem\n.", "opcode 0x69"),
        (b"\x80\x04]]R.", "calls a list with a list"),
        (b"\x80\x04}]K\x01s.", "a list as a key"),
        (b"\x80\x04}\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01K\x01s.", "an integer of 65 bits as a key"),
        (b"\x80\x04}" + b")" + b"\x85" * 5000 + b"K\x01s.", "a tuple of 1 values, in 2 others, as a key"),
        (b"\x80\x04" + b"(" * 300 + b".", "more than 200 values are nested"),
        (b"\x80\x04K\x01K\x02.", "unfinished value"),
        (b"\x80\x04N.N", "bytes follow its end"),
        (b"\x80\x04h", "truncated|0 follow"),
        (b"\x80\x00N.", "protocol 0"),
        (b"\x80\x04NQ.", "a persistent id"),
        (b"\x80\x04\x8c\x01\xff.", "UnicodeDecodeError"),
        (b"\x80\x04a.", "IndexError"),
    ],
)
def test_refused(content: bytes, problem: str) -> None:
    with pytest.raises(PickleError, match=rf"({problem}).*byte \d+"):
        read_pickle(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(NESTED, "more than 200 values are nested"), (DOUBLING, "most of them shared"), (CYCLE, "contains itself")],
)
def test_trees_that_recursion_does_not_end_in(content: bytes, problem: str) -> None:
    with pytest.raises(PickleError, match=problem):
        check_tree(read_pickle(content), len(content))
    check_tree(read_pickle(pickle.dumps(PLAIN)), 1000)


def test_memory_is_bounded_by_the_length_of_the_file() -> None:
    tracemalloc.start()
    try:
        for content in (
            b"\x80\x02]r\xff\xff\xff\x7f.",
            DOUBLING,
            NESTED,
            b"\x80\x04" + b")\x85" + b"\x85" * 10**5 + b".",
        ):
            try:
                value: Any = read_pickle(content)
                check_tree(value, len(content))
            except PickleError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 50 * 10**6
    finally:
        tracemalloc.stop()
