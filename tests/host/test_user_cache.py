"""Private folders: what another user may have made in a shared place is refused, and nothing in it is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megafp8.checkpoint import NodeMemory
from megafp8.host.user_cache import make_own_folder


def test_a_private_folder_is_made_and_accepted_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_own_folder(tmp_path / "mine", private=True)
        assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def symlink(path: Path, target: Path) -> None:
    path.symlink_to(target)


def symlink_to_nothing(path: Path, target: Path) -> None:
    path.symlink_to(target / "missing")


def writable_by_others(path: Path, target: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def of_another_user(path: Path, target: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    path.mkdir()
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (symlink, "is a symbolic link of user"),
        (symlink_to_nothing, "is a symbolic link of user"),
        (writable_by_others, r"may be written to by other users \(mode 0777\)"),
        (of_another_user, "belongs to user 12345"),
    ],
)
def test_checkpoints_in_memory_leave_folders_of_others_alone(tmp_path: Path, prepare: object, message: str) -> None:
    target, root = tmp_path / "target", tmp_path / "shm"
    (target / "precious").mkdir(parents=True)
    (target / "precious" / "file").write_text("kept")
    root.mkdir()
    assert callable(prepare)
    prepare(root / "megafp8-run", target)
    with pytest.raises(ValueError, match=message):
        NodeMemory(root, "run", "token", None)
    assert (target / "precious" / "file").read_text() == "kept"
