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


def import_package(name: str, what: str) -> Any:
    """The module `name`, which `what` needs. ValueError with the command that installs it if it is missing."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # installed, and one of its own imports is missing
    extra = _EXTRAS.get(package)
    command = f"pip install {package}" + (f" (or megafp8 with its extra: pip install -e '.[{extra}]')" if extra else "")
    raise ValueError(f"{what} needs the package {package}, which is not installed: {command}")
