"""The load of experts: figures by hand, the file and its picture, and a job that writes both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.layers.experts.router import RouterLoad
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import spec_of
from megafp8.training.describe import describe_experts
from megafp8.training.expert_load import ExpertLoad, ExpertLoadMetrics, LoadCollector, read_expert_load
from megafp8.training.metrics import read_metrics
from tests.marks import slow_but
from tests.quickstart_data import QuickstartData
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.presets import config as tiny_config
from tests.training.runs import batches, start, train_job
from tests.world import World
from tools import plot_expert_load


def _collected() -> ExpertLoad:
    moe = {"num_experts": 4, "first_dense_layers": 1, "selection_bias": True, "bias_update_rate": 0.5}
    moe |= {"aux_loss": 0.1, "aux_loss_scope": "global_batch"}
    trainer, parallel = start(tiny_config(model={"moe": moe, "num_layers": 3}))
    routers = {layer: router for stage in trainer.stages for layer, router in stage.routers.items()}
    collector = LoadCollector(routers, {1: 4, 2: 4}, parallel)
    collector.zero()
    for layer, router in routers.items():
        load: RouterLoad = router.load
        load.tokens += torch.tensor([4.0, 2.0, 1.0, 1.0]) if layer == 1 else 2.0
        load.scores += torch.tensor([8.0, 0.0, 0.0, 0.0]) if layer == 1 else 2.0
        load.losses += torch.tensor([0.5, 0.25])
        load.dropped += 2.0
    total = collector.sum()
    collector.update_routers(total)
    assert routers[1].bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    assert routers[2].bias.tolist() == [0.0] * 4
    assert routers[1].shares.tolist() == [0.5, 0.25, 0.125, 0.125]
    return collector.load(total)


def test_figures_by_hand(world2: World) -> None:
    (load,) = world2.run(_collected, ranks=1)
    assert load.tokens == {1: [4, 2, 1, 1], 2: [2, 2, 2, 2]}
    assert (load.aux_loss, load.z_loss) == (1.0, 0.5)
    assert load.imbalance == 2.0  # 4 of 2 on average
    assert load.drop_rate == 0.25  # 4 of 16
    assert load.entropy == pytest.approx(0.5)  # none in one layer, all in the other


def _write(path: Path, *steps: int) -> None:
    loads = {step: ExpertLoad({3: [step, 0, 1], 5: [1, 1, 1]}, 0.0, 0.0, 0.0) for step in steps}
    latest = iter(loads.values())
    with ExpertLoadMetrics(lambda: next(latest), path, 2) as observer:
        for step in steps:
            assert observer.after_step(step, 0.0, False)["expert_imbalance"] == 3 * step / (step + 1)


def test_a_repeated_step_counts_once_and_torn_lines_do_not(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    _write(path, 1, 2, 3, 4, 6)
    path.write_text(path.read_text() + '{"step": 8, "to\n')
    _write(path, 4)  # after a crash
    assert read_expert_load(path) == {2: {3: [2, 0, 1], 5: [1, 1, 1]}, 4: {3: [4, 0, 1], 5: [1, 1, 1]}}


@pytest.mark.parametrize(
    ("preset", "ranks", "differs"),
    [(TP2 | EP2 | CURRENT, 4, False), (TP2 | EP4 | CURRENT, 4, True), (CP2 | DP2 | EP4, 4, False)],
)
def test_the_dry_run_says_where_micro_batches_share_scales(preset: Preset, ranks: int, differs: bool) -> None:
    assert ("several micro-batches come together" in describe_experts(config_of(MOE | preset), ranks)) == differs


def test_a_picture_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "load.png"
    command = [str(tmp_path), "--png", str(png)]
    assert plot_expert_load.main(command) == 2
    assert "has no expert_load.jsonl: runs with model.moe and" in capsys.readouterr().err
    _write(tmp_path / "expert_load.jsonl", 2, 4)
    assert plot_expert_load.main([*command, "--step", "3"]) == 2
    assert "--step 3: the run recorded 2 steps from 2 to 4" in capsys.readouterr().err
    assert plot_expert_load.main(command) == 0
    assert capsys.readouterr().out.startswith("step 4: in layer 3 one expert has 2.40 times the mean load;")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_job_records_it(world2: World, quickstart_data: QuickstartData, tmp_path: Path) -> None:
    options = [
        *quickstart_data.overrides, f"run_dir={tmp_path}", "fp8.recipe=none", "checkpoint.async_save=false",
        "model.num_layers=2", "model.moe={num_experts: 4, ffn_hidden_size: 32, aux_loss: 0.1}",
        "parallel.tensor=2", "parallel.pipeline=1", "parallel.expert=2", "logging.expert_load_interval=1",
        "training.steps=2", "training.seq_length=16", "training.eval_interval=0", "optimizer.warmup_steps=0",
    ]  # fmt: skip
    world2.run(train_job, options)
    folder = tmp_path / "quickstart"
    loads = read_expert_load(folder / "expert_load.jsonl")
    assert list(loads) == [1, 2]
    tokens = 16 * json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["consumed_samples"]
    assert all(sum(of_layer) == 2 * tokens for load in loads.values() for of_layer in load.values())
    for metrics in read_metrics(folder / "metrics.jsonl"):
        assert 1.0 <= metrics["expert_imbalance"] <= 4.0
        assert 0.0 < metrics["router_aux_loss"] < 0.1 * 2 * 4
        assert metrics["router_z_loss"] == 0.0
        assert 0.0 < metrics["router_entropy"] <= 1.0


def _router_gradients(preset: Preset, losses: bool, masked: bool) -> dict[str, Tensor]:
    """The gradients of the routers' weights in a step, whole, float64. `masked`: few tokens count, not as many in each
    micro-batch."""
    moe = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32}
    moe |= {"aux_loss": 0.1 * losses, "z_loss": 0.01 * losses}
    config = config_of(preset, model={"moe": moe}, optimizer={"clip_grad_norm": 0.0})
    trainer, parallel = start(config)
    masks = [
        torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(i)) < 0.05 * (i + 1)
        for i, batch in enumerate(batches(0, config, parallel), start=10 * parallel.data.rank)
    ]
    given = [
        replace(batch, loss_mask=mask.float()) if masked else batch
        for batch, mask in zip(batches(0, config, parallel), masks, strict=True)
    ]
    _, result = trainer.train_step(0, given)
    assert not result.skipped
    return {
        spec_of(shard.param).shards[0].name: gradient_of(shard).double()
        for shard in trainer.optimizer.shards
        if spec_of(shard.param).shards[0].name.endswith("router.weight")
    }


MASKED_RUNS = [SAMPLES_4 | FP64, SAMPLES_8 | DP2 | FP64, SAMPLES_8 | DP2 | FP16]


@pytest.mark.parametrize("preset", slow_but(MASKED_RUNS, MASKED_RUNS[0]))
def test_masks_do_not_change_what_router_losses_add(world2: World, preset: Preset) -> None:
    """What they add to the gradient is the same with and without a loss mask, as all tokens are routed."""

    def added(masked: bool) -> dict[str, Tensor]:
        gradients = [world2.run(_router_gradients, preset, x, masked, ranks=preset.ranks)[0] for x in (True, False)]
        return {name: x - gradients[1][name] for name, x in gradients[0].items()}

    expected, found = added(masked=False), added(masked=True)
    assert len(expected) == 2
    for name, gradient in expected.items():
        rtol = 2e-2 if FP16 in preset else 1e-5
        assert (found[name] - gradient).norm() < rtol * gradient.norm()
