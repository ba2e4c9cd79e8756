"""Rules between keys of the config that concern experts; `checks.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.errors import Problem, divisors
from megafp8.config.schema import Config, ModelConfig


def widths(m: ModelConfig) -> dict[str, int]:
    """Widths of MLPs that tensor parallelism splits, by key."""
    found = {}
    if m.moe is None or any(m.moe_of(layer) is None for layer in range(m.num_layers)):
        found["model.ffn_hidden_size"] = m.ffn_size
    if m.moe is not None and m.moe.shared_ffn_hidden_size is not None:
        found["model.moe.shared_ffn_hidden_size"] = m.moe.shared_ffn_hidden_size
    return found


def experts(m: ModelConfig) -> Iterator[Problem]:
    """Rules about a model's experts that hold in any run."""
    if m.moe is None:
        return
    x, count = m.moe, m.moe.num_experts
    if x.top_k > count:
        rule = f"a token goes to different experts, and model.moe.num_experts is {count}"
        yield Problem("model.moe.top_k", x.top_k, rule, f"try {count} or less")
    if not any(x.is_sparse(layer) for layer in range(m.num_layers)):
        key = "first_dense_layers" if x.first_dense_layers else "layer_interval"
        rule = f"none of the {m.num_layers} layers has experts"
        works = f"try {int(key == 'layer_interval')}, or leave model.moe out"
        yield Problem(f"model.moe.{key}", getattr(x, key), rule, works)
    if x.shared_gate and x.shared_ffn_hidden_size is None:
        works = "set model.moe.shared_ffn_hidden_size, or leave it out"
        yield Problem("model.moe.shared_gate", True, "there is no shared expert", works)
    if count % x.num_groups:
        rule = f"model.moe.num_experts ({count}) is not a multiple of it"
        yield Problem("model.moe.num_groups", x.num_groups, rule, divisors(count, x.num_groups))
        return
    if x.top_groups is None:
        return
    if x.top_groups > x.num_groups:
        rule = f"model.moe.num_groups is {x.num_groups}"
        yield Problem("model.moe.top_groups", x.top_groups, rule, f"try {x.num_groups} or less")
    elif x.top_groups * (count // x.num_groups) < x.top_k:
        rule = f"so many groups have {x.top_groups * (count // x.num_groups)} experts, and model.moe.top_k is {x.top_k}"
        works = f"try {-(-x.top_k * x.num_groups // count)} or more"
        yield Problem("model.moe.top_groups", x.top_groups, rule, works)


def layout(config: Config) -> Iterator[Problem]:
    """Rules between experts and the layout."""
    m, p = config.model, config.parallel
    if m.moe is None:
        for key in ("expert", "expert_tensor"):
            if getattr(p, key) > 1:
                works = "try 1, or set model.moe"
                yield Problem(f"parallel.{key}", getattr(p, key), "the model has no experts", works)
        return
    if m.moe.num_experts % p.expert:
        rule = f"model.moe.num_experts ({m.moe.num_experts}) is not a multiple of it"
        yield Problem("parallel.expert", p.expert, rule, divisors(m.moe.num_experts, p.expert))
    if m.expert_size % p.expert_tensor:
        rule = f"the width of an expert ({m.expert_size}) is not a multiple of it"
        yield Problem("parallel.expert_tensor", p.expert_tensor, rule, divisors(m.expert_size, p.expert_tensor))
    if p.expert_tensor > 1 and m.linear_bias:
        rule = "model.linear_bias is true, and the biases of an expert's outputs belong to one rank"
        yield Problem("parallel.expert_tensor", p.expert_tensor, rule, "try 1")
    if p.expert_tensor > 1 and p.expert_dispatch == "all_to_all":
        rule = "it sends a token to one rank for each of its experts, and parallel.expert_tensor splits experts"
        yield Problem("parallel.expert_dispatch", "all_to_all", rule, "try all_gather, or parallel.expert_tensor=1")
    if p.tensor > 1 and not p.sequence_parallel:
        rule = f"parallel.tensor is {p.tensor}, and without it each rank would send the same tokens to experts"
        yield Problem("parallel.sequence_parallel", False, rule, "try true, or parallel.tensor=1")
    of_rank = m.expert_size // p.expert_tensor
    for key, width in (("model.hidden_size", m.hidden_size), ("model.moe.ffn_hidden_size", of_rank)):
        if config.device != "cpu" and config.training.precision == "bf16" and width % 8:
            rule = "GEMMs of all experts at once take bf16 matrices of a multiple of 8 columns"
            yield Problem(key, width, rule, f"try {-(-width // 8) * 8}")


def ranks(config: Config, world_size: int) -> Iterator[Problem]:
    """Rules between experts and the number of ranks."""
    p = config.parallel
    of_stage, rest = divmod(world_size, p.pipeline)
    if rest or of_stage % (p.tensor * p.context):
        return
    cut = f" over parallel.expert_tensor ({p.expert_tensor})" if p.expert_tensor > 1 else ""
    for key, size, count, over in (
        ("expert_tensor", p.expert_tensor, of_stage, ""),
        ("expert", p.expert, of_stage // p.expert_tensor, cut),
    ):
        if count % size:
            rule = f"it must divide the {count} data-, context- and tensor-parallel ranks of a pipeline stage{over}"
            yield Problem(f"parallel.{key}", size, rule, divisors(count, size))
            return
