"""Tools start as files and as modules, benchmarks as modules, from a checkout without installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow_but

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    (f"{folder}.{path.stem}", way)
    for folder, ways in (("tools", ("file", "module")), ("benchmarks", ("module",)))
    for path in sorted((ROOT / folder).glob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
    for way in ways
]
START = """
import importlib.util, runpy, sys
from pathlib import Path

root, script, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{getattr(f, '__module__', '')}{f!r}".lower()]
sys.path[:] = [p for p in sys.path if not (Path(p or ".") / "megafp8").is_dir()]
assert importlib.util.find_spec("megafp8") is None, "megafp8 is still installed"
sys.argv = [script, "--help"]
file = root.joinpath(*script.split(".")).with_suffix(".py")
sys.path.insert(0, str(file.parent if way == "file" else root))  # as Python itself does
if way == "file":
    runpy.run_path(str(file), run_name="__main__")
else:
    runpy.run_module(script, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("script", "way"),
    slow_but(SCRIPTS, ("tools.inspect_data", "file")),
)
def test_scripts_need_no_installation(script: str, way: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, str(ROOT), script, way]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
