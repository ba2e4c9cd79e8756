"""The search against predictions of all layouts, and its bounds against what they bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.config import Config, check_layout, load_config
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.planner.predict import Prediction
from megafp8.planner.search import Candidate, Found, _Search, changed_keys, layouts, search, why_slower
from megafp8.spec import ModelSpec
from megafp8.training.fp8_config import build_fp8
from tests.marks import slow_but
from tests.quickstart_data import CONFIG

H200 = GPUS["h200-141gb"]
SMALL = [
    "model.num_layers=4",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "training.global_batch_size=8",
    "training.precision=bf16",
    "device=cuda",
    "fp8.recipe=delayed",
]


def tight(config: Config, gpus: int, share: float, teacher: ModelSpec | None = None) -> tuple[Cluster, list[Candidate]]:
    """A cluster with memory for about this share of all layouts, and what is predicted for each layout."""
    cluster = Cluster(replace(H200, reserved=0), gpus, 2)
    own = _Search(config, build_fp8(config, None), cluster, teacher)
    every = [c for c in map(own.predict, layouts(config, cluster)) if isinstance(c, Candidate)]
    peaks = sorted(c.prediction.peak for c in every)
    return replace(cluster, gpu=replace(cluster.gpu, memory=peaks[int(len(peaks) * share)])), every


SEARCHES: list[tuple[list[str], int]] = [
    ([], 4),
    ([], 2),
    (["model.moe={num_experts: 4, ffn_hidden_size: 64}", "fp8.recipe=none"], 2),
]


@pytest.mark.parametrize(("overrides", "gpus"), slow_but(SEARCHES, SEARCHES[2]))
def test_it_finds_the_fastest_of_all_that_fit(overrides: list[str], gpus: int) -> None:
    config = load_config(CONFIG, [*SMALL, *overrides])
    cluster, every = tight(config, gpus, 0.4)
    fitting = sorted(c.prediction.seconds for c in every if c.prediction.peak <= cluster.gpu.memory)
    assert 10 < len(fitting) < len(every)
    found = search(config, build_fp8(config, None), cluster, keep=3)
    assert [c.prediction.seconds for c in found.best] == pytest.approx(fitting[:3])
    assert found.predicted < len(every)
    assert found.losers


DISTILLS = "data.distillation={teacher: none, top_k: 7}"


def _teacher() -> ModelSpec:
    return load_config(CONFIG, [*SMALL, "model.hidden_size=512", "model.num_layers=6"]).spec


def test_it_finds_the_fastest_with_a_teacher() -> None:
    config, teacher = load_config(CONFIG, [*SMALL, "fp8.recipe=none", DISTILLS]), _teacher()
    cluster, every = tight(config, 2, 0.4, teacher)
    fitting = sorted(c.prediction.seconds for c in every if c.prediction.peak <= cluster.gpu.memory)
    found = search(config, build_fp8(config, None), cluster, 3, teacher)
    assert [c.prediction.seconds for c in found.best] == pytest.approx(fitting[:3])
    assert found.predicted < len(every)


@pytest.mark.parametrize(
    "options", slow_but(["optimizer.name=adamw", "optimizer.name=muon", DISTILLS], "optimizer.name=muon")
)
def test_bounds_are_not_above_predictions(options: str) -> None:
    config = load_config(CONFIG, [*SMALL, options])
    cluster = Cluster(H200, 2, 2)
    own = _Search(config, build_fp8(config, None), cluster, _teacher() if options == DISTILLS else None)
    for layout in layouts(config, cluster):
        candidate, bound = own.predict(layout), own.bound(layout)
        if isinstance(candidate, Candidate):
            assert bound.seconds <= candidate.prediction.seconds * 1.001, layout
            assert bound.memory <= candidate.prediction.peak, layout


def test_losers_say_by_how_much_and_why() -> None:
    config = load_config(CONFIG, SMALL)
    cluster, _ = tight(config, 2, 0.2)
    found = search(config, build_fp8(config, None), cluster)
    reasons = [why for _, why in found.losers]
    assert any("does not fit:" in why and "GiB too much" in why for why in reasons) or any(
        "slower:" in why for why in reasons
    )
    assert winner_is_no_loser(found)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"GEMMs": 1.003, "bubble": 0.0}, "0.3% slower: GEMMs +0.3%"),
        ({"GEMMs": 1.0, "bubble": 0.2}, "20.0% slower: bubble +20.0%"),
        ({"GEMMs": 1.0}, "0.0% slower"),
    ],
)
def test_a_small_difference_has_a_reason_too(terms: dict[str, float], said: str) -> None:
    def prediction(terms: dict[str, float]) -> Prediction:
        return Prediction(sum(terms.values()), terms, [], 1, 1)

    assert why_slower(prediction(terms), prediction({"GEMMs": 1.0})) == said


def winner_is_no_loser(found: Found) -> bool:
    return found.best[0].layout.group not in dict(found.losers)


def test_its_keys_make_the_config_that_was_predicted() -> None:
    config = load_config(CONFIG, SMALL)
    best = search(config, build_fp8(config, None), Cluster(H200, 8)).best[0]
    keys = changed_keys(config, best.config)
    overrides = [
        f"{section}.{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for section, values in keys.items()
        for key, value in values.items()
    ]
    again = load_config(CONFIG, [*SMALL, *overrides])
    check_layout(again, 8)
    assert again == best.config
