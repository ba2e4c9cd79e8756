"""Sample texts, evaluations and rollouts with the live model of a training job (`training.evaluate`, `data.grpo`)."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

from megafp8.config import ConfigError, EvaluateConfig, Problem
from megafp8.data.tokenizers import Tokenizer
from megafp8.host.shipped import install_command
from megafp8.host.text_file import DiskErrorsLogged, JsonLines
from megafp8.inference import rollouts
from megafp8.inference.generator import CacheOptions, Generator
from megafp8.inference.load import begin_of_text, live_model
from megafp8.inference.options import SamplingOptions
from megafp8.inference.scoring import Scorer
from megafp8.training.evaluation import LiveUses
from megafp8.training.inputs import RunInputs
from megafp8.training.trainer import RankTrainer

logger = logging.getLogger(__name__)

_KEY = "training.evaluate"


def uses(inputs: RunInputs) -> LiveUses:
    """Return the implementations of the live model's uses in the config. Raises ConfigError; needs no process group."""
    evaluates, samples = inputs.config.training.evaluate is not None, inputs.config.data.grpo is not None
    if evaluates:
        check(inputs)
    if samples:
        rollouts.check(inputs)
    return LiveUses(LiveEvaluation if evaluates else None, rollouts.Rollouts if samples else None)


def check(inputs: RunInputs) -> None:
    """Raise ConfigError if an entry of `training.evaluate` cannot be carried out. Needs no process group."""
    evaluate, tokenizer, rows = inputs.config.training.evaluate, inputs.tokenizer, inputs.config.position_rows
    assert evaluate is not None
    assert tokenizer is not None
    problems = []
    try:
        _sampling(evaluate, inputs.config.seed)
    except ValueError as error:
        problems.append(Problem(f"{_KEY}.temperature", evaluate.temperature, str(error), "try 0.8"))
    for prompt in evaluate.prompts:
        if not prompt and inputs.config.data.reset_at_documents:
            rule = "with data.reset_at_documents no token precedes a document, so the model cannot predict the first"
            problems.append(Problem(f"{_KEY}.prompts", prompt, rule, "give the beginning of a text"))
        if _tokens_of(prompt, tokenizer) >= rows:
            rule = f"{_tokens_of(prompt, tokenizer)} tokens leave no room in the model's {rows} positions"
            problems.append(Problem(f"{_KEY}.prompts", prompt, rule, "shorten it"))
    if evaluate.tasks and importlib.util.find_spec("lm_eval") is None:
        rule, works = "lm-evaluation-harness is not installed", f"run {install_command('eval')}, or leave the tasks out"
        problems.append(Problem(f"{_KEY}.tasks", evaluate.tasks, rule, works))
    elif evaluate.tasks:
        problems += _unknown_tasks(evaluate)
    if problems:
        raise ConfigError("config", problems)


def _unknown_tasks(evaluate: EvaluateConfig) -> list[Problem]:
    from megafp8.inference.harness import find_tasks  # its package is optional

    if evaluate.include_path is not None and not Path(evaluate.include_path).is_dir():
        return [
            Problem(
                f"{_KEY}.include_path",
                evaluate.include_path,
                "no such folder",
                "give the folder with the YAML files of tasks",
            )
        ]
    try:
        find_tasks(evaluate.tasks, evaluate.include_path)
    except ValueError as error:
        return [Problem(f"{_KEY}.tasks", evaluate.tasks, str(error), "correct the name, or give include_path")]
    return []


class LiveEvaluation:
    """Evaluation of a trainer's model after a step, without an effect on training. Collective.

    Sample texts are written to the log and to samples.jsonl in `folder`, one JSON object for each text.
    """

    def __init__(self, trainer: RankTrainer, inputs: RunInputs, folder: Path) -> None:
        evaluate, tokenizer = inputs.config.training.evaluate, inputs.tokenizer
        assert evaluate is not None
        assert tokenizer is not None
        self._evaluate, self._tokenizer, self._trainer = evaluate, tokenizer, trainer
        self._folder, self._seed = folder, inputs.config.seed

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate after a step, and return the metrics of tasks, `eval/<task>/<metric>`, on the first rank.

        A failure is logged as a warning, and training continues.
        """
        scores: dict[str, float] = {}
        is_first = self._trainer.parallel.world.is_first
        for evaluates, part in ((self._evaluate.prompts, self._write_samples), (self._evaluate.tasks, self._run_tasks)):
            try:
                scores |= part(step) if evaluates else {}
            except ValueError as error:  # the same on all ranks
                if is_first:
                    logger.warning(f"evaluation after step {step}: {error}")
        return scores

    def _write_samples(self, step: int) -> dict[str, float]:
        prompts, common = self._evaluate.prompts, _sampling(self._evaluate, self._seed)
        rows, page = self._trainer.config.position_rows, CacheOptions().page_size
        options, pages = [], 0
        for prompt in prompts:
            used = _tokens_of(prompt, self._tokenizer)
            options.append(replace(common, max_tokens=min(common.max_tokens, rows - used)))
            pages += -(-(used + options[-1].max_tokens) // page)
        cache = CacheOptions(cache_tokens=pages * page)
        # Created anew for each evaluation, because its cache would take memory from training.
        generator = Generator.from_trainer(self._trainer, self._tokenizer, cache=cache)
        completions = generator.generate(prompts, options)
        if self._trainer.parallel.world.is_first:
            samples = [
                {"step": step, "prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            with (
                DiskErrorsLogged(rollouts.SAMPLES_FILE),
                contextlib.closing(JsonLines(self._folder / rollouts.SAMPLES_FILE)) as lines,
            ):
                lines.append(*samples)
            for sample in samples:
                logger.info(f"text after step {step}:\n{sample['prompt']}{sample['text']}")
        return {}

    def _run_tasks(self, step: int) -> dict[str, float]:
        from megafp8.inference.harness import HarnessModel, metrics_of, run_tasks  # its package is optional

        trainer, tokenizer, evaluate = self._trainer, self._tokenizer, self._evaluate
        model, before = live_model(trainer)
        harness_model = HarnessModel(
            Scorer(model, max_length=trainer.config.position_rows, before=before),
            lambda: Generator.from_trainer(trainer, tokenizer),
            tokenizer,
            added_tokens=tokenizer.start_ids,
            bos=begin_of_text(trainer.config, tokenizer),
            eos=tokenizer.eod_id,
            seed=self._seed,
        )
        results = run_tasks(harness_model, evaluate.tasks, include_path=evaluate.include_path, limit=evaluate.limit)
        if results is None:
            return {}
        metrics = {name: value for name, value in metrics_of(results).items() if "_stderr" not in name}
        logger.info(f"scores after step {step}: " + "  ".join(f"{name} {x:.4g}" for name, x in metrics.items()))
        return {f"eval/{name}": value for name, value in metrics.items()}


def _tokens_of(prompt: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a prompt, including the tokens that begin a document."""
    return max(1, len(tokenizer.start_ids)) + len(tokenizer.encode(prompt))


def _sampling(evaluate: EvaluateConfig, seed: int) -> SamplingOptions:
    return SamplingOptions(max_tokens=evaluate.max_tokens, temperature=evaluate.temperature, seed=seed)
