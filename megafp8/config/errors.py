"""What is said about a config that cannot run: where, which value, the rule it breaks, and a value that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One broken rule. `path` is the dotted YAML path, `works` a value or an action that would help."""

    path: str
    value: object
    rule: str
    works: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value!r}: {self.rule}; {self.works}"


class ConfigError(ValueError):
    """A config that cannot run, with every problem found in it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, self.problems)]))
