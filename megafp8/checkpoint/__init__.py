"""Saving and resuming: tensors as rectangles under global names, so that one checkpoint fits every layout."""

from megafp8.checkpoint.failures import DamagedCheckpoint, FolderInUse, IncompatibleCheckpoint
from megafp8.checkpoint.loading import load, misfits, newest_good
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.opened import OpenedCheckpoint, newest_readable, open_checkpoint
from megafp8.checkpoint.reader import CheckpointReader
from megafp8.checkpoint.rectangles import Rectangle, Rectangles, collect, collect_fragments
from megafp8.checkpoint.saving import BackgroundSaver, Destination, Saved, save
from megafp8.checkpoint.store import clean_incomplete, complete_checkpoints, config_hash, latest, read_metadata

__all__ = [
    "BackgroundSaver",
    "CheckpointReader",
    "DamagedCheckpoint",
    "Destination",
    "FolderInUse",
    "FolderLock",
    "IncompatibleCheckpoint",
    "OpenedCheckpoint",
    "Rectangle",
    "Rectangles",
    "Saved",
    "clean_incomplete",
    "collect",
    "collect_fragments",
    "complete_checkpoints",
    "config_hash",
    "latest",
    "load",
    "misfits",
    "newest_good",
    "newest_readable",
    "open_checkpoint",
    "read_metadata",
    "save",
]
