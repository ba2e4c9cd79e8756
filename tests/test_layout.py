"""Rules of the package that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "megafp8").rglob("*.py"))
CALLERS = {"collectives.py", "parallel_state.py"}
COLLECTIVES = ("all_", "broadcast", "reduce", "gather", "scatter", "isend", "irecv", "send", "recv", "batch_isend",
               "barrier")  # fmt: skip
EXPECTED_CYCLES: set[frozenset[str]] = set()
"""Import cycles that exist; none may be added."""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_has_a_docstring(path: Path) -> None:
    assert re.match(r'(#.*\n|\s)*r?"""\s*[^"\s]', path.read_text()), "no docstring"


def names_of_torch_distributed(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, where that is torch.distributed or something in it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: path for name, path in names.items() if path == "torch" or path.startswith("torch.distributed")}


def collective_calls(source: str) -> list[str]:
    """Functions of torch.distributed that communicate, by whatever name `source` calls them."""
    if "distributed" not in source:  # in whatever way it is imported
        return []
    tree = ast.parse(source)
    names = names_of_torch_distributed(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and node.attr.startswith(COLLECTIVES)):
            first, _, rest = ast.unparse(node).partition(".")
            path = f"{names[first]}.{rest}".rstrip(".") if first in names else ""
            if path.startswith("torch.distributed.") and path.split(".")[-1].startswith(COLLECTIVES):
                found.append(path)
    return found


@pytest.mark.parametrize("path", [p for p in MODULES if p.name not in CALLERS], ids=lambda p: p.name)
def test_collectives_are_called_in_one_place(path: Path) -> None:
    assert collective_calls(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as d\nd.all_gather_into_tensor(x, y)",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed\ndistributed.isend(x)",
        "from torch.distributed import broadcast as b\nb(x)",
        "import torch.distributed.nn.functional as F\nF.reduce_scatter(x)",
    ],
)
def test_the_rule_sees_every_spelling(source: str) -> None:
    assert len(collective_calls(source)) == 1


def cycles(imports: Mapping[str, Set[str]]) -> set[frozenset[str]]:
    """The sets of modules that import each other in a circle: strongly connected components of more than one module."""

    def reachable(start: str) -> set[str]:
        found, stack = set(), [start]
        while stack:
            stack += (new := imports[stack.pop()] - found)
            found |= new
        return found

    reached = {module: reachable(module) for module in imports}
    circular = {module: frozenset(m for m in reached[module] if module in reached[m]) for module in imports}
    return {circle for circle in circular.values() if circle}


def test_no_import_cycles() -> None:
    """Imports inside functions count."""
    graph = grimp.build_graph("megafp8", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert cycles(imports) == EXPECTED_CYCLES


def test_the_search_finds_cycles() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"f"}, "f": {"g"}, "g": {"e"}}
    assert cycles(imports) == {frozenset("bc"), frozenset("efg")}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_the_functions_of_a_step_exist() -> None:
    """ "How a step flows" names functions and classes with their files."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## How a step flows") : text.index("## Names and prose")]
    named = re.findall(r"((?:`[A-Z_a-z.]+`(?:, | and )?)+)\s\(`([\w/]+)\.py`\)", section)
    assert len(named) >= 12
    for names, path in named:
        module = import_module("megafp8." + path.replace("/", "."))
        for name in re.findall(r"`(.+?)`", names):
            assert attrgetter(name)(module) is not None


def test_agents_are_told_of_files_and_targets_that_exist() -> None:
    """tests/documented_commands.py runs the commands."""
    text, makefile = (ROOT / "AGENTS.md").read_text(), (ROOT / "Makefile").read_text()
    assert len(text.splitlines()) <= 120
    paths = [x for x in re.findall(r"`([\w./-]+/[\w./-]*)`", text) if "<" not in x]
    assert len(paths) > 20
    assert [x for x in paths if not (ROOT / x).exists()] == []
    targets = re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    assert len(targets) > 3
    assert [x for x in targets if not re.search(rf"^{x}:", makefile, re.MULTILINE)] == []


IMPORTABLE = {
    "record": {"record"},
    "reference": {"reference"},
    "kernel": {"reference", "kernel"},
    "op": {"reference", "kernel", "op"},
    "module": {"record", "reference", "kernel", "op", "module"},
}
"""Floors of layers: the last words of files' names in `megafp8/layers/<kind>/`, and the floors that each may import."""


def test_files_of_layers_import_their_floor_and_those_below() -> None:
    """import-linter checks the same for files named exactly for their floor, and also indirect imports."""
    graph = grimp.build_graph("megafp8", cache_dir=None)
    names = [m for m in graph.modules if m.startswith("megafp8.layers.") and m.count(".") == 3]
    floors = {m: m.replace("_", ".").rpartition(".")[2] for m in names}
    floors = {m: floor for m, floor in floors.items() if floor in IMPORTABLE}
    assert set(floors.values()) == set(IMPORTABLE)
    for module, floor in floors.items():
        for imported in graph.find_modules_directly_imported_by(module) & floors.keys():
            assert floors[imported] in IMPORTABLE[floor], f"{module} imports {imported}"


def test_public_classes_have_names_of_their_own() -> None:
    files: dict[str, list[str]] = {}
    for path in [*MODULES, *sorted((ROOT / "tools").glob("*.py"))]:
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.M):
            files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


IN_A_WHEEL = {"tools", "launch", "configs", "schema"}
"""Names below `megafp8` that a checkout does not have: folders beside the package, and megafp8.schema.json."""
SECTIONS = {
    *("checkpoint", "config", "data", "fp8", "inference", "layers", "linear", "nn", "optimizer", "parallel", "training")
}
"""Packages whose names in prose may be those of a section of the config, or of torch."""


def defines(module: Path, name: str) -> bool:
    """Return whether a module defines or imports a name, by its text."""
    return (
        re.search(rf'^ *(class |def |async def |from .*\b|import .*\b|"?){name}\b', module.read_text(), re.M)
        is not None
    )


@cache
def exists(dotted: str) -> bool:
    """Return whether `megafp8.a.b.Name` is a module, or a name in one."""
    folder, parts = ROOT, dotted.split(".")
    while parts and (folder / parts[0] / "__init__.py").exists():
        folder /= parts.pop(0)
    if not parts:
        return True
    if (module := folder / f"{parts[0]}.py").exists():
        return len(parts) == 1 or defines(module, parts[1])
    return defines(folder / "__init__.py", parts[0])


def stale(text: str) -> list[str]:
    """Return the files and modules that a text names and that do not exist."""
    paths = re.findall(r"(?<![\w./-])((?:megafp8|tools|tests|benchmarks|launch)/[\w/-]+\.py)\b", text)
    packages = {path.name for path in (ROOT / "megafp8").iterdir() if (path / "__init__.py").exists()} - SECTIONS
    dotted = re.findall(r"(?<![\w./\"])(megafp8(?:\.\w+)+)", text)
    dotted += [
        f"megafp8.{name}" for name in re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", text) if name.split(".")[0] in packages
    ]
    wrong = [name for name in dotted if name.split(".")[1] not in IN_A_WHEEL and not exists(name)]
    return [path for path in paths if not (ROOT / path).exists()] + wrong


PROSE = [*MODULES, *ROOT.glob("[CR]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")]


def test_files_and_modules_that_are_named_exist() -> None:
    history = {"CHANGELOG.md", "LOG.md"}
    found = {
        str(p.relative_to(ROOT)): wrong for p in PROSE if p.name not in history and (wrong := stale(p.read_text()))
    }
    assert found == {}


def test_the_search_finds_stale_names() -> None:
    text = (
        "`kernels.gone`, megafp8/gone.py, megafp8.kernels.gone, megafp8.layers.norm.kernel.Gone; `numerics.tensor`, "
        "megafp8.kernels"
    )
    assert stale(text) == [
        "megafp8/gone.py",
        "megafp8.kernels.gone",
        "megafp8.layers.norm.kernel.Gone",
        "megafp8.kernels.gone",
    ]


def test_terms_name_code_that_exists() -> None:
    """The second column of docs/terms.md: each word in backticks is in the code or in its config."""
    current = (ROOT / "docs/terms.md").read_text().partition("## Earlier names")[0]
    column = "".join(re.findall(r"^\|[^|]*(\|[^|]*\|)", current, re.M))
    words = {word for name in re.findall(r"`([^`]+)`", column) for word in re.findall(r"[A-Za-z_]\w*", name)}
    code = {word for path in MODULES for word in re.findall(r"[A-Za-z_]\w*", path.read_text())}
    assert len(words) > 30
    assert words - code == set()
