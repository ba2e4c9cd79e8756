"""Distillation: the loss and its gradients by hand in float64, any layout, resuming, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.config import ConfigError, check_layout, load_config
from megafp8.layers.head.divergence_op import (
    vocab_parallel_divergence,
    vocab_parallel_log_softmax,
    vocab_parallel_top_k,
)
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.training.errors import TrainingError
from megafp8.training.frozen_config import check_frozen
from megafp8.training.init_from import complete_model, load_init
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.validate import check_run
from tests.conversion import families
from tests.marks import slow_but
from tests.quickstart_data import ROOT
from tests.training.presets import (
    ANSWERS,
    CP2,
    DP2,
    FP64,
    FSDP,
    GEMMA,
    INTERLEAVED,
    LAYERS_4,
    LORA,
    LOSS_PARTS,
    MOE,
    NONE,
    PP2,
    SAMPLES_2,
    SAMPLES_4,
    TIED,
    TP2,
    VOCABULARY,
    ZB_H1,
    ZERO,
    Preset,
    config_of,
    merged,
)
from tests.training.runs import Curve, OneRank, batches, digests, run_job, saved_tensors, start, steps_of
from tests.training.test_fine_tuning import make_model
from tests.training.test_fine_tuning import prepare as prepare_chats
from tests.world import World

CONFIG = ROOT / "configs" / "llama3-8b-distillation.yaml"
T = 2.0

# --- the divergence of shards ----------------------------------------------------------------------------------------


def _divergence(z_sbv: Tensor, u_sbv: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The divergence and its gradient, of this rank's columns; the largest logits."""
    parallel = initialize_model_parallel(torch.distributed.get_world_size())
    group = parallel.tensor.group
    own = [x.chunk(group.size(), dim=-1)[group.rank()].clone() for x in (z_sbv, u_sbv)]
    z_own, u_own = own[0].requires_grad_(), own[1]
    p_own = vocab_parallel_log_softmax(u_own, group, vocab_size=vocab_size, temperature=T).exp()
    kl_sb = vocab_parallel_divergence(z_own, p_own, group, vocab_size=vocab_size, temperature=T)
    (kl_sb * torch.arange(1.0, 1 + kl_sb.numel()).view_as(kl_sb)).sum().backward()
    assert z_own.grad is not None
    return kl_sb.detach(), z_own.grad, *vocab_parallel_top_k(u_own, 5, group, vocab_size=vocab_size)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [16, 13, 7])  # 7: a rank has padding alone
def test_divergence_of_shards(world4: World, ranks: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z_sbv, u_sbv = (3 * torch.randn(5, 2, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    results = world4.run(_divergence, z_sbv, u_sbv, vocab_size, ranks=ranks)
    z = z_sbv[..., :vocab_size].clone().requires_grad_()
    u = u_sbv[..., :vocab_size]
    p, q = (torch.exp(x / T) / torch.exp(x / T).sum(-1, keepdim=True) for x in (u, z))
    kl = (p * (p.log() - q.log())).sum(-1)
    (kl * torch.arange(1.0, 1 + kl.numel()).view_as(kl)).sum().backward()
    grad = torch.cat([x[1] for x in results], dim=-1)
    assert z.grad is not None
    torch.testing.assert_close(grad[..., :vocab_size], z.grad, rtol=1e-12, atol=1e-14)
    assert not grad[..., vocab_size:].any()
    largest = u.topk(5, dim=-1)
    for found, _, values, ids in results:
        torch.testing.assert_close(found, kl.detach(), rtol=1e-12, atol=1e-14)
        assert torch.equal(values, largest.values)
        assert torch.equal(ids, largest.indices)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of transformers, wider and deeper than the student, whose logits differ clearly from each other."""
    folder = tmp_path_factory.mktemp("teacher")
    kind, options = families.THEIRS["llama3"]
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_hidden_layers": 4}
    families.THEIRS["here"] = kind, options | sizes
    model = families.make_theirs("here")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return str(folder)


def _preset(preset: Preset, teacher: str, **keys: Any) -> Preset:
    section = {"data": {"distillation": {"teacher": teacher, **keys}}}
    return Preset(("distillation", *preset.names), merged(preset.sections, section), preset.data_ranks)


def _started(preset: Preset) -> Any:
    trainer, parallel = start(config_of(preset))
    given = trainer.config.data.distillation
    assert given is not None
    assert trainer.frozen is not None
    load_init(trainer.frozen, given.teacher)
    return trainer, parallel


def _gradients_and_by_hand(preset: Preset) -> tuple[float, list[float], list[float]]:
    """Largest difference of a gradient, relative; loss, divergence and cross entropy, and the same by hand."""
    import transformers

    trainer, parallel = _started(preset)
    found, given = batches(2, trainer.config, parallel), trainer.config.data.distillation
    passes = trainer.run_passes(found)
    loss = trainer._loss.mean(passes.report.tolist()[:-1])
    scale = trainer.nominal_tokens / float(passes.report[1])
    gradients = torch.cat([x.flatten() for x in trainer.strategy.gradients]) * scale
    trainer.strategy.clear()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(given.teacher, dtype=torch.float64)
    sums, count = [torch.zeros((), dtype=torch.float64) for _ in range(3)], 0
    for batch in found:
        z = trainer.stages[0](None, replace(batch, labels=None))[..., :VOCABULARY].transpose(0, 1)
        mask = torch.ones(batch.tokens.shape) if batch.loss_mask is None else batch.loss_mask
        bounds = [0, batch.tokens.shape[1]] if batch.cu_seqlens is None else batch.cu_seqlens[0].tolist()
        spans = [(a, b) for a, b in pairwise(bounds) if b > a]
        with torch.no_grad():
            u = trainer.frozen.stages[0](None, replace(batch, labels=None))[..., :VOCABULARY].transpose(0, 1)
            of_theirs = torch.cat([theirs(batch.tokens[:, a:b]).logits for a, b in spans], dim=1)  # documents alone
        torch.testing.assert_close(u, of_theirs, rtol=1e-4, atol=1e-4)  # whose norms are in fp32
        if given.top_k is not None:
            smallest = u.topk(given.top_k, dim=-1).values[..., -1:]
            u = u.masked_fill(u < smallest, -torch.inf)
        p, log_q = torch.softmax(u / given.temperature, -1), torch.log_softmax(z / given.temperature, -1)
        divergence = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
        entropy = -torch.log_softmax(z, -1).gather(-1, batch.labels[..., None])[..., 0]
        total = given.weight * given.temperature**2 * divergence + (1 - given.weight) * entropy
        sums = [a + (b * mask).sum() for a, b in zip(sums, (total, divergence, entropy))]
        count += int(mask.sum())
    (sums[0] / count).backward()
    by_hand = torch.cat([x.flatten() for x in trainer.strategy.gradients])
    difference = float((gradients - by_hand).abs().max() / by_hand.abs().max())
    return difference, [loss.mean, *loss.metrics.values()], [float(x.detach()) / count for x in sums]


@pytest.mark.parametrize(
    ("preset", "keys"),
    [
        (NONE, {}), (LOSS_PARTS, {"temperature": 2.5, "weight": 0.7}), (ANSWERS, {"weight": 0.5}),
        (TIED | LOSS_PARTS, {"top_k": 7, "temperature": 0.5}), (GEMMA | LOSS_PARTS, {"weight": 0.9}),
        (ANSWERS, {"top_k": 3, "weight": 0.4, "temperature": 3.0}),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_formula(world2: World, teacher: str, preset: Preset, keys: dict[str, Any]) -> None:
    """In float64; the teacher's logits are those of transformers."""
    preset = _preset(SAMPLES_4 | FP64 | preset, teacher, **keys)
    difference, found, by_hand = world2.run(_gradients_and_by_hand, preset, ranks=1)[0]
    assert difference < 1e-10
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert found[1] > 0.1


# --- layouts ---------------------------------------------------------------------------------------------------------


def _curve(preset: Preset) -> Curve:
    trainer, parallel = _started(preset)
    curve = steps_of(trainer, parallel, range(2))
    evaluated = trainer.evaluate(batches(9, trainer.config, parallel))
    return [*curve, (evaluated.mean, evaluated.tokens), *((x, 0.0) for x in evaluated.metrics.values())]


@pytest.fixture(scope="module")
def one_rank(world4: World) -> OneRank[Curve]:
    return OneRank(world4, _curve)


LAYOUTS = [
    TP2, PP2, CP2 | DP2, DP2 | ZERO, DP2 | FSDP, TP2 | PP2, LAYERS_4 | PP2 | ZB_H1, LAYERS_4 | PP2 | INTERLEAVED,
    TIED | TP2 | PP2, LORA | TP2 | DP2 | ZERO, MOE | ANSWERS | DP2, ANSWERS | TP2 | CP2, TP2 | DP2 | FSDP,
]  # fmt: skip
CASES = [(preset, top_k) for preset in LAYOUTS for top_k in (None, 6)]
QUICK_CASES = [  # each axis with all logits and with the largest ones
    (CP2 | DP2, None), (TIED | TP2 | PP2, None), (LORA | TP2 | DP2 | ZERO, None), (TP2 | DP2 | FSDP, 6),
    (LAYERS_4 | PP2 | ZB_H1, None), (LAYERS_4 | PP2 | INTERLEAVED, None), (MOE | ANSWERS | DP2, 6),
    (ANSWERS | TP2 | CP2, 6),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "top_k"), slow_but(CASES, *QUICK_CASES), ids=str)
def test_layouts_train_alike(
    world4: World, one_rank: OneRank[Curve], teacher: str, preset: Preset, top_k: int | None
) -> None:
    """In float64: losses, gradient norms, and what an evaluation reports. Two micro-batches on each rank."""
    preset = FP64 | preset | (SAMPLES_4 if preset.data_ranks == 2 else SAMPLES_2)
    preset = _preset(preset, teacher, weight=0.6, temperature=2.0, top_k=top_k)
    expected = one_rank(preset)
    for found in world4.run(_curve, preset, ranks=preset.ranks):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


# --- runs ------------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> list[str]:
    """The files and overrides of `test_fine_tuning.prepare`, with a teacher that is another model."""
    overrides = [x for x in prepare_chats(folder) if not x.startswith("optimizer.clip")]
    kind, options = families.THEIRS["here"]
    families.THEIRS["here"] = kind, options | {"hidden_size": options.get("hidden_size", 64) * 2}
    torch.manual_seed(7)
    families.make_theirs("here").save_pretrained(folder / "teacher")
    return [
        *overrides, f"data.distillation.teacher={folder / 'teacher'}", "data.distillation.top_k=20",
        "checkpoint.interval=2", "logging.progress=false", "optimizer.learning_rate=3e-3",
    ]  # fmt: skip


def _job(overrides: list[str]) -> list[dict[str, Any]]:
    config = load_config(CONFIG, overrides, complete_model)
    ranks = torch.distributed.get_world_size()
    check_layout(config, ranks)
    inputs = open_inputs(config, "test")
    check_frozen(inputs.config, ranks)
    check_run(inputs)
    run_job(inputs)
    return read_metrics(Path(config.run_dir) / config.name / "metrics.jsonl")


def test_a_run_that_resumes_is_bit_identical(world2: World, tmp_path: Path) -> None:
    overrides = [*prepare(tmp_path), "training.steps=2", "checkpoint.interval=1", "parallel.tensor=1"]
    whole = world2.run(_job, [*overrides, "name=whole"], ranks=2)[0]
    for stop in (["training.stop_after=1"], []):
        resumed = world2.run(_job, [*overrides, "name=resumed", *stop], ranks=2)[0]
    keys = ["loss", "grad_norm", "divergence", "cross_entropy"]
    assert [[row[key] for key in keys] for row in whole] == [[row[key] for key in keys] for row in resumed]
    assert whole[-1]["divergence"] < whole[0]["divergence"]
    expected, found = (digests(saved_tensors(tmp_path / "runs" / name, 2)) for name in ("whole", "resumed"))
    assert expected == found
    # A run of ours is a teacher, too: that of a student with the same weights has nothing to teach.
    more = [f"checkpoint.init_from={tmp_path / 'runs' / 'whole'}", "data.distillation.top_k=null", "name=again"]
    more += ["training.steps=1", "parallel.pipeline=1", f"data.distillation.teacher={tmp_path / 'runs' / 'whole'}"]
    again = world2.run(_job, [*overrides, *more], ranks=1)[0]
    assert abs(again[0]["divergence"]) < 1e-6


# --- logits that are computed once -----------------------------------------------------------------------------------

PRECOMPUTED = "data.distillation.logits=precomputed"


def _losses(rows: list[dict[str, Any]]) -> list[float]:
    keys = ("loss", "grad_norm", "divergence", "cross_entropy", "validation_loss")
    losses = [row[key] for row in rows for key in keys if row.get(key) is not None]
    assert len(losses) == 4 * len(rows) + 2, "two of four steps have an evaluation"
    return losses


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.teacher-*"))


def _refused(overrides: list[str], message: str) -> None:
    with pytest.raises((TrainingError, ValueError), match=message):
        _job(overrides)


def _prepare_evaluated(folder: Path) -> list[str]:
    sizes = ["parallel.tensor=1", "parallel.pipeline=1", "training.eval_interval=2", 'data.split="80,20"']
    return [*prepare(folder), *sizes]


def test_logits_that_a_run_began_with(world2: World, tmp_path: Path) -> None:
    """It resumes with these alone, and trains as with a live teacher, bit for bit."""
    overrides = _prepare_evaluated(tmp_path)
    live = world2.run(_job, [*overrides, "name=live"], ranks=1)[0]
    overrides += ["name=resumed", PRECOMPUTED]
    world2.run(_job, [*overrides, "training.stop_after=2"], ranks=1)
    (path,) = _files(tmp_path)
    (tmp_path / "teacher").rename(tmp_path / "elsewhere")
    world2.run(_refused, [*overrides, "data.distillation.top_k=19"], "is missing: the run began with", ranks=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    world2.run(_refused, overrides, "is damaged", ranks=1)
    path.write_bytes(whole)
    assert _losses(world2.run(_job, overrides, ranks=1)[0]) == _losses(live)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (["parallel.tensor=2", "parallel.pipeline=2"], ["parallel.context=2", "parallel.zero=1"]),
        (["training.precision=bf16"], []),
        (["parallel.context=2", "fp8.recipe=delayed"], ["parallel.fsdp=true"]),
        (["data.loss_on=all", "training.micro_batch_size=2", "parallel.tensor=2"], ["lora={rank: 4}"]),
    ],
)
def test_logits_are_computed_once(world4: World, tmp_path: Path, layout: list[str], other: list[str]) -> None:
    """In the layout that computed them, losses are those of a live teacher bit for bit, of samples of the first epoch;
    in another one they differ by rounding."""
    base = _prepare_evaluated(tmp_path)
    rows = {
        name: world4.run(_job, [*base, *layout, f"name={name}", *more], ranks=4)[0]
        for name, more in {"live": [], "computed": [PRECOMPUTED]}.items()
    }
    assert _losses(rows["computed"]) == _losses(rows["live"])
    (path,) = _files(tmp_path)
    changed = path.stat().st_mtime_ns
    if other:
        rows = {
            name: world4.run(_job, [*base, *other, f"name=other-{name}", *more], ranks=4)[0]
            for name, more in {"live": [], "computed": [PRECOMPUTED]}.items()
        }
        np.testing.assert_allclose(_losses(rows["computed"]), _losses(rows["live"]), rtol=2e-5)
        assert _files(tmp_path) == [path]
        assert path.stat().st_mtime_ns == changed


@pytest.mark.slow
def test_other_logits_are_in_another_file(world2: World, tmp_path: Path) -> None:
    """Of another teacher, k or length; a temperature and a weight share one. Epochs after the first read the same."""
    overrides = [*_prepare_evaluated(tmp_path), PRECOMPUTED, "training.steps=2"]
    changes: list[list[str]] = [
        [], ["data.distillation.temperature=2.0", "data.distillation.weight=0.5"], ["training.steps=12"],
        ["data.distillation.top_k=19"], ["training.seq_length=32"], ["data.split=\"70,30\""],
    ]  # fmt: skip
    counts = []
    for i, change in enumerate(changes):
        rows = world2.run(_job, [*overrides, f"name=run-{i}", *change], ranks=2)[0]
        assert all(math.isfinite(row["loss"]) for row in rows)
        counts.append(len(_files(tmp_path)))
    assert counts == [1, 1, 1, 2, 3, 4]
    file = next((tmp_path / "teacher").glob("*.safetensors"))
    tensors = load_file(file)
    tensors[sorted(tensors)[0]] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    world2.run(_job, [*overrides, "name=changed"], ranks=2)
    assert len(_files(tmp_path)) == 5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"distillation": {"teacher": "x", "logits": "precomputed"}}, "data.distillation.top_k = None"),
        ({"packing": "concatenate"}, "data.packing = 'concatenate': data.distillation.logits is precomputed"),
        ({"train": ["s3://bucket/x"]}, "data.distillation.logits = 'precomputed'"),
    ],
)
def test_logits_that_cannot_be_precomputed(change: dict[str, Any], error: str) -> None:
    data = {"packing": "best_fit", "reset_at_documents": True, "mask_eod_loss": True, "train": ["none"]}
    data["distillation"] = {"teacher": "x", "logits": "precomputed", "top_k": 4}
    check_layout(config_of(NONE, data=data), 1)
    with pytest.raises(ConfigError, match=error):
        check_layout(config_of(NONE, data=data | change), 1)


# --- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": {"mtp_num_layers": 1}}, "model.mtp_num_layers = 1: data.distillation is set"),
        ({"training": {"z_loss": 0.1}}, "training.z_loss = 0.1: data.distillation is set"),
        ({"data": {"dpo": {}}}, "a model has one objective"),
        ({"data": {"distillation": {"teacher": "x", "top_k": 101}}}, "data.distillation.top_k = 101: model.vocab_size"),
        ({"training": {"cuda_graphs": True}, "device": "cuda"}, "training.cuda_graphs = True: a frozen model computes"),
    ],
)
def test_what_does_not_go_with_it_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_layout(config_of(_preset(NONE, "x"), **change), 1)


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("weight", 1.5), ("temperature", 0), ("top_k", 0), ("t", 1)])
def test_bad_values_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"data.distillation.{key}"):
        load_config(CONFIG, [f"data.distillation.{key}={value}", "model.vocab_size=100"])


def test_teachers_that_cannot_be_are_refused(teacher: str, tmp_path: Path) -> None:
    missing = config_of(_preset(NONE, str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"data.distillation.teacher = .*nothing"):
        check_frozen(missing, 1)
    make_model(tmp_path / "other", 64)
    with pytest.raises(ConfigError, match=r"has a vocabulary of 340 tokens, and model.vocab_size is 100"):
        check_frozen(config_of(_preset(NONE, str(tmp_path / "other"))), 1)
    check_frozen(config_of(_preset(NONE, teacher)), 1)
    with pytest.raises(ConfigError, match=r"the teacher, .*, in the layout of the run"):
        check_frozen(config_of(_preset(Preset(("pp8",), {"parallel": {"pipeline": 8}}), teacher)), 8)
