"""Every tool starts both ways, as a file and as a module, from a checkout in which megafp8 is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = sorted(path for path in (ROOT / "tools").glob("*.py") if 'if __name__ == "__main__"' in path.read_text())
START = """
import importlib.util, runpy, sys
from pathlib import Path

root, tool, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{getattr(f, '__module__', '')}{f!r}".lower()]
sys.path[:] = [p for p in sys.path if not (Path(p or ".") / "megafp8").is_dir()]
assert importlib.util.find_spec("megafp8") is None, "megafp8 is still installed"
sys.argv = [tool, "--help"]
sys.path.insert(0, str(root / "tools" if way == "file" else root))  # as Python itself does
if way == "file":
    runpy.run_path(str(root / "tools" / f"{tool}.py"), run_name="__main__")
else:
    runpy.run_module(f"tools.{tool}", run_name="__main__", alter_sys=True)
"""


def starts(tool: Path, way: str, cwd: Path) -> None:
    command = [sys.executable, "-c", START, str(ROOT), tool.stem, way]
    done = subprocess.run(command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("way", ["file", "module"])
def test_a_tool_needs_no_installation(way: str, tmp_path: Path) -> None:
    starts(ROOT / "tools" / "inspect_data.py", way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "module"])
@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_no_tool_needs_an_installation(tool: Path, way: str, tmp_path: Path) -> None:
    starts(tool, way, tmp_path)
