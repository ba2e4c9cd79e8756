"""tools/coordinate_check.py: activations grow with the width without muP, and do not with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import slow_but
from tools import coordinate_check

CONFIG = """
name: test
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 64, vocab_size: 128}
training: {steps: 10, seq_length: 16, micro_batch_size: 4, global_batch_size: 4, precision: fp32}
optimizer: {learning_rate: 1.0e-2, schedule: constant}
data: {train: [none]}
"""


def _table(text: str) -> dict[str, dict[str, float]]:
    header, *rows = (line.split() for line in text.splitlines()[1:])
    return {title: dict(zip(header, map(float, values), strict=True)) for title, *values in rows}


LATENT = "model.latent_attention={q_rank: 16, kv_rank: 8, nope_head_dim: 8, rope_head_dim: 4, value_head_dim: 8}"


EXPERTS = "model.moe={num_experts: 8, top_k: 2, aux_loss: 0.01, shared_ffn_hidden_size: 32, shared_gate: true}"


@pytest.mark.parametrize(
    "more",
    slow_but(
        [[], ["--widen-heads"], ["optimizer.name=muon"], [LATENT], [EXPERTS], [EXPERTS, "optimizer.name=muon"]],
        [],
        [EXPERTS],
    ),
)
def test_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    config, png = tmp_path / "config.yaml", tmp_path / "check.png"
    config.write_text(CONFIG)
    arguments = [str(config), "--widths", "32,128", "--steps", "4", "--png", str(png), *more]
    assert coordinate_check.main(arguments) == 0
    found = _table(capsys.readouterr().out)
    assert found["standard"]["logits"] > 2
    assert found["standard"]["mlp"] > 2.5
    assert found["standard"].get("router", 3.0) > 2
    assert max(found["muP"].values()) < 1.5
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bad_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    for widths in ("40", "40,x"):
        with pytest.raises(SystemExit, match="2"):
            coordinate_check.main([str(config), "--widths", widths])
        assert f"error: --widths: '{widths}' is not a list of widths; give at least two" in capsys.readouterr().err
    assert coordinate_check.main([str(config), "--widths", "36,64"]) == 2
    assert "--widths 36: model.num_attention_heads 4 · 36 / 32 is not a whole" in capsys.readouterr().err
