"""Runs with data and checkpoints in object storage compute what runs with local files do."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.checkpoint import CheckpointReader, complete_checkpoints
from megafp8.config import ConfigError, check_layout, load_config
from megafp8.data import DataError
from megafp8.training.inputs import open_inputs
from megafp8.training.state import checkpoint_folder
from megafp8.training.validate import check_run
from tests.object_server import ObjectServer
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.runs import ONE_RANK
from tests.training.test_resume import SMALL, Job
from tests.world import World
from tools import inspect_checkpoint

LIMIT_GIB = 0.0007
"""Of the cache, in which two thirds of the data have room."""


class RemoteJob(Job):
    """A job whose data and checkpoints are in object storage."""

    patience = 400.0

    def __init__(self, folder: Path, data: QuickstartData, processes: int, s3: ObjectServer, *options: str) -> None:
        self.url = str(s3.folder())
        cache = ["data.object_cache.block_mib=0.01", f"data.object_cache.limit_gib={LIMIT_GIB}"]
        train = [f"data.train=[{s3.upload(data.folder / 'stdlib')}]", f"data.object_cache.folder={folder / 'objects'}"]
        super().__init__(folder, data, processes, [*options, *train, *cache, f"checkpoint.folder={self.url}"])

    def saved(self) -> list[int]:
        return [step for step, _ in complete_checkpoints(checkpoint_folder(self.run, self.url))]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_and_resumed_is_bit_identical_to_local(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, s3: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with a loader process each, which share the cache."""
    options = [*ONE_RANK, "fp8.recipe=delayed", "parallel.zero=1"]
    straight = Job(tmp_path / "straight", quickstart_data, 2, [*options, "checkpoint.interval=0"])
    straight.finish_in(world2)
    killed = RemoteJob(tmp_path / "killed", quickstart_data, 2, s3, *options, "data.num_workers=1")
    killed.be_killed()
    log = killed.finish()
    killed.check_resumed()
    assert f"saved {killed.url}/quickstart/step_00000010" in log
    assert killed.curve() == straight.curve()
    assert killed.saved() == [10]
    assert not list((killed.run / "checkpoints").glob("step*"))
    blocks = list((tmp_path / "killed" / "objects" / "blocks").iterdir())
    assert 0 < sum(file.stat().st_size for file in blocks) <= LIMIT_GIB * 2**30
    newest = f"{killed.url}/quickstart/step_00000010"
    there, here = CheckpointReader(newest), CheckpointReader(straight.run / "checkpoints" / "step_00000010")
    assert there.tensors == here.tensors
    assert all(bool((there.read(name) == here.read(name)).all()) for name in here.tensors)
    assert inspect_checkpoint.main([newest, "--diff", str(here.path)]) == 0
    assert "step 10" in capsys.readouterr().out


def test_what_cannot_work_fails_before_the_first_group(
    tmp_path: Path, quickstart_data: QuickstartData, s3: ObjectServer
) -> None:
    def check(*more: str) -> None:
        overrides = [*SMALL, *quickstart_data.overrides, *ONE_RANK, f"run_dir={tmp_path}", *more]
        config = load_config(CONFIG, overrides)
        check_layout(config, 1)
        check_run(open_inputs(config, str(CONFIG)))

    remote = f"data.train=[{s3.upload(quickstart_data.folder / 'stdlib')}]"

    cache = f"data.object_cache.folder={tmp_path / 'objects'}"
    with pytest.raises(DataError, match=r"s3://bucket/none\.idx cannot be opened: no such file or object"):
        check("data.train=[s3://bucket/none]", cache)
    with pytest.raises(ConfigError, match=r"checkpoint\.folder.*cannot be written to s3://nobucket/quickstart"):
        check("checkpoint.folder=s3://nobucket")
    with pytest.raises(ConfigError, match=r"data\.object_cache\.limit_gib.*it holds fewer than 64 blocks of 4 MiB"):
        check("data.object_cache.limit_gib=0.1")
    with pytest.raises(ConfigError, match=r"resilience\.inject\.0\.kind.*only a checkpoint in the run folder"):
        check(f"checkpoint.folder={s3.folder()}", "resilience.inject=[{kind: damage_checkpoint, rank: 0, step: 1}]")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.object_cache\.folder, the local cache of object storage, cannot be"):
        check(
            f"data.train=[{s3.upload(quickstart_data.folder / 'stdlib')}]", f"data.object_cache.folder={tmp_path}/file"
        )
    check(remote, cache, f"checkpoint.folder={s3.folder()}")
