"""Generation from checkpoints of runs, and from their live models in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.batch import Batch
from megafp8.checkpoint import latest
from megafp8.config import Config, model_spec
from megafp8.conversion.convert import Selected
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.native import NativeSink, NativeSource
from megafp8.data.tokenizers import build_tokenizer
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.generator import CacheOptions
from megafp8.inference.load import InferenceLayout, live_model, open_checkpoint
from megafp8.inference.model import Model
from megafp8.inference.scoring import Request, Scorer
from megafp8.training.state import checkpoint_folder, save_state
from tests.conversion.checkpoints import convert
from tests.conversion.families import SMALL, RandomSource
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import start, steps_of
from tests.world import World

PROMPTS = [[3, 6, 9, 12, 15, 2, 5, 8, 11], [0], [1, 2, 3]]
OPTIONS = [
    SamplingOptions(max_tokens=8, ignore_end=True),
    SamplingOptions(max_tokens=8, ignore_end=True, temperature=1.2, top_p=0.9, seed=3),
]
CACHE = CacheOptions(page_size=4, max_batch_tokens=8)

SCALES_OF_BATCHES = ("current", "custom")
"""Recipes under which a token's input is scaled by those of other tokens."""

Texts = list[list[int]]


def _texts(generator: Generator) -> Texts:
    return [x.tokens for options in OPTIONS for x in generator.generate(PROMPTS, options)]


def _logprobs(model: Model, before: Callable[[], None] = lambda: None) -> list[float]:
    """Of the tokens of the longest prompt, and of two that follow it."""
    scorer = Scorer(model, max_length=16, before=before)
    requests = [Request(PROMPTS[0][:1], PROMPTS[0][1:]), *(Request(PROMPTS[0], [token]) for token in (1, 2))]
    return [x for score in scorer.score(requests) for x in score.logprobs]


def _live(config: Config, folder: str | None) -> tuple[list[Texts], list[Any], list[float]]:
    """Texts after two steps and after two more, the curve, and log-probabilities at the end. Without `folder` nothing
    is generated or scored; else the state after the two more steps is saved there."""
    trainer, parallel = start(config)
    curve = steps_of(trainer, parallel, range(2))
    texts: list[Texts] = []
    generator = None if folder is None else Generator.from_trainer(trainer, cache=CACHE)
    if generator is not None:
        texts.append(_texts(generator))
        _logprobs(*live_model(trainer))
    curve += steps_of(trainer, parallel, range(2, 4))
    logprobs = []
    if generator is not None and folder is not None:
        texts.append(_texts(generator))
        logprobs = _logprobs(*live_model(trainer))
        save_state(trainer, Path(folder), 4, None)
    return texts, curve, logprobs


def _from_checkpoint(folder: str, layout: dict[str, int]) -> tuple[Texts, Texts, list[float]]:
    """Texts together, and each alone; log-probabilities."""
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, **layout)
    alone = [generator.generate(prompt, options)[0].tokens for options in OPTIONS for prompt in PROMPTS]
    return _texts(generator), alone, _logprobs(generator.model)


LIVE = [
    FSDP | DP2 | GEMMA,
    ZB_V | PP2 | LAYERS_4 | DELAYED,
    TP2 | CHUNKS | SAMPLES_3,
    TP2 | NO_SP | BLOOM,
    ZERO | DP2 | FP8_GATHER | CURRENT,
    FSDP | DP2 | FP8_GATHER | DELAYED,
    GRAPHS | DELAYED,
    DEEPSEEK | TP2 | EP2,
    MOE | EP2 | DP2 | ALL_TO_ALL,
    MOE | TP2 | EP2 | BLOCKWISE | WIDE,
    INTERLEAVED | PP2 | LAYERS_4 | TIED,
    TP2 | PP2 | GPT2 | DROPOUT,
    CP2 | WINDOW,
    MTP | PP2 | LAYERS_4,
    HYBRID | TP2 | DELAYED,
    HYBRID | PP2,
    SHARED_ATTENTION | TP2 | DELAYED,
    KIMI | TP2,
    DELTA_PRODUCT | TP2,
    COMPRESSED | TP2,
    NEMOTRON | TP2 | PP2,
    HYPER | PP2 | EP2 | TP2 | DELAYED,
    SPARSE | TP2 | DELAYED,
    BLOCK_SPARSE | TP2,
    CALIBRATED,
    MXFP8 | WIDE | TP2,
    CUSTOM,
]


@pytest.mark.slow
@pytest.mark.parametrize("preset", LIVE)
def test_the_live_model_and_its_checkpoint(world4: World, tmp_path: Path, preset: Preset) -> None:
    """Training goes on as if nothing had been generated; texts follow the weights, and a checkpoint gives the same."""
    config, ranks = config_of(preset), preset.ranks
    of_ranks = world4.run(_live, config, str(tmp_path), ranks=ranks)
    (before, after), curve, logprobs = of_ranks[0]
    assert all(found == of_ranks[0] for found in of_ranks)
    assert before != after
    assert world4.run(_live, config, None, ranks=ranks)[0][1] == curve
    layouts: list[dict[str, int]] = [{}, {"tensor": 2}, *([] if SHARED_ATTENTION in preset else [{"pipeline": 2}])]
    for layout in layouts:
        found = world4.run(_from_checkpoint, str(tmp_path), layout, ranks=2 if layout else 1)
        assert found[0][0] == after
        if config.fp8.recipe not in SCALES_OF_BATCHES:
            assert found[0][1] == after
            assert found[0][2] == pytest.approx(logprobs, abs=1e-4 if config.fp8.recipe == "none" else 0.05)


def _without_scales(folder: str) -> tuple[str, list[list[float]]]:
    """The error of a checkpoint without its scales; log-probabilities in FP8 and in high precision."""
    bare = Path(folder) / "bare"
    convert(Selected(NativeSource(folder), weights_only=True, dtype=None), NativeSink(bare))
    message = ""
    try:
        Generator.from_checkpoint(bare, device="cpu")
    except ValueError as error:
        message = str(error)
    made = [
        Generator.from_checkpoint(path, device="cpu", fp8=fp8)
        for path, fp8 in ((bare, False), (folder, False), (folder, True))
    ]
    return message, [x.generate(PROMPTS[0], OPTIONS[0])[0].logprobs for x in made]


def test_fp8_needs_its_scales_and_is_said(
    world2: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world2.run(_live, config_of(DELAYED), str(tmp_path), ranks=1)
    message, (bare, high, fp8) = world2.run(_without_scales, str(tmp_path), ranks=1)[0]
    assert "was trained in FP8, but its scale fp8.layers.0.attention.qkv" in message
    assert "fp8=False" in message
    assert bare == high
    assert 1e-4 < max(abs(a - b) for a, b in zip(fp8, high, strict=True)) < 0.3
    open_checkpoint(tmp_path, InferenceLayout(), device="cpu", fp8=False)
    assert not caplog.records
    open_checkpoint(tmp_path, InferenceLayout(), device="cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    open_checkpoint(tmp_path, InferenceLayout(tensor=2), device="cpu")
    (line,) = caplog.messages  # of the first rank
    assert "computes in FP8 (delayed), as in training, so log-probabilities differ" in line
    assert "--no-fp8 (fp8=False in Python) computes in " in line


def bytes_config(preset: Preset = NONE) -> Config:
    """Of a run over bytes."""
    model, data = {"vocab_size": 257, "vocab_multiple": 64}, {"tokenizer": {"kind": "bytes"}}
    return config_of(preset, model=model, data=data, training={"seq_length": 64})


def save_bytes_run(folder: str) -> None:
    trainer, _ = start(bytes_config())
    save_state(trainer, Path(folder), 1, build_tokenizer("bytes").fingerprint)


def _of_text(folder: str) -> dict[str, Any]:
    generator = Generator.from_checkpoint(folder, device="cpu")
    plain = SamplingOptions(max_tokens=20, seed=1, temperature=1.0)
    (whole,) = generator.generate("été", plain)
    stop = whole.text[5:8]
    stopping = SamplingOptions(**{**vars(plain), "stop": (stop,)})
    (stopped,) = generator.generate("été", stopping)
    pieces = list(generator.stream(["été", "a"], stopping))
    as_tokens = generator.generate([256, *"été".encode()], plain)[0]
    generator.end_tokens = frozenset([whole.tokens[3]])
    ended = generator.generate("été", plain)[0]
    ignored = generator.generate("été", SamplingOptions(**{**vars(plain), "ignore_end": True}))[0]
    return {
        "whole": whole, "stop": stop, "stopped": stopped, "pieces": pieces, "as_tokens": as_tokens, "ended": ended,
        "ignored": ignored, "max_length": generator.max_length,
    }  # fmt: skip


def test_texts_of_a_run(world2: World, tmp_path: Path) -> None:
    """The tokenizer, the token before a document and the length are those of the run."""
    world2.run(save_bytes_run, str(tmp_path), ranks=1)
    assert latest(checkpoint_folder(tmp_path)) or latest(tmp_path)
    found = world2.run(_of_text, str(tmp_path), ranks=1)[0]
    whole, stopped, ended = found["whole"], found["stopped"], found["ended"]
    assert whole.prompt_tokens == [256, *"été".encode()]
    assert found["as_tokens"].tokens == whole.tokens
    assert found["max_length"] == 64
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 20)
    assert whole.text == bytes(x for x in whole.tokens if x < 256).decode(errors="replace")
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.text[: whole.text.index(found["stop"])])
    assert whole.tokens[: len(stopped.tokens)] == stopped.tokens
    assert "".join(x.text for x in found["pieces"] if x.completion.prompt == 0) == stopped.text
    assert (ended.finish_reason, ended.tokens) == ("end", whole.tokens[: len(ended.tokens)])
    assert ended.tokens.index(whole.tokens[3]) == len(ended.tokens) - 1
    assert found["ignored"].tokens == whole.tokens


def test_the_tokens_around_a_text_in_a_folder_of_hugging_face(tmp_path: Path) -> None:
    """What tokenizer.json puts before a text, and all tokens that its files say end one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    library = Tokenizer(models.WordLevel({"<s>": 1, "</s>": 2, "a": 3, "<unk>": 0}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    tmp_path = tmp_path / "theirs"
    convert(RandomSource(model_spec({**SMALL, "max_position_embeddings": 64})), HfSink(tmp_path))
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"name no end-of-document token .* special tokens are <s>, </s>"):
        open_checkpoint(tmp_path, InferenceLayout(), device="cpu")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert open_checkpoint(tmp_path, InferenceLayout(), device="cpu").start_tokens == []
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    opened = open_checkpoint(tmp_path, InferenceLayout(), device="cpu")
    assert (opened.start_tokens, opened.end_tokens) == ([1], [2])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_checkpoint(tmp_path, InferenceLayout(), device="cpu").end_tokens == [2, 7, 9]


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}


def _log_probabilities(folder: str) -> list[list[float]]:
    """Of a short text after two steps with long samples: live, from the checkpoint, and by the model in training."""
    config = config_of(NONE, model={"longrope": LONGROPE | {"original_max_position_embeddings": 24}})
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    save_state(trainer, Path(folder), 2, None)
    live = Generator.from_trainer(trainer).generate(PROMPTS[0], OPTIONS[0])[0]
    read = Generator.from_checkpoint(folder, device="cpu").generate(PROMPTS[0], OPTIONS[0])[0]
    text = PROMPTS[0] + live.tokens
    tokens_bs = torch.tensor([text + [0] * (config.training.seq_length + 1 - len(text))])
    with torch.no_grad():
        loss_sb = trainer.stages[0](None, Batch(tokens_bs[:, :-1], tokens_bs[:, 1:])).cross_entropy
    trained = -loss_sb[len(PROMPTS[0]) - 1 : len(text) - 1, 0]
    return [live.logprobs, read.logprobs, trained.tolist()]


def test_longrope_of_a_run_with_long_samples(world2: World, tmp_path: Path) -> None:
    """Its short texts have the frequencies that it was trained with."""
    live, read, trained = world2.run(_log_probabilities, str(tmp_path), ranks=1)[0]
    assert live == pytest.approx(trained, abs=1e-5)
    assert read == pytest.approx(trained, abs=1e-5)
