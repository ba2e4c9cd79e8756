"""JSON schema of a config, by which editors complete and check keys."""

from __future__ import annotations

from typing import Any

from megafp8.config.files import BASE
from megafp8.config.schema import Config


def json_schema() -> dict[str, Any]:
    """The schema of a config file, which accepts all that `load_config` accepts.

    It requires less than `Config`: a folder (checkpoint.init_from) may complete the model section, another config
    (`base`) any section, and a part of a layer kind without `kind` is of the default kind, which pydantic's `oneOf`
    does not allow.
    """
    schema = Config.model_json_schema()
    del schema["$defs"]["ModelConfig"]["required"]
    required = [key for key in schema.pop("required") if key != "model"]
    sections = {key: _required(value, schema["$defs"]) for key, value in schema["properties"].items()}
    whole = {"required": required, "properties": {key: {"required": keys} for key, keys in sections.items() if keys}}
    base = {"type": "string", "description": "Another config, beside this one, whose keys hold where this gives none."}
    schema["properties"][BASE] = base
    relaxed: dict[str, Any] = _any_of(schema)
    return relaxed | {"if": {"not": {"required": [BASE]}}, "then": whole, "else": {"required": ["name"]}}


def _required(node: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Takes the required keys out of the definition of a section; none for another key."""
    keys: list[str] = definitions.get(node.get("$ref", "").split("/")[-1], {}).pop("required", [])
    return keys


def _any_of(node: Any) -> Any:
    if isinstance(node, list):
        return [_any_of(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items() if key != "discriminator"}
    return {key: _any_of(value) for key, value in node.items()}
