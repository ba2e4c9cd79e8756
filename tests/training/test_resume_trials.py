"""Many damages of small files, and many changes of the model, of a checkpoint that a run resumes from. Fixed seeds.

Each damage ends in the newest good checkpoint as it was written, or in one error. Each change of the model is refused,
or the resumed model computes the same logits bit for bit.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import CheckpointReader, IncompatibleCheckpoint, files, load, newest_good
from megafp8.checkpoint.store import step_folder
from megafp8.config import Config, check_layout
from megafp8.conversion.native import NativeSource
from megafp8.models.gpt import GPTStage
from megafp8.parallel.parallel_state import ParallelState, initialize_distributed, initialize_model_parallel
from megafp8.training import state
from megafp8.training.state import check_resume, check_same_run, checkpoint_folder, save_state, tensor_kinds, weights
from megafp8.training.trainer import RankTrainer
from tests.training.presets import GPT2, LAYERS_4, NONE, QK_NORM, TIED, Preset, config_of
from tests.training.test_state import changed
from tests.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GOOD, NEWEST = 2, 3


def _parallel() -> ParallelState:
    return initialize_model_parallel(device=initialize_distributed("cpu"))


def _save(config: Config, folder: str) -> None:
    trainer = RankTrainer(config, _parallel())
    for step in (GOOD, NEWEST):
        save_state(trainer, Path(folder), step, "abc")


def _exactly(metadata: dict[str, Any]) -> str:
    """Text that differs where 1, 1.0 and true do."""
    return json.dumps(metadata, sort_keys=True)


class _Run:
    """A run folder with two checkpoints of `config`, the newest one of which is damaged again and again."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.newest = step_folder(checkpoint_folder(folder), NEWEST)
        self.steps = {step: step_folder(checkpoint_folder(folder), step) for step in (GOOD, NEWEST)}
        self.metadata = {
            step: _exactly(json.loads((p / "metadata.json").read_text())) for step, p in self.steps.items()
        }
        self.damages = 0

    def resume(self, ignore: str | None = None) -> str:
        """What becomes of a run that resumes. `ignore`: a key of metadata.json that may be lost."""
        self.damages += 1
        try:
            check_resume(self.config, self.folder, "abc")
            found = newest_good(checkpoint_folder(self.folder), verify=bool(self.damages % 2))
        except ValueError as error:
            return f"error: {type(error).__name__}"
        except BaseException as error:
            return f"TRACEBACK: {type(error).__name__}"
        assert found is not None
        aside = self.newest.with_name(f"{self.newest.name}.damaged")
        if aside.exists():
            aside.rename(self.newest)
        step = NEWEST if found.path == self.newest else GOOD
        if _exactly(found.metadata) == self.metadata[step]:
            return f"resumes from step {step}, as it was written"
        expected = json.loads(self.metadata[step])
        for metadata in (expected, found.metadata):
            metadata.pop(ignore, None)
        others = found.metadata.keys() - expected.keys()
        if ignore is not None and {k: v for k, v in found.metadata.items() if k not in others} == expected:
            return f"resumes from step {step}, as it was written but for {ignore}"
        return f"SILENT: step {step} with other metadata"

    def read(self) -> str:
        """What becomes of a conversion or an inspection of the newest checkpoint."""
        try:
            found = NativeSource(self.newest).about
        except ValueError as error:
            return f"error: {type(error).__name__}"
        except BaseException as error:
            return f"TRACEBACK: {type(error).__name__}"
        return "as it was written" if _exactly(dict(found)) == self.metadata[NEWEST] else "SILENT: other metadata"


def _run(world: World, folder: Path, patch: pytest.MonkeyPatch) -> _Run:
    """A run in `folder`, and what takes most of the time out of the way: nothing has to outlive the machine, and the
    config, which is always the same, has always the same tensors."""
    config = config_of(NONE, seed=1)
    world.run(_save, config, str(folder), ranks=1)
    kinds = tensor_kinds(config)
    patch.setattr(files, "sync", lambda path: None)
    patch.setattr(state, "tensor_kinds", lambda config: kinds)
    return _Run(config, folder)


def _damages(content: bytes, kind: str) -> Iterator[bytes | None]:
    if kind == "every bit flipped":
        for at in range(len(content)):
            for bit in range(8):
                yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    elif kind == "cut at every length":
        for length in range(len(content)):
            yield content[:length]
    elif kind == "other text":
        rng = random.Random(0)
        yield from (
            None,
            b"null",
            b"[]",
            b"{}",
            b'"text"',
            b"\xff\xfe{}",
            b"[" * 10**6,
            b"9" * 10**5,
            b"NaN",
            b"\0" * 99,
        )
        for _ in range(2000):
            at, length = rng.randrange(len(content)), rng.randint(1, 64)
            yield content[:at] + rng.randbytes(length) + content[at + length :]  # a burst
            yield content[:at] + content[at + length :]  # lost
            yield content[:at] + content[at : at + length] + content[at:]  # twice


@pytest.mark.parametrize("name", ["metadata.json", "checksums.json"])
@pytest.mark.parametrize("kind", ["every bit flipped", "cut at every length", "other text"])
def test_a_damaged_file_never_goes_unseen(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    run, resumed, read = _run(world2, tmp_path, monkeypatch), Counter[str](), Counter[str]()
    file = run.newest / name
    content = file.read_bytes()
    for damaged in _damages(content, kind):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        resumed[run.resume()] += 1
        read[run.read()] += 1
        if damaged is None:
            file.write_bytes(b"")
    print(f"\n{name}, {kind}: {run.damages} damages\n  resuming: {dict(resumed)}\n  reading it: {dict(read)}")
    file.write_bytes(content)
    assert run.resume() == f"resumes from step {NEWEST}, as it was written"
    fine = {f"resumes from step {step}, as it was written" for step in (GOOD, NEWEST)}
    assert resumed.keys() <= fine
    assert read.keys() <= {"error: DamagedCheckpoint", "as it was written"}


def test_a_flipped_bit_and_no_checksums(world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two damages at once: checksums.json is lost, and a bit of metadata.json flipped."""
    run, resumed = _run(world2, tmp_path, monkeypatch), Counter[str]()
    (run.newest / "checksums.json").unlink()
    content = (run.newest / "metadata.json").read_bytes()
    for damaged in _damages(content, "every bit flipped"):
        (run.newest / "metadata.json").write_bytes(damaged or b"")
        resumed[run.resume(ignore="has_checksums")] += 1
    print(f"\nmetadata.json, every bit flipped, no checksums.json: {run.damages} damages\n  resuming: {dict(resumed)}")
    newest = f"resumes from step {NEWEST}, as it was written but for has_checksums"
    assert resumed.keys() == {f"resumes from step {GOOD}, as it was written", newest}
    assert resumed[newest] <= 8 * len('"has_checksums": true')


# --- another model ---------------------------------------------------------------------------------------------------

CHANGES: dict[str, list[Any]] = {
    "num_layers": [3, 4, 5],
    "hidden_size": [64, 128],
    "num_attention_heads": [2, 4, 8, 16],
    "num_query_groups": [None, 1, 2, 4, 8],
    "head_dim": [None, 4, 8, 16, 32],
    "ffn_hidden_size": [None, 128, 256],
    "vocab_size": [99, 100, 101],
    "vocab_multiple": [1, 4, 32, 64, 100, 128, 256],
    "max_position_embeddings": [None, 8, 9, 64],
    "position_embedding": ["rope", "learned", "none"],
    "rope_theta": [10000.0, 10001.0, 5e5],
    "rope_scaling": [None, {}, {"factor": 1.0}, {"original_max_position_embeddings": 4}],
    "normalization": ["rmsnorm", "layernorm"],
    "norm_eps": [1e-5, 1.1e-5, 1e-6],
    "activation": ["swiglu", "gelu", "gelu_tanh"],
    "linear_bias": [False, True],
    "qkv_bias": [False, True],
    "qk_norm": [False, True, "projection"],
    "tie_embeddings": [False, True],
    "sliding_window": [None, 1, 3, 8, 100],
    "parallel_block": [False, True],
    "init_std": [0.02, 0.5],
}
MODELS = [LAYERS_4, LAYERS_4 | GPT2, LAYERS_4 | QK_NORM, LAYERS_4 | TIED]


def _logits(trainer: RankTrainer) -> Tensor:
    (stage,) = trainer.stages
    assert isinstance(stage, GPTStage)
    tokens = torch.arange(16).view(2, 8) * 37 % 99
    inputs = stage.layer_inputs(Batch(tokens, tokens))
    assert stage.embedding is not None
    assert stage.head is not None
    vocab_size = trainer.config.model.vocab_size
    with torch.no_grad():
        logits = stage.head.logits(*stage.run_blocks(stage.embedding(tokens, None), inputs))
    return logits[..., :vocab_size]


def _change_models(model: Preset, folder: str, trials: int) -> tuple[dict[str, int], list[str]]:
    """Outcomes of random changes of the model section by kind, and the wrong ones."""
    rng, parallel = random.Random(str(model)), _parallel()
    config = changed(config_of(model, seed=1), training={"precision": "fp64"})
    trainer = RankTrainer(config, parallel)
    with torch.no_grad():
        for param in trainer.strategy.params:  # no norm weight of one, no bias of zero
            param += 0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1), dtype=param.dtype)
    before = _logits(trainer)
    found = CheckpointReader(save_state(trainer, Path(folder), NEWEST, "abc"))
    outcomes, wrong = Counter[str](), []
    while sum(outcomes.values()) < trials:
        keys = rng.sample(sorted(CHANGES), rng.choice([1, 1, 2, 3]))
        change = {key: rng.choice(CHANGES[key]) for key in keys}
        other = changed(config, model=change)
        try:
            check_layout(other, 1)
        except ValueError:
            continue
        try:
            check_same_run(other, "abc", found)
            refused = False
        except IncompatibleCheckpoint:
            refused = True
        fits = tensor_kinds(other) == tensor_kinds(config)
        same = False
        if fits:
            resumed = RankTrainer(other, parallel)
            load(found, weights(resumed), optional=lambda n: not n.startswith("model."))
            after = _logits(resumed)
            same = after.shape == before.shape and torch.equal(after, before)
        what = "the same logits" if same else "other logits" if fits else "other tensors"
        outcomes[f"{'refused' if refused else 'accepted'}, {what}"] += 1
        if not refused and not same:
            wrong.append(f"{model} {change}")
        if refused and same:
            print(f"refused with the same logits: {model} {change}")
    return dict(outcomes), wrong


def test_random_changes_of_the_model_are_refused_or_change_nothing(world2: World, tmp_path: Path) -> None:
    total = Counter[str]()
    for model in MODELS:
        ((outcomes, wrong),) = world2.run(_change_models, model, str(tmp_path / str(model)), 100, ranks=1, timeout=600)
        assert wrong == []
        total.update(outcomes)
    print(f"\n{sum(total.values())} random changes of the model section: {dict(total)}")
    assert total["accepted, the same logits"] >= 40, "the trials are to accept some too"
    assert total["refused, other logits"] >= 40
