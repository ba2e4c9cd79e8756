"""Documents of text files, for preprocessing and for training tokenizers: texts, chats, and prompts with completions.

`find_files` decides by each file's name how it is read: its content (JSON lines, plain text, parquet) and compression.
`read_documents` reads the files in order. What cannot be read becomes a `Document` with an error that names the file
and the line or row. An error costs the smallest affected unit: one line, one row, one parquet row group, or the rest of
a damaged compressed file. A line or text that is too long (`MAX_RECORD_BYTES`) is an error, and is not read as a whole.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import lzma
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megafp8.data.packages import import_package
from megafp8.data.styles import Document, position
from megafp8.data.styles.registry import STYLES
from megafp8.host.object_store import AnyPath, ObjectPath, as_path
from megafp8.host.strict_json import parse_json
from megafp8.host.suggestions import did_you_mean

Content = Literal["json_lines", "text", "parquet"]
_CONTENTS: dict[str, Content] = dict.fromkeys((".json", ".jsonl", ".ndjson"), "json_lines")
_CONTENTS |= {".txt": "text", ".parquet": "parquet"}
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)  # pyarrow's errors are ValueErrors
_BOM = codecs.BOM_UTF8
MAX_RECORD_BYTES = 2**28
"""Limit of a line of JSON, and of a text file unless it is as large as that on disk: a small compressed file can hold
a line that no memory holds."""
_PIECE_BYTES = 2**20  # read at a time of what may be too long
_ZSTD_BYTES = 2**8  # decompressed at a time, which gives at most 8 MiB
_BINARY_TYPES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


class InputFile(NamedTuple):
    """A file and how it is read. `compression` is a suffix or ""; `keys` are those, or the columns, of the `style`."""

    path: AnyPath
    content: Content
    compression: str
    keys: tuple[str, ...]
    style: str = "text"


class SkippedFile(NamedTuple):
    """A file of an input folder that is not read."""

    path: AnyPath
    reason: str


def find_files(
    inputs: Sequence[str],
    *,
    json_keys: Sequence[str] = ("text",),
    any_text: bool = False,
    style: str = "text",
    more_keys: Sequence[str] = (),
    flag: str = "--input",
) -> tuple[list[InputFile], list[SkippedFile]]:
    """Files that `inputs` (files, folders, globs, URLs) name, in a fixed order, each once for each of its keys.

    `json_keys` is one key for all inputs or one for each, of the first key of the `style`; `more_keys` are the others.
    Folders are searched for files with known suffixes, or with
    `any_text`, which reads every file as one document, for all files; the second list has their other files. A file
    that is itself an input, or matches a glob, is read as JSON lines if its suffix is unknown. `flag`: names an input
    in errors.

    Raises ValueError if an input names no file that can be read, or a package to read one is missing.
    """
    if len(json_keys) not in (1, len(inputs)):
        raise ValueError(
            f"--json-key has {len(json_keys)} keys for {len(inputs)} inputs: give one for all, or one for each input "
            "(quote a pattern, so that it is one input)"
        )
    if any_text and style != "text":
        raise ValueError(f"--text-files reads whole files as texts, and --style is {style}: leave one of them out")
    each = list(json_keys) * (len(inputs) if len(json_keys) == 1 else 1)
    keys = [_Keys((key, *more_keys), style) for key in each]
    input_files: dict[InputFile, None] = {}
    skipped: dict[SkippedFile, None] = {}
    for item, key in zip(inputs, keys):
        path = as_path(item)
        if path.is_dir():
            files, others = _search(path, key, any_text)
            if not files:
                seen = f"; it holds {others[0].path} ({others[0].reason})" if others else "; it is empty"
                raise ValueError(f"{flag} {item}: no file in this folder can be read{seen}")
        else:
            matches = [path] if path.is_file() else _matches(path)
            files = [_named_file(match, key, any_text, flag) for match in matches if match.is_file()]
            if not files:
                works = did_you_mean(Path(str(path)), "give files, folders or patterns")
                if item.startswith("hf://"):
                    works = "what is gated or private needs HF_TOKEN, or hf auth login"
                raise ValueError(f"{flag} {item}: no such file, and no pattern that matches one; {works}")
            reason = "the pattern matches a folder or special file; files in folders are matched by **"
            others = [SkippedFile(match, reason) for match in matches if not match.is_file()]
        input_files.update(dict.fromkeys(files))
        skipped.update(dict.fromkeys(others))
    if any(file.compression == ".zst" for file in input_files):
        import_package("zstandard", "reading .zst files")
    if any(file.content == "parquet" for file in input_files):
        import_package("pyarrow", "reading .parquet files")
    return list(input_files), list(skipped)


class _Keys(NamedTuple):
    """What is read of each record of an input."""

    keys: tuple[str, ...]
    style: str


def _classify(path: AnyPath, keys: _Keys, any_text: bool, default: Content | None = None) -> InputFile | str:
    """How a file is read, by its name: `a.jsonl.gz` is JSON lines, compressed by gzip; or the reason why it is not.

    `default`: the content of a file whose name does not tell.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    content = _CONTENTS.get(suffixes[-1], default) if suffixes else default
    if content == "text" and keys.style != "text":
        return "a plain text has no keys; write JSON lines"
    if any_text or content == "text":
        return InputFile(path, "text", compression, ())
    if content == "parquet" and compression:
        return "parquet files have a compression of their own; decompress this one"
    if content is None:
        return f"not one of {'/'.join(_CONTENTS)}, nor these with {'/'.join(_COMPRESSIONS)}"
    return InputFile(path, content, compression, *keys)


def _named_file(path: AnyPath, keys: _Keys, any_text: bool, flag: str) -> InputFile:
    """How a file is read that is itself an input. Raises ValueError if it cannot be."""
    file = _classify(path, keys, any_text, "json_lines")
    if isinstance(file, str):
        raise ValueError(f"{flag} {path}: {file}")
    return file


def _matches(pattern: AnyPath) -> Sequence[AnyPath]:
    """What a pattern matches, sorted."""
    if isinstance(pattern, ObjectPath):
        try:
            return sorted(pattern.glob())
        except FileNotFoundError:  # of the Hugging Face Hub, which does not tell a missing data set from a gated one
            return []
    return [Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]


def _search(folder: AnyPath, keys: _Keys, any_text: bool) -> tuple[list[InputFile], list[SkippedFile]]:
    """Files of a folder and its subfolders, sorted by path, and those that are skipped."""
    if isinstance(folder, ObjectPath):
        objects = [folder / name for name in sorted(folder.sizes())]
        kinds = [(path, _classify(path, keys, any_text)) for path in objects]
        named = [kind for _, kind in kinds if isinstance(kind, InputFile)]
        return named, [SkippedFile(path, reason) for path, reason in kinds if isinstance(reason, str)]
    paths: list[Path] = []
    files: list[InputFile] = []
    skipped: list[SkippedFile] = []

    def fail(error: OSError) -> None:
        raise ValueError(f"{error.filename} cannot be searched: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=fail):
        paths += [Path(root, name) for name in names]
        linked = (Path(root, name) for name in folders)
        skipped += [SkippedFile(path, "links to folders are not followed") for path in linked if path.is_symlink()]
    for path in sorted(paths):
        if not path.is_file():
            skipped.append(SkippedFile(path, "broken link" if path.is_symlink() else "not a regular file"))
        elif isinstance(file := _classify(path, keys, any_text), str):
            skipped.append(SkippedFile(path, file))
        else:
            files.append(file)
    return files, sorted(skipped)


class _ZstdFile(io.RawIOBase):
    """The decompressed content of a .zst file of any number of frames.

    Raises EOFError if the last frame is truncated and OSError for bytes that are not zstd. The library's own reader
    returns the content of a truncated file without an error. Its decompressor returns all that its input holds, up to
    128 KiB for each 4 bytes, so it is given a little at a time.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._library, self._file = import_package("zstandard", "reading .zst files"), file
        self._frame: Any = None
        self._compressed, self._ready = memoryview(b""), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or memoryview(self._file.read(2**16))
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended within a frame")
                return 0
            self._ready = memoryview(self._decompress())
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self) -> bytes:
        """Return the next content of the current frame, and remove what it is made of from `_compressed`."""
        self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
        part = self._compressed[:_ZSTD_BYTES]
        try:
            content: bytes = self._frame.decompress(part)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        self._compressed = self._compressed[len(part) - len(self._frame.unused_data) :]
        if self._frame.eof:
            self._frame = None
        return content


_DECOMPRESS: dict[str, Callable[[BinaryIO], Any]] = {  # closing the file is left to the caller
    "": lambda file: file,
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": lambda file: io.BufferedReader(_ZstdFile(file), 2**16),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def check_inputs_stay(inputs: Iterable[AnyPath | str], outputs: Iterable[AnyPath | str], flag: str) -> None:
    """Raise ValueError if an output, which `flag` names, is one of the inputs, also by another path."""
    replaced = {os.path.realpath(str(path)) for path in outputs}
    for path in inputs:
        if os.path.realpath(str(path)) in replaced:
            raise ValueError(f"{path} is an input and would be replaced by {flag}; choose another output")


def read_documents(
    files: Iterable[InputFile], *, on_progress: Callable[[int], object] = lambda count: None
) -> Iterator[Document]:
    """Every document of `files`, in order: a line of JSON, a row of parquet, or a whole text file.

    `on_progress` is called with the number of bytes read since its last call; they add up to the sizes of the files.
    """
    for file in files:
        done = 0
        try:
            size = file.path.stat().st_size
            if file.content == "parquet":
                yield from _read_parquet(file)
            else:
                read = _read_text if file.content == "text" else _read_json_lines
                with open_to_read(file.path) as raw:
                    for document in read(_DECOMPRESS[file.compression](raw), file):
                        yield document
                        done, before = raw.tell(), done
                        on_progress(done - before)
            on_progress(size - done)
        except OSError as error:  # of opening the file; errors of its content are handled below
            yield Document(str(file.path), None, f"cannot be read: {error}")


def read_part(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """The documents of a part of a file, in order: of parquet the row groups [start, stop), of JSON lines that are not
    compressed the lines that begin in the bytes [start, stop). Without `stop` of the whole file, of any kind."""
    try:
        if file.content == "parquet":
            yield from _read_parquet(file, start, stop)
        elif stop is not None:
            yield from _read_block(file, start, stop)
        else:
            yield from read_documents([file])
    except OSError as error:
        yield Document(str(file.path), None, f"cannot be read: {error}")


def _read_block(file: InputFile, start: int, stop: int) -> Iterator[Document]:
    """Yield the JSON lines that begin in a range of bytes."""
    with open_to_read(file.path) as stream:
        place = start
        if start:  # the line that holds the byte before begins earlier
            stream.seek(start - 1)
            place = start - 1 + _skip_line(stream, stop - start + 1)
        while place < stop and (line := stream.readline(MAX_RECORD_BYTES + 1)):
            origin, place = f"{file.path}, line at byte {place}", place + len(line)
            if is_too_long(line):
                place += _skip_line(stream, stop - place)
            line = line.removeprefix(_BOM)
            if line.strip():
                yield _parse_line(line, origin, file)


def open_to_read(path: AnyPath) -> BinaryIO:
    """Open a file, or an object: files of fsspec cannot read a part of a line."""
    file = path.open("rb")
    return io.BufferedReader(cast(io.RawIOBase, file), _PIECE_BYTES) if isinstance(path, ObjectPath) else file


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream, with their ends. Only the beginning of a line that `is_too_long` is kept."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        if is_too_long(line):
            _skip_line(stream)
        yield line


def is_too_long(line: bytes) -> bool:
    """Return whether this is the beginning of a line that has more bytes than a record may have."""
    return len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n")


def too_long(what: str) -> str:
    """Return the error of a record that is too long; `what` names such a record."""
    return f"has more than {MAX_RECORD_BYTES:,} bytes, the most that {what} may have; divide it"


def _skip_line(stream: BinaryIO, most: float = math.inf) -> int:
    """Skip the rest of a line, or its first bytes until there are `most`. Returns their number."""
    skipped = 0
    while skipped < most and (part := stream.readline(_PIECE_BYTES)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def row_groups(file: InputFile) -> list[int]:
    """Bytes of each row group of a parquet file. Raises ValueError if it cannot be read."""
    parquet = import_package("pyarrow.parquet", "reading .parquet files")
    try:
        metadata = parquet.ParquetFile(_parquet_input(file.path)).metadata
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except _READ_ERRORS as error:
        raise ValueError(f"{file.path} cannot be read: {error}") from None


def _parquet_input(path: AnyPath) -> Any:
    return path.open("rb") if isinstance(path, ObjectPath) else path


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 if the first 12 bytes of a text have their byte order mark, or are ASCII in one of them."""
    for encoding in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        text = head.decode(encoding, errors="ignore")
        if text.startswith("\ufeff") or (len(text) > 1 and all("\0" < character < "\x80" for character in text[:2])):
            return encoding[:6].upper()
    return None


def _read_text(stream: BinaryIO, file: InputFile) -> Iterator[Document]:
    try:
        content, most = bytearray(), max(MAX_RECORD_BYTES, file.path.stat().st_size)
        while len(content) <= most and (part := stream.read(_PIECE_BYTES)):
            content += part
        if len(content) > most:
            yield Document(str(file.path), None, too_long("a text file that is smaller on disk"))
        elif encoding := _wide_encoding(bytes(content[:12])):
            error = f"not UTF-8 text but {encoding}: convert it, for example by iconv -f {encoding} -t UTF-8"
            yield Document(str(file.path), None, error)
        else:
            yield Document(str(file.path), content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as failure:
        yield Document(str(file.path), None, f"not UTF-8 text: {position(failure)}")
    except _READ_ERRORS as failure:
        yield Document(str(file.path), None, f"cannot be read: {failure}")


def _read_json_lines(stream: BinaryIO, file: InputFile) -> Iterator[Document]:
    """Lines are split as bytes and decoded one by one, so that a line that is not UTF-8 is one bad document."""
    number = 0
    try:
        for number, line in enumerate(read_lines(stream), 1):
            line = line.removeprefix(_BOM)  # of the file, or of a file appended to it
            if line.strip():
                yield _parse_line(line, f"{file.path}, line {number}", file)
    except _READ_ERRORS as error:
        lost = f" (after line {number}; nothing that follows is read)" if number else ""
        yield Document(str(file.path), None, f"cannot be read: {error}{lost}")


def _parse_line(line: bytes, origin: str, file: InputFile) -> Document:
    if is_too_long(line):
        return Document(origin, None, f"{too_long('a line')} (each line must be one JSON object)")
    hint = "; it holds zero bytes, as UTF-16 and UTF-32 do: only UTF-8 is read" if b"\0" in line else ""
    try:
        record = parse_json(line)
    except UnicodeDecodeError as error:
        return Document(origin, None, f"not UTF-8 text: {position(error)}{hint}")
    except ValueError as error:
        return Document(origin, None, f"not JSON: {error}{hint} (each line must be one JSON object)")
    style, present = STYLES[file.style], list(record) if isinstance(record, dict) else [f"a {type(record).__name__}"]
    names = style.names(file.keys, present)
    if not isinstance(record, dict) or any(name not in record for name in names):
        return Document(origin, None, _missing(file, present, "key"))
    return style.document(origin, names, [record[name] for name in names])


def _missing(file: InputFile, found: list[str], what: str) -> str:
    """The error of a record that has the keys `found`, and not all keys that are read."""
    keys = dict(zip(file.keys, STYLES[file.style].keys))
    name = next(name for name in file.keys if name not in found)
    key = keys[name]
    return f"has no {what} {name!r} (it has {', '.join(found[:10])}); {key.flag} names the {key.meaning}"


def _read_parquet(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """The row groups [start, stop), read one by one, so that a damaged one costs only its own rows."""
    parquet = import_package("pyarrow.parquet", "reading .parquet files")
    path, style = file.path, STYLES[file.style]
    try:
        table = parquet.ParquetFile(_parquet_input(path))
        present = table.schema_arrow.names
        names = style.names(file.keys, present)
        if not set(names) <= set(present):
            yield Document(str(path), None, _missing(file, present, "column"))
            return
        groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    except _READ_ERRORS as failure:
        yield Document(str(path), None, f"cannot be read: {failure}")
        return
    for group in range(start, len(groups) if stop is None else stop):
        first, rows = 1 + sum(groups[:group]), groups[group]
        row = first
        try:
            for batch in table.iter_batches(row_groups=[group], columns=list(names)):
                for values in zip(*(_parquet_values(batch.column(name)) for name in names)):
                    yield style.document(f"{path}, row {row}", names, values)
                    row += 1
        except _READ_ERRORS as error:
            yield Document(f"{path}, rows {row} to {first + rows - 1}", None, f"cannot be read: {error}")


def _parquet_values(column: Any) -> Iterator[Any]:
    """Values of a column. Strings are decoded one by one; one that is not UTF-8 yields the error."""
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
