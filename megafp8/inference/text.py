"""Incremental conversion of tokens to text: only complete characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_INCOMPLETE = "\ufffd"  # decoders return it for bytes that are not (yet) a character
_CONTEXT = 8
"""Number of prompt tokens that are decoded with the output: the space before a word may depend on earlier tokens."""


class TextStream:
    """Text that the tokens after a prompt add, piece by piece.

    The text ends before the first of the strings `stop` that occurs in it, even if this string spans several tokens.
    Text that may be the beginning of a stop string is held back, and so are bytes of an incomplete character.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._tokens = list(prompt[-_CONTEXT:])
        self._context, self._read = 0, len(self._tokens)  # tokens before `_read` have been converted to text
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token, and return the next piece of the text, which may be empty.

        Sets `stopped` if a stop string has occurred.
        """
        self._tokens.append(token)
        return self._emit(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Return the last piece: the text that was held back."""
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
    """Return how many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
