"""Read damaged and crafted files: flipped metadata bytes, hostile pickles, JSON, YAML, headers, archives.

Checkpoints of a tiny model are written in each format. Every byte of their pickled and JSON metadata is changed, one
byte a case, once in one bit and once to any other value (seeded), and each case is read as conversion reads it: the
folder is opened, and one tensor is read. Native metadata is tried with its old checksum, and with a new one, so that
the parser sees the change. Crafted files are made from seeds by grammars: pickles that name, call and patch classes,
announce sizes, or nest; archives that compress or lie about sizes; JSON, YAML and header bombs; configs with absurd
numbers; patterns that backtrack.

Worker processes read the cases, with limits on address space and time. A case is *read* or *refused* with a ValueError
that names its file. It fails where it

- raises anything else, or does not name the file, or ends the process;
- has an effect: an audit hook sees files opened for writing, removals, processes, sockets, imports and Python's own
  unpickler; dictionaries of classes and modules that such files like to patch are compared after each case;
- takes more than 2 s of CPU time, or raises the peak of resident memory by more than 200 MB.
"""

from __future__ import annotations

import builtins
import io
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from megafp8.checkpoint import lock
from megafp8.checkpoint.dcp import parse_index
from megafp8.checkpoint.files import Checksum, read_checksums, write_checksums
from megafp8.checkpoint.torch_file import TorchFile
from megafp8.config import load_config
from megafp8.config.schema import ModelConfig
from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.conversion.convert import convert
from megafp8.conversion.formats import FORMATS, open_source
from megafp8.conversion.huggingface.tokenizer import find_tokenizer
from megafp8.conversion.model import model_tensors
from megafp8.conversion.peft.patterns import matches_end
from megafp8.conversion.safetensors_format import read_header
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.inference.load import InferenceLayout, _end_tokens, open_checkpoint
from megafp8.training.resilience.spikes import read_skipped

MAX_BYTES, MAX_SECONDS = 200_000_000, 2.0
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=10,
    vocab_multiple=2,
    max_position_embeddings=4,
).spec


class Case(NamedTuple):
    """A file to read: `change` puts it in the worker's own `folder`, and returns what is to be read."""

    group: str
    name: str
    change: Callable[[Path], Path]
    read: Callable[[Path], Any]


class _Random(CheckpointSource):
    """The tiny model with random weights."""

    def __init__(self, path: Path) -> None:
        self.path, self.model, self.tokenizer_files = path, MODEL, []
        self.about = {"step": 3, "config": {"model": dict(MODEL.keys)}}
        self.tensors = {name: TensorInfo(shape, torch.float32) for name, shape in model_tensors(MODEL).items()}

    def read(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(self.tensors[name].shape, generator=generator)


# --- checkpoints, and every byte of their metadata ---


def make_checkpoints(folder: Path) -> None:
    """A checkpoint of each format, in a folder of its name."""
    truth = folder / "truth"
    truth.mkdir(parents=True)
    for name in ("native", "hf", "megatron", "torch_dist", "consolidated"):
        sink = FORMATS[name].sink(folder / name)
        convert(_Random(truth), sink, {})
        sink.publish()
    (folder / "hf" / "generation_config.json").write_text('{"eos_token_id": [2, 3], "do_sample": false}')


def _metadata_ranges(folder: Path) -> Iterator[tuple[str, str, range]]:
    """Format, file, and the bytes of it that are metadata."""
    for name in ("native", "hf", "megatron", "torch_dist", "consolidated"):
        for file in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            content, relative = file.read_bytes(), str(file.relative_to(folder / name))
            if file.suffix == ".safetensors":
                yield name, relative, range(8 + int.from_bytes(content[:8], "little"))
            elif file.suffix == ".pt":
                with zipfile.ZipFile(file) as archive:
                    for info in archive.infolist():
                        if info.filename.endswith("data.pkl"):
                            start = content.index(b"\x80\x02", info.header_offset)
                            yield name, relative, range(start, start + info.file_size)
                    yield name, relative, range(archive.start_dir, len(content))
            elif file.suffix in (".json", "") or file.name == ".metadata":
                yield name, relative, range(len(content))


def flipped(pristine: Path, every: int) -> Iterator[Case]:
    """A case for each `every`-th byte of the metadata."""
    chosen = random.Random(1)
    for name, relative, where in _metadata_ranges(pristine):
        seals = (False, True) if name == "native" and "checksums" not in relative else (False,)
        for at in where[chosen.randrange(every) :: every]:
            for value, reseal in product((1 << chosen.randrange(8), chosen.randrange(1, 256)), seals):
                group = f"{name}: {Path(relative).name}" + (", new checksum" if reseal else "")

                def change(folder: Path, at: int = at, value: int = value, reseal: bool = reseal,
                           name: str = name, relative: str = relative) -> Path:  # fmt: skip
                    root = folder / name
                    content = bytearray((pristine / name / relative).read_bytes())
                    content[at] ^= value
                    (root / relative).write_bytes(content)
                    if reseal:
                        sums = read_checksums(pristine / name) or {}
                        write_checksums(root, {**sums, relative: Checksum.from_content(bytes(content))})
                    return root

                yield Case(group, f"byte {at} ^ {value}", change, _read_checkpoint)


def _read_checkpoint(path: Path) -> Tensor:
    source = FORMATS[path.name].source(path)
    find_tokenizer(source)
    _end_tokens(source)
    return source.read("model.layers.0.attention.q.weight")


# --- crafted files ---

NAMES = [
    *("os system", "posix system", "builtins exec", "builtins eval", "builtins getattr", "builtins __import__"),
    *("subprocess Popen", "pathlib PosixPath", "pathlib Path", "shutil rmtree", "torch load", "torch Size"),
    *("socket socket", "pickle loads", "operator attrgetter", "functools partial", "collections OrderedDict"),
    *("torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata MetadataIndex"),
    *(
        "torch.distributed.checkpoint.metadata TensorStorageMetadata",
        "torch float32",
        "torch._utils _rebuild_tensor_v2",
    ),
    *("torch.distributed.checkpoint.filesystem _StorageInfo", "argparse Namespace", "torch FloatStorage"),
]


def _program(r: random.Random, depth: int = 0) -> bytes:
    """Opcodes that leave one value, most of the time."""
    kind = r.randrange(18)
    module, name = r.choice(NAMES).split()
    named = f"c{module}\n{name}\n".encode()
    if depth > 5 or kind < 3:
        return r.choice(
            [b"K\x05", b"N", b"X\x02\x00\x00\x00ab", b")", b"]", b"}", b"\x88", b"J\xff\xff\xff\xff", b"\x8f"]
        )
    one, two = _program(r, depth + 1), _program(r, depth + 1)
    return [
        named,
        named + b"(" + one + b"tR",
        named + b"(" + one + two + b"tR",
        named + one + b"b",
        named + b")\x81" + two + b"b",
        named + b"N}X\x04\x00\x00\x00openK\x01s\x86b",
        b"(" + one + two + b"t",
        b"](" + one + two + b"e",
        b"}(" + one + two + b"u",
        b"\x82" + bytes([r.randrange(256)]),
        one + b"Q",
        b"P" + b"data\n",
        b"(i" + f"{module}\n{name}\n".encode(),
        one + b"r" + struct.pack("<I", r.choice([0, 255, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])),
        b"j" + struct.pack("<I", r.randrange(1 << 32)),
    ][kind - 3]  # fmt: skip


def _bomb(r: random.Random) -> bytes:
    n = r.choice([10, 300, 20_000, 100_000])
    doubling = b"]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(100)) + b"h\x64"
    return r.choice(
        [
            b"]" * n + b"a" * (n - 1),
            b")" + b"\x85" * n,
            b"(" * n,
            doubling,
            b"}" + doubling + b"K\x01s",
            b"\x8e" + struct.pack("<Q", r.choice([1 << 32, 1 << 40, (1 << 63) - 1])),
            b"B" + struct.pack("<I", (1 << 32) - 1),
            b"\x8b" + struct.pack("<i", r.choice([-1, (1 << 31) - 1])),
            b"\x8a\xff" + b"\xff" * 255,
            b"]" + b"".join(b"r" + struct.pack("<I", (1 << 31) - i) for i in range(n // 10)),
            b"}"
            + b"".join(
                b"\x8a\x0a" + ((i + 1) * ((1 << 61) - 1)).to_bytes(10, "little") + b"Ns" for i in range(n // 10)
            ),
            b"\x8f(" + b"".join(b"M" + struct.pack("<H", i % 65536) for i in range(n // 4)) + b"\x90",
            b"}" * n,
            b"(" + b"\x8f" * n + b"t",
            b"I" + b"9" * n + b"\n",
            b"X" + struct.pack("<I", n) + b"\xff" * n,
            b"]q\x00h\x00a",
            b"2" * n,
        ]
    )


def _spliced(r: random.Random, real: bytes) -> bytes:
    """A real pickle with a few ranges deleted, repeated, or replaced by opcodes."""
    content = bytearray(real)
    for _ in range(r.randrange(1, 5)):
        at, length = r.randrange(2, len(content)), r.randrange(1, 40)
        inserted = r.choice([b"", bytes(content[at : at + length]) * 2, _program(r, 3), r.randbytes(3)])
        content[at : at + length] = inserted
    return bytes(content)


def _pickles(pristine: Path) -> Iterator[Case]:
    index = (pristine / "torch_dist" / "iter_0000003" / ".metadata").read_bytes()
    archive = next((pristine / "megatron").rglob("*.pt")).read_bytes()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        data = next(opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
    for seed in range(1 << 30):
        r = random.Random(seed)
        in_archive = bool(seed % 2)
        kind = r.randrange(3)
        if kind == 2:
            content = _spliced(r, data if in_archive else index)
        else:
            content = b"\x80" + bytes([r.choice([2, 4])]) + (_program, _bomb)[kind](r) + b"."

        def change(folder: Path, content: bytes = content, in_archive: bool = in_archive) -> Path:
            path = folder / ("crafted.pt" if in_archive else "crafted.metadata")
            if in_archive:
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr("f/data.pkl", content)
                    archive.writestr("f/byteorder", b"little")
            else:
                path.write_bytes(content)
            return path

        reads: Callable[[Path], Any] = (
            _walk_archive if in_archive else lambda path: parse_index(path, path.read_bytes())
        )
        yield Case("crafted pickles", f"seed {seed}", change, reads)


def _walk_archive(path: Path) -> None:
    """Read an archive, and walk through it as readers of state dicts do, without a memory of what was seen."""

    def walk(value: Any) -> int:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return 1 + sum(map(walk, parts))

    walk(TorchFile(path).content)


def _archives(_: Path) -> Iterator[Case]:
    for seed in range(1 << 30):
        r = random.Random(seed)

        def change(folder: Path, r: random.Random = r) -> Path:
            path = folder / "crafted.pt"
            kind = r.randrange(4)
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == 0 else zipfile.ZIP_STORED) as archive:
                archive.writestr("f/data.pkl", bytes(50_000_000) if kind == 0 else pickle.dumps({"a": 1}, 2))
                for i in range(r.choice([0, 3, 20_000]) if kind == 1 else 0):
                    archive.writestr(f"f/data/{i}", b"")
                if kind == 3:
                    archive.writestr("../../escape", b"x")
            content = bytearray(path.read_bytes())
            if kind == 2:  # sizes and offsets of the directory
                at = content.rindex(b"PK\x01\x02")
                for _ in range(r.randrange(1, 4)):
                    field = at + r.choice([20, 24, 42])
                    content[field : field + 4] = struct.pack("<I", r.choice([0, 1 << 20, (1 << 31) + 5, (1 << 32) - 1]))
                content[at + 16 : at + 20] = bytes(4)
            path.write_bytes(content)
            return path

        yield Case("crafted archives", f"seed {seed}", change, _walk_archive)


HOSTILE: list[Any] = [
    1e15, 10**15, -1, 0, 2**63, 10**30, 1e308, True, None, "x", "8", "", [], {}, [1, 2], [[]], {"a": {}}, "\ud800x", 9,
    [0] * 50_000, "x" * 100_000,
]  # fmt: skip


def _deep(n: int) -> str:
    return "[" * n + "]" * n


def _configs(pristine: Path) -> Iterator[Case]:
    files = ["hf/config.json", "hf/generation_config.json", "consolidated/consolidated.json", "native/metadata.json"]
    for seed in range(1 << 30):
        r = random.Random(seed)
        relative = r.choice(files)
        content = json.loads((pristine / relative).read_text())
        inner = content
        while True:
            key = r.choice(sorted(inner))
            if not (isinstance(inner[key], dict) and inner[key]) or r.random() < 0.1:
                break
            inner = inner[key]
        inner[key] = r.choice(HOSTILE)
        text = (
            json.dumps(content)
            if r.random() < 0.9
            else r.choice(['{"a":' * 50_000, _deep(100_000), _deep(500), "1e999", "9" * 9999])
        )

        def change(folder: Path, relative: str = relative, text: str = text) -> Path:
            file = folder / relative
            file.write_text(text)
            if relative.startswith("native"):
                sums = read_checksums(pristine / "native") or {}
                write_checksums(file.parent, {**sums, file.name: Checksum.from_content(file.read_bytes())})
            return file.parent

        yield Case("crafted configs", f"seed {seed}: {relative} {key}", change, _open_for_use)


def _open_for_use(path: Path) -> None:
    open_source(path)
    open_checkpoint(path, InferenceLayout(), device="cpu")


def _small_json(_: Path) -> Iterator[Case]:
    texts = [_deep(n) for n in (1, 99, 101, 1000, 200_000)] + [
        '{"a":' * 1000 + "1" + "}" * 1000,
        "",
        "{",
        "NaN",
        "[1e999]",
        "9" * 5000,
    ]
    texts += [
        "[[1]]",
        '[["a", "b"]]',
        "[[-1, 2]]",
        "[1]",
        '{"host": [], "pid": {}, "token": 3}',
        "\x00",
        '"\\ud800"',
        "[" + "[]," * 300_000 + "[]]",
    ]
    for seed in range(1 << 30):
        text = texts[seed // 2 % len(texts)] + " " * (seed // (2 * len(texts)))
        name = (lock.LOCK_FILE, "skipped_samples.json")[seed % 2]

        def change(folder: Path, name: str = name, text: str = text) -> Path:
            (folder / name).write_text(text)
            return folder / name

        reads: Callable[[Path], Any] = (lock._read, lambda path: read_skipped(path.parent, None))[seed % 2]
        yield Case("crafted .lock, skipped_samples.json", f"number {seed}", change, reads)


def _yamls(_: Path) -> Iterator[Case]:
    for seed in range(1 << 30):
        r = random.Random(seed)
        n = r.randrange(2, 30)
        aliases = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(n))
        merges = "\n".join(
            f"b{i}: &b{i}\n  <<: [{', '.join([f'*b{i - 1}'] * 9)}]" if i else "b0: &b0 {x: 1}" for i in range(n)
        )
        depth = r.choice([60, 300, 5000])
        text = r.choice(
            [
                aliases,
                merges,
                _deep(depth),
                "{a: " * depth,
                "a: &a [*a]",
                "a: &a {b: *a}",
                "- " * depth + "x",
                "a: !!python/object/apply:os.system [true]",
                "a: " + "9" * 5000,
                "model: {num_layers: 1e15, hidden_size: -1, vocab_size: .inf}",
                "name: " + "x" * (1 << 20),
                "? " * depth,
                "\x07",
                "%YAML 9.9\n---\na: 1",
                "model: [" + "1," * r.randrange(20_000) + "]",
            ]
        )

        def change(folder: Path, text: str = text) -> Path:
            (folder / "crafted.yaml").write_text(text)
            return folder / "crafted.yaml"

        yield Case("crafted YAML", f"seed {seed}", change, load_config)


def _headers(_: Path) -> Iterator[Case]:
    for seed in range(1 << 30):
        r = random.Random(seed)
        sizes: list[Any] = [
            [200_000, 1],
            [1] * 200_000,
            [1 << 62],
            [1 << 70],
            [-1],
            [1.0],
            ["1"],
            True,
            None,
            {},
            [0, 1 << 61],
            [2, 2],
        ]
        offsets: list[Any] = [[0, 16], [0, 1 << 62], [8, 0], [-8, 0], [0], "01", [0.0, 16.0], None, [0, 0]]
        entry = {
            "dtype": r.choice(["F32", "F4", "BF16", 3, None, "x" * 1000]),
            "shape": r.choice(sizes),
            "data_offsets": r.choice(offsets),
        }
        header: Any = {
            r.choice(["a", "", "\u0000", "x" * 10_000]): entry,
            "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        }
        header = r.choice([header, header, header, [entry], {"a": [entry]}, {"__metadata__": {"a": [[]]}, **header}])
        text = r.choice([json.dumps(header)] * 9 + [_deep(50_000), '{"a":' * 50_000, "{" * 99, '{"a": 1e999}'])
        length = r.choice([len(text)] * 9 + [0, 1, 1 << 40, (1 << 64) - 1])

        def change(folder: Path, text: str = text, length: int = length) -> Path:
            (folder / "crafted.safetensors").write_bytes(struct.pack("<Q", length) + text.encode() + bytes(16))
            return folder / "crafted.safetensors"

        yield Case("crafted safetensors headers", f"seed {seed}", change, read_header)


def _patterns(_: Path) -> Iterator[Case]:
    parts = [
        "(a+)+", "(a|a)*", "(.*)*", ".*.*.*.*", "(a{1,90}){1,90}", "((a*)*)*", "(?=a)", r"(a)\1", "(?i)a", "[",
        "a{999999999}", "(" * 500, "(a|" * 200 + ")" * 200,
    ]  # fmt: skip
    for seed in range(1 << 30):
        r = random.Random(seed)
        pattern = "".join(r.choice(parts) for _ in range(r.randrange(1, 4))) + r.choice(["", "b", "$"])

        def read(path: Path, pattern: str = pattern) -> bool:
            try:
                return matches_end(pattern, "a" * 500)
            except ValueError as error:  # which PeftSource completes
                raise ValueError(f"{path}: {error}") from None

        yield Case("crafted patterns", f"seed {seed}", lambda folder: folder / "adapter_config.json", read)


def _indexed(_: Path) -> Iterator[Case]:
    numbers = [0, 1, 2, 255, 1 << 31, 1 << 60, (1 << 64) - 1]
    for seed in range(1 << 30):
        r = random.Random(seed)
        header = struct.pack(
            "<9sQBQQ",
            b"MMIDIDX\x00\x00",
            r.choice([1, 1, 1, 2]),
            r.choice([4, 8, 6, 99]),
            r.choice(numbers),
            r.choice(numbers),
        )
        body = r.randbytes(r.choice([0, 8, 20, 28, 1000]))
        sidecar = r.choice(["", "{}", _deep(50_000), '{"index_sha256": 3}', "[]"])

        def change(folder: Path, content: bytes = header + body, sidecar: str = sidecar) -> Path:
            (folder / "crafted.idx").write_bytes(content)
            (folder / "crafted.bin").write_bytes(bytes(40))
            (folder / "crafted.json").write_text(sidecar)
            return folder / "crafted"

        yield Case("crafted .idx", f"seed {seed}", change, IndexedDataset)


_SHARES = {_pickles: 50, _archives: 5, _configs: 14, _small_json: 4, _yamls: 7, _headers: 12, _patterns: 4, _indexed: 4}
"""Percent of the crafted files."""


def crafted(pristine: Path, count: int) -> Iterator[Case]:
    for make, percent in _SHARES.items():
        cases = make(pristine)
        for _ in range(count * percent // 100):
            yield next(cases)


# --- reading in a worker ---

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    *("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "exec", "import", "marshal.", "pickle.", "code."),
    *("urllib.", "tempfile."),
)
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.getxattr")


class _Watch:
    """Effects of a case, by an audit hook, and by comparing dictionaries of what crafted files patch."""

    def __init__(self) -> None:
        self.effects: list[str] | None = None
        sys.addaudithook(self._audit)
        owners = (pathlib.Path, pathlib.PosixPath, pathlib.PurePath, pathlib.PurePosixPath, os, builtins, io, pickle)
        classes = [x for module in (metadata, filesystem) for x in vars(module).values() if isinstance(x, type)]
        self._owners = [*owners, *classes, torch.Size, torch.serialization, random.Random]
        self._known = [dict(vars(owner)) for owner in self._owners]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.effects is None:
            return
        if event == "open":
            _, mode, flags = arguments
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITING):
                self.effects.append(f"open {arguments[0]} for writing")
        elif event.startswith(_EFFECTS) and event not in _HARMLESS:
            if event == "import" and arguments[0] in sys.modules:
                return
            self.effects.append(f"{event} {str(arguments)[:80]}")

    def patched(self) -> list[str]:
        return [
            f"{owner.__name__} was patched"
            for owner, known in zip(self._owners, self._known)
            if any(known.get(key) is not value for key, value in vars(owner).items()) or len(vars(owner)) < len(known)
        ]


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith(field))


def _run(case: Case, folder: Path, watch: _Watch) -> dict[str, Any]:
    path = case.change(folder)
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # resets the peak of resident memory
    before = _memory("VmRSS")
    outcome, problem = "read", ""
    signal.setitimer(signal.ITIMER_REAL, 60)  # ends the process
    watch.effects = []
    start = time.process_time()
    try:
        case.read(path)
    except ValueError as error:
        outcome = "refused"
        if str(path) not in str(error) and str(path.parent) not in str(error):
            problem = f"the error does not name the file: {error}"
        elif "Memory" in str(error) or "alloc" in str(error):
            problem = f"memory ran out: {error}"
    except BaseException as error:
        outcome, problem = "raised", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    effects, watch.effects = watch.effects + watch.patched(), None
    signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _memory("VmHWM") - before
    if effects:
        problem = f"effects: {effects[:3]}"
    elif seconds > MAX_SECONDS:
        problem = f"{seconds:.1f} s"
    elif grown > MAX_BYTES:
        problem = f"{grown / 1e6:.0f} MB"
    return {"outcome": outcome, "problem": problem[:300], "seconds": seconds, "bytes": grown}


def _work(pristine: Path, folder: Path, cases: list[Case], first: int, log: Path) -> None:
    """Read `cases[first:]`, each noted in `log` before and after."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    names = ("native", "hf", "megatron", "torch_dist", "consolidated")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    for name in names:  # imports what is imported on demand
        _read_checkpoint(folder / name)
        _open_for_use(folder / name)
    for make in _SHARES:
        for case, _ in zip(make(pristine), range(2)):
            with suppress(Exception):  # seen again below
                case.read(case.change(folder))
    shutil.rmtree(folder)
    shutil.copytree(pristine, folder)
    watch = _Watch()
    used = _memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + 5 * MAX_BYTES, resource.RLIM_INFINITY))
    with log.open("a") as stream:
        for i, case in enumerate(cases[first:], first):
            stream.write(f"{i}\n")
            stream.flush()
            result = _run(case, folder, watch)
            stream.write(json.dumps({"case": i, **result}) + "\n")
            stream.flush()
            for relative in _changed(case, pristine):
                shutil.copyfile(pristine / relative, folder / relative)


def _changed(case: Case, pristine: Path) -> list[str]:
    """Files of the checkpoints that a case may have changed."""
    if case.group == "crafted configs":
        names = ["hf", "consolidated", "native"]
    elif case.group.startswith("crafted"):
        return []
    else:
        names = [case.group.partition(":")[0]]
    found = [path for name in names for path in (pristine / name).rglob("*") if path.is_file()]
    return [str(path.relative_to(pristine)) for path in found if path.suffix != ".distcp"]


def run(cases: list[Case], pristine: Path, scratch: Path, workers: int) -> list[dict[str, Any]]:
    """The result of each case, in their order. A case that ends its process is a failure; the next worker goes on."""
    context = multiprocessing.get_context("fork")
    shares = [cases[i::workers] for i in range(workers)]
    logs = [scratch / f"log{i}" for i in range(workers)]

    def start(i: int, first: int) -> Any:
        process = context.Process(target=_work, args=(pristine, scratch / f"files{i}", shares[i], first, logs[i]))
        process.start()
        return process

    running = {i: start(i, 0) for i in range(workers)}
    while running:
        for i, process in list(running.items()):
            process.join(0.5)
            if process.is_alive():
                continue
            lines = logs[i].read_text().split("\n")[:-1] if logs[i].exists() else []
            assert lines or not shares[i], "a worker could not start"
            if process.exitcode and lines and lines[-1].isdecimal():
                last = int(lines[-1])
                ended = {"case": last, "outcome": "ended", "problem": f"the process ended: {process.exitcode}"}
                with logs[i].open("a") as stream:
                    stream.write(json.dumps({**ended, "seconds": 0.0, "bytes": 0}) + "\n")
                running[i] = start(i, last + 1)
            else:
                assert not process.exitcode, f"a worker ended with {process.exitcode} between cases"
                del running[i]
    results: list[dict[str, Any]] = [{}] * len(cases)
    for i, log in enumerate(logs):
        for line in log.read_text().split("\n"):
            if line.startswith("{"):
                found = json.loads(line)
                results[i + workers * found["case"]] = found
    return results


def failures(every: int, count: int, workers: int = 1) -> tuple[int, list[str]]:
    """Try each `every`-th byte of the metadata, and `count` crafted files.

    Returns:
        The number of cases, and a line for each one that failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pristine = Path(scratch) / "pristine"
        make_checkpoints(pristine)
        cases = [*flipped(pristine, every), *crafted(pristine, count)]
        results = run(cases, pristine, Path(scratch), workers)
    failed = [(case, result) for case, result in zip(cases, results, strict=True) if result["problem"]]
    return len(cases), [f"{case.group}, {case.name}: {x['outcome']}: {x['problem']}" for case, x in failed]
