"""Groups of parameters: what updates each parameter of all kinds of layers, and what groups change."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megafp8.config.parts import PARTS
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.muon import Muon
from megafp8.optimizer.param_groups import ParamGroup, ParamRates, check_groups, is_hidden_matrix, rates_of
from megafp8.parallel.data.grad_buffer import main_grad_of
from megafp8.parallel.sharding import Init, ParamSpec, spec_of, stack_rows, unsharded
from megafp8.training.describe import planned_stage
from tests.tiny_model import CPU, make_buffer, make_param
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of


def _spec(*names: str, weight_decay: bool = True) -> ParamSpec:
    pieces = stack_rows([piece for name in names for piece in unsharded(name, (2, 2))])
    return ParamSpec(pieces, Init("zeros"), replicated_over_tp=True, weight_decay=weight_decay)


MODEL = [
    _spec("embedding.word.weight"),
    _spec("layers.0.attention.q.weight", "layers.0.attention.k.weight"),
    _spec("layers.1.attention.q.weight", "layers.1.attention.k.weight"),
    _spec("layers.0.mlp_norm.weight", weight_decay=False),
]


def test_the_first_group_that_fits_counts() -> None:
    groups = [
        ParamGroup(match=["layers.1.*", "embedding.*"], learning_rate_scale=0.5),
        ParamGroup(match=["layers.*"], learning_rate_scale=2.0, weight_decay=0.3),
    ]
    check_groups(MODEL, groups)
    found = [rates_of(spec, 0.1, groups) for spec in MODEL]
    assert found == [ParamRates(0.5, 0.1), ParamRates(2.0, 0.3), ParamRates(0.5, 0.1), ParamRates(2.0, 0.3)]
    assert [rates_of(spec, 0.1, []) for spec in MODEL] == [ParamRates(1.0, 0.1)] * 3 + [ParamRates(1.0, 0.0)]
    kinds = {"matrix": replace(MODEL[1], matrix=True), "score": replace(MODEL[1], scores=True), "other": MODEL[1]}
    scales = {kind: rates_of(spec, 0.1, [], 0.5, 0.25).learning_rate_scale for kind, spec in kinds.items()}
    assert scales == {"matrix": 0.5, "score": 0.25, "other": 1.0}


def test_a_group_without_decay_leaves_norms_without() -> None:
    assert rates_of(MODEL[3], 0.1, [ParamGroup(match=["*norm*"], learning_rate_scale=0.5)]) == ParamRates(0.5, 0.0)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        (["embedding.*", "layer.0.*"], r"groups\[0\].match has 'layer.0.\*', which no tensor .* names are like embed"),
        (["*.q.weight"], r"groups\[0\] has layers.0.attention.q.weight but not layers.0.attention.k.weight"),
        (["*.k.weight"], r"groups\[0\] has layers.0.attention.k.weight but not layers.0.attention.q.weight"),
    ],
)
def test_patterns_that_do_not_fit(match: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_groups(MODEL, [ParamGroup(match=match)])


def test_learning_rate_and_decay_are_those_of_torch() -> None:
    """Four steps against torch's AdamW with groups of its own."""
    names = ["embedding.word.weight", "weight", "bias"]
    params = [make_param(name, [[1.0, -2.0], [0.5, 3.0]]) for name in names]
    buffer = make_buffer(params)
    groups = [
        ParamGroup(match=["embedding.*"], learning_rate_scale=0.25, weight_decay=0.0),
        ParamGroup(match=["bias"], learning_rate_scale=2.0, weight_decay=0.7),
    ]
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.1, groups=groups)
    optimizer = MixedPrecisionOptimizer(buffer.shards, config, device=CPU)
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
    rates = [(0.25, 0.0), (1.0, 0.1), (2.0, 0.7)]
    adam = torch.optim.AdamW(
        [{"params": [x], "weight_decay": d} for x, (_, d) in zip(theirs, rates)], betas=(0.9, 0.95)
    )
    for step, lr in enumerate([0.1, 0.05, 0.02, 0.1]):
        for i, (param, x) in enumerate(zip(params, theirs)):
            x.grad = torch.full_like(x, float(step + i) - 1.5)
            main_grad_of(param).copy_(x.grad)
        for group, (scale, _) in zip(adam.param_groups, rates):
            group["lr"] = scale * lr
        optimizer.step(lr)
        adam.step()
    for param, x in zip(params, theirs):
        torch.testing.assert_close(param.detach(), x.detach(), rtol=1e-6, atol=1e-7)


SHORT_CONVOLUTION = Preset(
    ("short-convolution",),
    {"model": {"layer_kinds": {"short": {"mixer": "short_convolution"}}, "pattern": ["short"]}},
)
RWKV7 = Preset(
    ("rwkv7",), {"model": {"layer_kinds": {"rwkv": {"mixer": {"kind": "rwkv7", "num_heads": 4}}}, "pattern": ["rwkv"]}}
)
MAMBA1 = Preset(
    ("mamba1",),
    {"model": {"layer_kinds": {"mamba": {"mixer": {"kind": "mamba1", "inner_size": 64, "step_rank": 4}}},
               "pattern": ["mamba"]}},
)  # fmt: skip
RG_LRU = Preset(
    ("rg-lru",),
    {"model": {"layer_kinds": {"lru": {"mixer": {"kind": "rg_lru", "inner_size": 64, "num_heads": 4}}},
               "pattern": ["lru"]}},
)  # fmt: skip
MODELS = [
    GPT2 | MTP, QK_NORM, GEMMA4, DEEPSEEK, SPARSE, BLOCK_SPARSE, COMPRESSED, HYBRID, KIMI, DELTA_PRODUCT, NEMOTRON,
    SHARED_ATTENTION,
    SHORT_CONVOLUTION, RWKV7, MAMBA1, RG_LRU, HYPER, GPT_OSS, FEW_ROWS, SEPARATE_NORMS, PER_LAYER, BERT, T5, LORA,
]  # fmt: skip
"""Models that have all kinds of parts."""
BY_MUON = {
    *(f"attention.{x}.weight" for x in ("q", "k", "v", "proj", "q_down", "q_up", "kv_down", "kv_up")),
    *(f"attention.index_{x}.weight" for x in ("q", "k", "weights")),
    *(f"cross_attention.{x}.weight" for x in ("q", "k", "v", "proj")),
    *(f"compressed_attention.{x}.weight" for x in ("q_down", "q_up", "kv", "output_down", "proj")),
    *(f"compressed_attention.{x}.weight" for x in ("entry_kv", "entry_gate")),
    *(f"compressed_attention.index_{x}.weight" for x in ("q", "kv", "gate", "weights")),
    *(f"gated_delta_net.{x}.weight" for x in ("q", "k", "v", "z", "beta", "decay", "proj", "k2", "v2", "beta2")),
    *(f"kimi_delta_attention.{x}.weight" for x in ("q", "k", "v", "erase", "write", "beta", "decay_down", "decay_up")),
    *(f"kimi_delta_attention.{x}.weight" for x in ("gate_down", "gate_up", "proj")),
    *(f"mamba1.{x}.weight" for x in ("x", "z", "selection", "step", "proj")),
    *(f"mamba2.{x}.weight" for x in ("x", "b", "c", "z", "step", "proj")),
    *(f"shared_attention.{x}.weight" for x in ("x", "b", "c", "z", "step", "proj", "output")),
    *(f"shared_attention.transformer.attention.{x}.weight" for x in ("q", "k", "v", "proj")),
    *(f"shared_attention.transformer.mlp.{x}.weight" for x in ("gate", "up", "down")),
    *(f"shared_attention.adapters.N.{x}.{y}.weight" for x in "qkv" for y in ("down", "up")),
    *(f"shared_attention.adapters.N.gate_up.{x}.weight" for x in ("down", "gate", "up")),
    *(f"rg_lru.{x}.weight" for x in ("x", "z", "input_gate", "recurrence_gate", "proj")),
    *(f"rwkv7.{x}.weight" for x in ("r", "k", "v", "proj")),
    *(f"rwkv7.{x}_{y}.weight" for x in ("decay", "rate", "gate") for y in ("down", "up")),
    *(f"short_convolution.{x}.weight" for x in ("b", "c", "x", "proj")),
    *(f"mlp.{x}.weight" for x in ("gate", "up", "down", "latent_down", "latent_up")),
    *(f"mlp.{part}.{x}.weight" for part in ("shared", "experts.N") for x in ("gate", "up", "down")),
    *("projection.weight", "per_layer_gate.weight", "per_layer_projection.weight"),
    *(f"{x}.lora_{y}" for x in ("attention.q", "attention.k", "attention.v", "attention.proj") for y in "ab"),
    *(f"mlp.{x}.lora_{y}" for x in ("gate", "up", "down") for y in "ab"),
}
"""Names of tensors in blocks."""
PER_HEAD = {
    **{f"{kind}.{x}.weight": 1 for kind in ("attention", "cross_attention") for x in "qkv"},
    **{f"shared_attention.transformer.attention.{x}.weight": 1 for x in "qkv"},
    "attention.q_up.weight": 1,
    "attention.kv_up.weight": 2,
}
"""Tensors whose heads may have separate matrices, and how many a head has."""
BY_ADAMW = {
    *("mlp.router.weight", "mlp.shared_gate.weight", "attention_connection.fn", "mlp_connection.fn"),
    *(f"{mixer}.{x}_conv.weight" for mixer in ("gated_delta_net", "kimi_delta_attention") for x in "qkv"),
    *(f"gated_delta_net.{x}_conv.weight" for x in ("k2", "v2")),
    *("mamba1.x_conv.weight", "mamba1.log_rate.weight"),
    *("rg_lru.x_conv.weight", "rg_lru.input_gate.bias", "rg_lru.recurrence_gate.bias"),
    *(f"{mixer}.{x}_conv.weight" for mixer in ("mamba2", "shared_attention") for x in "xbc"),
    *("short_convolution.x_conv.weight", "rwkv7.shift.weight"),
    *("compressed_attention.entry_position.weight", "compressed_attention.index_position.weight"),
}
"""Names of tensors in blocks that have two dims or more, and of which Muon must not make one with equal directions."""


def test_what_updates_each_parameter_of_all_kinds_of_layers() -> None:
    """Muon updates the weights of linear layers in blocks; a new parameter must be in one of the tables."""
    muon, parts, found = OptimizerConfig(name="muon", learning_rate=1e-3), set(), dict[str, bool]()
    per_head = dict[str, int]()  # matrices of a head
    for preset in MODELS:
        config = config_of(preset)
        parts |= {type(part) for spec in config.spec.distinct_layers for part in (spec.mixer, spec.ffn)}
        for spec in map(spec_of, planned_stage(config, 0).parameters()):
            by_muon = isinstance(muon.update(hidden_matrix=is_hidden_matrix(spec)), Muon)
            for piece in spec.shards:
                kind, _, name = re.sub(r"(?<=\.)\d+(?=\.)", "N", piece.name).partition("layers.N.")
                in_block = not kind and len(piece.global_shape) > 1
                assert in_block or not by_muon, piece.name
                if in_block:
                    assert found.setdefault(name, by_muon) == by_muon, piece.name
                    if piece.heads:
                        assert sum(map(len, piece.matrix_rows(per_head=True))) == piece.global_shape[0]
                        per_head[name] = len(piece.heads)
    assert parts == {*PARTS}
    assert {name for name in found if found[name]} == BY_MUON
    assert {name for name in found if not found[name]} == BY_ADAMW
    assert per_head == PER_HEAD
