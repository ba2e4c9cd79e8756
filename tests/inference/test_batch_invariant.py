"""`batch_invariant`: log-probabilities of generated tokens are those of the training forward pass, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config, ConfigError, check_layout
from megafp8.gemm import invariant as invariant_products
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.load import live_model
from megafp8.inference.options import CacheOptions
from megafp8.inference.scoring import Request, Scorer
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel
from megafp8.training.state import save_state
from megafp8.training.trainer import RankTrainer
from tests.conversion.families import make_theirs, tokens
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import batches, start, steps_of
from tests.world import World

FAMILIES = ["llama3", "qwen3-moe", "gemma2", "deepseek-v3", "gpt-oss", "llama4", "bloom"]
BATCHES = (1, 3, 8, 24)
NEW = 6
INVARIANT = {"batch_invariant": True}
CACHES = {
    "whole prompts": CacheOptions(page_size=16, cache_tokens=2048),
    "chunks, preemption": CacheOptions(page_size=4, cache_tokens=96, max_batch_tokens=5, max_sequences=12),
}


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 9 tokens."""
    own = random.Random(1)
    ids = tokens().flatten().tolist()
    return [[own.choice(ids) for _ in range(own.randint(1, 9))] for _ in range(count)]


def trained_logprobs(generator: Generator, texts: Sequence[list[int]]) -> list[list[float]]:
    """Log-probabilities of each token but the first, by a training forward pass with gradients; each text alone, and
    several of one length as a micro-batch."""
    (stage,) = generator.model.stages
    found: list[list[float]] = [[] for _ in texts]
    for length in {len(text) for text in texts}:
        rows = [i for i, text in enumerate(texts) if len(text) == length]
        ids = torch.tensor([texts[i] for i in rows])
        with generator.model.fp8.recording(False):
            loss_sb = stage(None, Batch(ids[:, :-1], ids[:, 1:].contiguous())).cross_entropy
        assert loss_sb.requires_grad
        for i, logprobs in zip(rows, (-loss_sb.detach()).t().tolist(), strict=True):
            found[i] = logprobs
    return found


@pytest.mark.parametrize("name", slow_but(FAMILIES, "gemma2", "deepseek-v3"))
@pytest.mark.parametrize("cache", slow_but(list(CACHES), list(CACHES)[-1]))
def test_logprobs_are_those_of_training(tmp_path: Path, name: str, cache: str) -> None:
    make_theirs(name).save_pretrained(tmp_path)
    generator = Generator.from_checkpoint(
        tmp_path, device="cpu", dtype=torch.float32, batch_invariant=True, max_length=16, cache=CACHES[cache]
    )
    options = SamplingOptions(max_tokens=NEW, ignore_end=True, temperature=1.0, seed=3)
    given = prompts(max(BATCHES))
    alone = [generator.generate(prompt, options)[0] for prompt in given[:8]]
    for count in BATCHES:
        order = random.Random(count).sample(range(count), count)
        completions = generator.generate([given[i] for i in order], options)
        texts = [[*given[i], *x.tokens] for i, x in zip(order, completions, strict=True)]
        expected = trained_logprobs(generator, texts)
        for logprobs, completion in zip(expected, completions, strict=True):
            assert logprobs[-NEW:] == completion.logprobs
        if count == 8:
            scored = Scorer(generator.model, max_length=16).score(Request(text[:1], text[1:]) for text in texts)
            assert [score.logprobs for score in scored] == expected
    for i, completion in enumerate(alone):
        assert trained_logprobs(generator, [[*given[i], *completion.tokens]])[0][-NEW:] == completion.logprobs
    destroy_model_parallel()


def _of_live_and_checkpoint(config: Config, folder: str) -> tuple[list[tuple[list[float], list[float]]], int]:
    """Log-probabilities of texts scored one at a time, with those of generation, live and from a checkpoint, and of
    training's forward pass of packed samples; how often a text had to wait."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    save_state(trainer, Path(folder), 2, None)
    generators = [
        Generator.from_trainer(trainer, cache=CACHES["chunks, preemption"]),
        Generator.from_checkpoint(
            folder, device="cpu", cache=CACHES["whole prompts"], pipeline=config.parallel.pipeline
        ),
    ]
    assert all(generator.model.batch_invariant for generator in generators)
    options = SamplingOptions(max_tokens=NEW, ignore_end=True, temperature=1.0, seed=3)
    model, before = live_model(trainer)
    scorer = Scorer(model, max_length=config.position_rows, before=before)
    pairs = []
    waited = 0
    for generator in generators:
        for count in (1, 7, 24):
            given = [[token % 90 for token in prompt] for prompt in prompts(count)]
            forgotten = generator._scheduler._forget
            with patch.object(generator._scheduler, "_forget", side_effect=forgotten) as forget:
                completions = generator.generate(given, options)
            waited += forget.call_count - count
            for completion in completions:
                (score,) = scorer.score([Request(completion.prompt_tokens, completion.tokens)])
                pairs.append((score.logprobs, completion.logprobs))
    for batch in batches(2, config, parallel) if parallel.world_size == 1 else ():
        (stage,) = trainer.stages
        before()
        with trainer.fp8.recording(False):
            losses_bs = stage(None, batch).cross_entropy.t()
        assert losses_bs.requires_grad
        for i, (ids, labels) in enumerate(zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)):
            bounds = {0, len(ids)} | set([] if batch.cu_seqlens is None else batch.cu_seqlens[i].tolist())
            for begin, end in itertools.pairwise(sorted(bounds)):
                text = [*ids[begin:end], labels[end - 1]]
                (score,) = scorer.score([Request(text[:1], text[1:])])
                pairs.append((score.logprobs, (-losses_bs[i, begin:end]).tolist()))
    return pairs, waited


def _gradients(trainers: Sequence[RankTrainer], config: Config, parallel: ParallelState) -> list[list[Tensor]]:
    """Losses of a micro-batch and gradients of each model; all forward passes come before all backward passes."""
    batch = batches(0, config, parallel)[0]
    losses_sb = []
    for trainer in trainers:
        trainer.strategy.clear()
        losses_sb.append(trainer.stages[0](None, batch).cross_entropy)
    for loss_sb in losses_sb:
        loss_sb.sum().backward()
    for trainer in trainers:
        trainer.strategy.complete()
    pairs = zip(trainers, losses_sb, strict=True)
    return [[loss_sb.detach(), *(x.clone() for x in trainer.strategy.gradients)] for trainer, loss_sb in pairs]


def _of_two_models(config: Config) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """`_gradients` of a usual and a batch-invariant model, each alone and both in one process at a time.

    Invariant products are a thousandth larger here, because on some processors they equal the usual ones.
    """
    product = invariant_products.product

    def larger(*args: Any, **options: Any) -> Tensor:
        return product(*args, **options).mul_(1.001)

    usual, parallel = start(config)
    invariant_config = config.model_copy(update={"inference": config.inference.model_copy(update=INVARIANT)})
    with patch.object(invariant_products, "product", larger):
        alone = _gradients([usual], config, parallel)
        invariant = RankTrainer(invariant_config, parallel)
        alone += _gradients([invariant], config, parallel)
        return alone, _gradients([usual, invariant], config, parallel)


@pytest.mark.parametrize("preset", [CURRENT | FULL, FEW_ROWS | FULL], ids=str)
def test_models_of_one_process_do_not_share_the_choice(world2: World, preset: Preset) -> None:
    """Blocks are recomputed in backward, when the other model has run last."""
    ((alone, together),) = world2.run(_of_two_models, config_of(preset), ranks=1)
    assert all(torch.equal(x, y) for model in zip(alone, together, strict=True) for x, y in zip(*model, strict=True))
    (usual, *_), (invariant, *_) = alone
    assert not torch.equal(usual, invariant)
    torch.testing.assert_close(usual, invariant, atol=0.05, rtol=0.05)


RUNS = [
    *(recipe | WIDE for recipe in (DELAYED, CURRENT, BLOCKWISE, ROWWISE, MXFP8, STATIC)),
    *(recipe | BF16 for recipe in (NONE, DELAYED, CURRENT, BLOCKWISE)),
    MOE | CURRENT | FULL,
    MOE | BLOCKWISE | WIDE,
    DEEPSEEK | DELAYED,
    GEMMA | CURRENT | DOCUMENTS,
    GPT_OSS | DOCUMENTS | BF16,
    BLOOM | CUSTOM,
    GEMMA | PP2 | CURRENT,
    DELAYED | SELECTIVE,
]


@pytest.mark.parametrize("preset", slow_but(RUNS, CURRENT | WIDE, DEEPSEEK | DELAYED))
def test_a_run_and_its_checkpoint(world2: World, tmp_path: Path, preset: Preset) -> None:
    """In every recipe: texts of the live model and of its checkpoint have the numbers of scored texts, and those of
    packed training samples, documents too."""
    config = config_of(preset, inference=INVARIANT)
    for pairs, waited in world2.run(_of_live_and_checkpoint, config, str(tmp_path), ranks=preset.ranks):
        assert waited > 0
        for scored, generated in pairs:
            assert scored == generated


@pytest.mark.parametrize(
    ("preset", "key"),
    [
        (TP2, "parallel.tensor"),
        (CP2, "parallel.context"),
        (HYBRID, "model.mixer.kind"),
        (HYPER, "model.hyper_connections"),
        (DROPPING, "model.moe.capacity_factor"),
        (DROPOUT, "model.attention_dropout"),
        (NVFP4, "fp8.recipe"),
        (PREFIX, "data.prefix_lm"),
    ],
)
def test_what_cannot_be_is_refused(preset: Preset, key: str) -> None:
    config = config_of(preset, inference=INVARIANT)
    with pytest.raises(ConfigError) as error:
        check_layout(config, preset.ranks)
    assert key in str(error.value)


def test_other_numbers_than_those_of_training_are_refused(tmp_path: Path) -> None:
    make_theirs("llama3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights = int8: with batch_invariant"):
        Generator.from_checkpoint(tmp_path, device="cpu", weights="int8", batch_invariant=True)
    with pytest.raises(ValueError, match="dtype = fp8 of the cache: with batch_invariant"):
        Generator.from_checkpoint(tmp_path, device="cpu", batch_invariant=True, cache=CacheOptions(dtype="fp8"))
    destroy_model_parallel()
