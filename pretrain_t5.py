"""Pretrain a T5 model, an encoder and a decoder that restores spans of a text, from one YAML file.

    torchrun --nproc-per-node 8 pretrain_t5.py --config configs/t5-base.yaml parallel.tensor=2 fp8.recipe=delayed
    python pretrain_t5.py --config configs/t5-base.yaml --dry-run --world-size 64
    python pretrain_t5.py --print-schema > megafp8.schema.json        # completion in editors

docs/bert-and-t5.md says how to prepare data. Errors and exit codes are those of pretrain_gpt.py.
"""

from __future__ import annotations

from megafp8.training import command_line


def main() -> int:
    return command_line.main(__doc__, "t5")


if __name__ == "__main__":
    command_line.exit_with(main())
