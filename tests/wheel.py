"""A wheel of this checkout, installed in an environment of its own beside this environment's other packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def install_wheel(folder: Path) -> tuple[Path, dict[str, str]]:
    """Build it from a copy without ignored files, and install it alone.

    Returns the folder of its programs, and environment variables that they need.
    """
    source, wheels, environment = folder / "source", folder / "wheels", folder / "venv"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "megafp8", "tools", "launch", "configs", "pyproject.toml",
         "README.md", "LICENSE"], cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for file in files:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)], check=True)
    venv.create(environment, with_pip=False)
    (wheel,) = wheels.glob("*.whl")
    python = environment / "bin" / "python"
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], env=alone, check=True)
    shutil.rmtree(source)
    others = [path for path in sys.path if path.endswith("-packages")]  # .pth files in them are not read
    return environment / "bin", {"PYTHONPATH": os.pathsep.join(others), "OMP_NUM_THREADS": "1"}
