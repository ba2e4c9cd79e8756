"""Folder of a run's checkpoints, and metadata.json.

    <folder>/step_00000010/               a checkpoint; a folder of this name is complete
        metadata.json                     description for people and for the resuming run
        .metadata, __<rank>_<n>.distcp    index and data of torch.distributed.checkpoint
        checksums.json                    checksums of all other files (`files`)
        tokenizer/                        the model file of the run's tokenizer
    <folder>/.step_00000020.incomplete/   a running or interrupted save
    <folder>/step_00000030.damaged/       a checkpoint that was found damaged when a run resumed
    <folder>/.lock                        lock of the job that works in this folder (`lock`)

A save writes into the hidden folder, flushes every file and the folder to disk, and then renames the folder, which is
atomic. So every visible checkpoint is complete, no matter when a job is killed. A removal first hides the folder by a
rename and then deletes it. The folders that a killed job leaves behind are hidden, and the next start or save deletes
them.

A damaged checkpoint is renamed and never deleted, because most of its tensors may be intact. The run that resumes from
an older checkpoint can then save this step again.

All functions in this module run in one process; rank 0 calls the functions that change anything. The scheme needs a
file system that has atomic renames and that all ranks see (a local disk for one node, NFS, Lustre), or object storage.

Object storage has no renames, so a save writes under the final name and writes checksums.json last. A checkpoint is
complete if it has checksums.json, which appears atomically. A removal deletes checksums.json first. A folder without
checksums.json belongs to a running, failed or killed save. It is never loaded, and the next start or save deletes it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, overload

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import megafp8
from megafp8.checkpoint.errors import DamagedCheckpoint
from megafp8.checkpoint.files import (
    CHECKSUMS_FILE,
    Checksum,
    parse_object,
    read_checksums,
    read_verified,
    rename_synced,
    sync,
    to_json,
    write_checksums,
    write_file,
)
from megafp8.host.object_store import AnyPath, ObjectPath, ObjectStoreError, as_path, is_transient
from megafp8.host.suggestions import did_you_mean

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
OWN_KEYS = ("format_version", "step", "date", "megafp8_version", "torch_version", "has_checksums")
"""Keys of metadata.json that every save writes itself."""
_Count = Annotated[int, Field(ge=0, lt=2**63)]

_COMPLETE = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(incomplete|removed)")
# Equal in two saves of one step of one run, whatever the user changed in between (layout, logging, ...).
_SAME_STEP = ("consumed_samples", "tokens", "tokenizer_fingerprint")


@overload
def step_folder(folder: Path, step: int) -> Path: ...
@overload
def step_folder(folder: AnyPath | str, step: int) -> AnyPath: ...


def step_folder(folder: AnyPath | str, step: int) -> AnyPath:
    """Return the path of the complete checkpoint of `step`."""
    return as_path(folder) / f"step_{step:08d}"


@overload
def incomplete_folder(folder: Path, step: int) -> Path: ...
@overload
def incomplete_folder(folder: AnyPath | str, step: int) -> AnyPath: ...


def incomplete_folder(folder: AnyPath | str, step: int) -> AnyPath:
    """Return the path of the checkpoint of `step` while it is being written."""
    folder = as_path(folder)
    return step_folder(folder, step) if isinstance(folder, ObjectPath) else folder / f".step_{step:08d}.incomplete"


def _is_complete(path: AnyPath) -> bool:
    """Return whether `path`, which has a checkpoint's name, is a complete checkpoint."""
    return (path / CHECKSUMS_FILE).is_file() if isinstance(path, ObjectPath) else path.is_dir()


@overload
def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]: ...
@overload
def complete_checkpoints(folder: AnyPath | str) -> list[tuple[int, AnyPath]]: ...


def complete_checkpoints(folder: AnyPath | str) -> Any:
    """Return the complete checkpoints of a run as (step, path), oldest first; empty if the folder does not exist.

    Raises ValueError if the folder cannot be read, and ObjectStoreError if object storage cannot be reached.
    """
    folder = as_path(folder)
    try:
        if isinstance(folder, Path) and not folder.is_dir():
            return []
        named = [(int(match[1]), path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
        return sorted(((step, path) for step, path in named if _is_complete(path)), key=lambda one: one[0])
    except ObjectStoreError as error:
        if is_transient(error):
            raise
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error


def latest(folder: AnyPath | str) -> AnyPath | None:
    """Return the newest complete checkpoint of a run, or None."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


def clean_incomplete(folder: AnyPath | str) -> list[AnyPath]:
    """Delete the leftovers of killed saves and removals in `folder`, and return their paths. Rank 0 only."""
    folder = as_path(folder)
    if isinstance(folder, ObjectPath):
        incomplete = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and not _is_complete(path)]
        for path in incomplete:
            path.remove_tree()
        return list(incomplete)
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:  # not made by megafp8; the target of a link is not ours to delete
            leftover.unlink()
    return list(leftovers)


def begin(
    folder: AnyPath | str, step: int, metadata: dict[str, Any], files: Mapping[str, bytes]
) -> dict[str, Checksum] | None:
    """Create the hidden folder for `step`, with its metadata.json and the small `files` (contents by path within it).

    Returns the checksums of these files, or None if the step is already saved. Raises ValueError if the step was saved
    by another run or another history of this run, or if `metadata` is not JSON.
    """
    folder = as_path(folder)
    final = step_folder(folder, step)
    if _is_complete(final) if isinstance(final, ObjectPath) else final.exists():
        _check_same_step(final, metadata)
        return None
    contents = {METADATA_FILE: metadata_json(final, step, metadata), **files}
    if isinstance(folder, ObjectPath):
        clean_incomplete(folder)
        return {name: write_file(final / name, content) for name, content in contents.items()}
    folder.mkdir(parents=True, exist_ok=True)
    clean_incomplete(folder)
    hidden = incomplete_folder(folder, step)
    hidden.mkdir()
    sums = {}
    for name, content in contents.items():
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        sums[name] = write_file(hidden / name, content)
        sync((hidden / name).parent)
    return sums


class _Metadata(BaseModel):
    """Keys of metadata.json and their types (docs/checkpoint-format.md). Two keys are required."""

    model_config = ConfigDict(strict=True, extra="allow")

    format_version: _Count
    step: _Count
    date: str | None = None
    megafp8_version: str | None = None
    torch_version: str | None = None
    has_checksums: bool = False
    tensors: _Count | None = None
    bytes: _Count | None = None
    consumed_samples: _Count | None = None
    tokens: _Count | None = None
    optimizer_steps: _Count | None = None
    tokenizer_fingerprint: str | None = None
    layout: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    config_hash: str | None = None
    fp8_left_out: list[str] | None = None
    stage: str | None = None
    changes: list[dict[str, Any]] | None = None
    skipped_samples: list[list[_Count]] | None = None
    losses: list[float] | None = None
    converted_from: str | None = None
    average_of: list[str] | None = None
    huggingface: dict[str, Any] | None = None


def _wrong_type(metadata: dict[str, Any]) -> str | None:
    """Describe the first key of `metadata` that is missing or has a wrong type; return None if all are right."""
    try:
        _Metadata.model_validate(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return None


def metadata_json(path: AnyPath, step: int, metadata: dict[str, Any]) -> bytes:
    """Return the content of metadata.json of the checkpoint `path`: `metadata`, step, date, format and versions.

    Raises ValueError if `metadata` sets one of the keys that every save writes, is not JSON, or has a key whose type is
    not the documented one.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    own_keys = dict(zip(OWN_KEYS, (FORMAT_VERSION, step, date, megafp8.__version__, str(torch.__version__), True)))
    clash = sorted(own_keys.keys() & metadata.keys())
    if clash:
        raise ValueError(f"metadata of a checkpoint must not set {', '.join(clash)}: save() writes these itself")
    try:
        content = to_json({**own_keys, **metadata}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata of {path} cannot be written as JSON: {error}") from error
    problem = _wrong_type(json.loads(content))
    if problem is not None:
        raise ValueError(f"metadata of {path} would not be readable: {problem}")
    return content


def publish(folder: AnyPath | str, step: int, sums: dict[str, Checksum]) -> None:
    """Write checksums.json with `sums`, the checksums of all files by name, and make the checkpoint visible."""
    folder = as_path(folder)
    if isinstance(folder, ObjectPath):
        write_checksums(step_folder(folder, step), sums)
        return
    hidden = incomplete_folder(folder, step)
    write_checksums(hidden, sums)
    sync(hidden)
    rename_synced(hidden, step_folder(folder, step))


def discard(folder: AnyPath | str, step: int) -> None:
    """Delete the files of a failed save, as far as this is possible."""
    hidden = incomplete_folder(folder, step)
    if not isinstance(hidden, ObjectPath):
        shutil.rmtree(hidden, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        if not _is_complete(hidden):
            hidden.remove_tree()


def remove_older(folder: AnyPath | str, step: int, keep_last: int | None, keep_every: int | None) -> None:
    """Delete the checkpoints up to `step` that `superfluous` returns. Each one is hidden first."""
    steps = [other for other, _ in complete_checkpoints(folder) if other <= step]
    for other in superfluous(steps, keep_last, keep_every):
        remove(step_folder(folder, other))


def remove(path: AnyPath) -> None:
    """Hide a checkpoint, and then delete it."""
    if isinstance(path, ObjectPath):
        (path / CHECKSUMS_FILE).unlink()
        path.remove_tree()
        return
    hidden = path.with_name(f".{path.name}.removed")
    rename_synced(path, hidden)
    shutil.rmtree(hidden)


def superfluous(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return the elements of `steps` that are neither among the last `keep_last` nor multiples of `keep_every`.

    `steps` is in ascending order. If `keep_last` is None, no step is superfluous.
    """
    if keep_last is None:
        return []
    return [step for step in steps[: max(0, len(steps) - keep_last)] if keep_every is None or step % keep_every]


def set_aside(path: AnyPath) -> AnyPath:
    """Rename a damaged checkpoint to an unused name with `.damaged`, and return its new path.

    In object storage, which has no renames, the checkpoint is copied and then deleted, checksums.json first.
    """
    names = itertools.chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{n}" for n in itertools.count(2)))
    unused = next(name for name in names if not path.with_name(name).exists())
    if isinstance(path, ObjectPath):
        for name in path.sizes():
            (path / name).copy_to(path.with_name(unused) / name)
        (path / CHECKSUMS_FILE).unlink()
        path.remove_tree()
    else:
        rename_synced(path, path.with_name(unused))
    return path.with_name(unused)


def read_metadata(path: AnyPath | str) -> dict[str, Any]:
    """Return the verified content of metadata.json of the checkpoint folder `path`.

    Raises:
        DamagedCheckpoint: The folder exists, but metadata.json or checksums.json is missing or damaged.
        ValueError: The folder does not exist, or its format is newer. All messages name the file.
    """
    return read_description(path)[0]


def read_description(path: AnyPath | str) -> tuple[dict[str, Any], dict[str, Checksum] | None, bytes]:
    """Return the metadata (as `read_metadata` does), the checksums of all files, and the bytes of metadata.json.

    The checksums are None if the checkpoint has no checksums.json.
    """
    path = as_path(path)
    if not path.is_dir():
        newest = ", ".join(other.name for _, other in complete_checkpoints(path.parent)[-3:]) or "none"
        near = did_you_mean(Path(str(path)), "")
        works = f"{near} " * bool(near) + f"newest complete checkpoints in {path.parent}: {newest}"
        raise ValueError(f"there is no checkpoint {path}; {works}")
    file, sums = path / METADATA_FILE, read_checksums(path)
    content = read_verified(path, METADATA_FILE, sums)
    metadata = parse_object(file, content)
    problem = _wrong_type(metadata)
    if problem is not None:
        raise DamagedCheckpoint(f"{file} is damaged: {problem}")
    if sums is None:
        _check_without_checksums(path, metadata)
    version = metadata["format_version"]
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {version}; megafp8 {megafp8.__version__} reads up to {FORMAT_VERSION}. "
            f"It was written by megafp8 {metadata.get('megafp8_version')}: use that version or a newer one"
        )
    return metadata, sums, content


def _check_without_checksums(path: AnyPath, metadata: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint if the checkpoint, which has no checksums.json, cannot be from before checksums."""
    if metadata.get("has_checksums"):
        raise DamagedCheckpoint(f"{path / CHECKSUMS_FILE} is missing, so nothing in {path} can be verified")
    expected = metadata.get("config_hash")  # the only check that is possible without checksums
    if expected is not None and config_hash(metadata.get("config") or {}) != expected:
        raise DamagedCheckpoint(f"{path / METADATA_FILE} is damaged: its config does not match its config_hash")


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config as ASCII JSON with sorted keys and no spaces. The order of keys has no effect."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_same_step(path: AnyPath, metadata: dict[str, Any]) -> None:
    saved = read_metadata(path)
    differing = [key for key in _SAME_STEP if saved.get(key) != metadata.get(key)]
    if differing:
        values = ", ".join(f"{key} is {saved.get(key)} there and {metadata.get(key)} here" for key in differing)
        raise ValueError(
            f"{path} already exists and holds something else: {values}. Nothing was overwritten; "
            "save into another folder, or move that checkpoint away"
        )
