"""Commands of the documentation, from a wheel; and that none is left out. `tests/documented_commands.py` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megafp8.commands import COMMANDS
from tests.documented_commands import PAGES, ROOT, Programs, documented, results, runnable
from tests.wheel import install_wheel


def test_each_names_a_subcommand_and_shipped_configs_exist() -> None:
    commands = [command for page in PAGES for command in documented(page)]
    assert len(commands) > 60
    for command in commands:
        for name in re.findall(r"\bmegafp8 (?:launch (?:--\S+ \d+ )*)?([\w-]+)", command.text):
            assert name in COMMANDS or name.startswith("-"), command
        for config in re.findall(r"configs/[\w-]+\.yaml", command.text):
            assert (ROOT / config).exists(), command


def test_jobs_that_need_gpus_are_described() -> None:
    launched = "megafp8 launch --nproc-per-node {} pretrain --config a.yaml parallel.tensor=2"
    described = "megafp8 pretrain --config a.yaml parallel.tensor=2 --dry-run --world-size 8"
    assert runnable(launched.format(8)) == described
    assert runnable(launched.format(2)) == launched.format(2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_run(tmp_path: Path) -> None:
    environment = {"OMP_NUM_THREADS": "1", "SERVER_KEY": "key", "HF_HUB_OFFLINE": "1"}
    programs, more = install_wheel(tmp_path)
    failed = [
        f"{result.command.page}: {result.ran}\n{result.output[-2000:]}"
        for result in results(tmp_path / "work", Programs(programs, environment | more))
        if result.code
    ]
    assert not failed, "\n\n".join(failed)
