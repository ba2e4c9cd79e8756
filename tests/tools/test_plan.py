"""tools/plan.py from the command line: text, YAML to paste, JSON and errors."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megafp8.config import check_layout, load_config
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.training.plan_layouts import commands
from tests.quickstart_data import CONFIG
from tools.plan import main

SMALL = [
    "model.num_layers=2",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    "model.vocab_size=256",
    "training.global_batch_size=4",
    "training.precision=bf16",
    "device=cuda",
]
COMMAND = [str(CONFIG), *SMALL, "--gpus", "2"]


def test_it_prints_yaml_that_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*COMMAND, "--explain"]) == 0
    text = capsys.readouterr().out
    for part in ("terms of the best", "GEMMs", "pipeline rank"):
        assert part in text
    changes = yaml.safe_load(text.split("the best as YAML:\n")[1].split("\n\n")[0])
    tree = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    for section, keys in changes.items():
        tree[section] = tree.get(section, {}) | keys
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    best = load_config(tmp_path / "best.yaml", SMALL)
    check_layout(best, 2)
    launch, command = text.split("as a command:\n")[1].split("\n")[0].split(" pretrain --config ")
    assert launch == "megafp8 launch --nproc-per-node 2"
    config, *overrides = shlex.split(command)
    assert load_config(config, overrides) == best
    run = best.training.steps * best.training.global_batch_size * best.training.seq_length
    assert f"\n  {run:,} tokens: " in text
    assert " MFU " in text


def test_the_config_says_how_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes of a model this small are in MiB, and layouts that differ little have their reason."""
    assert main(COMMAND[:-2]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 GPUs (H100), the fewest that this config runs on; --gpus N plans for others\n")
    assert "pretrain --config" in text.split("megafp8 launch --nproc-per-node 4")[1]
    own = text.split("the config's own layout:\n")[1].split("\n")[0]
    assert re.search(r" [\d.]+ MiB$", own), own
    losers = text.split("why others lose:\n")[1].split("\n\n")[0].splitlines()
    assert losers
    assert not [line for line in losers if line.endswith(":")]


def test_commands_for_nodes() -> None:
    cluster = Cluster(GPUS["h100-80gb"], 16, 8)
    keys = {"parallel": {"tensor": 8, "layers_per_stage": None, "fsdp": False, "schedule": "zb-h1"}}
    found = commands("my run.yaml", ["parallel.tensor=2", "seed=3"], keys, cluster)
    words = "'my run.yaml' seed=3 parallel.tensor=8 parallel.layers_per_stage=null parallel.fsdp=false "
    words += "parallel.schedule=zb-h1"
    assert found.splitlines() == [
        "megafp8 launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29400 --rdzv-id RUN "
        f"pretrain --config {words}",
        "or, under Slurm:",
        f"sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sbatch {words}",
    ]


def test_json_has_the_terms_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json", "--gpu", "h200-141gb", "--tokens", "3B", "--price", "2.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    rate = best["tokens_per_second_per_gpu"]
    assert best["mfu"] == pytest.approx(rate * found["flops_per_token"] / 1979e12)
    assert best["tokens_per_day"] == pytest.approx(2 * rate * 86400)
    hours = 3e9 / rate / 3600
    of_budget = {"tokens": 3 * 10**9, "days": hours / 2 / 24, "gpu_hours": hours, "cost": 2.5 * hours}
    assert best["budget"] == pytest.approx(of_budget)
    assert sum(best["terms_seconds"].values()) == pytest.approx(best["step_seconds"])
    assert best["peak_bytes"] == max(rank["total"] for rank in best["memory_bytes"]) <= found["limit_bytes"]
    assert all(best["step_seconds"] <= other["step_seconds"] for other in found["best"])


def test_goodput_of_several_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [str(CONFIG), *SMALL, "--gpus", "64,1000", "--gpus-per-node", "4", "--goodput", "--replicas", "4:2"]
    assert main([*counts, "checkpoint.memory_interval=7"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if re.match(r"[\d,]+ +(restart,|4 replicas)", line)]
    assert [row[0] for row in rows] == ["64"] * 3 + ["992"] * 3  # whole replicas of whole nodes
    assert "992 GPUs: a failure every 3,065 min" in text
    assert main([*counts, "--mtbf-gpu-hours", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumptions"]["detection"] == 10.0
    for row in found["goodput"]:
        seconds = row["outcome"]["seconds"]
        assert row["goodput"] == pytest.approx(seconds["training"] / sum(seconds.values()))
        assert row["goodput"] == pytest.approx(row["expected"], abs=0.03)
        assert row["mtbf"] == pytest.approx(1000 * 3600 / row["gpus"])
    assert main([*counts[:-2], "--gpus", "8"]) == 2
    assert "8 GPUs are too few for 8 replicas of whole nodes and models; give" in capsys.readouterr().err


def test_the_exit_code_says_whether_a_layout_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["model.hidden_size=32768", "model.ffn_hidden_size=131072", "model.num_layers=64"]
    assert main([str(CONFIG), *large, "--gpus", "2", "--gpu", "H100"]) == 1
    assert "no layout of" in capsys.readouterr().out


def test_errors_name_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "missing.yaml", "--gpus", "2"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
    assert main([*COMMAND, "--nodes", "3"]) == 2
    assert "do not divide into 3 nodes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*COMMAND[:-1], "2,4"])
    assert "several numbers are for --goodput" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*COMMAND, "--gpu", "a100"])
    assert "'a100' is not known; known are h200-141gb, h100-80gb" in capsys.readouterr().err
    for flag, said in (
        ("--tokens", "'x' is not a number of tokens, such as 15T"),
        ("--price", "'x' is not a price, such"),
        ("--replicas", "'x' is not NUMBER:MINIMUM, such as 8:6"),
        ("--mtbf-gpu-hours", "'x' is not a number of hours"),
        ("--gpus", "'x' is neither a whole number nor a list"),
    ):
        with pytest.raises(SystemExit):
            main([*COMMAND, flag, "x"])
        assert said in capsys.readouterr().err
