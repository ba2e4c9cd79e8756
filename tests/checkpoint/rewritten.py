"""Checkpoints whose small files say something else than `save` wrote, with checksums as if they had been written so."""

from __future__ import annotations

import json
import zlib
from pathlib import Path


def rewrite(file: Path, content: bytes) -> None:
    """Write `content` into `file` of a checkpoint, and its size and CRC-32 into the checkpoint's checksums.json."""
    file.write_bytes(content)
    listing = file.parent / "checksums.json"
    whole = json.loads(listing.read_text())
    whole["files"][file.name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    text = json.dumps(whole["files"], sort_keys=True, separators=(",", ":"))
    whole["crc32_of_files"] = f"{zlib.crc32(text.encode()):08x}"
    listing.write_text(json.dumps(whole))


def make_old(path: Path) -> None:
    """Make the checkpoint `path` one from before checksums were written."""
    (path / "checksums.json").unlink()
    metadata = json.loads((path / "metadata.json").read_text())
    del metadata["has_checksums"]
    (path / "metadata.json").write_text(json.dumps(metadata, indent=2))
