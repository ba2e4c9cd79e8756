"""docs/checkpoint-format.md is true: its snippets read a checkpoint, its tables list the names and shapes there are."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import Rectangle, Rectangles, read_metadata, save
from megafp8.checkpoint.store import FORMAT_VERSION
from megafp8.config import Config
from megafp8.config.schema import ModelConfig
from megafp8.parallel.sharding import spec_of
from megafp8.planner.stages import stages_of
from megafp8.training.describe import planned_stage

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
ROWS = re.findall(r"^\| `([a-z{][^`]*)` \| `?\[([^\]]*)\]`?[^|]*\| ([^|]*) \|$", DOCUMENT, re.MULTILINE)
WEIGHTS = {name: (shape, where.strip()) for name, shape, where in ROWS if not name.startswith("fp8.")}

BASE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2, "head_dim": 32,
    "ffn_hidden_size": 160, "vocab_size": 500, "max_position_embeddings": 48,
}  # fmt: skip
CONDITIONS = {
    "always": lambda m: True,
    "`position_embedding: learned`": lambda m: m.position_embedding == "learned",
    "unless `norm_position: post`": lambda m: m.norm_position != "post",
    "`normalization: layernorm` unless `norm_position: post`": lambda m: (
        m.norm_position != "post" and m.normalization == "layernorm"
    ),
    "`norm_position: pre`, `both` or `post`": lambda m: m.norm_position != "output" and m.parallel_block is False,
    "`parallel_block: shared_norm`, instead of both norms": lambda m: m.parallel_block == "shared_norm",
    "`parallel_block: shared_norm` with `normalization: layernorm`": lambda m: (
        m.parallel_block == "shared_norm" and m.normalization == "layernorm"
    ),
    "`norm_position: output` or `both`": lambda m: m.norm_position in ("output", "both"),
    "`norm_position: pre`, `both` or `post` with `normalization: layernorm`": lambda m: (
        m.norm_position != "output" and m.parallel_block is False and m.normalization == "layernorm"
    ),
    "`norm_position: output` or `both` with `normalization: layernorm`": lambda m: (
        m.norm_position in ("output", "both") and m.normalization == "layernorm"
    ),
    "`linear_bias` or `qkv_bias`": lambda m: m.linear_bias or m.qkv_bias,
    "`qk_norm: true`": lambda m: m.qk_norm,
    "`attention_sinks`": lambda m: m.attention_sinks,
    "`linear_bias` or `proj_bias`": lambda m: m.linear_bias or m.proj_bias,
    "`output_bias`": lambda m: m.output_bias,
    "`linear_bias`": lambda m: m.linear_bias,
    "gated `activation`": lambda m: m.activation in ("swiglu", "geglu_tanh"),
    "gated `activation` with `linear_bias`": lambda m: m.activation in ("swiglu", "geglu_tanh") and m.linear_bias,
    "unless `tie_embeddings`": lambda m: not m.tie_embeddings,
}
MTP_CONDITIONS = {
    "multi-token prediction": lambda m: True,
    "multi-token prediction with `layernorm`": lambda m: m.normalization == "layernorm",
}
MODELS = [
    {},
    {"tie_embeddings": True, "qkv_bias": True, "mtp_num_layers": 2},
    {"qk_norm": True, "num_query_groups": 6, "attention_sinks": True, "norm_position": "output"},
    {
        "position_embedding": "learned",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
        "norm_position": "both",
        "mtp_num_layers": 1,
    },
    {"normalization": "layernorm", "norm_position": "post"},
    {"activation": "geglu_tanh", "linear_bias": True, "tie_embeddings": True, "vocab_multiple": 64},
    {"parallel_block": "shared_norm", "normalization": "layernorm", "proj_bias": True, "output_bias": True},
]


def is_documented(name: str) -> bool:
    """Whether one of the tables has the tensor `name` of a checkpoint."""
    patterns = [f"model.{weight}" for weight in WEIGHTS]
    patterns += re.findall(r"^\| `((?:fp8|optimizer)\.[^`]*)` \|", DOCUMENT, re.MULTILINE)
    for pattern in patterns:
        text = re.escape(pattern).replace(r"\{i\}", r"\d+")
        text = text.replace("<layer>", r"layers\.\d+\.\w+\.\w+").replace("<operand>", "(input|weight|grad_output)")
        if re.fullmatch(text.replace("<name>", ".*"), name):
            base = name.split(".", 2)[-1] if "<name>" in pattern else None
            return base is None or is_documented(f"model.{base}")
    return False


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_the_table_of_weights(changes: dict[str, Any]) -> None:
    model = ModelConfig.model_validate({**BASE, **changes})
    spec = model.spec
    rest = {"training": {"steps": 1, "seq_length": 16, "global_batch_size": 1}, "optimizer": {"learning_rate": 1}}
    config = Config.model_validate({"name": "t", "model": model, "data": {"train": ["none"]}, **rest})
    stages = [planned_stage(config, stage) for stage in range(len(stages_of(config)[1]))]
    pieces = [piece for stage in stages for param in stage.parameters() for piece in spec_of(param).shards]
    found = {piece.name: piece.global_shape for piece in pieces}
    dims = {
        "v": spec.stem.rows, "p": BASE["max_position_embeddings"], "h": model.hidden_size,
        "a": model.num_attention_heads, "g": model.num_query_groups or model.num_attention_heads,
        "d": spec.layers[0].mixer.channels, "f": model.ffn_hidden_size or 4 * model.hidden_size, "2": 2,
    }  # fmt: skip
    expected = {}
    for (name, (shape, where)), i in itertools.product(WEIGHTS.items(), spec.indices):
        conditions = CONDITIONS if i < model.num_layers else {**CONDITIONS, **MTP_CONDITIONS}
        if where in conditions and conditions[where](model):
            sizes = tuple(math.prod(dims[letter] for letter in dim.split("·")) for dim in shape.split(", "))
            expected[name.replace("{i}", str(i))] = sizes
    assert found == expected


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    state = {
        "model.embedding.word.weight": torch.randn(128, 16, generator=generator),
        "model.layers.0.mlp.down.weight": torch.randn(16, 32, generator=generator).bfloat16(),
        "model.final_norm.weight": torch.randn(16, generator=generator),
        "optimizer.exp_avg.final_norm.weight": torch.randn(16, generator=generator),
        "fp8.step": torch.tensor(3),
    }
    down = state["model.layers.0.mlp.down.weight"]
    columns = [Rectangle((0, c), down[:, c : c + 8]) for c in range(0, 32, 8)]
    cut = {**state, "model.layers.0.mlp.down.weight": Rectangles((16, 32), down.dtype, columns)}
    return save(tmp_path, 3, cut, {}), state


def _run(snippet: str, path: Path) -> dict[str, Any]:
    found, count = re.subn(r'^path = ".*"$', f"path = {str(path)!r}", snippet, flags=re.MULTILINE)
    assert count == 1
    names: dict[str, Any] = {}
    exec(found, names)
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_snippets_read_a_checkpoint(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    with_torch, by_hand = (_run(snippet, path) for snippet in SNIPPETS)
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    assert with_torch["tensors"].keys() == weights.keys()
    assert all(torch.equal(with_torch["tensors"][name], tensor) for name, tensor in weights.items())
    for name, tensor in state.items():
        found = by_hand["read"](name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_the_version_and_keys_that_save_writes(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert f"It describes format version {FORMAT_VERSION}." in " ".join(DOCUMENT.split())
    assert undocumented_keys(read_metadata(saved[0])) == []


def undocumented_keys(metadata: dict[str, Any]) -> list[str]:
    """Keys of a metadata.json that the page's table does not have."""
    table = DOCUMENT.split("## metadata.json")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    return [key for key in metadata if not any(f"`{key}`" in cell for cell in first_cells)]
