"""Megatron core's torch_dist: read from what it (or torch, by its definition) writes; what is written, it loads."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor

from megafp8.conversion.formats import recognize
from megafp8.conversion.megatron.source import MegatronSource
from megafp8.conversion.megatron.torch_dist_sink import TorchDistSink
from megafp8.conversion.megatron.torch_dist_source import TorchDistSource
from megafp8.conversion.native import NativeSource
from megafp8.conversion.target import Journal
from tests.conversion.checkpoints import convert, make
from tests.conversion.families import RandomSource
from tests.conversion.megatron.reference import MODELS, stage
from tests.conversion.megatron.test_damage import Payload
from tests.conversion.megatron.test_megatron import ARGS, assert_same, random_source
from tests.marks import slow_but

VARIED = ["llama", "swiglu, biases, sinks", "all of experts", "mixtral", "gpt2"]
"""Models that have all kinds of tensors between them."""


def stacked(tensors: dict[str, Tensor], pattern: str, name: str) -> dict[str, Tensor]:
    """`tensors`, where those whose keys match `pattern` are stacked in the order of its group `i` under key `name`."""
    groups, others = defaultdict(dict), {}
    for key, x in tensors.items():
        match = re.fullmatch(pattern, key)
        if match is None:
            others[key] = x
        else:
            groups[match.expand(name)][int(match["i"])] = x
    return others | {key: torch.stack([x for _, x in sorted(group.items())]) for key, group in groups.items()}


def global_tensors(source: RandomSource, *, singleton: bool) -> dict[str, Tensor]:
    """Megatron core's global tensors of a model, by its `sharded_state_dict`s."""
    layers = range(source.model.num_layers)
    found = stage(source.whole, source.model, layers, 0, 1, 0, 1, te=True, multiple=8)
    of_expert = r"(?P<before>.*\.mlp\.experts)\.(?P<fc>linear_fc\d)\.weight(?P<i>\d+)"
    if not singleton:
        found = stacked(found, of_expert, r"\g<before>.experts.\g<fc>.weight")
        if len({layer.has_experts for layer in source.model.layers}) == 1:
            found = stacked(found, r"(?P<stack>\w+)\.layers\.(?P<i>\d+)\.(?P<rest>.*)", r"\g<stack>.layers.\g<rest>")
        return found
    found = {re.sub(of_expert, r"\g<before>.experts.\g<i>.\g<fc>.weight", key): x for key, x in found.items()}
    for key in [key for key in found if "linear_fc1." in key and "norm" not in key]:
        if source.model.layers[0].ffn.activation == "swiglu":
            found[f"{key}_w"], found[f"{key}_v"] = found.pop(key).chunk(2)
    return found


def save(
    folder: Path, tensors: dict[str, Any], args: dict[str, Any], backend: str = "torch_dist", optimizer: Any = None
) -> Path:
    """Write what Megatron-LM would, with torch's own writer."""
    path = folder / "iter_0000100"
    torch_dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 100, "optimizer": optimizer}
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


READ = [*((name, False) for name in (*MODELS, "bert")), *((name, True) for name in VARIED[:3])]


@pytest.mark.parametrize(
    ("name", "singleton"),
    slow_but(
        READ,
        *((name, False) for name in ("gpt2", "qwen3", "mixtral", "bert")),
        *((name, True) for name in ("swiglu, biases, sinks", "all of experts")),
    ),
)
def test_each_tensor_is_read(name: str, singleton: bool, tmp_path: Path) -> None:
    truth = random_source(name, dtype=torch.bfloat16)
    others = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(3), "rng_state": [1, 2]}
    others["decoder.layers.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    save(tmp_path, global_tensors(truth, singleton=singleton) | others, ARGS[name])
    assert recognize(tmp_path) == recognize(tmp_path / "iter_0000100") == "torch_dist"
    read = TorchDistSource(tmp_path)
    assert read.path == tmp_path / "iter_0000100"
    assert read.model == truth.model
    assert read.about == {"step": 100}
    assert_same(read, truth)


OPTIMIZERS: dict[str, Any] = {
    "alone": {"optimizer": {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{"lr": 0.1}]}},
    "chained": {i: {"optimizer": {"param_groups": [{"step": 7}, {"step": 7}]}} for i in range(2)},
}
"""What common.pt holds of optimizers."""


@pytest.mark.parametrize(
    ("name", "singleton", "optimizer", "prefix", "master"),
    [
        ("llama", False, "alone", "", "fp32_param"),
        pytest.param("gpt2", True, "alone", "", "param", marks=pytest.mark.slow),
        ("all of experts", True, "chained", "chained_1.", "fp32_param"),
    ],
)
def test_optimizer_state_is_read(
    name: str, singleton: bool, optimizer: str, prefix: str, master: str, tmp_path: Path
) -> None:
    truth = random_source(name, dtype=torch.bfloat16)
    weights = global_tensors(truth, singleton=singleton)
    function = {"exp_avg": lambda x: x.double() / 3, "exp_avg_sq": lambda x: x.double() ** 2, master: lambda x: -x}
    state = {
        f"{prefix}optimizer.state.{kind}.{key}": f(x) for kind, f in function.items() for key, x in weights.items()
    }
    folder = save(tmp_path / "whole", weights | state, ARGS[name], optimizer=OPTIMIZERS[optimizer])
    read = TorchDistSource(folder)
    assert read.about == {"step": 100, "optimizer_steps": 7}
    for weight in truth.tensors:
        for kind, f in function.items():
            ours = f"optimizer.{'master' if kind == master else kind}.{weight.removeprefix('model.')}"
            assert torch.equal(read.read(ours), f(read.read(weight))), ours
    assert len(read.tensors) == 4 * len(truth.tensors)
    flat = {key: x.flatten() for key, x in state.items()}
    for others, common in ((flat, OPTIMIZERS[optimizer]), (state, {"param_groups": [{"step": 7}, {"step": 8}]})):
        source = TorchDistSource(save(tmp_path / f"{len(common)}", weights | others, ARGS[name], optimizer=common))
        assert source.tensors.keys() == truth.tensors.keys()
        assert source.about == {"step": 100}
        shutil.rmtree(tmp_path / f"{len(common)}")


@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_flat_buffers_of_a_distributed_optimizer_are_named(prefix: str, tmp_path: Path) -> None:
    """As Megatron-LM saves them without `--dist-ckpt-optim-fully-reshardable`: the weights alone are read."""
    truth = random_source(VARIED[0], dtype=torch.bfloat16)
    buffer = f"{prefix}optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_param_torch:bfloat16.bucket_idx_0"
    flat = {f"{buffer}.{kind}": torch.zeros(64) for kind in ("param", "exp_avg", "exp_avg_sq")}
    save(tmp_path, global_tensors(truth, singleton=False) | flat, ARGS[VARIED[0]], optimizer=OPTIMIZERS["alone"])
    source = TorchDistSource(tmp_path)
    assert source.tensors.keys() == truth.tensors.keys()
    why = source.why_without("optimizer.exp_avg.embedding.weight")
    assert f"flat buffers of each rank ({buffer}." in why
    assert "--dist-ckpt-optim-fully-reshardable" in why
    assert source.why_without("model.x") == f"{source.path} has no model.x"


@pytest.mark.parametrize("name", slow_but(VARIED, "swiglu, biases, sinks", "all of experts"))
def test_each_tensor_is_written(name: str, tmp_path: Path) -> None:
    source = random_source(name)
    source.about = {"step": 7, "consumed_samples": 56}
    convert(source, TorchDistSink(tmp_path / "out"))
    folder = tmp_path / "out" / "iter_0000007"
    expected = global_tensors(source, singleton=False)
    found: dict[str, Any] = {key: torch.full_like(x, float("nan")) for key, x in expected.items()}
    assert torch_dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == expected.keys()
    torch_dcp.load(found, checkpoint_id=folder, no_dist=True)
    for key, x in expected.items():
        assert torch.equal(found[key], x), key
    common = torch.load(folder / "common.pt", weights_only=False)
    args, of_experts = vars(common["args"]), {key for key in ARGS[name] if key.startswith("moe_")}
    assert {key: args[key] for key in of_experts} == {key: ARGS[name][key] for key in of_experts}
    assert args["ckpt_format"] == "torch_dist"
    assert common["content_metadata"]["singleton_local_shards"] is False
    back = TorchDistSource(tmp_path / "out")
    assert_same(back, source)
    assert back.about == {"step": 7, "consumed_samples": 56}


def test_a_norm_before_experts_has_another_name_in_local_layers(tmp_path: Path) -> None:
    source = random_source("mixtral")
    convert(source, TorchDistSink(tmp_path / "out", "local"))
    metadata = torch_dcp.FileSystemReader(tmp_path / "out" / "release").read_metadata()
    assert metadata.state_dict_metadata.keys() - global_tensors(source, singleton=False).keys() == {
        "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    }
    assert_same(TorchDistSource(tmp_path / "out"), source)


def test_a_conversion_interrupted_within_a_tensor_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of q lie in one rectangle for each query group."""
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "seconds", 0)
    source, name = random_source("qwen2"), "model.layers.2.attention.q.weight"
    sink = TorchDistSink(tmp_path / "out")
    names = list(sink.begin(source, {}))
    stop = names.index(name)
    for before in names[:stop]:
        sink.write(before, source.read(before))
    with monkeypatch.context() as patch:
        add, calls = sink._writer.add, iter([True, False])
        patch.setattr(sink._writer, "add", lambda *part: add(*part) if next(calls) else pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            sink.write(name, source.read(name))
    sink._journal._stream.close()
    again = TorchDistSink(tmp_path / "out")
    assert list(again.begin(source, {})) == names[stop:]
    for rest in names[stop:]:
        again.write(rest, source.read(rest))
    again.finish()
    again.publish()
    assert_same(TorchDistSource(tmp_path / "out"), source)


def test_a_vocabulary_of_another_padding(tmp_path: Path) -> None:
    truth = random_source("llama")
    tensors = global_tensors(truth, singleton=False)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[key] = torch.cat([tensors[key], torch.ones(8, 16)])
    save(tmp_path, tensors, ARGS["llama"])
    assert_same(TorchDistSource(tmp_path), truth)
    assert TorchDistSource(tmp_path, vocab_size=57).model.stem.vocab_size == 57
    with pytest.raises(ValueError, match="vocab_size is 65, but the embedding has 64 rows"):
        TorchDistSource(tmp_path, vocab_size=65)


@pytest.mark.parametrize("where", ["common.pt", ".metadata"])
def test_code_in_a_file_does_not_run(where: str, tmp_path: Path) -> None:
    truth, trace = random_source("llama"), tmp_path / "it ran"
    payload = Payload(Path(f"'{trace}'"))
    save(tmp_path, global_tensors(truth, singleton=False), ARGS["llama"])
    file = tmp_path / "iter_0000100" / where
    if where == "common.pt":
        content = torch.load(file, weights_only=False)
        torch.save({**content, "rng": payload}, file)
    else:
        import pickle

        index = pickle.loads(file.read_bytes())
        index.planner_data = payload
        file.write_bytes(pickle.dumps(index))
    assert_same(TorchDistSource(tmp_path), truth)
    assert not trace.exists()


def test_damaged_and_other_checkpoints(tmp_path: Path) -> None:
    truth = random_source("llama")
    tensors = global_tensors(truth, singleton=False)
    one = save(tmp_path / "a", {k: x for k, x in tensors.items() if "fc2" not in k}, ARGS["llama"])
    with pytest.raises(ValueError, match=r"has no tensor decoder.layers.mlp.linear_fc2.weight or .* require"):
        TorchDistSource(one)
    two = save(tmp_path / "b", tensors | {"decoder.strange": torch.ones(1)}, ARGS["llama"])
    with pytest.raises(ValueError, match=r"1 tensors that megafp8 does not know: decoder.strange"):
        TorchDistSource(two)
    three = save(tmp_path / "c", tensors, ARGS["llama"] | {"num_layers": 3})
    with pytest.raises(ValueError, match=r"has shape \[4, 16\], but \[3, 16\] by the arguments"):
        TorchDistSource(three)
    four = save(tmp_path / "d", tensors, ARGS["llama"], backend="zarr")
    with pytest.raises(ValueError, match="has sharded_backend = 'zarr': megafp8 reads torch_dist"):
        TorchDistSource(four)
    with pytest.raises(ValueError, match="read it as torch_dist, not as megatron"):
        MegatronSource(four)
    good = save(tmp_path / "e", tensors, ARGS["llama"])
    data = next((good / "iter_0000100").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    at = content.index(tensors["decoder.final_layernorm.weight"].numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged at decoder.final_layernorm.weight .* do not match their checksum"):
        TorchDistSource(good).read("model.final_norm.weight")
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is truncated"):
        TorchDistSource(good)
    NativeSource(make(tmp_path))
    assert recognize(tmp_path) == "native"


def interpreter() -> str:
    """A Python that has Megatron core (pip install --no-deps megatron-core), or skip."""
    python = os.environ.get("MEGATRON_CORE_PYTHON", sys.executable)
    has_it = "import importlib.util as u, sys; sys.exit(not (u.find_spec('megatron') and u.find_spec('megatron.core')))"
    if subprocess.run([python, "-c", has_it], check=False).returncode:
        pytest.skip("Megatron core is not installed: MEGATRON_CORE_PYTHON names a Python that has it")
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "optimizer", "layout", "singleton"),
    [
        ("llama", "plain", (2, 2, 1), False),
        ("gpt2", "distributed", (1, 2, 1), True),
        ("mixtral", "distributed", (1, 1, 2), False),
        ("all of experts", "plain", (1, 1, 2), True),
    ],
)
def test_megatron_core_loads_and_saves(
    name: str, optimizer: str, layout: tuple[int, int, int], singleton: bool, tmp_path: Path
) -> None:
    source = random_source(name)
    source.about = {"step": 100}
    convert(source, TorchDistSink(tmp_path / "ours", "local"))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    numbers = map(str, (*layout, int(singleton)))
    command = [interpreter(), "-m", "tests.conversion.megatron.core", name, optimizer, *numbers]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "ours" / "iter_0000100"), str(theirs)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(math.prod(layout))
    ]
    outputs = [process.communicate(timeout=500)[1] for process in ranks]
    assert not any(process.returncode for process in ranks), "\n".join(outputs)[-3000:]
    read = TorchDistSource(theirs)
    assert read.about == {"step": 100, "optimizer_steps": 1}
    for weight in source.tensors:
        x, key = read.read(weight), weight.removeprefix("model.")
        assert torch.equal(x, source.read(weight)), weight
        if not weight.endswith("router.bias"):  # the selection bias is no parameter
            torch.testing.assert_close(read.read(f"optimizer.exp_avg.{key}"), 0.1 * x)
            torch.testing.assert_close(read.read(f"optimizer.exp_avg_sq.{key}"), 0.001 * x**2)
            if optimizer == "distributed":
                assert torch.equal(read.read(f"optimizer.master.{key}"), x)
