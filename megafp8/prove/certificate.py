"""Certificates of configs: a row for each check of a proof, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megafp8 import __version__
from megafp8.prove.shrink import Change

Status = Literal["equal", "within", "DIFFERENT", "FAILED", "skipped"]
"""`within`: not equal, as rounding differs, and below a bound."""


@dataclass(frozen=True)
class CheckResult:
    """A check. `difference`: the largest that was found, relative as `how` says, `where`: at which tensor, step, sample
    or rank; or why the check failed or was skipped.
    `details`: reports of the ranks of a check that failed."""

    check: str
    how: str
    status: Status
    difference: float | None = None
    where: str = ""
    seconds: float = 0.0
    details: str = ""

    @property
    def passed(self) -> bool:
        return self.status in ("equal", "within", "skipped")


@dataclass
class Certificate:
    """All rows. `ranks`: of the config, and of its small copy; `cpu_seconds`: of this process and the ranks."""

    name: str
    ranks: tuple[int, int]
    config: Mapping[str, Any]
    changes: list[Change]
    rows: list[CheckResult] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def as_json(self) -> str:
        """`config` is the small one."""
        content = {"megafp8_version": __version__, "passed": self.passed, **asdict(self)}
        return json.dumps(_finite(content), indent=2) + "\n"


def _finite(value: Any) -> Any:
    """`value` without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def describe_changes(changes: Iterable[Change]) -> list[str]:
    """Lines of `key before -> after`, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for change in changes:
        by_reason.setdefault(change.reason, []).append(
            f"{change.key} {_short(change.before)} -> {_short(change.after)}"
        )
    return [f"  {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def row_line(row: CheckResult) -> str:
    """A row of the table."""
    difference = "" if row.difference is None else f"{row.difference:.1e}"
    where = f"  {row.where}" if row.where else ""
    return f"{row.check:<22} {row.status:<10} {difference:>8} {row.seconds:>6.1f} s  {row.how}{where}"
