"""The folder of a run's checkpoints, and metadata.json.

    <folder>/step_00000010/               a checkpoint; a folder of this name is complete
        metadata.json                     what it is, for people and for the resuming run
        .metadata, __<rank>_<n>.distcp    index and data of torch.distributed.checkpoint
        checksums.json                    of all other files (`files`)
        tokenizer/                        the model file of the run's tokenizer
    <folder>/.step_00000020.incomplete/   a running or interrupted save
    <folder>/step_00000030.damaged/       a checkpoint that was found damaged when a run resumed
    <folder>/.lock                        of the job that works here (`lock`)

A save writes into the hidden folder, flushes every file and the folder to disk, and renames it, which is atomic. So
every visible checkpoint is complete, whenever a job is killed. A removal first hides the folder by a rename and then
deletes it. What a killed job leaves behind is hidden; the next start or save deletes it.

A damaged checkpoint is renamed and never deleted, as most of its tensors may be intact; the run that resumes from an
older one can then save that step again.

All functions here run in one process; rank 0 calls those that change anything. The scheme needs a file system with
atomic renames that all ranks see (a local disk for one node, NFS, Lustre), or object storage.

In object storage, which has no renames, a save writes under the final name, and checksums.json last. A checkpoint is
complete if it has checksums.json, which appears at once; a removal deletes that first. What has none is of a running,
failed or killed save, is never loaded, and is deleted by the next start or save.
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
    """Where the complete checkpoint of `step` is."""
    return as_path(folder) / f"step_{step:08d}"


@overload
def incomplete_folder(folder: Path, step: int) -> Path: ...
@overload
def incomplete_folder(folder: AnyPath | str, step: int) -> AnyPath: ...


def incomplete_folder(folder: AnyPath | str, step: int) -> AnyPath:
    """Where the checkpoint of `step` is while it is written."""
    folder = as_path(folder)
    return step_folder(folder, step) if isinstance(folder, ObjectPath) else folder / f".step_{step:08d}.incomplete"


def _is_complete(path: AnyPath) -> bool:
    """Whether `path`, of a checkpoint's name, is a complete one."""
    return (path / CHECKSUMS_FILE).is_file() if isinstance(path, ObjectPath) else path.is_dir()


@overload
def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]: ...
@overload
def complete_checkpoints(folder: AnyPath | str) -> list[tuple[int, AnyPath]]: ...


def complete_checkpoints(folder: AnyPath | str) -> Any:
    """The complete checkpoints of a run as (step, path), oldest first; empty where there is no such folder.

    Raises ValueError where the folder may not be read, ObjectStoreError where object storage cannot be reached.
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
    """The newest complete checkpoint of a run, or None."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


def clean_incomplete(folder: AnyPath | str) -> list[AnyPath]:
    """Delete what killed saves and removals left in `folder`; returns the deleted folders. On rank 0."""
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
        else:  # put there by others; what a link names is not ours
            leftover.unlink()
    return list(leftovers)


def begin(
    folder: AnyPath | str, step: int, metadata: dict[str, Any], files: Mapping[str, bytes]
) -> dict[str, Checksum] | None:
    """Make the hidden folder for `step`, with its metadata.json and the small `files`, by path in it.

    Returns their checksums; None where the step is saved already. Raises ValueError where the step was saved by another
    run or another history of this one, and where `metadata` is not JSON.
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
    """The keys of metadata.json and their types (docs/checkpoint-format.md); two are required."""

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
    """The first key of `metadata` that is missing or of another type, and why; None where there is none."""
    try:
        _Metadata.model_validate(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return None


def metadata_json(path: AnyPath, step: int, metadata: dict[str, Any]) -> bytes:
    """Content of metadata.json of the checkpoint `path`: `metadata`, step, date, format and versions.

    Raises ValueError where `metadata` sets one of these, is not JSON, or has a key of another type than is documented.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    own_keys = dict(zip(OWN_KEYS, (FORMAT_VERSION, step, date, megafp8.__version__, str(torch.__version__), True)))
    clash = sorted(own_keys.keys() & metadata.keys())
    if clash:
        raise ValueError(f"metadata of a checkpoint may not set {', '.join(clash)}: save() writes these itself")
    try:
        content = to_json({**own_keys, **metadata}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata of {path} cannot be written as JSON: {error}") from error
    problem = _wrong_type(json.loads(content))
    if problem is not None:
        raise ValueError(f"metadata of {path} could not be read again: {problem}")
    return content


def publish(folder: AnyPath | str, step: int, sums: dict[str, Checksum]) -> None:
    """Make the checkpoint of `step` visible; `sums` are the checksums of its files."""
    folder = as_path(folder)
    if isinstance(folder, ObjectPath):
        write_checksums(step_folder(folder, step), sums)
        return
    hidden = incomplete_folder(folder, step)
    write_checksums(hidden, sums)
    sync(hidden)
    rename_synced(hidden, step_folder(folder, step))


def discard(folder: AnyPath | str, step: int) -> None:
    """Delete what a failed save has written, as far as that is possible."""
    hidden = incomplete_folder(folder, step)
    if not isinstance(hidden, ObjectPath):
        shutil.rmtree(hidden, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        if not _is_complete(hidden):
            hidden.remove_tree()


def remove_older(folder: AnyPath | str, step: int, keep_last: int | None, keep_every: int | None) -> None:
    """Delete the checkpoints up to that of `step` that `superfluous` names, each after hiding it."""
    steps = [other for other, _ in complete_checkpoints(folder) if other <= step]
    for other in superfluous(steps, keep_last, keep_every):
        remove(step_folder(folder, other))


def remove(path: AnyPath) -> None:
    """Delete a checkpoint after hiding it."""
    if isinstance(path, ObjectPath):
        (path / CHECKSUMS_FILE).unlink()
        path.remove_tree()
        return
    hidden = path.with_name(f".{path.name}.removed")
    rename_synced(path, hidden)
    shutil.rmtree(hidden)


def superfluous(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The `steps`, in rising order, that are neither of the last `keep_last` nor a multiple of `keep_every`."""
    if keep_last is None:
        return []
    return [step for step in steps[: max(0, len(steps) - keep_last)] if keep_every is None or step % keep_every]


def set_aside(path: AnyPath) -> AnyPath:
    """Rename a damaged checkpoint to an unused name that no checkpoint has, and return its new path.

    Object storage has no renames: it is copied there, and then deleted, checksums.json first.
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
    """The verified content of metadata.json of the checkpoint folder `path`.

    Raises ValueError naming the file that is at fault; DamagedCheckpoint, which is one, where the folder is there but
    metadata.json or checksums.json is not what was written.
    """
    return read_description(path)[0]


def read_description(path: AnyPath | str) -> tuple[dict[str, Any], dict[str, Checksum] | None, bytes]:
    """`read_metadata`, the checksums of all files (None: the checkpoint has none), and the bytes of metadata.json."""
    path = as_path(path)
    if not path.is_dir():
        newest = ", ".join(other.name for _, other in complete_checkpoints(path.parent)[-3:]) or "none"
        near = did_you_mean(Path(str(path)), "")
        works = f"{near} " * bool(near) + f"newest complete ones in {path.parent}: {newest}"
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
            f"It was written by megafp8 {metadata.get('megafp8_version')}: use that or a newer one"
        )
    return metadata, sums, content


def _check_without_checksums(path: AnyPath, metadata: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint unless the checkpoint, which has no checksums.json, may be from before checksums."""
    if metadata.get("has_checksums"):
        raise DamagedCheckpoint(f"{path / CHECKSUMS_FILE} is missing, so nothing in {path} can be verified")
    expected = metadata.get("config_hash")  # the only check that those allow
    if expected is not None and config_hash(metadata.get("config") or {}) != expected:
        raise DamagedCheckpoint(f"{path / METADATA_FILE} is damaged: its config is not that of its config_hash")


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config as JSON: keys sorted, no spaces, ASCII. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_same_step(path: AnyPath, metadata: dict[str, Any]) -> None:
    saved = read_metadata(path)
    differing = [key for key in _SAME_STEP if saved.get(key) != metadata.get(key)]
    if differing:
        values = ", ".join(f"{key} is {saved.get(key)} there and {metadata.get(key)} here" for key in differing)
        raise ValueError(
            f"{path} exists already and holds something else: {values}. Nothing was overwritten; "
            "save into another folder, or move that checkpoint away"
        )
