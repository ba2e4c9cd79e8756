"""Rules of the package that a linter does not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "megafp8").rglob("*.py"))
CALLERS = {"collectives.py", "parallel_state.py"}
COLLECTIVES = (
    "all_",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "isend",
    "irecv",
    "send",
    "recv",
    "batch_isend",
    "barrier",
)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no docstring"


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
    tree = ast.parse(source)
    names = names_of_torch_distributed(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
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
