"""Renders chat templates in a process of its own, with limits of memory and time.

A chat template is a Jinja program that comes with a model from others. Jinja's sandbox keeps it from the process'
files and objects, but not from an endless loop or from `{{ "a".center(10**10) }}`, whichever of many operators,
methods and filters makes the text. So the limits are those of the operating system: RLIMIT_AS, and the parent kills
a process that does not answer in time.

`Renderer` is the parent's side. This file is also the program of the child, which imports Jinja and no other package.
The child's first message says that it is ready. Messages are JSON in both directions, each after its length in 8 bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import IO, Any

RENDER_SECONDS, MEMORY_BYTES, RENDERED_CHARACTERS = 5.0, 1 << 28, 1 << 24
"""Limits of a rendering."""
START_SECONDS = 60.0
BEGIN, END = "\ufdd0", "\ufdd1"
"""Characters that a rendered template has before and after each answer that it marks by `{% generation %}`: Unicode
noncharacters, which no text has."""
_LONGEST_REASON = 1000
_LENGTH = struct.Struct("<Q")


class Renderer:
    """A process that renders chat templates. It is started at the first use, and again after it was ended.

    May be used in several threads; not in a process that is forked from the one that made it (`render` may be).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, source: str, variables: Mapping[str, Any] | None) -> str:
        """The text of the template `source`; None only compiles it. ValueError with the reason where that fails."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            try:
                return self._ask(self._process, [source, variables])
            except BaseException as error:
                if not isinstance(error, ValueError) or isinstance(error, _Ended):
                    self.close()
                raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        # Not as `-m`, which would import the package, nor with this file's folder in front of sys.path.
        run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-c", run, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": paths},
        )
        _receive(process, START_SECONDS)
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], request: Any) -> str:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; why is seen below
            _send(process.stdin, request)
        text, error = json.loads(_receive(process, RENDER_SECONDS))
        if error is not None:
            raise ValueError(error)
        return str(text)


_shared = Renderer()


def _renew() -> None:
    """Replace the renderer in a process that was forked: the child process and its pipes belong to the parent, and the
    lock stays locked if another thread held it."""
    global _shared
    _shared = Renderer()


os.register_at_fork(after_in_child=_renew)


def render(source: str, variables: Mapping[str, Any] | None) -> str:
    """Render `source` with the renderer that all templates of this process share: see `Renderer.__call__`."""
    return _shared(source, variables)


class _Ended(ValueError):
    """The process has ended, or was ended."""


def _receive(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Read the child's next message. Raises `_Ended` if the child has ended, or does not answer within `seconds`."""
    assert process.stdout is not None
    received, needed, end = bytearray(), _LENGTH.size, time.monotonic() + seconds
    while len(received) < needed:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise _Ended(f"the chat template fails: it takes more than {seconds:g} s")
        part = os.read(process.stdout.fileno(), min(1 << 20, needed - len(received)))
        if not part:
            raise _Ended("the chat template fails: its process has ended, as one that needs too much memory does")
        received += part
        if len(received) == _LENGTH.size == needed:
            needed += _LENGTH.unpack(received)[0]
    return bytes(received[_LENGTH.size :])


def _send(stream: IO[bytes], content: Any) -> None:
    data = json.dumps(content).encode()
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(stream.fileno(), view) :]


# --- the child -------------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer requests until the parent closes its end."""
    compiled = lru_cache(maxsize=1)(_compile)  # a process has one template
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = os.fdopen(0, "rb"), os.fdopen(1, "wb", buffering=0)
    _send(stdout, None)
    while len(header := stdin.read(_LENGTH.size)) == _LENGTH.size:
        source, variables = json.loads(stdin.read(_LENGTH.unpack(header)[0]))
        try:
            template = compiled(source)
            answer = [None if variables is None else _rendered(template, variables), None]
        except ValueError as error:
            answer = [None, str(error)]
        except MemoryError:
            answer = [None, f"the chat template fails: it takes more than {MEMORY_BYTES:,} bytes"]
        _send(stdout, answer)


def _rendered(template: Any, variables: Mapping[str, Any]) -> str:
    import jinja2

    pieces, length = [], 0
    try:
        for piece in template.generate(**variables):
            length += len(piece)
            if length > RENDERED_CHARACTERS:
                raise ValueError(f"its text has more than {RENDERED_CHARACTERS:,} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # a lone surrogate is UnicodeEncodeError; no tokenizer takes it
        return text
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses it: {str(error)[:_LONGEST_REASON]}") from None
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything: a division by zero, a recursion
        raise ValueError(f"the chat template fails: {type(error).__name__}: {str(error)[:_LONGEST_REASON]}") from None


def _compile(source: str) -> Any:
    """A Jinja template in the environment of transformers' chat templates. Raises ValueError if it is none."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: the text of an answer, which is put between `BEGIN` and `END`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes characters of HTML

    extensions: Sequence[Any] = (Generation, jinja2.ext.loopcontrols)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template cannot be compiled: line {error.lineno}: {str(error)[:_LONGEST_REASON]}"
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the chat template cannot be compiled: {type(error).__name__}: {str(error)[:_LONGEST_REASON]}"
        ) from None


if __name__ == "__main__":
    _serve()
