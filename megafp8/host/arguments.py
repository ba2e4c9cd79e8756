"""Command-line parser with one-line errors that suggest a fix, and with defaults in the help."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megafp8.host.messages import print_error
from megafp8.host.suggestions import near_name

_FAILED = 2

Number = TypeVar("Number", int, float)


def says_nothing(default: object) -> bool:
    """Return whether `default` is the default of an option that is not set."""
    return default is None or default is False or default in (argparse.SUPPRESS, [], ())


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps the description's line breaks and adds defaults that an option's help does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if says_nothing(action.default) or not action.option_strings or "default" in text.lower():
            return text
        return f"{text}; default: %(default)s" if text else "default: %(default)s"


class UsageError(ValueError):
    """Invalid command line, described in one line."""


def at_least(smallest: int) -> Callable[[str], int]:
    """Return the argparse type of an integer option with a minimum of `smallest`."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is too small; give {smallest} or more")
        return value

    number.__name__ = "int"  # argparse's message about a wrong value uses this name
    return number


def between(smallest: Number, largest: Number) -> Callable[[str], Number]:
    """Return the argparse type of a number from `smallest` to `largest`; an integer if both are."""
    kind = type(smallest)

    def number(text: str) -> Number:
        value = kind(text)
        if not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give a number from {smallest} to {largest}")
        return value

    number.__name__ = kind.__name__
    return number


class ArgumentParser(argparse.ArgumentParser):
    """Parser with errors in the form of config errors, and with paths that may begin with `~`.

    An error is one line, `error: what is wrong; what would work`, printed by the first rank of a node. The exit code is
    2.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self.register("type", Path, lambda text: Path(expanduser(text)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, and reject config keys that are written as options, as in torchtitan."""
        words = list(sys.argv[1:] if args is None else args)
        for word, following in pairwise([*words, "VALUE"]):
            option, equals, value = word.partition("=")
            if self._takes_keys and option.startswith("--") and "." in option:
                key = f"{option[2:]}={value if equals else following}"
                self.error(f"{option}: keys of the config are given without dashes; did you mean {key}?")
        return super().parse_known_args(words, namespace)

    @property
    def _takes_keys(self) -> bool:
        """Whether the command line accepts overrides of config keys."""
        return any(action.dest == "overrides" for action in self._actions)

    def error(self, message: str) -> NoReturn:
        """Print the error on the first rank of a node, and exit with code 2."""
        if "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(self.usage_error(message))
        sys.exit(_FAILED)

    def usage_error(self, message: str) -> str:
        """Return an error message of argparse or of a tool, with a suggestion if it has none."""
        message = re.sub(r"^argument (\S+/)?", "", message)
        message = message.replace("training_script, training_script_args", "COMMAND")  # torchrun's parser names them so
        message = re.sub(r"invalid int value: (.*)", r"\1 is not a whole number", message)
        message = re.sub(r"invalid \w+ value: (.*)", r"\1 is not a number", message)
        works = self._works(message)
        return f"{message}; {works}" if works else message

    def _works(self, message: str) -> str:
        """Return a suggestion for an error message; an empty string if the message already has one."""
        see_help = f"see {self.prog} --help"
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
            options = [option for action in self._actions for option in action.option_strings]
            wrong = next((word.partition("=")[0] for word in unknown[1].split() if word.startswith("-")), "")
            near = near_name(wrong.lstrip("-"), (option.lstrip("-") for option in options))
            keys = "keys of the config are given as parallel.tensor=2; " if self._takes_keys else ""
            return f"did you mean --{near.replace('_', '-')}?" if near else keys + see_help
        if choice := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            near = near_name(choice[1], re.findall(r"[^\s,']+", choice[2]))
            return f"did you mean {near}?" if near else see_help
        texts = r" is not a (whole )?number$|^the following arguments|expected |not allowed with"
        by_argparse = re.search(texts, message)
        return see_help if by_argparse or not re.search("[;:] ", message) else ""
