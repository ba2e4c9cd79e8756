"""Megatron-LM's checkpoints: each rank's tensors are written and read as its definition shards them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config import model_spec
from megafp8.conversion.megatron.args import read_args
from megafp8.conversion.megatron.sink import MegatronSink
from megafp8.conversion.megatron.source import MegatronSource, is_megatron
from megafp8.layers.experts.router import choose, weigh
from tests.conversion.checkpoints import convert
from tests.conversion.families import RandomSource
from tests.conversion.megatron.reference import MODELS, READ_ONLY, TINY, chosen, folders, rank, save
from tests.marks import slow_but

# Arguments as a user of Megatron-LM would give them for MODELS, and its defaults of those they would not.
COMMON = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 8,
    "vocab_size": 50,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
    "add_position_embedding": True,
    "num_experts": None,
    "group_query_attention": False,
    "num_query_groups": 1,
    "window_size": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
ARGS: dict[str, dict[str, Any]] = {
    "llama": COMMON
    | LLAMA
    | {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 4, "rotary_base": 500000}
    | {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    "gpt2": COMMON
    | {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}
    | {"hidden_dropout": 0.1, "attention_dropout": 0.2},
    "qwen2": COMMON
    | LLAMA
    | GROUPS
    | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-6},
    "qwen3": COMMON | LLAMA | GROUPS | {"qk_layernorm": True, "window_size": (7, 0), "window_attn_skip_freq": 2},
    "swiglu, biases, sinks": COMMON | LLAMA | {"add_bias_linear": True, "softmax_type": "learnable"},
    "mixtral": COMMON
    | LLAMA
    | GROUPS
    | {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": 1}
    | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01},
    "all of experts": COMMON
    | LLAMA
    | {
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 20,
        "moe_latent_size": 8,
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.001,
    },
    "exact gelu": COMMON
    | {"position_embedding_type": "none", "normalization": "RMSNorm", "bias_gelu_fusion": False}
    | {"untie_embeddings_and_output_weights": True},
}
BERT = COMMON | {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "bert_binary_head": True}
BERT |= {"hidden_dropout": 0.1, "attention_dropout": 0.1}
ARGS |= {"bert": BERT, "bert without pairs": BERT | {"bert_binary_head": False, "bias_gelu_fusion": False}}
LAYOUTS = [(1, 1, 1), (2, 2, 2)]
MORE = [("llama", (1, 2, 1)), ("gpt2", (1, 2, 1)), ("llama", (1, 4, 1)), ("llama", (4, 1, 1)), ("gpt2", (4, 2, 2))]
EXPERTS = [(1, 1, 1), (2, 1, 1, 4), (2, 2, 2, 2)]
CASES: list[tuple[str, tuple[int, ...]]] = [
    *((name, layout) for name in MODELS for layout in (EXPERTS if "moe" in MODELS[name] else LAYOUTS)),
    *MORE,
]
QUICK: list[tuple[str, tuple[int, ...]]] = [
    *((name, (2, 2, 2)) for name in ("gpt2", "qwen2", "qwen3", "swiglu, biases, sinks")),
    *(("llama", (4, 1, 1)), ("mixtral", (1, 1, 1)), ("all of experts", (2, 2, 2, 2))),
]


def random_source(name: str, **options: Any) -> RandomSource:
    return RandomSource(model_spec((MODELS | READ_ONLY)[name]), **options)


def assert_same(read: MegatronSource, truth: RandomSource) -> None:
    assert read.tensors.keys() == truth.whole.keys()
    for name, expected in truth.whole.items():
        tensor = read.read(name)
        assert tensor.dtype == expected.dtype == read.tensors[name].dtype, name
        assert tuple(tensor.shape) == read.tensors[name].shape, name
        if name in ("model.embedding.word.weight", "model.output.weight", "model.output.bias"):
            tensor, expected = tensor[:50], expected[:50]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(("name", "layout"), slow_but(CASES, *QUICK), ids=str)
def test_each_rank_is_written_as_megatron_has_it(name: str, layout: tuple[int, ...], tmp_path: Path) -> None:
    source = random_source(name)
    t, p, virtual, expert = *layout, *[1] * (4 - len(layout))
    te = name not in ("qwen2", "mixtral")
    implementation: Any = "transformer_engine" if te else "local"
    convert(
        source, MegatronSink(tmp_path / "out", tensor=t, pipeline=p, virtual_pipeline=virtual if virtual > 1 else None,
        implementation=implementation, expert=expert),
    )  # fmt: skip
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    files = sorted((tmp_path / "out").rglob("*.pt"))
    assert len(files) == t * p * expert
    for ranks, folder in folders(layout).items():
        content = torch.load(tmp_path / "out/release" / folder / "model_optim_rng.pt", weights_only=False)
        expected = rank(source.whole, source.model, *ranks, layout, te=te, multiple=8)
        assert content.keys() == expected.keys() | {
            "args",
            "checkpoint_version",
            "iteration",
            "num_floating_point_operations_so_far",
        }
        args, of_experts = vars(content["args"]), {key for key in ARGS[name] if key.startswith("moe_")}
        assert {key: args[key] for key in of_experts} == {key: ARGS[name][key] for key in of_experts}
        for key, tensors in expected.items():
            found = {n: x for n, x in content[key].items() if not n.endswith("_extra_state")}
            assert found.keys() == tensors.keys()
            for n, x in tensors.items():
                assert torch.equal(found[n], x), (folder, key, n)


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(
        [*CASES, *((name, layout) for name in READ_ONLY for layout in LAYOUTS)],
        *QUICK,
        *((name, (2, 2, 2)) for name in READ_ONLY),
    ),
    ids=str,
)
def test_each_tensor_is_read_from_what_megatron_writes(name: str, layout: tuple[int, ...], tmp_path: Path) -> None:
    truth = random_source(name, dtype=torch.bfloat16)
    read = MegatronSource(save(tmp_path, truth, ARGS[name], layout, te=name not in ("gpt2", "mixtral")))
    assert read.path == tmp_path / "iter_0000100"
    assert read.model == truth.model
    assert read.about == {"step": 100}
    assert_same(read, truth)


def test_the_arguments_that_megatron_compares_or_takes(tmp_path: Path) -> None:
    source = random_source("llama", dtype=torch.bfloat16)
    source.about = {"step": 7, "consumed_samples": 56, "config": {"training": {"seq_length": 16}}}
    (tmp_path / "tokenizer.json").write_text("{}")
    source.tokenizer_files = [tmp_path / "tokenizer.json"]
    convert(source, MegatronSink(tmp_path / "out", 4, 2, 2))
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "7"
    with torch.serialization.safe_globals([argparse.Namespace]):  # as Megatron-LM itself loads with recent torch
        content = torch.load(tmp_path / "out/iter_0000007/mp_rank_03_001/model_optim_rng.pt", weights_only=True)
    assert content["checkpoint_version"] == 3.0
    assert content["iteration"] == 7
    args = vars(content["args"])
    expected = ARGS["llama"] | {
        "seq_length": 16,
        "padded_vocab_size": 64,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "consumed_train_samples": 56,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "fp16": False,
        "tokenizer_type": "HuggingFaceTokenizer",
        "bias_gelu_fusion": False,
    }
    assert {key: args.get(key) for key in expected} == expected
    back = MegatronSource(tmp_path / "out")
    assert [file.read_text() for file in back.tokenizer_files] == ["{}"]
    assert back.about == {"step": 7, "consumed_samples": 56}


def test_a_vocabulary_of_unknown_size_is_all_rows(tmp_path: Path) -> None:
    truth = random_source("llama")
    args = {key: value for key, value in ARGS["llama"].items() if key != "vocab_size"}
    save(tmp_path, truth, args, (2, 1, 1), multiple=8)
    assert MegatronSource(tmp_path).model.stem.vocab_size == 64
    assert MegatronSource(tmp_path, vocab_size=50).read("model.output.weight").shape == (56, 16)
    with pytest.raises(ValueError, match="vocab_size is 65, but the embedding has 64 rows"):
        MegatronSource(tmp_path, vocab_size=65)


def test_a_vocabulary_with_less_padding_than_ours(tmp_path: Path) -> None:
    truth = random_source("llama")
    save(tmp_path, truth, ARGS["llama"], (2, 1, 1), multiple=1)  # 50 rows, ours has 56
    read = MegatronSource(tmp_path).read("model.embedding.word.weight")
    assert torch.equal(read[:50], truth.whole["model.embedding.word.weight"][:50])
    assert not read[50:].any()


def test_layers_may_lie_unevenly(tmp_path: Path) -> None:
    truth = random_source("qwen3")
    save(tmp_path, truth, ARGS["qwen3"], (1, 2, 1))
    one, two = (tmp_path / f"iter_0000100/mp_rank_00_00{s}/model_optim_rng.pt" for s in range(2))
    a, b = (torch.load(file, weights_only=False) for file in (one, two))
    moved = [key for key in b["model"] if key.startswith("decoder.layers.0.")]
    for key in moved:
        a["model"][key.replace("layers.0.", "layers.2.")] = b["model"].pop(key)
    b["model"] = {key.replace("layers.1.", "layers.0."): x for key, x in b["model"].items()}
    torch.save(a, one)
    torch.save(b, two)
    assert_same(MegatronSource(tmp_path), truth)


def test_models_from_before_megatron_core(tmp_path: Path) -> None:
    truth = random_source("gpt2")
    save(tmp_path, truth, ARGS["gpt2"], (2, 2, 1), te=False)
    names = {
        "input_layernorm": "input_norm",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_norm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "final_layernorm": "final_norm",
    }
    for file in tmp_path.rglob("*.pt"):
        content = torch.load(file, weights_only=False)
        old: dict[str, Any] = {"language_model": {"encoder": {}}}
        for key, x in content["model"].items():
            for new, name in names.items():
                key = key.replace(f"{new}.", f"{name}.")
            if key.startswith("decoder."):
                old["language_model"]["encoder"][key.removeprefix("decoder.")] = x
            elif key == "output_layer.weight":
                old["word_embeddings_for_head"] = {"weight": x}
            else:
                _, table, _ = key.split(".")
                old["language_model"].setdefault("embedding", {})[table] = {"weight": x}
        torch.save({**content, "model": old}, file)
    assert_same(MegatronSource(tmp_path), truth)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
        {"moe_router_group_topk": 4},
        {"moe_router_score_function": "sigmoid", "moe_router_group_topk": 2},
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    ],
    ids=str,
)
def test_a_router_chooses_as_its_arguments_say(args: dict[str, Any]) -> None:
    args = ARGS["mixtral"] | {"num_experts": 16, "moe_router_topk": 4, "moe_router_num_groups": 8} | args
    sigmoid = args.get("moe_router_score_function") == "sigmoid"
    moe = read_args(args | {"moe_router_enable_expert_bias": sigmoid}, 50, 8).layers[0].ffn
    assert moe is not None
    torch.manual_seed(1)
    logits, bias = 2 * torch.randn(50, 16).double(), torch.randn(16).double() if sigmoid else None
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    experts = choose(scores, moe, bias)
    weights = weigh(scores, experts, moe)
    torch.testing.assert_close(torch.zeros_like(logits).scatter(1, experts, weights), chosen(logits, args, bias))


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ({"parallel_block": True}, (), "Megatron-LM has no model with parallel_block = True"),
        ({"activation": "gelu_tanh"}, (), "no model with activation = 'gelu_tanh'"),
        ({"qk_norm": "projection"}, (), "no model with qk_norm = 'projection'"),
        ({"activation": "geglu_tanh"}, (), "no model with activation = 'geglu_tanh'"),
        ({"rope_scaling": {"low_freq_factor": 2.0}}, (), "no model with rope_scaling"),
        ({"normalization": "layernorm", "qk_norm": True}, (), "qk_layernorm with normalization = 'LayerNorm'"),
        (READ_ONLY["bert"], (), "architecture = 'bert': megafp8 only writes Megatron-LM's gpt"),
        (
            {"layer_kinds": {"a": {"mixer": {"kind": "mamba2", "num_heads": 8}}}, "pattern": ["a"]},
            (),
            "layers with mamba2: megafp8 only writes layers with attention",
        ),
        ({}, (3,), "TP 3 does not divide the model's num_attention_heads = 4"),
        ({"num_query_groups": 2}, (4,), "TP 4 does not divide the model's num_query_groups = 2"),
        ({}, (1, 3), "do not divide 4 layers"),
        ({}, (1, 1, 2), "virtual PP 2 with PP 1"),
        ({}, (1, 1, 1, "local", 2), "EP 2 does not divide the model's moe.num_experts = 1"),
        ({"moe": {"num_experts": 4, "ffn_hidden_size": 6}}, (4,), "TP 4 does not divide the model's moe.ffn_hidden"),
        ({"moe": {"num_experts": 4, "selection_bias": True}}, (), "moe_router_enable_expert_bias = True with"),
        (
            {"moe": {"num_experts": 4, "score": "sigmoid", "normalize": False}},
            (),
            "no model with moe.normalize = False",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    model: dict[str, Any], layout: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronSink(tmp_path / "out", *layout).begin(RandomSource(model_spec(TINY | model)), {})
    assert not list(tmp_path.iterdir())


def test_t5_is_refused(tmp_path: Path) -> None:
    save(tmp_path, random_source("bert"), ARGS["bert"], (1, 1, 1))
    (file,) = tmp_path.rglob("*.pt")
    content = torch.load(file, weights_only=False)
    first = {key: x for key, x in content["model"].items() if key.startswith("encoder.layers.0.")}
    content["model"] |= {key.replace("encoder", "decoder"): x for key, x in first.items()}
    torch.save(content, file)
    with pytest.raises(
        ValueError, match=r"model_optim_rng\.pt is a T5 model; megafp8 reads Megatron-LM's GPT and BERT"
    ):
        MegatronSource(tmp_path)


def test_a_folder_is_recognized(tmp_path: Path) -> None:
    save(tmp_path, random_source("llama"), ARGS["llama"], (1, 1, 1))
    assert is_megatron(tmp_path)
    assert is_megatron(tmp_path / "iter_0000100")
    assert not is_megatron(tmp_path / "iter_0000100" / "mp_rank_00")
    assert_same(MegatronSource(tmp_path / "iter_0000100"), random_source("llama"))
