"""The command `megafp8`: its subcommands are the job, the launcher, the server, and the tools.

In a checkout `tools/` and `launch/` are folders beside the package; a wheel has them in it, as `megafp8.tools` and
`megafp8.launch` (pyproject.toml). Nothing but the subcommand that runs is imported, so help needs no torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megafp8 import __version__
from megafp8.host.messages import print_error
from megafp8.host.shipped import PACKAGE, is_checkout

if TYPE_CHECKING:
    from megafp8.host.arguments import ArgumentParser

COMMANDS = {
    "quickstart": "tools.quickstart",
    "init": "tools.init",
    "pretrain": "tools.pretrain",
    "launch": "launch.command",
    "lighthouse": "tools.lighthouse",
    "plan": "tools.plan",
    "prove": "tools.prove",
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
    "serve": "megafp8.inference.server.run",
    "evaluate": "tools.evaluate",
    "coordinate-check": "tools.coordinate_check",
    "plot-run": "tools.plot_run",
    "plot-schedule": "tools.plot_schedule",
    "plot-expert-load": "tools.plot_expert_load",
    "completion": "tools.completion",
}
"""Subcommands, and the modules whose `main` they are."""


def file_of(name: str) -> Path:
    """The source file of a subcommand."""
    module = COMMANDS[name]
    first, *rest = module.split(".")
    root = PACKAGE.parent if first == "megafp8" or is_checkout() else PACKAGE
    return root.joinpath(first, *rest).with_suffix(".py")


def _module_name(name: str) -> str:
    """The name by which a subcommand's module is imported, which is made possible in a checkout."""
    module = COMMANDS[name]
    if module.startswith("megafp8."):
        return module
    if not is_checkout():
        return f"megafp8.{module}"
    if str(PACKAGE.parent) not in sys.path:
        sys.path.insert(0, str(PACKAGE.parent))
    return module


def module_of(name: str) -> ModuleType:
    """The module of a subcommand, with its `main` and `make_parser`."""
    return import_module(_module_name(name))


def parser_of(name: str) -> ArgumentParser:
    """The parser of a subcommand, for help and completion, without what the subcommand imports to run."""
    from megafp8.commands.parsers import make_parser_of

    return make_parser_of(file_of(name), _module_name(name))


def summary(name: str) -> str:
    """The first line of a subcommand's documentation."""
    with file_of(name).open(encoding="utf-8") as file:
        line = next(line for line in file if line.startswith('"""'))
    return line.strip().strip('"').partition(": `")[0].rstrip(".")


def help_text() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary(name)}" for name in COMMANDS)
    return (
        f"usage: megafp8 COMMAND ...\n\nPretrain models in FP8, and all that belongs to it.\n\n{commands}\n\n"
        "`megafp8 COMMAND --help` says more. On several GPUs:\n"
        "  megafp8 launch --nproc-per-node 8 pretrain --config my.yaml"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; returns its exit code."""
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
    sys.argv = [f"megafp8 {name}", *arguments]  # argparse's name of the program
    if arguments in (["-h"], ["--help"]):
        parser_of(name).print_help()
        return 0
    code: int = module_of(name).main()
    return code
