"""Rollouts of a training job with `data.grpo`: the live model continues prompts, and a step trains on these texts.

In each step, the prompts are divided over the copies of the model (a pipeline with its tensor-parallel groups is one
copy). Each copy samples a group of texts for each of its prompts and rates them. Then all ranks exchange all texts,
pack them into samples, and make their own micro-batches. The sampled texts are a function of the weights, the seed and
the number of prompts read before. There is no state, and the layout makes a difference only through rounding.

If copies cannot compute independently (`live_model`), all ranks sample all texts together.
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
    """Sampled text with its prompt and reward.

    Attributes:
        tokens: Token ids of the prompt and the text.
        logprobs: Log-probabilities of the tokens after the prompt.
        text: The text.
        whole: Whether the model ended the text before max_tokens.
        reward: Reward of the text.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    text: str
    whole: bool
    reward: float


def check(inputs: RunInputs) -> None:
    """Raise ConfigError if the reward cannot be loaded. Needs no process group."""
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
    """Source of steps that samples their texts (`megafp8.training.evaluation.StepSource`). Collective.

    `metrics` are the metrics of the latest step, by name. For some steps, texts of the first prompt are written to
    samples.jsonl in `folder`.
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
        """Yield this rank's micro-batches of each step, from the step after `step` on.

        `consumed_samples` is the number of samples read by the first `step` steps. `position_of` maps it to the next
        sample to read.
        """
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
        """Sample a group of texts for each prompt, with rewards; return all on all ranks. Raises TrainingError."""
        parallel = self._trainer.parallel
        generator = Generator.from_trainer(self._trainer, self._tokenizer, own_texts=True, cache=self._cache(prompts))
        ranks, rows = generator.model.ranks, slice(None)
        if generator.model.own_texts:
            rows = slice(parallel.data_context.rank, None, parallel.data_context.size)
        result: list[list[_Text]] | str
        try:
            result = self._sample_own(generator, prompts[rows])
        except ValueError as error:  # on all ranks that generate together, or only on the first of them
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
        """Return the sizes of a cache for the texts that are generated at once."""
        at_once, page = self._given.texts_at_once, CacheOptions().page_size
        longest = max(len(prompt.tokens) for _, prompt in prompts) + self._given.max_tokens
        return CacheOptions(cache_tokens=at_once * -(-longest // page) * page, max_sequences=at_once)

    def _sample_own(self, generator: Generator, prompts: Sequence[tuple[int, Prompt]]) -> list[list[_Text]]:
        """Sample a group of texts for each of these prompts, and rate them.

        Among the ranks that generate the same texts, only the first returns them; the others return an empty list.
        """
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
        """Pack all texts into samples, and return this rank's micro-batches.

        Empty samples are added up to whole micro-batches on all ranks. `first` is the number of the step's first
        sample.
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
        """Write some texts of the first and last step, and of the steps that are logged."""
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
