"""The certificate of small configs: nothing differs, and each of ten planted faults is named, with the tensor.

Faults are planted in the ranks of the layout only (`faults`); the first row that differs is that of the fault.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megafp8.config import Config
from megafp8.prove import export
from megafp8.prove.certificate import CheckResult
from megafp8.prove.proof import EXACT, checks, prove
from tests.marks import slow_but
from tests.prove.faults import FAULTS
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.world import Ranks

QUICKEST = TIED | DELAYED | TP2 | MASKED


def first_difference(preset: Preset, ranks: Ranks, fault: str, timeout: float = 60.0) -> CheckResult:
    """The first row that has not passed."""
    config = config_of(preset, fp8={"amax_history_len": 1024})  # not all recipes have one
    rows = checks(config, preset.ranks, timeout=timeout, around=FAULTS[fault], local_ranks=ranks)
    return next(row for row in rows if not row.passed)


@pytest.mark.parametrize(
    "preset", slow_but([TIED | DELAYED | TP2 | DP2 | ZERO, DPO | DELAYED | TP2, QUICKEST], QUICKEST)
)
def test_a_certificate(rank_processes: Ranks, monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    """Every check of a config with every kind of them; and what is written."""
    if preset == QUICKEST:  # importing transformers takes longer than all other checks
        monkeypatch.setattr(export, "why_not", lambda config: "not in the quick tests")
    seen = list[CheckResult]()
    certificate = prove(config_of(preset), preset.ranks, show=seen.append, local_ranks=rank_processes)
    assert certificate.passed, [row for row in certificate.rows if not row.passed]
    assert seen == certificate.rows
    assert [row.check for row in seen] == [
        "schedule", "data order", "loss and gradients", "optimizer steps", "FP8, delayed", "checkpoint",
        "resumed on one rank", "data after resuming", "resumed in the layout", "conversion", "export",
    ]  # fmt: skip
    assert all(row.status == "equal" for row in seen[:-2])
    assert all((row.status == "skipped") == (preset == QUICKEST) for row in seen[-2:])
    assert all(row.difference is None or row.difference < EXACT for row in seen[:-2])
    assert certificate.cpu_seconds > 0
    written: dict[str, Any] = json.loads(certificate.as_json())
    assert written["passed"] is True
    assert len(written["rows"]) == len(seen)
    assert Config.model_validate(written["config"]).training.precision == "fp64"


CASES = [
    ("no_all_reduce_of_replicated", TP2, "loss and gradients", r"layers\.\d\.(attention|mlp)_norm\.weight"),
    ("average_per_microbatch", MASKED | SAMPLES_8 | DP2, "loss and gradients", r"\.weight"),
    ("norm_over_one_stage", PP2, "loss and gradients", "norm 0 of rank"),
    ("seed_of_the_rank", DROPOUT | TP2, "loss and gradients", "loss 0 of rank|weight"),
    ("stale_fp8_weight", CURRENT | DP2, "FP8, current", "loss|norm|layers"),
    ("positions_off_by_one", CP2, "loss and gradients", r"layers\.\d\.attention|loss 0"),
    ("wrong_expert_offset", MOE | DP2 | EP2, "loss and gradients", r"mlp\.(experts|router)|loss 0"),
    ("tied_gradient_skipped", TIED | PP2, "loss and gradients", r"embedding\.word\.weight"),
    ("amax_of_one_rank", DELAYED | DP2, "FP8, delayed", r"fp8\.|loss"),
    ("sampler_shifted_on_resume", DP2, "data after resuming", r"step 3: samples \(13,\) instead of \(12,\)"),
]
QUICK = [CASES[0], CASES[1], CASES[9]]


@pytest.mark.parametrize(("fault", "preset", "check", "where"), slow_but(CASES, *QUICK))
def test_a_fault_is_named(rank_processes: Ranks, fault: str, preset: Preset, check: str, where: str) -> None:
    row = first_difference(preset, rank_processes, fault)
    assert row.check == check, row
    assert row.status == "DIFFERENT"
    assert re.search(where, row.where), row
    assert row.difference is None or row.difference > 1e-6


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(rank_processes: Ranks) -> None:
    row = first_difference(PP2, rank_processes, "rank_hangs", timeout=15.0)
    assert (row.check, row.status) == ("schedule", "FAILED")
    assert row.where == "ranks 0, 1 did not finish"
    assert "in hanging" in row.details
