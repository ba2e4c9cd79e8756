"""One seed, any layout, one model: losses and gradient norms of every layout against those of a single process.

Real text, real ranks. Three levels, each as sharp as its arithmetic allows:

    fp32            10 steps, losses and gradient norms to 1e-5 relative
    FP8 in fp64     the same FP8 values with float64 sums: 10 steps to 1e-8, where a wrong amax group cannot hide
    FP8 in fp32     losses to 2e-3: a sum in another order moves a value over a rounding boundary of FP8 now and then

and the FP8 curve stays within 2% of fp32's after 50 steps.
"""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

from megafp8.config import check_layout, load_config
from megafp8.data.sampler import batches
from megafp8.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.inputs import open_inputs
from megafp8.training.trainer import Trainer
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, QuickstartData
from tests.world import World

Curve = list[tuple[float, float]]

LAYOUTS = {
    "tp2": (2, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.sequence_parallel=false"]),
    "tp2-sp": (2, ["parallel.tensor=2", "parallel.pipeline=1"]),
    "pp2": (2, ["parallel.tensor=1", "parallel.pipeline=2"]),
    "pp4": (4, ["parallel.tensor=1", "parallel.pipeline=4"]),
    "dp2": (2, ["parallel.tensor=1", "parallel.pipeline=1"]),
    "tp2-sp-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "dp2-pp2": (4, ["parallel.tensor=1", "parallel.pipeline=2"]),
}
CHUNKED = {
    "tp2-sp-chunked": (2, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.overlap_tensor=chunked"]),
    "tp4-sp-chunked": (4, ["parallel.tensor=4", "parallel.pipeline=1", "parallel.overlap_tensor=chunked"]),
}
SHARDED = {
    "dp2-fsdp": (2, ["parallel.tensor=1", "parallel.pipeline=1", "parallel.fsdp=true"]),
    "tp2-sp-dp2-fsdp": (4, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.fsdp=true"]),
}
UNEVEN = {
    "pp2-uneven": (2, ["parallel.tensor=1", "parallel.pipeline=2", "parallel.layers_per_stage=[1, 3]"]),
    "tp2-sp-pp2-uneven": (4, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.layers_per_stage=[3, 1]"]),
}
ALONE = ["parallel.tensor=1", "parallel.pipeline=1"]
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
GPT2 = [
    "model.position_embedding=learned",
    "model.normalization=layernorm",
    "model.activation=gelu_tanh",
    "model.linear_bias=true",
    "model.num_query_groups=8",
]
MODELS = {
    "llama": [],
    "llama-tied": ["model.tie_embeddings=true"],
    "gpt2": GPT2,
    "gpt2-tied": [*GPT2, "model.tie_embeddings=true"],
}


def curve(overrides: list[str], steps: int) -> Curve:
    """(loss, gradient norm) of each step of a run on the ranks that are here."""
    config = load_config(CONFIG, overrides)
    check_layout(config, dist.get_world_size())
    inputs = open_inputs(config, "test")
    device = initialize_distributed("cpu")
    p = config.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    trainer = Trainer(inputs.config, parallel)
    stream = batches(
        inputs.train,
        consumed_samples=0,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=parallel.data.rank,
        data_parallel_size=parallel.data.size,
        num_workers=0,
        eod_id=inputs.eod_id,
        reset_at_documents=config.data.reset_at_documents,
        mask_eod_loss=config.data.mask_eod_loss,
        pin_memory=False,
    )
    found = []
    for step in range(steps):
        loss, result = trainer.train_step(step, next(stream))
        assert not result.skipped
        found.append((loss.mean, result.grad_norm))
    return found


class Runs:
    """Runs curves, each single-process reference once."""

    def __init__(self, world: World, data: QuickstartData) -> None:
        self.world, self.data = world, data
        self.alone = functools.lru_cache(maxsize=None)(self._alone)

    def _alone(self, options: tuple[str, ...], steps: int) -> Curve:
        return self.on(1, [*options, *ALONE], steps)

    def on(self, ranks: int, options: list[str], steps: int) -> Curve:
        curves = self.world.run(curve, [*SMALL, *self.data.overrides, *options], steps, ranks=ranks, timeout=240)
        assert all(other == curves[0] for other in curves), "ranks report different losses"
        return curves[0]


@pytest.fixture(scope="module")
def runs(world4: World, quickstart_data: QuickstartData) -> Runs:
    return Runs(world4, quickstart_data)


def assert_close(found: Curve, expected: Curve, loss: float, norm: float | None) -> None:
    for step, ((a_loss, a_norm), (b_loss, b_norm)) in enumerate(zip(found, expected, strict=True)):
        assert a_loss == pytest.approx(b_loss, rel=loss), f"loss of step {step}"
        if norm is not None:
            assert a_norm == pytest.approx(b_norm, rel=norm), f"gradient norm of step {step}"


FP32 = ["fp8.recipe=none"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", slow_but(MODELS, "llama", "gpt2-tied"))
def test_fp32_equals_one_process(runs: Runs, model: str, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    expected = runs.alone((*FP32, *MODELS[model]), 10)
    assert expected[-1][0] < expected[0][0], "the reference does not learn"
    assert_close(runs.on(ranks, [*FP32, *MODELS[model], *options], 10), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", UNEVEN)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_uneven_stages_equal_one_process(runs: Runs, model: str, layout: str) -> None:
    ranks, options = UNEVEN[layout]
    expected = runs.alone((*FP32, *MODELS[model]), 10)
    assert_close(runs.on(ranks, [*FP32, *MODELS[model], *options], 10), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["dp2-fsdp", pytest.param("tp2-sp-dp2-fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2-tied", marks=pytest.mark.slow)])
def test_everything_in_shares_equals_one_process(runs: Runs, model: str, layout: str) -> None:
    ranks, options = SHARDED[layout]
    expected = runs.alone((*FP32, *MODELS[model]), 10)
    assert_close(runs.on(ranks, [*FP32, *MODELS[model], *options], 10), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["dp2-fsdp", pytest.param("tp2-sp-dp2-fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.slow), "delayed"])
def test_fp8_in_shares_stays_close(runs: Runs, recipe: str, layout: str) -> None:
    ranks, options = SHARDED[layout]
    fp8 = (f"fp8.recipe={recipe}",)
    found = runs.on(ranks, [*fp8, *options, "fp8.param_gather=true"], 10)
    assert_close(found, runs.alone(fp8, 10), 2e-3, None)


@pytest.mark.parametrize("layout", ["tp2-sp-chunked", pytest.param("tp4-sp-chunked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [["fp8.recipe=none"], ["fp8.recipe=delayed", "parallel.recompute=selective"]])
def test_products_in_chunks_equal_one_process(runs: Runs, options: list[str], layout: str) -> None:
    ranks, chunked = CHUNKED[layout]
    exact = (*options, "training.precision=fp64")
    assert_close(runs.on(ranks, [*exact, *chunked], 10), runs.alone(exact, 10), 1e-8, 1e-6)


@pytest.mark.parametrize("option", [
    "parallel.recompute=full",
    "parallel.overlap_grad_reduce=false",
    "parallel.bucket_mib=0.05",
])  # fmt: skip
def test_options_that_must_not_change_anything(runs: Runs, option: str) -> None:
    ranks, options = LAYOUTS["dp2-pp2"]
    assert_close(runs.on(ranks, [*FP32, *options, option], 10), runs.alone(tuple(FP32), 10), 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["tp2-sp", "dp2-pp2"])
def test_masked_labels_and_document_resets(runs: Runs, layout: str) -> None:
    """The number of tokens that count differs between ranks; the mean is over all of them."""
    masks = ["data.mask_eod_loss=true", "data.reset_at_documents=true", "training.z_loss=1e-4"]
    ranks, options = LAYOUTS[layout]
    assert_close(runs.on(ranks, [*FP32, *masks, *options], 10), runs.alone((*FP32, *masks), 10), 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "tp2-sp-pp2", pytest.param("tp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_is_the_same_computation(runs: Runs, recipe: str, layout: str) -> None:
    """With float64 sums nothing is left to differ but which amax a scale comes from."""
    exact = (f"fp8.recipe={recipe}", "training.precision=fp64")
    ranks, options = LAYOUTS[layout]
    assert_close(runs.on(ranks, [*exact, *options], 10), runs.alone(exact, 10), 1e-8, 1e-6)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_under_data_parallelism_starts_the_same(runs: Runs, recipe: str) -> None:
    """Micro-batches are summed in another order in the fp32 buffer, so only the first steps can be compared sharply."""
    exact = (f"fp8.recipe={recipe}", "training.precision=fp64")
    ranks, options = LAYOUTS["dp2"]
    assert_close(runs.on(ranks, [*exact, *options], 2), runs.alone(exact, 2), 1e-8, 1e-6)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "dp2-pp2", "tp2-sp-pp2"))
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_losses_stay_close(runs: Runs, recipe: str, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    fp8 = (f"fp8.recipe={recipe}",)
    assert_close(runs.on(ranks, [*fp8, *options], 10), runs.alone(fp8, 10), 2e-3, None)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_learns_like_fp32(runs: Runs, recipe: str) -> None:
    fp8 = runs.alone((f"fp8.recipe={recipe}",), 50)
    fp32 = runs.alone(tuple(FP32), 50)
    assert fp32[-1][0] < fp32[0][0] - 0.5
    last = [sum(loss for loss, _ in found[-5:]) / 5 for found in (fp8, fp32)]
    assert last[0] == pytest.approx(last[1], rel=0.02)
