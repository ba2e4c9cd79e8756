"""Gated DeltaNet against transformers; whole models are in test_gpt.py."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.batch import Batch
from megafp8.config.schema import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext, PlannedGroup
from megafp8.models.gpt import GPTStage
from tests.models.weights import randomize


def test_equals_qwen3_next() -> None:
    """The mixer of transformers, which computes the rule in fp32."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mixer = {
        "kind": "gated_delta_net", "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6,
    }  # fmt: skip
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, pattern=["linear"],
        layer_kinds={"linear": {"mixer": mixer}},
    )  # fmt: skip
    group, manager = cast(ProcessGroup, PlannedGroup()), Fp8Manager(None, amax_group=None)
    context = BuildContext(group, manager, torch.float64, torch.device("cpu"), sequence_parallel=False)
    stage = GPTStage(config.spec, context, layers=range(1), positions=0)
    w = {name.removeprefix("layers.0.gated_delta_net."): x for name, x in randomize(stage, lambda piece: 0.3).items()}
    record = config.layer_kinds["linear"].mixer
    assert record is not None
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=config.hidden_size, linear_num_key_heads=record.num_key_heads,
            linear_num_value_heads=record.num_value_heads, linear_key_head_dim=record.key_head_dim,
            linear_value_head_dim=record.value_head_dim, linear_conv_kernel_dim=record.conv_kernel_size,
            rms_norm_eps=config.norm_eps,
        ),
        layer_idx=0,
    ).double()  # fmt: skip

    def by_key_head(names: str) -> Tensor:
        """Rows of projections, those of a key head together, as theirs are."""
        rows = [w[f"{name}.weight"].unflatten(0, (record.num_key_heads, -1)) for name in names.split()]
        return torch.cat(rows, dim=1).flatten(0, 1)

    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(by_key_head("q k v z"))
        theirs.in_proj_ba.weight.copy_(by_key_head("beta decay"))
        theirs.conv1d.weight.copy_(torch.cat([w[f"{part}_conv.weight"] for part in "qkv"]))
        theirs.A_log.copy_(w["log_rate.weight"])
        theirs.dt_bias.copy_(w["decay.bias"])
        theirs.norm.weight.copy_(w["norm.weight"])
        theirs.out_proj.weight.copy_(w["proj.weight"])
    x_sbh = torch.randn(9, 2, config.hidden_size, dtype=torch.float64)
    block = stage.all_blocks[0]
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    found = block.mixer(x_sbh, stage.layer_inputs(Batch(tokens, tokens)).mixers[0])
    expected = theirs(x_sbh.transpose(0, 1)).transpose(0, 1)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
