"""Checkpoints in the memory of nodes (`checkpoint.memory_interval`): owner, and choice of the one to resume from.

`node_memory.json` in the run folder holds the job's id and a random token. The folder on each node has the token in its
name. When the agent restarts a job, the new attempt keeps the token. Any other start has a new token, so it never loads
the checkpoints of an earlier job. TORCHELASTIC_RUN_ID identifies the job.

Checkpoints in memory from before a rewind are not loaded either. The ranges of samples that a run leaves out are in a
checkpoint's metadata, and in the run folder as soon as the run is rewound; both must be equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafp8.checkpoint import CheckpointReader, NodeMemory, complete_checkpoints
from megafp8.checkpoint.errors import on_all_ranks, on_rank0
from megafp8.config import Config
from megafp8.host.strict_json import parse_json
from megafp8.host.text_file import replace_text
from megafp8.parallel.parallel_state import ParallelState, host_group
from megafp8.training.resilience.spikes import read_skipped, skipped_of
from megafp8.training.state import check_same_run, checkpoint_folder, find_checkpoint

FILE_NAME = "node_memory.json"

logger = logging.getLogger(__name__)


def memory_folder(config: Config) -> Path:
    """Return `checkpoint.memory_folder` on this node, with environment variables expanded."""
    return Path(os.path.expandvars(config.checkpoint.memory_folder))


def open_memory(config: Config, run: Path, parallel: ParallelState, *, first: bool) -> NodeMemory | None:
    """Return the checkpoint storage in the nodes' memory, or None without `checkpoint.memory_interval`. Collective.

    Args:
        config: Config of the run.
        run: Run folder.
        parallel: Process groups.
        first: Whether this is the first stage of the process.
    """
    if not config.checkpoint.memory_interval:
        return None
    keeps = config.checkpoint.resume or not first
    name, token = on_rank0(lambda: (folder_name(run), _token(run, keeps)), parallel.world.group)
    return NodeMemory(memory_folder(config), name, token, host_group(config.timeout_seconds))


def folder_name(run: Path) -> str:
    """Return a name for the run folder `run` without path separators: a hash of the absolute path."""
    return hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


def _token(run: Path, keeps: bool) -> str:
    """Return the token of this job. If `keeps` is True, keep the token of an earlier attempt of the same job."""
    file, job = run / FILE_NAME, os.environ.get("TORCHELASTIC_RUN_ID", "none")
    token = _known_token(file, job) if keeps and job != "none" else None
    if token is None:
        token = uuid.uuid4().hex
        replace_text(file, json.dumps({"job": job, "token": token}) + "\n")
    return str(token)


def _known_token(file: Path, job: str) -> Any:
    """Return the token in `file` if it belongs to `job`, or None if there is no such token or the file is damaged."""
    try:
        known = parse_json(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return known.get("token") if isinstance(known, dict) and known.get("job") == job else None


def newest_on_disk(config: Config, run: Path) -> int:
    """Return the step of the newest checkpoint of `run` on disk or in object storage, or 0 without checkpoints."""
    return max((step for step, _ in complete_checkpoints(checkpoint_folder(run, config.checkpoint.folder))), default=0)


def find_newest(
    config: Config, run: Path, parallel: ParallelState, fingerprint: str | None, memory: NodeMemory | None
) -> CheckpointReader | None:
    """Open the newest checkpoint of `run` in `memory` or on disk; return None if there is none. Collective.

    `find_checkpoint` opens checkpoints on disk and describes the errors.
    """
    if memory is None:
        return find_checkpoint(config, run, parallel, fingerprint)
    group = parallel.world.group
    listed = on_rank0(lambda: newest_on_disk(config, run), group)
    skipped = read_skipped(run, None)

    def accepts(metadata: Mapping[str, Any]) -> bool:
        return skipped_of(metadata) == skipped

    newest: CheckpointReader | None = memory.find(listed, accepts)
    if newest is None:
        newest = find_checkpoint(config, run, parallel, fingerprint)
        step = 0 if newest is None else int(newest.metadata["step"])
        newer = memory.find(step + 1, accepts) if step < listed else None  # newer ones on disk were damaged
        if newer is None:
            return newest
        newest = newer
    opened = newest
    on_all_ranks(lambda: check_same_run(config, fingerprint, opened), group)
    return opened


def free_memory(memory: NodeMemory, run: Path, parallel: ParallelState) -> None:
    """Remove the job's checkpoints from memory, when the job ends and is not restarted."""
    memory.close()
    if parallel.rank == 0:
        (run / FILE_NAME).unlink(missing_ok=True)
