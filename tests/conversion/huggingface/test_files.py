"""Files of a Hugging Face folder: bit-identical round trips and damage.

The library `safetensors` reads what we write, and we read what it writes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.config import model_spec
from megafp8.conversion.convert import Selected, verify
from megafp8.conversion.flat import differences
from megafp8.conversion.huggingface.names import present_name
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.safetensors_format import read_header
from tests.conversion.checkpoints import convert
from tests.conversion.families import LLAMA, OURS, SMALL, THEIRS, RandomSource, make_model, make_theirs
from tests.conversion.huggingface.test_logits import ALIKE
from tests.marks import slow_but

_NORMS_OF_OLMO_HYBRID = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, through the library, by their present names."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= {present_name(name): x for name, x in load_file(file).items()}
    # OLMo Hybrid's, of which transformers writes others than were published.
    for name, x in _NORMS_OF_OLMO_HYBRID.items():
        found = {key.replace(name, x): tensor for key, tensor in found.items()}
    for stem in [key.removesuffix("q_conv1d.weight") for key in found if key.endswith("linear_attn.q_conv1d.weight")]:
        found[f"{stem}conv1d.weight"] = torch.cat([found.pop(f"{stem}{x}_conv1d.weight") for x in "qkv"])
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


@pytest.mark.parametrize(
    ("name", "known"),
    slow_but(
        [*product(THEIRS, (True, False))],
        *((name, True) for name in THEIRS if name not in ALIKE),
        *product(["llama3", "deepseek-v3"], [False]),
    ),
)
def test_round_trip_is_bit_identical(tmp_path: Path, name: str, known: bool) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    make_theirs(name, torch.bfloat16).save_pretrained(theirs)
    (theirs / "tokenizer.json").write_text('{"this is": "no tokenizer"}') if known else None
    source = HfSource(theirs, vocab_multiple=16)
    assert source.tensors["model.embedding.word.weight"].shape[0] == 112
    source.about = source.about if known else {}
    convert(source, HfSink(ours))
    if not known:
        assert differences(HfSource(ours).model, source.model) == []
        if config(ours)["model_type"] != config(theirs)["model_type"]:
            return  # the family that is written for such a model has other tensors (qwen3_next for qwen3_5_moe_text)
    same_weights(theirs, ours)
    if not known:
        return
    assert config(ours) == {k: v for k, v in config(theirs).items() if k != "dtype"} | {"torch_dtype": "bfloat16"}
    for other in ("tokenizer.json", "generation_config.json"):
        assert (ours / other).read_bytes() == (theirs / other).read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "theirs"], "something was left behind"


def test_layers_of_multi_token_prediction_are_read_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mtp = tmp_path / "theirs", tmp_path / "mtp"
    make_theirs("deepseek-v3", torch.bfloat16).save_pretrained(theirs)
    shutil.copytree(theirs, mtp)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    kept = weights(theirs) | {bias: torch.randn(8)}  # fp32, as in published files
    block = {name.replace(".2.", ".3.", 1): x + 1 for name, x in kept.items() if name.startswith("model.layers.2.")}
    norms = {f"model.layers.3.{name}.weight": torch.randn(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer = block | norms | {"model.layers.3.eh_proj.weight": torch.randn(32, 64)}
    copies = {f"model.layers.3.{name}.weight": torch.ones(1) for name in ("embed_tokens", "shared_head.head")}
    save_file(kept, theirs / "model.safetensors")
    save_file(kept | layer | copies, mtp / "model.safetensors")
    with pytest.raises(ValueError, match=rf"has a tensor model\.layers\.3\.\S+ and {len(layer) + 1} more, which mega"):
        HfSource(mtp)
    for folder in (theirs, mtp):
        (folder / "config.json").write_text(json.dumps(config(mtp) | {"num_nextn_predict_layers": 1}))
    assert HfSource(theirs).model.num_prediction_layers == 0, "transformers does not write them"
    source = HfSource(mtp)
    assert source.tensors.keys() - HfSource(theirs).tensors.keys() == {
        name for name in source.tensors if name.startswith("model.layers.3.")
    }
    assert len(source.tensors) == len(kept) + len(layer)
    for name, there in {
        "embedding_norm": "enorm",
        "projection": "eh_proj",
        "attention.q_up": "self_attn.q_b_proj",
    }.items():
        assert torch.equal(source.read(f"model.layers.3.{name}.weight"), layer[f"model.layers.3.{there}.weight"])
    with caplog.at_level("INFO", "megafp8"):
        convert(source, HfSink(tmp_path / "ours"))
    assert "mtp: the layers of multi-token prediction are left out" in caplog.text
    main = Selected(source, weights_only=True, dtype=None, mtp=False)
    assert verify(main, HfSource(tmp_path / "ours")).tensors == len(kept)
    assert config(tmp_path / "ours")["num_nextn_predict_layers"] == 0
    same_weights(theirs, tmp_path / "ours")


def test_multi_token_prediction_of_nemotron_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = tmp_path / "theirs"
    make_theirs("nemotron-h-latents").save_pretrained(theirs)
    kept = load_file(theirs / "model.safetensors")
    save_file(kept | {"mtp.layers.0.norm.weight": torch.ones(32)}, theirs / "model.safetensors")
    said = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (theirs / "config.json").write_text(json.dumps(config(theirs) | said))
    with caplog.at_level("INFO", "megafp8"):
        convert(HfSource(theirs), HfSink(tmp_path / "ours"))
    assert "the layers of multi-token prediction are left out" in caplog.text
    assert weights(tmp_path / "ours").keys() == kept.keys()
    assert config(tmp_path / "ours")["num_nextn_predict_layers"] == 0


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
    source = RandomSource(model_spec(OURS["gpt2"][1]), tmp_path)
    convert(source, HfSink(tmp_path / "fp32"))
    half = Selected(source, weights_only=True, dtype=torch.bfloat16)
    sink = HfSink(tmp_path / "bf16")
    names = list(sink.begin(half, {}))
    random.Random(1).shuffle(names)
    for name in names:
        sink.write(name, half.read(name))
    sink.finish()
    sink.publish()
    for name, value in weights(tmp_path / "fp32").items():
        assert torch.equal(weights(tmp_path / "bf16")[name], value.bfloat16()), name
    assert config(tmp_path / "bf16")["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4", "kimi-linear", "nemotron-h"])
def test_selection_biases_stay_in_fp32_as_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    half = Selected(HfSource(tmp_path / "theirs"), weights_only=True, dtype=torch.bfloat16)
    ours = convert(half, HfSink(tmp_path / "ours"))
    buffers = {key: x for key, x in theirs.named_buffers() if key.endswith("e_score_correction_bias")}
    loaded = dict(type(theirs).from_pretrained(ours, dtype=torch.bfloat16).named_buffers())
    assert buffers
    assert all(torch.equal(loaded[key], x) for key, x in buffers.items())
    assert [x.dtype for x in weights(ours).values()].count(torch.float32) == len(buffers)


def test_blocks_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomSource(model_spec(OURS["gpt2"][1]), tmp_path)
    convert(source, HfSink(tmp_path / "whole"))
    monkeypatch.setattr("megafp8.conversion.huggingface.sink.BLOCK_BYTES", 300)
    convert(source, HfSink(tmp_path / "blocks"))
    same_weights(tmp_path / "whole", tmp_path / "blocks")


def test_missing_tensors_and_unsupported_models_are_refused(tmp_path: Path) -> None:
    source = RandomSource(model_spec(SMALL), tmp_path)
    del source.tensors["model.layers.1.mlp.up.weight"]
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.1\.mlp\.up\.weight, which its model has"):
        HfSink(tmp_path / "ours").begin(source, {})
    with pytest.raises(ValueError, match=r"no Hugging Face family has this model; .*model\.parallel_block"):
        HfSink(tmp_path / "ours").begin(RandomSource(model_spec(SMALL | {"parallel_block": True}), tmp_path), {})
    assert list(tmp_path.iterdir()) == []


def _file(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def _overwrite(at: int, content: bytes, message: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        with _file(folder).open("r+b") as stream:
            stream.seek(at)
            stream.write(content)
        return message.format(file=_file(folder))

    return damage


def _set(message: str, **keys: Any) -> Callable[[Path], str]:
    """Another config.json for the same weights."""

    def damage(folder: Path) -> str:
        (folder / "config.json").write_text(json.dumps(config(folder) | keys))
        return message.format(folder=folder)

    return damage


def _truncate(folder: Path) -> str:
    file = _file(folder, 1)
    last = max(read_header(file).items(), key=lambda item: item[1].start)[0]
    os.truncate(file, file.stat().st_size - 5)
    return f"{file} is truncated: {last} ends at byte"


def _remove(folder: Path) -> str:
    file = _file(folder, 1)
    file.unlink()
    return f"{file} is missing; by model.safetensors.index.json it holds model."


def _empty(folder: Path) -> str:
    _file(folder).write_bytes(b"")
    return f"{_file(folder)} is damaged or not a safetensors file"


def _swap(folder: Path) -> str:
    shutil.copy(_file(folder, 1), _file(folder))
    return f"{_file(folder)} has no tensor model."


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
    return f"{folder} is not a Hugging Face model: it has no config.json"


def _config_is_no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return f"{folder / 'config.json'} is damaged"


def _of_integers(folder: Path) -> str:
    found = weights(folder) | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}
    _no_weights(folder)
    save_file(found, folder / "model.safetensors")
    return "model.safetensors: model.norm.weight is I8; supported: F64, F32, F16, BF16"


def _unlisted(folder: Path) -> str:
    """A tensor that transformers loads from the file, although the index does not list it."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    assert file in content["weight_map"].values()
    index.write_text(json.dumps(content))
    return f"{folder / file} holds model.norm.weight, which {index.name} does not list there"


def _two_models(folder: Path) -> str:
    save_file(weights(folder), folder / "model.safetensors")
    return f"{folder} has both model.safetensors and model.safetensors.index.json, which are two models"


def _header(content: Any, expected: str) -> Callable[[Path], str]:
    """A file with this header, and four bytes of data."""

    def damage(folder: Path) -> str:
        text = (content if isinstance(content, str) else json.dumps(content)).encode()
        sorted(folder.glob("*.safetensors"))[0].write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        return expected

    return damage


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGES: dict[str, Callable[[Path], str]] = {
    "header": _overwrite(8, b"?", "the header of {file} is damaged: "),
    "header length": _overwrite(0, b"\xff" * 8, "{file} is damaged or not a safetensors file"),
    "another shape": _set(
        "model.layers.0.mlp.gate_proj.weight has shape [48, 32], but [56, 32] by config.json", intermediate_size=56
    ),
    "more layers": _set(
        "{folder} has no tensor model.layers.3.input_layernorm.weight, which config.json requires", num_hidden_layers=4
    ),
    "fewer layers": _set(
        "has a tensor model.layers.2.input_layernorm.weight and 8 more, which megafp8 does not know in a llama model: "
        "model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, ",
        num_hidden_layers=2,
    ),
    "a vocabulary for memory": _set("vocab_size · hidden_size is ", vocab_size=10**12),
    "a vocabulary in floating point": _set("vocab_size = 1000000000000000.0: megafp8 has no such", vocab_size=1e15),
    "layers for hours": _set("num_hidden_layers = 1000000000: megafp8 has no such model", num_hidden_layers=10**9),
    "no number": _set("num_attention_heads", num_attention_heads=[4]),
    "heads for memory": _set("{folder}", num_attention_heads=10**9, num_key_value_heads=10**9, head_dim=2),
    "dims": _header({"x": ONE | {"shape": [1] * 200_000}}, "the entry of x in its header is {'dtype'"),
    "shared bytes": _header({"a": ONE, "b": ONE}, "a and b share bytes"),
    "depth": _header("[" * 100_000, "nested too deeply"),
    "unsupported": _set("{folder}/config.json: sliding_window = 5", sliding_window=5),
} | {
    damage.__name__: damage
    for damage in (_unlisted, _two_models, _truncate, _remove, _empty, _swap, _no_weights, _only_bin, _no_config,
                   _config_is_no_json, _of_integers)
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder: Path, damage: str) -> None:
    expected = DAMAGES[damage](folder)
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


def test_tokenizer_files_that_are_links(folder: Path, tmp_path: Path) -> None:
    """Links out of the folder are refused; those of the cache of Hugging Face's hub are not."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ValueError, match=r"tokenizer.json is a symbolic link to .*/secret, outside its folder"):
        HfSource(folder)
    (folder / "tokenizer.json").unlink()
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    (blobs / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    assert [file.name for file in HfSource(snapshot).tokenizer_files] == ["tokenizer.json", "generation_config.json"]
    (snapshot / "vocab.json").symlink_to("../../../secret")
    with pytest.raises(ValueError, match=r"vocab.json is a symbolic link"):
        HfSource(snapshot)


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


def test_constants_of_xielu_are_written_and_no_other_value_is_read(tmp_path: Path) -> None:
    make_model("Apertus", LLAMA, 1, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    convert(HfSource(tmp_path / "theirs"), HfSink(tmp_path / "ours"))
    same_weights(tmp_path / "theirs", tmp_path / "ours")
    name, file = "model.layers.1.mlp.act_fn.beta", tmp_path / "ours" / "model.safetensors"
    for value, shown in ((torch.tensor(0.25), "0.25"), (torch.zeros(3), "a tensor of shape [3]")):
        save_file(weights(tmp_path / "ours") | {name: value}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=re.escape(f"{name} is {shown}, but 0.5 in every apertus model")):
            HfSource(tmp_path / "ours")


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_an_output_layer_beside_tied_embeddings(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is left out; another tensor, which transformers 5 uses and 4 drops, is refused."""
    monkeypatch.setattr("megafp8.conversion.huggingface.source.BLOCK_BYTES", 300)  # compared in several blocks
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
