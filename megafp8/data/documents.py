"""Documents of text files, for preprocessing and for training tokenizers.

`find_files` decides once how each file is read: by its name, a content (JSON lines, plain text, parquet) and a
compression. `read_documents` reads them in order. What cannot be read becomes a `Document` with an error that names the
file and, where it has lines or rows, the line or row. An error costs the smallest unit that is affected: one line, one
row, one parquet row group, or what follows the damaged place of a compressed file.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megafp8.data.packages import import_package

Content = Literal["json_lines", "text", "parquet"]
_CONTENTS: dict[str, Content] = {
    ".json": "json_lines",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".txt": "text",
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)  # pyarrow's errors are ValueErrors
_PACKED_PARQUET = "parquet files have a compression of their own; unpack this one"
_BOM = codecs.BOM_UTF8
_BINARY_TYPES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


class Document(NamedTuple):
    """A text and its origin (file, and line or row). `text` is None where it could not be read; `error` says why."""

    origin: str
    text: str | None
    error: str | None = None


class InputFile(NamedTuple):
    """A file and how it is read. `compression` is a suffix or "", `json_key` the key or column of the text."""

    path: Path
    content: Content
    compression: str
    json_key: str


class SkippedFile(NamedTuple):
    """A file of an input folder that is not read."""

    path: Path
    reason: str


def find_files(
    inputs: Sequence[str], *, json_keys: Sequence[str] = ("text",), any_text: bool = False
) -> tuple[list[InputFile], list[SkippedFile]]:
    """Files that `inputs` (files, folders, globs) name, in a fixed order, each once for each of its keys.

    `json_keys` is one key for all inputs or one for each. Folders are searched for names that are known, or with
    `any_text`, where every file is one document, for all files; the second list says which others they hold. A file
    that is itself an input, or matches a glob, is read as JSON lines if its name is not known.

    Raises ValueError where an input names nothing that can be read, or a package to read a file is missing.
    """
    if len(json_keys) not in (1, len(inputs)):
        raise ValueError(
            f"--json-key has {len(json_keys)} keys for {len(inputs)} inputs: give one for all, or one for each input "
            "(quote a pattern, so that it is one input)"
        )
    keys = list(json_keys) * (len(inputs) if len(json_keys) == 1 else 1)
    found: dict[InputFile, None] = {}
    skipped: dict[SkippedFile, None] = {}
    for item, key in zip(inputs, keys):
        path = Path(item)
        if path.is_dir():
            files, others = _search(path, key, any_text)
            if not files:
                seen = f"; it holds {others[0].path} ({others[0].reason})" if others else "; it is empty"
                raise ValueError(f"--input {item}: no file in this folder can be read{seen}")
            skipped.update(dict.fromkeys(others))
        else:
            matches = [path] if path.is_file() else list(map(Path, sorted(glob.glob(item, recursive=True))))
            files = [_input_file(match, key, any_text) for match in matches if match.is_file()]
            if not files:
                raise ValueError(f"--input {item}: no such file, and no pattern that matches one")
            reason = "the pattern matches a folder or special file; files in folders are matched by **"
            skipped.update(dict.fromkeys(SkippedFile(match, reason) for match in matches if not match.is_file()))
        found.update(dict.fromkeys(files))
    for compression in {file.compression for file in found}:
        if compression == ".zst":
            import_package("zstandard", "reading .zst files")
    if any(file.content == "parquet" for file in found):
        import_package("pyarrow", "reading .parquet files")
    return list(found), list(skipped)


def _input_file(path: Path, key: str, any_text: bool) -> InputFile:
    content, compression = _split_name(path.name)
    if any_text or content == "text":
        return InputFile(path, "text", compression, "")
    if content == "parquet" and compression:
        raise ValueError(f"--input {path}: {_PACKED_PARQUET}")
    return InputFile(path, content or "json_lines", compression, key)


def _split_name(name: str) -> tuple[Content | None, str]:
    """What a file's name says of its content and compression: of `a.jsonl.gz`, JSON lines and .gz."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    return _CONTENTS.get(suffixes[-1]) if suffixes else None, compression


def _search(folder: Path, key: str, any_text: bool) -> tuple[list[InputFile], list[SkippedFile]]:
    """Files of a folder and the folders in it, sorted by path, and those that are left out."""
    paths: list[Path] = []
    skipped: list[SkippedFile] = []

    def fail(error: OSError) -> None:
        raise ValueError(f"{error.filename} cannot be searched: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=fail):
        paths += [Path(root, name) for name in names]
        linked = (Path(root, name) for name in folders)
        skipped += [SkippedFile(path, "links to folders are not followed") for path in linked if path.is_symlink()]
    known = "/".join(_CONTENTS)
    files: list[InputFile] = []
    for path in sorted(paths):
        content, compression = _split_name(path.name)
        if not path.is_file():
            skipped.append(SkippedFile(path, "broken link" if path.is_symlink() else "not a regular file"))
        elif any_text or (content is not None and not (content == "parquet" and compression)):
            files.append(_input_file(path, key, any_text))
        elif content == "parquet":
            skipped.append(SkippedFile(path, _PACKED_PARQUET))
        else:
            reason = f"not one of {known}, nor these with {'/'.join(_COMPRESSIONS)}"
            skipped.append(SkippedFile(path, reason))
    return files, sorted(skipped)


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file, frame after frame.

    Raises EOFError where the last frame is cut short, and OSError where the bytes are not zstd's. The library's own
    reader returns the content of a truncated file without an error.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._library, self._file = import_package("zstandard", "reading .zst files"), file
        self._frame: Any = None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(2**16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("compressed file ended within a frame")
                return 0
            self._ready = self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self) -> bytes:
        """What `_packed` holds of the frame at hand, leaving what lies behind its end."""
        self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
        try:
            text: bytes = self._frame.decompress(self._packed)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        self._packed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return text


def _unpacked(file: BinaryIO, compression: str) -> BinaryIO:
    """`file` without its compression. Closing `file` is left to the caller."""
    if compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if compression == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    return io.BufferedReader(_ZstdFile(file), 2**16) if compression == ".zst" else file


def read_documents(
    files: Iterable[InputFile], *, on_progress: Callable[[int], object] = lambda count: None
) -> Iterator[Document]:
    """Every document of `files`, in order: a line of JSON, a row of parquet, or a whole text file.

    `on_progress` is called with the number of bytes by which reading has advanced since its last call; in all these
    are the sizes of the files.
    """
    for file in files:
        done = 0
        try:
            size = file.path.stat().st_size
            if file.content == "parquet":
                yield from _read_parquet(file)
            else:
                read = _read_text if file.content == "text" else _read_json_lines
                with file.path.open("rb") as raw:
                    for document in read(_unpacked(raw, file.compression), file):
                        yield document
                        done, before = raw.tell(), done
                        on_progress(done - before)
            on_progress(size - done)
        except OSError as error:  # errors of the content are handled where it is read; this is opening it
            yield Document(str(file.path), None, f"cannot be read: {error}")


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 where `head`, the first 12 bytes of a text, begins with their byte order mark or is ASCII in
    one of them, else None."""
    for encoding in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        text = head.decode(encoding, errors="ignore")
        if text.startswith("\ufeff") or (len(text) > 1 and all("\0" < character < "\x80" for character in text[:2])):
            return encoding[:6].upper()
    return None


def _read_text(stream: BinaryIO, file: InputFile) -> Iterator[Document]:
    try:
        content = stream.read()
        if encoding := _wide_encoding(content[:12]):
            error = f"not UTF-8 text but {encoding}: convert it, for example by iconv -f {encoding} -t UTF-8"
            yield Document(str(file.path), None, error)
        else:
            yield Document(str(file.path), content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as failure:
        yield Document(str(file.path), None, f"not UTF-8 text: {_position(failure)}")
    except _READ_ERRORS as failure:
        yield Document(str(file.path), None, f"cannot be read: {failure}")


def _read_json_lines(stream: BinaryIO, file: InputFile) -> Iterator[Document]:
    """Lines are split as bytes, and decoded one by one: a line that is not UTF-8 is one bad document."""
    number = 0
    try:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(_BOM)  # the file's, or that of a file which was appended to another
            if line.strip():
                yield _parse_line(line, f"{file.path}, line {number}", file.json_key)
    except _READ_ERRORS as error:
        lost = f" (after line {number}; nothing that follows is read)" if number else ""
        yield Document(str(file.path), None, f"cannot be read: {error}{lost}")


def _parse_line(line: bytes, origin: str, key: str) -> Document:
    hint = "; it holds zero bytes, as UTF-16 and UTF-32 do: only UTF-8 is read" if b"\0" in line else ""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Document(origin, None, f"not UTF-8 text: {_position(error)}{hint}")
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested a thousand deep
        return Document(origin, None, f"not JSON: {error}{hint} (each line must be one JSON object)")
    if not isinstance(record, dict) or key not in record:
        found = ", ".join(list(record)[:10]) if isinstance(record, dict) else f"a {type(record).__name__}"
        return Document(origin, None, f"has no key {key!r} (it has {found}); --json-key names the text")
    return _document(origin, record[key], key)


def _position(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} at position {error.start} ({error.reason})"


def _document(origin: str, text: Any, key: str) -> Document:
    """A document of `text`, or of the reason why it is none. JSON can hold lone surrogates; tokenizers cannot."""
    if not isinstance(text, str):
        return Document(origin, None, f"{key!r} is not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Document(origin, None, f"{key!r} is not valid Unicode: {error}")
    return Document(origin, text)


def _read_parquet(file: InputFile) -> Iterator[Document]:
    """Row groups are read one by one, so that a damaged one costs its own rows and no others."""
    parquet = import_package("pyarrow.parquet", "reading .parquet files")
    path, key = file.path, file.json_key
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if key not in names:
            error = f"has no column {key!r} (it has {', '.join(names)}); --json-key names the text"
            yield Document(str(path), None, error)
            return
        groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    except _READ_ERRORS as failure:
        yield Document(str(path), None, f"cannot be read: {failure}")
        return
    first = 1
    for group, rows in enumerate(groups):
        row = first
        try:
            for batch in table.iter_batches(row_groups=[group], columns=[key]):
                for text in _parquet_texts(batch.column(0)):
                    if isinstance(text, UnicodeDecodeError):
                        yield Document(f"{path}, row {row}", None, f"not UTF-8 text: {_position(text)}")
                    else:
                        yield _document(f"{path}, row {row}", text, key)
                    row += 1
        except _READ_ERRORS as error:
            yield Document(f"{path}, rows {row} to {first + rows - 1}", None, f"cannot be read: {error}")
        first += rows


def _parquet_texts(column: Any) -> Iterator[Any]:
    """Values of a column. Strings are decoded one by one; of one that is not UTF-8 the error is yielded."""
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    binary = _BINARY_TYPES.get(str(column.type))
    for value in (column if binary is None else column.cast(binary)).to_pylist():
        if binary is None or value is None:
            yield value
            continue
        try:
            yield value.decode("utf-8")
        except UnicodeDecodeError as error:
            yield error
