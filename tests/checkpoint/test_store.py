"""The folder of checkpoints: what is visible, what is removed, and metadata.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import megafp8
from megafp8.checkpoint import clean_incomplete, complete_checkpoints, latest, read_metadata, save
from megafp8.checkpoint.store import FORMAT_VERSION, incomplete_folder, superfluous
from tests.checkpoint.rewritten import rewrite

W = {"w": torch.ones(3)}


def test_only_complete_checkpoints_are_seen_in_order_of_steps(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path / "nowhere") == []
    assert latest(tmp_path) is None
    for step in (100_000_000, 20, 3):
        save(tmp_path, step, W, {})
    for name in (".step_00000200.incomplete", "step_5", "step_00000300.tmp", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000400").write_text("a file")
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [3, 20, 100_000_000]
    assert latest(tmp_path) == tmp_path / "step_100000000"


def test_leftovers_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, 3, W, {})
    for name in (".step_00000004.incomplete", ".step_00000002.removed", ".step_x.incomplete", "wandb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".step_00000005.incomplete").symlink_to(tmp_path / "wandb")  # put there by somebody else
    (tmp_path / ".step_00000006.incomplete").write_text("x")
    deleted = clean_incomplete(tmp_path)
    assert [p.name[10:] for p in deleted] == ["0002.removed", *(f"000{i}.incomplete" for i in (4, 5, 6))]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step_x.incomplete", path.name, "wandb"]
    assert (tmp_path / "wandb/file").exists()
    assert clean_incomplete(tmp_path / "nowhere") == []


def test_a_save_deletes_leftovers_first(tmp_path: Path) -> None:
    hidden = incomplete_folder(tmp_path, 4)
    hidden.mkdir()
    (hidden / "__9_0.distcp").write_text("of a killed job")
    path = save(tmp_path, 4, W, {})
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "checksums.json", "metadata.json"]
    assert list(tmp_path.iterdir()) == [path]


def test_keep_last_removes_the_oldest_and_never_the_newly_saved(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, W, {}, keep_last=2)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [3, 4]
    save(tmp_path, 2, W, {}, keep_last=1)  # an earlier step than those there: they are not older, so they stay
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 3, 4]
    save(tmp_path, 5, W, {}, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
    for step in range(6, 11):
        save(tmp_path, step, W, {}, keep_last=2, keep_every=3)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [6, 9, 10]
    for option in ("keep_last", "keep_every"):
        with pytest.raises(ValueError, match=f"{option} is 0"):
            save(tmp_path, 11, W, {}, **{option: 0})


def test_superfluous() -> None:
    steps = [10, 20, 25, 30, 40, 45, 50]
    assert superfluous(steps, None, None) == superfluous(steps, None, 20) == []
    assert superfluous(steps, 2, None) == [10, 20, 25, 30, 40]
    assert superfluous(steps, 2, 20) == [10, 25, 30]
    assert superfluous(steps, 7, 20) == superfluous([], 1, 1) == []


def test_metadata_is_indented_json(tmp_path: Path) -> None:
    given = {"consumed_samples": 640, "tokens": 1_000_000, "config": {"name": "größe"}, "parallel": {"tensor": 2}}
    path = save(tmp_path, 10, W, given)
    text = (path / "metadata.json").read_text(encoding="utf-8")
    assert len(text.splitlines()) > 10
    found = read_metadata(path)
    assert found == json.loads(text)
    assert {key: found[key] for key in given} == given
    assert (found["format_version"], found["step"]) == (FORMAT_VERSION, 10)
    assert found["megafp8_version"] == megafp8.__version__
    assert found["torch_version"] == torch.__version__
    assert found["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"config": {"dtype": torch.float32}}, "JSON.*dtype"),
        ({"tokens": float("nan")}, "JSON"),
        ({"step": 5}, "must not set step"),
        ({"tokens": "many"}, "would not be readable: tokens: .* valid integer"),
    ],
)
def test_metadata_that_cannot_be_written_are_refused_before_anything_is(
    tmp_path: Path, metadata: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 1, W, metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "metadata.json is damaged: Expecting"),
        ("", "metadata.json is damaged: Expecting"),
        ("\xff", "metadata.json is damaged: .*decode"),
        ("[1]", "metadata.json is damaged: it does not contain a JSON object"),
        ('{"format_version": 1}', "metadata.json is damaged: step: field required"),
        ('{"format_version": true, "step": 1}', "metadata.json is damaged: format_version: .* valid integer"),
        ('{"format_version": 1, "step": -1}', "metadata.json is damaged: step: .* greater than or equal to 0"),
        ('{"format_version": 1, "step": 1e300}', "metadata.json is damaged: step: .* valid integer"),
        (f'{{"format_version": 1, "step": {10**400}}}', "metadata.json is damaged: step: .* less than"),
        (f'{{"format_version": 1, "step": 1{"0" * 5000}}}', "metadata.json is damaged: .*4300 digits"),
        ('{"format_version": 1, "step": NaN}', "metadata.json is damaged: NaN is not valid JSON"),
        (f'{{"format_version": 1, "step": {"[" * 10**5}', "metadata.json is damaged: it is nested too deeply"),
        ('{"format_version": 1, "step": 1, "config": []}', "metadata.json is damaged: config: .* valid dictionary"),
        ('{"format_version": 1, "step": 1, "fp8_left_out": [1]}', "damaged: fp8_left_out.0: .* valid string"),
        ('{"format_version": 99, "step": 1, "megafp8_version": "7.0"}', "format version 99.*written by megafp8 7.0"),
    ],
)
def test_damaged_metadata_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = save(tmp_path, 1, W, {})
    rewrite(path / "metadata.json", text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        read_metadata(path)
    assert str(path) in str(error.value)
    (path / "checksums.json").unlink()  # then nobody can tell that it was written so
    with pytest.raises(ValueError, match=message):
        read_metadata(path)


def test_a_missing_checkpoint_is_reported_with_existing_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, W, {})
    save(tmp_path, 2, W, {})
    with pytest.raises(ValueError, match=r"no checkpoint .*step_00000003; .*step_00000001, step_00000002"):
        read_metadata(tmp_path / "step_00000003")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is not a checkpoint: it has no metadata.json"):
        read_metadata(tmp_path / "empty")


def test_the_same_step_of_the_same_run_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = {"consumed_samples": 64, "tokens": 10, "config": {"logging": {"interval": 1}}, "parallel": {"tensor": 1}}
    path = save(tmp_path, 7, W, first)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    resumed = {**first, "config": {"logging": {"interval": 5}}, "parallel": {"tensor": 2}}
    assert save(tmp_path, 7, W, resumed) == path
    assert "step_00000007 already exists" in caplog.text
    with pytest.raises(ValueError, match=r"step_00000007 already exists.*consumed_samples is 64 there and 65 here"):
        save(tmp_path, 7, W, {**first, "consumed_samples": 65})
    with pytest.raises(ValueError, match="tokenizer_fingerprint is None there and abc here"):
        save(tmp_path, 7, W, {**first, "tokenizer_fingerprint": "abc"})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]
