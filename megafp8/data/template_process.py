"""Rendering of chat templates in a separate process with memory and time limits.

A chat template is a Jinja program that comes with someone else's model. Jinja's sandbox protects the files and objects
of the process, but does not stop an endless loop or a huge text such as `{{ "a".center(10**10) }}`. Many operators,
methods and filters can make such a text. The limits are therefore enforced by the operating system (RLIMIT_AS) and by
the parent, which kills a process that does not answer in time.

`Renderer` is the parent's side. This file is also the program of the child process, which imports Jinja and no other
package. The first message of the child says that it is ready. Messages in both directions are JSON, preceded by their
length in 8 bytes.
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
"""Limits of one rendering: time, memory of the process, and length of the text."""
START_SECONDS = 60.0
BEGIN, END = "\ufdd0", "\ufdd1"
"""Characters before and after each answer that a template marks with `{% generation %}`. They are Unicode
noncharacters, which do not occur in text."""
_LONGEST_REASON = 1000
_LENGTH = struct.Struct("<Q")


class Renderer:
    """Handle of a process that renders chat templates. The process starts at the first use, and again after it ended.

    Several threads may share a renderer. A forked process must not use the renderer of its parent; `render` handles
    forks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, source: str, variables: Mapping[str, Any] | None) -> str:
        """Return the text of the template `source`. If `variables` is None, only compile it. Raises ValueError."""
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
        # `python -m` would import the package; `python FILE` would put this file's folder in front of sys.path.
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
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `_receive` raises the error
            _send(process.stdin, request)
        text, error = json.loads(_receive(process, RENDER_SECONDS))
        if error is not None:
            raise ValueError(error)
        return str(text)


_shared = Renderer()


def _renew() -> None:
    """Replace the renderer in a forked process.

    The template process and its pipes belong to the parent, and the lock would stay locked if another thread held it.
    """
    global _shared
    _shared = Renderer()


os.register_at_fork(after_in_child=_renew)


def render(source: str, variables: Mapping[str, Any] | None) -> str:
    """Render `source` with the renderer that all templates of this process share. See `Renderer.__call__`."""
    return _shared(source, variables)


class _Ended(ValueError):
    """The template process has ended or must be ended."""


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
            raise _Ended("the chat template fails: its process has ended, probably because it needs too much memory")
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
    """Answer requests until the parent closes its end of the pipe."""
    compiled = lru_cache(maxsize=1)(_compile)  # a process usually renders one template
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

    chunks, length = [], 0
    try:
        for chunk in template.generate(**variables):
            length += len(chunk)
            if length > RENDERED_CHARACTERS:
                raise ValueError(f"its text has more than {RENDERED_CHARACTERS:,} characters")
            chunks.append(chunk)
        text = "".join(chunks)
        text.encode()  # raises UnicodeEncodeError for a lone surrogate, which no tokenizer accepts
        return text
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses it: {str(error)[:_LONGEST_REASON]}") from None
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything: a division by zero, a recursion
        raise ValueError(f"the chat template fails: {type(error).__name__}: {str(error)[:_LONGEST_REASON]}") from None


def _compile(source: str) -> Any:
    """Compile a Jinja template in the environment of transformers' chat templates. Raises ValueError if it fails."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """Jinja tag `{% generation %}`: puts the text of an answer between `BEGIN` and `END`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's filter would escape HTML characters

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
