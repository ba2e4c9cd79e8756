"""Random models of all kinds of layers in random layouts, each compared in float64 with the unsharded twin.

    python -m tests.models.random_models --draws 200 --out draws.jsonl
    python -m tests.models.random_models --draw '{"model": {...}, "tp": 2}'      # one of them again

A draw is a model, whose layers differ in mixer, feed-forward network and their keys, and how it runs: tensor, sequence,
context, pipeline, expert and expert tensor parallelism, recompute, documents, prefixes. What the config's checks refuse
is drawn again. A draw passes if the loss of each token is that of `tests.models.twin` to 1e-11, and each gradient to
1e-10 (`tests.models.test_gpt.compare`). Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tqdm import tqdm

from megafp8.config import ConfigError, activations, check_layout
from megafp8.config.parts import PARTS
from tests.models.test_gpt import (
    COMPRESSED,
    DELTA_NET,
    KIMI_DELTA,
    LATENT,
    LLAMA,
    LONGROPE,
    MAMBA2,
    SCALING,
    SPARSE,
    YARN,
    compare,
)
from tests.training.presets import config
from tests.world import Ranks, World

Draw = dict[str, Any]
"""The arguments of `compare`."""

ACTIVATIONS = list(activations.ACTIVATIONS)
POSITIONS = [
    {"rope_scaling": SCALING.model_dump()}, {"yarn": YARN}, {"longrope": LONGROPE}, {"partial_rotary_factor": 0.5},
    {"rope_interpolation_factor": 3.0}, {"rope_theta": 100.0}, {"position_embedding": "none"},
    {"position_embedding": "learned"}, {"position_embedding": "alibi"},
    {"partial_rotary_factor": 0.5, "proportional_rope": True},
]  # fmt: skip
SCORES = [
    {"qk_norm": True}, {"qk_norm": "projection"}, {"qk_norm": "rotated"}, {"attention_sinks": True},
    {"output_gate": True}, {"attention_scale": 0.4}, {"attention_softcap": 1.5}, {"qkv_bias": True},
    {"query_scaling": {"factor": 0.5, "length": 3}}, {"value_norm": True}, {"keys_as_values": True},
]  # fmt: skip
REACH = [{"sliding_window": 3}, {"attention_chunk": 3}, {}]
ENTRIES = [{}, {"compress_rate": 2}, {"compress_rate": 3}, {"compress_rate": 2, "top_k": 2}]
NORMS = [
    {"norm_position": "both"}, {"norm_position": "output"}, {"parallel_block": True}, {"norm_weights": False},
    {"normalization": "layernorm"}, {"zero_centered_gamma": True}, {"norm_eps": 1e-2},
]  # fmt: skip
STREAM = [
    {"tie_embeddings": True}, {"embedding_norm": True}, {"embedding_multiplier": 4.0}, {"residual_multiplier": 0.3},
    {"logits_scaling": 3.0}, {"logit_softcap": 2.0}, {"linear_bias": True}, {"hidden_dropout": 0.2},
    {"attention_dropout": 0.3}, {"layer_scalar": True}, {"per_layer_embedding": {"width": 6}},
    {"hyper_connections": {"streams": 2, "sinkhorn_iterations": 2, "eps": 1e-3}},
]  # fmt: skip
EXPERTS = [
    {"shared_ffn_hidden_size": 8}, {"score": "sigmoid"}, {"score": "sqrtsoftplus"},
    {"normalize": False}, {"scaling_factor": 2.5},
    {"num_groups": 4, "top_groups": 2}, {"selection_bias": True}, {"scale_inputs": True}, {"aux_loss": 0.3},
    {"z_loss": 0.1}, {"aux_loss": 0.1, "aux_loss_scope": "global_batch"},
    {"shared_ffn_hidden_size": 8, "shared_gate": True}, {"latent_size": 10},
    {"shared_ffn_hidden_size": 8, "separate_norms": True},
]  # fmt: skip


def draw(generator: random.Random) -> Draw:
    """A draw, which the config's checks may refuse."""
    choose = generator.choice

    def some(options: list[dict[str, Any]], most: int) -> dict[str, Any]:
        chosen = generator.sample(options, generator.randint(0, most))
        return {key: value for option in chosen for key, value in option.items()}

    def mixer() -> dict[str, Any] | str:
        small = {"conv_kernel_size": choose([2, 3, 4])}
        d = choose([2, 3, 4])
        return choose([
            some([{"rope_theta": 100.0}, {"head_dim": 8}, {"position_embedding": "none"}, {"qk_norm": True},
                  *REACH], 3),
            DELTA_NET | small | {"key_head_dim": d} | some([{"allow_neg_eigval": True}, {"norm_eps": 0.1}], 2),
            KIMI_DELTA | small | {"head_dim": d},
            MAMBA2 | small | {"state_size": d, "conv_bias": choose([True, False])},
            {"kind": "short_convolution"} | small, {"kv_layer": 0}, "none",
            COMPRESSED | {"sliding_window": 3, "position_embedding": "rope"} | choose(ENTRIES),
        ])  # fmt: skip

    def ffn() -> dict[str, Any] | str:
        return choose([
            {"kind": "mlp", "ffn_hidden_size": choose([16, 32]), "activation": choose(ACTIVATIONS)}, "moe",
            {"kind": "moe", "routing": choose(["top_k", "hash"])}, "none",
        ])  # fmt: skip

    model = {**LLAMA, "activation": choose(ACTIVATIONS), **some(NORMS, 2), **some(STREAM, 3)}
    if generator.random() < 0.35:
        model |= {"num_query_groups": None, **some([{"yarn": YARN}, {"position_embedding": "none"}], 1)}
        model["latent_attention"] = LATENT | some([{"q_rank": None}, {"norm_eps": 0.1}], 1)
        if generator.random() < 0.6:
            sparse = {"index_rope": choose(["halves", "neighbors"]), "top_k": choose([1, 3, 5])}
            model["sparse_attention"] = SPARSE | sparse | {"warmup": choose([False] * 3 + [True])}
    else:
        model |= {"num_query_groups": choose([2, 4, 4]), **some(POSITIONS, 1), **some(SCORES, 2), **choose(REACH)}
    kinds: dict[str, dict[str, Any]] = {}
    for name in ("a", "b", "c")[: choose([0, 2, 2, 3])]:
        kinds[name] = {key: value() for key, value in (("mixer", mixer), ("ffn", ffn)) if generator.random() < 0.7}
        kinds[name] |= some([{"norm_position": choose(["pre", "output", "both"])}], 1)
    if kinds:
        model |= {"layer_kinds": kinds, "pattern": list(kinds)}
    pp = choose([1, 1, 1, 2, 2, 4])
    model["num_layers"] = choose([n for n in (2, 3, 4) if n % pp == 0])
    model["mtp_num_layers"] = choose([0, 0, 0, 1])
    tp, cp = choose([1, 1, 2, 2, 4]), choose([1, 1, 2, 2, 4])
    ep = etp = 1
    if generator.random() < 0.4 or "moe" in json.dumps(kinds):
        model["moe"] = {"num_experts": 8, "top_k": choose([1, 2, 3]), "ffn_hidden_size": 12, **some(EXPERTS, 4)}
        ep, etp = choose([1, 2, 4]), choose([1, 1, 2])
    return {
        "model": model, "tp": tp, "sequence_parallel": choose([True, True, False]) and tp > 1, "cp": cp, "pp": pp,
        "ep": ep, "etp": etp, "gathers_tokens": choose([True, False]),
        "recompute": choose(["none", "full", "first", "selective"]), "documents": choose([False, True]),
        "prefix": choose([None] * 5 + [[3, 8]]), "z_loss": choose([0.0, 0.01]),
    }  # fmt: skip


def ranks_of(d: Draw) -> int:
    return d["tp"] * d["cp"] * d["pp"]


def check(d: Draw) -> None:
    """Raise ConfigError or ValidationError where a run would be refused."""
    recompute = {"full": "full", "first": "full", "selective": "selective", "none": "none"}[d["recompute"]]
    data = {"reset_at_documents": d["documents"]}
    if d["prefix"] is not None:
        data["prefix_lm"] = {"min_length": 2, "max_length": 16}
    layout = config(
        model=d["model"],
        parallel={
            "tensor": d["tp"], "sequence_parallel": d["sequence_parallel"], "context": d["cp"], "pipeline": d["pp"],
            "expert": d["ep"], "expert_tensor": d["etp"],
            "expert_dispatch": "all_gather" if d["gathers_tokens"] else "all_to_all", "recompute": recompute,
        },
        training={"seq_length": 16, "global_batch_size": 4}, data=data,
    )  # fmt: skip
    check_layout(layout, ranks_of(d))


def draws(seed: int, count: int, largest: int) -> list[Draw]:
    """`count` different draws that the checks accept, on at most `largest` ranks."""
    generator, drawn = random.Random(seed), dict[str, Draw]()
    while len(drawn) < count:
        d = draw(generator)
        try:
            if ranks_of(d) <= largest:
                check(d)
                drawn[json.dumps(d)] = d
        except (ConfigError, ValidationError):
            pass
    return list(drawn.values())


def kinds_of(d: Draw) -> list[str]:
    """What a draw has, for the table."""
    checked = config(model=d["model"]).model
    found = {f"{part} {getattr(spec, part).kind}" for spec in checked.distinct_layers for part in ("mixer", "ffn")}
    found |= {f"{key} {d[key]}" for key in ("tp", "cp", "pp", "ep", "etp")}
    found |= {key for key in ("documents", "prefix", "sequence_parallel") if d[key]}
    return sorted(found | {f"recompute {d['recompute']}"})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest layout that is drawn")
    parser.add_argument("--draw", type=json.loads, help="one draw, in place of random ones")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith")
    parser.add_argument("--out", type=Path, help="file that a line of JSON is added to for each draw")
    options = parser.parse_args()
    i, n = options.part
    chosen = [options.draw] if options.draw else draws(options.seed, options.draws, options.largest)[i::n]
    ranks, counts, failed = Ranks(), Counter[str](), 0
    try:
        for d in tqdm(chosen, mininterval=10):
            begin, problem, compared = time.monotonic(), None, 0
            try:
                compared = sum(World(ranks, 8).run(compare, ranks=ranks_of(d), **d))
            except AssertionError as error:
                problem = str(error)
                failed += 1
                tqdm.write(f"FAILED --draw '{json.dumps(d)}'\n{problem[:3000]}", file=sys.stdout)
            counts.update(kinds_of(d))
            if options.out:
                line = {"draw": d, "seconds": time.monotonic() - begin, "gradients": compared, "problem": problem}
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    finally:
        ranks.close()
    drawn = {f"mixer {part.model_fields['kind'].default}" for part in PARTS} & {*counts}
    assert options.draw or len(chosen) < 100 or len(drawn) > 5, "a kind of mixer was never drawn"
    print(f"{len(chosen)} draws, {failed} failed")
    print("\n".join(f"| {name} | {count} |" for name, count in sorted(counts.items())))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
