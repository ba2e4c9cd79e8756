"""Errors of a config: each problem has the key, its value, the broken rule, and a value that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.host.messages import value_text

_REQUIRED = object()
"""Value of a required key that is missing."""


@dataclass(frozen=True)
class Problem:
    """Broken rule of a config.

    Args:
        path: Dotted path of the key.
        value: Value of the key.
        rule: Description of the broken rule.
        works: Value or action that would help.
        where: File and line of the value, with which the message begins; empty for an override.
    """

    path: str
    value: object
    rule: str
    works: str
    where: str = ""

    @classmethod
    def missing(cls, path: str, works: str) -> Problem:
        """Return the problem of a required key that is not given."""
        return cls(path, _REQUIRED, "is required", works)

    @property
    def is_missing(self) -> bool:
        """Whether a required key is not given."""
        return self.value is _REQUIRED

    def __str__(self) -> str:
        if self.is_missing:
            return f"{self.where}{self.path} {self.rule}: {self.works}"
        return f"{self.where}{self.path} = {value_text(self.value)}: {self.rule}; {self.works}"


class ConfigError(ValueError):
    """Config that cannot run, with all problems."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, self.problems)]))


def divisors(number: int, most: int) -> str:
    """Return advice to try the largest divisors of `number` up to `most`."""
    divisor_texts = [str(d) for d in range(1, min(most, 2**16) + 1) if number % d == 0]
    return "try " + " or ".join(divisor_texts[-3:])
