"""Text piece by piece: whole characters only, spaces as in the whole text, and stop strings wherever they begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megafp8.data.tokenizers import build_tokenizer
from megafp8.inference.text import TextStream

BYTES = build_tokenizer("bytes")


def pieces(text: str | bytes, stop: Sequence[str] = (), prompt: str = "") -> tuple[list[str], TextStream]:
    data = text.encode() if isinstance(text, str) else text
    stream = TextStream(BYTES.decode, BYTES.encode(prompt), stop)
    found = []
    for token in data:
        found.append(stream.add(token))
        if stream.stopped:
            break
    return [*found, stream.finish()], stream


def test_characters_come_whole() -> None:
    found, stream = pieces("aé東🙂z", prompt="über")
    assert found == ["a", "", "é", "", "", "東", "", "", "", "🙂", "z", ""]
    assert stream.text == "aé東🙂z"


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    found, stream = pieces(b"a\xe6\x9d")
    assert found[:-1] == ["a", "", ""]
    assert stream.text == "".join(found) == "a\ufffd"


STOPS = [
    ("one\n\ntwo", ["\n\n"], "one"),
    ("one STOP", ["STOP"], "one "),
    ("aab aabx", ["aabx"], "aab "),
    ("aaaab", ["aaab"], "a"),
    ("xyz", ["yzq", "z"], "xy"),
    ("xyz", ["zzz"], "xyz"),
    ("one two", ["two", "one two"], ""),
    ("end", ["e"], ""),
]


@pytest.mark.parametrize(("text", "stop", "expected"), STOPS)
def test_the_text_ends_before_a_stop_string(text: str, stop: list[str], expected: str) -> None:
    found, stream = pieces(text, stop)
    assert stream.text == "".join(found) == expected
    assert stream.stopped == (expected != text)
    for i in range(len(found)):
        assert expected.startswith("".join(found[:i])), "a piece that was not held back"


def test_words_of_a_sentencepiece_model(tmp_path: Path) -> None:
    """The space before a word belongs to its token, and a decoder leaves it out at the begin of a text."""
    import sentencepiece

    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    prefix = str(tmp_path / "own")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=prefix, vocab_size=60, byte_fallback=False, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = build_tokenizer("sentencepiece", f"{prefix}.model")
    prompt, rest = tokenizer.encode("the quick brown"), tokenizer.encode("fox jumps over")
    stream = TextStream(tokenizer.decode, prompt)
    assert "".join([*map(stream.add, rest), stream.finish()]) == " fox jumps over"
    assert tokenizer.decode(prompt) + stream.text == tokenizer.decode(prompt + rest)
