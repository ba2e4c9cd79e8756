"""Stages of a run: each is a resumption with overrides, and every data set is read exactly once.

Whole jobs in worlds of real ranks. The independent count of samples is by their tokens: each data set has tokens that
no other has.
"""

from __future__ import annotations

import copy
import os
import sys
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml

import pretrain_gpt
from megafp8.batch import Batch
from megafp8.checkpoint import read_metadata
from megafp8.config import check_layout, load_config, planned_stages
from megafp8.training.command_line import prepare
from megafp8.training.metrics import read_metrics
from megafp8.training.trainer import RankTrainer
from tests.data.datasets import write_dataset
from tests.quickstart_data import CONFIG, ROOT
from tests.test_checkpoint_format import undocumented_keys
from tests.training.runs import run_job, saved_tensors
from tests.world import World

NAMES = "abc"
OF_EACH = 170
"""Different tokens of a data set: a has 0 to 169, b 170 to 339, c 340 to 509."""
STAGES: list[dict[str, Any]] = [
    {"training.global_batch_size": 4, "data.train": {"a": 3, "b": 1}, "fp8.recipe": "delayed",
     "fp8.amax_history_len": 4},
    {
        "training.seq_length": 32, "data.train": {"b": 1, "c": 2}, "parallel.tensor": 2, "fp8.recipe": "current",
        "optimizer.schedule": "linear", "optimizer.schedule_from": 6, "optimizer.warmup_steps": 0,
    },
    {"data.train": {"a": 1, "c": 1}, "training.seq_length": 24, "parallel.pipeline": 2, "parallel.zero": 0},
]  # fmt: skip
BEGINS = [3, 6, 9]
STEPS = 11
SEED = 13
"""With which each part of the run reads each of its data sets."""
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "consumed_samples", "validation_loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three data sets of documents of 5 to 60 random tokens, each with tokens of its own."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(3)
    for i, name in enumerate(NAMES):
        documents = [rng.integers(OF_EACH * i, OF_EACH * (i + 1), n).tolist() for n in rng.integers(5, 61, 24)]
        write_dataset(folder / name, documents)
    return folder


def tree_of(data: Path, run_dir: Path, stages: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A small run, of two ranks with ZeRO before its stages."""
    tree = yaml.safe_load(CONFIG.read_text())
    tree["model"] |= {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 512}
    tree["training"] = {
        "steps": STEPS, "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32",
        "eval_interval": 4, "eval_steps": 1,
    }  # fmt: skip
    tree["optimizer"] = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 2}
    tree["parallel"] = {"zero": 1, "bucket_mib": 0.1}
    tree["fp8"] = {"recipe": "none"}
    tree["data"] = {"train": {str(data / "a"): 1, str(data / "b"): 1}, "split": "80,20,0",
                    "index_cache": str(data / "cache")}  # fmt: skip
    tree |= {"seed": SEED, "run_dir": str(run_dir), "checkpoint": {"interval": 4}, "name": "run"}
    tree["logging"] = {"progress": False, "tensorboard": False}
    if stages is not None:
        tree["stages"] = [
            {"name": f"stage-{i}", "begin": begin, "overrides": with_paths(overrides, data)}
            for i, (begin, overrides) in enumerate(zip(BEGINS, stages))
        ]
    return tree


def with_paths(overrides: dict[str, Any], data: Path) -> dict[str, Any]:
    found = dict(overrides)
    found["data.train"] = {str(data / name): weight for name, weight in overrides["data.train"].items()}
    return found


class Watched(RankTrainer):
    """Keeps the samples that it trains on, by their number in the run."""

    samples: ClassVar[dict[int, list[int]]] = {}

    def train_step(self, step: int, batches: Any, **options: Any) -> Any:
        for batch in batches:
            self._keep(batch)
        return super().train_step(step, batches, **options)

    def _keep(self, batch: Batch) -> None:
        assert batch.samples is not None
        whole = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
        for number, tokens in zip(batch.samples.tolist(), whole.tolist()):
            assert self.samples.setdefault(number, tokens) == tokens, "a sample's number has other tokens"


def _job(tree: dict[str, Any]) -> dict[int, list[int]]:
    """Run a job as pretrain_gpt.py does; the samples that this rank was given."""
    from megafp8.training import job

    Watched.samples.clear()
    job.RankTrainer = Watched  # type: ignore[misc]
    path = Path(tree["run_dir"]) / f"rank-{os.environ['RANK']}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    arguments = {"config": str(path), "overrides": [], "dry_run": False, "print_schema": False, "world_size": None}
    inputs = prepare(Namespace(**arguments))
    assert inputs is not None
    run_job(inputs)
    job.RankTrainer = RankTrainer  # type: ignore[misc]
    return dict(Watched.samples)


def run_jobs(world: World, trees: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Each job in a world of its own; all samples that its ranks were given."""
    found: dict[int, list[int]] = {}
    for tree in trees:
        for samples in world.run(_job, tree):
            assert all(found.setdefault(number, tokens) == tokens for number, tokens in samples.items())
    return found


def curve(run_dir: Path) -> list[list[Any]]:
    return [[record[key] for key in KEYS] for record in read_metrics(run_dir / "run" / "metrics.jsonl")]


def checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    return read_metadata(run_dir / "run" / "checkpoints" / f"step_{step:08d}")


@pytest.fixture(scope="module")
def staged(world2: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[int]]]:
    """The run with its stages in one command, and the samples that it was given."""
    folder = tmp_path_factory.mktemp("staged")
    return folder, run_jobs(world2, [tree_of(data, folder, STAGES)])


def one_by_one(tree: dict[str, Any], run_dir: Path) -> list[dict[str, Any]]:
    """The stages of a run as commands of their own, which have overrides and no stages."""
    trees = []
    stages = [{"overrides": {}}, *tree["stages"]]
    for stage, end in zip(stages, [*(stage["begin"] for stage in tree["stages"]), tree["training"]["steps"]]):
        own = {**copy.deepcopy(tree), "run_dir": str(run_dir), "stages": []}
        for key, value in stage["overrides"].items():
            section, _, name = key.partition(".")
            own[section][name] = value
        own["training"]["stop_after"] = end
        trees.append(own)
    return trees


@pytest.mark.slow
def test_stages_are_resumptions_with_overrides(
    world2: World, data: Path, tmp_path: Path, staged: tuple[Path, dict[int, list[int]]]
) -> None:
    """Bit for bit: losses, gradient norms, learning rates, and all that the last checkpoint holds."""
    folder, given = staged
    assert run_jobs(world2, one_by_one(tree_of(data, folder, STAGES), tmp_path)) == given
    expected, found = curve(tmp_path), curve(folder)
    assert [row[0] for row in found] == list(range(1, STEPS + 1))
    assert found == expected
    for step in (3, 6, 9, STEPS):
        one, other = (saved_tensors(path / "run", step) for path in (tmp_path, folder))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
        assert checkpoint(tmp_path, step)["data"] == checkpoint(folder, step)["data"]
    # On the way to zero in the third part, and back at the run's rate with the last.
    assert [row[3] for row in found][5:9] == pytest.approx([1e-3, 1e-3, 0.8e-3, 0.6e-3])
    assert found[-1][3] == 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_groups_of_four_ranks_are_built_anew(world4: World, data: Path, tmp_path: Path) -> None:
    """FSDP, then FSDP and tensor parallelism, then tensor and pipeline parallelism, then FSDP again."""
    tree = tree_of(data, tmp_path / "staged")
    tree["training"] |= {"global_batch_size": 4, "steps": 8}
    tree["parallel"] = {"fsdp": True}
    overrides = [
        {"parallel.tensor": 2, "fp8.recipe": "delayed"},
        {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.fsdp": False, "fp8.recipe": "delayed"},
        {"training.seq_length": 24, "fp8.recipe": "current"},
    ]
    tree["stages"] = [{"name": f"s{i}", "begin": 2 * i, "overrides": x} for i, x in enumerate(overrides, 1)]
    given = run_jobs(world4, [tree])
    assert run_jobs(world4, one_by_one(tree, tmp_path / "parts")) == given
    assert curve(tmp_path / "staged") == curve(tmp_path / "parts")
    one, other = (saved_tensors(tmp_path / name / "run", 8) for name in ("staged", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_what_each_data_set_has_given_is_counted_exactly(staged: tuple[Path, dict[int, list[int]]]) -> None:
    """By the tokens of the samples that the ranks saw, after each of three changes of the blend."""
    folder, given = staged
    sizes, lengths = [2, 4, 2, 2], [16, 16, 32, 24]
    begins = [0, *BEGINS, STEPS]
    samples = tokens = 0
    for i, (begin, end) in enumerate(pairwise(begins)):
        own = range(samples, samples + (end - begin) * sizes[i])
        assert {len(given[number]) for number in own} == {lengths[i] + 1}
        samples, tokens = own.stop, tokens + len(own) * lengths[i]
        metadata = checkpoint(folder, end)
        assert undocumented_keys(metadata) == []
        assert (metadata["consumed_samples"], metadata["tokens"]) == (samples, tokens)
        counts = Counter(NAMES[given[number][0] // OF_EACH] for number in range(samples))
        assert all(len({token // OF_EACH for token in given[number]}) == 1 for number in range(samples))
        recorded = {Path(source["prefix"]).name: source["consumed"] for source in metadata["data"]["sources"]}
        assert recorded == counts
        listed = {Path(source["prefix"]).name for source in metadata["data"]["sources"] if source["weight"]}
        assert listed == {NAMES[given[number][0] // OF_EACH] for number in own}
        assert metadata["stage"] == (None if i == 0 else f"stage-{i - 1}")
        assert [change["step"] for change in metadata["changes"]] == begins[1 : i + 1]
    assert len(given) == samples
    keys = [change["keys"] for change in metadata["changes"]]
    assert "training.global_batch_size 2 -> 4" in keys[0]
    assert "training.seq_length 16 -> 32" in keys[1]
    records = read_metrics(folder / "run" / "metrics.jsonl")
    assert records[-1]["consumed_samples"] == samples
    assert records[-1]["tokens"] == tokens
    log = (folder / "run" / "log.txt").read_text()
    assert log.count("stage stage-1: steps 7 to 9") == 1
    assert "samples of" in log
    configs = sorted(path.name for path in (folder / "run").glob("config*.yaml"))
    assert configs == ["config-from-step-00000003.yaml", "config-from-step-00000006.yaml",
                       "config-from-step-00000009.yaml", "config.yaml"]  # fmt: skip
    assert len((folder / "run" / "launches.jsonl").read_text().splitlines()) == 1


def test_no_token_is_skipped_or_repeated_where_the_length_changes(
    data: Path, staged: tuple[Path, dict[int, list[int]]]
) -> None:
    """Five tokens name a place in a data set. Each sample has places that no other has."""
    _, given = staged
    seen: Counter[tuple[int, ...]] = Counter()
    for tokens in given.values():
        seen.update(tuple(tokens[i - 4 : i + 1]) for i in range(4, len(tokens)))
    assert max(seen.values()) == 1


@pytest.mark.slow
def test_a_run_that_stops_within_a_stage_goes_on(
    world2: World, data: Path, tmp_path: Path, staged: tuple[Path, dict[int, list[int]]]
) -> None:
    """Stopped in each stage; and from a checkpoint of an earlier stage, where all later ones are damaged."""
    folder, given = staged
    tree = tree_of(data, tmp_path, STAGES)
    trees = [{**tree, "training": {**tree["training"], "stop_after": end}} for end in (4, 8, 10)]
    early = run_jobs(world2, trees)
    assert early.items() <= given.items()
    for step in (6, 8, 9, 10):
        file = tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert (early | run_jobs(world2, [tree])) == given
    assert "resumed from step 4" in (tmp_path / "run" / "log.txt").read_text().rpartition("damaged")[2]
    assert curve(tmp_path) == curve(folder)
    one, other = (saved_tensors(path / "run", STEPS) for path in (tmp_path, folder))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    assert checkpoint(tmp_path, STEPS)["changes"] != []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_loss_spikes_within_a_stage(world2: World, data: Path, tmp_path: Path) -> None:
    """Rewinds to the beginning of a stage and to a checkpoint within it: as in separate commands, as with a resumption
    between them, and as in a run that leaves these samples out from the beginning."""
    faults = [{"kind": "loss_spike", "rank": rank, "step": step} for step in (7, 10) for rank in (0, 1)]
    second = {"training.global_batch_size": 4, "training.seq_length": 32, "parallel.tensor": 2}

    def tree(name: str, faults: list[dict[str, Any]]) -> dict[str, Any]:
        found = tree_of(data, tmp_path / name)
        found["training"] |= {"steps": 13, "eval_interval": 0}
        found["data"]["train"] = {str(data / "b"): 1, str(data / "c"): 1}  # without token 0, which the faults predict
        found["optimizer"] |= {"learning_rate": 1e-2}
        found["resilience"] = {"loss_spike": {"action": "rewind", "window": 4, "sigmas": 4.0}, "inject": faults}
        found["stages"] = [{"name": "second", "begin": 4, "overrides": second},
                           {"name": "third", "begin": 11, "overrides": {"training.seq_length": 24}}]  # fmt: skip
        return found

    def stopped(name: str, after: int) -> dict[str, Any]:
        own = tree(name, faults)
        return {**own, "training": {**own["training"], "stop_after": after}}

    skipped = tmp_path / "without" / "run" / "skipped_samples.json"
    skipped.parent.mkdir(parents=True)
    skipped.write_text("[[8, 20], [36, 44]]")
    run_jobs(world2, [tree("staged", faults)])
    run_jobs(world2, one_by_one(tree("commands", faults), tmp_path / "commands"))
    run_jobs(world2, [stopped("resumed", 8), tree("resumed", faults)])
    run_jobs(world2, [tree("without", [])])
    found = curve(tmp_path / "staged")
    assert [row[5] for row in found] == [2, 4, 6, 8, 24, 28, 32, 36, 48, 52, 56, 58, 60]
    assert found[-1][4] == 16 * 8 + 32 * 28 + 24 * 4  # tokens are those that were trained on
    log = (tmp_path / "staged" / "run" / "log.txt").read_text()
    assert "loss spike in step 7: back to step 4, without samples 8 to 19" in log
    assert "loss spike in step 10: back to step 8, without samples 36 to 43" in log
    for name in ("commands", "resumed", "without"):
        assert curve(tmp_path / name) == found
        one, other = (checkpoint(tmp_path / run, 13) for run in (name, "staged"))
        keys = ("data", "consumed_samples", "tokens", "losses", "skipped_samples")
        assert [one[key] for key in keys] == [other[key] for key in keys]


BAD: list[tuple[list[dict[str, Any]], str]] = [
    ([{"begin": 3, "overrides": {"training.seq_len": 8}}],
     "s0 from step 3: 1 problem\n  training.seq_len = 8: there is no such key; did you mean training.seq_length?"),
    ([{"begin": 3}, {"begin": 3}], "stages.1.begin = 3: stage s0, listed before it, begins at step 3"),
    ([{"begin": 40}], "stages.0.begin = 40: the run has only training.steps = 11"),
    ([{"begin": 3, "overrides": {"training.steps": 8}}], "training.steps = 8: it is the length of the run"),
    ([{"begin": 3, "overrides": {"seed": 8}}], "seed = 8: a stage can only override keys of the sections model"),
    ([{"begin": 3, "overrides": {"parallel.tensor": 2}}], "the world has 1 ranks, not a multiple of 2"),
    ([{"begin": 3, "overrides": {"training.precision": "bf16"}}],
     "the checkpoint of step 3 was saved with training.precision = fp32, this run has bf16"),
    ([{"begin": 3, "overrides": {"model.rope_theta": 5e5}}],
     "the checkpoint of step 3 holds the weights of another model (model.rope_theta 10000.0 -> 500000.0)"),
    ([{"begin": 3, "overrides": {"model.num_layers": 4}}], "(model.num_layers 2 -> 4)"),
    ([{"begin": 3}, {"begin": 5, "overrides": {"data.split": "50,50"}}],
     "data.split = '50,50': selects the documents 0-12"),
    ([{"begin": 3, "overrides": {"data.train": ["nowhere"]}}], "nowhere"),
    ([{"begin": 3, "overrides": {"optimizer.schedule_from": 20, "optimizer.schedule": "linear"}}],
     "optimizer.schedule_from = 20: the schedule ends at training.steps = 11"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_stage_is_one_error_before_any_process_group(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stages: list[dict[str, Any]],
    message: str,
) -> None:
    tree = tree_of(data, tmp_path)
    tree["stages"] = [{"name": f"s{i}", **stage} for i, stage in enumerate(stages)]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--config", str(tmp_path / "run.yaml")])
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("a group was built"))
    assert pretrain_gpt.main() == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "run").joinpath("metrics.jsonl").exists()


def test_the_example_can_run() -> None:
    config = load_config(ROOT / "configs" / "llama3-8b-stages.yaml")
    stages = planned_stages(config, "llama3-8b-stages.yaml")
    assert [(stage.name, stage.begin) for stage in stages] == [
        ("ramp-up", 0), ("main", 2000), ("long-context", 90000), ("anneal", 96000),
    ]  # fmt: skip
    for stage in stages:
        check_layout(stage.config, 64, stage.source)
    lengths = [(s.config.training.seq_length, s.config.training.global_batch_size) for s in stages]
    assert lengths == [(8192, 64), (8192, 128), (65536, 16), (65536, 16)]
    assert [stage.config.parallel.context for stage in stages] == [1, 1, 4, 4]
