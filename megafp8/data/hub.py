"""Models and tokenizers of the Hugging Face Hub: local folders for names such as `org/name` or `org/name@revision`.

The library huggingface_hub downloads into its cache. These environment variables control it: HF_TOKEN gives access to
private and gated repositories, HF_HUB_CACHE names the cache folder, HF_HUB_OFFLINE allows only the cache, and
HF_ENDPOINT names a mirror. A local path always takes precedence over a Hub repository of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megafp8.data.packages import import_package
from megafp8.data.tokenizer_files import CODE_FILES
from megafp8.host.object_store import ObjectStoreError, as_path
from megafp8.host.user_cache import user_cache

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    CODE_FILES,
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
MODEL_FILES = ("*.safetensors", "*.json", *TOKENIZER_FILES)
_FILE_SUFFIXES = (".json", ".model", ".tiktoken", ".txt", ".bin", ".idx", ".safetensors", ".yaml")
_NOT_READ = ("*/*", "consolidated*")  # copies of the weights in other formats


class NotOnThisMachine(ValueError):
    """A Hub repository is not in the local cache and cannot be downloaded."""


def is_hub_name(path: object) -> bool:
    """Return whether `path` has the form of a Hub name and is not a local path.

    A path inside an existing local folder is local even if it does not exist: `runs/mine` if there is a folder `runs`.
    """
    text = str(path)
    if _NAME.fullmatch(text) is None or text.endswith(_FILE_SUFFIXES):
        return False
    return not os.path.exists(text) and not os.path.isdir(text.split("/")[0])


def cached_folder(name: str, files: Sequence[str] = MODEL_FILES) -> Path | None:
    """Return the cached folder of a Hub repository, or None if it is incomplete. Does not use the network."""
    try:
        return _snapshot(name, files, local_files_only=True)
    except (ValueError, OSError):  # the library raises either for a missing copy
        return None


def missing_folder(path: str) -> str | None:
    """Return an error message if `path` is not a folder on disk, in object storage or in the Hub's cache, else None.

    The message begins with `path` and says what to do. Nothing is downloaded.
    """
    if as_path(path).exists():
        return None
    if not is_hub_name(path):
        return f"{path}: no such folder"
    if cached_folder(path) is not None:
        return None
    start = "a start downloads it if the Hugging Face Hub has a model of this name"
    return f"{path}: no such folder; {start} ({_command(path)})"


def local_folder(name: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return the local folder of a Hub repository, and download the files that match `files` if they are missing.

    One process per node downloads, and the processes that wait for it use its copy. A process looks up each name only
    once, so the files that it reads do not change while it runs.

    Raises:
        NotOnThisMachine: The repository is unavailable. The message, one line, says why and how to download it.
        ObjectStoreError: The download failed, and another attempt may succeed.
    """
    return _downloaded(name, tuple(files))


@lru_cache(maxsize=64)
def _downloaded(name: str, files: tuple[str, ...]) -> Path:
    with _turn(name) as waited:
        if waited and (folder := cached_folder(name, files)) is not None:
            return folder
        return _snapshot(name, files)


@contextlib.contextmanager
def _turn(name: str) -> Iterator[bool]:
    """Hold this node's lock of `name`, and yield whether another process held it before.

    The operating system releases the lock when its process ends.
    """
    path = user_cache() / "hub" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        yield waited


def _parts(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"]


def _command(name: str) -> str:
    """Return the command that downloads a Hub repository."""
    repo, revision = _parts(name)
    return f"hf download {repo}" + (f" --revision {revision}" if revision else "")


def _snapshot(name: str, files: Sequence[str], **options: Any) -> Path:
    repo, revision = _parts(name)
    command = _command(name)
    nothing_here = f"{name} is not a local path"
    try:
        hub = import_package("huggingface_hub", "a name of the Hugging Face Hub")
    except ValueError as error:
        raise NotOnThisMachine(f"{nothing_here}, and {error}; or download the model and give its folder") from None
    errors = import_package("huggingface_hub.errors", "a name of the Hugging Face Hub")
    try:
        return Path(
            hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(files), ignore_patterns=list(_NOT_READ), **options
            )
        )
    except errors.GatedRepoError:
        works = f"ask for access at https://huggingface.co/{repo}, set HF_TOKEN (or run hf auth login), and {command}"
        raise NotOnThisMachine(f"{nothing_here}, and it is gated on the Hugging Face Hub: {works}") from None
    except errors.RepositoryNotFoundError:
        works = f"check the name; a private repository needs HF_TOKEN, or hf auth login, before {command}"
        raise NotOnThisMachine(
            f"{nothing_here}, and the Hugging Face Hub has no repository of that name: {works}"
        ) from None
    except errors.RevisionNotFoundError:
        works = f"its revisions are at https://huggingface.co/{repo}/tree/main"
        raise NotOnThisMachine(f"the Hugging Face Hub has no revision {revision} of {repo}: {works}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "no", "false", "off")
        why = "HF_HUB_OFFLINE is set" if offline or options else "the Hugging Face Hub cannot be reached"
        works = f"run {command} on a machine with a network that shares this machine's HF_HUB_CACHE, or copy it here"
        raise NotOnThisMachine(f"{nothing_here} and not in the Hub's cache, and {why}: {works}") from None
    except Exception as error:  # errors of the connection, from its HTTP library
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ObjectStoreError(
            f"{name} cannot be downloaded from the Hugging Face Hub: {what}; try {command}"
        ) from None
