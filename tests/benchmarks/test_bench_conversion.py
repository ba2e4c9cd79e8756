"""bench_conversion on a tiny shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_conversion import SHAPES, Synthetic, measure, plot, table
from megafp8.config.schema import ModelConfig

TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 1000, "num_attention_heads": 4}


@pytest.mark.slow
def test_a_tiny_shape(tmp_path: Path) -> None:
    figures = measure(ModelConfig(**TINY, max_position_embeddings=32), tmp_path, rounds=1)
    assert figures.bytes == 2 * figures.parameters == 2 * (2 * 1024 * 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64)
    assert figures.largest_tensor_bytes == 1024 * 64 * 2
    assert 0 < figures.converting_seconds < figures.process_seconds
    assert 5e7 < figures.peak_bytes < 3e9
    assert not list(tmp_path.iterdir())
    assert "tiny" in table({"tiny": figures})
    plot({"tiny": figures, "also": figures}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_shapes_have_the_size_of_their_names() -> None:
    billions = {}
    for shape, fields in SHAPES.items():
        source = Synthetic(ModelConfig.model_validate(fields))
        billions[shape] = sum(info.shape[0] * (info.shape[1:] or (1,))[0] for info in source.tensors.values()) / 1e9
    assert {shape: round(n, 2) for shape, n in billions.items()} == {"0.1B": 0.13, "1B": 1.24, "8B": 8.03}
