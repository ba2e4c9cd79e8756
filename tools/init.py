"""Write a shipped config, or the launch scripts, into the current folder, to edit and start.

    megafp8 init                                lists the configs
    megafp8 init llama3-8b                      writes llama3-8b.yaml, and megafp8.schema.json next to it
    megafp8 init llama3-8b configs/mine.yaml
    megafp8 init --from train_gpt.sh mine.yaml  writes mine.yaml from the config of another project
    megafp8 init launch                         writes launch/: scripts for nodes and Slurm, manifests for Kubernetes

The config keeps its comments. Its first line lets editors with the YAML language server (VS Code, Neovim, Emacs,
JetBrains) complete and check keys. Existing configs and scripts are not overwritten.

--from reads a command line or script of Megatron-LM's pretrain_gpt.py, YAML of Megatron Bridge, NeMo 1, nanotron and
axolotl, and TOML of torchtitan. Keys without a counterpart become comments at the end of the file. Nothing is executed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

from megafp8 import __version__
from megafp8.host.arguments import ArgumentParser
from megafp8.host.messages import value_text
from megafp8.host.shipped import introduction, shipped, shipped_configs
from megafp8.host.suggestions import near_name
from megafp8.host.tool import run_tool

SCHEMA = "megafp8.schema.json"
LAUNCH = "launch"
_MADE_BY = "made by megafp8 init"
_BASE = re.compile(r"^base: ([\w-]+)\.yaml", re.MULTILINE)
"""Base of a shipped config that is itself a shipped config."""


def listing() -> str:
    """Return the names that `megafp8 init` knows, each with its description, in lines that fit the terminal."""
    configs, columns = shipped_configs(), shutil.get_terminal_size().columns
    known = {name: introduction(path) for name, path in configs.items()}
    known[LAUNCH] = "Scripts for one node, several nodes and Slurm, and manifests for Kubernetes."
    width = max(map(len, known)) + 2
    wrap = textwrap.TextWrapper(max(40 + width, columns), subsequent_indent=" " * width, break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{name:{width}}{text}") for name, text in known.items())


def write_schema(folder: Path) -> str:
    """Write the JSON schema of configs into the folder, replacing an older one, and return a message about it.

    Raises ValueError if a file of that name is not a schema written by this command.
    """
    from megafp8.config import json_schema

    comment = f"{_MADE_BY} of version {__version__}; the same command replaces it when the schema has changed"
    text = json.dumps({"$comment": comment, **json_schema()}, indent=1) + "\n"
    path = folder / SCHEMA
    if path.exists():
        before = path.read_text(encoding="utf-8")
        if before == text:
            return f"{path}: exists already"
        if f'"$comment": "{_MADE_BY}' not in before[:200]:
            raise ValueError(f"{path} exists and was not {_MADE_BY}: move it, or write the config into another folder")
    path.write_text(text, encoding="utf-8")
    return f"{path}: schema of the config keys, for editors"


def _copy(name: str, target: Path) -> None:
    """Write a shipped config with the line for editors. Raises FileExistsError if the file exists."""
    text = shipped_configs()[name].read_text(encoding="utf-8").replace(f"configs/{name}.yaml", target.as_posix())
    with target.open("x", encoding="utf-8") as written:
        written.write(f"# yaml-language-server: $schema={SCHEMA}\n{text}")


def write_config(name: str, file: Path | None) -> None:
    """Write the shipped config `name` and its schema. Raises ValueError if the file already exists."""
    configs = shipped_configs()
    if name not in configs:
        near = near_name(name, [*configs, LAUNCH])
        works = f"did you mean {near}?" if near else f"there are: {', '.join(configs)}"
        raise ValueError(f"no shipped config is called {name!r}; {works}")
    target = Path(f"{name}.yaml") if file is None else file / f"{name}.yaml" if file.is_dir() else file
    if target.exists():
        raise ValueError(f"{target} exists and is not overwritten; give another file: megafp8 init {name} FILE")
    target.parent.mkdir(parents=True, exist_ok=True)
    schema = write_schema(target.parent)
    _copy(name, target)
    print(f"{target}: {introduction(configs[name])}")
    base = _BASE.search(target.read_text(encoding="utf-8"))
    if base is not None and not (target.parent / f"{base[1]}.yaml").exists():
        _copy(base[1], target.parent / f"{base[1]}.yaml")
        print(f"{target.parent / base[1]}.yaml: its base, which provides all other keys")
    print(schema)
    print(f"to see its memory and layout: megafp8 pretrain {target} --dry-run")


def write_imported(source: Path, file: Path | None) -> None:
    """Write the config of another project as a megafp8 config. Raises ValueError if the file already exists."""
    from megafp8.conversion.configs.engine import write
    from megafp8.conversion.configs.formats import import_config

    target = file or Path(f"{source.stem}.megafp8.yaml")
    imported = import_config(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("x", encoding="utf-8") as written:
            written.write(write(imported, source.name))
    except FileExistsError:
        raise ValueError(f"{target} exists and is not overwritten; give another file: --from {source} FILE") from None
    print(
        f"{target}: {imported.converted} keys of {imported.project} converted, {len(imported.left)} without counterpart"
    )
    for note in imported.notes:
        print(note)
    for key, value, reason in imported.left:
        print(f"  {key} = {value_text(value)}: {reason}")
    if imported.missing:
        print(f"fill in, as marked in the file: {', '.join(imported.missing)}")
    print(f"to see its memory and layout: megafp8 pretrain {target} --dry-run")


def write_launch(folder: Path) -> None:
    """Copy the launch scripts into the folder. Raises ValueError if it exists."""
    if folder.exists():
        raise ValueError(f"{folder} exists and is not overwritten; give another folder: megafp8 init {LAUNCH} FOLDER")
    only_scripts = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(shipped(LAUNCH), folder, ignore=only_scripts)
    for path in sorted(folder.rglob("*.*")):
        if path.suffix in (".sh", ".sbatch"):
            path.chmod(path.stat().st_mode | 0o111)  # a wheel may be unpacked without these permissions
        print(path)


def init(name: str | None, file: Path | None) -> None:
    """List the shipped configs, or write the config or launch scripts called `name`."""
    if name is None:
        print(f"{listing()}\n\nmegafp8 init NAME writes one here; megafp8 pretrain NAME --dry-run describes it")
    elif name == LAUNCH:
        write_launch(file or Path(LAUNCH))
    else:
        write_config(name.removesuffix(".yaml"), file)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, help="config of another project; NAME is the file to write")
    parser.add_argument("name", nargs="?", help="a shipped config, or launch; default: list all names")
    parser.add_argument("file", nargs="?", type=Path, help="file or folder to write; default: NAME.yaml, or launch/")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.source is None:
        return run_tool(lambda: init(arguments.name, arguments.file))
    if arguments.file is not None:
        parser.error("--from takes one file to write")
    return run_tool(lambda: write_imported(arguments.source, None if arguments.name is None else Path(arguments.name)))


if __name__ == "__main__":
    sys.exit(main())
