"""Damaged files are detected before anything is loaded, and named; an older checkpoint is used."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import (
    CheckpointReader,
    DamagedCheckpoint,
    complete_checkpoints,
    config_hash,
    latest,
    load,
    newest_good,
    newest_readable,
    read_metadata,
    save,
)
from megafp8.checkpoint import files as files_module
from tests.checkpoint import toy
from tests.checkpoint.rewritten import flip, listing, make_old, rewrite, write_listing
from tests.world import World

FILES = [".metadata", "__0_0.distcp", "checksums.json", "metadata.json"]


def _state(step: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.arange(4096.0).view(64, 64) + 100 * step + i for i in range(3)}


def _path(reader: CheckpointReader | None) -> Path | None:
    return None if reader is None else reader.path


def _refusal(path: Path) -> str:
    """The message with which `path` is refused; checks that nothing was loaded."""
    state = {name: torch.zeros(64, 64) for name in _state(1)}
    with pytest.raises(DamagedCheckpoint) as error:
        load(path, state)
    assert not any(bool(tensor.any()) for tensor in state.values())
    return str(error.value)


def _where(path: Path, name: str) -> tuple[int, int]:
    """Where the bytes of tensor `name` begin and end in the one data file."""
    stored = next(stored for i, stored in CheckpointReader(path).index.storage_data.items() if i.fqn == name)
    return stored.offset, stored.offset + stored.length


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_file_has_the_checksum_of_its_content(world4: World, tmp_path: Path, ranks: int) -> None:
    path = Path(world4.run(_save_toy, str(tmp_path), ranks=ranks)[0])
    listed = json.loads((path / "checksums.json").read_text())
    assert listed["algorithm"] == "crc32"
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "checksums.json"}
    assert len(files) == ranks + 2
    assert listed["files"] == {
        name: {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"} for name, content in files.items()
    }


def _save_toy(folder: str) -> str:
    return str(save(folder, 3, toy.make(dist.get_rank(), 1, 1, torch.float32).state(), toy.METADATA))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, _state(1), {"config": {"text": "a" * 100}})
    size = (path / name).stat().st_size
    content = (path / name).read_bytes()
    for byte in range(0, size, max(1, size // 40)):
        flip(path / name, byte)
        message = _refusal(path)
        assert str(path / name) in message
        (path / name).write_bytes(content)
    load(path, _state(1))


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {})
    start, end = _where(path, "layers.1.weight")
    flip(path / "__0_0.distcp", (start + end) // 2)
    message = _refusal(path)
    assert "__0_0.distcp is damaged: its CRC-32 is " in message
    assert message.endswith("; damaged in it: layers.1.weight")


def test_missing_shortened_and_lengthened_files_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {})
    data = path / "__0_0.distcp"
    content = data.read_bytes()
    tensors = "layers.0.weight, layers.1.weight, layers.2.weight"
    data.write_bytes(content[:-1])
    assert (
        _refusal(path) == f"{data} is truncated: {len(content) - 1} bytes of at least {len(content)}; it held {tensors}"
    )
    data.write_bytes(content + b"x")
    assert f"{data} is too long: {len(content) + 1} bytes of {len(content)}" in _refusal(path)
    data.unlink()
    assert _refusal(path) == f"{data} is missing; it held {tensors}"


def test_verify_false_and_checkpoints_without_checksums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1, _state(1), {})
    with monkeypatch.context() as patch:
        patch.setattr("megafp8.checkpoint.loading.find_damage", lambda *_: pytest.fail("it read"))
        load(path, _state(1), verify=False)
    make_old(path)
    load(path, _state(1))
    assert "has no checksums.json: only the sizes of its files were checked" in caplog.text


def _read_by_this_rank(path: str) -> list[str]:
    """Names of the files that this rank verified."""
    names, patch = [], pytest.MonkeyPatch()
    original, small = files_module.find_damage, files_module.read_verified
    patch.setattr(
        "megafp8.checkpoint.loading.find_damage", lambda file, sum_: (names.append(file.name), original(file, sum_))[1]
    )
    for module in ("reader", "store"):
        patch.setattr(
            f"megafp8.checkpoint.{module}.read_verified",
            lambda folder, name, sums: (
                (names.append(name), small(folder, name, sums))[1] if sums else pytest.fail(name)
            ),
        )
    model = toy.make(dist.get_rank(), 1, 1, torch.float32).zeroed()
    with patch.context():
        load(path, model.state())
    patch.undo()
    return names


def test_each_data_file_is_verified_by_one_rank(world4: World, tmp_path: Path) -> None:
    path = Path(world4.run(_save_toy, str(tmp_path))[0])
    by_rank = world4.run(_read_by_this_rank, str(path))
    small, data = {"metadata.json", ".metadata"}, [f"__{rank}_0.distcp" for rank in range(4)]
    assert all(small < set(read) for read in by_rank)  # what every rank reads anyway
    assert sorted(name for read in by_rank for name in read if name not in small) == data


def _fall_back(folder: str) -> tuple[str, str]:
    model = toy.make(dist.get_rank(), 1, 1, torch.float32).zeroed()
    try:
        load(f"{folder}/step_00000003", model.state())
    except DamagedCheckpoint as error:
        return str(_path(newest_good(folder))), str(error)
    return "no error", ""


def test_all_ranks_fall_back_together(world4: World, tmp_path: Path) -> None:
    world4.run(_save_toy, str(tmp_path))
    good = save(tmp_path, 2, _state(2), {})
    flip(tmp_path / "step_00000003" / "__2_0.distcp", 300)
    outcomes = world4.run(_fall_back, str(tmp_path))
    assert set(outcomes) == {outcomes[0]}
    assert outcomes[0][0] == str(good)
    assert "__2_0.distcp is damaged" in outcomes[0][1]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_newest_good_one_is_used_and_damaged_ones_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, _state(step), {"consumed_samples": step})
    start, end = _where(tmp_path / "step_00000003", "layers.2.weight")
    flip(tmp_path / "step_00000003" / "__0_0.distcp", (start + end) // 2)
    (tmp_path / "step_00000004" / "metadata.json").write_text("{")
    before = [_bytes(tmp_path / f"step_0000000{step}") for step in (3, 4)]
    assert _path(newest_good(tmp_path)) == latest(tmp_path) == tmp_path / "step_00000002"
    assert "step_00000004/metadata.json is truncated: 1 bytes of" in caplog.text
    assert "damaged in it: layers.2.weight. It is kept as step_00000003.damaged; " in caplog.text
    assert [_bytes(tmp_path / f"step_0000000{step}.damaged") for step in (3, 4)] == before
    # The run gets there again, and the step is damaged again.
    path = save(tmp_path, 3, _state(3), {"consumed_samples": 3}, keep_last=1)
    assert _path(newest_good(tmp_path)) == path
    save(tmp_path, 2, _state(2), {})
    (path / ".metadata").unlink()
    assert _path(newest_good(tmp_path)) == tmp_path / "step_00000002"
    names = ["step_00000002", "step_00000003.damaged", "step_00000003.damaged-2", "step_00000004.damaged"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [_bytes(tmp_path / f"step_0000000{step}.damaged") for step in (3, 4)] == before


def test_where_all_are_damaged_nothing_is_renamed(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "nowhere") is None
    for step in (1, 2):
        (save(tmp_path, step, _state(step), {}) / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"all 2 checkpoints in .* are damaged, .* nothing was changed: "):
        newest_good(tmp_path)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 2]


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1), {})
    metadata = save(tmp_path, 2, _state(2), {}) / "metadata.json"
    rewrite(metadata, metadata.read_bytes().replace(b'"format_version": 1', b'"format_version": 99'))
    with pytest.raises(ValueError, match="format version 99"):
        newest_good(tmp_path)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 2]


DESCRIPTION = ["metadata.json", "checksums.json", ".metadata"]


@pytest.mark.parametrize("name", DESCRIPTION)
def test_small_files_are_verified_before_they_are_parsed(tmp_path: Path, name: str) -> None:
    """Whatever is wrong with it, and whether data files are read or not, everybody takes the older checkpoint."""
    good = save(tmp_path, 2, _state(2), {"config": {"seed": 1234}})
    bad = save(tmp_path, 3, _state(3), {"config": {"seed": 1234}})
    content = (bad / name).read_bytes()
    at = content.index(b"1234") if name == "metadata.json" else len(content) // 2
    flipped = content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
    for damaged in (flipped, content[: at // 2], b"", b"\xff\xfe", b"[" * 10**5, b"{}", None):
        if damaged is None:
            (bad / name).unlink()
        else:
            (bad / name).write_bytes(damaged)
        found = newest_readable(tmp_path)
        assert found is not None
        assert (found.path, found.metadata["config"]) == (good, {"seed": 1234})
        for read in (CheckpointReader, lambda path: load(path, _state(1), verify=False)):
            with pytest.raises(DamagedCheckpoint, match=rf"{name} is |has no {name}"):
                read(bad)
        if name != ".metadata":
            with pytest.raises(DamagedCheckpoint, match=rf"{name} is |has no {name}"):
                read_metadata(bad)
        assert _path(newest_good(tmp_path, verify=False)) == good
        (tmp_path / "step_00000003.damaged").rename(bad)
    (bad / name).write_bytes(content)
    assert _path(newest_readable(tmp_path)) == _path(newest_good(tmp_path)) == bad


def test_a_file_without_a_checksum_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {})
    whole = listing(path)
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        write_listing(path, {other: entry for other, entry in whole.items() if other != name})
        assert _refusal(path) == f"{path}/checksums.json has no checksum for {name}"


def test_entries_of_other_types_are_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {})
    sizes = [{"bytes": size, "crc32": "0" * 8} for size in ("1", True, -1, 1.0, None)]
    for entry in (None, [], {}, *sizes, {"bytes": 1, "crc32": 0}, {"bytes": 1, "crc32": "0x000000"}):
        write_listing(path, {"metadata.json": entry})
        assert (
            _refusal(path)
            == f"{path}/checksums.json is damaged: its entry for metadata.json is not a size and a CRC-32"
        )


def test_of_a_checkpoint_from_before_checksums_the_config_is_verified(tmp_path: Path) -> None:
    config = {"seed": 1234, "model": {"norm_eps": 1e-05}}
    path = save(tmp_path, 1, _state(1), {"config": config, "config_hash": config_hash(config)})
    make_old(path)
    assert CheckpointReader(path).sums is None
    assert load(path, _state(1))["config"] == config
    text = (path / "metadata.json").read_text()
    for change in (("1234", "4329"), ("1e-05", "1e-06"), ('"seed"', '"sged"')):
        (path / "metadata.json").write_text(text.replace(*change))
        assert _refusal(path) == f"{path}/metadata.json is damaged: its config does not match its config_hash"


def _load_where_hosts_differ(folder: str) -> str:
    """Each rank has a checkpoint of its own under the same path, as on disks that hosts do not share."""
    path = Path(folder) / "step_00000001"
    real = files_module.read_file
    patch = pytest.MonkeyPatch()
    patch.setattr(
        files_module, "read_file", lambda file: real(Path(f"{folder}-{dist.get_rank()}") / path.name / file.name)
    )
    with patch.context():
        try:
            newest_good(folder)
        except ValueError as error:
            return str(error)
        finally:
            patch.undo()
    return "no error"


def test_ranks_that_see_different_files_are_reported(world4: World, tmp_path: Path) -> None:
    for name in ("run", "run-0", "run-1"):
        save(tmp_path / name, 1, _state(1), {"config": {"name": name}})
    (message,) = set(world4.run(_load_where_hosts_differ, str(tmp_path / "run"), ranks=2))
    assert message.startswith(f"ranks see different files in {tmp_path}/run/step_00000001; all hosts must share")


def test_small_files_go_into_a_checkpoint_and_are_verified(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {}, files={"tokenizer/tokenizer.model": b"pieces"})
    assert (path / "tokenizer" / "tokenizer.model").read_bytes() == b"pieces"
    load(path, _state(1))
    (path / "tokenizer" / "tokenizer.model").write_bytes(b"pieceS")
    message = _refusal(path)
    assert message.startswith(f"{path}/tokenizer/tokenizer.model is damaged: its CRC-32 is ")
    assert "damaged in it" not in message
    load(path, _state(1), verify=False)
