"""The page about Transformer Engine's arguments against the modules' signatures, and the example."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
from torch.nn import Module

from megafp8 import nn
from megafp8.nn.arguments import REFUSED

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from-transformer-engine.md"
FUNCTIONS = ["make_graphed_callables"]
MODULES = [name for name in nn.__all__ if isinstance(made := getattr(nn, name), type) and issubclass(made, Module)]


def rows() -> dict[str, tuple[set[str], str]]:
    """Return the modules (".forward": their calls) and the effect of each argument in the page's table."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+) \|", line):
            assert match[1] not in found, match[1]
            found[match[1]] = (set(match[2].split(", ")), match[3])
    return found


def test_the_page_has_every_argument_and_the_modules_of_those_that_differ() -> None:
    expected = {
        name: {function} for function in FUNCTIONS for name in inspect.signature(getattr(nn, function)).parameters
    }
    for module in MODULES:
        for method, suffix in (("__init__", ""), ("forward", ".forward")):
            parameters = list(inspect.signature(getattr(getattr(nn, module), method)).parameters)
            for name in parameters[1:]:
                expected.setdefault(name, set()).add(module + suffix)
    assert {name: where for name, (where, _) in rows().items()} == {name: expected[name] for name in rows()}
    assert rows().keys() >= REFUSED.keys() & expected.keys()
    above = PAGE.read_text().partition("## Arguments\n")[2].partition("| argument |")[0]
    listed = {name for name in re.findall(r"`(\w+)`", above) if name in expected and name not in FUNCTIONS}
    assert listed | rows().keys() == expected.keys()
    assert not listed & rows().keys()


def test_the_page_gives_the_reasons_of_what_is_refused() -> None:
    for name, (_, text) in rows().items():
        if name in REFUSED:
            accepted, reason = REFUSED[name]
            assert text.startswith(f"only `{accepted[0]!r}`: {reason}"), name
        else:
            assert not text.startswith("only `"), name


@pytest.mark.slow
def test_the_modules_have_transformer_engines_arguments() -> None:
    """By name and order, where it is installed; keyword-only ones may be ours."""
    engine = pytest.importorskip("transformer_engine.pytorch")
    for module in MODULES:
        for method in ("__init__", "forward"):
            ours, theirs = (
                list(inspect.signature(getattr(getattr(package, module), method)).parameters)
                for package in (nn, engine)
            )
            assert ours[: len(theirs)] == [name for name in theirs if name != "kwargs"], f"{module}.{method}"


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "nn.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.3 * losses[0]
