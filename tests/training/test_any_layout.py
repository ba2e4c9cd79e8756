"""Saved in layout A, loaded in layout B: the same values bit for bit, and A → B → A is as if nothing had happened.

The truth is put together from what each rank of A holds, without the loader: the elements of every global tensor are
numbered, the numbers are cut as the parameters' specs say, and fragments are cut from them by position. Where several
ranks hold an element, they must hold the same bits. Each model that loads begins with another seed, so a value that
was not loaded is a wrong one.

Then B trains on. Its losses are those of A within the tolerance of `test_equivalence`; those of A, back from B, are
A's own bit for bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint import CheckpointReader
from megafp8.checkpoint.store import step_folder
from megafp8.config import Config, check_layout
from megafp8.data.samples import Batch, next_token_batch
from megafp8.distributed.sharding import FlatShard, spec_of
from megafp8.parallel_state import ParallelState, initialize_distributed, initialize_model_parallel
from megafp8.training.state import checkpoint_folder, load_latest, save_state
from megafp8.training.trainer import Trainer
from tests.marks import slow_but
from tests.world import World

SAVED, END = 2, 4  # steps before the save, and in all
VOCABULARY = 100  # padded to 128
OTHER_SEED = 7

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 128,
        "vocab_size": VOCABULARY, "vocab_multiple": 64,
    },
    "training": {"steps": 20, "seq_length": 8, "global_batch_size": 4, "precision": "fp32"},
    "optimizer": {"learning_rate": 1e-3},
    "parallel": {"bucket_mib": 0.15},  # some five buckets
    "data": {"train": ["none"]},
}  # fmt: skip
GPT2 = {
    "position_embedding": "learned", "normalization": "layernorm", "activation": "gelu_tanh", "linear_bias": True,
    "num_query_groups": 8,
}  # fmt: skip
DELAYED = {"recipe": "delayed", "amax_history_len": 3}
BF16_MODEL = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}  # a CPU is slow at bf16
BF16 = {"precision": "bf16"}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {},
    "llama-tied": {"model": {"tie_embeddings": True}},
    "gpt2-tied": {"model": {**GPT2, "tie_embeddings": True}},
    "gpt2": {"model": GPT2},
    "qwen": {"model": {"qkv_bias": True, "qk_norm": True}},
    "delayed": {"fp8": {**DELAYED, "smooth_swiglu": True}},
    "delayed-gpt2-tied": {"fp8": DELAYED, "model": {**GPT2, "tie_embeddings": True}},
    "fp32-bf16-moments": {"optimizer": {"learning_rate": 1e-3, "moments_dtype": "bf16"}},
    "bf16": {"training": BF16, "model": BF16_MODEL},
    "bf16-bf16-moments": {
        "training": BF16, "model": BF16_MODEL, "optimizer": {"learning_rate": 1e-3, "moments_dtype": "bf16"},
    },
}  # fmt: skip
ROUNDING = ("delayed", "delayed-gpt2-tied", "fp32-bf16-moments", "bf16", "bf16-bf16-moments")

VPP = {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2, "sequence_parallel": False}),
    "tp2-sp": (2, {"tensor": 2}),
    "tp4": (4, {"tensor": 4, "sequence_parallel": False}),
    "tp4-sp": (4, {"tensor": 4}),
    "pp2": (2, {"pipeline": 2}),
    "pp4": (4, {"pipeline": 4}),
    "pp2-uneven": (2, {"pipeline": 2, "layers_per_stage": [3, 1]}),
    "pp2-vpp2": (2, VPP),
    "pp2-v": (2, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zb-v"}),
    "pp2-vpp2-dp2-zero": (4, {**VPP, "zero": 1}),
    "dp2": (2, {}),
    "dp2-zero": (2, {"zero": 1}),
    "dp4-zero": (4, {"zero": 1}),
    "cp2": (2, {"context": 2}),
    "cp2-dp2-zero": (4, {"context": 2, "zero": 1}),
    "tp2-sp-cp2": (4, {"tensor": 2, "context": 2}),
    "tp2-sp-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-pp2-uneven": (4, {"tensor": 2, "sequence_parallel": False, "pipeline": 2, "layers_per_stage": [1, 3]}),
    "tp2-sp-pp2-vpp2": (4, {"tensor": 2, **VPP}),
    "tp2-dp2": (4, {"tensor": 2}),
    "tp2-sp-dp2-zero": (4, {"tensor": 2, "zero": 1}),
    "pp2-dp2-zero": (4, {"pipeline": 2, "zero": 1}),
    "tp2-sp-pp2-dp2-zero": (8, {"tensor": 2, "pipeline": 2, "zero": 1}),
    "tp4-pp2": (8, {"tensor": 4, "pipeline": 2}),
}
PAIRS = [
    ("llama", "one", "tp2-sp-pp2"),
    ("llama", "one", "pp2-vpp2-dp2-zero"),
    ("llama", "tp2-sp-pp2", "dp4-zero"),
    ("llama", "tp4-sp", "pp4"),
    ("llama", "cp2-dp2-zero", "tp2-sp-cp2"),
    ("llama-tied", "pp2-v", "tp4"),
    ("llama-tied", "pp2-dp2-zero", "tp2-sp-pp2-vpp2"),
    ("llama-tied", "pp4", "tp2-sp-dp2-zero"),
    ("gpt2-tied", "tp2-sp-pp2", "pp2-dp2-zero"),
    ("gpt2-tied", "tp2", "pp2-uneven"),
    ("gpt2", "tp2", "pp2-vpp2"),
    ("qwen", "tp2-sp", "pp2-v"),
    ("qwen", "cp2", "tp4-sp"),
    ("delayed", "one", "tp2-sp-dp2-zero"),
    ("delayed", "tp2-sp-pp2", "dp2-zero"),
    ("delayed", "pp2-vpp2-dp2-zero", "tp2-pp2-uneven"),
    ("delayed-gpt2-tied", "pp2-v", "tp2-sp"),
    ("fp32-bf16-moments", "tp2-sp-dp2-zero", "pp2"),
    ("bf16", "tp2-sp-pp2", "dp2-zero"),
    ("bf16-bf16-moments", "pp2-dp2-zero", "tp2"),
]
SLOW_PAIRS = [
    ("gpt2-tied", "dp2-zero", "tp2-pp2-uneven"),
    ("bf16", "dp4-zero", "pp2-vpp2"),
    ("gpt2", "tp2-dp2", "pp4"),
    ("llama-tied", "tp2-sp-pp2-dp2-zero", "tp4-pp2"),
    ("delayed", "pp2-uneven", "tp4-sp"),
    ("gpt2", "tp4", "pp2-vpp2"),
    ("delayed", "tp4-pp2", "tp2-sp-pp2-dp2-zero"),
    ("gpt2-tied", "one", "tp2-sp-pp2-dp2-zero"),
    ("bf16-bf16-moments", "tp2-sp-pp2-dp2-zero", "cp2-dp2-zero"),
    *((model, "tp2-sp-pp2", "cp2-dp2-zero") for model in MODELS),
]

# --- on the ranks ----------------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]


def settings(model: str, layout: str, seed: int) -> Config:
    """Of `model` in `layout`, with two micro-batches a step where each rank has two samples or more."""
    ranks, parallel = LAYOUTS[layout]
    data = ranks // math.prod(parallel.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    training = {**MODELS[model].get("training", {}), "micro_batch_size": 2 if data == 1 else 1}
    changes = {**MODELS[model], "parallel": parallel, "training": training}
    sections = {name: {**BASE.get(name, {}), **changes.get(name, {})} for name in BASE.keys() | changes.keys()}
    return Config.model_validate({"name": "test", "seed": seed, "device": "cpu", **sections})


def batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """This rank's part of a global batch that is the same in every layout."""
    t, data = config.training, parallel.data
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (t.global_batch_size, t.seq_length + 1), generator=generator)
    return [
        next_token_batch(part, None, reset_at_documents=False, mask_eod_loss=False)
        for part in tokens.chunk(data.size)[data.rank].split(t.micro_batch_size)
    ]


Shard = tuple[str, tuple[int, ...], Tensor, Tensor]
"""Global name and shape, positions of elements in the flat global tensor, their values."""


def _located(prefix: str, fragment: FlatShard, values: Tensor) -> list[Shard]:
    """Which elements of which global tensors the flat `values` of `fragment` are."""
    numbers, owners = [], []
    pieces = spec_of(fragment.param).shards
    for i, piece in enumerate(pieces):
        number = torch.arange(math.prod(piece.global_shape)).view(piece.global_shape)
        cut = number[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
        numbers.append(cut.flatten())
        owners.append(torch.full((cut.numel(),), i))
    number, owner = (torch.cat(x)[fragment.start : fragment.end] for x in (numbers, owners))
    assert number.shape == values.shape
    return [
        (prefix + piece.name, piece.global_shape, number[owner == i], values[owner == i])
        for i, piece in enumerate(pieces)
    ]


def shards(trainer: Trainer) -> list[Shard]:
    """All that this rank holds."""
    trainer.wait_for_weights()
    found = []
    for param in trainer.params:
        found += _located("model.", FlatShard(param, 0, param.numel()), param.detach().flatten())
    for key, fragments in trainer.optimizer.state().items():
        for fragment, values in fragments:
            found += _located(f"optimizer.{key}.", fragment, values)
    for name, tensor in trainer.fp8.state_dict().items():
        found.append((name, tuple(tensor.shape), torch.arange(tensor.numel()), tensor.flatten()))
    return found


def run(config: Config, source: str | None, folder: str) -> Curve:
    """Train to the save, or load from `source`; save into `folder`; losses and gradient norms of the steps after."""
    check_layout(config, dist.get_world_size())
    p = config.parallel
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    trainer = Trainer(config, parallel)

    def steps(first: int, end: int) -> Curve:
        results = [trainer.train_step(step, batches(step, config, parallel)) for step in range(first, end)]
        return [(loss.mean, result.grad_norm) for loss, result in results]

    if source is None:
        steps(0, SAVED)
    else:
        assert load_latest(trainer, Path(source)) == SAVED
    save_state(trainer, Path(folder), SAVED, None)
    torch.save(shards(trainer), Path(folder) / f"shards-{dist.get_rank()}.pt")
    return steps(SAVED, END)


# --- in the test's process -------------------------------------------------------------------------------------------


def assembled(folder: Path) -> dict[str, Tensor]:
    """The whole tensors from all ranks' shards."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for file in sorted(folder.glob("shards-*.pt")):
        for name, shape, number, values in torch.load(file):
            if name not in whole:
                whole[name] = torch.zeros(math.prod(shape), dtype=values.dtype).view(shape)
                filled[name] = torch.zeros(math.prod(shape), dtype=torch.bool)
            assert whole[name].shape == shape
            there = filled[name][number]
            assert torch.equal(whole[name].view(-1)[number][there], values[there]), f"two values of {name}"
            whole[name].view(-1)[number] = values
            filled[name][number] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    assert not holes, f"no rank has all of {holes}"
    return whole


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    source = CheckpointReader(step_folder(checkpoint_folder(folder), SAVED))
    return {name: source.read(name) for name in source.tensors}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@dataclass(frozen=True)
class Outcome:
    """What a run left in `folder`: its whole state at the save, and the steps after it."""

    folder: Path
    truth: dict[str, Tensor]
    curve: Curve


class Runs:
    """Runs layouts; each as a source of checkpoints only once."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.count = world, folder, 0
        self.saved = functools.lru_cache(maxsize=None)(functools.partial(self.on, source=None))

    def on(self, model: str, layout: str, source: Path | None) -> Outcome:
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        config = settings(model, layout, seed=1 if source is None else OTHER_SEED)
        ranks = LAYOUTS[layout][0]
        curves = self.world.run(run, config, None if source is None else str(source), str(folder), ranks=ranks)
        assert all(other == curves[0] for other in curves), "ranks report different losses"
        return Outcome(folder, assembled(folder), curves[0])


@pytest.fixture(scope="module")
def runs(world4: World, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(world4, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs8(world8: World, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(world8, tmp_path_factory.mktemp("runs"))


def assert_training_goes_on(found: Curve, expected: Curve, rounds: bool) -> None:
    """Steps of another layout: `test_equivalence`'s tolerance of fp32, or where values are rounded, that of FP8."""
    for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
        assert a_loss == pytest.approx(b_loss, rel=2e-3 if rounds else 1e-5)
        if not rounds:
            assert a_norm == pytest.approx(b_norm, rel=1e-5)


def there_and_back(runs: Runs, model: str, a: str, b: str) -> None:
    saved = runs.saved(model, a)
    moved = [name for name, tensor in saved.truth.items() if name.startswith("optimizer.exp_avg") and tensor.any()]
    assert len(moved) == 2 * sum(name.startswith("model.") for name in saved.truth)
    assert any(name.startswith("optimizer.master.") for name in saved.truth) == model.startswith("bf16")
    there = runs.on(model, b, saved.folder)
    assert_same(there.truth, saved.truth)
    assert_training_goes_on(there.curve, saved.curve, rounds=model in ROUNDING)
    back = runs.on(model, a, there.folder)
    assert_same(back.truth, saved.truth)
    for outcome in (saved, back):
        assert_same(saved_tensors(outcome.folder), saved.truth)
    assert back.curve == saved.curve


@pytest.mark.parametrize(("model", "a", "b"), slow_but(PAIRS, *PAIRS[::4]))
def test_there_and_back(runs: Runs, model: str, a: str, b: str) -> None:
    there_and_back(runs, model, a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "a", "b"), SLOW_PAIRS)
def test_there_and_back_with_more_ranks_and_models(runs8: Runs, model: str, a: str, b: str) -> None:
    there_and_back(runs8, model, a, b)
