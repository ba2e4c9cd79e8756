"""Print how long data-parallel ranks wait for the slowest one with each packing, as a Markdown table. Needs no GPU.

    python -m benchmarks.packing_balance
    python -m benchmarks.packing_balance --config qwen3-30b-a3b --seq-length 32768 --samples 512 --micro-batch-size 2

Documents have log-normal lengths. The time of a micro-batch is proportional to the FLOPs that the planner counts for
its documents: kernels are assumed to be equally fast at all lengths. The table has the mean time that ranks wait, as a
share of the step.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from megafp8.config import load_config
from megafp8.data.packing import BestFit, Concatenation, Packing
from megafp8.data.sampler import balanced_order
from megafp8.planner.flops import document_flops

SIGMA = 1.5
STEPS = 40


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b", help="config of the model")
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("--samples", type=int, default=128, help="samples of a step")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--mean", type=float, default=4096, help="mean length of documents")
    parser.add_argument("--longest", type=int, default=131072, help="length to which longer documents are cut")
    a = parser.parse_args()
    cost = document_flops(load_config(a.config, [f"training.seq_length={a.seq_length}"]))
    count = int(1.3 * STEPS * a.samples * a.seq_length / a.mean)
    drawn = np.random.default_rng(0).lognormal(np.log(a.mean) - SIGMA**2 / 2, SIGMA, count)
    lengths = np.clip(drawn, 2, a.longest).astype(np.int64)

    def costs(packing: Packing) -> NDArray[np.float64]:
        """Return the cost of each sample, `[steps, samples]`."""
        index, of_samples = packing.make_index(np.random.default_rng(1)), []
        for place in range(min(STEPS, packing.samples // a.samples) * a.samples):
            parts = [span.length for span in packing.spans(index, place)]
            padding = a.seq_length + 1 - sum(parts)
            of_samples.append(sum(map(cost, [*parts, padding] if padding else parts)))
        return np.array(of_samples).reshape(-1, a.samples)

    best_fit = costs(BestFit(lengths, a.seq_length))
    orders = {
        "concatenate": costs(Concatenation(lengths, a.seq_length)),
        "best_fit": best_fit,
        "balanced": np.array([step[balanced_order(step.tolist(), a.micro_batch_size)] for step in best_fit]),
    }
    print("| ranks |" + "".join(f" {name}, per {per} |" for per in ("step", "micro-batch") for name in orders))
    print("|--:|" + "--:|" * 2 * len(orders))
    ranks = [r for r in (2, 4, 8, 16, 24, 32, 64) if a.samples % (r * a.micro_batch_size) == 0]
    for r in ranks:
        times = [x.reshape(len(x), -1, r, a.micro_batch_size).sum(3) for x in orders.values()]
        shares = [1 - x.sum((1, 2)) / r / x.sum(1).max(1) for x in times]
        shares += [1 - x.sum((1, 2)) / r / x.max(2).sum(1) for x in times]
        print(f"| {r} |" + "".join(f" {share.mean():.1%} |" for share in shares))


if __name__ == "__main__":
    main()
