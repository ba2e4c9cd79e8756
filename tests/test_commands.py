"""The command `megafp8`, from a checkout and from a wheel."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from launch import agent
from megafp8.commands import COMMANDS, file_of, main
from tests.wheel import install_wheel

ROOT = Path(__file__).resolve().parent.parent
DATA = ("megafp8.configs", "megafp8.launch.kubernetes")
"""Packages in which there is no Python."""
BARE = {"PATH": "/usr/bin:/bin"}


def test_every_tool_is_a_command() -> None:
    tools = {path.stem for path in (ROOT / "tools").glob("*.py") if "\ndef main(" in path.read_text()}
    assert {module.split(".")[1] for module in COMMANDS.values() if module.startswith("tools.")} == tools
    for name in COMMANDS:
        functions = {
            node.name for node in ast.parse(file_of(name).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert "main" in functions, name


@pytest.mark.parametrize(
    "path", [*(ROOT / "tools").glob("*.py"), *(ROOT / "launch").glob("*.py")], ids=lambda p: p.name
)
def test_their_files_import_the_package_only(path: Path) -> None:
    """They have other names in a wheel: `from tools.x import` would fail there."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in imported if name.split(".")[0] in ("tools", "launch", "tests", "benchmarks")] == []


def test_help_lists_all_and_imports_little(tmp_path: Path) -> None:
    code = "import sys; from megafp8.commands import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=BARE | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed[: len(COMMANDS)] == list(COMMANDS)
    assert not {"torch", "numpy", "pydantic"} & set(done.stderr.split())


def test_an_unknown_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrian"]) == 2
    assert "no command 'pretrian'; did you mean pretrain?" in capsys.readouterr().err


def test_the_wheel_has_all_packages() -> None:
    config = pytest.importorskip("setuptools.config.pyprojecttoml")
    listed = config.read_configuration(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]
    found = [".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "megafp8").rglob("__init__.py")]
    assert sorted(listed) == sorted([*found, *DATA, "megafp8.launch", "megafp8.tools"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_has_all_commands(tmp_path: Path) -> None:
    """Installed alone beside this environment's other packages (`tests/wheel.py`)."""
    programs, more = install_wheel(tmp_path)
    python, variables = programs / "python", {**os.environ, **more}

    def megafp8(*arguments: str) -> str:
        command = [str(programs / "megafp8"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "check-cluster" in megafp8("--help")
    assert "llama3-8b.yaml" in megafp8("init", "llama3-8b")
    assert "launch/kubernetes/jobset.yaml" in megafp8("init", "launch")
    assert "memory of a rank" in megafp8("pretrain", "llama3-8b.yaml", "--dry-run")
    assert "0 fail" in megafp8("doctor")
    modules = [module if module.startswith("megafp8.") else f"megafp8.{module}" for module in COMMANDS.values()]
    find = "import sys; from importlib.util import find_spec; print([m for m in sys.argv[1:] if find_spec(m) is None])"
    done = subprocess.run([python, "-c", find, *modules], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert "tensor" in megafp8("plan", "--config", config, "--gpus", "4", "--gpu", "h100")
    assert "memory of a rank" in megafp8("pretrain", "--config", config, "--dry-run", "--world-size", "4")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text " * 100)
    megafp8("preprocess", "--input", "text", "--tokenizer", "bytes", "--output-prefix", "data", "--workers", "2")
    assert "1,001 tokens" in megafp8("inspect-data", "data", "--tokenizer", "bytes")
    small = ["model.num_layers=2", "model.vocab_size=257", "training.steps=2", "training.evaluate=null",
             "parallel.pipeline=1", "training.eval_interval=0", "logging.tensorboard=false", "data.train=[data]",
             "data.tokenizer={kind: bytes}", "data.split='100,0,0'", "data.index_cache=cache",
             "optimizer.warmup_steps=0"]  # fmt: skip
    assert "run folder" in megafp8("launch", "--nproc-per-node", "2", "pretrain", "--config", config, *small)
    assert "layers.0" in megafp8("inspect", "runs/quickstart/checkpoints/step_00000002")
    assert "page: " in megafp8("plot-run", "runs/quickstart", "--html", "run.html"), "with the page's HTML"


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ("--nproc-per-node 2 pretrain --config a.yaml", (True, "megafp8", ["pretrain", "--config", "a.yaml"], True)),
        ("-m megafp8 pretrain", (True, "megafp8", ["pretrain"], True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1 pretrain", (True, "megafp8", ["pretrain"], False)),
        ("pretrain_gpt.py --config a.yaml", (False, "pretrain_gpt.py", ["--config", "a.yaml"], True)),
    ],
)
def test_launch_takes_commands_and_needs_no_rendezvous_on_one_node(
    arguments: str, runs: tuple[bool, str, list[str], bool]
) -> None:
    options = agent.with_command(parse_args(arguments.split()))
    script = options.training_script, options.training_script_args
    assert (options.module, *script, options.standalone) == runs
