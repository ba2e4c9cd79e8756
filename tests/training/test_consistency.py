"""The consistency check: no false alarms, and every fault is found and its rank named.

Real steps of real layouts. A fault changes one rank's memory after the update, as a failing GPU would: one bit of a
weight, of the FP8 data of a weight or of optimizer state, or a NaN.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config
from megafp8.training.consistency import check_consistency, shared_state
from megafp8.training.errors import StateDiffers
from megafp8.training.state import tensors
from tests.marks import slow_but
from tests.training.presets import DEEPSEEK_EXPERTS, config
from tests.training.runs import batches, start
from tests.world import World

TIED = {"model": {"tie_embeddings": True}}
GPT2 = {"model": {"linear_bias": True, "normalization": "layernorm", "position_embedding": "learned"}}
DELAYED = {"recipe": "delayed", "amax_history_len": 4, "interval": 2}
BF16 = {"precision": "bf16", "global_batch_size": 8}
HSDP = {"fsdp": True, "fsdp_replicas": 2}
V = {"pipeline": 2, "schedule": "zb-v", "virtual_pipeline": 2}
CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "dp2": (2, {}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "dp2-bf16-fp8-moments": (2, {"training": BF16, "optimizer": {"moments_dtype": "fp8"}}),
    "dp2-bf16-remainders": (2, {"training": BF16, "optimizer": {"store_param_remainders": True}}),
    "tp2-sp-gpt2": (2, {"parallel": {"tensor": 2}, **GPT2}),
    "tp2-without-sp-gpt2": (2, {"parallel": {"tensor": 2, "sequence_parallel": False}, **GPT2}),
    "tp2-pp2-tied": (4, {"parallel": {"tensor": 2, "pipeline": 2}, **TIED}),
    "pp2-v-tied": (2, {"parallel": V, "model": {"tie_embeddings": True, "num_layers": 4}}),
    "dp4": (4, {"optimizer": {"offload": 0.5}}),
    "tp2-dp2-zero-delayed": (4, {"parallel": {"tensor": 2, "zero": 1}, "fp8": DELAYED}),
    "pp2-dp2-zero-tied": (4, {"parallel": {"pipeline": 2, "zero": 1}, **TIED}),
    "dp2-zero-param-gather": (2, {"parallel": {"zero": 1}, "fp8": {"recipe": "current", "param_gather": True}}),
    "tp2-dp2-fsdp-param-gather": (
        4, {"parallel": {"tensor": 2, "fsdp": True}, "fp8": {**DELAYED, "param_gather": True}, "training": BF16},
    ),
    "pp2-dp2-fsdp-tied": (4, {"parallel": {"pipeline": 2, "fsdp": True}, **TIED}),
    "tp2-dp2-fsdp": (4, {"parallel": {"tensor": 2, "fsdp": True}}),
    "dp4-hsdp-param-gather": (4, {"parallel": HSDP, "fp8": {**DELAYED, "param_gather": True}}),
    "dp4-hsdp-lora": (4, {"parallel": HSDP, "lora": {"rank": 4, "alpha": 8.0}}),
    "tp2-dp4-hsdp": (
        8, {"parallel": {"tensor": 2, **HSDP}, "training": BF16, "optimizer": {"moments_dtype": "fp8"}},
    ),
    "pp2-dp4-hsdp-tied": (8, {"parallel": {"pipeline": 2, **HSDP}, **TIED}),
    "dp2-delayed": (2, {"fp8": DELAYED}),
    "tp2-dp2-ep2-experts": (
        4, {"parallel": {"tensor": 2, "expert": 2}, "model": {"moe": DEEPSEEK_EXPERTS}, "fp8": DELAYED}
    ),
    "dp4-ep2-fsdp-experts-param-gather": (
        4, {"parallel": {"fsdp": True, "expert": 2}, "model": {"moe": DEEPSEEK_EXPERTS},
            "fp8": {**DELAYED, "param_gather": True}},
    ),
    "dp4-ep2-zero-experts-param-gather": (
        4, {"parallel": {"zero": 1, "expert": 2}, "model": {"moe": DEEPSEEK_EXPERTS},
            "fp8": {**DELAYED, "param_gather": True}},
    ),
    "dp4-ep2-zero-experts": (4, {"parallel": {"zero": 1, "expert": 2}, "model": {"moe": DEEPSEEK_EXPERTS}}),
    "dp4-ep2-hsdp-experts": (4, {"parallel": {"expert": 2, **HSDP}, "model": {"moe": DEEPSEEK_EXPERTS}}),
    "dp2-zero-nvfp4": (2, {"parallel": {"zero": 1}, "fp8": {"recipe": "nvfp4"}}),
    "dp2-fp16": (2, {"training": {"precision": "fp16", "loss_scale": {"initial_scale": 2.0**14}}}),
}  # fmt: skip
QUICK = ("tp2-pp2-tied", "dp2-zero-param-gather", "tp2-dp2-ep2-experts")


def settings(case: str) -> Config:
    changes = CASES[case][1]
    training = {"global_batch_size": 8, **changes.get("training", {})}
    parallel = {"bucket_mib": 0.05, **changes.get("parallel", {})}
    return config(**{**changes, "training": training, "parallel": parallel})


Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A rectangle of a global tensor, as a checkpoint knows it: name, offset, shape."""


def _compared(settings: Config, steps: int) -> dict[Part, bool]:
    """The checkpoint's tensors that this rank holds, and whether they are compared; asserts that no check fails."""
    trainer, parallel = start(settings)
    check_consistency(trainer, 0)
    for step in range(steps):
        trainer.train_step(step, batches(step, settings, parallel))
        check_consistency(trainer, step + 1)
        before = {name: tensor.clone() for name, tensor in trainer.fp8.state_dict().items()}
        trainer.evaluate(batches(1000, settings, parallel))
        for name, tensor in trainer.fp8.state_dict().items():  # the running step's amaxes too, which are rank-local
            assert torch.equal(tensor, before[name]), name
        check_consistency(trainer, step + 1)
    trainer.strategy.wait()
    spans = [(r.values.data_ptr(), r.values.data_ptr() + r.values.nbytes) for r in shared_state(trainer)]

    def is_compared(view: Tensor) -> bool:
        last = view.data_ptr() + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride())) * view.itemsize
        return any(begin <= last < end for begin, end in spans)  # the first of a history is the running step's

    return {
        (name, tuple(offset), tuple(view.shape)): is_compared(view)
        for name, rectangles in as_rectangles(tensors(trainer)).items()
        for offset, view in rectangles.parts
    }


@pytest.mark.parametrize("case", slow_but(CASES, "dp2-zero-param-gather"))
def test_all_shared_state_is_compared_without_false_alarms(world8: World, case: str) -> None:
    """Shared state is known from checkpoints alone: the same rectangle of the same tensor on several ranks."""
    by_rank = world8.run(_compared, settings(case), 3, ranks=CASES[case][0])
    holders = Counter(part for parts in by_rank for part in parts)
    shared = {part for part, count in holders.items() if count > 1}
    if case == "pp2-v-tied":  # its two copies are on one rank
        assert not shared
        return
    assert shared
    if settings(case).training.precision == "fp32":  # otherwise some tensors in a checkpoint are copies
        assert not [part for parts in by_rank for part in shared & parts.keys() if not parts[part]]


def _faults(settings: Config, faults: list[tuple[int, str, int, str]]) -> list[str]:
    """Messages on this rank, one a fault: rank, tensor, element, and `nan` or the number of a bit of its first byte."""
    trainer, parallel = start(settings)
    trainer.train_step(0, batches(0, settings, parallel))
    trainer.strategy.wait()
    messages = []
    for rank, name, element, kind in faults:
        found = [x.values for x in shared_state(trainer) if x.name == name]
        values = found[0] if rank == parallel.rank else None
        if values is not None:
            before = values.clone()
            if kind == "nan":
                values.view(-1)[element] = torch.nan
            else:
                values.view(-1)[element : element + 1].view(torch.uint8)[0] ^= 1 << int(kind)
        try:
            check_consistency(trainer, 1)
        except StateDiffers as error:
            messages.append(str(error))
        if values is not None:
            values.copy_(before)
        check_consistency(trainer, 1)  # and with the value put right nothing differs
    return messages


HOST = socket.gethostname()
QKV = "model.layers.1.attention.q.weight + model.layers.1.attention.k.weight + model.layers.1.attention.v.weight"
EXPERTS = "model." + " + ".join(f"layers.1.mlp.experts.{e}.down.weight" for e in range(4))
FAULTS: dict[str, list[tuple[int, str, int, str, str]]] = {  # and what the message says of it
    "dp4": [
        (2, "model.layers.0.mlp.down.weight", 77, "nan", f"rank 2 on {HOST}: different from ranks 0, 1, 3 in "),
        (0, "model.final_norm.weight", 5, "0", f"rank 0 on {HOST}: different from ranks 1, 2, 3 in "),
        (3, "optimizer.exp_avg_sq.final_norm.weight", 63, "7", f"rank 3 on {HOST}: different from ranks 0, 1, 2 in "),
    ],
    "tp2-sp-gpt2": [
        (1, "model.layers.1.attention_norm.bias", 0, "3", "rank 0 on {h}, rank 1 on {h}: no majority "),
        (0, "model.embedding.position.weight", 300, "nan", "rank 0 on {h}, rank 1 on {h}: no majority "),
    ],
    "tp2-pp2-tied": [
        (3, "model.embedding.word.weight[64, 0]", 9, "1", "rank 1 on {h}, rank 3 on {h} (last stage): no majority "),
        (2, "optimizer.exp_avg.embedding.word.weight[0, 0]", 9, "1", "rank 0 on {h}, rank 2 on {h} (last stage): "),
    ],
    "pp2-v-tied": [(0, "model.embedding.word.weight", 100, "5", "rank 0 on {h}, rank 0 on {h} (last stage): no ")],
    "tp2-dp2-zero-delayed": [  # four ranks hold it: a majority, though each group has two
        (3, "model.final_norm.weight", 3, "2", "rank 3 on {h}: different from ranks 1, 2 in "),
        (1, "fp8.layers.0.mlp.down.input.amax_history", 0, "0", "rank 1 on {h}: different from ranks 0, 3 in "),
    ],
    "dp4-hsdp-param-gather": [  # ranks 0 and 2 hold the upper halves
        (2, "FP8 data of model.layers.0.mlp.down.weight[0, 0]", 700, "0", "rank 0 on {h}, rank 2 on {h}: no majority "),
        (1, "fp8.layers.0.mlp.down.input.scale", 0, "0", "rank 1 on {h}: different from ranks 0, 2, 3 in "),
    ],
    "tp2-dp2-ep2-experts": [  # ranks 0 and 2, and 1 and 3, hold the same experts
        (2, EXPERTS, 4000, "nan", "rank 0 on {h}, rank 2 on {h}: no majority "),
        (3, "model.layers.1.mlp.router.bias", 2, "0", "rank 3 on {h}: different from ranks 1, 2 in "),
    ],
    "dp2-fp16": [(1, "loss_scale.growth_tracker", 0, "0", "rank 0 on {h}, rank 1 on {h}: no majority ")],
    "dp2-zero-param-gather": [
        (1, "FP8 data of model.layers.0.mlp.down.weight", 4000, "0", "rank 0 on {h}, rank 1 on {h}: no majority "),
        (0, "scale_inv of layers.1.mlp.down.weight", 0, "0", "rank 0 on {h}, rank 1 on {h}: no majority "),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(FAULTS, *QUICK))
def test_a_fault_on_one_rank_is_found_and_its_rank_named(world4: World, case: str) -> None:
    faults = FAULTS[case]
    by_rank = world4.run(_faults, settings(case), [fault[:4] for fault in faults], ranks=CASES[case][0])
    for messages in by_rank:
        assert messages == by_rank[0], "ranks say different things"
        assert len(messages) == len(faults)
        for message, (_, name, _, _, expected) in zip(messages, faults):
            first, verdict, *_ = message.splitlines()
            assert first == "after step 1 ranks hold different bits of tensors that must be equal on all ranks."
            assert verdict.startswith(expected.format(h=HOST)), message
            assert verdict.endswith(f" {name}."), message
