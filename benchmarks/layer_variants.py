"""Implementations of a transformer block that `bench_layer` compares, each built as its users build it.

    eager, compiled      `blocks.ReferenceLayers`, plain torch in bf16
    megafp8:<recipe>     blocks of `megafp8.models.gpt`, built as the trainer builds a pipeline stage, with an fp32
                         gradient buffer. `+fast`: fast accumulation in all three GEMMs. `+graph`: all micro-batches
                         of a step are replayed from a CUDA graph, as in the trainer. `+floor`: only the GEMMs and
                         attention kernels, as a lower bound of the time
    torchao:<recipe>     `blocks.ReferenceLayers` converted by torchao, compiled
    te:<recipe>          Transformer Engine's modules with gradient accumulation fused into wgrad, in fp32, as
                         Megatron-LM uses them

Each implementation stores gradients where it does so in training: the torch variants in bf16 `.grad`, the others in an
fp32 `main_grad` with twice the bytes. All variants start from the same weights.

Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks.blocks import EPSILON, ROTARY_BASE, ReferenceLayers, Shape, build_stage
from megafp8.batch import Batch
from megafp8.config.schema import Fp8Config
from megafp8.gemm.dispatch import Fp8Gemm
from megafp8.layers.attention.op import sdpa_backends
from megafp8.parallel.data.grad_buffer import GradBuffer
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.cuda_graphs import EAGER_STEPS, Graphs

GRAPH, FLOOR = "+graph", "+floor"
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE_RECIPES = {
    "bf16": None,
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}


class NotInstalledError(Exception):
    """Error raised if a package that a variant needs is not installed."""


@dataclass(frozen=True)
class Problem:
    """Description of what to build: `layers` blocks, `seq_length` tokens, and weights by the names of the reference."""

    shape: Shape
    layers: int
    seq_length: int
    weights: dict[str, Tensor]
    parallel: ParallelState

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.parallel.device


@dataclass(frozen=True)
class Layers:
    """Variant that is ready to run.

    Attributes:
        forward: Function of x, `[s, b, h]`, and a flag that tells whether the weights have changed since the last call;
            returns `[s, b, h]`.
        parameters: Parameters by the reference's names.
        zero_grad: Function that clears the gradients.
        end_step: Function that does what the variant does once per optimizer step.
    """

    forward: Callable[[Tensor, bool], Tensor]
    parameters: dict[str, nn.Parameter]
    zero_grad: Callable[[], None]
    end_step: Callable[[], None] = lambda: None

    def micro_batch(self, x_sbh: Tensor, dy_sbh: Tensor, first: bool) -> Tensor:
        """Run forward and backward; return dx, `[s, b, h]`."""
        leaf = x_sbh.detach().requires_grad_()
        self.forward(leaf, first).backward(dy_sbh)
        assert leaf.grad is not None
        return leaf.grad

    def passes(self, x_sbh: Tensor, dy_sbh: Tensor, micro_batches: int) -> Tensor:
        """Run forward and backward of the micro-batches of one step, all with equal data; return dx."""
        for index in range(micro_batches):
            dx_sbh = self.micro_batch(x_sbh, dy_sbh, index == 0)
        return dx_sbh

    def iteration(self, x_sbh: Tensor, dy_sbh: Tensor, micro_batches: int) -> Tensor:
        """Run a step without the update of the weights; return dx. This is what `bench_layer` times."""
        dx_sbh = self.passes(x_sbh, dy_sbh, micro_batches)
        self.end_step()
        return dx_sbh

    def gradients(self) -> dict[str, Tensor | None]:
        """Return each parameter's gradient, or None for a parameter without one."""
        return {name: getattr(p, "main_grad", p.grad) for name, p in self.parameters.items()}


@dataclass(frozen=True)
class GraphedLayers(Layers):
    """Layers with steps that are replayed after the first ones. x and dy must always be the same tensors."""

    graphs: Graphs = field(kw_only=True)

    def passes(self, x_sbh: Tensor, dy_sbh: Tensor, micro_batches: int) -> Tensor:
        """Run or replay forward and backward of all micro-batches; return dx."""
        eager = super().passes
        name = f"step of {micro_batches}"
        return self.graphs.run(name, lambda _: eager(x_sbh, dy_sbh, micro_batches), (), eager_runs=EAGER_STEPS)


Builder = Callable[[Problem], Layers]


def variants() -> dict[str, Builder]:
    """Return the builders of all variants by name, including all recipes of the config."""
    known: dict[str, Builder] = {"eager": build_eager, "compiled": build_compiled}
    for recipe in get_args(Fp8Config.model_fields["recipe"].annotation):
        plain = partial(build_megafp8, recipe=recipe)
        ours = {"megafp8:bf16": plain}
        if recipe != "none":
            fast = partial(plain, fast_accumulation=(True, True, True))
            ours = {f"megafp8:{recipe}": plain, f"megafp8:{recipe}+fast": fast}
            known |= {name + FLOOR: build for name, build in ours.items()}  # timed by `floor_of`
        known |= ours
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


# --- plain torch, and torchao ----------------------------------------------------------------------------------------


def _reference(problem: Problem) -> ReferenceLayers:
    with problem.device:
        layers = ReferenceLayers(problem.shape, problem.layers, problem.seq_length)
    _copy_weights(dict(layers.named_parameters()), problem.weights)
    return layers


def _torch_layers(layers: ReferenceLayers, *, compiled: bool = True) -> Layers:
    if compiled:  # all blocks as one graph; `fullgraph` makes a silent fallback to eager impossible
        layers.compile(fullgraph=True, dynamic=False)
    return Layers(lambda x, _: layers.run(x), dict(layers.named_parameters()), layers.zero_grad)


def build_eager(problem: Problem) -> Layers:
    """Build the reference, run eagerly."""
    return _torch_layers(_reference(problem), compiled=False)


def build_compiled(problem: Problem) -> Layers:
    """Build the reference, compiled."""
    return _torch_layers(_reference(problem))


def build_torchao(problem: Problem, recipe: str) -> Layers:
    """Build the reference converted by torchao. On a CPU, the FP8 GEMMs are emulated."""
    torchao = _import("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=problem.device.type == "cpu")
    layers = _reference(problem)
    torchao.convert_to_float8_training(layers, config=config)
    return _torch_layers(layers)


# --- megafp8 ---------------------------------------------------------------------------------------------------------


def build_megafp8(problem: Problem, graphed: bool = False, **fp8: Any) -> Layers:
    """Build megafp8's blocks. `fp8` are fields of the config section fp8."""
    parallel = problem.parallel
    config, manager, stage = build_stage(
        problem.shape, problem.layers, problem.seq_length, parallel, torch.bfloat16, **fp8
    )
    parameters = dict(stage.named_parameters())
    _copy_weights(parameters, problem.weights)
    manager.materialize(problem.device)
    buffer = GradBuffer(
        list(parameters.values()),
        data_parallel_group=parallel.data_context.group,
        bucket_elements=int(config.parallel.bucket_mib * 2**20 / 4),
        device=problem.device,
    )
    tokens = torch.zeros(1, problem.seq_length, dtype=torch.int64, device=problem.device)
    inputs = stage.layer_inputs(Batch(tokens, tokens))

    def forward(x_sbh: Tensor, first: bool) -> Tensor:
        x_sbh, branch_sbh = stage.run_blocks(x_sbh, inputs)
        assert branch_sbh is not None
        return x_sbh + branch_sbh

    if graphed:
        graphs = Graphs(problem.device)
        return GraphedLayers(forward, parameters, buffer.clear, manager.end_step, graphs=graphs)
    return Layers(forward, parameters, buffer.clear, manager.end_step)


# --- the floor: GEMMs and attention alone ----------------------------------------------------------------------------
#
# In the best case, casts, norms, activations and rotations would be free. The FP8 GEMMs and attention kernels of one
# micro-batch are recorded with their operands and replayed in order, so that the GPU draws about as much power as in
# training. The operands, including quantized gradients, stay in memory. The replayed weight gradients add up in the
# gradient buffer, as they do over micro-batches.

Call = Callable[[], object]


def _record_attention(calls: list[Call], attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `attend` so that each call appends itself to `calls`, and its backward when that runs."""

    def replay(*inputs: Tensor, **options: Any) -> Tensor:
        if not inputs[0].is_cuda:
            return attend(*inputs, **options)
        with sdpa_kernel(sdpa_backends(), set_priority=True):
            return attend(*inputs, **options)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        y = attend(q, k, v, **options)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs[:] = [replay(*inputs, **options)]

        def record_backward(dy: Tensor) -> None:
            calls.append(lambda: torch.autograd.grad(outputs, inputs, dy))

        calls.append(forward)
        y.register_hook(record_backward)
        return y

    return call


@contextmanager
def _recorded() -> Iterator[list[Call]]:
    """Record FP8 GEMMs and attention that run within the context, as calls that repeat them."""
    calls: list[Call] = []
    originals = {name: getattr(Fp8Gemm, name) for name in ("tn", "accumulate_tn")}
    attend = F.scaled_dot_product_attention
    nested: list[bool] = []  # accumulate_tn may call tn

    def record(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not nested:
                calls.append(lambda: product(*args, **options))
            nested.append(True)
            try:
                return product(*args, **options)
            finally:
                nested.pop()

        return call

    try:
        for name, product in originals.items():
            setattr(Fp8Gemm, name, record(product))
        F.scaled_dot_product_attention = _record_attention(calls, attend)
        yield calls
    finally:
        for name, product in originals.items():
            setattr(Fp8Gemm, name, product)
        F.scaled_dot_product_attention = attend


@dataclass(frozen=True, kw_only=True)
class _Replay(Layers):
    calls: tuple[Call, ...]
    dx_sbh: Tensor

    def micro_batch(self, x_sbh: Tensor, dy_sbh: Tensor, first: bool) -> Tensor:
        for call in self.calls:
            call()
        return self.dx_sbh


def floor_of(layers: Layers, x_sbh: Tensor, dy_sbh: Tensor) -> Layers:
    """Return the GEMMs and attention of one micro-batch of `layers`, which run once to record them."""
    with _recorded() as calls:
        dx_sbh = layers.micro_batch(x_sbh, dy_sbh, True)
    return _Replay(layers.forward, layers.parameters, layers.zero_grad, calls=tuple(calls), dx_sbh=dx_sbh)


# --- Transformer Engine ----------------------------------------------------------------------------------------------


def build_te(problem: Problem, recipe: str) -> Layers:
    """Build Transformer Engine's attention and MLP with plain residuals.

    `te.TransformerLayer` is not used, because it runs dropout even at p = 0.
    """
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
