"""The formula against what real models, buffers, optimizers and autograd hold on a CPU, byte for byte.

The peak and workspaces, which need a GPU, are compared with measurements elsewhere; here only how options change them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafp8.batch import Batch
from megafp8.config import Config, load_config
from megafp8.layers.experts.module import Experts
from megafp8.layers.recompute import BlockMemory, block_memory
from megafp8.objectives.registry import loss_memory, loss_of
from megafp8.optimizer.offload import ALIGNMENT
from megafp8.parallel.data.strategy import FullySharded, Zero1
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.pipeline.actions import Action, Kind
from megafp8.planner.memory import (
    RankMemory,
    expert_room,
    fp8_weight_bytes,
    memory_table,
    pipeline_memory,
    rank_memory,
)
from megafp8.planner.outline import model_outline
from megafp8.planner.stages import stages_of
from megafp8.training.describe import planned_stage
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import teacher_of
from megafp8.training.pipeline import num_microbatches, plan_pipeline
from megafp8.training.state import save_state
from megafp8.training.trainer import RankTrainer
from tests.marks import slow_but
from tests.quickstart_data import CONFIG
from tests.world import World

GPT2 = [
    "model.position_embedding=learned",
    "model.normalization=layernorm",
    "model.activation=gelu_tanh",
    "model.linear_bias=true",
    "model.num_query_groups=8",
]
_CPU = torch.device("cpu")
ALONE = ["parallel.tensor=1", "parallel.pipeline=1"]
TINY = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=8",
]
SELECTIVE = "parallel.recompute=selective"
MODES = {
    "plain": [],
    "norms": [SELECTIVE, "parallel.recompute_ops=[norms]"],
    "activation": [SELECTIVE, "parallel.recompute_ops=[activation]"],
    "attention": [SELECTIVE, "parallel.recompute_ops=[attention]"],
    "all-first": [SELECTIVE, "parallel.recompute_ops=[norms, activation, attention]", "parallel.recompute_blocks=1"],
    "full": ["parallel.recompute=full"],
    "full-first": ["parallel.recompute=full", "parallel.recompute_blocks=1"],
}
FORMATS = {
    "none": ["fp8.recipe=none"],
    "delayed": ["fp8.recipe=delayed"],
    "current": ["fp8.recipe=current"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad": ["fp8.recipe=rowwise", "fp8.override_linear_precision=[false, false, true]"],
    "blockwise": ["fp8.recipe=blockwise"],
    "mxfp8": ["fp8.recipe=mxfp8"],
    "nvfp4": ["fp8.recipe=nvfp4"],
    "one-block": ["fp8.recipe=current", "fp8.first_blocks_bf16=1"],
    "no-down": ["fp8.recipe=current", 'fp8.exclude=["*.mlp.down"]'],
}
MODELS: dict[str, list[str]] = {
    "dense": [],
    "experts": ["model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 48, aux_loss: 0.01, z_loss: 0.001}"],
    "shared-keys": [
        "model.qk_norm=true",
        "model.value_norm=true",
        "model.layer_scalar=true",
        "model.layer_kinds={own: {mixer: {head_dim: 16, num_query_groups: 2, keys_as_values: true}},"
        " shared: {mixer: {head_dim: 16, num_query_groups: 2, kv_layer: 0}}}",
        "model.pattern=[own, shared]",
    ],
    "shared-plain-keys": ["model.layer_kinds={own: {}, shared: {mixer: {kv_layer: 0}}}", "model.pattern=[own, shared]"],
    "shared-indexer": [
        "model.latent_attention={q_rank: 48, kv_rank: 32, nope_head_dim: 16, rope_head_dim: 8, value_head_dim: 12}",
        "model.sparse_attention={index_heads: 3, index_head_dim: 10, top_k: 7}",
        "model.num_query_groups=null",
        "model.layer_kinds={own: {}, shared: {mixer: {kind: sparse_latent_attention, shared_indexer: true}}}",
        "model.pattern=[own, shared]",
    ],
}
"""Models with layers that read others. tests/layers/test_costs.py draws every part of a model by itself."""


def _config(*overrides: str) -> Config:
    return load_config(CONFIG, [*TINY, *overrides])


def _trainer(config: Config) -> RankTrainer:
    p = config.parallel
    parallel = initialize_model_parallel(
        p.tensor,
        p.pipeline,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        fsdp_replicas=p.fsdp_replicas,
        device=_CPU,
    )
    return RankTrainer(config, parallel)


def _saved(trainer: RankTrainer, forward: Any) -> int:
    """Bytes that autograd saves in `forward`, without parameters, constants and rotary tables."""
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes() if tensor.numel() > 1 else tensor.element_size()  # a scale is one of a larger storage
        found[storage.data_ptr()] = size, tensor
        return tensor

    s = trainer.config.training.seq_length // trainer.config.parallel.context
    samples = torch.arange(trainer.config.training.micro_batch_size)
    tokens = torch.arange(len(samples) * s).view(len(samples), s)  # each expert of a layer that hashes has some
    inputs = trainer.stages[0].layer_inputs(Batch(tokens, tokens, samples=samples))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward(inputs)
    assert y[0].requires_grad
    kept = [
        x
        for mixer in inputs.mixers.values()
        if (shared := getattr(mixer, "shared", None)) is not None
        for x in shared.read()
    ]
    found |= {x.untyped_storage().data_ptr(): (x.untyped_storage().nbytes(), x) for x in kept}
    constants = trainer.stages[0].context.constants.values()
    parameters = trainer.stages[0].parameters()
    ours = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.tensors, *constants, *parameters)}
    return sum(
        size
        for address, (size, tensor) in found.items()
        if address not in ours and not isinstance(tensor, nn.Parameter)
    )


def _measured(overrides: list[list[str]]) -> list[tuple[int, int]]:
    """Of each config, bytes that a stage's blocks save, as measured by autograd's hooks and as planned."""
    found = []
    for options in overrides:
        config = _config(*options)
        trainer = _trainer(config)
        t = config.parallel.context * (config.parallel.tensor if config.parallel.sequence_parallel else 1)
        training = config.training
        shape = training.seq_length // t, training.micro_batch_size, config.spec.stream_width
        x = torch.randn(shape, dtype=trainer.strategy.params[0].dtype).requires_grad_()
        memory = block_memory(config.parallel, len(config.spec.layers))
        outline = model_outline(config, trainer.fp8)
        planned = sum(outline.saved(i, own) for i, own in enumerate(memory))
        found.append((_saved(trainer, partial(trainer.stages[0].run_blocks, x)), planned))
    return found


@pytest.mark.parametrize(
    ("model", "fmt"),
    slow_but(
        [(model, fmt) for model in MODELS for fmt in (FORMATS if model == "dense" else ("none", "delayed"))],
        *(("dense", fmt) for fmt in ("none", "delayed", "blockwise", "mxfp8", "nvfp4")),
        ("experts", "delayed"),
    ),
)
def test_saved_activations(world2: World, model: str, fmt: str) -> None:
    modes = MODES if fmt in ("none", "delayed") else ["plain", "all-first"]
    cases = {mode: [*ALONE, *MODELS[model], *FORMATS[fmt], *MODES[mode]] for mode in modes}
    (found,) = world2.run(_measured, list(cases.values()), ranks=1)
    for case, (measured, planned) in zip(cases, found, strict=True):
        assert measured == planned, case


LAYOUTS = {
    "tp2-sp": ["parallel.tensor=2", "parallel.pipeline=1"],
    "tp2-sp-slices": ["parallel.tensor=2", "parallel.pipeline=1", "training.seq_length=128"],  # whole blocks of 128
    "tp2": ["parallel.tensor=2", "parallel.pipeline=1", "parallel.sequence_parallel=false"],
    "cp2": [*ALONE, "parallel.context=2"],
}


SPLIT = ["none", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "rowwise-wgrad"]


@pytest.mark.parametrize(
    ("layout", "fmt"),
    slow_but(itertools.product(LAYOUTS, SPLIT), ("tp2-sp", "delayed"), ("tp2-sp", "blockwise"), ("cp2", "rowwise")),
)
def test_saved_activations_of_a_rank_of_two(world2: World, layout: str, fmt: str) -> None:
    cases = {mode: [*LAYOUTS[layout], *FORMATS[fmt], *MODES[mode]] for mode in ("plain", "all-first")}
    for found in world2.run(_measured, list(cases.values()), ranks=2):
        for case, (measured, planned) in zip(cases, found, strict=True):
            assert measured == planned, case


def test_recompute_saves_what_the_documentation_says(world2: World) -> None:
    """Bytes a token and block, from the table in `megafp8.layers.recompute`; measured, not planned."""
    h, f, ad, a = 64, 96, 64, 8
    tokens = 2 * 64  # of two blocks
    for recipe, less_by_mode in {
        "delayed": {"norms": 2 * h, "activation": f, "attention": 4 * ad + 4 * a},
        "none": {"norms": 2 * 4 * h, "activation": 4 * f, "attention": 4 * a},
    }.items():
        modes = ["plain", *less_by_mode, "full"]
        cases = [[*ALONE, *FORMATS[recipe], *MODES[mode]] for mode in modes]
        ((plain, *less, full),) = [[kept for kept, _ in found] for found in world2.run(_measured, cases, ranks=1)]
        scales = {"norms": 16, "activation": 8, "attention": 0} if recipe == "delayed" else {}
        for (mode, bytes_a_token), kept in zip(less_by_mode.items(), less, strict=True):
            assert plain - kept == tokens * bytes_a_token + scales.get(mode, 0), (recipe, mode)
        assert full == tokens * 4 * h


def _state(overrides: list[str]) -> tuple[list[int], list[int]]:
    """Bytes of a rank's parameters, gradients, masters, moments and FP8 weights, as they are and as planned."""
    config = _config(*overrides)
    trainer = _trainer(config)
    sizes: Counter[str] = Counter()
    for parts in trainer.optimizer.storage.values():
        sizes.update({key: part.nbytes for key, part in parts.items()})
    moments = sum(sizes[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "average"))
    p = _plans(config, trainer.parallel.world_size)[trainer.parallel.pipeline.rank]
    planned = [p.weights, p.gradients, p.masters, p.moments, p.fp8_weights]
    strategy = trainer.strategy
    masters = sizes["master"] or sum(values.nbytes for _, values in trainer.optimizer.released_values())
    if isinstance(strategy, FullySharded):
        are_masters = strategy.masters.keys()
        held = [rows.sharded for rows in strategy.stages.row_shards.values() if rows.param not in are_masters]
        held += [memory for buffer in strategy.weights for memory in buffer.buckets]
        held += [data for _, data in strategy._fp8_rows]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        return [sum(storages.values()), sum(x.nbytes for x in strategy.gradients), masters, moments, 0], planned
    weights = []
    for module in trainer.model.modules():
        layers = [(module.state, module.weight)] if getattr(module, "state", None) is not None else []
        if isinstance(module, Experts):
            for group, weight in ((module.up_state, module.up), (module.down_state, module.down)):
                layers += zip(group.states, weight.detach().chunk(len(group.states)))
        for state, weight in layers:
            if state.plan.fp8:
                kept: Any = state.fp8_weight(weight, columnwise=not state.high_precision.dgrad)
                weights += [part for part in kept.made or () if part is not None]
    measured = [
        sum(x.nbytes for x in (strategy.weights if isinstance(strategy, Zero1) else strategy.params)),
        sum(buffer.nbytes for buffer in strategy.gradients),
        masters,
        moments,
        sum(part.data.nbytes + 4 * part.scale_inv.numel() for part in weights)
        - sum(data.nbytes for data in strategy.fp8_data.values()),
    ]
    return measured, planned


def _plans(config: Config, world_size: int) -> list[RankMemory]:
    plan = plan_pipeline(config, num_microbatches(config, world_size))
    return pipeline_memory(model_outline(config, build_fp8(config, None)), world_size, plan.placement, plan.train)


def test_memory_to_spare_is_room_for_experts() -> None:
    """Two of eight experts for a token and four ranks: at most four times an even load."""
    gathered = ["parallel.expert=4", "parallel.expert_dispatch=all_gather", "training.precision=bf16"]
    config = _config(*ALONE, *MODELS["experts"], *gathered)
    plan, outline = plan_pipeline(config, num_microbatches(config, 4)), model_outline(config, build_fp8(config, None))

    def peak(room: float) -> int:
        (memory,) = pipeline_memory(outline.with_expert_room(room), 4, plan.placement, plan.train)
        return memory.total

    rooms = [expert_room(outline, 4, plan.placement, plan.train, peak(x)) for x in (0.0, 1.25, 2.0, 3.0, 4.0, 9.0)]
    assert rooms == pytest.approx([1.25, 1.25, 2.0, 3.0, 4.0, 4.0], abs=0.02)
    assert peak(1.25) < peak(2.0) < peak(4.0) == peak(9.0)


SHARED = [
    "model.pattern=[shared]", "model.head_dim=32", "model.layer_kinds={shared: {ffn: none, mixer: {num_heads: 8, "
    "kind: shared_attention, head_dim: 16, state_size: 16, adapter_rank: 16, adapt_attention: true}}}",
]  # fmt: skip
STATES = {
    "shared": ["fp8.recipe=delayed", "training.precision=bf16", *SHARED],
    "blockwise": ["fp8.recipe=blockwise", "training.precision=bf16", "optimizer.moments_dtype=bf16"],
    "remainders": [
        "training.precision=bf16",
        "optimizer.moments_dtype=fp8",
        "optimizer.store_param_remainders=true",
        *GPT2,
    ],
    "delayed": [
        "fp8.recipe=delayed",
        "fp8.override_linear_precision=[false, false, true]",
        "model.tie_embeddings=true",
        *GPT2,
    ],
    "rowwise": ["fp8.recipe=rowwise", "fp8.override_linear_precision=[false, true, false]", "fp8.last_blocks_bf16=1"],
    "experts": [
        "fp8.recipe=current",
        "fp8.keep_weight_transposes=false",
        "model.moe={num_experts: 8, shared_ffn_hidden_size: 32}",
        "model.mtp_num_layers=1",
    ],
    "lora": ["fp8.recipe=delayed", "training.precision=bf16", "lora.rank=4", "model.tie_embeddings=true"],
    "muon": ["optimizer.name=muon", "model.moe={num_experts: 8}", "optimizer.average_decay=0.9"],
    "lion": ["optimizer.name=lion", "training.precision=bf16", "optimizer.moments_dtype=fp8"],
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    slow_but(
        itertools.product(STATES, [1, 4]),
        *((name, 1) for name in ("blockwise", "remainders", "rowwise", "lora", "muon", "lion", "shared")),
        *((name, 4) for name in ("delayed", "experts")),
    ),
)
def test_state_of_a_rank(world4: World, name: str, ranks: int) -> None:
    stages = 1 if name == "shared" else 2
    layout = ["parallel.tensor=2", f"parallel.pipeline={stages}"] if ranks == 4 else ALONE
    expert = ["parallel.expert=2"] if name == "experts" and ranks == 4 else []
    for measured, planned in world4.run(_state, [*layout, *STATES[name], *expert], ranks=ranks):
        assert measured == planned


def _host_bytes(overrides: list[str]) -> tuple[int, int]:
    """Bytes of a rank's optimizer state on the host, as they are and as planned."""
    config = _config(*overrides)
    state = _trainer(config).optimizer._offload
    assert state is not None
    (plan,) = _plans(config, 1)
    return sum(x.nbytes for parts in state.storage.values() for x in parts.values()), plan.host


@pytest.mark.parametrize("name", ["remainders", "blockwise", "rowwise", "fsdp"])
def test_state_on_the_host(world4: World, name: str) -> None:
    """Against the same plan without offload: what moves to the host leaves the device, but for the buffers."""
    fsdp = ["parallel.fsdp=true", "training.precision=bf16", "fp8.recipe=none"]
    options = [*ALONE, *STATES.get(name, fsdp), "optimizer.moments_dtype=fp8"]
    plain, part, whole = (
        _plans(_config(*options, f"optimizer.offload={fraction}"), 1)[0] for fraction in (0.0, 0.25, 1.0)
    )
    stays = plain.masters if name == "fsdp" else 0
    assert (whole.masters, whole.moments, whole.host) == (stays, 0, plain.masters - stays + plain.moments)
    for plan in (part, whole):
        assert plan.total - plain.total == plan.workspace - plain.workspace - plan.host
        assert plan.workspace - plain.workspace == plan.host  # as small as one piece
    for fraction, plan in ((0.25, part), (1.0, whole)):
        ((held, planned),) = world4.run(_host_bytes, [*options, f"optimizer.offload={fraction}"], ranks=1)
        assert planned == plan.host
        assert held == pytest.approx(planned, abs=0 if fraction == 1.0 else 6 * ALIGNMENT)


TEACHER = {"model.num_layers": 3, "model.hidden_size": 96, "model.ffn_hidden_size": 128}


def _save_teacher(folder: str) -> None:
    """A run whose model is another than that of TINY."""
    config = _config(*ALONE, "training.precision=bf16", *(f"{key}={value}" for key, value in TEACHER.items()))
    save_state(_trainer(config), Path(folder), 1, None)


def _frozen(overrides: list[str]) -> tuple[int, int]:
    """Bytes of a rank's frozen model and of what it says of a step's micro-batches, as they are and as planned."""
    config = _config(*overrides)
    trainer = _trainer(config)
    t, strategy = config.training, trainer.frozen and trainer.frozen.strategy
    held = 0
    if trainer.frozen is not None and strategy is not None:
        values = strategy.params
        if isinstance(strategy, FullySharded):
            values = [*strategy.whole, *(shard.values for shard in strategy.stages.row_shards.values())]
        held = sum(x.nbytes for x in (*values, *strategy.gradients))
        held += sum(x.nbytes for parts in trainer.frozen.optimizer.storage.values() for x in parts.values())
    tokens = torch.zeros(t.micro_batch_size, t.seq_length, dtype=torch.int64)
    batches = trainer.own_tokens([Batch(tokens, tokens)] * trainer.num_microbatches)
    references = [x.reference for x in trainer._with_reference(batches) if x.reference is not None]
    plan = plan_pipeline(config, num_microbatches(config, trainer.parallel.world_size))
    outline = model_outline(config, build_fp8(config, None), teacher_of(config))
    memories = pipeline_memory(outline, trainer.parallel.world_size, plan.placement, plan.train)
    return held + sum(x.nbytes for x in references), memories[trainer.parallel.pipeline.rank].frozen


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ([*ALONE, "data.distillation.top_k=5"], 1),
        (["parallel.tensor=2", "parallel.pipeline=2"], 4),
        pytest.param([*ALONE, "data.distillation.top_k=5", "parallel.fsdp=true"], 4, marks=pytest.mark.slow),
        pytest.param([*ALONE, "parallel.context=2", "parallel.zero=1"], 4, marks=pytest.mark.slow),
        pytest.param([*ALONE, "lora.rank=4"], 1, marks=pytest.mark.slow),
        pytest.param(["parallel.tensor=2", "parallel.pipeline=2", "fp8.recipe=delayed"], 4, marks=pytest.mark.slow),
    ],
)
def test_a_teacher(world4: World, tmp_path: Path, options: list[str], ranks: int) -> None:
    """Another model, in training.precision whatever the recipe."""
    world4.run(_save_teacher, str(tmp_path), ranks=1)
    given = ["training.precision=bf16", f"data.distillation.teacher={tmp_path}", *options]
    for measured, planned in world4.run(_frozen, given, ranks=ranks):
        assert measured == planned > 0


def test_logits_that_are_precomputed_need_no_teacher() -> None:
    """Only those of a step, of 8 samples; with a live teacher its weights too."""
    packed = ["data.packing=best_fit", "data.reset_at_documents=true", "data.mask_eod_loss=true"]
    given = [*ALONE, *packed, "data.distillation={teacher: none, top_k: 5, logits: precomputed}"]
    config = _config(*given, "training.precision=bf16")
    (memory,) = _plans(config, 1)
    assert memory.frozen == 8 * config.training.seq_length * 2 * 5 * 4


@pytest.mark.slow
def test_a_live_reference(world4: World) -> None:
    """That of DPO has the weights of the model; precomputed, or with LoRA, it has none. Log-probabilities of answers,
    which live on ranks alone, are not counted."""
    dpo = ["data.packing=best_fit", "training.precision=bf16", "parallel.tensor=2", "parallel.pipeline=2"]
    for more in ["data.dpo.reference=live"], ["data.dpo.reference=precomputed"], ["data.dpo={}", "lora.rank=4"]:
        config = _config(*dpo, *more)
        memories = _plans(config, 4)
        without = _plans(config.model_copy(update={"lora": None}), 4)
        expected = [x.weights if more == ["data.dpo.reference=live"] else 0 for x in without]
        assert [x.frozen for x in memories] == expected


class _Storages(TorchDispatchMode):
    """Counts the bytes of storages, without those of `given`: `peak` of those alive at a time, after operations."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.alive, self.peak = WeakSet[Any](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.alive |= {x.untyped_storage() for x in tree_leaves(outputs) if isinstance(x, Tensor)}
        self.peak = max(self.peak, sum(x.nbytes() for x in self.alive if x.data_ptr() not in self.given))
        return outputs


def _loss_of_a_teacher(overrides: list[str]) -> tuple[int, int]:
    """Bytes at the peak of a loss beside its logits and the teacher's, as they are and as planned."""
    config = _config("training.precision=bf16", "data.distillation.teacher=none", *overrides)
    parallel = initialize_model_parallel(config.parallel.tensor)
    loss = loss_of(config, parallel)
    assert loss is not None
    t, columns = config.training, config.spec.stem.rows // config.parallel.tensor
    z_sbv, u_sbv = (torch.randn(t.seq_length, t.micro_batch_size, columns).bfloat16() for _ in range(2))
    labels = torch.zeros(t.micro_batch_size, t.seq_length, dtype=torch.int64)
    reference = loss.reference_output(u_sbv, Batch(labels, labels))
    with _Storages(z_sbv, reference) as storages:
        loss(z_sbv.requires_grad_(), replace(Batch(labels, labels), reference=reference))
    return storages.peak, loss_memory(config, labels.numel()).computed


@pytest.mark.parametrize("options", [[], ["data.distillation.top_k=9"], ["data.distillation.weight=0.5"]])
def test_the_loss_of_a_teacher(world2: World, options: list[str]) -> None:
    """Beside tensors of a few bytes a token."""
    for measured, planned in world2.run(_loss_of_a_teacher, ["parallel.tensor=2", "parallel.pipeline=1", *options]):
        assert measured == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        ["training.precision=bf16", "fp8.recipe=delayed", "fp8.param_gather=true", "model.tie_embeddings=true"],
        ["parallel.tensor=2", "optimizer.moments_dtype=fp8", "fp8.recipe=current", *GPT2],
        ["parallel.fsdp_replicas=2", "fp8.recipe=current", "fp8.param_gather=true", "optimizer.moments_dtype=bf16"],
        [
            "parallel.fsdp_replicas=2",
            "parallel.context=2",
            "parallel.expert=2",
            "model.moe={num_experts: 8}",
            "training.precision=bf16",
        ],
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                [
                    "parallel.fsdp_replicas=2",
                    "parallel.context=2",
                    "model.tie_embeddings=true",
                    "model.mtp_num_layers=1",
                ],
                ["parallel.fsdp_replicas=2", "training.precision=bf16", "fp8.recipe=current", "lora.rank=4"],
            )
        ),
        ["optimizer.name=muon", "fp8.recipe=current", "fp8.param_gather=true", *GPT2],
        ["fp8.recipe=delayed", "fp8.param_gather=true", *SHARED],
        *(
            pytest.param(["model.moe={num_experts: 8}", *fp8, *options], marks=pytest.mark.slow)
            for fp8 in [["training.precision=bf16", "fp8.recipe=delayed", "fp8.param_gather=true"]]
            for options in (["parallel.expert=2"], ["parallel.expert=4"], [])
        ),
    ],
)
def test_state_of_a_rank_under_fsdp(world4: World, options: list[str]) -> None:
    """Replicas divide masters and moments, of which some ranks have less, and padding."""
    states = world4.run(_state, [*ALONE, *options, "parallel.fsdp=true"], ranks=4)
    divided = (2, 3) if "parallel.fsdp_replicas=2" in options else ()
    for i in divided:
        planned = states[0][1][i]
        assert 0.85 * planned <= max(measured[i] for measured, _ in states) <= planned, options
    for measured, planned in states:
        kept = [i for i in range(5) if i not in divided]
        assert [measured[i] for i in kept] == [planned[i] for i in kept], options


def test_sharding_saves_memory() -> None:
    base = [*ALONE, "training.precision=bf16", "fp8.recipe=delayed", "model.num_layers=12"]
    fsdp = "parallel.fsdp=true"
    plans = [_plans(_config(*base, *options), 4)[0] for options in ([], ["parallel.zero=1"], [fsdp])]
    plans.append(_plans(_config(*base, fsdp, "fp8.param_gather=true"), 4)[0])
    whole, zero, fsdp_bf16, fsdp_fp8 = (plan.total - plan.workspace for plan in plans)
    assert max(fsdp_bf16, fsdp_fp8) < zero < whole


def test_replicas_of_shards_hold_weights_of_fewer_ranks_and_state_of_all() -> None:
    """Weights that are not FP8, embedding, output layer and norms, have values beside masters."""
    fsdp = [*ALONE, "training.precision=bf16", "fp8.recipe=delayed", "parallel.fsdp=true", "fp8.param_gather=true"]
    fsdp += ["model.hidden_size=512"]  # no padding
    more = "training.global_batch_size=16"  # as many micro-batches on each rank
    (four,), (hybrid,), (eight,) = (
        _plans(_config(*fsdp, *options), ranks)
        for options, ranks in (([], 4), ([more, "parallel.fsdp_replicas=2"], 8), ([more], 8))
    )
    changed = {"weights", "masters", "moments"}
    assert {name for name, size in vars(hybrid).items() if size != getattr(four, name)} == changed
    assert hybrid.masters == eight.masters == four.masters // 2
    assert hybrid.moments == eight.moments
    stem = _config(*fsdp).spec.stem
    assert hybrid.weights - four.weights == 2 * (2 * stem.rows + 5) * 512 / 4


@pytest.mark.parametrize(
    "options",
    [
        ["fp8.recipe=delayed", "model.tie_embeddings=true"],
        ["fp8.recipe=delayed", *SHARED],
        ["fp8.recipe=current", "fp8.last_blocks_bf16=1", 'fp8.exclude=["*.proj"]', *GPT2],
    ],
)
@pytest.mark.parametrize("precision", slow_but(["bf16", "fp32"], "fp32"))
def test_state_of_a_rank_with_fp8_parameters(world4: World, precision: str, options: list[str]) -> None:
    """Masters of FP8 weights exist in fp32 too."""
    gather = ["parallel.zero=1", "fp8.param_gather=true", f"training.precision={precision}"]
    for measured, planned in world4.run(_state, [*ALONE, *gather, *options], ranks=2):
        # Weights, gradients and copies are whole on every rank; of masters and moments some rank has the padding.
        assert [measured[i] for i in (0, 1, 4)] == [planned[i] for i in (0, 1, 4)], options
        for i in (2, 3):
            assert 0.97 * planned[i] <= measured[i] <= planned[i]


PUBLISHED = [
    *("llama3-8b", "llama3-405b", "gpt2-125m", "mixtral-8x7b", "deepseek-v3", "olmo2-7b", "gemma2-9b", "gpt-oss-20b"),
    *("bert-base", "t5-base"),
]
CHANGES = {
    "as it is": [],
    "tied": ["model.tie_embeddings=true", "model.qk_norm=true", "model.qkv_bias=true", "model.proj_bias=true"],
    "lora": ["lora.rank=4"],
    "lora of some": ["lora.rank=4", "lora.targets=[q, kv_up, v, proj]"],
}


@pytest.mark.parametrize(
    ("model", "change"),
    slow_but(
        # T5 is not adapted.
        [(model, change) for model in PUBLISHED for change in (list(CHANGES)[: 2 if model == "t5-base" else 4])],
        *((model, "as it is") for model in ("deepseek-v3", "gpt-oss-20b", "bert-base", "t5-base")),
        *(("gpt2-125m", change) for change in CHANGES),
        ("deepseek-v3", "lora of some"),
    ),
)
def test_parameters_are_those_of_the_constructors(model: str, change: str) -> None:
    config = load_config(CONFIG.parent / f"{model}.yaml", ["model.vocab_size=50257", *CHANGES[change]])
    outline = model_outline(config, build_fp8(config, None))
    for stage in {0, config.parallel.pipeline // 2, config.parallel.pipeline - 1}:
        expected = [param.numel() for param in planned_stage(config, stage).parameters()]
        parameters = outline.parameters(stages_of(config)[1][stage])
        assert [parameter.elements for parameter in parameters] == expected


def _plan(*overrides: str, rank: int = 0, world_size: int = 8) -> RankMemory:
    even = "parallel.layers_per_stage=null"
    return _plans(load_config(CONFIG.parent / "llama3-8b.yaml", [even, *overrides]), world_size)[rank]


def test_llama_3_8b() -> None:
    """By hand: bytes a parameter, two FP8 copies of each weight of a block; measured on an H200: 0.92 GiB a layer."""
    first, last = _plan(rank=0), _plan(rank=1)
    block_weights = 16 * 218_103_808 // 2
    numbers = block_weights + 16 * 2 * 4096 + 128_256 * 4096 // 2
    assert first.weights == 2 * numbers
    assert first.masters == 4 * numbers
    assert first.moments == 8 * numbers
    assert first.gradients == pytest.approx(4 * numbers, rel=1e-6)
    assert first.fp8_weights == pytest.approx(2 * block_weights, rel=1e-6)
    config = load_config(CONFIG.parent / "llama3-8b.yaml", ["parallel.tensor=1"])
    alone = model_outline(config, build_fp8(config, None)).saved(0, BlockMemory())
    assert alone / 2**30 == pytest.approx(0.92, abs=0.005)
    assert first.loss == 0
    assert last.total < first.total  # which has two micro-batches in flight
    assert first.activations == 2 * last.activations


def test_the_table_of_a_dry_run() -> None:
    config = load_config(CONFIG.parent / "llama3-8b.yaml", ["parallel.offload=4"])
    plans = _plans(config, 8)
    head, _, *rows = memory_table(plans).splitlines()
    assert head.startswith("memory of a rank in GiB")
    assert len(rows) == 2
    for rank, (row, plan) in enumerate(zip(rows, plans)):
        number, *columns, total, host = row.split()
        assert int(number) == rank
        assert sum(map(float, columns)) == pytest.approx(float(total), abs=0.06)
        assert float(total) == pytest.approx(plan.total / 2**30, abs=0.006)
        assert float(host) == pytest.approx(plan.host / 2**30, abs=0.006)


def test_recompute_offload_and_schedule() -> None:
    default = _plan()
    for options in (
        ["parallel.recompute=full"],
        ["parallel.recompute=selective"],
        ["parallel.recompute=full", "parallel.recompute_blocks=8"],
        ["parallel.offload=15"],
    ):
        assert _plan(*options).activations < default.activations, options
    assert _plan("parallel.recompute=full").backward > default.backward  # a whole block is recomputed
    offloaded = _plan("parallel.offload=15")
    block = default.activations / 32  # two micro-batches of 16 blocks
    assert offloaded.host == pytest.approx(30 * block)
    assert offloaded.activations == pytest.approx(3 * block, rel=0.01)  # two last blocks, and one that is back
    assert default.host == 0
    assert _plan("training.global_batch_size=2").activations == pytest.approx(16 * block)  # one micro-batch
    config = _config("fp8.recipe=none")
    assert fp8_weight_bytes(model_outline(config, build_fp8(config, None)), range(2)) == 0
    # In flight on 1F1B's first rank are two micro-batches of two chunks' blocks; interleaving adds half a micro-batch.
    interleaved = _plan("parallel.schedule=interleaved", "parallel.virtual_pipeline=2")
    assert interleaved.activations == pytest.approx(40 * block, rel=0.01)


def test_operands_of_deferred_weight_gradients() -> None:
    config = load_config(
        CONFIG.parent / "llama3-8b.yaml", ["model.num_layers=1", "parallel.tensor=1", "parallel.pipeline=1"]
    )
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.WEIGHT}

    def activations(*actions: str) -> int:
        taken = [Action(kinds[kind], int(microbatch)) for kind, microbatch in actions]
        return rank_memory(model_outline(config, build_fp8(config, None)), 1, [range(1)], taken).activations

    whole = activations("F0", "B0", "F1", "B1")
    assert activations("F0", "B0", "W0", "F1", "B1", "W1") == whole
    h, f, kv = 4096, 14336, 1024
    operands = (h + h + 2 * kv) + (h + h) + (h + 2 * f) + (f + h)
    output_layer = 2 * (h + 128256)  # its input and the logits' gradient, in bf16
    assert activations("F0", "B0", "F1", "B1", "W0", "W1") == whole + 8192 * (operands + output_layer)
    assert activations("F0", "F1", "B0", "B1") == 2 * whole


def test_operands_kept_for_the_next_micro_batch() -> None:
    """Measured on an H100: 1.95 GiB of four layers of this shape."""
    keys = ["model.num_layers=4", "model.vocab_size=32000", "training.seq_length=8192", "parallel.zero=0"]
    keys += [f"parallel.{axis}=1" for axis in ("tensor", "pipeline", "expert")]

    def total(micro_batches: int, *more: str, pairs: bool = False) -> int:
        overrides = [*keys, f"fp8.paired_wgrad={pairs}", f"training.global_batch_size={micro_batches}", *more]
        config = load_config(CONFIG.parent / "qwen3-30b-a3b.yaml", overrides)
        taken = [Action(kind, i) for i in range(micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return rank_memory(model_outline(config, build_fp8(config, None)), 1, [range(4)], taken).total

    rows, h, f = 8 * 8192 + 127 * 128, 2048, 768
    kept = 4 * rows * ((h + 2 * f) + (f + h))
    assert total(2, pairs=True) == total(2) + kept
    assert kept == pytest.approx(1.95 * 2**30, rel=0.01)
    assert total(1, pairs=True) == total(1)  # there is no next one
    assert total(2, "fp8.exclude=['*.experts.*']", pairs=True) == total(2, "fp8.exclude=['*.experts.*']")
