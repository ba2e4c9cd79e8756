"""Print a script that completes commands, options, configs and config keys in bash or zsh.

    megafp8 completion bash > ~/.local/share/bash-completion/completions/megafp8
    megafp8 completion zsh > ~/.zfunc/_megafp8          # with fpath+=~/.zfunc before compinit in ~/.zshrc

The script is static: megafp8 does not run when a key is pressed. Write the script again after an update.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path
from typing import Any

from megafp8.host.arguments import ArgumentParser
from megafp8.host.object_store import as_path
from megafp8.host.shipped import shipped_configs

_PATH_TYPES = (Path, as_path, expanduser)


def keys(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the dotted paths of all config keys that are not sections, from the JSON schema of a config."""

    def sections(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in node:
            yield schema["$defs"][node["$ref"].rpartition("/")[2]]
        for union in ("anyOf", "oneOf", "allOf"):
            for member in node.get(union, ()):
                yield from sections(member)

    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            inner = [section for section in sections(child) if "properties" in section]
            if inner:
                for section in inner:
                    yield from walk(section, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    yield from dict.fromkeys(walk(schema, ""))


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser of all subcommands, with the completion of each argument."""
    from megafp8.commands import COMMANDS, module_of, summary

    parser = argparse.ArgumentParser(prog="megafp8", add_help=False)
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        subparser = module_of(name).make_parser()
        action: Any  # shtab reads an extra attribute
        for action in subparser._actions:
            if how := _completed_by(name, action):
                action.complete = dict.fromkeys(("bash", "zsh"), f"_megafp8_{how}")
        subparsers.add_parser(name, parents=[subparser], add_help=False, help=summary(name))
    return parser


def _completed_by(command: str, action: argparse.Action) -> str | None:
    """Return the suffix of the shell function that completes an argument, or None for choices and numbers."""
    if action.choices or action.nargs == 0 or action.type in (int, float):
        return None
    if action.dest == "config":
        return "config_files"
    if action.dest == "overrides":
        return "config_files_and_keys"
    if command == "launch" and action.dest == "command":
        return "command_files_and_keys"
    if command == "init" and action.dest == "name":
        return "names"
    return "files" if action.type in _PATH_TYPES or action.metavar == "FOLDER" else None


def _functions(shell: str) -> str:
    """Return the shell functions that `_completed_by` names."""
    from megafp8.commands import COMMANDS
    from megafp8.config import json_schema

    words = {
        "names": sorted([*shipped_configs(), "launch"]),
        "config": sorted(shipped_configs()),
        "command": list(COMMANDS),
        "keys": [f"{key}=" for key in keys(json_schema())],
    }
    if shell == "bash":
        lines = [f"_megafp8_{kind}_words='{' '.join(values)}'" for kind, values in words.items()]
        lines.append('_megafp8_files() { compgen -f -- "$1"; }')
        lines.append('_megafp8_names() { compgen -W "$_megafp8_names_words" -- "$1"; }')
        for kind, sets in (
            ("config_files", "$_megafp8_config_words"),
            ("config_files_and_keys", "$_megafp8_config_words $_megafp8_keys_words"),
            ("command_files_and_keys", "$_megafp8_command_words $_megafp8_keys_words"),
        ):
            lines.append(f'_megafp8_{kind}() {{ compgen -W "{sets}" -- "$1"; compgen -f -- "$1"; }}')
        return "\n".join(lines)
    lines = [f"_megafp8_{kind}_words=({' '.join(values)})" for kind, values in words.items()]
    lines += ["_megafp8_names() { compadd -a _megafp8_names_words }"]
    kinds = {"config_files": "config", "config_files_and_keys": "config", "command_files_and_keys": "command"}
    for kind, parser in kinds.items():
        options = "compadd -S '' -a _megafp8_keys_words; " if "keys" in kind else ""
        lines.append(f"_megafp8_{kind}() {{ compadd -a _megafp8_{parser}_words; {options}_files }}")
    lines.append("_megafp8_files() { _files }")
    return "\n".join(lines)


_AFTER_BASH = """
# Folders end with a slash, and keys with an equals sign, without a space.
_megafp8() {
  _shtab_megafp8
  local i
  for i in "${!COMPREPLY[@]}"; do
    [[ -d ${COMPREPLY[i]} ]] && COMPREPLY[i]+=/
  done
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -F _megafp8 megafp8
"""


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    import shtab

    preamble: Any = {shell: _functions(shell)}  # shtab annotates it as text
    text: str = shtab.complete(whole_parser(), shell, preamble=preamble)
    if shell == "bash":
        return text + _AFTER_BASH
    return re.sub(r'^  "\(\*\)::?', '  "*:', text, flags=re.M)  # shtab completes only the first item of a list


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell for which to print the script")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    print(script(make_parser().parse_args(argv).shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
