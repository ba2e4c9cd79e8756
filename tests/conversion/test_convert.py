"""The conversion loop, the sinks of all formats, and the tool."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megafp8.config import model_spec
from megafp8.conversion import convert
from megafp8.conversion.flat import differences
from megafp8.conversion.formats import FORMATS, open_source
from megafp8.conversion.model import model_tensors
from megafp8.conversion.target import Journal
from tests.conversion import checkpoints
from tests.marks import slow_but
from tools import convert_checkpoint

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the tool; what it printed, and its error where it failed with 2."""

    def call(load: Path, save: Path, to: str, *options: str, fails: bool = False) -> str:
        code = convert_checkpoint.main(["--load", str(load), "--save", str(save), "--to", to, *options])
        out, err = capsys.readouterr()
        assert code == (2 if fails else 0), err
        return err if fails else out

    return call


def check_weights(path: Path, expected: dict[str, torch.Tensor]) -> None:
    source, vocabulary = open_source(path), checkpoints.MODEL.stem.vocab_size
    assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = source.read(name)
        assert (tuple(found.shape), found.dtype) == source.tensors[name]
        if len(tensor) > 100:
            found, tensor = found[:vocabulary], tensor[:vocabulary]
        assert torch.equal(found, tensor), name


# Each format is written from one other format and read for another.
RING = list(zip(checkpoints.FORMATS, [*checkpoints.FORMATS[1:], checkpoints.FORMATS[0]]))


@pytest.mark.parametrize(
    ("second", "first"), slow_but(itertools.product(checkpoints.FORMATS, checkpoints.FORMATS), *RING)
)
def test_all_pairs_of_formats(tmp_path: Path, run: Run, first: str, second: str) -> None:
    checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "a", first, "--weights-only", "--verify")
    printed = run(tmp_path / "a", tmp_path / "b", second, "--verify")
    run(tmp_path / "b", tmp_path / "c", "native", "--verify", "--from", second)
    for name in "abc":
        check_weights(tmp_path / name, checkpoints.weights())
    assert "21 tensors, 0.00 GB in" in printed
    assert "equal to" in printed
    assert not differences(open_source(tmp_path / "c").model, checkpoints.MODEL)


def test_native_to_native_keeps_everything(tmp_path: Path, run: Run) -> None:
    path = checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "a", "native", "--verify")
    source, target = open_source(path), open_source(tmp_path / "a")
    assert target.tensors == source.tensors
    assert all(torch.equal(target.read(name), source.read(name)) for name in source.tensors)


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_another_dtype(tmp_path: Path, run: Run, format: str) -> None:
    checkpoints.make(tmp_path / "run", checkpoints.weights(torch.float32))
    run(tmp_path / "run", tmp_path / "a", format, "--dtype", "bf16", "--verify")
    check_weights(tmp_path / "a", checkpoints.weights(torch.bfloat16))


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_tensors_that_training_keeps_in_fp32_are_not_rounded(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    model = {**checkpoints.MODEL.keys} | {
        "moe": {
            "num_experts": 4, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 16, "score": "sigmoid",
            "selection_bias": True,
        },
    }  # fmt: skip
    monkeypatch.setitem(checkpoints.ABOUT, "config", {"model": model})
    shapes = model_tensors(model_spec(model))
    expected = {name: checkpoints.value(name, shape, torch.float32) for name, shape in shapes.items()}
    biases = [name for name in expected if name.endswith("router.bias")]
    assert len(biases) == 2
    expected |= {name: 6.8 + expected[name] / 100 for name in biases}  # bf16 has a step of 0.03 there
    checkpoints.make(tmp_path / "run", expected)
    printed = run(tmp_path / "run", tmp_path / "a", format, "--dtype", "bf16", "--verify")
    assert f"with {len(expected) - 2} of its tensors rounded to bf16" in printed
    check_weights(tmp_path / "a", {name: x if name in biases else x.bfloat16() for name, x in expected.items()})


def test_safetensors_reads_a_consolidated_file(tmp_path: Path, run: Run) -> None:
    checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "a", "consolidated")
    found = load_file(tmp_path / "a" / "consolidated.safetensors")
    assert found.keys() == checkpoints.weights().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in checkpoints.weights().items())


class Interrupted(Exception):
    pass


def interrupt(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Let a conversion end after its third tensor."""

    class Stopping(convert.Selected):
        count = 0

        def read(self, name: str) -> torch.Tensor:
            self.count += 1
            if self.count > 3:
                raise Interrupted
            return super().read(name)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "Selected", Stopping)
        with pytest.raises(Interrupted):
            call()


def other_source(folder: Path) -> tuple[Path, list[str]]:
    checkpoints.make(folder / "other")
    return folder / "other", []


def newer_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    shutil.copytree(folder / "run/checkpoints/step_00000030", folder / "run/checkpoints/step_00000031")
    return folder / "run", []


def touched(folder: Path) -> tuple[Path, list[str]]:
    (folder / "run/checkpoints/step_00000030/__0_0.distcp").touch()
    return folder / "run", []


class Change(NamedTuple):
    make: Callable[[Path], tuple[Path, list[str]]]
    says: str


CHANGES = {
    "source": Change(other_source, "source was"),
    "step": Change(newer_checkpoint, "step_00000030 and is"),
    "files": Change(touched, "source_files was"),
    "dtype": Change(lambda folder: (folder / "run", ["--dtype", "fp32"]), "dtype was None and is fp32"),
    "weights": Change(lambda folder: (folder / "run", ["--weights-only"]), "weights_only was False and is True"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_half_done_target_refuses_another_conversion(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    checkpoints.make(tmp_path / "run")
    target = tmp_path / "target"
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "seconds", 0)
    interrupt(monkeypatch, lambda: run(tmp_path / "run", target, "native"))
    assert not target.exists()
    source, options = CHANGES[change].make(tmp_path)
    said = run(source, target, "native", *options, fails=True)
    assert "contains another unfinished conversion" in said
    assert CHANGES[change].says in said
    assert not target.exists()


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_an_interrupted_sink_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Whatever was safe is not asked for again, nobody else may write meanwhile, and nothing else is continued."""
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "seconds", 0)
    checkpoints.make(tmp_path / "run", checkpoints.weights())
    source, target = open_source(tmp_path / "run"), tmp_path / "target"
    left: list[str] = []
    for done in (0, 1, 12):
        sink = FORMATS[format].sink(target)
        names = list(sink.begin(source, {"dtype": None}))
        left = left or names
        assert names == left
        for name in left[:done]:
            sink.write(name, source.read(name))
        with pytest.raises(ValueError, match="written by another process"):
            FORMATS[format].sink(target).begin(source, {"dtype": None})
        sink._journal._stream.close()  # as at the end of its process
        assert not target.exists()
        left = left[done:]
    with pytest.raises(ValueError, match=r"another unfinished conversion: dtype was None and is fp32\. Repeat that"):
        FORMATS[format].sink(target).begin(source, {"dtype": "fp32"})
    sink = FORMATS[format].sink(target)
    assert list(sink.begin(source, {"dtype": None})) == left
    for name in left:
        sink.write(name, source.read(name))
    for _ in range(2):  # killed before it was published
        sink.finish()
        sink._journal._stream.close()
        sink = FORMATS[format].sink(target)
        assert list(sink.begin(source, {"dtype": None})) == []
    sink.finish()
    sink.publish()
    check_weights(target, checkpoints.weights())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "target"]


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_an_empty_folder_is_filled_and_anything_else_left_alone(tmp_path: Path, run: Run, format: str) -> None:
    checkpoints.make(tmp_path / "run")
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("precious")
    said = run(tmp_path / "run", target, format, fails=True)
    assert f"{target} already exists and is not an empty folder; nothing was overwritten" in said
    with pytest.raises(ValueError, match="already exists and is not an empty folder"):  # without the tool as well
        FORMATS[format].sink(target).begin(open_source(tmp_path / "run"), {})
    assert (target / "precious").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "target"]
    assert "already exists" in run(tmp_path / "run", target / "precious", format, fails=True)

    (target / "precious").unlink()
    run(tmp_path / "run", target, format, "--weights-only", "--verify")
    check_weights(target, checkpoints.weights())
    assert "already exists and is not an empty folder" in run(tmp_path / "run", target, format, fails=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "target"]


def test_a_target_in_its_source_is_refused(tmp_path: Path, run: Run) -> None:
    path = checkpoints.make(tmp_path)
    assert "is inside its source" in run(tmp_path, path / "target", "native", fails=True)
    run(tmp_path, tmp_path / "target", "native")  # beside it in the run's folder is fine


def test_a_full_disk_is_seen_before(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make(tmp_path / "run")
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=10**6))
    said = run(tmp_path / "run", tmp_path / "target", "native", fails=True)
    assert f"{tmp_path} has 0.00 GB free, but 0.07 GB are needed" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format", ["hf", "megatron"])
def test_a_full_disk_is_noticed_when_files_are_allocated(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints.make(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        said = run(tmp_path / "run", tmp_path / "target", format, fails=True)
    assert re.search(rf"No space left on device: [\d,]+ bytes are needed for {tmp_path}/\.target\.converting/", said)
    assert not (tmp_path / "target").exists()
    run(tmp_path / "run", tmp_path / "target", format, "--verify")


def test_unknown_formats_are_refused(tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, tmp_path / "target", "hf", fails=True)
    assert "has no known format" in said
    assert all(f"{name}: {one.sign}" in said for name, one in FORMATS.items())
    assert "there is no" in run(tmp_path / "nothing", tmp_path / "target", "hf", fails=True)


def test_a_difference_is_found(tmp_path: Path) -> None:
    checkpoints.make(tmp_path / "a")
    other = checkpoints.everything()
    other["model.layers.1.mlp.up.weight"][5, 7] += 1
    checkpoints.make(tmp_path / "b", other)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up\.weight"):
        convert.verify(open_source(tmp_path / "a"), open_source(tmp_path / "b"))
    other = checkpoints.everything()
    other["model.output.weight"][100:] += 1  # past the vocabulary
    checkpoints.make(tmp_path / "c", other)
    convert.verify(open_source(tmp_path / "a"), open_source(tmp_path / "c"))


def test_another_model_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make(tmp_path / "a")
    model = {**checkpoints.MODEL.keys, "rope_theta": 5.0}
    monkeypatch.setitem(checkpoints.ABOUT, "config", {"model": model})
    checkpoints.make(tmp_path / "b")
    with pytest.raises(ValueError, match=r"rope_theta is 5\.0, not 10000\.0"):
        convert.verify(open_source(tmp_path / "a"), open_source(tmp_path / "b"))


def damage(path: Path) -> tuple[Path, str]:
    """Flip a bit of a weight, wherever the format keeps it; the file and the tensor."""
    pattern = checkpoints.weights()["model.layers.1.mlp.down.weight"].view(torch.uint8).numpy().tobytes()
    for file in path.rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(pattern)) >= 0:
            content = bytearray(file.read_bytes())
            content[at + 5] ^= 1
            file.write_bytes(content)
            return file, "model.layers.1.mlp.down.weight"
    raise AssertionError("not found")


ESCAPE = "\x1b]0;owned\x07\x1b[2J"
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a name": ({ESCAPE: 0}, {}, r"is damaged: the entry of '\x1b]0;owned\x07\x1b[2J' in its header is {'dtype'"),
    "many names": ({f"x{i}": 0 for i in range(20_000)}, {}, "has a tensor x0 and 19,999 more, which megafp8 does"),
    "a key": ({}, {ESCAPE: 1}, r"'\x1b]0;owned\x07\x1b[2J' = 1: megafp8 does not know this key of llama models"),
    "many keys": ({}, {f"k{i}": "y" * 1000 for i in range(1000)}, "and 995 more: megafp8 does not know these keys of"),
    "a value": ({}, {"quantization_config": {"quant_method": "fp8", "fmt": "z" * 10**6}}, "fmt = 'zzz"),
    "a kind": ({}, {"model_type": "z" * 10**6}, "model_type = 'zzz"),
}
"""Tensors of no values and keys of config.json that are added to a folder, and what the error says."""


@pytest.mark.parametrize("foreign", FOREIGN)
def test_errors_quote_files_of_others_in_short_and_without_control_characters(
    tmp_path: Path, run: Run, foreign: str
) -> None:
    names, keys, message = FOREIGN[foreign]
    checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(json.loads(content[8:end]) | dict.fromkeys(names, nothing)).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    error = run(tmp_path / "hf", tmp_path / "native", "native", fails=True)
    assert message in error
    assert error.strip().isprintable()
    assert len(error) < 3000


@pytest.mark.parametrize("format", ["native", "megatron", "consolidated"])
def test_a_flipped_bit_of_the_source_is_named(tmp_path: Path, run: Run, format: str) -> None:
    checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "a", format)
    file, name = damage(tmp_path / "a")
    said = run(tmp_path / "a", tmp_path / "b", "hf", fails=True)
    assert f"{file} is damaged at {name}" in said
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_a_cut_or_missing_file_is_named(tmp_path: Path, run: Run, format: str) -> None:
    checkpoints.make(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "a", format)
    largest = max((file for file in (tmp_path / "a").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
    with largest.open("r+b") as stream:
        stream.truncate(largest.stat().st_size - 100)
    said = run(tmp_path / "a", tmp_path / "b", "native", "--from", format, fails=True)
    assert f"{largest} is truncated" in said or f"{largest} is damaged" in said
    largest.unlink()
    assert largest.name in run(tmp_path / "a", tmp_path / "b", "native", "--from", format, fails=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "run"]


def test_a_layout_is_refused_for_other_formats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert_checkpoint.main(["--load", "a", "--save", "b", "--to", "hf", "--tensor", "2"])
    assert "the format hf has no such option" in capsys.readouterr().err


def test_megatrons_options(tmp_path: Path, run: Run) -> None:
    checkpoints.make(tmp_path / "run")
    layout = ["--tensor", "2", "--pipeline", "2", "--transformer-impl", "local"]
    run(tmp_path / "run", tmp_path / "a", "megatron", "--verify", *layout)
    assert len(list((tmp_path / "a").glob("iter_0000030/mp_rank_*"))) == 4
    run(tmp_path / "a", tmp_path / "b", "native", "--verify", "--vocab-size", "100")
    check_weights(tmp_path / "b", checkpoints.weights())
    assert "vocab_size is for megatron" in run(
        tmp_path / "run", tmp_path / "c", "native", "--vocab-size", "9", fails=True
    )
    said = run(tmp_path / "run", tmp_path / "c", "megatron", "--tensor", "3", fails=True)
    assert "TP 3 does not divide" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "run"]
