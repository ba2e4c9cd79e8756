"""Files that releases wrote are read to the bit, and their runs continue (`make.py` wrote them)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8 import load_config, read_metrics
from megafp8.checkpoint import CheckpointReader, read_metadata
from megafp8.config.key_names import OTHER_NAMES, key_paths
from megafp8.conversion.consolidated import ConsolidatedSource
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.fp8.health import read_report
from megafp8.prove.certificate import read_certificate
from megafp8.training.inputs import open_inputs
from megafp8.training.run_data import read_run
from megafp8.training.state import save_state
from megafp8.training.validate import check_run
from tests.formats.make import CHECKPOINT, FOLDER, MIXED, curve, data_digest, tensor_digests
from tests.training.latest import load_latest
from tests.training.runs import run_job, start
from tests.world import World
from tools.prove import certificate_path


@dataclass(frozen=True)
class Release:
    """Files of a release, unpacked, and what they contain."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=sorted(path.name for path in FOLDER.glob("*.tar.xz")))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    shutil.unpack_archive(FOLDER / request.param, folder)
    return Release(folder, json.loads((folder / "expected.json").read_text()))


def test_data_sets_and_tensors_are_read_to_the_bit(release: Release) -> None:
    found = {name: data_digest(release.folder / name) for name in release.expected["data"]}
    assert found == release.expected["data"]
    runs = release.folder / "runs"
    found_tensors = {run: tensor_digests(runs / run / CHECKPOINT) for run in release.expected["tensors"]}
    assert found_tensors == release.expected["tensors"]
    saved, consolidated = (
        CheckpointReader(runs / "mixed" / CHECKPOINT),
        ConsolidatedSource(release.folder / "consolidated"),
    )
    assert len(consolidated.tensors) == 11
    assert all(torch.equal(consolidated.read(name), saved.read(name)) for name in consolidated.tensors)


def test_records_of_runs_are_read(release: Release, tmp_path: Path) -> None:
    folder = release.folder / "runs" / "exact"
    run = read_run(folder, "exact")
    assert [launch["ranks"] for launch in run.launches] == [2]
    assert [record["step"] for record in read_metrics(folder)] == [1, 2]
    assert {(record.step, record.operand) for record in read_report(folder / "fp8_report.jsonl")} == {
        (step, operand) for step in (1, 2) for operand in ("input", "weight", "grad_output")
    }
    certificate = release.folder / "certificate.json"
    assert certificate_path("run.yaml", certificate, "cpu") == certificate, "it may be replaced"


def _continue(folder: str) -> list[list[float]]:
    """Numbers of the steps after the exact checkpoint of a release, on this rank."""
    os.chdir(folder)
    config = load_config("run.yaml", ["training.stop_after=null"])
    inputs = open_inputs(config, "run.yaml")
    check_run(inputs)
    run_job(inputs)
    return curve(Path(config.run_dir) / config.name, 3)


def _save_again(folder: str) -> None:
    """Load the checkpoint in bf16 into a trainer, and save it in another folder."""
    os.chdir(folder)
    trainer, _ = start(open_inputs(load_config("run.yaml", MIXED), "run.yaml").config)
    save_state(trainer, Path("again"), load_latest(trainer, Path("runs/mixed")), None)


def test_runs_continue(release: Release, world2: World, tmp_path: Path) -> None:
    """Continue a run with its optimizer state, FP8 scales and position in the data, on one rank instead of two."""
    shutil.copytree(release.folder, tmp_path, dirs_exist_ok=True)
    (found,) = world2.run(_continue, str(tmp_path), ranks=1)
    assert [step for step, *_ in found] == [3, 4]
    for ours, theirs in zip(found, release.expected["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-11, abs=0)
    world2.run(_save_again, str(tmp_path), ranks=1)  # bf16 rounds differently on other CPUs
    assert tensor_digests(tmp_path / "again" / CHECKPOINT) == release.expected["tensors"]["mixed"]


def test_newer_numbers_are_refused(release: Release, tmp_path: Path) -> None:
    shutil.copytree(release.folder, tmp_path, dirs_exist_ok=True)
    checkpoint, sidecar = tmp_path / "runs/mixed" / CHECKPOINT, tmp_path / "text.json"
    (checkpoint / "checksums.json").unlink()
    files = {
        sidecar: lambda: IndexedDataset(tmp_path / "text").sidecar(),
        tmp_path / "runs/exact/launches.jsonl": lambda: read_run(tmp_path / "runs/exact", "exact"),
        tmp_path / "consolidated/consolidated.json": lambda: ConsolidatedSource(tmp_path / "consolidated"),
        checkpoint / "metadata.json": lambda: read_metadata(checkpoint),
        tmp_path / "certificate.json": lambda: read_certificate(tmp_path / "certificate.json"),
    }
    for file, read in files.items():
        text = file.read_text().replace('"has_checksums": true', '"has_checksums": false')
        assert '"format_version": 1' in text, file
        file.write_text(text.replace('"format_version": 1', '"format_version": 2', 1))
        with pytest.raises(ValueError, match="format version 2"):
            read()


def test_keys_stay_or_name_their_successor(release: Release) -> None:
    keys = (release.folder / "keys.txt").read_text().split()
    assert len(keys) > 300
    without_successor = {key for key in set(keys) - set(key_paths()) if OTHER_NAMES.get(key) not in key_paths()}
    assert not without_successor, "a renamed key goes into megafp8/config/key_names.py"
