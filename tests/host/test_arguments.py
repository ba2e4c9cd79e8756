"""Command lines of all subcommands: help, defaults, and errors of one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from torch.distributed.run import get_args_parser

from megafp8.commands import COMMANDS, module_of
from megafp8.conversion.format_names import FORMAT_NAMES
from megafp8.conversion.formats import FORMATS
from megafp8.host.arguments import ArgumentParser, at_least, between, says_nothing
from megafp8.host.object_store import as_path
from megafp8.host.suggestions import near_path
from megafp8.linear.quantized_weight import WEIGHT_FORMATS
from megafp8.linear.weight_format_names import WeightFormatName
from tools.completion import _completed_by


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_has_a_help_text_and_its_default(name: str) -> None:
    parser = module_of(name).make_parser()
    assert isinstance(parser, ArgumentParser)
    parser.prog = f"megafp8 {name}"
    formatter = parser._get_formatter()
    for action in options_of(parser):
        shown = " ".join((formatter._expand_help(action) if action.help else "").split())
        assert shown, f"{name}: {action.option_strings or action.dest}"
        if action.option_strings and not says_nothing(action.default):
            assert str(action.default) in shown, f"{name}: {action.option_strings}: {shown}"
    assert parser.format_help().startswith(f"usage: megafp8 {name}")


def test_help_imports_no_torch() -> None:
    code = "import sys; from megafp8.commands import COMMANDS, main; [main([name, '--help']) for name in COMMANDS]"
    code += "; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "pydantic", "matplotlib"} & set(done.stderr.split())


def test_formats_have_the_names_that_help_shows() -> None:
    assert list(FORMATS) == list(FORMAT_NAMES)
    assert list(WEIGHT_FORMATS) == list(get_args(WeightFormatName))


def test_launch_has_options_of_torchrun_with_their_defaults() -> None:
    theirs = {option: action for action in options_of(get_args_parser()) for option in action.option_strings}
    for action in options_of(module_of("launch").make_parser()):
        for option in action.option_strings:
            assert (None if theirs[option].default == "" else theirs[option].default) == action.default, option


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("convert", ["--to", "hf"], "the following arguments are required: --load, --save; see megafp8 convert --help"),
        ("plan", ["--gpsu", "8"], "unrecognized arguments: --gpsu; did you mean --gpu?"),
        ("compare", ["runs/a", "--pgn", "x.png"], "unrecognized arguments: --pgn x.png; did you mean --png?"),
        ("compare", ["runs/a", "--frobnicate"], "unrecognized arguments: --frobnicate; see megafp8 compare --help"),
        ("plan", ["x.yaml", "--parallel.tensor", "2"], "--parallel.tensor: keys of the config are given without "
         "dashes; did you mean parallel.tensor=2?"),
        ("prove", ["x.yaml", "--lr", "2"], "unrecognized arguments: --lr 2; keys of the config are given as "
         "parallel.tensor=2; see megafp8 prove --help"),
        ("prove", ["x.yaml", "--parallel.tensor=2"], "--parallel.tensor: keys of the config are given without "
         "dashes; did you mean parallel.tensor=2?"),
        ("serve", ["runs/a", "--port", "99999"], "--port: 99999 is not a port; ports are 0 to 65535"),
        ("serve", ["runs/a", "--port", "web"], "--port: 'web' is not a number; see megafp8 serve --help"),
        ("convert", ["--load", "a", "--save", "b", "--to", "hff"], "--to: invalid choice: 'hff' (choose from "),
        ("generate", ["runs/a", "x", "--file", "y"], "give a prompt or --file, not both"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_what_would_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"megafp8 {name}", *arguments])
    with pytest.raises(SystemExit) as ended:
        module_of(name).main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit):
        module_of(name).main()
    assert capsys.readouterr().err == printed.err, "a variable that is left from another job"
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        module_of(name).main()
    assert capsys.readouterr().err == "", "one rank of a node says it"


@pytest.mark.parametrize(
    ("name", "arguments", "advice"),
    [
        ("inspect", ["runs/frist"], "runs/first"),
        ("generate", ["runs/frist", "x"], "runs/first"),
        ("convert", ["--load", "runs/frist", "--save", "x", "--to", "hf"], "runs/first"),
        ("average", ["--load", "runs/frist", "--moving", "--save", "x"], "runs/first"),
        ("report", ["runs/frist"], "runs/first"),
        ("compare", ["runs/frist"], "runs/first"),
        ("inspect-data", ["runs/first/tokns"], "runs/first/tokens"),
        ("train-tokenizer", ["--input-list", "runs/first/tokens.idxx", "--output", "x"], "runs/first/tokens.idx"),
        ("preprocess", ["--input", "rnus/first/*.txt", "--tokenizer", "bytes", "--output-prefix", "x"], ""),
    ],
)  # fmt: skip
def test_a_misspelt_path_is_answered_by_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str,
    arguments: list[str], advice: str,
) -> None:  # fmt: skip
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "tokens.idx").touch()
    monkeypatch.chdir(tmp_path)
    assert module_of(name).main(arguments) == 2
    said = capsys.readouterr().err
    assert (f"did you mean {advice}?" if advice else "no such file") in said
    assert said.count("\n") == 1


def test_paths_that_are_spelt_alike(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert near_path(tmp_path / "runs" / "frist") == tmp_path / "runs" / "first"
    assert near_path(tmp_path / "rnus" / "first") == tmp_path / "runs" / "first"
    assert near_path(tmp_path / "rnus" / "frist") == tmp_path / "runs" / "first"
    assert near_path(tmp_path / "runs" / "zzz") is None
    assert near_path(tmp_path / "runs") is None
    assert near_path(Path("s3://bucket/frist")) is None


def test_every_argument_that_is_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell completes as a file has a type that expands `~`; torchrun parses the options of launch."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = {
        f"{name} {action.dest}": str(parser._get_value(action, "~/x"))
        for name in COMMANDS
        if name != "launch"
        for parser in [module_of(name).make_parser()]
        for action in parser._actions
        if _completed_by(name, action) == "files"
    }
    assert set(paths.values()) == {"/home/me/x"}, paths
    assert {
        "convert load",
        "convert save",
        "preprocess output_prefix",
        "inspect path",
        "serve checkpoint",
    } <= paths.keys()
    assert (
        str(module_of("inspect").make_parser()._get_value(argparse.Action([], "path", type=as_path), "s3://a/~/x"))
        == "s3://a/~/x"
    )


def test_numbers_have_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--workers", type=at_least(1))
    parser.add_argument("--seconds", type=between(0.5, 60.0))
    parser.add_argument("--port", type=between(0, 65535))
    options = parser.parse_args(["--workers", "3", "--seconds", "60", "--port", "0"])
    assert options == argparse.Namespace(workers=3, seconds=60.0, port=0)
    for option, value, message in (
        ("--workers", "0", "0 is too small; give 1 or more"),
        ("--workers", "x", "'x' is not a whole number"),
        ("--seconds", "nan", "nan is out of range; give a number from 0.5 to 60.0"),
        ("--seconds", "-inf", "-inf is out of range; give a number from 0.5 to 60.0"),
        ("--seconds", "x", "'x' is not a number"),
        ("--port", "65536", "65536 is out of range; give a number from 0 to 65535"),
        ("--port", "1.5", "'1.5' is not a whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([f"{option}={value}"])
        assert f"error: {option}: {message}" in capsys.readouterr().err
