"""Sweeps: values, names, runs one after another, resumption, the table, and a Slurm array."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from tests.config.test_config import MINIMAL, write
from tools import sweep

ROOT = Path(__file__).resolve().parents[2]

# Stands in for `python -m megafp8 pretrain --config FILE key=value ...`: a run whose loss is its learning rate.
JOB = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
keys = dict(word.split("=", 1) for word in sys.argv if "=" in word)
rate = float(keys["optimizer.learning_rate"])
print("learning rate", rate, [word for word in sys.argv[1:] if "=" not in word])
if rate > 0.5 and not os.environ.get("MENDED"):
    sys.exit(2)
folder = Path(keys["run_dir"]) / keys["name"]
folder.mkdir(parents=True, exist_ok=True)
with (folder / "metrics.jsonl").open("w") as file:
    for step in (9, 10):
        loss = {{"loss": rate, "validation_loss": 2 * rate if step == 9 else None}}
        json.dump({{"step": step, **loss, "grad_norm": 1, "tokens_per_second_per_gpu": 100 * step}}, file)
        file.write("\\n")
"""
SWEPT = ["optimizer.learning_rate=0.1,0.9", "data.split='1,1,1',\"9,9,9\"", "seed=7"]


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    executable(tmp_path / "job", JOB)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "job"))
    return str(write(tmp_path, MINIMAL))


def test_values() -> None:
    assert sweep.values_of("[1,2],[2, 1]") == ["[1,2]", "[2, 1]"]
    assert sweep.values_of("{a: 0.5, b: 0.5},{a: 1}") == ["{a: 0.5, b: 0.5}", "{a: 1}"]
    assert sweep.values_of("'a,b',\"c,d\",e") == ["'a,b'", '"c,d"', "e"]
    assert sweep.values_of("1..4:4") == ["1", "2", "3", "4"]
    assert sweep.values_of("1e-4..1e-2:5:log") == ["0.0001", "0.000316228", "0.001", "0.00316228", "0.01"]
    assert sweep.values_of("-1..1.5:2") == ["-1", "1.5"]
    for wrong in ("1..2:1", "0..1:3:log"):
        with pytest.raises(ValueError, match="a range has 2 to 1000 values, and positive ends with :log"):
            sweep.values_of(wrong)


def test_runs_have_folders_of_their_own(config: str) -> None:
    runs = sweep.combinations(config, SWEPT, None)
    names = [f"learning_rate-{rate}-split-_{split}" for rate in ("0.1", "0.9") for split in ("1_1_1", "9_9_9")]
    assert [str(run.folder) for run in runs] == [f"runs/test-sweep/{name}" for name in names]
    assert runs[1].overrides[0] == "seed=7"
    assert runs[1].overrides[2:] == ['data.split="9,9,9"', "run_dir=runs/test-sweep", f"name={names[1]}"]
    long = sweep.combinations(config, [f"data.index_cache={'a' * 300},{'a' * 299}b"], None)
    assert len({run.folder for run in long}) == 2
    assert max(len(run.folder.name) for run in long) <= 100


def test_failures_end_no_other_run_and_done_ones_are_left_out(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [config, *SWEPT, "--nproc-per-node", "2"]
    assert sweep.main(command) == 1
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "test-sweep"
    lines = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert lines == [
        [
            "optimizer.learning_rate",
            "data.split",
            "steps",
            "last",
            "loss",
            "validation",
            "tokens/s/GPU",
            "exit",
            "code",
        ],
        ["0.1", "'1,1,1'", "10", "0.10000", "0.20000", "950", "0"],
        ["0.1", '"9,9,9"', "10", "0.10000", "0.20000", "950", "0"],
        ["0.9", "'1,1,1'", "0", "-", "-", "-", "2"],
        ["0.9", '"9,9,9"', "0", "-", "-", "-", "2"],
    ]
    assert "lowest validation loss: 0.20000, learning_rate-0.1-split-_1_1_1" in out
    log = (folder / "learning_rate-0.9-split-_9_9_9.log").read_text()
    assert "learning rate 0.9 ['-m', 'megafp8', 'launch', '--nproc-per-node', '2', 'pretrain', '--config'" in log
    with (folder / "results.csv").open(newline="") as file:
        assert [row["exit_code"] for row in csv.DictReader(file)] == ["0", "0", "2", "2"]
    monkeypatch.setenv("MENDED", "1")
    assert sweep.main([*command, "--table"]) == 1  # starts nothing
    assert "started" not in capsys.readouterr().out
    assert sweep.main(command) == 0
    out = capsys.readouterr().out
    assert (out.count("done before"), out.count("started")) == (2, 2)
    rows = json.loads((folder / "results.json").read_text())
    assert [(row["done"], row["loss"]) for row in rows] == [(True, 0.1), (True, 0.1), (True, 0.9), (True, 0.9)]
    assert sweep.main([*command, "training.steps=11"]) == 1  # longer: not done yet
    assert capsys.readouterr().out.count("started") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "no key has several values: give one as optimizer.learning_rate=1e-4,3e-4"),
        (["sed=1,2"], "sed = 1: there is no such key; did you mean seed?"),
        (["seed=1,x"], "seed = 'x': input should be a valid integer"),
        (["name=a,b"], "name cannot be swept: each run gets its own folder, named by its values"),
        (["seed=1..900:900", "optimizer.eps=1,2"], "1,800 combinations; a sweep has at most 1,000"),
        (["seed=1,2", "--slurm", ""], "there is no launch/slurm.sbatch here; start the sweep in the folder that has"),
    ],
)
def test_mistakes_start_nothing(config: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([config, *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


SBATCH = """#!/usr/bin/env bash
echo "$@" >sbatch.txt
for word in "$@"; do
    case $word in
    --array=*) tasks=${word#--array=} ;;
    esac
done
export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST=node SLURM_JOB_NUM_NODES=1
for SLURM_ARRAY_TASK_ID in ${tasks//,/ }; do
    export SLURM_ARRAY_TASK_ID SLURM_ARRAY_JOB_ID=10 SLURM_JOB_ID=10$SLURM_ARRAY_TASK_ID
    bash "${@: -2:1}" "${@: -1}" || true
done
"""


def test_a_slurm_array_has_a_task_for_each_run(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    executable(tools / "sbatch", SBATCH)
    executable(tools / "scontrol", "#!/usr/bin/env bash\necho node\n")
    executable(tools / "srun", f'#!/usr/bin/env bash\nshift 4\nexec "{tmp_path}/job" "$@"\n')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    assert sweep.main([config, *SWEPT, "--slurm", "--nodes=1 --time=1:00"]) == 0
    folder = tmp_path / "runs" / "test-sweep"
    submitted = f"--array=0,1,2,3 --nodes=1 --time=1:00 launch/slurm.sbatch {config}"
    assert Path("sbatch.txt").read_text().strip() == submitted
    assert sweep.main([config, *SWEPT, "--table"]) == 1
    assert [row["exit_code"] for row in json.loads((folder / "results.json").read_text())] == [0, 0, 2, 2]
    monkeypatch.setenv("MENDED", "1")
    assert sweep.main([config, *SWEPT, "--slurm", ""]) == 0
    assert "--array=2,3 " in Path("sbatch.txt").read_text()
    capsys.readouterr()
    assert sweep.main([config, *SWEPT, "--table"]) == 0
