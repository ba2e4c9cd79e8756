"""Detect the format of a config of another project by its content."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from megafp8.conversion.configs.axolotl import read_axolotl
from megafp8.conversion.configs.bridge import read_bridge, read_nemo
from megafp8.conversion.configs.engine import Foreign, Imported, convert
from megafp8.conversion.configs.megatron import RULES, read_script
from megafp8.conversion.configs.nanotron import read_nanotron
from megafp8.conversion.configs.torchtitan import read_torchtitan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def import_config(path: Path) -> Imported:
    """Return the config of another project as a megafp8 config. Raises ValueError if the file has no known format."""
    try:
        return convert(_read(path.read_text(encoding="utf-8")), path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(text: str) -> Foreign:
    tree = _parse(text)
    sections = {key for key, value in tree.items() if isinstance(value, dict)}
    if "base_model" in tree:
        return read_axolotl(tree)
    if {"tokens", "parallelism", "model"} <= sections:
        return read_nanotron(tree)
    if {"trainer", "model"} <= sections:
        return read_nemo(tree)
    if {"training", "lr_scheduler"} & sections and {"job", "parallelism"} & sections:
        return read_torchtitan(tree)
    if {"model", "model_config"} & sections and {"train", "train_config", "scheduler", "ddp"} & sections:
        return read_bridge(tree)
    if not tree and (script := read_script(text)).values.keys() & RULES.keys():
        return script
    raise ValueError(
        "no config that megafp8 init --from reads: Megatron-LM's arguments or script, YAML of Megatron Bridge, NeMo 1, "
        "nanotron or axolotl, or TOML of torchtitan"
    )


def _parse(text: str) -> dict[str, Any]:
    """Return the tree of a YAML or TOML file; an empty tree if the text is neither."""
    for load, invalid in ((yaml.safe_load, yaml.YAMLError), (tomllib.loads, tomllib.TOMLDecodeError)):
        try:
            tree = load(text)
        except invalid:
            continue
        if isinstance(tree, dict):
            return tree
    return {}
