"""Variables of launchers that are left in the environment of a command that is started by itself."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megafp8.config import ConfigError
from megafp8.host.launched import launched_ranks, on_launched_ranks
from megafp8.parallel import parallel_state
from megafp8.training.command_line import prepare

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "a launcher sets both RANK and WORLD_SIZE; the environment has WORLD_SIZE=2; if "
         "these are left from another job: unset WORLD_SIZE"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "the environment has RANK=0, LOCAL_RANK=0; .*: unset RANK LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is a number from 0 to WORLD_SIZE - 1; the environment has RANK=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is a number from 0"),
    ],
)  # fmt: skip
def test_variables_that_no_launcher_sets(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    assert (launched_ranks(), on_launched_ranks("run.yaml")) == (1, "run.yaml")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        launched_ranks()


def test_an_error_about_the_number_of_ranks_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = argparse.Namespace(config=str(CONFIG), overrides=["device=cpu"], print_schema=False, dry_run=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"on 7 ranks .*WORLD_SIZE=7.*: unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\)"
    ):
        prepare(arguments)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job that torchrun started")
    with pytest.raises(ConfigError, match=r"quickstart.yaml: \d problem"):
        prepare(arguments)


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection in a job of torchrun's stays one, as its agent restarts the ranks."""
    text = "Timed out after 2 seconds waiting for clients. 1/2 clients joined.\nC++ stack"

    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistStoreError(text)

    monkeypatch.setattr(dist, "init_process_group", fail)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    timeout = datetime.timedelta(seconds=1)
    with pytest.raises(ValueError, match=r"a launcher also sets MASTER_ADDR and MASTER_PORT; .*: unset RANK"):
        parallel_state._join("gloo", timeout)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    said = (
        r"missing: Timed out .* 1/2 clients joined; the environment has RANK=0, WORLD_SIZE=2, .*: unset RANK WORLD_SIZE"
    )
    with pytest.raises(parallel_state.RanksDidNotMeet, match=said):
        parallel_state._join("gloo", timeout)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    text = "Connection refused"
    with pytest.raises(dist.DistStoreError):
        parallel_state._join("gloo", timeout)
