"""Random compositions: what is drawn, that a fault is found and made small, and that a soak goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

import pytest

from megafp8.config import check_layout
from megafp8.config.parts import PARTS
from megafp8.config.reader import members
from tests.compositions import __main__ as soak
from tests.compositions import trial as trials
from tests.compositions.draw import LARGEST, Composition, axes, draw, keys
from tests.compositions.trial import Trial, smallest, trial
from tests.compositions.values import value
from tests.prove.faults import FAULTS
from tests.world import Ranks

FAULTY = Composition("gpt", 2, {"parallel.tensor": 2, "model.norm_eps": 5e-6, "model.moe": {"num_experts": 4}})


def test_draws_are_those_of_the_seed() -> None:
    found = [draw(Random(f"3/{i}")) for i in range(4)]
    assert found == [draw(Random(f"3/{i}")) for i in range(4)]
    assert max(x.ranks for x in found) <= max(LARGEST)
    for composition in found:
        check_layout(composition.config, composition.ranks)
        assert composition.command.startswith(f"megafp8 prove tests/compositions/{composition.base}.yaml --ranks ")


def test_every_value_of_a_choice_is_drawn() -> None:
    """Keys are those of the schema, without a list of them."""
    random = Random(0)
    known = {key.path: key for key in keys()}
    assert {"parallel.schedule", "model.moe", "optimizer.muon.nesterov", "fp8.exclude"} <= known.keys()
    assert [key.path for key in axes()] == [
        f"parallel.{axis}"
        for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "fsdp_replicas")
    ]
    for key in known.values():
        drawn = [value(random, key.field) for _ in range(200)]
        for member in members(key.field.annotation):
            expected = {False, True} if member is bool else get_args(member) if get_origin(member) is Literal else ()
            assert {*expected} <= {x for x in drawn if isinstance(x, (bool, str, int))}, key.path
    kinds = json.dumps([value(random, known["model.layer_kinds"].field) for _ in range(300)])
    assert not [part for part in PARTS if f'"kind": "{part.model_fields["kind"].default}"' not in kinds]


def test_the_smallest_that_fails() -> None:
    """What does not matter is left out: keys, keys of sections, ranks. Invalid configs are not tried."""
    moe = {"num_experts": 4, "top_k": 2, "z_loss": 0.1}
    drawn = Composition(
        "gpt", 4,
        {"model.moe": moe, "parallel.tensor": 2, "optimizer.beta1": 0.45, "fp8.exclude": ["*.proj", "layers.0.*"]},
    )  # fmt: skip
    tried = list[Composition]()

    def fails(composition: Composition) -> bool:
        tried.append(composition)
        overrides = composition.overrides
        return overrides.get("parallel.tensor") == 2 and "z_loss" in overrides.get("model.moe", ())

    assert smallest(drawn, fails) == Composition(
        "gpt", 2, {"model.moe": {"num_experts": 4, "z_loss": 0.1}, "parallel.tensor": 2}
    )
    assert len(tried) <= 80
    assert all(composition.config for composition in tried)


def test_a_fault_fails_a_trial(rank_processes: Ranks) -> None:
    found = trial(FAULTY, rank_processes, whole=False)
    assert found.failure == trials.PASSED
    assert [*found.rows] == ["schedule", "data order", "loss and gradients", "optimizer steps"]
    faulty = trial(FAULTY, rank_processes, whole=False, around=FAULTS["no_all_reduce_of_replicated"])
    assert faulty.failure == "loss and gradients: DIFFERENT"
    assert "norm.weight" in faulty.where


def test_a_soak_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases that the file has are not tried again, but for one that a killed process had begun to write."""
    tried = list[Composition]()

    def tried_only(composition: Composition, ranks: object, *, whole: bool) -> Trial:
        tried.append(composition)
        return Trial(composition, "schedule: FAILED" if len(tried) == 2 else "", "rank 0", {"schedule": "equal"}, 1, 2)

    monkeypatch.setattr(soak, "trial", tried_only)
    out = tmp_path / "soak.jsonl"

    def run(cases: int) -> int:
        words = ["soak", "--out", str(out), "--cases", str(cases)]
        monkeypatch.setattr("sys.argv", words)
        return soak.main()

    assert run(3) == 1
    printed = capsys.readouterr().out
    assert "case 1 FAILED, schedule: FAILED" in printed
    assert "3 cases, 1 failed; 3 s, 6 CPU seconds" in printed
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines) + lines[0][:20])
    assert run(3) == 0
    assert out.read_text() == "".join(lines)
    assert run(4) == 0
    written: list[Mapping[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["case"] for line in written] == [0, 1, 2, 3]
