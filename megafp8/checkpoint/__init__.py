"""Saving and resuming: tensors as rectangles under global names, so that one checkpoint fits every layout."""

from megafp8.checkpoint.reader import CheckpointReader
from megafp8.checkpoint.rectangles import Rectangle, Rectangles, collect, collect_fragments
from megafp8.checkpoint.save_load import load, save
from megafp8.checkpoint.store import clean_incomplete, complete_checkpoints, latest, read_metadata

__all__ = [
    "CheckpointReader",
    "Rectangle",
    "Rectangles",
    "clean_incomplete",
    "collect",
    "collect_fragments",
    "complete_checkpoints",
    "latest",
    "load",
    "read_metadata",
    "save",
]
