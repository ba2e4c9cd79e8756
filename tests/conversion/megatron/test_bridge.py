"""Checkpoints of Megatron Bridge: models of transformers in its files are read as the same models.

`run_config` has the fields and the forms that `ConfigContainer.to_yaml` of megatron-bridge 0.3.1 writes, as far as they
describe the network. The files of megatron-bridge 0.3.1 and megatron-core 0.16.1 themselves were read once, too
(docs/measurements/2026-11-30-importers/README.md).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml

from megafp8.conversion.formats import recognize
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.megatron.torch_dist_source import TorchDistSource
from tests.conversion.families import make_model
from tests.conversion.huggingface.test_logits import exact_logits, logits_in_float64
from tests.conversion.megatron.test_torch_dist import global_tensors
from tests.world import World

HF = {
    "vocab_size": 102, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "tie_word_embeddings": False,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
    "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
    "transformer_layer_spec": {
        "_call_": False, "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec",
    },
    "attention_backend": {"_args_": [5], "_call_": True, "_target_": "megatron.core.transformer.enums.AttnBackend"},
    "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
    "ffn_hidden_size": 24, "gated_linear_unit": True, "add_bias_linear": False, "add_qkv_bias": False,
    "bias_activation_fusion": True, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "qk_layernorm": False,
    "layernorm_zero_centered_gamma": False, "position_embedding_type": "rope", "rotary_base": 500,
    "rotary_percent": 1.0, "rotary_interleaved": False, "rope_scaling": False, "rope_scaling_factor": 1.0,
    "seq_len_interpolation_factor": None, "seq_length": 64, "share_embeddings_and_output_weights": False,
    "vocab_size": 102, "make_vocab_size_divisible_by": 8, "should_pad_vocab": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.02, "softmax_scale": None, "softmax_type": "vanilla",
    "window_size": None, "window_attn_skip_freq": None, "num_moe_experts": None, "moe_router_topk": 2,
    "moe_layer_freq": 1, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": None, "moe_router_pre_softmax": False, "moe_grouped_gemm": True, "mtp_num_layers": None,
    "multi_latent_attention": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None,
}  # fmt: skip
QWEN = "megatron.bridge.models.qwen.qwen_provider."
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "qwen2": (
        "Qwen2",
        {"tie_word_embeddings": True},
        {"_target_": f"{QWEN}Qwen2ModelProvider", "add_qkv_bias": True, "share_embeddings_and_output_weights": True},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
        {"_target_": f"{QWEN}Qwen3MoEModelProvider", "num_moe_experts": 4, "moe_ffn_hidden_size": 16}
        | {"qk_layernorm": True},
    ),
}
"""Kind and keys of a model of transformers, and the fields of Megatron Bridge that describe the same network."""


def save(folder: Path, truth: HfSource, fields: dict[str, Any], *, builder: bool = False) -> Path:
    """Write the files of Megatron Bridge's `save_checkpoint` without optimizer, and return their folder."""
    path = folder / "iter_0000100"
    whole = SimpleNamespace(model=truth.model, whole={name: truth.read(name) for name in truth.tensors})
    torch_dcp.save(dict(global_tensors(whole, singleton=False)), checkpoint_id=path, no_dist=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 100, "content_metadata": {}}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    state = {"step": torch.tensor(100), "consumed_train_samples": torch.tensor(800), "do_train": torch.tensor(True)}
    torch.save(state, path / "train_state.pt")
    model = MODEL | fields
    if builder:  # of the main branch of August 2026
        outer = {"vocab_size", "make_vocab_size_divisible_by", "seq_length", "position_embedding_type", "rotary_base"}
        outer |= {"share_embeddings_and_output_weights", "rope_scaling", "rope_scaling_factor", "rotary_percent"}
        inner = {key: value for key, value in model.items() if key not in outer and "spec" not in key}
        model = {key: model[key] for key in outer} | {"_target_": "megatron.bridge.models.gpt.model_config.X"}
        model["transformer"] = inner | {"activation_func": "silu", "_target_": "megatron.core.TransformerConfig"}
    (path / "run_config.yaml").write_text(yaml.safe_dump({"model": model, "train": {"train_iters": 100}}))
    (path / "tokenizer").mkdir()
    (path / "tokenizer/tokenizer.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return path


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_are_those_of_transformers(name: str, tmp_path: Path, world2: World) -> None:
    kind, keys, fields = CASES[name]
    model = make_model(kind, HF | keys, 7, dtype=torch.float64)
    model.save_pretrained(tmp_path / "hf")
    truth = HfSource(tmp_path / "hf", vocab_multiple=8)
    path = save(tmp_path / "theirs", truth, fields, builder=name == "qwen2")
    assert recognize(path) == recognize(tmp_path / "theirs") == "torch_dist"
    read = TorchDistSource(tmp_path / "theirs")
    assert read.about == {"step": 100, "consumed_samples": 800}
    assert [file.name for file in read.tokenizer_files] == ["tokenizer.json"]
    assert read.tensors == truth.tensors
    for weight in read.tensors:
        assert torch.equal(read.read(weight), truth.read(weight)), weight
    (logits,) = world2.run(logits_in_float64, path, TorchDistSource, ranks=1)
    if truth.model.has_experts:  # transformers computes their scores in fp32
        (expected,) = world2.run(logits_in_float64, tmp_path / "hf", ranks=1)
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, exact_logits(model), rtol=0, atol=1e-10)


def test_other_models_are_refused(tmp_path: Path) -> None:
    make_model("Llama", HF, 7).save_pretrained(tmp_path / "hf")
    path = save(tmp_path, HfSource(tmp_path / "hf", vocab_multiple=8), {})
    file, gemma = path / "run_config.yaml", "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider"
    spec = {"_call_": False, "_target_": "megatron.bridge.models.llama.llama4_utils.get_llama4_layer_spec"}
    gelu = {"_args_": [], "_partial_": True, "_target_": "torch.nn.functional.gelu", "approximate": "tanh"}
    for change, message in {
        ("_target_", gemma): "model._target_ = 'megatron.bridge.models.gemma.*: megafp8 has no such model",
        ("layernorm_zero_centered_gamma", True): "apply_layernorm_1p = True",
        ("multi_latent_attention", True): "multi_latent_attention = True, latent attention",
        ("softmax_scale", 0.5): "softmax_scale = 0.5",
        ("seq_len_interpolation_factor", 2.0): "interpolation_factor = 2.0",
        ("position_embedding_type", "yarn"): "position_embedding_type = 'yarn'",
        ("ffn_hidden_size", 20): r"linear_fc1.* has shape \[3, 48, 32\], but \[3, 40, 32\] by the arguments",
        ("qk_layernorm", True): "has no tensor .*q_layernorm",
    }.items():
        file.write_text(yaml.safe_dump({"model": MODEL | dict([change])}))
        with pytest.raises(ValueError, match=message):
            TorchDistSource(path)
    for key, value in {"transformer_layer_spec": spec, "activation_func": gelu}.items():
        file.write_text(yaml.safe_dump({"model": MODEL | {key: value}}))
        with pytest.raises(ValueError, match=rf"run_config.yaml: model.{key} = "):
            TorchDistSource(path)
    for text in ("[", "model: 3", "&a [*a]", "!!python/object/apply:os.system [exit]"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"run_config\.yaml: "):
            TorchDistSource(path)
    file.write_text(yaml.safe_dump({"model": MODEL}))
    (path / "train_state.pt").unlink()
    assert TorchDistSource(path).about == {"step": 100}
    (data,) = path.glob("*.distcp")
    shutil.move(data, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=re.escape(data.name)):
        TorchDistSource(path)
    shutil.move(tmp_path / "elsewhere", data)
    file.unlink()
    with pytest.raises(ValueError, match="has no arguments"):
        TorchDistSource(path)
