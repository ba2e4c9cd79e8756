"""Tasks of lm-evaluation-harness (the package `lm-eval`): multiple choice, perplexity, generation.

The harness runs on the first rank; the others wait for what it asks of the model (`HarnessModel.follow`). Tokens,
truncation and what precedes a text are those of the harness' own adapter of transformers
(`lm_eval.models.huggingface.HFLM`), so that scores are the same.
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
"""Of a generated text, where its task does not say, as in the harness' other adapters."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(TemplateLM):
    """A model as the harness calls it, on the first rank. Collective: other ranks `follow`.

    `make_generator`: called when the first text is generated. `added_tokens`, `bos`, `eos`: as in
    `megafp8.inference.load.Opened`.
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
        """Do on ranks other than the first what the first one does with the model, until `release`."""
        while (call := broadcast_object(None, self._world.group)) is not None:
            try:
                if call == "score":
                    deque(self.scorer.score(()), maxlen=0)
                else:
                    self._generate([], [])
            except ValueError:
                pass  # the first rank has it too, and decides what comes next

    def release(self) -> None:
        """Make the other ranks return from `follow`; called on the first rank."""
        broadcast_object(None, self._world.group)

    def _scores(self, requests: Iterable[Request]) -> Iterator[Score]:
        broadcast_object("score", self._world.group)
        return self.scorer.score(requests)

    def _generate(self, prompts: list[list[int]], options: list[SamplingOptions]) -> list[list[int]]:
        """The tokens that continue each prompt."""
        if self._generator is None:
            self._generator = self._make_generator()
        return [completion.tokens for completion in self._generator.generate(prompts, options)]

    # --- what the harness calls ---

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        return self._bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, after those that the tokenizer adds unless the text has them itself."""
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
        """Tokens, options and stop strings of a request to generate. Raises ValueError for what is not known."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), _MAX_TOKENS))
        until = handle_stop_sequences(kwargs.pop("until", None), eos)
        max_tokens, samples = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        sampling = {key: kwargs.pop(key) for key in _SAMPLING if kwargs.get(key) is not None}
        sampling["temperature"] = sampling.get("temperature", 1.0) if samples else 0.0
        if kwargs:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLING))
            raise ValueError(f"generation_kwargs of a task has {', '.join(kwargs)}; known are {known}")
        if max_tokens >= self.max_length:
            raise ValueError(f"a task generates {max_tokens} tokens, and max_length is {self.max_length}")
        stop = tuple(text for text in until if text)
        options = SamplingOptions(max_tokens=max_tokens, stop=stop, seed=self._seed, **sampling)
        return self.tok_encode(context)[-(self.max_length - max_tokens) :], options, until


@contextmanager
def _contained() -> Iterator[None]:
    """The harness sets all seeds, as some tasks shuffle: the state before is restored. It forks no processes, and what
    it prints goes to stderr."""
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
    """The harness' tasks with those in the folder `include_path`, and the names of `tasks`, which may be patterns.

    Raises ValueError for what it does not have.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"{include_path} is no folder; give one with the YAML files of tasks")
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
    """The harness' results on the first rank, None on the others. Collective.

    `include_path`: a folder with more tasks. `include_defaults`: False leaves out the harness' own, which take seconds
    to find. `num_fewshot`: examples before a question; None: as many as the task says. `limit`: questions of a task.
    Raises ValueError, on all ranks, where tasks or their data cannot be used.
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
        except Exception as failure:  # of the harness, of a task's own code, of data: all ranks must end alike
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
    """The numbers in the results of the harness, by `task/metric`, or `task/metric (filter)` if there are filters."""
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and kind:
                metrics[f"{task}/{metric}" + ("" if kind == "none" else f" ({kind})")] = float(value)
    return metrics
