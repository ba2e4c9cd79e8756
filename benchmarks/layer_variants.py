"""The implementations of a transformer block that `bench_layer` compares, each built the way its users build it.

    eager, compiled      `reference_layers`, plain torch in bf16
    megafp8:<recipe>     blocks of `megafp8.models.gpt`, built as the trainer builds a pipeline stage, with its fp32
                         gradient buffer; `+fast` accumulates fast in all three GEMMs, `+graph` replays micro-batches
                         from CUDA graphs, captured as the trainer captures its own, `+alone` is the floor: its GEMMs
                         and attention and nothing else (`layer_floor`)
    torchao:<recipe>     `reference_layers` converted by torchao, compiled
    te:<recipe>          Transformer Engine's modules with fused gradient accumulation into fp32, as Megatron-LM uses
    them

Gradients therefore end up where each keeps them in training: bf16 `.grad` for the torch variants, an fp32 `main_grad`
for the others, which is twice the bytes. All start from the same weights.

Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from benchmarks.layer_floor import LayersAlone
from benchmarks.layers import Layers, NotInstalledError, Problem
from benchmarks.reference_layers import EPSILON, ROTARY_BASE, ReferenceLayers
from megafp8.config import Config
from megafp8.config.schema import Fp8Config
from megafp8.data_parallel.grad_buffer import GradBuffer
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.training.cuda_graphs import MicrobatchGraphs
from megafp8.training.fp8_config import build_fp8

GRAPH, ALONE = "+graph", "+alone"
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE_RECIPES = {
    "bf16": None,
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}


@dataclass(frozen=True)
class GraphedLayers(Layers):
    """Layers whose micro-batches are replayed after the first steps; x and dy are the same tensors always."""

    graphs: MicrobatchGraphs = field(kw_only=True)

    def micro_batch(self, x_sbh: Tensor, dy_sbh: Tensor, first: bool) -> Tensor:
        if first:
            self.graphs.begin_step()
        if not self.graphs.ready:
            return super().micro_batch(x_sbh, dy_sbh, first)
        eager = super().micro_batch
        return self.graphs.run(lambda: eager(x_sbh, dy_sbh, first), (), first=first)


Builder = Callable[[Problem], Layers]


def variants() -> dict[str, Builder]:
    """Every known variant and how to build it. A recipe that the config learns appears here by itself."""
    known: dict[str, Builder] = {"eager": build_eager, "compiled": build_compiled}
    for recipe in get_args(Fp8Config.model_fields["recipe"].annotation):
        plain = partial(build_megafp8, recipe=recipe)
        ours = {"megafp8:bf16": plain}
        if recipe != "none":
            fast = partial(plain, fast_accumulation=(True, True, True))
            ours = {f"megafp8:{recipe}": plain, f"megafp8:{recipe}+fast": fast}
            known |= {name + ALONE: partial(_alone, build) for name, build in ours.items()}
        known |= ours
        if recipe != "nvfp4":  # its noise is drawn by the host
            known |= {name + GRAPH: partial(build, graphed=True) for name, build in ours.items()}
    known |= {f"torchao:{recipe}": partial(build_torchao, recipe=recipe) for recipe in TORCHAO_RECIPES}
    known |= {f"te:{recipe}": partial(build_te, recipe=recipe) for recipe in TE_RECIPES}
    return known


@torch.no_grad()
def _copy_weights(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    assert parameters.keys() == weights.keys(), f"names differ: {sorted(parameters.keys() ^ weights.keys())}"
    for name, parameter in parameters.items():
        assert parameter.shape == weights[name].shape, f"{name}: {tuple(parameter.shape)}"
        parameter.copy_(weights[name])


# --- plain torch, and torchao on top of it ---------------------------------------------------------------------------


def _reference(problem: Problem) -> ReferenceLayers:
    with problem.device:
        layers = ReferenceLayers(problem.shape, problem.layers, problem.seq_length)
    _copy_weights(dict(layers.named_parameters()), problem.weights)
    return layers


def _torch_layers(layers: ReferenceLayers) -> Layers:
    return Layers(lambda x, _: layers.run(x), dict(layers.named_parameters()), layers.zero_grad)


def _compile(layers: ReferenceLayers) -> None:
    """All blocks become one graph; `fullgraph` makes a silent fall-back to eager impossible."""
    layers.compile(fullgraph=True, dynamic=False)


def build_eager(problem: Problem) -> Layers:
    return _torch_layers(_reference(problem))


def build_compiled(problem: Problem) -> Layers:
    layers = _reference(problem)
    _compile(layers)
    return _torch_layers(layers)


def build_torchao(problem: Problem, recipe: str) -> Layers:
    """On a CPU its FP8 products are emulated."""
    torchao = _import("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=problem.device.type == "cpu")
    layers = _reference(problem)
    torchao.convert_to_float8_training(layers, config=config)
    _compile(layers)
    return _torch_layers(layers)


# --- megafp8 ---------------------------------------------------------------------------------------------------------


def build_megafp8(problem: Problem, graphed: bool = False, **fp8: Any) -> Layers:
    """A middle pipeline stage: blocks, and neither embedding nor head. `fp8`: fields of the config's section."""
    parallel, shape, n = problem.parallel, problem.shape, problem.layers
    config = Config.model_validate(
        {
            "name": "bench-layer",
            "model": {
                "num_layers": n + 2,
                "hidden_size": shape.hidden_size,
                "ffn_hidden_size": shape.ffn_hidden_size,
                "num_attention_heads": shape.heads,
                "num_query_groups": shape.groups,
                "head_dim": shape.head_dim,
                "norm_eps": EPSILON,
                "rope_theta": ROTARY_BASE,
            },
            "fp8": fp8,
            "training": {"steps": 1, "seq_length": problem.seq_length, "global_batch_size": 1},
            "optimizer": {"learning_rate": 1.0},
            "data": {"train": ["none"]},
        }
    )
    manager = build_fp8(config, parallel)
    context = BuildContext(parallel.tensor.group, manager, torch.bfloat16, problem.device, sequence_parallel=True)
    stage = GPTStage(config.model, context, layers=range(1, n + 1), positions=0)
    parameters = dict(stage.named_parameters())
    _copy_weights(parameters, problem.weights)
    manager.materialize(problem.device)
    buffer = GradBuffer(
        list(parameters.values()),
        data_parallel_group=parallel.data_context.group,
        bucket_elements=int(config.parallel.bucket_mib * 2**20 / 4),
        device=problem.device,
    )
    inputs = stage.layer_inputs(problem.seq_length, None, None)

    def forward(x_sbh: Tensor, first: bool) -> Tensor:
        x_sbh, branch_sbh = stage.run_blocks(x_sbh, inputs)
        assert branch_sbh is not None
        return x_sbh + branch_sbh

    if graphed:
        graphs = MicrobatchGraphs(manager, problem.device)
        return GraphedLayers(forward, parameters, buffer.zero, manager.end_step, graphs=graphs)
    return Layers(forward, parameters, buffer.zero, manager.end_step)


def _alone(build: Builder, problem: Problem) -> Layers:
    layers = build(problem)
    return LayersAlone(layers.forward, layers.parameters, layers.zero_grad, layers.end_step)


# --- Transformer Engine ----------------------------------------------------------------------------------------------


def build_te(problem: Problem, recipe: str) -> Layers:
    """Its attention and MLP modules with plain residuals: `te.TransformerLayer` would run its dropout at p = 0 too."""
    te, recipes = _import("transformer_engine.pytorch"), _import("transformer_engine.common.recipe")
    shape = problem.shape
    common: dict[str, Any] = {
        "bias": False,
        "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16,
        "fuse_wgrad_accumulation": True,
        "device": problem.device,
    }
    blocks: list[tuple[nn.Module, nn.Module]] = []
    parameters: dict[str, nn.Parameter] = {}
    for index in range(problem.layers):
        attention = te.MultiheadAttention(
            shape.hidden_size, shape.heads, kv_channels=shape.head_dim, num_gqa_groups=shape.groups,
            attention_dropout=0.0, layernorm_epsilon=EPSILON, input_layernorm=True, fuse_qkv_params=True,
            qkv_weight_interleaved=False, attn_mask_type="causal", qkv_format="sbhd", layer_number=index + 1, **common,
        )  # fmt: skip
        mlp = te.LayerNormMLP(shape.hidden_size, shape.ffn_hidden_size, eps=EPSILON, activation="swiglu", **common)
        blocks.append((attention, mlp))
        names = {
            "attention_norm": attention.layernorm_qkv.layer_norm_weight,
            "attention.qkv": attention.layernorm_qkv.weight,
            "attention.proj": attention.proj.weight,
            "mlp_norm": mlp.layer_norm_weight,
            "mlp.up": mlp.fc1_weight,
            "mlp.down": mlp.fc2_weight,
        }
        parameters |= {f"blocks.{index}.{name}.weight": parameter for name, parameter in names.items()}
    _copy_weights(parameters, problem.weights)
    main_grads = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters.values() if p.dim() == 2}
    for parameter, main_grad in main_grads.items():
        parameter.main_grad = main_grad  # type: ignore[attr-defined]
    rotary = te.RotaryPositionEmbedding(shape.head_dim, rotary_base=ROTARY_BASE)(problem.seq_length).to(problem.device)
    scaling = TE_RECIPES[recipe]
    chosen = getattr(recipes, scaling)() if scaling else None

    def forward(x_sbh: Tensor, first: bool) -> Tensor:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            for attention, mlp in blocks:
                x_sbh = x_sbh + attention(x_sbh, is_first_microbatch=first, rotary_pos_emb=rotary)
                x_sbh = x_sbh + mlp(x_sbh, is_first_microbatch=first)
        return x_sbh

    def zero_grad() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        for main_grad in main_grads.values():
            main_grad.zero_()

    return Layers(forward, parameters, zero_grad)


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotInstalledError(f"{package} is not installed")
    return importlib.import_module(name)
