"""Validation losses of the runs of run.sh, and their training losses as a PNG."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--best", action="store_true", help="print the best learning rate of each optimizer")
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, dict[str, dict[int, list[dict[str, Any]]]]] = {"adamw": {}, "muon": {}}
    for done in sorted(arguments.runs.glob("*/done")):
        optimizer, rate, seed = done.parent.name.replace("e-", "e_").split("-")
        runs[optimizer].setdefault(rate.replace("e_", "e-"), {})[int(seed)] = read(done.parent)

    def validation(records: list[dict[str, Any]]) -> float:
        return next(r["validation_loss"] for r in reversed(records) if r.get("validation_loss") is not None)

    best = {name: min(rates, key=lambda rate: validation(rates[rate][1])) for name, rates in runs.items()}
    if arguments.best:
        print("\n".join(f"{name} {rate}" for name, rate in best.items()))
        return
    for name, rates in runs.items():
        for rate in sorted(rates, key=float):
            losses = [validation(rates[rate][seed]) for seed in sorted(rates[rate])]
            mean = f", mean {statistics.mean(losses):.4f}" if len(losses) > 1 else ""
            print(f"{name:6} {rate:>7}: {', '.join(f'{loss:.4f}' for loss in losses)}{mean}")
    if arguments.png is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, colour in (("adamw", "tab:blue"), ("muon", "tab:orange")):
        for seed, records in sorted(runs[name][best[name]].items()):
            losses = [r["loss"] for r in records if r["loss"] is not None]
            smooth = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
            label = f"{name}, learning rate {best[name]}" if seed == 1 else None
            axis.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=1, label=label)
    axis.set_xlabel("step (1,024 tokens)")
    axis.set_ylabel("training loss (nats per token, mean of 10 steps)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(arguments.png, dpi=100)


if __name__ == "__main__":
    main()
