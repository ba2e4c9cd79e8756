"""Changes to files of a checkpoint, with or without matching checksums."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any


def write_listing(path: Path, files: dict[str, Any]) -> None:
    """Write checksums.json of the checkpoint `path`, with a correct checksum of itself."""
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    own = f"{zlib.crc32(text.encode()):08x}"
    (path / "checksums.json").write_text(json.dumps({"algorithm": "crc32", "files": files, "crc32_of_files": own}))


def listing(path: Path) -> dict[str, Any]:
    """`files` of the checkpoint's checksums.json."""
    found: dict[str, Any] = json.loads((path / "checksums.json").read_text())["files"]
    return found


def rewrite(file: Path, content: bytes) -> None:
    """Write `content` into `file` of a checkpoint, and its size and CRC-32 into checksums.json."""
    file.write_bytes(content)
    entry = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    write_listing(file.parent, {**listing(file.parent), file.name: entry})


def flip(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def make_old(path: Path) -> None:
    """Rewrite the checkpoint `path` as one from before checksums."""
    (path / "checksums.json").unlink()
    metadata = json.loads((path / "metadata.json").read_text())
    del metadata["has_checksums"]
    (path / "metadata.json").write_text(json.dumps(metadata, indent=2))
