"""Imports of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {
    "tokenizers": "hf",
    "jinja2": "hf",
    "huggingface_hub": "hf",
    "tiktoken": "data",
    "pyarrow": "data",
    "uvicorn": "server",
    "lm_eval": "eval",
}


class MissingPackage(ValueError):
    """A package that is not installed. `rule` says what needs it, `works` what installs it."""

    def __init__(self, rule: str, works: str) -> None:
        self.rule, self.works = rule, works
        super().__init__(f"{rule}: {works}")


def import_package(name: str, what: str) -> Any:
    """The module `name`, which `what` needs. MissingPackage with the command that installs it if it is missing."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # installed, and one of its own imports is missing
    extra = _EXTRAS.get(package)
    command = f"pip install {package}" + (
        f", or with the extra of megafp8: pip install 'megafp8[{extra}]'" if extra else ""
    )
    raise MissingPackage(f"{what} needs the package {package}, which is not installed", command)
