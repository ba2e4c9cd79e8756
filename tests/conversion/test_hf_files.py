"""Files of a Hugging Face folder: bit-identical round trips, kills in the middle, damage, what is left alone.

What we write is read by the library `safetensors`, and what the library writes is read by us.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.config import ModelConfig
from megafp8.conversion.base import Source
from megafp8.conversion.hf_config import differences
from megafp8.conversion.hf_sink import HfSink
from megafp8.conversion.hf_source import HfSource
from megafp8.conversion.safetensors_format import read_header
from tests.conversion.families import OURS, SMALL, THEIRS, RandomSource, make_theirs
from tests.conversion.test_hf_logits import convert
from tests.quickstart_data import ROOT


class Whole(Source):
    """All tensors of a source, in memory: what a checkpoint of our own holds."""

    def __init__(self, source: Source, about: dict[str, Any]) -> None:
        self.path, self.model, self.tensors = source.path, source.model, source.tensors
        self.about, self.tokenizer_files = about, source.tokenizer_files
        self._values = {name: source.read(name) for name in source.tensors}

    def read(self, name: str) -> Tensor:
        return self._values[name]


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, through the library."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same_weights(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def config(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of theirs in several files."""
    make_theirs("llama3", torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return tmp_path / "theirs"


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("known", [True, False], ids=["their-config", "our-config"])
def test_round_trip_is_bit_identical(tmp_path: Path, name: str, known: bool) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    make_theirs(name, torch.bfloat16).save_pretrained(theirs)
    (theirs / "tokenizer.json").write_text('{"this is": "no tokenizer"}') if known else None
    source = HfSource(theirs, vocab_multiple=16)
    assert source.tensors["model.embedding.word.weight"].shape[0] == 112
    convert(Whole(source, dict(source.about) if known else {}), HfSink(ours))
    same_weights(theirs, ours)
    if not known:
        assert differences(HfSource(ours).model, source.model) == []
        return
    assert config(ours) == {k: v for k, v in config(theirs).items() if k != "dtype"} | {"torch_dtype": "bfloat16"}
    for other in ("tokenizer.json", "generation_config.json"):
        assert (ours / other).read_bytes() == (theirs / other).read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "theirs"], "something was left behind"


def test_padding_is_zeros_and_rows_are_rows_of_the_whole(tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path)
    source = HfSource(tmp_path, vocab_multiple=64)
    table = source.read("model.embedding.word.weight")
    assert table.shape == (128, 32)
    assert not table[101:].any()
    for name, info in source.tensors.items():
        whole, rows = source.read(name), info.shape[0]
        assert whole.shape == info.shape
        assert whole.is_contiguous()
        for first, last in ((0, 1), (rows // 2, rows), (rows - 3, rows - 1), (rows // 3, rows - 2)):
            assert torch.equal(source.read_rows(name, first, last), whole[first:last]), (name, first, last)


def test_another_dtype_and_any_order(tmp_path: Path) -> None:
    source = RandomSource(ModelConfig(**OURS["gpt2"][1]), tmp_path)
    sink = HfSink(tmp_path / "ours", dtype=torch.bfloat16)
    names = list(sink.begin(source))
    random.Random(1).shuffle(names)
    for name in names:
        sink.write(name, source.read(name))
    sink.finish()
    convert(source, HfSink(tmp_path / "fp32"))
    for name, value in weights(tmp_path / "fp32").items():
        assert torch.equal(weights(tmp_path / "ours")[name], value.bfloat16()), name
    assert config(tmp_path / "ours")["torch_dtype"] == "bfloat16"


def test_blocks_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomSource(ModelConfig(**OURS["gpt2"][1]), tmp_path)
    convert(source, HfSink(tmp_path / "whole"))
    monkeypatch.setattr("megafp8.conversion.hf_sink.BLOCK_BYTES", 300)
    convert(source, HfSink(tmp_path / "blocks"))
    same_weights(tmp_path / "whole", tmp_path / "blocks")


def test_a_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = RandomSource(ModelConfig(**OURS["gpt2"][1]), tmp_path)
    convert(source, HfSink(tmp_path / "straight"))
    sink = HfSink(tmp_path / "ours")
    names = list(sink.begin(source))
    for name in names[:9]:
        sink.write(name, source.read(name))
    with pytest.raises(ValueError, match="written by another process"):
        HfSink(tmp_path / "ours").begin(source)
    sink._journal.close()
    assert not (tmp_path / "ours").exists()

    sink = HfSink(tmp_path / "ours")
    assert list(sink.begin(source)) == names[9:]
    sink._journal.close()
    other = HfSink(tmp_path / "ours", dtype=torch.bfloat16)  # something else: it begins anew, and so does the first
    assert list(other.begin(source)) == names
    other._journal.close()
    convert(source, HfSink(tmp_path / "ours"))
    same_weights(tmp_path / "straight", tmp_path / "ours")


KILLED = """
import os, signal, sys
from pathlib import Path
from megafp8.config import ModelConfig
from megafp8.conversion.hf_sink import HfSink
from tests.conversion.families import OURS, RandomSource
folder, most = Path(sys.argv[1]), int(sys.argv[2])
source, sink = RandomSource(ModelConfig(**OURS["gpt2"][1]), folder), HfSink(folder / "ours")
left = list(sink.begin(source))
print(len(left), flush=True)
sink._journal.seconds = 0.0
for i, name in enumerate(left):
    if i == most:
        os.kill(os.getpid(), signal.SIGKILL)
    sink.write(name, source.read(name))
sink.finish()
"""


def test_killed_it_loses_nothing_that_was_safe(tmp_path: Path) -> None:
    source = RandomSource(ModelConfig(**OURS["gpt2"][1]), tmp_path)
    convert(source, HfSink(tmp_path / "straight"))
    left = len(source.tensors)
    for most in (left - 7, 100):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(most)]
        process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.returncode == (-signal.SIGKILL if most < left else 0)
        assert int(process.stdout) == left
        assert (tmp_path / "ours").exists() == (most >= left)
        left -= most
    same_weights(tmp_path / "straight", tmp_path / "ours")


@pytest.mark.parametrize("what", ["a file", "a folder with something in it"])
def test_what_is_there_is_left_alone(tmp_path: Path, what: str) -> None:
    target = tmp_path / "ours"
    kept = target if what == "a file" else target / "precious"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    with pytest.raises(ValueError, match="exists already and is no empty folder; nothing was overwritten"):
        HfSink(target).begin(RandomSource(ModelConfig(**SMALL), tmp_path))
    assert kept.read_text() == "precious"
    assert [f.name for f in tmp_path.iterdir()] == ["ours"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    convert(RandomSource(ModelConfig(**SMALL), tmp_path), HfSink(tmp_path / "ours"))
    assert HfSource(tmp_path / "ours").model.hidden_size == SMALL["hidden_size"]


def test_a_source_that_lacks_something_or_is_of_no_family(tmp_path: Path) -> None:
    source = RandomSource(ModelConfig(**SMALL), tmp_path)
    del source.tensors["model.layers.1.mlp.up.weight"]
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.1\.mlp\.up\.weight, which its model has"):
        HfSink(tmp_path / "ours").begin(source)
    with pytest.raises(ValueError, match=r"no Hugging Face family has this model; .*model\.parallel_block"):
        HfSink(tmp_path / "ours").begin(RandomSource(ModelConfig(**SMALL, parallel_block=True), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: [\d,]+ bytes are needed"):
        HfSink(tmp_path / "ours").begin(RandomSource(ModelConfig(**SMALL), tmp_path))
    assert not (tmp_path / "ours").exists()


def _truncate(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[1]
    last = max(read_header(file).items(), key=lambda item: item[1].start)[0]
    os.truncate(file, file.stat().st_size - 5)
    return f"{file} is truncated: {last} ends at byte"


def _remove(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    return f"{file} is missing; model.safetensors.index.json says that it holds model."


def _spoil_header(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    with file.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"?")
    return f"the header of {file} is damaged: "


def _spoil_length(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 8)
    return f"{file} is no safetensors file, or damaged"


def _empty(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(b"")
    return f"{file} is no safetensors file, or damaged"


def _swap(folder: Path) -> str:
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    shutil.copy(two, one)
    return f"{one} has no tensor model."


def _no_weights(folder: Path) -> str:
    for file in folder.glob("model*"):
        file.unlink()
    return f"{folder} has neither model.safetensors nor model.safetensors.index.json"


def _only_bin(folder: Path) -> str:
    _no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    return f"{folder} has its weights in pytorch_model.bin, a pickle"


def _no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"{folder} is no Hugging Face model: it has no config.json"


def _config_is_no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return f"{folder / 'config.json'} is damaged"


def _another_shape(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config(folder) | {"intermediate_size": 56}))
    return "model.layers.0.mlp.gate_proj.weight has shape [48, 32], and [56, 32] by config.json"


def _more_layers(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config(folder) | {"num_hidden_layers": 4}))
    return f"{folder} has no tensor model.layers.3.input_layernorm.weight, which config.json promises"


def _fewer_layers(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config(folder) | {"num_hidden_layers": 2}))
    return (
        "has a tensor model.layers.2.input_layernorm.weight and 8 more, which no llama model of ours has: "
        "model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, "
    )


def _of_integers(folder: Path) -> str:
    found = weights(folder)
    _no_weights(folder)
    found["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    save_file(found, folder / "model.safetensors")
    return "model.safetensors: model.norm.weight is I8; supported: F64, F32, F16, BF16"


def _unsupported(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config(folder) | {"attention_bias": True}))
    return f"{folder / 'config.json'}: attention_bias = True"


def _unlisted(folder: Path) -> str:
    """A tensor that transformers loads from the file, although the index does not list it."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    assert file in content["weight_map"].values()
    index.write_text(json.dumps(content))
    return f"{folder / file} holds model.norm.weight, and {index.name} does not say so"


def _two_models(folder: Path) -> str:
    save_file(weights(folder), folder / "model.safetensors")
    return f"{folder} has both model.safetensors and model.safetensors.index.json, which are two models"


@pytest.mark.parametrize(
    "damage",
    [_unlisted, _two_models, _truncate, _remove, _spoil_header, _spoil_length, _empty, _swap, _no_weights, _only_bin,
     _no_config, _config_is_no_json, _another_shape, _more_layers, _fewer_layers, _of_integers, _unsupported],
)  # fmt: skip
def test_damage_is_named(folder: Path, damage: Any) -> None:
    expected = damage(folder)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        HfSource(folder)
    assert expected in str(caught.value)


def test_a_file_cut_off_after_the_start(folder: Path) -> None:
    source = HfSource(folder)
    file = sorted(folder.glob("*.safetensors"))[-1]
    name = max(read_header(file).items(), key=lambda item: item[1].start)[0]
    os.truncate(file, file.stat().st_size - 5)
    assert name == "lm_head.weight"
    with pytest.raises(ValueError, match=r"is truncated in the middle of lm_head\.weight"):
        source.read("model.output.weight")


@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_files_without_the_base_models_prefix_and_with_buffers(tmp_path: Path, name: str) -> None:
    make_theirs(name).save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "bare")
    prefix = "model." if name == "llama2" else "transformer."
    bare = {key.removeprefix(prefix): value for key, value in weights(tmp_path / "whole").items()}
    buffer = "layers.0.self_attn.rotary_emb.inv_freq" if name == "llama2" else "h.0.attn.bias"
    save_file(bare | {buffer: torch.ones(3)}, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    one, other = HfSource(tmp_path / "whole"), HfSource(tmp_path / "bare")
    assert one.tensors == other.tensors
    assert all(torch.equal(one.read(n), other.read(n)) for n in one.tensors)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_an_output_layer_beside_tied_embeddings(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is left out; another tensor, which transformers 5 uses and 4 drops, is refused."""
    monkeypatch.setattr("megafp8.conversion.hf_source.BLOCK_BYTES", 300)  # compared in several blocks
    make_theirs(name).save_pretrained(tmp_path)
    alone = HfSource(tmp_path).tensors
    found = weights(tmp_path)
    embedding = found["model.embed_tokens.weight" if name == "llama-tied" else "transformer.wte.weight"]
    save_file(found | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert HfSource(tmp_path).tensors == alone

    output = embedding.clone()
    output[-1, -1] += 1e-3
    for other in (output, output[:-1].clone()):
        save_file(found | {"lm_head.weight": other}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ValueError, match=r"tie_word_embeddings = true, but lm_head\.weight in .* is not .*Set tie_"
        ):
            HfSource(tmp_path)

    import transformers

    save_file(found | {"lm_head.weight": output}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, output), "transformers ties: the error message is wrong"
    (tmp_path / "config.json").write_text(json.dumps(config(tmp_path) | {"tie_word_embeddings": False}))
    assert torch.equal(HfSource(tmp_path).read_rows("model.output.weight", 0, len(output)), output)
