"""Native checkpoints read and written tensor by tensor, against what was saved, and against damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import load, save
from megafp8.config import model_spec
from megafp8.conversion.average import Averaged
from megafp8.conversion.consolidated import ConsolidatedSink, ConsolidatedSource
from megafp8.conversion.convert import Selected
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.model import check_source, model_tensors
from megafp8.conversion.native import NativeSink, NativeSource
from tests.checkpoint.rewritten import flip, rewrite
from tests.conversion import checkpoints
from tests.conversion.checkpoints import convert

LONGROPE = {
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip


def test_a_source_is_what_was_saved(tmp_path: Path) -> None:
    path, expected = checkpoints.make(tmp_path), checkpoints.everything()
    for given in (path, path.parent, tmp_path):
        source = NativeSource(given)
        assert source.path == path
        assert source.model == checkpoints.MODEL
        assert source.model.keys == checkpoints.MODEL.keys
        assert source.about["consumed_samples"] == 240
        assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert source.tensors[name] == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read(name), tensor)
    assert torch.equal(source.read_rows("model.output.weight", 3, 9), expected["model.output.weight"][3:9])


@pytest.mark.parametrize(("longrope", "positions"), [(None, 16), (LONGROPE, 32)], ids=["rope", "longrope"])
def test_positions_that_the_config_leaves_to_the_run(
    longrope: dict[str, Any] | None, positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {**checkpoints.MODEL.keys, "max_position_embeddings": None, "longrope": longrope}
    monkeypatch.setitem(checkpoints.ABOUT, "config", {"model": model, "training": {"seq_length": 16}})
    source = NativeSource(checkpoints.make(tmp_path))
    assert source.model.stem.max_position_embeddings == positions
    path = convert(source, HfSink(tmp_path / "hf"))
    assert json.loads((path / "config.json").read_text())["max_position_embeddings"] == positions


def test_two_kinds_of_experts_and_a_table_of_integers_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {
        **checkpoints.MODEL.keys, "moe": {"num_experts": 4, "ffn_hidden_size": 8},
        "layer_kinds": {
            "hash": {"ffn": {"kind": "moe", "routing": "hash"}},
            "wide": {"ffn": {"kind": "moe", "num_experts": 2, "ffn_hidden_size": 16}},
        },
        "pattern": ["hash", "wide"],
    }  # fmt: skip
    monkeypatch.setitem(checkpoints.ABOUT, "config", {"model": model})
    tensors = {name: torch.rand(shape) for name, shape in model_tensors(model_spec(model)).items()}
    name = "model.layers.0.mlp.router.table"
    tables = {key: (100 * x).long() for key, x in tensors.items() if key.endswith("router.table")}
    source = NativeSource(checkpoints.make(tmp_path / "run", tensors | tables))
    assert check_source(source)[1] == model_tensors(source.model)
    narrow = Selected(source, weights_only=True, dtype=torch.bfloat16)
    found = NativeSource(convert(narrow, NativeSink(tmp_path / "other" / "checkpoints" / "step_00000030")))
    assert torch.equal(found.read(name), tables[name])
    assert found.tensors["model.layers.0.mlp.router.weight"].dtype == torch.bfloat16
    assert found.tensors["model.layers.1.mlp.experts.1.down.weight"].shape == (32, 16)
    one_file = ConsolidatedSource(convert(narrow, ConsolidatedSink(tmp_path / "one file")))
    assert one_file.model == found.model == source.model
    assert one_file.tensors == found.tensors
    both = Averaged([source, source])
    assert torch.equal(both.read(name), tables[name])
    wrong = NativeSource(checkpoints.make(tmp_path / "wrong", tensors))
    with pytest.raises(ValueError, match=r"router.table is torch.float32 \[100, 2\], but its model has integers"):
        check_source(wrong)


def test_a_sink_writes_what_a_run_loads(tmp_path: Path) -> None:
    source = NativeSource(checkpoints.make(tmp_path / "run"))
    path = convert(source, NativeSink(tmp_path / "other" / "checkpoints" / "step_00000030"))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in checkpoints.everything().items()}
    metadata = load(path, loaded)
    assert metadata["step"] == checkpoints.STEP
    assert {key: metadata[key] for key in checkpoints.ABOUT} == checkpoints.ABOUT
    assert metadata["converted_from"] == str(source.path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in checkpoints.everything().items())
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert not (path / "journal").exists()


def test_the_tokenizer_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    about = {**checkpoints.ABOUT["config"], "data": {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}}}
    monkeypatch.setitem(checkpoints.ABOUT, "config", about)
    path = convert(NativeSource(checkpoints.make(tmp_path / "run")), NativeSink(tmp_path / "target"))
    (tmp_path / "tokenizer.json").unlink()
    assert NativeSource(tmp_path / "run").tokenizer_files == []
    (file,) = NativeSource(path).tokenizer_files
    assert file.read_text() == "{}"


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda path: (path / "__0_0.distcp").open("r+b").truncate(5000), r"__0_0\.distcp is truncated"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "no index": (lambda path: (path / ".metadata").unlink(), r"it has no \.metadata"),
    "index": (lambda path: rewrite(path / ".metadata", b"\x80junk"), r"\.metadata is damaged"),
    "no description": (lambda path: (path / "metadata.json").unlink(), r"no metadata\.json"),
    "description": (lambda path: (path / "metadata.json").write_text("{"), r"metadata\.json is truncated"),
    "no model": (lambda path: rewrite(path / "metadata.json", b'{"format_version": 1, "step": 1}'), "config.model"),
    "no checksums": (lambda path: (path / "checksums.json").unlink(), r"checksums\.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = checkpoints.make(tmp_path)
    inflict, message = DAMAGES[damage]
    inflict(path)
    with pytest.raises(ValueError, match=message):
        NativeSource(path)


def test_any_flipped_bit_is_harmless_or_named(tmp_path: Path) -> None:
    """Wherever it is, in headers too: never another value, never an error that does not say where."""
    path, expected = checkpoints.make(tmp_path, {"model.a": torch.arange(12.0)}), torch.arange(12.0)
    file = path / "__0_0.distcp"
    whole, errors = file.read_bytes(), []
    for at in range(0, len(whole), 5):
        flip(file, at)
        try:
            assert torch.equal(NativeSource(path).read("model.a"), expected), at
        except ValueError as error:
            errors.append(str(error))
        file.write_bytes(whole)
    assert len(errors) > 9
    assert all(f"{file} is damaged at model.a" in error for error in errors)


def test_the_tokenizer_of_a_checkpoint_is_verified(tmp_path: Path) -> None:
    files = {"tokenizer/own.model": b"pieces"}
    path = save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(3)}, checkpoints.ABOUT, files=files)
    source = NativeSource(path)
    assert source.tokenizer_files == [path / "tokenizer" / "own.model"]
    convert(source, NativeSink(tmp_path / "target"))
    for folder in (path, tmp_path / "target"):
        copy = folder / "tokenizer" / "own.model"
        assert copy.read_bytes() == b"pieces"
        assert NativeSource(folder).tokenizer_files == [copy]
        flip(copy, 2)
        with pytest.raises(ValueError, match=r"tokenizer/own.model is damaged: its CRC-32 is "):
            NativeSource(folder)
