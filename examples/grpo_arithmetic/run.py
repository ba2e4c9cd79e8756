"""GRPO on a task that can be checked: sums of two digits, by a tiny model on a CPU, in a few minutes.

    python examples/grpo_arithmetic/run.py                       # or with keys of grpo.yaml: training.steps=50

First the model learns from sums of which most are wrong, so that it gives the right result one time in three. Then it
samples eight answers to each sum, and rewards.py says which of them are right. Everything is written below the current
folder: data/grpo_arithmetic and runs/arithmetic-*.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

HERE, DATA = Path(__file__).resolve().parent, Path("data/grpo_arithmetic")
RIGHT = 0.3
"""Share of the results to learn from that are right; of the others some are by chance."""


def write_data() -> None:
    """Sums with results, and sums to be answered, with what the reward needs."""
    draw = random.Random(0)
    sums = [(a, b) for a in range(5) for b in range(5)]
    prompts = [{"prompt": f"{a}+{b}=", "answer": a + b} for a, b in sums]
    examples = []
    for a, b in sums * 40:
        result = a + b if draw.random() < RIGHT else draw.randrange(9)
        examples.append({"prompt": f"{a}+{b}=", "completion": str(result)})
    DATA.mkdir(parents=True, exist_ok=True)
    for name, records in (("examples", examples), ("prompts", prompts)):
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def run(*words: str | Path) -> None:
    """Print and run a command of megafp8; leave with its exit code if it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ megafp8 {shlex.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": "2", **os.environ}  # so small a model is slower with many
    if code := subprocess.run([sys.executable, "-m", "megafp8", *arguments], env=environment).returncode:
        sys.exit(code)


def main(overrides: list[str]) -> None:
    write_data()
    run("preprocess", "--style", "completion", "--tokenizer", "bytes", "--input", DATA / "examples.jsonl",
        "--output-prefix", DATA / "examples")  # fmt: skip
    run("pretrain", "--config", HERE / "warm_up.yaml")
    run("pretrain", "--config", HERE / "grpo.yaml", f"data.grpo.reward={HERE / 'rewards.py'}:exact", *overrides)
    metrics = Path("runs/arithmetic-grpo/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in metrics]
    tenth = max(1, len(rewards) // 10)
    print("mean reward of each tenth of the steps:")
    print(
        " ".join(
            f"{sum(part) / len(part):.2f}" for part in (rewards[i : i + tenth] for i in range(0, len(rewards), tenth))
        )
    )
    print("texts and curves: megafp8 plot-run runs/arithmetic-grpo --html run.html")


if __name__ == "__main__":
    main(sys.argv[1:])
