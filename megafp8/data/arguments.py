"""Command-line flags and behaviour that the data tools share."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import get_args

from megafp8.data.documents import InputFile, SkippedFile, find_files
from megafp8.data.tokenizers import TokenizerKind, TokenizerSettingError, TokenizerSettings

_INTERRUPTED, _FAILED = 130, 2


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of tools that read text."""
    parser.add_argument("--input", nargs="+", default=[], help="files, folders or globs")
    parser.add_argument("--input-list", help="a file with one input path a line")
    parser.add_argument("--text-files", action="store_true", help="every input file is one document, whatever its name")
    parser.add_argument(
        "--json-key",
        nargs="+",
        default=["text"],
        help="key or column that holds the text: one for all inputs, or one for each input in their order",
    )
    parser.add_argument(
        "--skip-errors", action="store_true", help="leave out documents that cannot be read, and count them"
    )


def input_files(arguments: argparse.Namespace) -> list[InputFile]:
    """The files that the input flags name. Prints which others their folders hold. Raises ValueError."""
    inputs = list(arguments.input)
    if arguments.input_list:
        inputs += Path(arguments.input_list).read_text(encoding="utf-8").splitlines()
    inputs = [item for item in inputs if item]
    if not inputs:
        raise ValueError("no inputs: give --input or --input-list")
    files, skipped = find_files(inputs, json_keys=arguments.json_key, any_text=arguments.text_files)
    if skipped:
        print(_describe_skipped(skipped), file=sys.stderr)
    return files


def _describe_skipped(skipped: list[SkippedFile]) -> str:
    """A line for each reason, with the first files it concerns."""
    lines = []
    for reason, count in Counter(file.reason for file in skipped).items():
        paths = [str(file.path) for file in skipped if file.reason == reason]
        shown = ", ".join(paths[:10]) + (f", and {count - 10:,} more" if count > 10 else "")
        lines.append(f"warning: not read ({reason}): {shown}")
    return "\n".join(lines)


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Flags of the settings that the config has under data.tokenizer."""
    parser.add_argument(
        "--tokenizer", required=required, choices=get_args(TokenizerKind), help="the config's data.tokenizer.kind"
    )
    parser.add_argument("--tokenizer-path", help="model file; for tiktoken also an encoding's name")
    parser.add_argument("--tokenizer-end-token", help="token that ends a document, if not the tokenizer's own")
    parser.add_argument("--tokenizer-pattern", help="tiktoken ranks files: regular expression that splits text")


def tokenizer_settings(arguments: argparse.Namespace) -> TokenizerSettings:
    return TokenizerSettings(
        arguments.tokenizer, arguments.tokenizer_path, arguments.tokenizer_end_token, arguments.tokenizer_pattern
    )


def run(tool: Callable[[], None]) -> int:
    """Exit code of `tool()`: 0, 2 after printing the error of a bad input, 130 after Ctrl-C or SIGTERM."""
    try:
        with _sigterm_raises():
            tool()
    except TokenizerSettingError as error:
        flag = f"--tokenizer-{error.setting.replace('_', '-')}"
        given = "" if error.value is None else f" {error.value}"
        print(f"error: {flag}{given}: {error.rule}; {error.works}", file=sys.stderr)
        return _FAILED
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM, which batch systems send, is handled as Ctrl-C is, so that files are cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
