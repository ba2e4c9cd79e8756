"""The folder that a sink of ours makes: hidden while it is written, visible in one step.

    <parent>/.<name>.converting/     with the journal of what is done in it
    <parent>/<name>/                 complete, by definition of its name

The name may be that of an empty folder, as from `mkdir` or `mktemp -d`; one that holds something is refused.

The rename is atomic, so whatever kills a conversion, and whenever, there is a whole target or none. The name is none
that the clean-up of a run's checkpoints knows, so a job that starts there leaves it alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megafp8.conversion.base import Source
from megafp8.conversion.journal import Journal, sync

TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face folder that are its tokenizer."""


def with_companions(file: Path) -> list[Path]:
    """A tokenizer's model `file`; with one of a Hugging Face folder, those that say what its special tokens are."""
    others = TOKENIZER_NAMES if file.name in TOKENIZER_NAMES else ()
    return [file, *(other for name in others if name != file.name and (other := file.with_name(name)).is_file())]


def is_taken(path: Path) -> bool:
    """Whether something is at `path` that is not an empty folder, which a conversion may fill."""
    return path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir())))


def check_free(path: Path) -> None:
    """Raise ValueError where a conversion to `path` would have to overwrite something."""
    if is_taken(path):
        raise ValueError(
            f"{path} exists already and is no empty folder; nothing was overwritten. Choose another path, or remove it"
        )


class Target:
    """The folder `path`, absent or empty as yet; `hidden` is where it grows, once `begin` was called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden = path.with_name(f".{path.name}.converting")

    def begin(self, source: Source, format: str) -> Journal:
        """Make the hidden folder, or go on with that of a conversion that was killed; its journal says how far it is.

        Raises ValueError where `path` holds something, or another process is at it.
        """
        check_free(self.path)
        self.hidden.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{name} {info}\n" for name, info in source.tensors.items())
        self._journal = Journal(self.hidden, f"{format} {hashlib.sha256(names.encode()).hexdigest()}")
        return self._journal

    def publish(self, tokenizer_files: Iterable[Path]) -> None:
        """Copy what belongs to the model, flush everything and give the folder its name."""
        for file in tokenizer_files:
            (self.hidden / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(file, self.hidden / TOKENIZER_FOLDER / file.name)
        publish(self._journal, self.path)


def publish(journal: Journal, path: Path) -> None:
    """Flush the journal's folder, which is complete, and give it its name. Raises ValueError where that is taken."""
    journal.remove()
    try:
        os.rename(journal.folder, path)
    except OSError as error:
        raise ValueError(f"{journal.folder} is complete, but cannot become {path}: {error.strerror}") from error
    sync(path.parent)


def tokenizer_files(path: Path) -> list[Path]:
    """What was copied into the target `path`."""
    folder = path / TOKENIZER_FOLDER
    return sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
