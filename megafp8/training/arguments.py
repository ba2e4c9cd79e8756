"""Command-line parser of a training job. It imports no config code, so that help texts are fast."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megafp8.host.arguments import ArgumentParser, UsageError


def _ranks(text: str) -> int:
    """Parse the value of --world-size."""
    ranks = int(text)
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"{ranks} ranks; at least 1 is needed")
    return ranks


class _Parser(ArgumentParser):
    """Parser that raises errors instead of printing them: all ranks find the same error, and one rank reports it."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the usage and `message`."""
        raise UsageError(self.usage_error(message))


class _Once(argparse.Action):
    """Action of an argument that may be given only once. argparse would silently use the last value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            parser.error(f"{self.option_strings[0]} is given twice: {before} and {values}; give one")
        setattr(namespace, self.dest, values)


def make_parser(description: str | None) -> ArgumentParser:
    """Return the parser of a training script, with `description` as its help text."""
    parser = _Parser(description=description)
    parser.add_argument("--config", action=_Once, help="the YAML file of the run; it may also be the first argument")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, e.g. parallel.tensor=2")
    shown = "print rank layout, parameters, memory per rank, step time, linear layers and data sets, then stop"
    parser.add_argument("--dry-run", action="store_true", help=shown)
    help = "with --dry-run: the number of ranks to plan for (default: the fewest that the config runs on)"
    parser.add_argument("--world-size", action=_Once, type=_ranks, help=help)
    help = "with --dry-run: print the config with all defaults too"
    parser.add_argument("--verbose", action="store_true", help=help)
    parser.add_argument("--print-schema", action="store_true", help="print the JSON schema of the config, then stop")
    return parser
