"""Tasks of lm-evaluation-harness (the package `lm-eval`): multiple choice, perplexity, generation.

The harness runs on the first rank. The other ranks wait for its calls of the model (`HarnessModel.follow`). Tokens,
truncation and the tokens before a text are the same as in the harness' adapter for transformers
(`lm_eval.models.huggingface.HFLM`), so scores are the same.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from megafp8.data.tokenizers import Tokenizer
from megafp8.inference.generator import Generator
from megafp8.inference.options import SamplingOptions
from megafp8.inference.scoring import Request, Score, Scorer, windows
from megafp8.parallel.collectives import broadcast_object

_MAX_TOKENS = 256
"""Length limit of a generated text if its task sets none, as in the harness' other adapters."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(TemplateLM):
    """Adapter through which the harness calls a model, on the first rank. Collective: other ranks call `follow`.

    Args:
        scorer: Scorer of the model.
        make_generator: Function that returns a generator; called when the first text is generated.
        tokenizer: Tokenizer of the model.
        added_tokens: Tokens before each text, as in `megafp8.inference.load.Opened`.
        bos: Token that begins a scored text, as in `Opened`.
        eos: Token that ends a text, as in `Opened`.
        seed: Seed of sampling.
    """

    def __init__(
        self,
        scorer: Scorer,
        make_generator: Callable[[], Generator],
        tokenizer: Tokenizer,
        *,
        added_tokens: Sequence[int],
        bos: int,
        eos: int,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        self.scorer, self.max_length, self._make_generator, self._seed = scorer, scorer.max_length, make_generator, seed
        self._generator: Generator | None = None
        self._tokenizer, self._added = tokenizer, list(added_tokens)
        self._bos, self._eos = bos, eos
        self._world = scorer.model.parallel.world
        self._special: frozenset[int] = frozenset()
        if hasattr(tokenizer.model, "get_added_tokens_decoder"):
            added = tokenizer.model.get_added_tokens_decoder()
            self._special = frozenset(number for number, token in added.items() if token.special)

    # --- ranks ---

    def follow(self) -> None:
        """Repeat the first rank's calls of the model on another rank, until `release`."""
        while (call := broadcast_object(None, self._world.group)) is not None:
            try:
                if call == "score":
                    deque(self.scorer.score(()), maxlen=0)
                else:
                    self._generate([], [])
            except ValueError:
                pass  # the first rank gets the same error, and decides how to continue

    def release(self) -> None:
        """Make the other ranks return from `follow`. Called on the first rank."""
        broadcast_object(None, self._world.group)

    def _scores(self, requests: Iterable[Request]) -> Iterator[Score]:
        broadcast_object("score", self._world.group)
        return self.scorer.score(requests)

    def _generate(self, prompts: list[list[int]], options: list[SamplingOptions]) -> list[list[int]]:
        """Return the tokens that continue each prompt."""
        if self._generator is None:
            self._generator = self._make_generator()
        return [completion.tokens for completion in self._generator.generate(prompts, options)]

    # --- interface of the harness ---

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        return self._bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, preceded by the tokens that the tokenizer adds.

        By default, no tokens are added if the text already begins with the beginning token.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.decode([self._bos]))
        return [*(self._added if add_special_tokens else []), *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        answers = []
        scores = self._scores(Request(context, continuation) for _, context, continuation in requests)
        for score, (texts, *_tokens) in zip(
            tqdm(scores, "scored", len(requests), disable=disable_tqdm or None), requests
        ):
            answers.append((sum(score.logprobs), score.greedy))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, scored in windows of the model's length."""
        texts = [request.args[0] for request in requests]
        counts: list[int] = []

        def of_texts() -> Iterator[Request]:
            for text in texts:
                text_windows = list(windows([self._bos, *self.tok_encode(text)], self.max_length, self.max_length))
                counts.append(len(text_windows))
                yield from text_windows

        scores = tqdm(self._scores(of_texts()), "scored", disable=disable_tqdm or None)
        logprobs = iter([sum(score.logprobs) for score in scores])
        sums = []
        for text, count in zip(texts, counts, strict=True):
            sums.append(sum(itertools.islice(logprobs, count)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that continues each context, up to a stop string of its task."""
        eos = self._tokenizer.decode([self._eos])
        prompts: list[list[int]] = []
        options: list[SamplingOptions] = []
        stops: list[list[str]] = []
        for context, settings in (request.args for request in requests):
            prompt, sampling, until = self._prompt(context, settings, eos)
            prompts.append(prompt)
            options.append(sampling)
            stops.append(until)
        broadcast_object("generate", self._world.group)
        texts = []
        for request, tokens, until in zip(requests, self._generate(prompts, options), stops, strict=True):
            text = self._tokenizer.decode([token for token in tokens if token not in self._special])
            texts.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt(self, context: str, given: Mapping[str, Any], eos: str) -> tuple[list[int], SamplingOptions, list[str]]:
        """Return tokens, options and stop strings of a request to generate. Raises ValueError for unknown settings."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), _MAX_TOKENS))
        until = handle_stop_sequences(kwargs.pop("until", None), eos)
        max_tokens, samples = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        sampling = {key: kwargs.pop(key) for key in _SAMPLING if kwargs.get(key) is not None}
        sampling["temperature"] = sampling.get("temperature", 1.0) if samples else 0.0
        if kwargs:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLING))
            raise ValueError(f"generation_kwargs of a task has {', '.join(kwargs)}; known are {known}")
        if max_tokens >= self.max_length:
            raise ValueError(f"a task generates {max_tokens} tokens, but max_length is {self.max_length}")
        stop = tuple(text for text in until if text)
        options = SamplingOptions(max_tokens=max_tokens, stop=stop, seed=self._seed, **sampling)
        return self.tok_encode(context)[-(self.max_length - max_tokens) :], options, until


@contextmanager
def _contained() -> Iterator[None]:
    """Context manager that contains the side effects of the harness.

    The harness sets all seeds, because some tasks shuffle; the random states are restored afterwards. It is kept from
    forking processes, and its output goes to stderr.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    variable, before = "DISABLE_MULTIPROC", os.environ.get("DISABLE_MULTIPROC")
    os.environ[variable] = "1"  # a process with a GPU or threads of communication must not be forked
    with torch.random.fork_rng(), redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


@functools.lru_cache(maxsize=1)
def _task_manager(include_path: str | None, include_defaults: bool) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=include_defaults)  # reads thousands of files


def find_tasks(
    tasks: Sequence[str], include_path: Path | str | None, *, include_defaults: bool = True
) -> tuple[TaskManager, list[str]]:
    """Return the task manager of the harness, and the names of the tasks that match `tasks`, which may be patterns.

    The folder `include_path` adds tasks to the harness. Raises ValueError for a task that does not exist.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"{include_path} is not a folder; give a folder with the YAML files of tasks")
    manager = _task_manager(None if include_path is None else str(include_path), include_defaults)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        where = "" if include_path is None else f" or in {include_path}"
        raise ValueError(f"there is no task {', '.join(unknown)} in lm-evaluation-harness{where}")
    return manager, manager.match_tasks(list(tasks))


def run_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    include_path: Path | str | None = None,
    include_defaults: bool = True,
    num_fewshot: int | None = None,
    limit: int | None = None,
    log_samples: bool = False,
) -> dict[str, Any] | None:
    """Run tasks, and return the results of the harness on the first rank, None on the others. Collective.

    Args:
        model: Adapter of the model.
        tasks: Names or patterns of tasks.
        include_path: Folder with more tasks.
        include_defaults: Also search the harness' tasks, which takes seconds.
        num_fewshot: Number of examples before a question. Default: as the task says.
        limit: Largest number of questions of a task. Default: all.
        log_samples: Include each question and answer in the results.

    Raises:
        ValueError: Tasks or their data cannot be used. Raised on all ranks.
    """
    world = model.scorer.model.parallel.world
    results: dict[str, Any] | None = None
    error: str | None = None
    if world.is_first:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        try:
            with _contained():
                manager, names = find_tasks(tasks, include_path, include_defaults=include_defaults)
                results = simple_evaluate(
                    model=model,
                    tasks=names,
                    num_fewshot=num_fewshot,
                    limit=limit,
                    log_samples=log_samples,
                    task_manager=manager,
                )
        except Exception as failure:  # from the harness, a task's code or its data: all ranks must end in the same way
            error = f"tasks {', '.join(tasks)}: {type(failure).__name__}: {failure}"
            if not isinstance(failure, (ValueError, OSError)):
                logging.getLogger(__name__).debug("tasks failed", exc_info=True)
        finally:
            model.release()
    else:
        model.follow()
    error = broadcast_object(error, world.group)
    if error is not None:
        raise ValueError(error)
    return results


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in the harness' results, by `task/metric`, or `task/metric (filter)` if there are filters."""
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and kind:
                metrics[f"{task}/{metric}" + ("" if kind == "none" else f" ({kind})")] = float(value)
    return metrics
