"""FP8 folders of runs: every byte against the FP8 weights that the live trainer computes with.

The reader here is one of its own: safetensors' `load_file`, and a scale for each element.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.checkpoint import latest
from megafp8.config import Config
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.convert import Selected, verify
from megafp8.conversion.format_names import Activations, FormName
from megafp8.conversion.formats import open_source
from megafp8.conversion.huggingface.quantized_export import Expected, QuantizedExport
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.layers.linear_weights import linear_weights
from megafp8.linear.group_state import states_of
from megafp8.numerics.tensor import expand
from megafp8.parallel.sharding import spec_of
from megafp8.training.quantized_export import config_of_run, quantized_export
from megafp8.training.state import checkpoint_folder, save_state
from tests.conversion.checkpoints import convert
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import start, steps_of
from tests.world import World
from tools.convert_checkpoint import main

BF16 = {"precision": "bf16"}
ALIGNED = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 384}
"""A model whose matrices and shards, on up to one rank, are of whole blocks."""
HALVED = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 512}
"""The same on two tensor-parallel ranks."""
FEW_EXPERTS = {"moe": {"num_experts": 3, "top_k": 2, "ffn_hidden_size": 32}}


class Trained(NamedTuple):
    """A rank's shard of a weight as its GEMMs read it: E4M3 bytes and the scale_inv of each element."""

    name: str
    offset: tuple[int, ...]
    data: Tensor
    scale_inv: Tensor


def _trained(config: Config, folder: str) -> list[Trained]:
    """Trains two steps and saves; the FP8 weights of the next forward pass."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    save_state(trainer, Path(folder), 2, None)
    shards: list[Trained] = []
    for weight, state in (pair for stage in trainer.stages for pair in linear_weights(stage)):
        states = states_of(state)
        rows = weight.shape[0] // len(states)
        for i, layer in enumerate(states):
            if not layer.plan.fp8:
                continue
            of_layer = weight.detach()[i * rows : (i + 1) * rows]
            with trainer.fp8.recording(False):
                data, scale_inv, granularity, _ = layer.fp8_weight(of_layer, columnwise=False).required_rowwise
            scales = expand(scale_inv, granularity, *data.shape).expand(data.shape)
            for shard in spec_of(weight).shards:
                if i * rows <= shard.row < (i + 1) * rows:
                    own = slice(shard.row - i * rows, shard.row - i * rows + shard.shape[0])
                    bits = data[own].view(torch.uint8).clone()
                    shards.append(Trained(f"model.{shard.name}", shard.offset, bits, scales[own].clone()))
    return shards


class TrainedRuns:
    """Runs of this module by config and number of ranks, each trained once, and the folder with its checkpoint."""

    def __init__(self, world: World, factory: pytest.TempPathFactory) -> None:
        self._world, self._factory = world, factory
        self._runs: dict[tuple[str, int], tuple[list[Trained], Path]] = {}

    def __call__(self, config: Config, ranks: int = 1) -> tuple[list[Trained], Path]:
        """Return the shards of all ranks and the folder."""
        key = config.model_dump_json(), ranks
        if key not in self._runs:
            folder = self._factory.mktemp("run")
            by_rank = self._world.run(_trained, config, str(folder), ranks=ranks)
            self._runs[key] = [shard for rank in by_rank for shard in rank], folder
        return self._runs[key]


@pytest.fixture(scope="module")
def trained_runs(world2: World, tmp_path_factory: pytest.TempPathFactory) -> TrainedRuns:
    return TrainedRuns(world2, tmp_path_factory)


def _checkpoint(folder: Path) -> Path:
    newest = latest(checkpoint_folder(folder))
    assert isinstance(newest, Path)
    return newest


def _export(
    folder: Path, output: Path, form: FormName, activations: Activations | None = None
) -> tuple[Path, QuantizedExport, CheckpointSource]:
    """Convert the checkpoint in `folder` as with --quantization, verify the result, and read it back."""
    whole = open_source(_checkpoint(folder))
    export = quantized_export(whole, form, activations)
    source = Selected(whole, weights_only=True, dtype=None, mtp=False)
    sink = HfSink(output / form, quantized=export, file_bytes=300_000)
    convert(source, sink)
    read = HfSource(sink.path, vocab_multiple=64)
    verify(Expected(source, export), read)
    return sink.path, export, read


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def _element_scales(stored: dict[str, Tensor], name: str) -> Tensor:
    """The scale of each element of a weight in a folder."""
    n, k = stored[name].shape
    if f"{name}_scale_inv" in stored:
        scale = stored[f"{name}_scale_inv"]
        assert scale.shape == (-(-n // 128), -(-k // 128))
        return scale[torch.arange(n) // 128][:, torch.arange(k) // 128]
    scale = stored[f"{name}_scale"]
    assert scale.shape in ((1,), (n, 1))
    return scale.expand(n, k)


def _compare(export: QuantizedExport, folder: Path, shards: list[Trained]) -> set[str]:
    """Compare all that is said to be training's; the weights that were compared."""
    stored, compared = _stored(folder), set()
    exported = {name: x.pieces for name, x in export.weights.items() if not x.why_not}
    ours = {name: (theirs, piece.rows) for theirs, pieces in exported.items() for name, piece in pieces.items()}
    for name, offset, data, scale_inv in shards:
        if name not in ours:
            continue
        theirs, rows = ours[name]
        own = rows[offset[0] : offset[0] + len(data)]
        columns = slice(offset[1], offset[1] + data.shape[1])
        bits, scales = stored[theirs].view(torch.uint8), _element_scales(stored, theirs)
        assert torch.equal(bits[own, columns], data), f"{name}: data"
        assert torch.equal(scales[own, columns], scale_inv), f"{name}: scales"
        compared.add(name)
    return compared


CASES: list[tuple[Preset, FormName, dict[str, Any], bool]] = [
    (BLOCKWISE, "fp8-block", ALIGNED, True),
    (BLOCKWISE | TP2, "fp8-block", HALVED, True),
    (BLOCKWISE | TP2, "fp8-block", ALIGNED | {"num_query_groups": 2}, False),
    (DELAYED, "fp8-tensor", {}, True),
    (DELAYED | TP2, "fp8-channel", {}, True),
    (DELAYED, "fp8-block", ALIGNED, True),
    (CURRENT, "fp8-tensor", {}, True),
    (CURRENT | TP2, "fp8-tensor", {}, True),
    (CURRENT, "fp8-block", ALIGNED, True),
    (STATIC, "fp8-tensor", {}, True),
    (ROWWISE, "fp8-channel", {}, True),
    (ROWWISE | TP2, "fp8-channel", {}, False),
    (ROWWISE, "fp8-tensor", {}, False),
    (CURRENT | MOE, "fp8-tensor", FEW_EXPERTS, True),
    (BLOCKWISE | MOE | WIDE, "fp8-block", FEW_EXPERTS, False),
    (ZERO | DP2 | FP8_GATHER | CURRENT, "fp8-tensor", {}, True),
]


@pytest.mark.parametrize(("preset", "form", "model", "all_trained"), CASES)
def test_folders_hold_what_training_computes_with(
    trained_runs: TrainedRuns, tmp_path: Path, preset: Preset, form: FormName, model: dict[str, Any], all_trained: bool
) -> None:
    config = config_of(preset, model=model, training=BF16)
    shards, run = trained_runs(config, preset.ranks)
    folder, export, read = _export(run, tmp_path, form)
    compared = _compare(export, folder, shards)
    assert (compared == {x.name for x in shards}) is all_trained
    assert compared or not all_trained
    for name in {x.name for x in shards}:
        error = (read.read(name) - open_source(_checkpoint(run)).read(name).float()).abs().max()
        assert 0 < error < 0.1


# --- their own readers, what is said, and what is refused -------------------------------------------------------------


def _model_of(folder: Path, form: FormName) -> Any:
    """The folder as transformers loads it on a CPU: dequantized."""
    import transformers

    options: dict[str, Any] = {}
    if form != "fp8-block":
        pytest.importorskip("compressed_tensors")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        (BLOCKWISE, "fp8-block"),
        (BLOCKWISE | MOE | WIDE, "fp8-block"),
        (DELAYED, "fp8-tensor"),
        (ROWWISE, "fp8-channel"),
    ],
)
def test_transformers_loads_the_same_weights(
    trained_runs: TrainedRuns, tmp_path: Path, preset: Preset, form: FormName
) -> None:
    """Its quantizers of finegrained FP8 and compressed-tensors against our reading, bit for bit; so are the logits."""
    import transformers

    model = {} if MOE in preset else ALIGNED
    if MOE in preset:
        model = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128}}
    _, run = trained_runs(config_of(preset, model=model, training=BF16))
    folder, _, read = _export(run, tmp_path, form)
    plain = convert(Selected(read, weights_only=True, dtype=torch.float32), HfSink(tmp_path / "plain"))
    theirs, ours = _model_of(folder, form), transformers.AutoModelForCausalLM.from_pretrained(plain)
    loaded, expected = theirs.state_dict(), ours.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].float(), x.float()) for name, x in expected.items())
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_what_is_left_out_follows_the_run(world2: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preset = config_of(DELAYED, model=ALIGNED, training=BF16, fp8={"recipe": "delayed", "exclude": ["*.0.mlp.down"]})
    world2.run(_trained, preset, str(tmp_path), ranks=1)
    with caplog.at_level(logging.INFO):
        folder, export, _ = _export(tmp_path, tmp_path, "fp8-tensor")
    stored = _stored(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype is torch.bfloat16
    assert stored["model.layers.1.mlp.down_proj.weight"].dtype is torch.float8_e4m3fn
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    checkpoint = open_source(_checkpoint(tmp_path))
    for module, layer in (("self_attn.k_proj", "attention.qkv"), ("mlp.down_proj", "mlp.down")):
        scale = checkpoint.read(f"fp8.layers.1.{layer}.input.scale")
        assert torch.equal(stored[f"model.layers.1.{module}.input_scale"], scale.reciprocal().view(1))
    assert "13 of 13 tensors have training's data and scales" in caplog.text
    assert export.activations == "static"
    dynamic, *_ = _export(tmp_path, tmp_path, "fp8-channel", "dynamic")
    assert not any(name.endswith("input_scale") for name in _stored(dynamic))


def test_what_training_does_not_say_follows_the_rule(
    world2: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run in bf16: 448 / amax of each block of the folder's, with its own formula."""
    world2.run(_saved, config_of(NONE, model=ALIGNED, training=BF16), str(tmp_path), ranks=1)
    with caplog.at_level(logging.INFO):
        folder, *_ = _export(tmp_path, tmp_path, "fp8-block")
    assert "14 tensors are quantized by the rule amax: fp8.recipe is none" in caplog.text
    stored, checkpoint = _stored(folder), open_source(_checkpoint(tmp_path))
    weight = checkpoint.read("model.layers.1.mlp.down.weight").float()
    name = "model.layers.1.mlp.down_proj.weight"
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = torch.tensor(448.0) / weight[block].abs().max()
            assert stored[f"{name}_scale_inv"][i, j] == 1 / scale
            assert torch.equal(stored[name][block].float(), (weight[block] * scale).to(torch.float8_e4m3fn).float())


def _saved(config: Config, folder: str) -> None:
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(1))
    save_state(trainer, Path(folder), 1, None)


REFUSED: dict[str, tuple[Preset, FormName, Activations | None, str]] = {
    "static blocks": (DELAYED, "fp8-block", "static", "fp8-block only has dynamic"),
    "static without scales": (CURRENT, "fp8-tensor", "static", r"no scale for the input of layers\.0\.attention\.qkv"),
    "transposed": (CURRENT | GPT2, "fp8-tensor", None, r"c_attn\.weight holds the transpose"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_form_has_no_place_for_is_refused(world2: World, tmp_path: Path, case: str) -> None:
    preset, form, activations, message = REFUSED[case]
    world2.run(_saved, config_of(preset, training=BF16), str(tmp_path), ranks=1)
    with pytest.raises(ValueError, match=message):
        _export(tmp_path, tmp_path, form, activations)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoints"]


def test_the_command(world2: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world2.run(_saved, config_of(DELAYED, training=BF16), str(tmp_path), ranks=1)
    load, save = ["--load", str(_checkpoint(tmp_path))], ["--save", str(tmp_path / "fp8"), "--to", "hf"]
    assert main([*load, *save, "--quantization", "fp8-tensor", "--activations", "dynamic", "--verify"]) == 0
    assert "equal to" in capsys.readouterr().out
    _, export, _ = _export(tmp_path, tmp_path, "fp8-tensor", "dynamic")
    assert _stored(tmp_path / "fp8").keys() == _stored(tmp_path / "fp8-tensor").keys()
    assert export.activations == "dynamic"
    other = ["--save", str(tmp_path / "native"), "--to", "native", "--dtype", "bf16"]
    assert main(["--load", str(tmp_path / "fp8"), *other, "--verify"]) == 0
    for wrong, message in (
        (["--quantization", "fp8-block", "--dtype", "bf16"], "leave --dtype out"),
        (["--activations", "static"], "give --quantization"),
        (["--quantization", "int4"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            main([*load, *save, *wrong])
        assert message in capsys.readouterr().err


def test_a_saved_config_may_have_keys_that_are_gone() -> None:
    config = config_of(DELAYED)
    settings = config.model_dump(mode="json")
    settings["fp8"]["a_key_that_is_gone"] = settings["model"]["another"] = False
    assert config_of_run(SimpleNamespace(about={"config": settings})) == config
