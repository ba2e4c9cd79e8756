"""Random models in both directions against `transformers`: logits are equal, or the model is refused. Never neither.

Ours to theirs: random model sections are exported and loaded by `transformers`, or refused before anything is written.
Theirs to ours: random models of `transformers` are saved, random keys of their config.json are set, and what
`transformers` then computes is what we compute, unless we refuse.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import RopeScaling, model_problems, model_spec
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.spec import ModelSpec
from tests.conversion.checkpoints import convert
from tests.conversion.families import B, RandomSource, S, V, config_class, randomize, tokens
from tests.conversion.huggingface.test_logits import our_logits
from tests.world import World

Rng = random.Random


def _pick(rng: Rng, usual: Any, *others: Any, rare: float = 0.25) -> Any:
    return rng.choice(others) if rng.random() < rare else usual


def our_model(rng: Rng) -> ModelSpec:
    """Near one of the families, since nearly all models of independent fields have none; some are of none."""
    heads = rng.choice([1, 2, 3, 4, 6])
    style = rng.choice(["llama", "llama", "qwen2", "qwen3", "gpt2"])
    fields: dict[str, Any] = {
        "num_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "hidden_size": rng.choice([heads * 8, heads * 10, 24, 32, 34, 40]),
        "ffn_hidden_size": rng.choice([None, 24, 48, 50]),
        "vocab_size": rng.choice([V, 120, 128]),
        "vocab_multiple": rng.choice([8, 16, 128]),
        "norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
        "tie_embeddings": rng.random() < 0.4,
        "init_std": _pick(rng, 0.02, 0.5, 1.5),
        "parallel_block": rng.random() < 0.03,
    }
    if style == "gpt2":
        fields |= {
            "position_embedding": _pick(rng, "learned", "none", "rope", rare=0.1),
            "normalization": _pick(rng, "layernorm", "rmsnorm", rare=0.1),
            "activation": _pick(rng, "gelu_tanh", "gelu", "swiglu"),
            "linear_bias": rng.random() < 0.9,
            "max_position_embeddings": rng.choice([S, 16, 64]),
            "head_dim": _pick(rng, None, 8, rare=0.1),
        }
    else:
        scaling = RopeScaling(
            factor=rng.choice([2.0, 8.0]), low_freq_factor=1.0, high_freq_factor=rng.choice([2.0, 4.0]),
            original_max_position_embeddings=rng.choice([8, 32]),
        )  # fmt: skip
        fields |= {
            "num_query_groups": rng.choice([None, *(g for g in range(1, heads + 1) if heads % g == 0), 2]),
            "head_dim": _pick(rng, None, 6, 8, 16, 7, rare=0.6),
            "rope_theta": rng.choice([10000.0, 500.0, 1e6]),
            "rope_scaling": _pick(rng, None, scaling),
            "max_position_embeddings": rng.choice([None, 16, 64]),
            "sliding_window": _pick(rng, None, 1, 3, 5, 100, rare=0.4),
            "activation": _pick(rng, "swiglu", "geglu", "geglu_tanh", "gelu", rare=0.05),
            "normalization": _pick(rng, "rmsnorm", "layernorm", rare=0.05),
            "linear_bias": style == "llama" and rng.random() < 0.3,
            "qkv_bias": style == "qwen2" or rng.random() < 0.05,
            "qk_norm": style == "qwen3" or rng.random() < 0.05,
        }
    experts = Rng(str(fields))
    if style != "gpt2" and not fields["linear_bias"] and experts.random() < 0.4:
        fields["moe"] = _our_experts(experts, shared=style == "qwen2")
    if "moe" in fields and fields["qk_norm"] and experts.random() < 0.5:
        fields["qk_norm"] = "projection"
    yarn = Rng(f"yarn {fields}")
    if style != "gpt2" and fields["rope_scaling"] is None and yarn.random() < 0.3:
        fields["yarn"] = {"factor": 4.0, "original_max_position_embeddings": yarn.choice([8, 32])}
    latent = Rng(f"latent {fields}")
    if style == "llama" and latent.random() < 0.3:
        fields |= _our_deepseek(latent)
    return model_spec(fields)


def _our_experts(rng: Rng, shared: bool) -> dict[str, Any]:
    experts = rng.choice([1, 3, 4, 8])
    return {
        "num_experts": experts,
        "top_k": rng.choice([1, min(2, experts), experts]),
        "ffn_hidden_size": _pick(rng, None, 8, 24, rare=0.5),
        "normalize": _pick(rng, True, False),
        "shared_ffn_hidden_size": rng.choice([8, 32]) if shared else None,
        "shared_gate": shared and rng.random() < 0.8,
        "first_dense_layers": _pick(rng, 0, 1),
        "layer_interval": _pick(rng, 1, 2, rare=0.2),
        "score": _pick(rng, "softmax", "sigmoid", rare=0.1),
        "scaling_factor": _pick(rng, 1.0, 2.5, rare=0.1),
    }


def _our_deepseek(rng: Rng) -> dict[str, Any]:
    groups = rng.choice([1, 2, 4])
    moe = _our_experts(rng, shared=False) | {
        "num_experts": 8,
        "top_k": rng.choice([1, 2, 3]),
        "ffn_hidden_size": 8,
        "shared_ffn_hidden_size": _pick(rng, 8, 16, 24, 12, None, rare=0.5),
        "score": _pick(rng, "sigmoid", "softmax", rare=0.1),
        "selection_bias": rng.random() < 0.9,
        "layer_interval": 1,
        "num_groups": groups,
        "top_groups": rng.choice([None, max(1, groups // 2), groups]),
    }
    latent = {
        "q_rank": rng.choice([8, 20, None]),
        "kv_rank": rng.choice([8, 12]),
        "nope_head_dim": rng.choice([4, 6]),
        "rope_head_dim": rng.choice([2, 6]),
        "value_head_dim": rng.choice([4, 6]),
    }
    if rng.random() < 0.4:  # DeepSeek-V2
        moe |= {"score": "softmax", "selection_bias": False, "normalize": rng.random() < 0.1}
    none = dict.fromkeys(("num_query_groups", "head_dim"))
    norm_eps = _pick(rng, 1e-6, 1e-5, rare=0.1)
    fields = {"moe": moe, "latent_attention": latent, "linear_bias": False, "qk_norm": False, "qkv_bias": False}
    return fields | none | {"norm_eps": norm_eps, "sliding_window": _pick(rng, None, 5, rare=0.1)}


def _of_ours(models: list[tuple[ModelSpec, Path]]) -> list[Tensor]:
    found = [our_logits(RandomSource(model, path), 1, 1) for model, path in models]
    return [logits for logits in found if logits is not None]


def _of_folders(folders: list[Path]) -> list[Tensor]:
    found = [our_logits(HfSource(folder, vocab_multiple=8), 1, 1) for folder in folders]
    return [logits for logits in found if logits is not None]


def _legal(rng: Rng) -> ModelSpec:
    """A model that can be built at all."""
    while True:
        model = our_model(rng)
        if not [*model_problems(model)]:
            return model


def _export(count: int, seed: int, folder: Path) -> tuple[list[tuple[ModelSpec, Path]], Counter[str]]:
    """Export random models; those that were, and what of the others no family has."""
    folder.mkdir(exist_ok=True)
    rng, done, reasons = Rng(seed), [], Counter[str]()
    for i in range(count):
        model, path = _legal(rng), folder / f"{i}"
        try:
            convert(RandomSource(model, folder), HfSink(path))
            done.append((model, path))
        except ValueError as error:
            reasons[str(error).split(" lacks ")[1].split(" = ")[0]] += 1
        written = sorted(int(file.name) for file in folder.iterdir())
        assert written == [int(path.name) for _, path in done], "something of a refused model was written"
    return done, reasons


def _check_equal(ours: Tensor, theirs: Tensor, what: object) -> None:
    worst = float((ours - theirs).abs().max())
    assert worst <= 1e-5, f"logits differ by {worst}: {what}"


def _check_export(world: World, folder: Path, count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    import transformers

    done, reasons = _export(count, seed, folder)
    families = Counter[str]()
    for (model, path), ours in zip(done, world.run(_of_ours, done, ranks=1)[0], strict=True):
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), model
        if model.has_experts:
            loaded.set_experts_implementation("eager")  # the default needs widths that are multiples of 16 bytes
        with torch.no_grad():
            theirs = loaded.eval()(tokens()).logits
        _check_equal(ours, theirs, model)
        families[loaded.config.model_type] += 1
        shutil.rmtree(path)
    return families, reasons


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_random_models_of_ours_load_in_transformers_or_are_refused(world2: World, tmp_path: Path, seed: int) -> None:
    families, reasons = _check_export(world2, tmp_path, 50, seed)
    print(f"\n50 models: {families.total()} exported {dict(families)}, {reasons.total()} refused {dict(reasons)}")
    assert families.total() > 25
    assert len(families) >= 4


def test_a_model_that_cannot_be_built_is_not_exported(tmp_path: Path) -> None:
    rng = Rng(2)
    of_heads = {"model.hidden_size", "model.head_dim", "model.num_query_groups"}
    models = [our_model(rng) for _ in range(200)]
    broken = [model for model in models if any(problem.path in of_heads for problem in model_problems(model))]
    assert len(broken) > 20
    for model in broken:
        with pytest.raises(ValueError, match=r"model\.(hidden_size|head_dim|num_query_groups) = "):
            HfSink(tmp_path / "ours").begin(RandomSource(model, tmp_path), {})
    assert list(tmp_path.iterdir()) == []


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_8 = LLAMA3 | {"original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
_ANY: dict[str, list[Any]] = {
    "is_causal": [True, False, None],
    "is_decoder": [True, False],
    "is_encoder_decoder": [False, True],
    "add_cross_attention": [False, True],
    "cross_attention_hidden_size": [None, 32],
    "tie_word_embeddings": [True, False],
    "pruned_heads": [{}, {"0": [1]}],
    "per_layer_config": [None, {"0": {"num_attention_heads": 2}}],
    "quantization_config": [None, {"quant_method": "gptq", "bits": 4}],
    "architectures": [None, [], ["LlamaForSequenceClassification"], ["LlamaForCausalLM"], ["GPT2Model"]],
    "auto_map": [{}, {"AutoModelForCausalLM": "modeling.Model"}],
    "torch_dtype": ["float32", None],
    "initializer_range": [0.01, 0.5],
    "logit_scale": [2.0, None],
    "logits_soft_cap": [30.0],
    "final_logit_softcapping": [1.0],
    "attention_multiplier": [0.5],
    "residual_multiplier": [0.5],
    "an_unknown_key": [1, None],
    "use_cache": [True, False],
    "chunk_size_feed_forward": [0, 4],
    "pad_token_id": [None, 0, 5],
    "eos_token_id": [3, [3, 4]],
    "temperature": [0.5],
    "output_attentions": [False, True],
    "output_hidden_states": [False, True],
    "vocab_size": [V, V - 1],
}
_LLAMA_LIKE: dict[str, list[Any]] = {
    "attention_bias": [True, False, None],
    "mlp_bias": [True, False],
    "hidden_act": ["silu", "swish", "gelu", "relu", "gelu_new", None],
    "rms_norm_eps": [1e-6, 1e-2],
    "num_key_value_heads": [1, 2, 4, None],
    "head_dim": [4, 8, 16, None],
    "attention_dropout": [0.0, 0.5],
    "pretraining_tp": [1, 2],
    "sliding_window": [None, 3, 5, 100],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2, 28],
    "layer_types": [
        None,
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"],
        ["full_attention"],
        ["sliding_attention"] * 3,
        ["chunked_attention"] * 2,
    ],
    "rope_theta": [10000.0, 500.0, 7],
    "rope_scaling": [
        None,
        LLAMA3_8,
        LLAMA3,
        LLAMA3_8 | {"factor": 2.0},
        LLAMA3_8 | {"rope_theta": 500.0},
        {"type": "llama3", **LLAMA3_8},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"mscale": 0.7},
        YARN | {"attention_factor": 1.5},
        YARN | {"beta_fast": 4, "beta_slow": 0.5, "mscale": 1},
        {"rope_type": "default", "type": "linear", "factor": 2.0},
    ],
    "rope_parameters": [
        None,
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        LLAMA3_8,
        LLAMA3_8 | {"rope_theta": 500.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 5.0}, "sliding_attention": None},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        "default",
    ],
    "partial_rotary_factor": [1.0, 0.5, None],
    "original_max_position_embeddings": [8, 16],
    "max_position_embeddings": [64, 16],
    "rope_interleaved": [False, True],
    "use_mrope": [False, True],
    "use_qk_norm": [True],
}
_EXPERTS: dict[str, list[Any]] = {
    "num_experts": [4, 5],
    "num_local_experts": [4, 5],
    "num_experts_per_tok": [1, 2, 4, 5],
    "norm_topk_prob": [True, False],
    "moe_intermediate_size": [24, 48],
    "shared_expert_intermediate_size": [40, 48],
    "decoder_sparse_step": [1, 2, 3, 0],
    "mlp_only_layers": [None, [], [0], [1], [0, 1], [2]],
    "qkv_bias": [True, False],
    "router_aux_loss_coef": [0.1],
    "router_jitter_noise": [0.1],
    "output_router_logits": [True, False],
    "num_shared_experts": [1],
    "clip_qkv": [None, 1.0],
    "head_dim": [4, 8, None],
    "routed_scaling_factor": [2.0],
    "scoring_func": ["sigmoid"],
    **{key: values for key, values in _LLAMA_LIKE.items() if "window" in key or "rope" in key or key == "layer_types"},
}
_DEEPSEEK: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "rms_norm_eps": [1e-6, 1e-5],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [4, 8, None],
    "qk_head_dim": [8, 16, None],
    "qk_rope_head_dim": [4, 8],
    "v_head_dim": [4, 32, None],
    "q_lora_rank": [20, None],
    "rope_interleave": [True, False, None],
    "n_group": [1, 2, 4, 8, 3],
    "topk_group": [1, 2, 4],
    "num_experts_per_tok": [1, 2, 4, 6],
    "n_routed_experts": [8, 9],
    "num_local_experts": [8, 4],
    "n_shared_experts": [1, 2, 0],
    "first_k_dense_replace": [0, 1, 2, 5],
    "norm_topk_prob": [True, False],
    "routed_scaling_factor": [1.0, 2.5, 3],
    "scoring_func": ["sigmoid", "softmax"],
    "topk_method": ["noaux_tc", "greedy", "group_limited_greedy"],
    "num_experts": [8, 9],
    "mlp_bias": [False, True],
    "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1, 2],
    "num_mtp_layers": [0, 1],
    "aux_loss_alpha": [0.001],
    "hidden_act": ["silu", "gelu", "relu"],
    "sliding_window": [None, 3],
    **{key: values for key, values in _LLAMA_LIKE.items() if "rope" in key or key == "layer_types"},
}
_GPT2: dict[str, list[Any]] = {
    "scale_attn_weights": [True, False, None],
    "scale_attn_by_inverse_layer_idx": [False, True],
    "reorder_and_upcast_attn": [False, True],
    "activation_function": ["gelu_new", "gelu", "relu", "gelu_pytorch_tanh", "quick_gelu"],
    "layer_norm_epsilon": [1e-6, 1e-2],
    "n_inner": [None, 128, 48],
    "n_head": [2, 4, 8],
    "num_attention_heads": [2, 4],
    "hidden_size": [32, 16],
    "n_positions": [16, 32],
    "n_ctx": [16, 4],
    "resid_pdrop": [0.0, 0.5],
    "embd_pdrop": [0.5],
    "attn_pdrop": [0.5],
    "attention_dropout": [0.5],
    "head_dim": [8, 16],
    "summary_type": ["first"],
    "rope_theta": [500.0],
    "sliding_window": [3],
}


_BY_LAYER: dict[str, list[Any]] = {
    "no_rope_layers": [None, [], [1, 0], [0, 0], [1], [1, 0, 1], [2, 1], "none"],
    "no_rope_layer_interval": [1, 2, 4],
    "attention_chunk_size": [None, 5, 3, 0],
    "attn_temperature_tuning": [True, False, None],
    "floor_scale": [3, 8192],
    "attn_scale": [0.5, 0.1],
    "use_qk_norm": [True, False],
    "moe_layers": [None, [], [0], [1], [0, 1], [5]],
    "interleave_moe_layer_step": [1, 2, 3],
    "intermediate_size_mlp": [48, 32],
    "intermediate_size": [48, 24],
    "final_logit_softcapping": [None, 1.0],
    "rotary_dim": [4, 8, None],
    "first_k_dense_replace": [0, 1, 2],
    "n_group": [1, 2, 4],
    "topk_group": [1, 2],
    "n_shared_experts": [0, 1, 2],
    "moe_layer_start_index": [0, 1, 2, -1],
    "moe_layer_end_index": [-1, 0, 1, 5],
    "moe_layer_interval": [1, 2, 0],
    "moe_num_shared_experts": [0, 1, 2],
    "moe_norm_min": [1e-12, 0.5],
    "use_bias": [True, False],
    "moe_k": [1, 2, 5],
    "scoring_func": ["sigmoid", "softmax"],
}

_KEYS = {
    **dict.fromkeys(("SmolLM3", "Olmo3", "NanoChat"), _ANY | _LLAMA_LIKE | _BY_LAYER),
    **dict.fromkeys(("Llama4", "Glm4Moe", "MiniMaxM2", "Ernie4_5_Moe"), _ANY | _EXPERTS | _LLAMA_LIKE | _BY_LAYER),
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3"), _ANY | _LLAMA_LIKE),
    **dict.fromkeys(("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"), _ANY | _EXPERTS),
    **dict.fromkeys(("DeepseekV2", "DeepseekV3"), _ANY | _DEEPSEEK),
    "GPT2": _ANY | _GPT2,
}


def _their_config(rng: Rng, kind: str, keys: Collection[str]) -> dict[str, Any]:
    """A sound config of `kind`, whose weights fit many of the changes."""
    if kind == "GPT2":
        return {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "n_inner": 128,
                "tie_word_embeddings": rng.random() < 0.5}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
               "shared_expert_intermediate_size": 40, "decoder_sparse_step": rng.choice([1, 2]),
               "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
               "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
               "num_local_experts": 4, "moe_num_experts": 4, "moe_k": 2, "floor_scale": 4,
               "attention_chunk_size": 5}  # fmt: skip
    return {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "head_dim": 8,
            "num_key_value_heads": 4 if kind.startswith("Deepseek") else rng.choice([2, 4]),
            "max_position_embeddings": 64, "pad_token_id": None, "tie_word_embeddings": rng.random() < 0.3,
            **{key: value for key, value in experts.items() if key in keys}}  # fmt: skip


def _save_theirs(rng: Rng, folder: Path) -> dict[str, Any]:
    """A model of theirs, with one to three keys of its config.json set to other values; these."""
    import transformers

    kind = rng.choice([*_KEYS])
    known = config_class(kind)
    config = known(**_their_config(rng, kind, known().to_dict().keys() | known.attribute_map.keys()))
    torch.manual_seed(rng.randrange(10**6))
    model = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(config)
    randomize(model)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    values = _KEYS[kind]
    if kind != "GPT2" and rng.random() < 0.5:  # as transformers 4 writes it
        del written["rope_parameters"]
    changes = {key: rng.choice(values[key]) for key in rng.sample(sorted(values), rng.choice([1, 1, 2, 3]))}
    (folder / "config.json").write_text(json.dumps(written | changes))
    return {"model": kind, **changes}


def _their_logits(folder: Path) -> Tensor | None:
    """What `transformers` computes; None where it refuses, or makes up weights that are not in the files."""
    import transformers

    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        if report["missing_keys"] or report["mismatched_keys"]:
            return None
        with torch.no_grad():
            logits: Tensor = model.eval()(tokens()).logits
        return logits.float()
    except Exception:  # of any kind: its checks are many
        return None


def _read(count: int, seed: int, folder: Path) -> tuple[list[tuple[dict[str, Any], Path]], list[dict[str, Any]]]:
    """Changes and folders that we read, and changes that we refuse."""
    rng = Rng(seed)
    accepted, refused = [], []
    for i in range(count):
        changes, path = _save_theirs(rng, folder / f"{i}"), folder / f"{i}"
        try:
            HfSource(path)
            accepted.append((changes, path))
        except ValueError:
            refused.append(changes)
    return accepted, refused


def _check_import(world: World, folder: Path, count: int, seed: int) -> Counter[str]:
    accepted, refused = _read(count, seed, folder)
    found = Counter(refused=len(refused))
    for (changes, path), ours in zip(
        accepted, world.run(_of_folders, [p for _, p in accepted], ranks=1)[0], strict=True
    ):
        theirs = _their_logits(path)
        found["equal" if theirs is not None else "not loaded by transformers"] += 1
        if theirs is None:
            print("transformers does not load", changes)
        else:
            assert theirs.shape == (B, S, V)
            _check_equal(ours, theirs, changes)
    return found


@pytest.mark.slow
def test_a_few_random_models_in_both_directions(world2: World, tmp_path: Path) -> None:
    families, reasons = _check_export(world2, tmp_path / "ours", 6, seed=9)
    assert len(families) == 4
    assert reasons
    found = _check_import(world2, tmp_path / "theirs", 10, seed=3)
    assert found["equal"] >= 2
    assert found["refused"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_random_keys_of_theirs_are_honoured_or_refused(world2: World, tmp_path: Path, seed: int) -> None:
    found = _check_import(world2, tmp_path, 150, seed)
    print(f"\n150 configs of theirs: {dict(found)}, none silently different")
    assert found["equal"] > 30
    assert found["refused"] > 30
