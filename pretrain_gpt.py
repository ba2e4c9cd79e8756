"""Pretrain a GPT from one YAML file.

    torchrun --nproc-per-node 8 pretrain_gpt.py --config configs/llama3-8b.yaml parallel.tensor=2 fp8.recipe=current
    python pretrain_gpt.py --config configs/quickstart.yaml            # one process
    python pretrain_gpt.py --config configs/llama3-70b.yaml --dry-run --world-size 64
    python pretrain_gpt.py --print-schema > megafp8.schema.json        # completion for editors

A config or data set that cannot run ends the job with exit code 2 and one message, before any process group exists.
Exit codes: 0 done or stopped cleanly; 2 bad config, data or checkpoint, or a run that has diverged; 1 another failure
(docs/launching.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from megafp8.config import Config, check_layout, load_config
from megafp8.planner.memory import memory_table, pipeline_memory
from megafp8.training.describe import describe
from megafp8.training.determinism import make_deterministic
from megafp8.training.error_report import run_and_report
from megafp8.training.fp8_config import build_fp8
from megafp8.training.init_from import complete_model
from megafp8.training.inputs import Inputs, describe_planned_data, open_inputs, with_vocabulary
from megafp8.training.job import check_run, choose_device, train
from megafp8.training.pipeline import num_microbatches, plan_pipeline


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="the YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, e.g. parallel.tensor=2")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print config, rank layout, parameters, memory per rank and data sets; stop",
    )
    parser.add_argument("--world-size", type=int, help="with --dry-run: the number of ranks to plan for")
    parser.add_argument("--print-schema", action="store_true", help="print the JSON schema of the config; stop")
    arguments = parser.parse_intermixed_args()
    if not arguments.config and not arguments.print_schema:
        parser.error("--config is required, for example --config configs/quickstart.yaml")
    return arguments


def prepare(arguments: argparse.Namespace) -> Inputs | None:
    """Everything that can be checked without a process group; None where there is nothing to train."""
    if arguments.print_schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
        return None
    config = load_config(arguments.config, arguments.overrides, complete_model)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.dry_run:
        p = config.parallel
        world_size = arguments.world_size or max(world_size, p.tensor * p.pipeline * p.context)
    check_layout(config, world_size, arguments.config)
    if arguments.dry_run:
        config = with_vocabulary(config, arguments.config)
        plan = plan_pipeline(config, num_microbatches(config, world_size))
        fp8 = build_fp8(config, None)
        memories = pipeline_memory(config, fp8, world_size, plan.placement, plan.train)
        described = describe(config, world_size, fp8), memory_table(memories), describe_planned_data(config)
        print(*described, sep="\n\n")
        return None
    plan_pipeline(config, num_microbatches(config, world_size))
    inputs = open_inputs(config, arguments.config)
    if config.deterministic:
        make_deterministic(choose_device(config))  # before anything looks at a GPU
    check_run(inputs)
    return inputs


def run() -> None:
    inputs = prepare(parse_arguments())
    if inputs is not None:
        train(inputs)


def main() -> int:
    return run_and_report(run)


if __name__ == "__main__":
    sys.exit(main())
