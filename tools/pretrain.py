"""Pretrain a GPT, BERT or T5 model from one YAML file.

    megafp8 pretrain --config my.yaml                                  # one process
    megafp8 launch --nproc-per-node 8 pretrain --config my.yaml parallel.tensor=2
    megafp8 pretrain --config my.yaml --dry-run --world-size 64

The command does the same as pretrain_gpt.py. Exit codes: 0 done, or stopped cleanly; 2 wrong config, data or
checkpoint, or a diverged run; 3 no progress; 1 another failure (docs/launching.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.host.arguments import ArgumentParser
from megafp8.training.arguments import make_parser as make_training_parser

if TYPE_CHECKING:
    from megafp8.training.evaluation import LiveUses
    from megafp8.training.inputs import RunInputs


def live_uses(inputs: RunInputs) -> LiveUses:
    """Return the implementations of `training.evaluate` and `data.grpo`. Raises ConfigError if they cannot work."""
    if inputs.config.training.evaluate is None and inputs.config.data.grpo is None:
        from megafp8.training.evaluation import LiveUses

        return LiveUses()
    from megafp8.inference import live  # takes a moment to import

    return live.uses(inputs)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    return make_training_parser(__doc__)


def main() -> int:
    """Run the command and return its exit code."""
    from megafp8.training import command_line  # slow to import, so not for help

    code = command_line.main(__doc__, live_uses)
    command_line.exit_with(code)
    return code
