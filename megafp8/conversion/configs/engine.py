"""Apply a table of foreign keys to a config of another project, and write the result as a megafp8 config.

A key without a counterpart is kept with its value and a reason, and so is a key whose value the config refuses. The
result passes all checks of single keys and sections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import ValidationError

from megafp8.config import Config, Problem
from megafp8.config.key_names import OTHER_NAMES, key_paths
from megafp8.config.load import explain

Source = Mapping[str, Any]
"""Values of a foreign config by dotted key, without nulls and unresolved variables."""
Keys = dict[str, Any]
"""Values by dotted key of megafp8."""
Function = Callable[[Any, Source], Keys]
"""Rule for a foreign value and its source. It raises ValueError, with the reason, if there is no counterpart."""
Rule = str | Function
"""Counterpart of a foreign key: a key of megafp8 that takes the value as it is, or a function."""
UNRESOLVED = re.compile(r"\$[{(\w]|\?\?\?")
_FILL_IN = "FILL_IN"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_FOLDER_MODEL = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1}


@dataclass(frozen=True)
class Foreign:
    """Config of another project: its values by key, with names in the file where these differ, and its table.

    `defaults` are the project's values of missing keys, `added` are keys of megafp8 that follow from the whole file.
    """

    project: str
    values: Source
    rules: Mapping[str, Rule]
    defaults: Source = field(default_factory=dict)
    added: Keys = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Imported(NamedTuple):
    """Config of megafp8, with the number of converted keys, the others, and the required keys to fill in.

    The others are the keys without a counterpart, each with its value and the reason.
    """

    project: str
    tree: Keys
    converted: int
    left: list[tuple[str, Any, str]]
    missing: list[str]
    notes: Sequence[str]


def same_names(names: str, prefix: str = "") -> dict[str, Rule]:
    """Return rules for keys that `config.key_names` translates, or that have the same name in megafp8."""
    namesakes = {key.rpartition(".")[2]: key for key in sorted(key_paths(), key=lambda key: -key.count("."))}
    return {f"{prefix}{name}": OTHER_NAMES.get(name) or namesakes[name] for name in names.split()}


def without(reasons: Mapping[str, str]) -> dict[str, Rule]:
    """Return rules for keys without a counterpart, from space-separated names by reason."""
    return {name: refuse(reason) for reason, names in reasons.items() for name in names.split()}


def refuse(reason: str) -> Function:
    """Return a rule for a key without a counterpart."""

    def rule(value: Any, source: Source) -> Keys:
        raise ValueError(reason)

    return rule


def fixed(**values: Any) -> Function:
    """Return a rule that sets keys if the foreign value is true. `__` stands for a dot."""
    return lambda value, source: {key.replace("__", "."): x for key, x in values.items()} if value else {}


def when(switches: str, rule: Rule) -> Function:
    """Return a rule that counts only if one of the foreign keys `switches`, which spaces separate, is true."""
    return lambda value, source: apply(rule, value, source) if any(map(source.get, switches.split())) else {}


def word(key: str, **words: Any) -> Function:
    """Return a rule that translates words to values of `key`, if one is given, and refuses other words."""

    def rule(value: Any, source: Source) -> Keys:
        if (name := str(value).lower().replace("-", "_")) not in words:
            raise ValueError(f"supported: {', '.join(words)}")
        return {key: words[name]} if key else {}

    return rule


def implied(value: Any, source: Source) -> Keys:
    """Return no keys, for a foreign key that another rule reads, or that states what megafp8 does anyway."""
    return {}


def decay(style: str, warmup: int, length: int, steps: int) -> Keys:
    """Return a schedule that decays over the last `length` of `steps`: by cosine, linear, or sqrt (1 - √progress)."""
    if style == "sqrt":
        return {"optimizer.schedule": "wsd", "optimizer.decay_steps": length}
    if style not in ("cosine", "linear") or warmup + length < steps:
        raise ValueError("after a constant phase, megafp8 decays by 1 - sqrt (optimizer.schedule: wsd)")
    return {"optimizer.schedule": style}


def number(text: Any) -> Any:
    """Return the number that a text such as 1e-4 states, which YAML does not read as one, or the value itself."""
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key, without nulls."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = number(value)
    return flat


def apply(rule: Rule, value: Any, source: Source) -> Keys:
    """Return the keys of megafp8 that follow from a foreign value."""
    return {rule: value} if isinstance(rule, str) else rule(value, source)


def convert(foreign: Foreign, name: str) -> Imported:
    """Translate a foreign config. The run is called `name` if the source does not name it."""
    resolved = {key: value for key, value in foreign.values.items() if not UNRESOLVED.search(str(value))}
    source, keys, origins = {**foreign.defaults, **resolved}, {**foreign.added}, dict[str, str]()
    left: dict[str, str] = {}
    for key, value in {**foreign.defaults, **foreign.values}.items():
        rule = foreign.rules.get(key, refuse("not known"))
        try:
            new = apply(rule if key in source else refuse("a variable that the file does not set"), value, source)
            keys |= new
            origins |= dict.fromkeys(new, key)
        except ValueError as error:
            left[key] = str(error)
    keys["name"] = re.sub("[^A-Za-z0-9._-]+", "-", str(keys.get("name", name))).strip("._-") or "imported"
    refused, missing = _make_valid(keys)
    left |= {origins.get(ours, ours): reason for ours, reason in refused.items()}
    values = {**foreign.added, **foreign.defaults, **foreign.values}
    shown = [(foreign.names.get(key, key), values[key], reason) for key, reason in left.items()]
    converted = len(foreign.values.keys() - left.keys())
    return Imported(foreign.project, _nested(keys), converted, shown, missing, foreign.notes)


def _nested(keys: Keys) -> Keys:
    """Return sections in the order of the schema."""
    tree: Keys = {}
    for key in sorted(keys, key=key_paths().index):
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = dict(keys[key]) if isinstance(keys[key], dict) else keys[key]
    return tree


def _make_valid(keys: Keys) -> tuple[dict[str, str], list[str]]:
    """Remove keys that the config refuses, add placeholders for missing ones, and return the reasons and the latter."""
    refused, missing = dict[str, str](), list[str]()
    if "checkpoint.init_from" in keys:
        keys["model"] = {}  # the folder completes the section
    while True:
        tree = _nested(keys)
        if "checkpoint.init_from" in keys:
            tree["model"] = _FOLDER_MODEL | tree["model"]
        try:
            Config.model_validate(tree)
            problems = [*_without_effect(tree)]
        except ValidationError as error:
            problems = explain(error.errors())
        if not problems:
            for path in missing:
                keys[path] = [_FILL_IN] if path == "data.train" else f"{_FILL_IN}:{path}"
            return refused, missing
        for problem in problems:
            path = f"{problem.path}."
            wrong = [key for key in keys if f"{key}.".startswith(path) or path.startswith(f"{key}.")]
            if problem.is_missing:
                keys[problem.path] = [_FILL_IN] if problem.path == "data.train" else 1
                missing.append(problem.path)
            elif not wrong:
                raise ValueError(str(problem))
            else:
                refused |= dict.fromkeys(wrong, problem.rule)
                for key in wrong:
                    del keys[key]


def _without_effect(tree: Keys) -> Iterator[Problem]:
    """Yield a problem for each option that the chosen kind, such as `fp8.recipe`, does not have."""
    for name in tree.keys() & {"fp8", "training", "optimizer"}:
        section: Any = Config.model_fields[name].annotation
        values = tree[name]
        for choice in section.choices:
            field = section.model_fields[choice]
            chosen = values.get(choice, field.default)
            kinds = [kind for kind in get_args(field.annotation) if kind != "none"]  # whose section has no effect
            options = {key for kind in kinds for key in section.options(choice, {**values, choice: kind})} - {choice}
            for key in options & values.keys() - set(section.options(choice, {**values, choice: chosen})):
                yield Problem(f"{name}.{key}", values[key], f"{name}.{choice} {chosen} has no such option", "")


def write(imported: Imported, origin: str) -> str:
    """Return the YAML of an imported config, with what has no counterpart as comments at the end."""
    head = [f"From {origin} ({imported.project}), by megafp8 init --from.", *imported.notes]
    if imported.missing:
        head.append(f"Fill in, as marked below: {', '.join(imported.missing)}.")
    text = yaml.safe_dump(imported.tree, sort_keys=False, allow_unicode=True, width=120)
    text = re.sub(rf"{_FILL_IN}:[\w.]+", _FILL_IN, text)  # not a number: a config that is not filled in must not start
    tail = [f"{key} = {value!r}: {reason}" for key, value, reason in imported.left]
    blocks = [head, ["Without counterpart:", *tail] if tail else []]
    before, after = ("".join(f"# {' '.join(line.split())}\n" for line in block) for block in blocks)
    sections = re.sub(r"\n(?=\w)", "\n\n", text)
    return "\n".join(part for part in (before, sections, after) if part)
