"""The command `megafp8`: each subcommand is the `main` of a file in `tools/`, or of the launcher.

In a checkout, `tools/` and `launch/` are folders next to the package. A wheel contains them as `megafp8.tools` and
`megafp8.launch` (pyproject.toml). Only the module of the subcommand is imported. Tools import torch when they run, not
when they are imported, so help and completion do not wait for it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from megafp8 import __version__
from megafp8.host.messages import print_error
from megafp8.host.shipped import PACKAGE, is_checkout

COMMANDS = {
    "quickstart": "tools.quickstart",
    "init": "tools.init",
    "pretrain": "tools.pretrain",
    "launch": "launch.command",
    "lighthouse": "tools.lighthouse",
    "plan": "tools.plan",
    "prove": "tools.prove",
    "card": "tools.card",
    "doctor": "tools.doctor",
    "check-cluster": "tools.check_cluster",
    "train-tokenizer": "tools.train_tokenizer",
    "preprocess": "tools.preprocess_data",
    "inspect-data": "tools.inspect_data",
    "sweep": "tools.sweep",
    "compare": "tools.compare_runs",
    "report": "tools.fp8_report",
    "inspect": "tools.inspect_checkpoint",
    "convert": "tools.convert_checkpoint",
    "average": "tools.average_checkpoints",
    "generate": "tools.generate",
    "serve": "tools.serve",
    "evaluate": "tools.evaluate",
    "coordinate-check": "tools.coordinate_check",
    "plot-run": "tools.plot_run",
    "plot-schedule": "tools.plot_schedule",
    "plot-expert-load": "tools.plot_expert_load",
    "completion": "tools.completion",
}
"""Subcommands and the modules that contain their `main`."""


def file_of(name: str) -> Path:
    """Return the source file of a subcommand."""
    module = COMMANDS[name]
    root = PACKAGE.parent if is_checkout() else PACKAGE
    return root.joinpath(*module.split(".")).with_suffix(".py")


def module_of(name: str) -> ModuleType:
    """Import and return the module of a subcommand, which has `main` and `make_parser`."""
    if not is_checkout():
        return import_module(f"megafp8.{COMMANDS[name]}")
    if str(PACKAGE.parent) not in sys.path:
        sys.path.insert(0, str(PACKAGE.parent))
    return import_module(COMMANDS[name])


def summary(name: str) -> str:
    """Return the first line of a subcommand's documentation."""
    with file_of(name).open(encoding="utf-8") as file:
        line = next(line for line in file if line.startswith('"""'))
    return line.strip().strip('"').partition(": `")[0].rstrip(".")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the config of a run and overrides of its keys. `parse_with_config` parses them."""
    parser.add_argument("--config", help="YAML file of a run; may also be the first argument")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of config keys, e.g. parallel.tensor=2"
    )


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a parser with `add_config_flags`."""
    arguments = parser.parse_intermixed_args(argv)
    from megafp8.config import config_and_overrides  # takes half a second; not for --help

    arguments.config, arguments.overrides = config_and_overrides(arguments.config, arguments.overrides)
    if arguments.config is None:
        parser.error("a config is needed: a YAML file, or the name of a shipped config, as megafp8 init lists them")
    return arguments


def help_text() -> str:
    """Return the text of `megafp8 --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary(name)}" for name in COMMANDS)
    return (
        f"usage: megafp8 COMMAND ...\n\nPretrain models in FP8, from data preparation to serving.\n\n{commands}\n\n"
        "For details: megafp8 COMMAND --help. On several GPUs:\n"
        "  megafp8 launch --nproc-per-node 8 pretrain --config my.yaml"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name, and return its exit code."""
    name, *arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        works = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        print_error(f"megafp8 has no command {name!r}; {works}")
        return 2
    sys.argv = [f"megafp8 {name}", *arguments]  # argparse prints this as the program name
    if arguments in (["-h"], ["--help"]):
        module_of(name).make_parser().print_help()
        return 0
    code: int = module_of(name).main()
    return code
