"""Imports of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from megafp8.host.shipped import install_command

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
    """An optional package is not installed. `rule` says what needs it, and `works` is the command that installs it."""

    def __init__(self, rule: str, works: str) -> None:
        self.rule, self.works = rule, works
        super().__init__(f"{rule}: {works}")


def import_package(name: str, what: str) -> Any:
    """Import the optional module `name`, which the feature `what` needs, and return it. Raises MissingPackage."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but a module that it imports is missing
    extra = _EXTRAS.get(package)
    command = install_command(extra) if extra else f"pip install {package}"
    raise MissingPackage(f"{what} needs the package {package}, which is not installed", command)
