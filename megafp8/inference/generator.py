"""`Generator`: continuation of prompts by the model of a checkpoint or of a running job."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.errors import on_all_ranks
from megafp8.data.tokenizers import Tokenizer
from megafp8.inference.load import (
    Device,
    InferenceLayout,
    LiveWeights,
    Opened,
    live_model,
    load_model,
    open_checkpoint,
    read_weights,
    start_of_documents,
)
from megafp8.inference.model import CachedModel, Model
from megafp8.inference.options import CacheDtype, CacheOptions, SamplingOptions
from megafp8.inference.pages import PageAllocator
from megafp8.inference.sampling import GREEDY, SamplingRow, VocabShard, choose, divisor_of, stream_of
from megafp8.inference.scheduler import GrowingSequence, Scheduler
from megafp8.inference.staged_weights import StagedWeights, refused_weights
from megafp8.inference.text import TextStream
from megafp8.linear.quantized_weight import WeightFormatName
from megafp8.parallel.collectives import broadcast, broadcast_object
from megafp8.training.trainer import RankTrainer

Prompt = str | Sequence[int]
FinishReason = Literal["end", "stop", "length"]
WeightSource = Callable[[Model, Mapping[str, Rectangles]], None]
"""Function that fills the tensors of a model (`staged_weights.tensors_of`) with new values, on every rank."""

_CACHED_TOKENS = 65536
_STORED: dict[CacheDtype, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


DEFAULT_CACHE = CacheOptions()


@dataclass
class Completion:
    """Text that continues a prompt.

    Attributes:
        prompt: Number of the prompt in the call.
        sample: Number of the sample of this prompt.
        prompt_tokens: Token ids of the prompt.
        seed: Seed of the sampling.
        text: Generated text, without the token that ends it.
        tokens: Generated token ids, including the token that ends the text.
        logprobs: Log-probability of each generated token.
        top_logprobs: For each generated token, the `SamplingOptions.logprobs` most probable tokens with their
            log-probabilities.
        finish_reason: "end" (a token that ends texts), "stop" (a stop string) or "length" (`max_tokens`); None while
            the text is being generated.
        weight_versions: Versions of the weights that computed the tokens (`Generator.weight_version`), the oldest
            first. There are several if a refit happened between two tokens.
    """

    prompt: int
    sample: int
    prompt_tokens: list[int]
    seed: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    weight_versions: list[int] = field(default_factory=list)


class TextDelta(NamedTuple):
    """Text that a step adds to a completion.

    `completion` is the completion so far. Its `finish_reason` is set with the last delta.
    """

    text: str
    completion: Completion


class _Running(NamedTuple):
    sequence: GrowingSequence
    completion: Completion
    text: TextStream | None
    row: SamplingRow
    submission: Submission


@dataclass(eq=False)
class Submission:
    """Texts of one call of `Generator.submit`.

    Attributes:
        texts: Texts that are generated.
        pieces: Deltas of past steps that were not yet read.
        failure: Exception of one of the texts, which has ended all texts of this submission but no others.
    """

    texts: list[_Running] = field(default_factory=list)
    pieces: deque[TextDelta] = field(default_factory=deque)
    failure: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether all texts have ended."""
        return all(text.completion.finish_reason is not None for text in self.texts)


class Load(NamedTuple):
    """Load of a generator: number of running and waiting texts, and of used and free pages of the cache."""

    running: int
    waiting: int
    pages_used: int
    pages_free: int


class Generator:
    """Text generator that continues prompts with a model in any layout.

    Every rank creates the generator and makes every call (collective). Prompts are shared by all ranks, or by the ranks
    that generate the same texts (`Model.ranks`).

    Args:
        model: Model that generates.
        tokenizer: Tokenizer of the model; None if all prompts are token ids.
        start_tokens: Tokens before each prompt that is a text. Prompts of token ids are used unchanged.
        end_tokens: Tokens that end a text.
        max_length: Largest number of tokens of prompt and output together.
        cache: Sizes of the cache and of batches.
        live: Updater of the weights of a live model, which is called before each generation.

    Attributes:
        weight_version: Version of the weights: number of optimizer steps for a live model, else number of refits.
            Cache entries of older weights are not used.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        start_tokens: Sequence[int] = (),
        end_tokens: Sequence[int] = (),
        max_length: int,
        cache: CacheOptions = DEFAULT_CACHE,
        live: LiveWeights | None = None,
    ) -> None:
        model.check_length(max_length)
        for name, value in cache._asdict().items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if cache.dtype is not None and cache.dtype not in _STORED:
            raise ValueError(f"dtype = {cache.dtype!r} of the cache: must be one of {', '.join(_STORED)}, or None")
        if cache.dtype is not None and model.batch_invariant:
            raise ValueError(
                f"dtype = {cache.dtype} of the cache: with batch_invariant, keys and values are stored unquantized, as "
                "in training; leave it out"
            )
        tokens = cache.cache_tokens
        if tokens is None:
            tokens = max(min(8 * max_length, _CACHED_TOKENS), max_length)
        self._vocab_size = model.spec.stem.known_vocab_size
        self.model, self.tokenizer, self.max_length, self.cache = model, tokenizer, max_length, cache
        self.start_tokens, self.end_tokens, self.live = list(start_tokens), frozenset(end_tokens), live
        self.weight_version = 0 if live is None else live.version
        self._allocator = PageAllocator(-(-tokens // cache.page_size), cache.page_size)
        self._running: dict[GrowingSequence, _Running] = {}
        self._submitted = 0  # number of calls of `submit`
        self._cached = CachedModel(
            model,
            self._allocator.num_pages,
            cache.page_size,
            sequences=cache.max_sequences,
            longest=max_length,
            stored=None if cache.dtype is None else _STORED[cache.dtype],
        )
        self._scheduler = Scheduler(
            self._allocator, max_batch_tokens=cache.max_batch_tokens, max_sequences=cache.max_sequences
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        device: Device = "auto",
        dtype: torch.dtype | None = None,
        fp8: bool = True,
        weights: WeightFormatName | None = None,
        batch_invariant: bool | None = None,
        max_length: int | None = None,
        cache: CacheOptions = DEFAULT_CACHE,
    ) -> Generator:
        """Return a generator with the model of a checkpoint, in the layout tensor × pipeline. Collective.

        A text prompt is preceded by the tokens that precede a document of the run, or that the tokenizer's files name.

        Args:
            path: megafp8 checkpoint or run folder, Hugging Face folder, or any other format that megafp8 convert reads.
            tensor: Tensor-parallel size.
            pipeline: Pipeline-parallel size.
            expert: Number of ranks of a stage over which experts are divided.
            device: "cuda", "cpu", or "auto" for a GPU if there is one.
            dtype: Dtype of the model. Default: the checkpoint's dtype.
            fp8: Compute in FP8 if the model was trained in FP8.
            weights: Format to which the weights of linear layers are quantized. The model then computes in `dtype`,
                even if it was trained in FP8.
            batch_invariant: Compute the same log-probabilities as in training, for any batch
                (`inference.batch_invariant`). Default: as the run's config says.
            max_length: Largest number of tokens of prompt and output together. Default: number of positions that the
                model was trained with.
            cache: Sizes of the cache and of batches.

        Raises:
            ValueError: The checkpoint does not fit. The error is raised before ranks wait for each other.
        """
        opened = open_checkpoint(
            path,
            InferenceLayout(tensor, pipeline, expert),
            device=device,
            dtype=dtype,
            fp8=fp8,
            weights=weights,
            batch_invariant=batch_invariant,
        )
        length = opened.max_length(max_length)
        return cls.from_model(opened, load_model(opened), max_length=length, cache=cache)

    @classmethod
    def from_model(
        cls, opened: Opened, model: Model, *, max_length: int, cache: CacheOptions = DEFAULT_CACHE
    ) -> Generator:
        """Return a generator with the model of an opened checkpoint."""
        start, ends = opened.start_tokens, opened.end_tokens
        return cls(model, opened.tokenizer, start_tokens=start, end_tokens=ends, max_length=max_length, cache=cache)

    @classmethod
    def from_trainer(
        cls,
        trainer: RankTrainer,
        tokenizer: Tokenizer | None = None,
        *,
        tensor: int | None = None,
        pipeline: int | None = None,
        expert: int | None = None,
        own_texts: bool = False,
        cache: CacheOptions = DEFAULT_CACHE,
    ) -> Generator:
        """Return a generator that always uses the weights of a running job's latest step. Collective.

        `tensor`, `pipeline` and `expert` select another layout on the same ranks; None means the size in training. For
        another layout, weights are sent between ranks after each step; in the trainer's layout, nothing is copied.
        `own_texts` is an argument of `live_model`. Raises ValueError for a layout that does not fit.
        """
        p = trainer.config.parallel
        sizes = (tensor, p.tensor), (pipeline, p.pipeline), (expert, p.expert)
        layout = InferenceLayout(*(default if x is None else x for x, default in sizes))
        model, live = live_model(trainer, layout, own_texts=own_texts)
        start: list[int] = []
        ends: list[int] = []
        if tokenizer is not None:
            start, ends = start_of_documents(trainer.config, tokenizer), [tokenizer.eod_id]
        length = trainer.config.position_rows
        return cls(model, tokenizer, start_tokens=start, end_tokens=ends, max_length=length, cache=cache, live=live)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | Sequence[SamplingOptions] = GREEDY,
    ) -> list[Completion]:
        """Generate the completions of all prompts, `num_samples` of each, and return them in order.

        All ranks use the prompts and options of the first rank. Raises ValueError, before anything runs, if a prompt
        does not fit.

        Args:
            prompts: Texts or lists of token ids, or a single one.
            options: Sampling options for all prompts, or one for each.
        """
        completions = {}
        for _, completion in self.stream(prompts, options):
            completions[completion.prompt, completion.sample] = completion
        return [completions[key] for key in sorted(completions)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | Sequence[SamplingOptions] = GREEDY,
    ) -> Iterator[TextDelta]:
        """Generate like `generate`, but yield the text piece by piece.

        Pieces of several texts alternate, and several streams may be read in turn. All ranks must read all pieces, or
        stop after the same piece.
        """
        submission = self.submit(*broadcast_object((prompts, options), self.model.ranks.group))
        try:
            while True:
                while submission.pieces:
                    yield submission.pieces.popleft()
                if submission.failure is not None:
                    raise submission.failure
                if submission.finished:
                    break
                self.step()
        finally:
            self.cancel(submission)

    @property
    def load(self) -> Load:
        """Current number of texts and of used and free pages."""
        free = self._allocator.num_free
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return Load(running, waiting, self._allocator.num_pages - free, free)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | Sequence[SamplingOptions] = GREEDY,
        client: str = "",
    ) -> Submission:
        """Add texts that the next steps generate, together with texts that were submitted before.

        Arguments and errors are the same as for `generate`, but every rank must pass the same arguments. Each `client`
        gets an equal share of the batch (`scheduler`).
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Sequence[Prompt] = [prompts] if one else prompts  # type: ignore[list-item,assignment]
        each = [options] * len(several) if isinstance(options, SamplingOptions) else list(options)
        if len(each) != len(several):
            raise ValueError(f"{len(several)} prompts, but options for {len(each)}; give one for each, or one for all")
        tokens = [self.encode(prompt, i) for i, prompt in enumerate(several)]
        for i, (prompt, prompt_options) in enumerate(zip(tokens, each, strict=True)):
            self.check(prompt, prompt_options, i)
        seeds = [prompt_options.seed for prompt_options in each]
        if None in seeds:
            drawn = broadcast_object([secrets.randbits(32) for _ in seeds], self.model.ranks.group)
            seeds = [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]
        if self.live is not None:
            self.live()
            self._follow()
        submission = Submission()
        self._submitted += 1
        for i, (prompt, prompt_options, seed) in enumerate(zip(tokens, each, seeds, strict=True)):
            assert seed is not None
            for sample in range(prompt_options.num_samples):
                sequence = GrowingSequence(
                    list(prompt), len(prompt) + prompt_options.max_tokens, client=client, request=self._submitted
                )
                text = (
                    None if self.tokenizer is None else TextStream(self.tokenizer.decode, prompt, prompt_options.stop)
                )
                row = SamplingRow(prompt_options, stream_of(seed, prompt, sample), sequence.tokens)
                submission.texts.append(
                    _Running(sequence, Completion(i, sample, list(prompt), seed), text, row, submission)
                )
        for running in submission.texts:  # only after all of them were created without an error
            self._scheduler.add(running.sequence)
            self._running[running.sequence] = running
        return submission

    def cancel(self, submission: Submission) -> None:
        """End the unfinished texts of a submission, and free their pages.

        Every rank must call this method between the same two steps.
        """
        for text in submission.texts:
            if self._running.pop(text.sequence, None) is not None:
                self._scheduler.remove(text.sequence)

    def room(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt of `prompt_tokens` tokens, by `max_length` and the cache."""
        return min(self.max_length, self._allocator.num_pages * self._allocator.page_size) - prompt_tokens

    def encode(self, prompt: Prompt, index: int = 0) -> list[int]:
        """Return the tokens of a prompt, with `start_tokens` before a text.

        `index` is the number of the prompt, for the error message. This method and `check` read no changing state, so
        any thread may call them.
        """
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError(f"prompt {index} is a text, but there is no tokenizer; give it as tokens")
        return [*self.start_tokens, *self.tokenizer.encode(prompt)]

    def check(self, tokens: Sequence[int], options: SamplingOptions, index: int = 0) -> None:
        """Raise ValueError if a prompt cannot be continued with these options."""
        if options.stop and self.tokenizer is None:
            raise ValueError(f"stop = {options.stop}: there is no tokenizer to find it in the output; leave it out")
        if not tokens:
            raise ValueError(f"prompt {index} is empty, and the model has no token that begins a text; give one token")
        if foreign := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise ValueError(
                f"prompt {index} has the token {foreign[0]}, but the model has tokens from 0 to {self._vocab_size - 1}"
            )
        if len(tokens) >= self.max_length:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, but max_length is {self.max_length}; shorten it"
            )
        length = len(tokens) + options.max_tokens
        if length > self.max_length:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, or {length} with max_tokens = {options.max_tokens}, but "
                f"max_length is {self.max_length}; shorten it, or try max_tokens = {self.max_length - len(tokens)}"
            )
        if self._allocator.pages_for(length) > self._allocator.num_pages:
            room = self._allocator.num_pages * self._allocator.page_size
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, or {length} with max_tokens = {options.max_tokens}, but the "
                f"cache holds {room}; make it larger (cache_tokens = {length})"
            )

    def refit(self, source: WeightSource | str | Path | None = None, version: int | None = None) -> None:
        """Generate with other weights of the same model from the next step on. Collective.

        Running texts continue: their prompt and output are read again with the new weights.

        Args:
            source: Checkpoint of any format and layout, or a function that fills the tensors of a model
                (`WeightSource`). None, for a live model, takes the trainer's current weights even if the trainer made
                no step.
            version: Version of the new weights. Default: the next number.

        Raises:
            ValueError: The new weights do not fit or do not arrive completely. The old weights stay in use.
        """
        if self.live is not None:
            if source is not None:
                raise ValueError("a generator of a live model uses the trainer's weights; it accepts no others")
            self.live(always=True)
            self._follow(always=True)
            return
        if source is None:
            raise ValueError("refit needs a checkpoint, or a trainer that sends")
        fill = source if callable(source) else partial(read_weights, source)
        staged, world = StagedWeights(self.model), self.model.parallel.world.group
        try:
            on_all_ranks(lambda: fill(self.model, staged.tensors), world)
        except Exception as error:
            raise refused_weights(error) from error
        self.use(staged, version)

    def use(self, staged: StagedWeights, version: int | None = None) -> None:
        """Generate with weights that are staged on all ranks, from the next step on. Collective.

        `version` is the version of the weights; None means the next number.
        """
        staged.apply()
        self._changed(self.weight_version + 1 if version is None else version)

    def _follow(self, *, always: bool = False) -> None:
        """Record the version of a live model's weights after an update."""
        assert self.live is not None
        if always or self.live.version != self.weight_version:
            self._changed(self.live.version)

    def _changed(self, version: int) -> None:
        self.weight_version = version
        self._scheduler.restart()
        self._cached.weights_changed()

    def step(self) -> None:
        """Run the model once for all submitted texts, and append the new text to the pieces of each submission."""
        if not self._running:
            return
        if self.live is not None and self.live.version != self.weight_version:
            self.live()
            self._follow()
        batch = self._scheduler.next_batch()
        logits_rv = self._cached.step(batch)
        self._scheduler.done(batch)
        ends = [self._running[chunk.sequence] for chunk in batch if chunk.last]
        if not ends:
            return
        for running, (token, logprob, *top) in zip(ends, self._choose(logits_rv, ends), strict=True):
            if running.sequence not in self._running:
                continue  # another text of the same submission has failed
            try:
                piece = self._add(running, token, logprob, top)
            except Exception as error:  # for example from the tokenizer; it is the same on all ranks
                running.submission.failure = error
                self.cancel(running.submission)
                continue
            running.submission.pieces.append(TextDelta(piece, running.completion))
            if running.completion.finish_reason is not None:
                self._scheduler.remove(running.sequence)
                del self._running[running.sequence]

    def _choose(self, logits_rv: torch.Tensor | None, ends: Sequence[_Running]) -> list[tuple[Any, ...]]:
        """Return each sequence's next token, its log-probability, and (token, log-probability) of the top tokens.

        The first rank with logits broadcasts the result, so no rank can come to another result.
        """
        parallel, rows = self.model.parallel, [running.row for running in ends]
        top = min(max(row.options.logprobs for row in rows), self._vocab_size)
        if logits_rv is None:
            result = torch.empty(len(rows), 2 + 2 * top, dtype=torch.float64, device=parallel.device)
        else:
            shard = VocabShard(self._cached.capped(logits_rv), self._vocab_size, parallel.tensor.group)
            chosen = choose(shard, rows, None if self.tokenizer is None else self.tokenizer.vocab_size)
            if self.model.batch_invariant:
                tokens_rc = torch.cat([chosen.tokens.unsqueeze(1), chosen.top_tokens], dim=1)
                divisors = [divisor_of(row.options) for row in rows]
                logprobs_rc = self._cached.loss_logprobs(logits_rv, tokens_rc, divisors)
                chosen = chosen._replace(logprobs=logprobs_rc[:, 0], top_logprobs=logprobs_rc[:, 1:])
            columns = (chosen.tokens.unsqueeze(1), chosen.logprobs.unsqueeze(1), chosen.top_tokens, chosen.top_logprobs)
            result = torch.cat([x.double() for x in columns], dim=1)
        ranks = self.model.ranks
        broadcast(result, ranks.group, self.model.last_rank * (ranks.size // parallel.pipeline.size))
        choices: list[tuple[Any, ...]] = []
        for (token, logprob, *alternatives), row in zip(result.tolist(), rows, strict=True):
            pairs = [(int(token), x) for token, x in zip(alternatives[:top], alternatives[top:], strict=True)]
            choices.append((int(token), logprob, *pairs[: row.options.logprobs]))
        return choices

    def _add(self, running: _Running, token: int, logprob: float, top: list[tuple[int, float]]) -> str:
        """Add a token to a completion, and return the text that it adds."""
        if math.isnan(logprob):
            raise ValueError("the model's logits are not finite; its weights may be damaged, or too large for FP8")
        completion, options = running.completion, running.row.options
        running.sequence.tokens.append(token)
        completion.tokens.append(token)
        completion.logprobs.append(logprob)
        if completion.weight_versions[-1:] != [self.weight_version]:
            completion.weight_versions.append(self.weight_version)
        if options.logprobs:
            completion.top_logprobs.append(top)
        ended = token in self.end_tokens and not options.ignore_end
        piece = "" if running.text is None or ended else running.text.add(token)
        if running.text is not None and running.text.stopped:
            completion.finish_reason = "stop"
        elif ended:
            completion.finish_reason = "end"
        elif len(completion.tokens) == options.max_tokens:
            completion.finish_reason = "length"
        if running.text is not None:
            if completion.finish_reason is not None:
                piece += running.text.finish()
            completion.text = running.text.text
        return piece
