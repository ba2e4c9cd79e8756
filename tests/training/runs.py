"""Small models trained on real ranks in any layout: what the tests of training share.

A run is described by a preset (`presets.py`). `train` is what every run does: two steps, one that is skipped, an
evaluation, and more steps. A run is computed once a session (`Runs.of`) for all tests.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_

from megafp8.batch import Batch
from megafp8.checkpoint import CheckpointReader
from megafp8.checkpoint.store import step_folder
from megafp8.config import Config, check_layout, load_config
from megafp8.data.samples import PADDING
from megafp8.objectives import Objective
from megafp8.objectives.answers import Answers
from megafp8.objectives.grpo import SampledTexts, text_part
from megafp8.objectives.masked_lm import MaskedLM, SpecialIds
from megafp8.objectives.next_token import NextToken
from megafp8.objectives.preferences import Preferences
from megafp8.objectives.prefix_lm import PrefixLM
from megafp8.objectives.span_corruption import SpanCorruption
from megafp8.parallel import tp_symmetric
from megafp8.parallel.parallel_state import ParallelState, initialize_distributed
from megafp8.parallel.sharding import FlatShard, spec_of
from megafp8.training import job, run
from megafp8.training.cuda_graphs import Graphs
from megafp8.training.fp8_config import check_recipe
from megafp8.training.inputs import RunInputs, open_inputs
from megafp8.training.parallel import build_parallel
from megafp8.training.state import checkpoint_folder, save_state
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import check_run
from tests.parallel.chunks import InChunks
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.latest import load_latest
from tests.training.presets import TEXT, VOCABULARY, Preset, Sections, config, config_of, merged, without_execution
from tests.world import World

# --- on the ranks ----------------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step; of a skipped one (loss, 0), of an evaluation (loss, tokens)."""


T = TypeVar("T")


class RerunCapture:
    """Stands in for a CUDA graph's capture: a replay runs the work again, on the memory that it was captured with, and
    leaves the result in the memory that it had at first. Counts captures and replays. `capturing`: as for a capture."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.capturing: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        self.captures += 1
        results: list[T] = []

        def replay() -> T:
            self.replays += 1
            with self.capturing():
                results.append(work())
            if len(results) > 1:
                tree_map_(lambda old, new: old.copy_(new), results[0], results.pop())
            return results[0]

        return replay


@dataclass
class LoggedCapture:
    """Stands in for a capture: the work runs when it is captured, and replays are written to `log`."""

    log: list[Any]

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()

        def replay() -> T:
            self.log.append("replay")
            return result

        return replay


class RerunGraphs(Graphs):
    """Graphs on a CPU, after one eager step."""

    def __init__(self) -> None:
        self.rerun = RerunCapture()
        super().__init__(torch.device("cpu"), new_capture=lambda: self.rerun)

    def run_parts(self, *args: Any, **options: Any) -> Any:
        self.rerun.capturing = options.pop("capturing")
        return super().run_parts(*args, **options | {"eager_runs": 1})


def check_config(config: Config, ranks: int) -> None:
    """Raise ConfigError where a run of `config` on `ranks` ranks is refused.

    But for what only runs of this module have: a short history under every recipe.
    """
    fp8 = config.fp8.model_copy(update={"amax_history_len": 1024})
    checked = config.model_copy(update={"fp8": fp8})
    check_layout(checked, ranks)
    check_recipe(checked, "config")


def start(
    config: Config, build: Callable[[Config, ParallelState], RankTrainer] = RankTrainer
) -> tuple[RankTrainer, ParallelState]:
    """Build a trainer on the ranks that are here, with stand-ins for what needs CUDA, which offloads any activation.

    Its CUDA graphs are `RerunGraphs`, its overlap by symmetric memory is `InChunks`.
    """
    graphs, ranks = config.training.cuda_graphs is True, dist.get_world_size()
    needs_cuda = graphs or config.parallel.overlap_tensor == "symmetric"
    check_config(config.model_copy(update={"device": "auto"}) if needs_cuda else config, ranks)
    if graphs:
        config = config.model_copy(update={"training": config.training.model_copy(update={"cuda_graphs": False})})
    device = initialize_distributed("cpu")
    parallel = build_parallel(config, device)
    one_host = patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks))
    with one_host, patch.object(tp_symmetric, "SymmetricMemory", InChunks):
        trainer = build(config, parallel)
    if graphs:
        trainer.graphs = RerunGraphs()
    for stage in trainer.stages:
        if stage.offload is not None:
            stage.offload.smallest = 0
    return trainer, parallel


def batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """This rank's micro-batches of a global batch that is the same in every layout.

    Tokens count in strides modulo 16, which is soon learnt; 0 ends a document. Under best_fit, each sample ends with
    padding from a random token on. Or those of `data.train`.
    """
    t, d, data = config.training, config.data, parallel.data
    if d.train != ["none"] and d.grpo is None:
        return text_batches(step, config, parallel)
    generator = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, 16, (t.global_batch_size, 1), generator=generator) for _ in range(2))
    tokens = (first + stride * torch.arange(t.seq_length + 1)) % 16
    if d.packing == "best_fit":
        end = torch.randint(t.seq_length // 2, t.seq_length + 2, first.shape, generator=generator)
        tokens[torch.arange(t.seq_length + 1) >= end] = PADDING
    samples = torch.arange(step * t.global_batch_size, (step + 1) * t.global_batch_size)
    if config.model.architecture != "gpt":
        return _encoder_batches(config, parallel, tokens, samples)
    if d.grpo is not None:
        return _sampled_batches(config, parallel, tokens, samples)
    if d.dpo is not None:
        return _pair_batches(config, parallel, tokens, samples)
    if d.loss_on is not None:
        return _answer_batches(config, parallel, tokens, samples)
    objective: Objective = NextToken(t.seq_length, d.reset_at_documents, d.mask_eod_loss)
    if d.prefix_lm is not None:
        assert d.prefix_lm.max_length is not None
        objective = PrefixLM(objective, 1234, d.prefix_lm.min_length, d.prefix_lm.max_length)
    rows = torch.stack([torch.from_numpy(objective.row(_documents(x), i)) for i, x in zip(samples.tolist(), tokens)])
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (rows, samples)))
    return [replace(objective.batch(x), samples=indices) for x, indices in own]


def _documents(sample: Tensor) -> list[NDArray[np.int64]]:
    """The documents of a sample, each of which ends with 0; without padding."""
    text = sample[sample != PADDING].numpy()
    return [part for part in np.split(text, np.flatnonzero(text == 0) + 1) if len(part)]


def _answer_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same with a loss mask: samples have three documents, of which none to a half of the tokens are answers."""
    t, data, objective = config.training, parallel.data, Answers(config.training.seq_length)
    rows = []
    for index, sample in zip(indices.tolist(), tokens):
        text = sample[sample != PADDING]
        mask = (torch.arange(len(text)) % (index % 4 + 1) == 0) & (index % 4 != 0)
        parts = torch.stack([text, mask]).numpy()
        rows.append(torch.from_numpy(objective.row(np.split(parts, [4, 11], axis=1), index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def _pair_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same as pairs of documents: samples have one to three, with answers of one to three tokens."""
    t, data, objective = config.training, parallel.data, Preferences(Answers(config.training.seq_length))
    rows = []
    for index, sample in zip(indices.tolist(), tokens):
        text = sample[sample != PADDING]
        mask = torch.arange(len(text)) % 4 != index % 3
        parts = torch.stack([text, mask]).numpy()
        cuts = [[9], [4, 8, 11], [3, 6, 8, 11, 14]][index % 3]
        rows.append(torch.from_numpy(objective.row(np.split(parts, cuts, axis=1), index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def _sampled_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same as texts that were sampled, one to three a sample, with advantages; some ratios are clipped."""
    t, data, objective = config.training, parallel.data, SampledTexts(Answers(config.training.seq_length))
    rows = []
    for index, sample in zip(indices.tolist(), tokens):
        random, parts = np.random.default_rng(index), []
        for text in np.split(sample[sample != PADDING].numpy(), [[9], [4, 11], []][index % 3]):
            prompt = int(random.integers(1, len(text) - 1))
            logprobs = -np.log(VOCABULARY) + 0.4 * random.standard_normal(len(text) - prompt)
            parts.append(text_part(text, prompt, logprobs, random.standard_normal()))
        rows.append(torch.from_numpy(objective.row(parts, index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def _encoder_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same for other objectives, which take samples as pieces; some are shorter than others."""
    t, data, pairs = config.training, parallel.data, config.model.binary_head
    objective: Objective = MaskedLM(t.seq_length, 1234, SpecialIds(96, 97, 98, 99), VOCABULARY, pairs=pairs)
    samples = tokens.numpy()
    if config.decoder_length is not None:
        lengths = config.data.span_corruption.lengths(config.sample_tokens)
        sentinels = [98, 97, 96, 95, 94]
        objective = SpanCorruption(t.seq_length, config.decoder_length, 1234, *lengths, sentinels, 1, 99)
        samples = np.concatenate([samples, samples], axis=1)
    rows = []
    for i, (index, sample) in enumerate(zip(indices.tolist(), samples)):
        text = sample[: config.sample_tokens - 5 * (i % 3) * pairs]
        rows.append(torch.from_numpy(objective.row(np.split(text, [4, 11]), index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def text_batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """The same of real data, through the sampler."""
    inputs = _open(config.model_dump_json())
    return next(inputs.batches(inputs.train, parallel, step * config.training.global_batch_size, num_workers=0))


@functools.lru_cache(maxsize=1)
def _open(config: str) -> Any:
    return open_inputs(Config.model_validate_json(config), "test")


def steps_of(trainer: RankTrainer, parallel: ParallelState, steps: Iterable[int]) -> Curve:
    """Train steps and return the sum of all losses, and the gradient norm, of each."""
    curve = []
    for step in steps:
        loss, result = trainer.train_step(step, batches(step, trainer.config, parallel))
        assert not result.skipped
        curve.append((loss.mean + (loss.auxiliary or 0.0) + (loss.z_loss or 0.0), result.grad_norm))
    return curve


def skipped_step(trainer: RankTrainer, parallel: ParallelState, step: int) -> tuple[float, float]:
    """A step whose gradients are not finite."""
    update = trainer.update
    trainer.update = lambda lr, grad_scale, measure: update(lr, grad_scale=torch.tensor(math.nan))  # type: ignore[assignment]
    loss, result = trainer.train_step(step, batches(step, trainer.config, parallel))
    trainer.update = update
    assert result.skipped
    return loss.mean, 0.0


SKIPPED, EVALUATED = 2, 1000
STEPS = 2
"""Steps of a run after the one that is skipped."""


def train(trainer: RankTrainer, parallel: ParallelState, steps: int = STEPS) -> Curve:
    curve = steps_of(trainer, parallel, range(SKIPPED))
    curve.append(skipped_step(trainer, parallel, SKIPPED))
    evaluated = trainer.evaluate(batches(EVALUATED, trainer.config, parallel))
    curve.append((evaluated.mean, evaluated.tokens))
    return curve + steps_of(trainer, parallel, range(SKIPPED + 1, SKIPPED + 1 + steps))


def curve(overrides: list[str], steps: int) -> Curve:
    """Of a run of the quickstart with these overrides, on the ranks that are here."""
    trainer, parallel = start(_open(load_config(CONFIG, overrides).model_dump_json()).config)
    return steps_of(trainer, parallel, range(steps))


def run_job(inputs: RunInputs, *evaluation: Any) -> None:
    """Run a job without drawing the loss curve, which takes as long as ten steps of a small model."""
    with patch.object(job, "plot_loss"):
        run.train(inputs, *evaluation)


def train_job(overrides: list[str]) -> None:
    """What pretrain_gpt.py does with the quickstart's config, on a rank that is in a job already."""
    config = load_config(CONFIG, overrides)
    check_layout(config, dist.get_world_size())
    inputs = open_inputs(config, "test")
    check_run(inputs)
    run_job(inputs)


Shard = tuple[str, tuple[int, ...], Tensor, Tensor]
"""Name and shape of a global tensor; positions of elements in it, counted row by row; their values."""


def _located(prefix: str, shard: FlatShard, values: Tensor) -> Iterator[Shard]:
    """Which elements of which global tensors the flat `values` of `shard` are."""
    positions, owners = [], []
    pieces = spec_of(shard.param).shards
    for i, piece in enumerate(pieces):
        position = torch.arange(math.prod(piece.global_shape), dtype=torch.int32).view(piece.global_shape)
        own = position[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))].flatten()
        positions.append(own)
        owners.append(torch.full_like(own, i))
    position, owner = (torch.cat(x)[shard.start : shard.end] for x in (positions, owners))
    assert position.shape == values.shape
    for i, piece in enumerate(pieces):
        yield prefix + piece.name, piece.global_shape, position[owner == i], values[owner == i].clone()


def shards_of(trainer: RankTrainer) -> list[Shard]:
    """All state of this rank: weights, optimizer and FP8. Made without the code that saves and loads checkpoints."""
    trainer.strategy.wait()
    released = trainer.optimizer.released
    whole = [FlatShard(p, 0, p.numel()) for p in trainer.strategy.params if p not in released]
    flat = [("model.", [(shard, shard.view(shard.param.detach())) for shard in whole])]
    flat.append(("model.", trainer.optimizer.released_values()))
    flat += [(f"optimizer.{key}.", found) for key, found in trainer.optimizer.state().items()]
    shards = [located for prefix, found in flat for item in found for located in _located(prefix, *item)]
    constants = {f"model.{name}": values for name, values in trainer.constants.items()}
    for name, tensor in {**constants, **trainer.loss_scale, **trainer.fp8.state_dict()}.items():
        shards.append((name, tuple(tensor.shape), torch.arange(tensor.numel()), tensor.flatten().clone()))
    return shards


@dataclass
class RankResult:
    """What one rank hands back of a run."""

    curve: Curve
    shards: list[Shard]
    elements: dict[str, int]
    """How many this rank has, of the model: in optimizer state by key, in `weights`, `gradients`, and storage of the
    `released` weights; how many of these there are; and graphs' captures and replays."""
    records: list[Any] = field(default_factory=list)
    """FP8 health of the last step."""


def result_of(trainer: RankTrainer, curve: Curve) -> RankResult:
    elements = {key: sum(t.numel() for _, t in found) for key, found in trainer.optimizer.state().items()}
    elements["weights"] = sum(p.numel() for p in trainer.strategy.params)
    elements["gradients"] = sum(buffer.numel() for buffer in trainer.strategy.gradients)
    released = trainer.strategy.fp8_weights
    elements["released"] = len(released)
    elements["released storage"] = sum(p.untyped_storage().nbytes() // p.element_size() for p in released)
    if isinstance(trainer.graphs, RerunGraphs):
        elements |= {"captures": trainer.graphs.rerun.captures, "replays": trainer.graphs.rerun.replays}
    return RankResult(curve, shards_of(trainer), elements, trainer.fp8_records)


def _train(config: Config, steps: int) -> RankResult:
    trainer, parallel = start(config)
    return result_of(trainer, train(trainer, parallel, steps))


def train_and_save(config: Config, source: str | None, folder: str, steps: int = 2) -> tuple[RankTrainer, RankResult]:
    """Train `steps` steps, or load the checkpoint after them from `source`; save; as many more steps.

    The result has the state in the checkpoint, and the curve of the steps after it.
    """
    trainer, parallel = start(config)
    if source is None:
        steps_of(trainer, parallel, range(steps))
    else:
        assert load_latest(trainer, Path(source)) == steps
    save_state(trainer, Path(folder), steps, None)
    result = result_of(trainer, [])
    result.curve = steps_of(trainer, parallel, range(steps, 2 * steps))
    return trainer, result


def _saved_result(config: Config, source: str | None, folder: str) -> RankResult:
    return train_and_save(config, source, folder)[1]


# --- in the test's process -------------------------------------------------------------------------------------------


def assembled(shards: Iterable[list[Shard]]) -> dict[str, Tensor]:
    """The whole tensors from all ranks' shards. Where several ranks hold an element, they must hold the same bits."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for name, shape, position, values in (shard for found in shards for shard in found):
        if name not in whole:
            whole[name] = torch.zeros(math.prod(shape), dtype=values.dtype).view(shape)
            filled[name] = torch.zeros(math.prod(shape), dtype=torch.bool)
        assert whole[name].shape == shape
        there = filled[name][position]
        assert torch.equal(whole[name].view(-1)[position][there], values[there]), f"two values of {name}"
        whole[name].view(-1)[position] = values
        filled[name][position] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    assert not holes, f"no rank has all of {holes}"
    return whole


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of dtype, shape and bits of each tensor."""
    return {name: _digest(t) for name, t in tensors.items()}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    source = CheckpointReader(step_folder(checkpoint_folder(folder), step))
    return {name: source.read(name) for name in source.tensors}


@dataclass(frozen=True)
class Outcome:
    """What is known of a run: its curve, digests of its final state by name, and what each rank held."""

    curve: Curve
    state: dict[str, str]
    elements: list[dict[str, int]]
    records: list[Any]

    @classmethod
    def of(cls, ranks: list[RankResult]) -> Outcome:
        assert all(rank.curve == ranks[0].curve for rank in ranks), "ranks report different losses"
        state = digests(assembled(rank.shards for rank in ranks))
        return cls(ranks[0].curve, state, [rank.elements for rank in ranks], ranks[0].records)


@dataclass(frozen=True)
class Saved:
    """A run that left a checkpoint in `folder`: all its tensors at that point, and the steps after it."""

    folder: Path
    tensors: dict[str, Tensor]
    curve: Curve


class Runs:
    """Runs of a session, each computed once. Use through the fixture `runs`."""

    def __init__(self, world: World, data: QuickstartData, folder: Path) -> None:
        self.world, self.data, self.folder = world, data, folder
        self.count = 0
        self._outcome = functools.lru_cache(maxsize=None)(self._run)
        self.saved = functools.lru_cache(maxsize=None)(self._save)

    def of(self, preset: Preset, steps: int = STEPS, **more: Mapping[str, Any]) -> Outcome:
        """The run of a preset, with `more` keys by section."""
        settings = self._config(preset, merged(preset.sections, more))
        return self._outcome(settings.model_dump_json(), preset.ranks, steps)

    def one_rank(self, preset: Preset, steps: int = STEPS) -> Outcome:
        """The same computation on one rank, in the plainest way."""
        return self._outcome(self._config(preset, without_execution(preset)).model_dump_json(), 1, steps)

    def _config(self, preset: Preset, sections: Sections) -> Config:
        return config(**merged(sections, self.data.sections if TEXT in preset else {}))

    def _run(self, settings: str, ranks: int, steps: int) -> Outcome:
        return Outcome.of(self.world.run(_train, Config.model_validate_json(settings), steps, ranks=ranks))

    def _save(self, preset: Preset, source: Path | None = None) -> Saved:
        """Trained two steps, or loaded from `source`, which has another seed; saved, and two more steps."""
        self.count += 1
        folder = self.folder / str(self.count)
        settings, path = config_of(preset, seed=1 if source is None else 7), None if source is None else str(source)
        results = self.world.run(_saved_result, settings, path, str(folder), ranks=preset.ranks)
        assert all(result.curve == results[0].curve for result in results), "ranks report different losses"
        return Saved(folder, assembled(result.shards for result in results), results[0].curve)


class OneRank(Generic[T]):
    """Results of `function` for presets on one rank in the plainest execution, each computed once."""

    def __init__(self, world: World, function: Callable[[Preset], T]) -> None:
        self._world, self._function = world, function
        self._results: dict[str, T] = {}

    def __call__(self, preset: Preset) -> T:
        """Return the result for the model and training of `preset`, whatever its layout."""
        plain = Preset(("one",), without_execution(preset))
        settings = config_of(plain).model_dump_json()
        if settings not in self._results:
            (self._results[settings],) = self._world.run(self._function, plain, ranks=1)
        return self._results[settings]


# --- the quickstart's config -----------------------------------------------------------------------------------------

ONE_RANK = ["parallel.tensor=1", "parallel.pipeline=1"]
LAYOUTS = {
    "tp2-sp": (2, ["parallel.tensor=2", "parallel.pipeline=1"]),
    "pp2": (2, ["parallel.tensor=1", "parallel.pipeline=2"]),
    "dp2": (2, ONE_RANK),
}
SMALL = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=8",
    "training.eval_interval=0",
    "fp8.amax_history_len=4",
    # At 3e-3 so small a model trains at the edge of stability, where a last-bit difference grows tenfold a step.
    "optimizer.learning_rate=1.0e-3",
    "optimizer.min_learning_rate=1.0e-4",
]
