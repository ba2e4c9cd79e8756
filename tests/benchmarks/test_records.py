"""records: configs of the rows, a row on CPU ranks, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.records import PRECISIONS, RECORDS, ROOT, row_of, table
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.parallel.parallel_state import destroy_model_parallel
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import predict
from megafp8.training.fp8_config import build_fp8
from megafp8.training.parallel import build_parallel
from tests.quickstart_data import QuickstartData
from tests.world import World

H200_GIB = 136.4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RECORDS)
def test_models_of_rows_fit_on_two_gpus(name: str, precision: str) -> None:
    config = RECORDS[name].config(name, precision, 2)
    prediction = predict(model_outline(config, build_fp8(config, None)), Cluster(GPUS["h200-141gb"], 2))
    assert prediction.peak / 2**30 < H200_GIB


def _row(data: list[str], even: bool) -> dict[str, Any]:
    tiny = [
        *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4", "model.num_query_groups=2"),
        *("model.head_dim=8", "model.ffn_hidden_size=32", "model.vocab_size=2048", "training.seq_length=32"),
        *("training.global_batch_size=12", "model.moe.num_experts=4", "model.moe.top_k=2", "device=cpu"),
        *("optimizer.learning_rate=0.1", "optimizer.warmup_steps=4", "optimizer.offload=0.0", "data.num_workers=0"),
    ]
    config = RECORDS["gpt-oss-20b"].config("gpt-oss-20b", "fp8", 2, [*tiny, *data])
    parallel, name = build_parallel(config, torch.device("cpu")), "gpt-oss-20b"
    try:
        return row_of(name, "fp8", config, parallel, 3, ["device=cpu"], even=even)
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("even", [False, True])
def test_a_row_and_the_table(world2: World, quickstart_data: QuickstartData, tmp_path: Path, even: bool) -> None:
    row, other = world2.run(_row, [
        f"data.train=[{quickstart_data.folder / 'stdlib'}]", f"data.index_cache={quickstart_data.folder / 'cache'}",
        f"data.tokenizer={{kind: sentencepiece, path: {quickstart_data.folder / 'tokenizer.model'}}}",
    ], even)  # fmt: skip
    assert (len(row["step_seconds"]), len(row["losses"])) == (3, 6)
    assert row["command"].endswith(f"gpt-oss-20b fp8 {'--even-load ' * even}--set device=cpu")
    assert (row["imbalance"] == [1.0, 1.0]) == even
    assert row["losses"] == other["losses"]
    assert row["last_loss"] < row["first_loss"]
    rate = row["sequences_per_gpu"] * row["sequence_length"] / (row["step_ms"] / 1e3)
    assert row["tokens_per_second_per_gpu"] == pytest.approx(rate)
    (tmp_path / "row.json").write_text(json.dumps(row))
    (tmp_path / "other.certificate.json").write_text("{}")
    assert len(table(tmp_path).splitlines()) == 3
    assert f"| gpt-oss-20b{', even load' * even} | fp8 | 2 CPU | 6 × 32 |" in table(tmp_path)


def test_the_page_has_the_table_of_the_rows_in_docs() -> None:
    assert table(ROOT / "docs" / "cards") in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
