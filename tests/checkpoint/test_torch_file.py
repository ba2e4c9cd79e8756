"""Archives of `torch.save`: read as `torch.load` does, without running code; reserved and filled later."""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.files import write_at
from megafp8.checkpoint.pickle_reader import Global, PickledObject
from megafp8.checkpoint.torch_file import StoredTensor, TorchFile, as_bytes, reserve, seal, tensor_starts

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def read(file: TorchFile, tensor: StoredTensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    file.read(tensor, "it", (0,) * out.dim(), out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randint(0, 2, (5, 3)).to(dtype)
    torch.save({"view": whole[1:3], "parameter": torch.nn.Parameter(whole, requires_grad=False)}, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    assert torch.equal(read(file, file.content["view"]).double(), whole[1:3].double())
    assert torch.equal(read(file, file.content["parameter"]).double(), whole.double())
    rows = torch.empty(2, 3, dtype=dtype)
    file.read(file.content["parameter"], "it", (3, 0), rows)
    assert torch.equal(rows.double(), whole[3:].double())
    with pytest.raises(ValueError, match="is damaged: it is not inside its record data/0"):
        file.read(file.content["parameter"], "it", (4, 0), rows)


def test_plain_content_is_read_and_everything_else_is_inert(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"a": [1, 2.5, None, (True, "x")], 3: {"size": torch.Size([2]), "dtype": torch.bfloat16}}
    other = {"path": Path("/etc"), "call": argparse.ArgumentParser, "set": {1}, "args": argparse.Namespace(n=1)}
    torch.save({**plain, "other": other}, tmp_path / "f.pt")
    content = TorchFile(tmp_path / "f.pt").content
    found = content.pop("other")
    assert content == plain
    assert isinstance(found["path"], PickledObject)
    assert found["call"] == Global("argparse", "ArgumentParser")
    assert (found["args"].of, found["args"].state) == (("argparse", "Namespace"), {"n": 1})


def test_the_length_of_an_archive_may_not_include_the_next_one(tmp_path: Path) -> None:
    """As in a data file whose index is damaged: `zipfile` takes the last directory, which has other tensors."""
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    length = file.tell()
    torch.save(torch.zeros(2), file)
    path = tmp_path / "two"
    path.write_bytes(file.getvalue())
    assert TorchFile(path, 0, length).content.shape == (2,)
    with pytest.raises(ValueError, match="its directory belongs to another archive that follows"):
        TorchFile(path)


def test_a_damaged_pickle_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.serialization.set_crc32_options(False)  # so that nothing but the reader itself notices
    try:
        torch.save({"args": argparse.Namespace(a=[1, 2.5, "x"]), "model": {"w": torch.ones(3, 4)}}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("f/data.pkl").file_size
    start, outcomes, messages = content.index(b"\x80\x02}"), set(), []
    for at in range(start, start + size):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            TorchFile(path)
            outcomes.add("read")
        except ValueError as error:
            messages.append(str(error))
            outcomes.add("refused")
    assert all(str(path) in message for message in messages)
    assert outcomes == {"read", "refused"}


def test_reserved_space_is_filled_later(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    values = {
        ("model", "a"): torch.randn(7, 3),
        ("model", "b"): torch.randn(5).bfloat16(),
        ("more", "c"): torch.ones(1),
    }
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in values.items()}
    reserve(path, {"step": 3, "model": {"empty": None}, "more": {}}, shapes)
    assert path.stat().st_blocks * 512 >= sum(x.nbytes for x in values.values())
    starts = tensor_starts(path)
    with path.open("r+b", buffering=0) as stream:
        for key in reversed(values):
            write_at(stream, starts[key], as_bytes(values[key]))
    seal(path)
    seal(path)
    found = torch.load(path, weights_only=True)
    assert (found["step"], found["model"]["empty"]) == (3, None)
    assert all(torch.equal(found[outer][inner], x) for (outer, inner), x in values.items())
    file = TorchFile(path)
    assert torch.equal(read(file, file.content["model"]["a"]), values["model", "a"])
    with path.open("r+b", buffering=0) as stream:
        write_at(stream, starts["model", "a"] + 8, bytes(4))
    with pytest.raises(ValueError, match=r"f.pt is damaged at it: its bytes do not match their checksum"):
        read(TorchFile(path), TorchFile(path).content["model"]["a"])
