"""Opening a checkpoint in one process: metadata.json and index, each read once, verified, and only then parsed.

Everything that reads either goes through here: resuming, conversion, tools. So no field of metadata.json is believed
before its bytes were held against checksums.json, and all choose the same checkpoint of a folder. Both files are small;
data files hold the tensors, and of these only presence and size are looked at (`loading` verifies their content).

Checkpoints from before checksums were written have no checksums.json, and `has_checksums` is not in their
metadata.json. Where a checkpoint says that it has checksums and the file is missing, it is damaged.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.checksums import CHECKSUMS_FILE, Checksum, read_verified
from megafp8.checkpoint.failures import LISTED, DamagedCheckpoint, listing


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint folder whose metadata.json and index are what was written.

    `sums`: the checksums of all its files by name; None where it is from before checksums. `identity`: a CRC-32 of both
    files, to tell whether ranks see the same checkpoint.
    """

    path: Path
    metadata: dict[str, Any]
    index: Metadata
    sums: dict[str, Checksum] | None
    identity: int


def open_checkpoint(path: str | Path, *, sizes: bool = True) -> OpenedCheckpoint:
    """Open the checkpoint folder `path`. `sizes`: look at presence and sizes of the data files too.

    Raises DamagedCheckpoint where a file is missing, shortened or altered; ValueError where there is no such folder, a
    file cannot be read, or the checkpoint is of a newer format.
    """
    path = Path(path)
    metadata, sums, description = store.read_description(path)
    content = read_verified(path, dcp.INDEX_FILE, sums)
    index = dcp.parse_index(path / dcp.INDEX_FILE, content)
    if sums is not None:
        unlisted = sorted({stored.relative_path for stored in index.storage_data.values()} - sums.keys())
        if unlisted:
            raise DamagedCheckpoint(f"{path / CHECKSUMS_FILE} has no checksum of {listing(unlisted)}")
    if sizes:
        dcp.check_data_files(path, index)
    return OpenedCheckpoint(path, metadata, index, sums, zlib.crc32(content, zlib.crc32(description)))


def newest_readable(folder: str | Path) -> OpenedCheckpoint | None:
    """The newest checkpoint under `folder` that can be opened, or None where there is none. Changes nothing.

    It is the one that `newest_good` chooses, unless the content of a data file is damaged. Raises DamagedCheckpoint
    where all are damaged.
    """
    problems = []
    for _, path in reversed(store.complete_checkpoints(folder)):
        try:
            return open_checkpoint(path)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if problems:
        raise all_damaged(folder, problems)
    return None


def all_damaged(folder: str | Path, problems: list[str]) -> DamagedCheckpoint:
    """The error for a folder whose checkpoints all have one of `problems`."""
    return DamagedCheckpoint(
        f"all {len(problems)} checkpoints in {folder} are damaged, so the run cannot continue, and nothing was "
        f"changed: {'; '.join(problems[:LISTED])}. Restore one, or move them away to begin anew"
    )
