"""Save and load checkpoints. Tensors are stored as rectangles under global names, so a checkpoint fits every layout."""

from megafp8.checkpoint.errors import DamagedCheckpoint, FolderInUse, IncompatibleCheckpoint, SaveFailed
from megafp8.checkpoint.loading import load, misfits, newest_good
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.node_memory import MemoryReader, NodeMemory
from megafp8.checkpoint.reader import CheckpointReader, newest_readable
from megafp8.checkpoint.rectangles import Rectangle, Rectangles, collect, collect_shards
from megafp8.checkpoint.saving import BackgroundSaver, Destination, SavedCheckpoint, save
from megafp8.checkpoint.store import clean_incomplete, complete_checkpoints, config_hash, latest, read_metadata

__all__ = [
    "BackgroundSaver",
    "CheckpointReader",
    "DamagedCheckpoint",
    "Destination",
    "FolderInUse",
    "FolderLock",
    "IncompatibleCheckpoint",
    "MemoryReader",
    "NodeMemory",
    "Rectangle",
    "Rectangles",
    "SaveFailed",
    "SavedCheckpoint",
    "clean_incomplete",
    "collect",
    "collect_shards",
    "complete_checkpoints",
    "config_hash",
    "latest",
    "load",
    "misfits",
    "newest_good",
    "newest_readable",
    "read_metadata",
    "save",
]
