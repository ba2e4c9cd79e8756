"""From tokens to text as they come: characters that are complete, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_INCOMPLETE = "\ufffd"  # what decoders give for bytes that are no character (yet)
_CONTEXT = 8
"""Tokens of the prompt that are decoded with the output: a space before a word may depend on what is before it."""


class TextStream:
    """The text that tokens after a prompt add to it, piece by piece.

    `stop`: the text ends before the first of these that occurs in it, also where it spans several tokens. What may
    become the beginning of one is held back, and so is what may become a character.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._tokens = list(prompt[-_CONTEXT:])
        self._context, self._read = 0, len(self._tokens)  # tokens before `_read` have become text
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The next piece of the text, which may be empty. Sets `stopped` if a stop string has occurred."""
        self._tokens.append(token)
        return self._emit(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """The last piece, of what was held back."""
        return "" if self.stopped else self._emit(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._context : self._read])
        both = self._decode(self._tokens[self._context :])
        if len(both) <= len(before) or (both.endswith(_INCOMPLETE) and not final):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return both[len(before) :]

    def _emit(self, new: str, *, final: bool) -> str:
        text = self._held + new
        stops = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if stops:
            piece, self._held, self.stopped = text[: min(stops)], "", True
        else:
            withheld = 0 if final else max((_begun(text, stop) for stop in self._stop), default=0)
            piece, self._held = text[: len(text) - withheld], text[len(text) - withheld :]
        self.text += piece
        return piece


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
