"""Files that come with the package: configs, launch scripts, tools."""

from __future__ import annotations

import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def is_checkout() -> bool:
    """Whether configs/, launch/ and tools/ are beside the package, as in the repository; a wheel has them in it."""
    return not (PACKAGE / "tools").is_dir()


def install_command(extra: str = "") -> str:
    """Return the command that installs megafp8 with an extra.

    A checkout is installed from its folder. What was installed from a wheel stays, and pip adds the packages of the
    extra, so neither needs a megafp8 on PyPI.
    """
    what = f"{PACKAGE.parent if is_checkout() else 'megafp8'}{f'[{extra}]' if extra else ''}"
    return f"pip install {'-e ' if is_checkout() else ''}{shlex.quote(what)}"


def shipped(folder: str) -> Path:
    """The folder `configs`, `launch` or `tools`."""
    return (PACKAGE.parent if is_checkout() else PACKAGE) / folder


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    return {path.stem: path for path in sorted(shipped("configs").glob("*.yaml"))}
