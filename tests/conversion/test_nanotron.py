"""nanotron's checkpoints: models of transformers, written as nanotron's ranks write them, are read as the same models.

`write` follows nanotron's main branch at 2411b022 (April 2026): `serialize/weights.py` and `serialize/utils.py` for
files, `parallel/sharded_parameters.py` for slices, `parallel/parameters.py` for their text, `models/llama.py` and
`models/qwen.py` for names, `trainer.py` for the other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megafp8.conversion.formats import open_source, recognize
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.nanotron import NanotronSource
from tests.conversion.families import make_model
from tests.conversion.huggingface.test_logits import exact_logits, logits_in_float64
from tests.world import World

TP, PP = 2, 2
HF = {
    "vocab_size": 104, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "num_hidden_layers": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"is_llama_config": True, "hidden_act": "silu", "use_cache": True, "rope_scaling": None, "pad_token_id": None}
QWEN = LLAMA | {"is_qwen2_config": True, "_use_qkv_packed": True, "moe_config": None, "no_rope_layer": None}
del QWEN["is_llama_config"]
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, LLAMA | {"attention_bias": True}),  # which nanotron's Llama ignores
    "llama tied, neighbors": ("Llama", {"tie_word_embeddings": True}, LLAMA | {"rope_interleaved": True}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4},
        QWEN | {"attention_bias": True, "sliding_window_size": 5},
    ),
    "qwen2 without positions": (
        "SmolLM3",
        {"no_rope_layer_interval": 4, "use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWS}
        | {"pad_token_id": None},
        QWEN | {"no_rope_layer": 4, "sliding_window_size": 5},
    ),
}
"""Kind and keys of a model of transformers, and the fields of nanotron's config that describe the same network."""


def text_of(slices: tuple[Any, ...]) -> str:
    return "|".join(",".join(map(str, (x.start, x.stop, x.step))) for x in slices)


def neighbors(x: Tensor, heads: int) -> Tensor:
    """Rows of heads in the order in which nanotron rotates neighboring channels."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(folder: Path, model: Any, fields: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Path:
    """Write the model as rank 0 of data parallelism does on each of TP x PP ranks, with one file for each parameter."""
    weights, step = {key: x.to(dtype) for key, x in model.state_dict().items()}, folder / "20"
    config = HF | {"tie_word_embeddings": model.config.tie_word_embeddings} | dict(fields)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def save(name: str, x: Tensor, dim: int | None = None, chunks: tuple[int, ...] = (), stage: int = 0) -> None:
        *folders, last = name.split(".")
        path = (step / "model").joinpath(*folders)
        path.mkdir(parents=True, exist_ok=True)
        if dim is None:
            save_file({"data": x}, path / f"model_{last}.safetensors", metadata={})
            return
        bounds = [0, *accumulate(chunks or (x.shape[dim],))]
        for rank in range(TP):
            pairs, parts = [], []
            for start, stop in pairwise(bounds):
                size = (stop - start) // TP
                local = slice(start // TP, stop // TP) if chunks else slice(None)
                whole = slice(start + rank * size, start + (rank + 1) * size)
                full = [slice(None)] * x.dim()
                pairs.append("#".join(text_of((*full[:dim], only, *full[dim + 1 :])) for only in (local, whole)))
                parts.append(x.narrow(dim, whole.start, size))
            shape = (
                f"({', '.join(f'np.int64({n})' if chunks and d == dim else str(n) for d, n in enumerate(x.shape))},)"
            )
            metadata = {"version": "1.5", "local_global_slices_pairs": ";".join(pairs), "unsharded_shape": shape}
            file = f"model_{last}_pp-rank-{stage}-of-{PP}_tp-rank-{rank}-of-{TP}.safetensors"
            save_file({"data": torch.cat(parts, dim).contiguous()}, path / file, metadata=metadata)

    save("model.token_position_embeddings.pp_block.token_embedding.weight", weights["model.embed_tokens.weight"], 0)
    save("model.final_layer_norm.pp_block.weight", weights["model.norm.weight"])
    if not config["tie_word_embeddings"]:
        save("model.lm_head.pp_block.weight", weights["lm_head.weight"], 0, stage=PP - 1)
    for i in range(config["num_hidden_layers"]):
        theirs, ours, stage = f"model.layers.{i}.", f"model.decoder.{i}.pp_block.", i // 2
        for norm in ("input_layernorm", "post_attention_layernorm"):
            save(f"{ours}{norm}.weight", weights[f"{theirs}{norm}.weight"])
        for kind in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{kind}" in weights:
                parts = [weights[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                if config.get("rope_interleaved"):
                    parts[:2] = [neighbors(x, n) for x, n in zip(parts, (heads, groups))]
                save(f"{ours}attn.qkv_proj.{kind}", torch.cat(parts), 0, tuple(map(len, parts)), stage)
        parts = [weights[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        save(f"{ours}mlp.gate_up_proj.weight", torch.cat(parts), 0, tuple(map(len, parts)), stage)
        save(f"{ours}attn.o_proj.weight", weights[f"{theirs}self_attn.o_proj.weight"], 1, stage=stage)
        save(f"{ours}mlp.down_proj.weight", weights[f"{theirs}mlp.down_proj.weight"], 1, stage=stage)
    (step / "model_config.json").write_text(json.dumps(config))
    (step / "config.yaml").write_text("model:\n  init_method:\n    std: 0.02\n")
    metas = {"last_train_step": 20, "consumed_train_samples": 640, "data_stages": []}
    (step / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.5", "tp": TP, "dp": 1, "metas": metas}))
    (folder / "latest.txt").write_text("20")
    return step


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_are_those_of_transformers(name: str, tmp_path: Path, world2: World) -> None:
    kind, keys, fields = CASES[name]
    model = make_model(kind, HF | keys, 7, dtype=torch.float64)
    step = write(tmp_path / "theirs", model, fields)
    assert recognize(tmp_path / "theirs") == recognize(step) == "nanotron"
    read = open_source(tmp_path / "theirs")
    assert read.about == {"step": 20, "consumed_samples": 640}
    model.save_pretrained(tmp_path / "hf")
    expected = HfSource(tmp_path / "hf")
    assert read.tensors == expected.tensors
    for weight in read.tensors:
        assert torch.equal(read.read(weight), expected.read(weight)), weight
        assert torch.equal(read.read_rows(weight, 1, 4), expected.read_rows(weight, 1, 4)), weight
    (logits,) = world2.run(logits_in_float64, step, NanotronSource, ranks=1)
    torch.testing.assert_close(logits, exact_logits(model), rtol=0, atol=1e-10)


def test_damaged_and_other_checkpoints(tmp_path: Path) -> None:
    model = make_model("Llama", HF, 7)
    step = write(tmp_path, model, LLAMA, torch.bfloat16)
    config, proj = step / "model_config.json", step / "model/model/decoder/3/pp_block/attn/qkv_proj"
    whole = json.loads(config.read_text())
    for change, message in {
        ("is_llama_config", False): "the model class = [^:]*: .* supported: is_llama_config, is_qwen2_config",
        ("is_starcoder2_config", True): "the model class = ",
        ("rope_scaling", "linear"): "rope_scaling = .*nanotron stores it, but does not apply it",
        ("moe_config", "x"): "moe_config = ",
        ("hidden_act", "gelu"): "hidden_act = .*silu",
        ("new_key", 3): "new_key = 3",
        ("num_hidden_layers", 10**9): "num_hidden_layers = 1000000000",
        ("num_hidden_layers", 5): r"has no tensor model.decoder.4.*, which model_config.json requires",
        ("num_hidden_layers", 3): "model.decoder.3.*, which megafp8 does not know in a nanotron model",
        ("intermediate_size", 20): r"gate_up_proj.* has shape \[48, 32\], but \[40, 32\] by model_config.json",
    }.items():
        config.write_text(json.dumps(whole | dict([change])))
        with pytest.raises(ValueError, match=message):
            NanotronSource(tmp_path)
    config.write_text(json.dumps(whole))
    (step / "config.yaml").write_text("model:\n  init_method:\n    use_mup: true\n")
    with pytest.raises(ValueError, match="use_mup = true"):
        NanotronSource(step)
    (step / "config.yaml").unlink()
    NanotronSource(step)
    one, other = sorted(proj.iterdir())
    content = other.read_bytes()
    other.unlink()
    with pytest.raises(ValueError, match=r"qkv_proj/model_weight_pp-rank-1-of-2_tp-rank-1-of-2.* is missing"):
        NanotronSource(step)
    for changed, message in {
        one.read_bytes(): "do not make up",  # the same slices twice
        content[:-1]: "truncated",
        content.replace(b"local_global_slices_pairs", b"local_global_slices_other"): "has no slices of a tensor",
        content.replace(b"16,32,None|None", b"16,99,None|None"): "has no slices of a tensor",
        content.replace(b"16,32,None|None", b"15,31,None|None"): "do not make up",
        content.replace(b"#16,32,None|None", b"#16,31,None|None"): "has no slices of a tensor",  # 16 rows are 15
    }.items():
        other.write_bytes(changed)
        with pytest.raises(ValueError, match=message):
            NanotronSource(step)
    other.rename(proj / "model_weight_pp-rank-1-of-2_tp-rank-1-of-2_exp-rank-0-of-2.safetensors")
    with pytest.raises(ValueError, match="unknown name"):
        NanotronSource(step)
