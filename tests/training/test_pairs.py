"""Every way to train, alone and with every other, gives the losses and gradient norms of the plain run.

One table of options; the reference is one process without any of them but those keys that decide what is computed
(`COMPUTING`: the FP8 recipe, the moments' dtype). Two options are run together on at most four ranks, or refused by the
config with a reason, which `REFUSED` lists. To add an option, add a line to `OPTIONS`, and what cannot go with it to
`REFUSED`.

How close, relative, as in `test_equivalence`:

    fp32     losses and norms to 1e-5, all steps
    FP8      the same FP8 values with float64 sums: two steps to 1e-6 and norms to 1e-5, since gradients are summed in
             fp32, in another order for each layout, and a value may cross a rounding boundary; then losses to 2e-3.
             So small a model's slices cut through blocks of 128, whose factors, powers of two, then differ and with
             them subnormal codes: the second step's norm is the first that notices (whole blocks give the same bits)
    bf16     weights in bf16: losses to 2e-3, norms to 2e-2. Moments rounded to 8 bits, or to 4 at random, as FP8, after
             two exact steps. Gradients that travel in bf16 or FP8 are other gradients, whose norm is
             the same to 2e-2 and whose first loss, before any update, is the same to 1e-5. FP8 rounds each element that
             travels by 1/16 at most, by 1/40 in the root mean square (uniform in a step of 1/8 at magnitudes 1 to 2),
             and independently; so the norm changes by half the square of that, 3e-4, and less for the own share

CUDA graphs are replayed by `test_cuda_graphs`' stand-in. In the fast suite: each option alone and `FAST` pairs, for
four steps; all pairs are marked slow and take ten.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.config import Config, ConfigError, check_layout
from megafp8.data.samples import Batch, next_token_batch
from megafp8.parallel_state import ParallelState, initialize_distributed, initialize_model_parallel
from megafp8.training.cuda_graphs import MicrobatchGraphs
from megafp8.training.fp8_config import check_recipe
from megafp8.training.trainer import Trainer
from tests.training.test_cuda_graphs import Curve, HighPrecisionFallback
from tests.world import World

FAST_STEPS, SLOW_STEPS = 4, 10
ALL = SLOW_STEPS
COMPUTING = ("fp8.recipe", "fp8.smooth_swiglu", "training.precision", "optimizer.moments_dtype")
BASE: dict[str, Any] = {
    "name": "pairs", "device": "auto",
    "model": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128,
        "vocab_size": 64,
    },
    "parallel": {"bucket_mib": 0.1},  # some five buckets
    "fp8": {"amax_history_len": 4},
    "training": {"steps": 20, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 4, "precision": "fp32"},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"train": ["none"]},
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """What one option `sets` in the config, and what it `needs` where the other of a pair does not say otherwise.

    Two options of one `choice` exclude each other. `data`: data-parallel ranks. `sharp`: of how many steps losses, and
    norms, are the same but for the order of sums.
    """

    sets: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    choice: str | None = None
    data: int = 1
    sharp: tuple[int, int] = (ALL, ALL)


def _schedule(name: str, chunks: int = 1) -> Option:
    sets = {"parallel.schedule": name, "parallel.pipeline": 2, "parallel.virtual_pipeline": chunks}
    return Option(sets, choice="schedule")


def _recipe(name: str, sharp: tuple[int, int] = (2, 2)) -> Option:
    sets = {**FP8, "fp8.recipe": name}
    return Option(sets, choice="recipe", sharp=sharp)


FP8 = {"training.precision": "fp64"}
SELECTED = ["norms", "activation", "attention"]
OPTIONS = {
    "1f1b": _schedule("1f1b"),
    "interleaved": _schedule("interleaved", 2),
    "zb-h1": _schedule("zb-h1"),
    "zb-v": _schedule("zb-v", 2),
    "dualpipev": _schedule("dualpipev", 2),
    "data": Option(data=2),
    "late-reduce": Option({"parallel.overlap_grad_reduce": False}, data=2),
    "zero": Option({"parallel.zero": 1}, data=2, choice="zero"),
    "zero-late": Option({"parallel.zero": 1, "parallel.overlap_param_gather": False}, data=2, choice="zero"),
    "bf16-reduce": Option({"optimizer.reduce_dtype": "bf16"}, choice="reduce", data=2, sharp=(1, 0)),
    "fp8-reduce": Option(
        {"optimizer.reduce_dtype": "fp8"}, {"parallel.zero": 1}, choice="reduce", data=2, sharp=(1, 0)
    ),
    "bf16-moments": Option({"optimizer.moments_dtype": "bf16"}, sharp=(2, 2), choice="moments"),
    "fp8-moments": Option({"optimizer.moments_dtype": "fp8"}, sharp=(2, 2), choice="moments"),
    "remainders": Option({"optimizer.store_param_remainders": True}, {"training.precision": "bf16"}, sharp=(0, 0)),
    "tensor": Option({"parallel.tensor": 2, "parallel.sequence_parallel": False}, choice="tensor"),
    "tensor-sequence": Option({"parallel.tensor": 2}, choice="tensor"),
    "tensor-overlap": Option({"parallel.overlap_tensor": "chunked"}, {"parallel.tensor": 2}),
    "context": Option({"parallel.context": 2}),
    "full": Option({"parallel.recompute": "full"}, choice="recompute"),
    "selective": Option({"parallel.recompute": "selective", "parallel.recompute_ops": SELECTED}, choice="recompute"),
    "offload": Option({"parallel.offload": True}),
    "graphs": Option({"training.cuda_graphs": True}),
    "delayed": _recipe("delayed"),
    "current": _recipe("current"),
    "blockwise": _recipe("blockwise", sharp=(2, 1)),
    "smooth": Option({"fp8.smooth_swiglu": True}, {**FP8, "fp8.recipe": "delayed"}, sharp=(2, 2)),
    "fp8-parameters": Option(
        {"fp8.param_gather": True}, {**FP8, "fp8.recipe": "current", "parallel.zero": 1}, data=2, sharp=(2, 2)
    ),
}  # fmt: skip
REFUSED = {
    **{
        ("graphs", name): "a graph holds no communication, and parallel.pipeline is 2"
        for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev")
    },
    **{
        ("remainders", name): "it is for bf16 weights, and training.precision is fp64"
        for name in ("delayed", "current", "blockwise", "smooth")
    },
    ("remainders", "fp8-parameters"): "fp8.param_gather keeps FP8 codes and fp32 masters",
    ("graphs", "tensor"): "a graph holds no communication, and parallel.tensor is 2",
    ("graphs", "tensor-sequence"): "a graph holds no communication, and parallel.tensor is 2",
    ("graphs", "tensor-overlap"): "a graph holds no communication, and parallel.tensor is 2",
    ("tensor", "tensor-overlap"): "parallel.sequence_parallel is false, so every rank has all tokens",
    ("graphs", "context"): "a graph holds no communication, and parallel.context is 2",
    ("graphs", "offload"): "a CUDA graph holds no copies to the host that last from one replay to the next",
    ("blockwise", "smooth"): "fp8.recipe blockwise has finer scales for an MLP's input than one per tensor",
    ("blockwise", "fp8-parameters"): "fp8.recipe blockwise has finer scales for weights than one per tensor",
}
FAST = [
    ("1f1b", "offload"),
    ("interleaved", "context"),
    ("zb-h1", "full"),
    ("zb-v", "tensor-sequence"),
    ("dualpipev", "zero"),
    ("late-reduce", "context"),
    ("zero", "graphs"),
    ("zero-late", "bf16-moments"),
    ("bf16-reduce", "data"),
    ("tensor", "smooth"),
    ("current", "zero"),
    ("delayed", "zb-v"),
    ("selective", "blockwise"),
    ("tensor-overlap", "1f1b"),
    ("fp8-parameters", "zb-v"),
    ("fp8-moments", "tensor-sequence"),
    ("remainders", "zero"),
    ("fp8-reduce", "zb-h1"),
]

Names = tuple[str, ...]


def _key(names: Names) -> frozenset[str]:
    return frozenset(names)


PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if OPTIONS[pair[0]].choice is None or OPTIONS[pair[0]].choice != OPTIONS[pair[1]].choice
]
RUN = [pair for pair in PAIRS if _key(pair) not in map(_key, REFUSED)]


def keys_of(names: Names) -> dict[str, Any]:
    """What these options set. An option of a later line never sets a key of another otherwise, as `choice` sees to."""
    needed = [OPTIONS[name].needs for name in names]
    return {key: value for part in (*needed, *(OPTIONS[name].sets for name in names)) for key, value in part.items()}


def settings(keys: Mapping[str, Any], **more: Any) -> Config:
    """The base with these keys."""
    sections = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for path, value in keys.items():
        section, key = path.split(".")
        sections[section][key] = value
    return Config.model_validate({**sections, **more})


def ranks_of(names: Names) -> int:
    p = settings(keys_of(names)).parallel
    return p.tensor * p.pipeline * p.context * max([1, *(OPTIONS[name].data for name in names)])


def batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """This rank's micro-batches of a step: they count in strides modulo 16; zeros end a document and do not count."""
    t, data = config.training, parallel.data
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, 16, (t.global_batch_size, 1), generator=generator) for _ in range(2))
    tokens = (start + stride * torch.arange(t.seq_length + 1)) % 16
    micro_batches = tokens.split(t.micro_batch_size)[data.rank :: data.size]
    return [next_token_batch(x, 0, reset_at_documents=False, mask_eod_loss=True) for x in micro_batches]


def _train(keys: Mapping[str, Any], steps: int) -> Curve:
    config = settings(keys)
    check_layout(config, dist.get_world_size())
    graphs = config.training.cuda_graphs
    config = settings({**keys, "training.cuda_graphs": False})
    p = config.parallel
    parallel = initialize_model_parallel(
        p.tensor, p.pipeline, p.virtual_pipeline, p.context, device=initialize_distributed("cpu")
    )
    trainer = Trainer(config, parallel)
    if graphs:
        trainer.graphs = MicrobatchGraphs(trainer.fp8, parallel.device, eager_steps=1, capture=HighPrecisionFallback())
    for stage in trainer.stages:
        if stage.offload is not None:
            stage.offload.smallest = 0
    curve = []
    for step in range(steps):
        loss, result = trainer.train_step(step, batches(step, config, parallel))
        assert not result.skipped
        curve.append((loss.mean, result.grad_norm))
    return curve


class Runs:
    """Runs of options, each reference once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._plain = functools.lru_cache(maxsize=None)(lambda keys, steps: self._curve(dict(keys), steps, ranks=1))

    def _curve(self, keys: Mapping[str, Any], steps: int, ranks: int) -> Curve:
        curves = self.world.run(_train, keys, steps, ranks=ranks, timeout=240)
        assert all(other == curves[0] for other in curves), "ranks report different losses"
        return curves[0]

    def of(self, names: Names, steps: int) -> Curve:
        return self._curve(keys_of(names), steps, ranks_of(names))

    def plain(self, names: Names, steps: int) -> Curve:
        found = keys_of(names)
        return self._plain(tuple((key, found[key]) for key in COMPUTING if key in found), steps)


@pytest.fixture(scope="module")
def runs(world4: World) -> Runs:
    return Runs(world4)


def _compare(runs: Runs, names: Names, steps: int) -> None:
    expected, found = runs.plain(names, steps), runs.of(names, steps)
    assert expected[-1][0] < 0.99 * expected[0][0], "the reference does not learn"
    sharp_losses, sharp_norms = (min(OPTIONS[name].sharp[i] for name in names) for i in range(2))
    exact = 1e-5 if settings(keys_of(names)).training.precision == "fp32" else 1e-6
    for step, ((loss, norm), (expected_loss, expected_norm)) in enumerate(zip(found, expected, strict=True)):
        assert loss == pytest.approx(expected_loss, rel=exact if step < sharp_losses else 2e-3), f"loss of step {step}"
        assert norm == pytest.approx(expected_norm, rel=1e-5 if step < sharp_norms else 2e-2), f"norm of step {step}"


@pytest.mark.parametrize("name", OPTIONS)
def test_alone(runs: Runs, name: str) -> None:
    _compare(runs, (name,), FAST_STEPS)


@pytest.mark.parametrize("pair", FAST[::2], ids=" ".join)
def test_together(runs: Runs, pair: Names) -> None:
    _compare(runs, pair, FAST_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("pair", RUN, ids=" ".join)
def test_every_pair(runs: Runs, pair: Names) -> None:
    _compare(runs, pair, SLOW_STEPS)


def test_the_fast_pairs_cover_the_options() -> None:
    assert {name for pair in FAST for name in pair} == OPTIONS.keys()
    assert {_key(pair) for pair in FAST} <= {_key(pair) for pair in RUN}
    assert max(ranks_of(pair) for pair in RUN) == 4


def check(config: Config, ranks: int) -> None:
    check_layout(config, ranks)
    fp8 = config.fp8.model_copy(update={"amax_history_len": 1024})  # all have that of delayed scaling
    check_recipe(config.model_copy(update={"fp8": fp8}), "run.yaml")


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_what_cannot_work_is_refused_before_any_process_group(pair: Names) -> None:
    """With its own reason each, wherever the run is started; all others are accepted."""
    assert not dist.is_initialized()
    reasons = {_key(names): reason for names, reason in REFUSED.items()}
    config = settings(keys_of(pair))
    if _key(pair) not in reasons:
        check(config, ranks_of(pair))
        return
    with pytest.raises(ConfigError) as error:
        check(config, ranks_of(pair))
    assert reasons[_key(pair)] in str(error.value)
    assert "try " in str(error.value)


def test_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="device is cpu, which has no CUDA graphs"):
        check_layout(settings(keys_of(("graphs",)), device="cpu"), 1)
