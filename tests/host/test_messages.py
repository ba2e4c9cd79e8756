"""Messages show no control characters of what others wrote, and no more of it than a person reads."""

from __future__ import annotations

import pytest

from megafp8.host.messages import join_names, name_text, print_error, printable, value_text


def test_a_message_cannot_control_a_terminal() -> None:
    assert printable("two lines\n\tof 東京, naïve") == "two lines\n\tof 東京, naïve"
    assert printable("a\x1b]0;x\x07b\r\x9b2J\u202ec\x00\ud800") == r"a\x1b]0;x\x07b\r\x9b2J\u202ec\x00\ud800"


def test_long_text_loses_its_middle() -> None:
    text = "".join(f"{i:06} " for i in range(100_000))
    short = printable(text)
    assert len(short) == 20_000
    assert short.startswith(text[:1000])
    assert short.endswith(text[-10:])
    assert len(name_text("x" * 1000)) == 120
    assert len(value_text(["y" * 1000])) == 300


def test_names_are_shown_as_names() -> None:
    assert name_text("model.layers.0.weight") == "model.layers.0.weight"
    assert name_text("\x1b[2J") == r"'\x1b[2J'"
    assert name_text(3) == "3"
    assert join_names(["a", "b\n"]) == r"a, 'b\n'"
    assert join_names(f"x{i}" for i in range(300_000)) == "x0, x1, x2, x3, x4, and 299,995 more"


def test_an_error_is_printed_on_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("no \x1bc"))
    assert capsys.readouterr() == ("", "error: no \\x1bc\n")
