"""Pretrain a GPT, BERT or T5 model from one YAML file.

    torchrun --nproc-per-node 8 pretrain_gpt.py --config configs/llama3-8b.yaml parallel.tensor=2 fp8.recipe=current
    python pretrain_gpt.py --config configs/quickstart.yaml            # one process
    python pretrain_gpt.py --config configs/llama3-70b.yaml --dry-run --world-size 64
    python pretrain_gpt.py --print-schema > megafp8.schema.json        # completion in editors

A wrong config or a damaged data set ends the job with exit code 2 and one message, before any process group exists.
Exit codes: 0 done or stopped cleanly; 2 wrong config, data or checkpoint, or a run that has diverged; 3 no progress;
1 another failure (docs/resilience.md).
"""

from __future__ import annotations

from megafp8.training import command_line
from tools.pretrain import live_uses


def main() -> int:
    """Train a model according to the command line and return the exit code."""
    return command_line.main(__doc__, live_uses)


if __name__ == "__main__":
    command_line.exit_with(main())
