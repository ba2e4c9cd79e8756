"""What a rank of a fully sharded model holds, and what cannot be sharded. How it trains: test_layouts.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor

from megafp8.config import Config, ConfigError
from megafp8.parallel.data.fsdp import Released
from megafp8.parallel.data.strategy import FullySharded
from tests.parallel.data.test_fsdp import param_groups
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import check_config, start, steps_of
from tests.world import World


def _storages(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def _held(config: Config) -> tuple[int, int, int, int]:
    """Elements of the model; bytes between steps of parameters with gradients, whatever torch holds; of gradients;
    how many weights are released even where blocks are gathered."""
    trainer, parallel = start(config)
    total = sum(p.numel() for p in trainer.model.parameters())
    steps_of(trainer, parallel, [0])
    assert isinstance(trainer.strategy, FullySharded)
    stages = trainer.strategy.stages
    groups = [group for m in stages._modules for group in param_groups(m)]
    held = [p._sharded_param_data for g in groups for p in g.fsdp_params]
    held += [t for g in groups for p in g.fsdp_params for t in (*p.all_gather_outputs, p._unsharded_param)]
    held += [old.data for old in stages.row_shards]
    weights = _storages([t for t in held if not isinstance(t, Released)])
    for block in trainer.stages[0].blocks:
        block.unshard()
    released = sum(isinstance(p, Released) for p in trainer.stages[0].parameters())
    return total, weights, stages.flat.nbytes, released


@pytest.mark.parametrize(("preset", "expected"), [(NONE, 0), (CURRENT | FP8_GATHER, 8)])
def test_between_steps_a_rank_holds_its_shard(world2: World, preset: Preset, expected: int) -> None:
    for total, weights, gradients, released in world2.run(_held, config_of(DP2 | FSDP | preset)):
        assert total * 2 <= weights < total * 2.01
        assert total * 2 <= gradients < total * 2.05
        assert released == expected


def _report(config: Config) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        return start(config)[0].strategy.describe()


@pytest.mark.slow
def test_the_log_says_what_is_held_and_received(world2: World) -> None:
    """Of weights of 8 FP8 layers, fp32 and FP8; of embedding, output layer and 5 norms, fp32."""
    model = {"hidden_size": 1024, "ffn_hidden_size": 2048, "num_query_groups": 8}
    fp8, others = 2 * (4 * 1024**2 + 3 * 1024 * 2048), 2 * 128 * 1024 + 5 * 1024
    for found in world2.run(_report, config_of(DP2 | FSDP | CURRENT | FP8_GATHER, model=model)):
        numbers = [float(word) for word in re.findall(r"[\d.]+\d", found)]
        gib = [2.5 * fp8 + 2 * others, fp8 / 2 + 2 * others, 2 * (fp8 + others)]
        assert numbers == [round(gib[0] / 2**30, 3), 15, round(gib[1] / 2**30, 3), round(gib[2] / 2**30, 3)], found
        assert "8 of them in FP8" in found


@pytest.mark.slow
def test_the_log_says_where_replicas_are(world4: World) -> None:
    for found in world4.run(_report, config_of(MOE | DP4 | EP2 | HSDP)):
        assert found.endswith(
            "\nparallel.fsdp: weights of experts are not sharded, 0.000 GiB more"
            "\nparallel.fsdp_replicas: 2 replicas of the shards, each on 2 ranks of one host, share the optimizer state"
        )


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (ZERO, "stage 3, which already shards everything"),
        (PP2 | ZB_H1, "delays weight gradients"),
        (ROWWISE | FP8_GATHER, "finer scales for weights"),
    ],
)
def test_what_cannot_be_sharded_is_refused(preset: Preset, message: str) -> None:
    config = config_of(SAMPLES_8 | FSDP | preset, device="auto")
    with pytest.raises(ConfigError, match=message):
        check_config(config, 4)


@pytest.mark.parametrize(
    ("parallel", "rule", "works"),
    [
        ({"fsdp_replicas": 2}, "parallel.fsdp is false", "try parallel.fsdp=true, or parallel.fsdp_replicas=1"),
        ({"fsdp_replicas": 2, "zero": 1}, "parallel.fsdp is false", "try parallel.fsdp=true"),
        ({"fsdp_replicas": 3, "fsdp": True}, "equal parts of 8 data-parallel ranks", "try 1 or 2"),
        ({"fsdp_replicas": 16, "fsdp": True}, "equal parts of 8 data-parallel ranks", "try 2 or 4 or 8"),
        ({"fsdp_replicas": 8, "fsdp": True, "tensor": 2}, "equal parts of 4 data-parallel ranks", "try 1 or 2 or 4"),
        ({"fsdp_replicas": 5, "fsdp": True, "context": 2}, "8 data- and context-parallel ranks", "try 1 or 2 or 4"),
    ],
)
def test_replicas_that_cannot_be_are_refused(parallel: dict[str, Any], rule: str, works: str) -> None:
    config = config_of(SAMPLES_8, parallel=parallel)
    with pytest.raises(ConfigError) as error:
        check_config(config, 8)
    _, *problems = str(error.value).splitlines()
    assert len(problems) == 1
    assert problems[0].startswith(f"  parallel.fsdp_replicas = {parallel['fsdp_replicas']}: ")
    assert rule in problems[0]
    assert works in problems[0]


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 4}, {"context": 8}, {"pipeline": 2, "context": 2}])
def test_replicas_may_divide_context_parallel_ranks(parallel: dict[str, int]) -> None:
    check_config(config_of(SAMPLES_8 | HSDP, parallel=parallel), 8)
