"""A rank of Megatron core that loads a torch_dist checkpoint and saves one: a program that test_torch_dist starts.

    python -m tests.conversion.megatron.core MODEL OPTIMIZER TP PP EP SINGLETON RANK OURS THEIRS

A rank builds Megatron core's own GPTModel of `megatron_reference.MODELS`, calls `dist_checkpointing.load` on the folder
OURS, compares with its tensors of the reference, and calls `dist_checkpointing.save` on the folder THEIRS, with the
state of its OPTIMIZER (plain or distributed) after a step whose gradients are the weights.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megafp8.config import model_spec
from megafp8.conversion.flat import flat_keys
from megafp8.spec import ModelSpec
from tests.conversion.families import RandomSource
from tests.conversion.megatron.reference import MODELS, rank
from tests.conversion.megatron.test_megatron import ARGS

MULTIPLE = 8


def build(model: ModelSpec, args: dict[str, Any], t: int, p: int, e: int) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    mpu.initialize_model_parallel(t, p, expert_model_parallel_size=e)
    moe = {}
    if model.has_experts:
        names = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
        names += ("moe_latent_size", "moe_layer_freq", "moe_router_score_function", "moe_router_enable_expert_bias")
        moe = {name.replace("num_experts", "num_moe_experts"): args[name] for name in names if name in args}
        moe["moe_shared_expert_gate"] = args.get("moe_shared_expert_gate", False)
        moe["moe_token_dispatcher_type"] = "allgather"  # alltoall needs a GPU
    fields, stem = flat_keys(model), model.stem
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=fields["num_attention_heads"],
        num_query_groups=fields["num_query_groups"],
        kv_channels=fields["head_dim"],
        ffn_hidden_size=fields["ffn_hidden_size"],
        gated_linear_unit=args.get("swiglu", False),
        activation_func=torch.nn.functional.silu if args.get("swiglu") else torch.nn.functional.gelu,
        add_bias_linear=args.get("add_bias_linear", True),
        add_qkv_bias=args.get("add_qkv_bias", False),
        normalization=args["normalization"],
        qk_layernorm=args.get("qk_layernorm", False),
        layernorm_epsilon=args["norm_epsilon"],
        tensor_model_parallel_size=t,
        pipeline_model_parallel_size=p,
        expert_model_parallel_size=e,
        sequence_parallel=False,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        **moe,
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args["normalization"]),
        vocab_size=-(-stem.known_vocab_size // (MULTIPLE * t)) * MULTIPLE * t,
        max_sequence_length=stem.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.head.tied,
        position_embedding_type=args["position_embedding_type"],
    )


class OnCPU(TorchFunctionMode):
    """The CPU as a GPU, as far as Megatron core's optimizers ask for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and type(found) is str else found


def one_step(model: Any, distributed: bool) -> Any:
    """Adam of `model` after a step with learning rate 0, whose gradients are the weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, parallel, model)
    config = OptimizerConfig(optimizer="adam", lr=0.0, clip_grad=0.0, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(config, [wrapped])
    for parameter in wrapped.parameters():
        parameter.main_grad.copy_(parameter.detach())
    optimizer.step()
    return optimizer


def main(argv: list[str]) -> None:
    name, optimizer, *numbers, ours, theirs = argv
    t, p, e, singleton, this = map(int, numbers)
    world = t * p * e
    store = dist.FileStore(f"{theirs}.store", world)
    dist.init_process_group("gloo", store=store, rank=this, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state

    # Calls that Megatron core makes without a GPU, too.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment,method-assign]
    OnCPU().__enter__()
    args = ARGS[name]
    truth = RandomSource(model_spec(MODELS[name]))
    model = build(truth.model, args, t, p, e)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))

    common = dist_checkpointing.load_common_state_dict(ours)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    found, missing, unexpected = dist_checkpointing.load(state, ours, strict="return_all")
    assert not missing, missing  # keys of the checkpoint that the model does not ask for
    assert all("_extra_state" in key for key in unexpected), unexpected
    model.load_state_dict(found["model"])

    r, s = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    x = parallel_state.get_expert_model_parallel_rank()
    expected = rank(truth.whole, truth.model, r, s, x, (t, p, 1, e), te=False, multiple=MULTIPLE)["model"]
    tensors = {key: x for key, x in model.state_dict().items() if "_extra_state" not in key and x is not None}
    assert tensors.keys() == expected.keys(), tensors.keys() ^ expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor), key
    assert common["iteration"] == 100
    assert vars(common["args"])["hidden_size"] == truth.model.hidden_size

    metadata = {"singleton_local_shards": bool(singleton), "chained_optim_avoid_prefix": True}
    of_run = {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, "expert_model_parallel_size": e}
    state = {"args": argparse.Namespace(**args, **of_run), "checkpoint_version": 3.0, "iteration": 100}
    state["model"] = model.sharded_state_dict(metadata=metadata)
    if optimizer == "distributed":
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    state["optimizer"] = one_step(model, optimizer == "distributed").sharded_state_dict(
        state["model"], metadata=metadata
    )
    dist_checkpointing.save(state, theirs, content_metadata=metadata)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
