"""Documents of text files, for preprocessing and for training tokenizers: texts, chats, and prompts with completions.

`find_files` determines from each file's name how to read it: its content (JSON lines, plain text, parquet) and its
compression. `read_documents` reads the files in order. Data that cannot be read becomes a `Document` with an error that
names the file and the line or row. An error loses only the smallest affected unit: one line, one row, one parquet row
group, or the rest of a damaged compressed file. A line or text longer than `MAX_RECORD_BYTES` is an error, and is never
held in memory as a whole.
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
"""Largest size of a line of JSON, in bytes. Also the limit of the content of a text file, unless the file is larger on
disk: a small compressed file can expand to a line that does not fit into memory."""
_PIECE_BYTES = 2**20  # read at a time from data that may be too long
_ZSTD_BYTES = 2**8  # decompressed at a time; expands to at most 8 MiB
_BINARY_TYPES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


class InputFile(NamedTuple):
    """A file and how to read it.

    `compression` is a suffix such as ".gz", or "". `keys` are the JSON keys, or parquet columns, to read for `style`.
    """

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
    """Return the files that `inputs` name, in a fixed order, and the files that are skipped.

    A file with several keys is listed once for each of them. A file that is itself an input, or matches a glob, is read
    as JSON lines if its suffix is unknown. Folders are searched for files with known suffixes; their other files are
    skipped.

    Args:
        inputs: Files, folders, globs or URLs.
        json_keys: Name of the first key of `style`: one for all inputs, or one for each input.
        any_text: Read every file as one document, whatever its suffix.
        style: Name of the style that says which keys a record has.
        more_keys: Names of the other keys of `style`.
        flag: Name of an input in error messages.

    Raises:
        ValueError: An input names no readable file, or a package that reads one of the files is missing.
    """
    if len(json_keys) not in (1, len(inputs)):
        raise ValueError(
            f"--json-key has {len(json_keys)} keys for {len(inputs)} inputs: give one for all, or one for each input "
            "(quote a pattern so that it counts as one input)"
        )
    if any_text and style != "text":
        raise ValueError(f"--text-files reads whole files as texts, but --style is {style}: leave one of them out")
    each = list(json_keys) * (len(inputs) if len(json_keys) == 1 else 1)
    keys = [_Keys((key, *more_keys), style) for key in each]
    input_files: dict[InputFile, None] = {}
    skipped: dict[SkippedFile, None] = {}
    for item, key in zip(inputs, keys):
        path = as_path(item)
        if path.is_dir():
            files, others = _search(path, key, any_text)
            if not files:
                seen = f"; it contains {others[0].path} ({others[0].reason})" if others else "; it is empty"
                raise ValueError(f"{flag} {item}: no file in this folder can be read{seen}")
        else:
            matches = [path] if path.is_file() else _matches(path)
            files = [_named_file(match, key, any_text, flag) for match in matches if match.is_file()]
            if not files:
                works = did_you_mean(Path(str(path)), "give files, folders or patterns")
                if item.startswith("hf://"):
                    works = "gated and private data sets need HF_TOKEN or hf auth login"
                raise ValueError(f"{flag} {item}: no such file, and no file matches it as a pattern; {works}")
            reason = "the pattern matches a folder or special file; use ** to match files in folders"
            others = [SkippedFile(match, reason) for match in matches if not match.is_file()]
        input_files.update(dict.fromkeys(files))
        skipped.update(dict.fromkeys(others))
    if any(file.compression == ".zst" for file in input_files):
        import_package("zstandard", "reading .zst files")
    if any(file.content == "parquet" for file in input_files):
        import_package("pyarrow", "reading .parquet files")
    return list(input_files), list(skipped)


class _Keys(NamedTuple):
    """Keys that are read from each record of an input, and the style that they belong to."""

    keys: tuple[str, ...]
    style: str


def _classify(path: AnyPath, keys: _Keys, any_text: bool, default: Content | None = None) -> InputFile | str:
    """Return how to read a file, judging by its name, or the reason why it is not read.

    For example, `a.jsonl.gz` is JSON lines compressed with gzip. `default` is the content of a file with an unknown
    suffix.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    content = _CONTENTS.get(suffixes[-1], default) if suffixes else default
    if content == "text" and keys.style != "text":
        return "a plain text file has no keys; write JSON lines"
    if any_text or content == "text":
        return InputFile(path, "text", compression, ())
    if content == "parquet" and compression:
        return "parquet files are compressed internally; decompress this one"
    if content is None:
        return f"its suffix is not one of {'/'.join(_CONTENTS)}, alone or followed by {'/'.join(_COMPRESSIONS)}"
    return InputFile(path, content, compression, *keys)


def _named_file(path: AnyPath, keys: _Keys, any_text: bool, flag: str) -> InputFile:
    """Return how to read a file that is itself an input. Raises ValueError if it cannot be read."""
    file = _classify(path, keys, any_text, "json_lines")
    if isinstance(file, str):
        raise ValueError(f"{flag} {path}: {file}")
    return file


def _matches(pattern: AnyPath) -> Sequence[AnyPath]:
    """Return the paths that match a pattern, sorted."""
    if isinstance(pattern, ObjectPath):
        try:
            return sorted(pattern.glob())
        except FileNotFoundError:  # the Hugging Face Hub raises it for missing and for gated data sets
            return []
    return [Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]


def _search(folder: AnyPath, keys: _Keys, any_text: bool) -> tuple[list[InputFile], list[SkippedFile]]:
    """Return the readable files of a folder and its subfolders, sorted by path, and the skipped ones."""
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
    """Stream of the decompressed content of a .zst file with any number of frames.

    Raises EOFError if the last frame is truncated, and OSError if the bytes are not zstd. The library's reader would
    return the content of a truncated file without an error. The library's decompressor expands its whole input at once,
    up to 128 KiB for every 4 bytes, so it gets only a few bytes at a time.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._library, self._file = import_package("zstandard", "reading .zst files"), file
        self._frame: Any = None
        self._compressed, self._ready = memoryview(b""), memoryview(b"")

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes into `buffer` and return their number; 0 means the end of the file."""
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
        """Decompress the next bytes of the current frame, and remove them from `_compressed`."""
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


_DECOMPRESS: dict[str, Callable[[BinaryIO], Any]] = {  # the caller closes the file
    "": lambda file: file,
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": lambda file: io.BufferedReader(_ZstdFile(file), 2**16),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def check_inputs_stay(inputs: Iterable[AnyPath | str], outputs: Iterable[AnyPath | str], flag: str) -> None:
    """Raise ValueError if an output, which `flag` names, is also an input, under any path."""
    replaced = {os.path.realpath(str(path)) for path in outputs}
    for path in inputs:
        if os.path.realpath(str(path)) in replaced:
            raise ValueError(f"{path} is an input, and {flag} would replace it; choose another output")


def read_documents(
    files: Iterable[InputFile], *, on_progress: Callable[[int], object] = lambda count: None
) -> Iterator[Document]:
    """Yield every document of `files` in order: a line of JSON, a row of parquet, or a whole text file.

    `on_progress` is called with the number of bytes read since its last call. These numbers add up to the total size of
    the files.
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
        except OSError as error:  # from opening the file; the readers handle errors in its content
            yield Document(str(file.path), None, f"cannot be read: {error}")


def read_part(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """Yield the documents of a part of a file, in order.

    For parquet, the part is the row groups [start, stop). For uncompressed JSON lines, it is the lines that begin in
    the bytes [start, stop). Without `stop`, the part is the rest of a parquet file, or a whole file of any other kind.
    """
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
        if start:  # the line that contains the byte before `start` belongs to the part before
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
    """Open a local file or an object for reading. Objects are buffered: fsspec files cannot read part of a line."""
    file = path.open("rb")
    return io.BufferedReader(cast(io.RawIOBase, file), _PIECE_BYTES) if isinstance(path, ObjectPath) else file


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream, with their line ends. Of a line that `is_too_long`, only the beginning is kept."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        if is_too_long(line):
            _skip_line(stream)
        yield line


def is_too_long(line: bytes) -> bool:
    """Return whether `line` is the beginning of a line that is longer than a record may be."""
    return len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n")


def too_long(what: str) -> str:
    """Return the error message for a record that is too long; `what` names the kind of record."""
    return f"has more than {MAX_RECORD_BYTES:,} bytes, the most that {what} may have; divide it"


def _skip_line(stream: BinaryIO, most: float = math.inf) -> int:
    """Skip the rest of a line, but stop after about `most` bytes. Return the number of bytes skipped."""
    skipped = 0
    while skipped < most and (part := stream.readline(_PIECE_BYTES)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def row_groups(file: InputFile) -> list[int]:
    """Return the size of each row group of a parquet file, in bytes. Raises ValueError if the file cannot be read."""
    parquet = import_package("pyarrow.parquet", "reading .parquet files")
    try:
        metadata = parquet.ParquetFile(_parquet_input(file.path)).metadata
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except _READ_ERRORS as error:
        raise ValueError(f"{file.path} cannot be read: {error}") from None


def _parquet_input(path: AnyPath) -> Any:
    return path.open("rb") if isinstance(path, ObjectPath) else path


def _wide_encoding(head: bytes) -> str | None:
    """Return "UTF-16" or "UTF-32" if the first 12 bytes of a text are in that encoding, or None.

    The encoding is recognized by its byte order mark, or by two ASCII characters at the beginning.
    """
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
    """Yield the documents of JSON lines.

    Lines are split as bytes and decoded one by one, so a line that is not UTF-8 makes only one bad document.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(stream), 1):
            line = line.removeprefix(_BOM)  # at the beginning of the file, or of a file that was appended to it
            if line.strip():
                yield _parse_line(line, f"{file.path}, line {number}", file)
    except _READ_ERRORS as error:
        lost = f" (after line {number}; the rest of the file is not read)" if number else ""
        yield Document(str(file.path), None, f"cannot be read: {error}{lost}")


def _parse_line(line: bytes, origin: str, file: InputFile) -> Document:
    if is_too_long(line):
        return Document(origin, None, f"{too_long('a line')} (each line must be one JSON object)")
    hint = "; it contains zero bytes, as UTF-16 and UTF-32 do: only UTF-8 is read" if b"\0" in line else ""
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
    """Return the error message for a record with the keys `found`, which lacks a required key."""
    keys = dict(zip(file.keys, STYLES[file.style].keys))
    name = next(name for name in file.keys if name not in found)
    key = keys[name]
    return f"has no {what} {name!r} (it has {', '.join(found[:10])}); {key.flag} names the {key.meaning}"


def _read_parquet(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """Yield the documents of the row groups [start, stop), read one by one: a damaged one loses only its own rows."""
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
    """Yield the values of a column. Strings are decoded one by one; for one that is not UTF-8, the error is yielded."""
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
