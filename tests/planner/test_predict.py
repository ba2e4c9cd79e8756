"""Predictions against recorded runs, whole schedules, and models that were built whole."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planner_errors import MEMORY, TIME, Run, predictions, recorded
from megafp8.config import load_config
from megafp8.conversion.model import model_tensors
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.layers.recompute import block_memory
from megafp8.optimizer import muon
from megafp8.parallel.pipeline.registry import training_schedule
from megafp8.planner.memory import pipeline_memory
from megafp8.planner.outline import ModelOutline, layer_outline, model_outline
from megafp8.planner.predict import Prediction, predict, short_schedule, update_flops
from megafp8.planner.stages import stages_of
from megafp8.training.fp8_config import build_fp8
from tests.quickstart_data import CONFIG

H200 = GPUS["h200-141gb"]
PIPELINE = ["parallel.pipeline=2", "training.precision=bf16", "model.num_layers=6", "training.global_batch_size=64"]
ALONE = ["parallel.tensor=1", "parallel.pipeline=1", "fp8.recipe=none"]
TINY = [*ALONE, "model.num_layers=4", "training.micro_batch_size=1", "training.global_batch_size=64", "device=cuda"]


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third", "all"])
def compared(request: pytest.FixtureRequest) -> list[tuple[Run, Prediction]]:
    """Of the groups of runs that were measured together every third, or all."""
    groups = itertools.groupby(recorded(), key=lambda run: (run.source, run.config, run.overrides, run.gpus))
    runs = [run for _, group in itertools.islice(groups, 0, None, request.param) for run in group]
    return list(zip(runs, predictions(runs)))


def test_recorded_runs_are_within_the_tolerances_or_say_why_not(compared: list[tuple[Run, Prediction]]) -> None:
    wrong = []
    for run, prediction in compared:
        time_error, memory_error = run.errors(prediction)
        for error, stated, tolerance in (
            (time_error, run.time_error, TIME),
            (memory_error, run.memory_error, MEMORY),
        ):
            if error is None:
                continue
            missed = abs(error) > tolerance
            if missed != (stated is not None) or (missed and stated != pytest.approx(error, abs=0.01)):
                wrong.append(f"{run.source}, {run.layout}, {run.variant}: {error:+.3f}, stated {stated}")
        assert bool(run.reason) == (run.time_error is not None or run.memory_error is not None), run
    assert not wrong, "\n".join(wrong)


def test_most_runs_are_within_the_tolerances(compared: list[tuple[Run, Prediction]]) -> None:
    assert sum(run.time_error is None for run, _ in compared) >= 0.8 * len(compared)
    assert sum(run.memory_error is None for run, _ in compared) >= 0.9 * len(compared)


def test_the_fastest_of_measured_layouts_is_predicted_to_be_the_fastest(
    compared: list[tuple[Run, Prediction]],
) -> None:
    """Where layouts of one model were measured side by side; a layout within 2% of the fastest counts as fastest."""
    groups: dict[tuple[object, ...], list[tuple[float, float, str]]] = defaultdict(list)
    for run, prediction in compared:
        if "expert-parallel" not in run.source:  # whose sections are of different commits
            key = (run.source, run.config, run.overrides, run.gpus, run.variant)
            measured = prediction.tokens / run.milliseconds
            groups[key].append((measured, prediction.tokens_per_second, run.layout))
    several = {key: rates for key, rates in groups.items() if len({layout for _, _, layout in rates}) > 1}
    wrong = {}
    for key, rates in several.items():
        chosen = max(rates, key=lambda rate: rate[1])
        if chosen[0] < 0.98 * max(measured for measured, _, _ in rates):
            wrong[key] = chosen[2]
    assert len(several) >= len(compared) // 12
    assert not wrong


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_further_micro_batches_take_as_long_as_in_the_whole_schedule(
    schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"parallel.schedule={schedule}", f"parallel.virtual_pipeline={chunks}"]
    config = load_config(CONFIG, [*TINY, *PIPELINE, *keys])
    outline, cluster = model_outline(config, build_fp8(config, None)), Cluster(H200, 2)
    placement, _ = stages_of(config)
    short = predict(outline, cluster)
    whole = training_schedule(schedule, placement, 64)
    assert len(short_schedule(config, placement, 2)[0]) < len(whole[0]) / 2
    monkeypatch.setattr("megafp8.planner.predict._SIMULATED", 64)
    assert short.seconds == pytest.approx(predict(outline, cluster).seconds, rel=2e-3)
    assert short.memory == pipeline_memory(outline, 2, placement, whole)


@pytest.mark.parametrize(
    "overrides",
    [
        ["fp8.recipe=delayed"],
        ["fp8.recipe=rowwise", "fp8.first_blocks_bf16=1", "parallel.tensor=2", "model.vocab_multiple=2"],
        ["fp8.recipe=current", "parallel.recompute=selective", "parallel.recompute_blocks=1", "parallel.pipeline=2"],
        ["fp8.recipe=delayed", "model.moe={num_experts: 8, ffn_hidden_size: 48, first_dense_layers: 1}"],
        ["fp8.recipe=delayed", "parallel.fsdp=true", "fp8.param_gather=true", "fp8.exclude=['*.down']"],
    ],
)  # fmt: skip
def test_alike_layers_have_the_plans_and_memory_of_layers_built_one_by_one(overrides: list[str]) -> None:
    config = load_config(CONFIG, [*TINY, *overrides])
    fp8, gpus = build_fp8(config, None), config.parallel.tensor * config.parallel.pipeline * 2
    placement, stages = stages_of(config)
    outline = model_outline(config, fp8)
    layers = {
        index: layer_outline(config, fp8, index, memory)
        for of_stage in stages
        for index, memory in zip(of_stage, block_memory(config.parallel, len(of_stage)))
    }
    assert len({*outline.layers.values()}) < len(layers)
    for index, own in layers.items():
        expected = [(replace(plan, name=""), site.name.split(".")[2:], copies) for site, plan, copies in own.linears]
        linears = outline.layers[index].linears
        assert [
            (replace(plan, name=""), site.name.split(".")[2:], copies) for site, plan, copies in linears
        ] == expected
        assert outline.layers[index].parameters == own.parameters
    schedule = short_schedule(config, placement, gpus)
    memory = [pipeline_memory(each, gpus, placement, schedule) for each in (outline, ModelOutline(config, fp8, layers))]
    assert memory[0] == memory[1]


def test_terms_add_up_and_slow_links_are_exposed() -> None:
    config = load_config(CONFIG, [*TINY, "parallel.tensor=1", "parallel.zero=1", "training.precision=bf16"])
    outline = model_outline(config, build_fp8(config, None))
    near, far = (predict(outline, Cluster(replace(H200, network=1e6), 8, size)) for size in (8, 4))
    assert sum(near.terms.values()) == pytest.approx(near.seconds)
    assert far.terms["gradient reduction"] > 100 * near.terms["gradient reduction"]
    assert near.memory == far.memory


def test_offloaded_state_takes_the_time_of_its_copies() -> None:
    """Masters and moments, or only moments under FSDP, in the direction that takes longer."""
    for keys, nbytes in ((["parallel.zero=1"], 12), (["parallel.fsdp=true"], 8)):
        options = [*TINY, "training.precision=bf16", "model.hidden_size=2048", *keys]
        outline = model_outline(config := load_config(CONFIG, options), build_fp8(config, None))
        plain = predict(outline, Cluster(H200, 2))
        config = load_config(CONFIG, [*options, "optimizer.offload=0.5"])
        offloaded = predict(model_outline(config, build_fp8(config, None)), Cluster(H200, 2))
        elements = sum(x.elements for x in outline.parameters(range(4))) / 2
        assert offloaded.seconds - plain.seconds == pytest.approx(offloaded.terms["offload"])
        copies = offloaded.terms["offload"] + offloaded.terms["optimizer"]
        assert copies == pytest.approx(0.5 * nbytes * elements / H200.host_link)


def test_without_graphs_a_step_takes_the_time_of_the_host() -> None:
    """64 micro-batches of 4 layers."""
    config = load_config(CONFIG, [*TINY, "training.cuda_graphs=false", "training.precision=bf16"])
    outline = model_outline(config, build_fp8(config, None))
    found = predict(outline, Cluster(H200, 1))
    assert found.seconds == pytest.approx(64 * 4 * H200.host_block)
    assert found.terms["host"] > 0


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("llama3-8b", []),
        (
            "deepseek-v3",
            [
                *ALONE,
                "model.num_layers=4",
                "model.moe.num_experts=16",
                "parallel.expert=2",
                "parallel.layers_per_stage=null",
            ],
        ),
        ("t5-base", ["model.vocab_size=128"]),
    ],
)
def test_flops_of_muon(config: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to those of the products that the matrices of a model that was built whole take."""
    from megafp8.kernels import products

    tree = load_config(Path("configs") / f"{config}.yaml", overrides)
    layers, experts = model_outline(tree, build_fp8(tree, None)).layers, tree.parallel.expert
    shapes = Counter(
        shape
        for name, shape in model_tensors(tree.spec).items()
        if name.startswith("model.layers.") and len(shape) == 2 and not name.endswith("router.weight")
    )
    flops: list[int] = []

    def count(a: torch.Tensor, b: torch.Tensor, *_: Any, symmetric: bool = False, **options: Any) -> torch.Tensor:
        p, k = a.shape[:0:-1] if options.get("a_columns") else a.shape[1:]
        q = b.shape[2 if options.get("b_columns") else 1]
        flops.append((1 if symmetric else 2) * p * q * k)
        return a.new_empty(1, p, q)

    monkeypatch.setattr(products, "product", count)
    monkeypatch.setattr(muon, "LARGE", 1 << 30)  # no product by cuBLAS
    counted = 0
    for shape, matrices in shapes.items():
        flops.clear()
        assert muon.gram_newton_schulz(torch.empty(1, *shape, device="meta")).shape == (1, *shape)
        counted += matrices * sum(flops)
    assert sum(update_flops(muon.Muon(), layer, experts) for layer in layers.values()) == counted


@pytest.mark.parametrize("layout", [ALONE, ["fp8.recipe=none", "parallel.tensor=1", "parallel.pipeline=4"]])
def test_a_reference_takes_a_forward_pass(layout: list[str]) -> None:
    """A live one of DPO: between a quarter and a half of what forward and backward take; precomputed nothing."""
    sizes = ["model.num_layers=8", "model.hidden_size=2048", "model.ffn_hidden_size=8192", "training.seq_length=2048"]
    options = [*layout, *sizes, "training.precision=bf16", "training.global_batch_size=64", "data.packing=best_fit"]
    predicted = {}
    for reference in ("none", "live", "precomputed"):
        dpo = [] if reference == "none" else [f"data.dpo.reference={reference}"]
        config = load_config(CONFIG, [*options, "training.cuda_graphs=false", "device=cuda", *dpo])
        outline = model_outline(config, build_fp8(config, None))
        predicted[reference] = predict(outline, Cluster(H200, config.parallel.pipeline))
    without, live = predicted["none"], predicted["live"]
    assert predicted["precomputed"] == without
    trained = sum(without.terms[term] for term in ("GEMMs", "attention", "elementwise", "output layer"))
    assert 0.25 * trained < live.terms["frozen model"] < 0.5 * trained + without.terms.get("bubble", 0.0)
    assert live.seconds == pytest.approx(without.seconds + live.terms["frozen model"], rel=0.05)
    assert max(x.frozen for x in live.memory) == max(x.weights for x in live.memory)
