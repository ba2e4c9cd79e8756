"""Command-line flags, error handling and plotting shared by the tools."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from megafp8.data.documents import InputFile, SkippedFile, find_files
from megafp8.data.styles.registry import STYLES
from megafp8.data.tokenizers import TokenizerKind, TokenizerSettingError, TokenizerSettings
from megafp8.host.messages import print_error
from megafp8.host.suggestions import did_you_mean

_INTERRUPTED, _FAILED = 130, 2


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The config of a run and overrides of its keys; `parse_with_config` parses them."""
    parser.add_argument("--config", help="the YAML file of a run; or the first argument")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config, e.g. parallel.tensor=2")


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a parser with `add_config_flags`."""
    arguments = parser.parse_intermixed_args(argv)
    from megafp8.config import config_and_overrides  # takes half a second, which --help and other tools need not wait

    arguments.config, arguments.overrides = config_and_overrides(arguments.config, arguments.overrides)
    if arguments.config is None:
        parser.error("a config is needed: a YAML file, or the name of a shipped config, as megafp8 init lists them")
    return arguments


def pyplot() -> ModuleType:
    """matplotlib.pyplot, drawing without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines of columns as wide as their longest cell, the first `left` of them aligned to the left."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    lines = (
        "  ".join(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row))
        for row in (heading, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def file_of_run(folder: Path, name: str, advice: str) -> Path:
    """A file in the folder of a run, which may also be given by a checkpoint in it.

    Raises ValueError where there is no such folder, and with `advice` if the run has not written the file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; {did_you_mean(folder, 'give that of a run, <run_dir>/<name>')}")
    run_file = (
        folder.parent if folder.name == "checkpoints" else folder.parents[1] if folder.name[:5] == "step_" else folder
    )
    if not (run_file / name).exists():
        raise ValueError(f"{run_file} has no {name}: {advice}")
    return run_file / name


def names_of(folders: Sequence[Path]) -> list[str]:
    """A unique name for each folder. ValueError if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ValueError(f"{folders[i]} is given twice")
    return ["/".join(path.parts[-_parts_needed(path, paths) :]) for path in paths]


def _parts_needed(path: Path, paths: Sequence[Path]) -> int:
    """Number of last parts of `path` that no other of `paths` ends with."""
    for count in range(1, len(path.parts)):
        if sum(other.parts[-count:] == path.parts[-count:] for other in paths) == 1:
            return count
    return len(path.parts)


def add_input_flags(parser: argparse._ActionsContainer) -> None:
    """Flags of tools that read text."""
    parser.add_argument("--input", nargs="+", type=expanduser, default=[], help="files, folders or globs")
    parser.add_argument("--input-list", type=expanduser, help="a file with one input path a line")
    parser.add_argument("--text-files", action="store_true", help="read every input file as one document")
    parser.add_argument(
        "--json-key",
        nargs="+",
        help="key or column that holds the text (default text): one for all inputs, or one for each in their order",
    )
    parser.add_argument("--skip-errors", action="store_true", help="skip and count documents that cannot be read")


def input_files(arguments: argparse.Namespace, style: str = "text", more_keys: Sequence[str] = ()) -> list[InputFile]:
    """The files that the input flags name. `more_keys`: of the style, beside that of --json-key.

    Warns of files that are skipped. Raises ValueError if there are none.
    """
    inputs = list(arguments.input)
    if arguments.input_list:
        inputs += Path(arguments.input_list).read_text(encoding="utf-8").splitlines()
    inputs = [item for item in inputs if item]
    if not inputs:
        raise ValueError("no inputs: give --input or --input-list")
    files, skipped = find_files(
        inputs,
        json_keys=arguments.json_key or [STYLES[style].keys[0].name],
        any_text=arguments.text_files,
        style=style,
        more_keys=more_keys,
    )
    if skipped:
        print(_describe_skipped(skipped), file=sys.stderr)
    return files


def _describe_skipped(skipped: list[SkippedFile]) -> str:
    """One line per reason, with the first ten files."""
    paths: dict[str, list[str]] = {}
    for file in skipped:
        paths.setdefault(file.reason, []).append(str(file.path))
    return "\n".join(
        f"warning: not read ({reason}): {', '.join(files[:10])}"
        + (f", and {len(files) - 10:,} more" if files[10:] else "")
        for reason, files in paths.items()
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Flags for the settings of the config section data.tokenizer."""
    parser.add_argument(
        "--tokenizer", required=required, choices=get_args(TokenizerKind), help="data.tokenizer.kind of the config"
    )
    parser.add_argument(
        "--tokenizer-path",
        type=expanduser,
        help="model file (vocab.json: with merges.txt beside it); for tiktoken also an encoding's name",
    )
    help = "token that ends a document. Default: the eos_token that the tokenizer's files state"
    parser.add_argument("--tokenizer-end-token", help=help)
    help = "regular expression that splits text, for tiktoken ranks files. Default: pat_str of the code in its folder"
    parser.add_argument("--tokenizer-pattern", help=help)
    help = "begin each document with the beginning token, or not. Default: as the tokenizer's files say"
    parser.add_argument("--tokenizer-add-bos-token", action=argparse.BooleanOptionalAction, help=help)


def tokenizer_settings(arguments: argparse.Namespace) -> TokenizerSettings:
    return TokenizerSettings(
        arguments.tokenizer,
        arguments.tokenizer_path,
        arguments.tokenizer_end_token,
        arguments.tokenizer_pattern,
        arguments.tokenizer_add_bos_token,
    )


def _missing(error: FileNotFoundError) -> str:
    """Message that names the missing file, or the missing folder of a file that was to be written."""
    if not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename)
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}; {did_you_mean(path.parent, 'make it first')}"
    return f"there is no {path}; {did_you_mean(path, 'give a file that exists')}"


def run_tool(tool: Callable[[], None]) -> int:
    """Run a tool. Exit code 0, 2 after printing the error of bad input, or 130 after Ctrl-C or SIGTERM."""
    try:
        # SIGTERM, which batch systems send, is handled like Ctrl-C, so that files are cleaned up.
        with signal_handler(signal.default_int_handler, signal.SIGTERM):
            tool()
    except TokenizerSettingError as error:
        flag = f"--tokenizer-{error.setting.replace('_', '-')}"
        value = "" if error.value is None else f" {error.value}"
        print_error(f"{flag}{value}: {error.rule}; {error.works}")
        return _FAILED
    except FileNotFoundError as error:
        print_error(_missing(error))
        return _FAILED
    except (ValueError, OSError) as error:
        print_error(error)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


@contextmanager
def signal_handler(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals by `handler`, if in the main thread; handlers can only be set there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
