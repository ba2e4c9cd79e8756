"""Inspection of checkpoints: tensors and metadata of a checkpoint, and the differences between two checkpoints."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megafp8.checkpoint import CheckpointReader, latest
from megafp8.conversion.formats import FORMATS, open_source, recognize
from megafp8.host.object_store import AnyPath
from megafp8.host.strict_json import finite
from megafp8.training.state import changed_keys

_BLOCK = 1 << 22  # elements
_AXES = ("data", "tensor", "pipeline", "virtual_pipeline", "context", "zero", "fsdp", "fsdp_replicas")

Record = dict[str, Any]


class OfOtherFormat:
    """Checkpoint of another format, such as a Hugging Face folder, with the interface of a `CheckpointReader`.

    Its tensors have megafp8's names. It has no rectangles.
    """

    def __init__(self, path: AnyPath) -> None:
        self._source = open_source(path)
        self.path, self.tensors = self._source.path, self._source.tensors
        self.metadata: Record = {"format": recognize(self.path), **self._source.about}
        self.rectangles: dict[str, list[Any]] = {name: [] for name in self.tensors}

    def read(self, name: str, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Return a tensor, or `sizes[0]` of its rows from `offsets[0]` on."""
        return self._source.read_rows(name, offsets[0], offsets[0] + sizes[0]) if sizes else self._source.read(name)


Checkpoint = CheckpointReader | OfOtherFormat


def open_checkpoint(path: AnyPath) -> Checkpoint:
    """Open a checkpoint, the newest checkpoint of a run, or a checkpoint of another format.

    Raises ValueError if there is no checkpoint at `path`.
    """
    newest = latest(path / "checkpoints") or latest(path) or path
    others = [name for name, format in FORMATS.items() if name != "native" and format.has_sign(newest)]
    return OfOtherFormat(newest) if others else CheckpointReader(newest)


def blocks(source: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield the values of a tensor in blocks of rows, each flat and in float64."""
    shape, _ = source.tensors[name]
    if not shape:
        yield source.read(name).double().view(1)
        return
    rest = shape[1:]
    rows = max(1, _BLOCK // max(1, math.prod(rest)))
    for first in range(0, shape[0], rows):
        size = (min(rows, shape[0] - first), *rest)
        yield source.read(name, (first, *(0 for _ in rest)), size).flatten().double()


def statistics(source: Checkpoint, name: str) -> Record:
    """Return the L2 norm, minimum and maximum of a tensor without its NaN values, and the number of NaN values."""
    squares, low, high, nans = 0.0, math.inf, -math.inf, 0
    for x in blocks(source, name):
        x = x[~x.isnan()]
        nans -= x.numel()
        if x.numel():
            squares += x.square().sum().item()
            low, high = min(low, x.min().item()), max(high, x.max().item())
    nans += math.prod(source.tensors[name][0])
    return {"norm": math.sqrt(squares), "min": low, "max": high, "nan": nans}


def difference(source: Checkpoint, other: Checkpoint, name: str) -> Record:
    """Return the largest |a - b| and ‖a - b‖ / ‖b‖ of a tensor, with a from `source` and b from `other`.

    Two NaNs or two equal infinities count as equal. The results are NaN if only one of two values is NaN.
    """
    largest, squares, reference = [0.0], 0.0, 0.0
    for a, b in zip(blocks(source, name), blocks(other, name), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        delta = torch.where(same, 0.0, a - b).abs()
        if delta.numel():
            largest.append(delta.max().item())
        squares += delta.square().sum().item()
        reference += b.nan_to_num(0.0, 0.0, 0.0).square().sum().item()
    relative = math.sqrt(squares / reference) if reference else math.inf
    max_abs = torch.tensor(largest, dtype=torch.float64).max().item()
    return {"max_abs": max_abs, "relative": relative if squares else 0.0}


def about(source: Checkpoint) -> Record:
    """Return the path, the metadata without the config, and the sizes of data files and of groups of tensors."""
    groups: dict[str, Record] = {}
    for name, info in source.tensors.items():
        parts = name.split(".")
        group = groups.setdefault(".".join(parts[: 1 + (parts[0] == "optimizer")]), {"tensors": 0, "bytes": 0})
        group["tensors"] += 1
        group["bytes"] += info.nbytes
    files = {rectangle.file for rectangles in source.rectangles.values() for rectangle in rectangles}
    return {
        "path": str(source.path),
        "metadata": {key: value for key, value in source.metadata.items() if key != "config"},
        "groups": groups,
        "data_files": len(files),
        "data_file_bytes": sum(file.stat().st_size for file in files),
    }


def table(source: Checkpoint, names: list[str], norms: bool) -> list[Record]:
    """Return a record for each tensor of `names`, with its statistics if `norms` is True."""
    records = []
    with _progress(source, names if norms else []) as bar:
        for name in names:
            shape, dtype = source.tensors[name]
            record: Record = {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            record["rectangles"] = len(source.rectangles[name])
            records.append(record | (statistics(source, name) if norms else {}))
            bar.update(source.tensors[name].nbytes if norms else 0)
    return records


def compare(source: Checkpoint, other: Checkpoint, names: list[str], others: list[str]) -> Record:
    """Return the differences between tensors `names` of `source` and `others` of `other`, and between the configs."""
    common = [name for name in names if name in set(others)]
    alike = [name for name in common if source.tensors[name] == other.tensors[name]]
    values = {}
    with _progress(source, alike) as bar:
        for name in alike:
            delta = difference(source, other, name)
            if delta["max_abs"] != 0.0:
                values[name] = delta
            bar.update(source.tensors[name].nbytes)
    return {
        "only_here": [name for name in names if name not in other.tensors],
        "only_there": [name for name in others if name not in source.tensors],
        "shape_or_dtype": {
            name: [str(side.tensors[name]) for side in (source, other)] for name in common if name not in set(alike)
        },
        "values": values,
        "equal": len(alike) - len(values),
        "config": changed_keys(source.metadata.get("config", {}), other.metadata.get("config", {})),
    }


def _progress(source: Checkpoint, names: list[str]) -> tqdm:
    total = sum(source.tensors[name].nbytes for name in names)
    return tqdm(total=total, unit="B", unit_scale=True, disable=None if names else True, leave=False)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


# --- printing ---


def print_about(facts: Record) -> None:
    """Print the result of `about`."""
    meta, groups = facts["metadata"], facts["groups"]
    print(facts["path"])
    if "format" in meta:
        model = meta.get("huggingface", {}).get("model_type")
        print(f"format {meta['format']}{f', a model of type {model}' if model else ''}; tensors by megafp8's names")
        print_groups(groups)
        return
    tokens = f", {meta['tokens']:,} tokens" if meta.get("tokens") is not None else ""
    print(f"step {meta['step']:,}{tokens}; saved {meta.get('date', 'at an unknown time')}")
    layout = meta.get("layout")
    if layout:
        axes = "  ".join(f"{axis} {layout[axis]}" for axis in _AXES if axis in layout)
        print(f"layout: {layout.get('ranks', 'unknown')} ranks  {axes}  schedule {layout.get('schedule')}")
    print(f"format {meta['format_version']}, megafp8 {meta.get('megafp8_version')}, torch {meta.get('torch_version')}")
    print(f"config hash {meta.get('config_hash')}, tokenizer fingerprint {meta.get('tokenizer_fingerprint')}")
    print(f"data files: {facts['data_files']}, {_size(facts['data_file_bytes'])}")
    print_groups(groups)


def print_groups(groups: Record) -> None:
    """Print the number of tensors and the size of each group of tensors."""
    for group, size in groups.items():
        print(f"  {group:<24}{size['tensors']:>8,} tensors {_size(size['bytes']):>18}")


def print_table(records: list[Record], norms: bool) -> None:
    """Print the result of `table`, with statistics if `norms` is True."""
    width = max((len(record["name"]) for record in records), default=4)
    head = f"\n{'tensor':<{width}}  {'shape':>18}  {'dtype':<9}{'rectangles':>11}"
    print(head + (f"{'L2 norm':>13}{'min':>13}{'max':>13}{'NaN':>8}" if norms else ""))
    for r in records:
        shape = "×".join(map(str, r["shape"])) or "scalar"
        line = f"{r['name']:<{width}}  {shape:>18}  {r['dtype']:<9}{r['rectangles']:>11}"
        print(line + (f"{r['norm']:>13.5g}{r['min']:>13.5g}{r['max']:>13.5g}{r['nan']:>8}" if norms else ""))


def print_difference(found: Record, here: AnyPath, there: AnyPath) -> None:
    """Print the result of `compare` for the checkpoints `here` and `there`."""
    for key, path in (("only_here", here), ("only_there", there)):
        if found[key]:
            print(f"\nonly in {path}: {len(found[key])}")
            print("\n".join(f"  {name}" for name in found[key]))
    if found["shape_or_dtype"]:
        print(f"\ndifferent shape or dtype: {len(found['shape_or_dtype'])}")
        print("\n".join(f"  {name}  {a} -> {b}" for name, (a, b) in found["shape_or_dtype"].items()))
    if found["values"]:
        width = max(map(len, found["values"]))
        print(f"\n{'different values':<{width}}  {'max |a - b|':>13}{'‖a - b‖/‖b‖':>14}")
        for name, delta in found["values"].items():
            print(f"{name:<{width}}  {delta['max_abs']:>13.5g}{delta['relative']:>14.5g}")
    print(f"\nequal tensors: {found['equal']}")
    if found["config"]:
        print("config:")
        print("\n".join(f"  {change}" for change in found["config"]))


def print_json(content: Record) -> None:
    """Print `content` as JSON."""
    print(json.dumps(finite(content), indent=2))


def inspect(arguments: argparse.Namespace) -> int:
    """Print a checkpoint or the differences of two, and return the exit code: 1 if two checkpoints differ, else 0."""
    source = open_checkpoint(arguments.path)
    other = open_checkpoint(arguments.diff) if arguments.diff else None
    names = [name for name in source.tensors if fnmatchcase(name, arguments.tensors)]
    others = [name for name in other.tensors if fnmatchcase(name, arguments.tensors)] if other else []
    if not names and not others:
        raise ValueError(f"no tensor is called {arguments.tensors}; the first is {next(iter(source.tensors), 'none')}")
    facts = about(source)
    if other is None:
        records = table(source, names, arguments.norms)
        if arguments.json:
            print_json(facts | {"tensors": records})
        else:
            print_about(facts)
            print_table(records, arguments.norms)
        return 0
    differences = compare(source, other, names, others)
    if arguments.json:
        print_json({"here": facts, "there": about(other), "difference": differences})
    else:
        print_about(facts)
        print_about(about(other))
        print_difference(differences, source.path, other.path)
    return int(any(differences[key] for key in ("only_here", "only_there", "shape_or_dtype", "values")))
