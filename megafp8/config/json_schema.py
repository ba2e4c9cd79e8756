"""JSON schema of a config, which lets editors complete and check keys."""

from __future__ import annotations

from typing import Any

from megafp8.config.files import BASE
from megafp8.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the schema of a config file. It accepts every file that `load_config` accepts.

    It requires fewer keys than `Config`: a folder (checkpoint.init_from) may complete the model section, another config
    (`base`) may complete any section, and a layer part without `kind` has the default kind, which pydantic's `oneOf`
    does not allow.
    """
    schema = Config.model_json_schema()
    del schema["$defs"]["ModelConfig"]["required"]
    required = [key for key in schema.pop("required") if key != "model"]
    sections = {key: _required(value, schema["$defs"]) for key, value in schema["properties"].items()}
    whole = {"required": required, "properties": {key: {"required": keys} for key, keys in sections.items() if keys}}
    base = {"type": "string", "description": "Another config, in the same folder, that provides the keys missing here."}
    schema["properties"][BASE] = base
    relaxed: dict[str, Any] = _any_of(schema)
    return relaxed | {"if": {"not": {"required": [BASE]}}, "then": whole, "else": {"required": ["name"]}}


def _required(node: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Remove the required keys from the definition of a section and return them; an empty list for other keys."""
    keys: list[str] = definitions.get(node.get("$ref", "").split("/")[-1], {}).pop("required", [])
    return keys


def _any_of(node: Any) -> Any:
    """Return the schema with every discriminated `oneOf` replaced by `anyOf`."""
    if isinstance(node, list):
        return [_any_of(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items() if key != "discriminator"}
    return {key: _any_of(value) for key, value in node.items()}
