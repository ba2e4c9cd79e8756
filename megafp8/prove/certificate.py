"""Certificates of configs: one row for each check of a proof, printed as a table and saved as JSON."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, cast

from megafp8 import __version__
from megafp8.checkpoint import config_hash
from megafp8.config.files import file_of, read_tree
from megafp8.host.strict_json import finite, parse_json
from megafp8.prove.shrink import Change
from megafp8.training.run_log import source_commit

FORMAT_VERSION = 1
"""Version of the JSON. Grows when an older reader would misread it, not for new keys."""
Status = Literal["equal", "within", "DIFFERENT", "FAILED", "skipped"]
"""Outcome of a check. `within`: not equal because of rounding, but below a bound."""
FILES = {"cpu": "certificate.json", "cuda": "cuda.certificate.json"}
"""Ends of the default names of certificates, by the device of the proof."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    `difference`: largest difference, relative as `how` describes. `where`: tensor, step, sample or rank of the
    difference, or the reason why the check failed or was skipped. `details`: reports of the ranks if the check failed.
    """

    check: str
    how: str
    status: Status
    difference: float | None = None
    where: str = ""
    seconds: float = 0.0
    details: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check did not fail."""
        return self.status in ("equal", "within", "skipped")


def hash_of(config: str | Path, overrides: Iterable[str] = ()) -> str:
    """Return a hash of the values in a config file, with its bases, and of overrides. Comments have no effect."""
    return config_hash({"file": read_tree(str(file_of(str(config)))).values, "overrides": sorted(overrides)})


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the proof uses, if they are installed."""
    versions = dict[str, str]()
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@dataclass
class Certificate:
    """All rows of a proof.

    `ranks`: ranks of the config and of its small copy. `config`: the small config. `cpu_seconds`: CPU time of this
    process and of the ranks. `commit`: commit of the source, if it is a checkout. `command`, `config_hash`: how
    `megafp8 prove` was started, and the hash of the proved file and overrides (`hash_of`).
    """

    name: str
    ranks: tuple[int, int]
    config: Mapping[str, Any]
    changes: list[Change]
    rows: list[CheckResult] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).date().isoformat())
    commit: str | None = field(default_factory=source_commit)
    versions: Mapping[str, str] = field(default_factory=_versions)
    command: str | None = None
    config_hash: str | None = None

    @property
    def passed(self) -> bool:
        """Whether there are checks and none of them failed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def as_json(self) -> str:
        """Return the certificate as JSON. Its `config` is the small one."""
        versions = {"format_version": FORMAT_VERSION, "megafp8_version": __version__}
        content = {**versions, "passed": self.passed, **asdict(self)}
        return json.dumps(finite(content), indent=2) + "\n"


def is_certificate(content: Any) -> bool:
    """Return whether the content of a JSON file is a certificate."""
    rows = content.get("rows") if isinstance(content, dict) else None
    keys = {"check", "status", "difference", "where"}
    return isinstance(rows, list) and all(isinstance(row, dict) and keys <= row.keys() for row in rows)


def read_certificate(path: Path) -> dict[str, Any] | None:
    """Return the content of a certificate; None if there is no file. Raises ValueError if it is not a certificate."""
    if not path.exists():
        return None
    content = read_evidence(path)
    if not is_certificate(content):
        raise ValueError(f"{path} is not a certificate; write it with megafp8 prove, or remove it")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        works = "use a newer version"
        raise ValueError(f"{path} has format version {version}; this megafp8 reads up to {FORMAT_VERSION}: {works}")
    return cast(dict[str, Any], content)


def read_evidence(path: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError, with the path, if it is damaged."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; write it again, or remove it") from None


def describe_changes(changes: Iterable[Change]) -> list[str]:
    """Return lines of `key before -> after`, one for each reason."""
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
    """Return a row of the table as text."""
    difference = "" if row.difference is None else f"{row.difference:.1e}"
    where = f"  {row.where}" if row.where else ""
    return f"{row.check:<22} {row.status:<10} {difference:>8} {row.seconds:>6.1f} s  {row.how}{where}"
