"""JSON schema of a config, by which editors complete and check keys."""

from __future__ import annotations

from typing import Any

from megafp8.config.schema import Config


def json_schema() -> dict[str, Any]:
    """The schema of `Config`, which accepts all that `load_config` accepts.

    It requires less than `Config`: a folder (checkpoint.init_from) may complete the model section, and a part of a
    layer kind without `kind` is of the default kind, which pydantic's `oneOf` does not allow.
    """
    schema = Config.model_json_schema()
    schema["required"].remove("model")
    del schema["$defs"]["ModelConfig"]["required"]
    relaxed: dict[str, Any] = _any_of(schema)
    return relaxed


def _any_of(node: Any) -> Any:
    if isinstance(node, list):
        return [_any_of(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items() if key != "discriminator"}
    return {key: _any_of(value) for key, value in node.items()}
