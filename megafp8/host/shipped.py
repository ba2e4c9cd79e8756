"""Files that are part of the package: configs, launch scripts, tools."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def is_checkout() -> bool:
    """Return whether configs/, launch/ and tools/ are next to the package, as in the repository.

    A wheel has them inside the package.
    """
    return not (PACKAGE / "tools").is_dir()


def install_command(extra: str = "") -> str:
    """Return the command that installs megafp8 with an extra.

    A checkout is installed from its folder. If megafp8 was installed from a wheel, pip keeps it and adds the packages
    of the extra. Neither needs megafp8 on PyPI.
    """
    what = f"{PACKAGE.parent if is_checkout() else 'megafp8'}{f'[{extra}]' if extra else ''}"
    return f"pip install {'-e ' if is_checkout() else ''}{shlex.quote(what)}"


def shipped(folder: str) -> Path:
    """Return the path of the folder `configs`, `launch` or `tools`."""
    return (PACKAGE.parent if is_checkout() else PACKAGE) / folder


def shipped_configs() -> dict[str, Path]:
    """Return the configs that are part of the package, by name."""
    return {path.stem: path for path in sorted(shipped("configs").glob("*.yaml"))}


def introduction(path: Path) -> str:
    """Return the first paragraph of a config's comment."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    return re.sub(":$", ".", " ".join(lines))
