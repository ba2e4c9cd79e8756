"""Rollouts of a training job with `data.grpo`: the live model continues prompts, and its texts are what a step trains.

In each step the prompts are divided over the models that the ranks hold (a pipeline with its tensor-parallel groups is
one); each samples a group of texts of its prompts and rates them. Then all ranks learn all texts, pack them into
samples, and make the micro-batches that are theirs. What is sampled is a function of the weights, of the seed, and of
how many prompts were given before: there is no state, and the layout makes no difference but by rounding.

Where ranks cannot compute without each other (`live_model`), all sample all texts together.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.data.blend import Blend
from megafp8.data.packing import BestFit
from megafp8.data.prompts import Prompt, PromptSource
from megafp8.host.text_file import DiskErrorsLogged, JsonLines
from megafp8.inference.generator import Completion, Generator
from megafp8.inference.options import CacheOptions, SamplingOptions
from megafp8.inference.rewards import Reward, open_reward
from megafp8.numerics.philox import key_of
from megafp8.objectives.grpo import group_advantages, text_part
from megafp8.parallel import activity
from megafp8.parallel.collectives import all_gather_objects
from megafp8.training.errors import TrainingError
from megafp8.training.inputs import RunInputs
from megafp8.training.trainer import RankTrainer

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
_TEXTS_SHOWN = 4
_NO_TEXT = np.zeros((6, 1), np.int64)


class _Text(NamedTuple):
    """A sampled text with its prompt and reward.

    `logprobs`: of the tokens after the prompt's. `whole`: the model has ended it, not max_tokens.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    text: str
    whole: bool
    reward: float


def check(inputs: RunInputs) -> None:
    """Raise ConfigError where the reward cannot be called; needs no process group."""
    _reward_of(inputs)


def _prompts_of(inputs: RunInputs) -> PromptSource:
    (source,) = inputs.train.datasets
    assert isinstance(source, PromptSource)
    return source


def _reward_of(inputs: RunInputs) -> Reward:
    grpo, prompts = inputs.config.data.grpo, _prompts_of(inputs).prompts
    assert grpo is not None
    keys = [key for key in prompts[0].record if all(key in prompt.record for prompt in prompts)]
    return open_reward(grpo, keys)


class Rollouts:
    """Samples the texts of each step of a job (`megafp8.training.evaluation.StepSource`). Collective.

    `metrics`: of the latest step, by name. The texts of the first prompt of some steps go to samples.jsonl in `folder`.
    """

    def __init__(self, trainer: RankTrainer, inputs: RunInputs, folder: Path) -> None:
        grpo, tokenizer = inputs.config.data.grpo, inputs.tokenizer
        assert grpo is not None
        assert tokenizer is not None
        self._trainer, self._tokenizer, self._given, self._folder = trainer, tokenizer, grpo, folder
        self._objective, self._seed = inputs.objective, inputs.config.seed
        self._reward = _reward_of(inputs)
        self.metrics: Mapping[str, float] = {}

    def batches(
        self, train: Blend, step: int, consumed_samples: int, position_of: Callable[[int], int]
    ) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step after the first `step`, which have read `consumed_samples`."""
        (source,) = train.datasets
        assert isinstance(source, PromptSource)
        size, group = self._config.training.global_batch_size, self._given.group_size
        while True:
            step += 1
            activity.enter("rollouts")
            first = position_of(consumed_samples)
            samples = [train.segment.locate(index)[1] for index in range(first, first + size, group)]
            prompts = [source.prompt_at(sample) for sample in samples]
            texts = self._sample(prompts)
            rewards_pg = torch.tensor(
                [[text.reward for text in completions] for completions in texts], dtype=torch.float64
            )
            self._measure(texts, rewards_pg)
            self._write(step, prompts[0][1], texts[0])
            yield self._micro_batches(prompts, texts, group_advantages(rewards_pg), first)
            consumed_samples += size

    @property
    def _config(self) -> Config:
        return self._trainer.config

    def _sample(self, prompts: Sequence[tuple[int, Prompt]]) -> list[list[_Text]]:
        """A group of texts of each prompt, with their rewards. Raises TrainingError, on all ranks."""
        parallel = self._trainer.parallel
        generator = Generator.from_trainer(self._trainer, self._tokenizer, own_texts=True, cache=self._cache(prompts))
        ranks, rows = generator.model.ranks, slice(None)
        if generator.model.own_texts:
            rows = slice(parallel.data_context.rank, None, parallel.data_context.size)
        result: list[list[_Text]] | str
        try:
            result = self._sample_own(generator, prompts[rows])
        except ValueError as error:  # the same on all ranks that generate together, or on the first of them
            result = str(error)
        by_rank = all_gather_objects(
            (rows, result) if ranks.is_first or isinstance(result, str) else None, parallel.world.group
        )
        everything: list[list[_Text]] = [[]] * len(prompts)
        for own_prompts, texts in filter(None, by_rank):
            if isinstance(texts, str):
                raise TrainingError(texts)
            everything[own_prompts] = texts
        return everything

    def _cache(self, prompts: Sequence[tuple[int, Prompt]]) -> CacheOptions:
        """With room for the texts that are generated at once; it is there while they are."""
        at_once, page = self._given.texts_at_once, CacheOptions().page_size
        longest = max(len(prompt.tokens) for _, prompt in prompts) + self._given.max_tokens
        return CacheOptions(cache_tokens=at_once * -(-longest // page) * page, max_sequences=at_once)

    def _sample_own(self, generator: Generator, prompts: Sequence[tuple[int, Prompt]]) -> list[list[_Text]]:
        """A group of texts of each of these prompts; on ranks that are not the first of those that generate together,
        none."""
        grpo = self._given
        options = [
            SamplingOptions(
                max_tokens=grpo.max_tokens,
                temperature=grpo.temperature,
                tempered_logprobs=True,
                seed=key_of("grpo", self._seed, number)[0],
                num_samples=grpo.group_size,
            )
            for number, _ in prompts
        ]
        completions: dict[tuple[int, int], Completion] = {}
        for _, completion in generator.stream([prompt.tokens for _, prompt in prompts], options):
            activity.mark()
            completions[completion.prompt, completion.sample] = completion
        if not generator.model.ranks.is_first or not prompts:
            return []
        ordered = [completions[key] for key in sorted(completions)]
        activity.enter("rewards")
        rewards = self._reward([prompts[x.prompt][1] for x in ordered], [x.text for x in ordered])
        texts = [
            _Text(
                np.array([*x.prompt_tokens, *x.tokens]),
                np.array(x.logprobs),
                x.text,
                x.finish_reason != "length",
                reward,
            )
            for x, reward in zip(ordered, rewards, strict=True)
        ]
        return [texts[i : i + grpo.group_size] for i in range(0, len(texts), grpo.group_size)]

    def _micro_batches(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        texts: Sequence[Sequence[_Text]],
        advantages_pg: Tensor,
        first: int,
    ) -> list[Batch]:
        """This rank's micro-batches of the samples that all texts fill, with empty ones up to whole micro-batches.

        `first`: number of the step's first sample.
        """
        parts = [
            text_part(text.tokens, len(prompt.tokens), text.logprobs, advantage)
            for (_, prompt), completions, advantages in zip(prompts, texts, advantages_pg.tolist(), strict=True)
            for text, advantage in zip(completions, advantages, strict=True)
        ]
        t, data = self._config.training, self._trainer.parallel.data
        packing = BestFit(np.array([part.shape[1] for part in parts]), t.seq_length)
        index = packing.make_index(np.random.Generator(np.random.Philox(key=0)))
        rows = [[parts[span.document] for span in packing.spans(index, row)] for row in range(packing.samples)]
        b, together = t.micro_batch_size, t.micro_batch_size * data.size
        rows += [[_NO_TEXT]] * (-len(rows) % together)
        batches = []
        for start in range(data.rank * b, len(rows), together):
            stacked = [self._objective.row(row, first) for row in rows[start : start + b]]
            batch = self._objective.batch(torch.from_numpy(np.stack(stacked)))
            batches.append(replace(batch, samples=first + torch.arange(start, start + b)))
        return batches

    def _measure(self, texts: Sequence[Sequence[_Text]], rewards_pg: Tensor) -> None:
        lengths = [len(text.logprobs) for completions in texts for text in completions]
        cut = [not text.whole for completions in texts for text in completions]
        std_p = rewards_pg.std(dim=1)
        self.metrics = {
            "reward": rewards_pg.mean().item(),
            "reward_std": std_p.mean().item(),
            "frac_reward_zero_std": (std_p == 0).double().mean().item(),
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/clipped_ratio": sum(cut) / len(cut),
        }

    def _write(self, step: int, prompt: Prompt, texts: Sequence[_Text]) -> None:
        """Some texts of the first and last step, and of those between as often as log lines."""
        t, interval = self._config.training, self._config.logging.interval
        if not self._trainer.parallel.world.is_first or not (step in (1, t.last_step) or step % interval == 0):
            return
        shown = self._tokenizer.decode(prompt.tokens)
        samples = [
            {
                "step": step,
                "prompt": shown,
                "text": x.text,
                "finish_reason": "end" if x.whole else "length",
                "reward": x.reward,
            }
            for x in texts[:_TEXTS_SHOWN]
        ]
        with DiskErrorsLogged(SAMPLES_FILE), contextlib.closing(JsonLines(self._folder / SAMPLES_FILE)) as lines:
            lines.append(*samples)
