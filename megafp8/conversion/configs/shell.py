"""Read arguments from a command line or a shell script, as text: nothing is executed.

Every word that starts with `--` is an argument, in arrays (`ARGS=( ... )`), in texts (`ARGS="..."`) and after a
command. Variables have the value that the script assigned last before the line; `${X:-default}` has its default if the
script does not assign X. Both branches of a condition are read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_CASES = re.compile(r"^\s*case\b.*?^\s*esac\b", re.MULTILINE | re.DOTALL)
"""Statements that read the script's own arguments."""
_ASSIGNMENT = re.compile(r"(\w+)\+?=([^(].*)?", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_END = re.compile(r"[();|&<>]|\S+\.py$|\$\{?\w+\[|(then|fi|do|done|else)$")
"""Words that cannot be a value: ends of arrays and commands, and arrays that are expanded."""


def read_arguments(text: str) -> dict[str, list[list[str]]]:
    """Return the values of each argument, once for each time it is given. Names have underscores."""
    arguments: dict[str, list[list[str]]] = {}
    variables: dict[str, str] = {}
    for line in _CASES.sub("", _COMMENT.sub("", text.replace("\\\n", " "))).splitlines():
        values: list[str] = []
        for word in _words(line, variables):
            if flag := _FLAG.fullmatch(word):
                values = [] if flag[2] is None else [flag[2]]
                arguments.setdefault(flag[1].replace("-", "_"), []).append(values)
            elif _END.match(word):
                values = []
            else:
                values.append(word)
    return arguments


def _words(line: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield the words of a line with variables substituted, and record its assignments in `variables`."""
    for word in [] if line.split()[:1] == ["echo"] else _split(line):
        word = re.sub(r"^\w+\+?=\(", "", word)  # an array
        word = word.removesuffix(")") if "(" not in word else word
        text = _VARIABLE.sub(lambda x: variables.get(x[1] or x[3], x[0] if x[2] is None else x[2].strip("\"'")), word)
        if assigned := _ASSIGNMENT.fullmatch(text):
            text = variables[assigned[1]] = assigned[2] or ""
            yield ";"
        if text.lstrip().startswith("--") or (text != word and not assigned):
            yield from _split(text)
        elif not assigned:
            yield text


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that ends on another line
        return re.sub("[\"']", " ", text).split()
