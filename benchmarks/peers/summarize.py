"""Print five lines about a log of torchtitan or Megatron-LM: step times, throughput, memory and losses.

python3 benchmarks/peers/summarize.py LOG --name NAME --tokens TOKENS_OF_ONE_GPU_IN_A_STEP [--skip STEPS]
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

TORCHTITAN = re.compile(r"step:\s*\d+\s+loss:\s*(\S+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")
MEGATRON = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")
MEGATRON_MEMORY = re.compile(r"max allocated: ([\d.]+).*?max reserved: ([\d.]+)")


def read_steps(text: str, tokens: int) -> tuple[list[float], list[float], str]:
    """Return the milliseconds and the loss of every step in a log, and the peak memory as text."""
    if steps := TORCHTITAN.findall(text):
        times = [1e3 * tokens / float(rate.replace(",", "")) for _, _, rate in steps]
        losses = [float(loss) for loss, _, _ in steps]
        return times, losses, f"{max(float(gib) for _, gib, _ in steps):.1f} GiB reserved"
    steps = MEGATRON.findall(text)
    times, losses = [float(ms) for ms, _ in steps], [float(loss) for _, loss in steps]
    peaks = [(float(allocated), float(reserved)) for allocated, reserved in MEGATRON_MEMORY.findall(text)]
    if not peaks:
        return times, losses, "not in the log"
    allocated, reserved = (max(column) / 1024 for column in zip(*peaks, strict=True))
    return times, losses, f"{allocated:.1f} GiB allocated, {reserved:.1f} GiB reserved"


def main() -> None:
    """Read one log and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens that one GPU processes in a step")
    parser.add_argument("--skip", type=int, default=3, help="steps at the start that are not measured")
    args = parser.parse_args()
    text = args.log.read_text(errors="replace")
    times, losses, memory = read_steps(text, args.tokens)
    measured = times[args.skip :]
    if not measured:
        raise SystemExit(f"{args.name}: {len(times)} steps in {args.log}, {args.skip + 1} are needed\n{text[-2000:]}")
    median = statistics.median(measured)
    print(f"{args.name.strip()}: {1e3 * args.tokens / median:,.0f} tokens/s/GPU, median of {len(measured)} steps")
    print(f"  ms per step: median {median:.0f}, min {min(measured):.0f}, max {max(measured):.0f}")
    print("  each step:  " + " ".join(f"{ms:.0f}" for ms in times) + f" (the first {args.skip} are not measured)")
    print(f"  memory:      {memory}")
    print(f"  loss:        first {losses[0]:.4f}, last {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
