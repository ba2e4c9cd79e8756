"""Which checkpoint in memory a job resumes from: those of its own attempts, newer than the disk, of its own history."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megafp8.checkpoint import complete_checkpoints
from megafp8.config import ConfigError
from megafp8.training.resilience.node_memory import FILE_NAME, _token, folder_name
from megafp8.training.resilience.spikes import write_skipped
from tests.marks import slow_but
from tests.quickstart_data import QuickstartData
from tests.training.resilience.test_spikes import curve, options
from tests.training.runs import ONE_RANK, train_job
from tests.training.test_job import inputs_of, log_of
from tests.world import World

STEPS = ["training.steps=10", "training.eval_interval=0", "checkpoint.interval=4", "fp8.recipe=none"]
LAYOUTS = {
    "data": ONE_RANK,
    "zero, delayed": [*ONE_RANK, "parallel.zero=1", "parallel.bucket_mib=0.1", "fp8.recipe=delayed"],
    "fsdp, param_gather": [*ONE_RANK, "parallel.fsdp=true", "fp8.recipe=current", "fp8.param_gather=true"],
    "tensor": ["parallel.tensor=2", "parallel.pipeline=1"],
    "pipeline, synchronous saves": ["parallel.tensor=1", "parallel.pipeline=2", "checkpoint.async_save=false"],
}
CRASH = "[{kind: exception, rank: 0, step: 8}, {kind: exception, rank: 1, step: 8}]"


def _attempt(overrides: list[str], job: str) -> bool:
    """An attempt of the job `job`; whether it came to its end."""
    os.environ["TORCHELASTIC_RUN_ID"] = job
    try:
        train_job(overrides)
    except RuntimeError as error:
        if str(error) != "an injected fault":
            raise
        return False
    return True


class Run:
    """A run on two ranks, each a node of its own, that crashes in step 8: step 4 is on disk, step 6 or 7 in memory.

    `crashed`: a folder in which it has crashed already, whose files are copied.
    """

    def __init__(
        self, world: World, folder: Path, data: QuickstartData, layout: Sequence[str] = ONE_RANK,
        crashed: Path | None = None,
    ) -> None:  # fmt: skip
        self._world, self._options = world, [*options(data, folder, *STEPS, *layout), f"resilience.inject={CRASH}"]
        self.run, self.memory = folder / "quickstart", folder / "memory"
        self._options += ["checkpoint.memory_interval=1", f"checkpoint.memory_folder={self.memory}/$RANK"]
        if crashed is None:
            assert self.attempt("first") == [False] * 2
        else:
            shutil.copytree(crashed, folder, dirs_exist_ok=True)
            before, now = (f"megafp8-{folder_name(run)}" for run in (crashed / "quickstart", self.run))
            for path in list(self.memory.rglob(before)):
                path.rename(path.with_name(now))
        assert [step for step, _ in complete_checkpoints(self.run / "checkpoints")] == [4]
        assert len(list(self.memory.rglob("step_00000007"))) == 2

    def attempt(self, job: str, *more: str) -> list[bool]:
        return self._world.run(_attempt, [*self._options, *more], job)

    def resumed(self) -> list[str]:
        return [line for line in log_of(self.run) if line.startswith("resumed from step")]


@pytest.fixture(scope="module")
def crashed_folder(world2: World, tmp_path_factory: pytest.TempPathFactory, quickstart_data: QuickstartData) -> Path:
    folder = tmp_path_factory.mktemp("crashed")
    Run(world2, folder, quickstart_data)
    return folder


@pytest.fixture
def crashed(world2: World, tmp_path: Path, quickstart_data: QuickstartData, crashed_folder: Path) -> Run:
    return Run(world2, tmp_path, quickstart_data, crashed=crashed_folder)


@pytest.mark.parametrize("layout", slow_but(list(LAYOUTS), "data"))
def test_an_attempt_of_the_job_goes_on_in_memory(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, crashed_folder: Path, layout: str
) -> None:
    there = crashed_folder if layout == "data" else None
    crashed = Run(world2, tmp_path, quickstart_data, LAYOUTS[layout], there)
    assert crashed.attempt("first") == [True] * 2
    assert crashed.resumed() == ["resumed from step 7, in memory"]
    world2.run(_attempt, options(quickstart_data, tmp_path / "whole", *STEPS, *LAYOUTS[layout]), "none")
    assert curve(crashed.run.parent) == curve(tmp_path / "whole")
    assert not list(crashed.memory.rglob("megafp8-*"))
    assert not (crashed.run / FILE_NAME).exists()


def test_another_job_goes_on_from_disk(crashed: Run) -> None:
    assert crashed.attempt("second", "training.stop_after=5") == [True] * 2
    assert crashed.resumed() == ["resumed from step 4, on disk: memory has no complete newer checkpoint"]


@pytest.mark.slow
def test_an_abandoned_history_is_not_continued(crashed: Run) -> None:
    """As if a node came back that was away while the others went back to step 4 and left samples out."""
    write_skipped(crashed.run, [(16, 32)])
    assert crashed.attempt("first", "training.stop_after=5") == [True] * 2
    assert crashed.resumed() == ["resumed from step 4, on disk: memory has no complete newer checkpoint"]


def test_what_is_in_memory_alone_is_saved_if_nothing_is_left_to_do(crashed: Run) -> None:
    assert crashed.attempt("first", "training.stop_after=7") == [True] * 2
    assert [step for step, _ in complete_checkpoints(crashed.run / "checkpoints")] == [7]
    assert not list(crashed.memory.rglob("megafp8-*"))


@pytest.mark.slow
def test_a_rewind_forgets_what_is_in_memory(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """A spike in step 11 after a checkpoint on disk of step 8; steps 9 and 10 are saved to memory before and after."""
    spike, crash = ({"kind": kind, "rank": 0, "step": step} for kind, step in (("loss_spike", 11), ("exception", 13)))
    steps = [*ONE_RANK, *STEPS, "training.steps=14", "resilience.loss_spike={action: rewind, window: 4, sigmas: 4}"]
    memory = ["checkpoint.memory_interval=1", f"checkpoint.memory_folder={tmp_path / 'memory'}"]
    whole, parts = (
        options(quickstart_data, tmp_path / name, *steps, *more, f"resilience.inject={json.dumps(faults)}")
        for name, more, faults in (("whole", [], [spike]), ("parts", memory, [spike, crash]))
    )
    assert world2.run(_attempt, whole, "none", ranks=1) == [True]
    assert [world2.run(_attempt, parts, "job", ranks=1) for _ in range(2)] == [[False], [True]]
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    lines = log_of(tmp_path / "parts" / "quickstart")
    assert "resumed from step 12, in memory" in lines
    assert any("back to step 8, without samples" in line for line in lines)


def test_tokens_belong_to_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    token = _token(tmp_path, keeps=True)
    assert _token(tmp_path, keeps=True) == token
    again = _token(tmp_path, keeps=False)  # checkpoint.resume is false
    assert again != token
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert _token(tmp_path, keeps=True) not in (token, again)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
    assert _token(tmp_path, keeps=True) != _token(tmp_path, keeps=True)


@pytest.mark.parametrize("folder", ["memory", "$NOT_SET_ANYWHERE/memory"])
def test_a_folder_that_is_no_path_is_refused(quickstart_data: QuickstartData, tmp_path: Path, folder: str) -> None:
    keys = ["checkpoint.memory_interval=2", f"checkpoint.memory_folder={folder}", *ONE_RANK]
    with pytest.raises(ConfigError, match=r"checkpoint\.memory_folder = .*: it is not an absolute path"):
        inputs_of(options(quickstart_data, tmp_path, *keys))
