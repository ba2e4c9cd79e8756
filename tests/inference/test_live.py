"""Evaluation while training: samples, tasks and validation sets, which change nothing in the training."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megafp8.config import ConfigError, check_layout, load_config
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.samples import split_documents
from megafp8.inference import Generator, SamplingOptions, live
from megafp8.training.init_from import complete_model
from megafp8.training.metrics import read_metrics
from tests.inference.harness_tasks import write_tasks
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.runs import run_job
from tests.training.test_job import inputs_of, log_of, options
from tests.world import World

PROMPTS = ["def main(", "", "import os\n"]
EVALUATE = [
    "training.evaluate.interval=2",
    f"training.evaluate.prompts={json.dumps(PROMPTS)}",
    "training.evaluate.max_tokens=28",
]
SECONDS = ("time", "seconds", "per_second", "per_gpu", "mfu", "memory")
"""Metrics that differ from run to run."""


def _train(jobs: list[list[str]], offline: str) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=offline, TQDM_DISABLE="1")
    for overrides in jobs:
        inputs = inputs_of(overrides)
        run_job(inputs, live.uses(inputs))
        os.environ.pop("WORLD_SIZE", None)
        os.environ.pop("RANK", None)  # the world's group is gone; the next job makes its own


def records(run: Path) -> list[dict[str, Any]]:
    """Steps without what differs from run to run, and what evaluations added."""
    kept = (step for step in read_metrics(run / "metrics.jsonl"))
    return [{k: v for k, v in step.items() if not any(part in k for part in SECONDS)} for step in kept]


def _generated(run: str) -> list[str]:
    """Texts of 28 tokens, or as long as the model's 32 positions allow."""
    generator = Generator.from_checkpoint(run, device="cpu")
    assert generator.tokenizer is not None
    rooms = [32 - 1 - len(generator.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert min(rooms) < 28 <= max(rooms)
    sampling = [SamplingOptions(max_tokens=min(28, room), seed=1234) for room in rooms]
    return [x.text for x in generator.generate(PROMPTS, sampling)]


def test_evaluation_changes_nothing(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """The same losses with and without, also after a resume; texts of the last step are those of its checkpoint."""
    prefix = quickstart_data.folder / "stdlib"
    common = ["training.steps=4", "training.eval_interval=3", "fp8.recipe=delayed"]
    plain = [*options(quickstart_data, tmp_path, *common), "name=plain"]
    full = [*plain, *EVALUATE, f"data.validation={{code: {prefix}, again: {prefix}}}", "name=with"]
    world2.run(_train, [plain, [*full, "training.stop_after=2"], full], str(tmp_path), ranks=1)
    without, found = (records(tmp_path / name) for name in ("plain", "with"))
    losses = [{key: step.pop(key) for key in list(step) if key.startswith("valid/")} for step in found]
    stopped = found[1].pop("validation_loss"), without[1].pop("validation_loss")
    assert stopped[0] is not None, "the last step before a stop is evaluated"
    assert stopped[1] is None
    assert found == without
    assert [sorted(of_step) for of_step in losses] == [[], *[["valid/again", "valid/code"]] * 3]
    assert losses[2]["valid/code"] == losses[2]["valid/again"] != losses[3]["valid/code"]
    lines = log_of(tmp_path / "with")
    (line,) = [line for line in lines if line.startswith("step      3/4")]
    assert f"valid/code {losses[2]['valid/code']:.4f}" in line
    first = lines.index("text after step 2:")
    assert "\n".join(lines[first + 1 :]).startswith(PROMPTS[0])
    samples = [json.loads(line) for line in (tmp_path / "with" / "samples.jsonl").read_text().splitlines()]
    assert [(x["step"], x["prompt"]) for x in samples] == [(step, prompt) for step in (2, 4) for prompt in PROMPTS]
    assert [x["text"] for x in samples[3:]] == world2.run(_generated, str(tmp_path / "with"), ranks=1)[0]


def _write(prefix: Path, source: IndexedDataset, documents: range) -> Path:
    """A data set of some documents of another."""
    writer = IndexedDatasetWriter(prefix, source.dtype.type)
    for i in documents:
        writer.add_document(source.document(i))
    writer.close()
    return prefix


def test_the_loss_of_a_set(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """A set of the documents that the split holds out has their loss, and so has each data set of a blend; without a
    split a set is evaluated alone."""
    whole = IndexedDataset(quickstart_data.folder / "stdlib")
    held_out = _write(tmp_path / "held-out", whole, split_documents(whole.num_documents, "50,50")[1])
    second = _write(tmp_path / "second", whole, range(10))
    of_second = _write(tmp_path / "of-second", whole, range(5, 10))
    common = ["training.steps=1", "training.eval_interval=1"]
    jobs = [
        [*options(quickstart_data, tmp_path, *common), f"name={name}", f"data.split='{split}'", *more]
        for name, split, *more in (
            ("both", "50,50", f"data.validation={{held-out: {held_out}}}", "data.validation_by_source=true"),
            ("alone", "1", f"data.validation={{held-out: {held_out}}}"),
            (
                "blend", "50,50", f"data.train=[{quickstart_data.folder / 'stdlib'}, {second}]",
                f"data.validation={{held-out: {held_out}, second: {of_second}}}", "data.validation_by_source=true",
            ),
        )
    ]  # fmt: skip
    world2.run(_train, jobs, str(tmp_path), ranks=1)
    (both,), (alone,), (blend,) = (records(tmp_path / name) for name in ("both", "alone", "blend"))
    assert both["valid/held-out"] == both["valid/stdlib"] == both["validation_loss"]
    assert alone["validation_loss"] is None
    assert math.isfinite(alone["valid/held-out"])
    assert any(line.startswith("valid/held-out: ") for line in log_of(tmp_path / "alone"))
    assert blend["valid/stdlib"] == blend["valid/held-out"]
    assert blend[f"valid/{second}"] == blend["valid/second"], "the name is that of a set of data.validation too"
    assert len({blend[key] for key in ("valid/stdlib", "valid/second", "validation_loss")}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2", "training.global_batch_size=4"])
def test_tasks_while_training(world2: World, tmp_path: Path, quickstart_data: QuickstartData, layout: str) -> None:
    """Metrics of tasks are those of the checkpoint, and change nothing; those that fail are a warning."""
    pytest.importorskip("lm_eval")
    tasks = write_tasks(tmp_path / "tasks", gen_tokens=4)
    # Without a file name datasets would search the working directory, which may be large.
    (tmp_path / "tasks" / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\noutput_type: generate_until\n"
    )
    plain = [*options(quickstart_data, tmp_path, "training.steps=2", "training.seq_length=256", layout), "name=plain"]
    asked = ["training.evaluate.interval=1", "training.evaluate.limit=4", f"training.evaluate.include_path={tasks}"]
    full = [*plain, *asked, "training.evaluate.tasks=[capitals,prose,complete]", "name=with"]
    broken = [*plain, *asked, "training.evaluate.tasks=[broken]", "name=broken"]
    for job in (plain, full, broken):
        world2.run(_train, [job], str(tmp_path / "cache"))
    without, found, failed = (records(tmp_path / name) for name in ("plain", "with", "broken"))
    metrics = [{key: step.pop(key) for key in list(step) if key.startswith("eval/")} for step in found]
    assert without == found == failed
    assert any(
        line.startswith("WARNING: evaluation after step 1: tasks broken: ") for line in log_of(tmp_path / "broken")
    )
    assert metrics[0].keys() == metrics[1].keys() >= {"eval/capitals/acc_norm", "eval/complete/exact_match"}
    assert metrics[0] != metrics[1]
    of_checkpoint = world2.run(_scores_of, str(tmp_path / "with"), str(tasks), ranks=1)[0]
    assert metrics[1]["eval/prose/bits_per_byte"] == pytest.approx(of_checkpoint, rel=1e-5)


def _scores_of(run: str, tasks: str) -> float:
    """Bits per byte of the task `prose`, by the tool."""
    from contextlib import redirect_stdout
    from io import StringIO

    from tools.evaluate import main

    with redirect_stdout(StringIO()) as out:
        assert main([run, "--tasks", "prose", "--include-path", tasks, "--device", "cpu", "--json"]) == 0
    value: float = json.loads(out.getvalue())["tasks"]["prose"]["bits_per_byte,none"]
    return value


WRONG = {
    "prompts": (EVALUATE[:1], "training.evaluate = 'set': it has neither prompts nor tasks"),
    "limit": ([*EVALUATE, "training.evaluate.limit=3"], "training.evaluate.limit = 3: there are no tasks"),
    "interval": (["data.validation={code: data/code}", "training.eval_interval=0"], "no interval for its evaluation"),
    "sources": (["data.validation_by_source=true", "training.eval_interval=0"], "there is no interval for evaluations"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_config_refuses(quickstart_data: QuickstartData, tmp_path: Path, case: str) -> None:
    overrides, message = WRONG[case]
    config = load_config(CONFIG, [*options(quickstart_data, tmp_path), *overrides], complete_model)
    with pytest.raises(ConfigError, match=message):
        check_layout(config, 1)


def test_what_needs_the_tokenizer_is_refused_too(quickstart_data: QuickstartData, tmp_path: Path) -> None:
    long = json.dumps(["x" * 90, ""])
    wrong = ["training.evaluate.interval=1", f"training.evaluate.prompts={long}",
             "training.evaluate.temperature=1e-6", "training.evaluate.tasks=[a]",
             "data.reset_at_documents=true", f"training.evaluate.include_path={tmp_path / 'none'}"]  # fmt: skip
    with pytest.raises(ConfigError) as error:
        live.check(inputs_of(options(quickstart_data, tmp_path, *wrong)))
    for message in (
        "tokens leave no room in the model's 32 positions; shorten it",
        "no token precedes a document, so the model cannot predict the first; give the beginning of a text",
        "training.evaluate.temperature = 1e-06: temperature = 1e-06: must be 0",
        "no such folder; give the folder with the YAML files of tasks",
    ):
        assert message in str(error.value)
