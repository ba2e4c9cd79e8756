"""A file that is not what was written is found before it is loaded, and named; an older checkpoint is used."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import (
    DamagedCheckpoint,
    complete_checkpoints,
    latest,
    load,
    newest_good,
    open_checkpoint,
    save,
)
from megafp8.checkpoint import checksums as checksums_module
from megafp8.checkpoint.opened import OpenedCheckpoint
from tests.checkpoint import toy
from tests.checkpoint.rewritten import make_old, rewrite
from tests.world import World

FILES = [".metadata", "__0_0.distcp", "checksums.json", "metadata.json"]


def _state(step: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.arange(4096.0).view(64, 64) + 100 * step + i for i in range(3)}


def _path(opened: OpenedCheckpoint | None) -> Path | None:
    return None if opened is None else opened.path


def _flip(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def _refusal(path: Path) -> str:
    """The message with which `path` is refused; checks that nothing was loaded."""
    state = {name: torch.zeros(64, 64) for name in _state(1)}
    with pytest.raises(DamagedCheckpoint) as error:
        load(path, state)
    assert not any(bool(tensor.any()) for tensor in state.values())
    return str(error.value)


def _where(path: Path, name: str) -> tuple[int, int]:
    """Where the bytes of tensor `name` begin and end in the one data file."""
    stored = next(stored for i, stored in open_checkpoint(path).index.storage_data.items() if i.fqn == name)
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
        _flip(path / name, byte)
        message = _refusal(path)
        assert str(path / name) in message
        (path / name).write_bytes(content)
    load(path, _state(1))


def test_the_tensor_is_named_and_no_other(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(1), {})
    start, end = _where(path, "layers.1.weight")
    _flip(path / "__0_0.distcp", (start + end) // 2)
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


def test_the_flag_skips_reading_and_old_checkpoints_have_none(
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
    original, small = checksums_module.find_damage, checksums_module.read_verified
    patch.setattr(
        "megafp8.checkpoint.loading.find_damage", lambda file, sum_: (names.append(file.name), original(file, sum_))[1]
    )
    for module in ("opened", "store"):
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


def test_ranks_share_out_the_files(world4: World, tmp_path: Path) -> None:
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
    _flip(tmp_path / "step_00000003" / "__2_0.distcp", 300)
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
    _flip(tmp_path / "step_00000003" / "__0_0.distcp", (start + end) // 2)
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
