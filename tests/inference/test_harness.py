"""Tasks of lm-evaluation-harness: the scores of its own adapter of transformers, in any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.huggingface.test_smollm2 import folder as smollm2_folder
from tests.inference.harness_tasks import TASKS, write_tasks
from tests.inference.small_model import save_small
from tests.world import World

pytest.importorskip("lm_eval", reason="pip install '.[eval]'")

LENGTH = 128

Answers = dict[str, list[Any]]
"""By task, what the model answered to all requests, in order."""


def _answers(results: Mapping[str, Any]) -> Answers:
    return {
        task: [answer for sample in samples for (answer,) in sample["resps"]]
        for task, samples in results["samples"].items()
    }


def _quietly(cache: Path) -> None:
    """No network, and no cache outside of the test."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(cache), TQDM_DISABLE="1", HF_DATASETS_OFFLINE="1")


def their_results(folder: Path, tasks: Path, length: int = LENGTH) -> tuple[dict[str, float], Answers]:
    """Of transformers. Its adapter sums up probabilities in fp32 by default, which is off by 5e-6 a token here."""
    _quietly(tasks / "cache")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megafp8.inference.harness import metrics_of

    model = HFLM(str(folder), device="cpu", dtype="float32", softmax_dtype="float64", max_length=length, batch_size=4)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, log_samples=True)
    assert results is not None
    return metrics_of(results), _answers(results)


def _our_results(
    folder: Path, tasks: Path, layout: Mapping[str, int], length: int = LENGTH, names: tuple[str, ...] = TASKS
) -> tuple[dict[str, float], Answers] | str | None:
    """The results on the first rank, or an error on all."""
    _quietly(tasks / "cache")
    import random

    import numpy as np

    from megafp8.inference import Generator
    from megafp8.inference.harness import HarnessModel, metrics_of, run_tasks
    from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
    from megafp8.inference.scoring import Scorer

    opened = open_checkpoint(folder, InferenceLayout(**layout), device="cpu", dtype=torch.float32)
    model = load_model(opened)
    assert opened.tokenizer is not None
    assert opened.bos is not None
    assert opened.eos is not None
    adapter = HarnessModel(
        Scorer(model, max_length=length, max_batch_tokens=512),
        lambda: Generator.from_model(opened, model, max_length=length),
        opened.tokenizer,
        added_tokens=opened.added_tokens,
        bos=opened.bos,
        eos=opened.eos,
    )
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    try:
        results = run_tasks(adapter, names, include_path=tasks, include_defaults=False, log_samples=True)
    except ValueError as error:
        return str(error)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after, "the harness has changed the state of random numbers"
    return None if results is None else (metrics_of(results), _answers(results))


def assert_equal(ours: Any, theirs: tuple[dict[str, float], Answers], atol: float) -> float:
    """Texts and choices are equal, log-probabilities to `atol`, perplexities to 1e-5. The greatest difference."""
    metrics, answers = ours
    worst = 0.0
    assert metrics.keys() == theirs[0].keys()
    for name, value in theirs[0].items():
        assert metrics[name] == (pytest.approx(value, rel=1e-5) if "per" in name else value), name
    assert answers.keys() == theirs[1].keys() == set(TASKS)
    for task, expected in theirs[1].items():
        for found, answer in zip(answers[task], expected, strict=True):
            if isinstance(answer, str):
                assert found == answer, task
                continue
            (a, *greedy), (b, *their_greedy) = ([x] if isinstance(x, float) else x for x in (found, answer))
            assert greedy == their_greedy, task
            worst = max(worst, abs(a - b))
    assert worst < atol
    return worst


@pytest.mark.parametrize(
    ("bos", "layouts"),
    [
        pytest.param(True, [{"tensor": 2}], marks=pytest.mark.slow),
        pytest.param(False, [{}, {"tensor": 2}, {"pipeline": 2}], marks=pytest.mark.slow),
    ],
)
def test_small_model(world2: World, tmp_path: Path, bos: bool, layouts: list[dict[str, int]]) -> None:
    save_small(tmp_path / "model", bos=bos)
    tasks = write_tasks(tmp_path / "tasks")
    theirs = their_results(tmp_path / "model", tasks, 256)
    for layout in layouts:
        ranks = layout.get("tensor", 1) * layout.get("pipeline", 1)
        ours, *others = world2.run(_our_results, tmp_path / "model", tasks, layout, 256, ranks=ranks)
        assert_equal(ours, theirs, 1e-4)
        assert others == [None] * (ranks - 1)


@pytest.mark.slow
def test_errors_are_those_of_the_first_rank(world2: World, tmp_path: Path) -> None:
    save_small(tmp_path / "model", bos=False)
    tasks = write_tasks(tmp_path / "tasks", gen_tokens=64)
    for names, message in (
        (("capitals", "nothing"), "there is no task nothing in lm-evaluation-harness or in "),
        (("complete",), "a task generates 64 tokens, but max_length is 64"),
    ):
        answers = world2.run(_our_results, tmp_path / "model", tasks, layout={"tensor": 2}, length=64, names=names)
        assert answers[0] == answers[1]
        assert message in answers[0]


folder = smollm2_folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2(world2: World, folder: Path, tmp_path: Path) -> None:
    """A pretrained model. Its answers are right often enough that scores say something."""
    tasks = write_tasks(tmp_path / "tasks")
    theirs = their_results(folder, tasks)
    ours = world2.run(_our_results, folder, tasks, {}, ranks=1, timeout=400)[0]
    worst = assert_equal(ours, theirs, 1e-4)
    print(f"greatest difference of a log-likelihood: {worst:.1e}; metrics (ours, transformers):")
    for name, value in theirs[0].items():
        print(f"{name:<36} {ours[0][name]:.8f} {value:.8f}")
    assert theirs[0]["capitals/acc"] > 0.9
    assert theirs[0]["complete/exact_match"] > 0.9
