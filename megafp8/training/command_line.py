"""Command line of the training scripts: read the config, check it, and train.

A wrong config or a damaged data set ends the job with exit code 2 and one message, before any process group exists.
Exit codes: 0 done or stopped cleanly; 2 wrong config, data or checkpoint, or a run that has diverged; 3 no progress;
1 another failure (docs/launching.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megafp8.config import (
    Config,
    ConfigError,
    PlannedStage,
    check_layout,
    config_and_overrides,
    end_of_stage,
    fewest_ranks,
    json_schema,
    load_config,
    planned_stages,
)
from megafp8.data.loader_processes import start_server
from megafp8.host.launched import launched_ranks, on_launched_ranks
from megafp8.training import notify
from megafp8.training.arguments import make_parser
from megafp8.training.errors import run_and_report

if TYPE_CHECKING:
    from megafp8.training.evaluation import LiveUses
    from megafp8.training.inputs import RunInputs


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Return the parsed command line. Report a usage error for missing or contradictory arguments."""
    parser = make_parser(description)
    arguments = parser.parse_intermixed_args()
    arguments.config, arguments.overrides = config_and_overrides(arguments.config, arguments.overrides)
    if not arguments.config and not arguments.print_schema:
        parser.error("a config is needed: a YAML file, or the name of a shipped config, as megafp8 init lists them")
    if arguments.world_size is not None and not arguments.dry_run:
        parser.error("--world-size is for --dry-run; a run has as many ranks as torchrun starts processes")
    if arguments.verbose and not arguments.dry_run:
        parser.error("--verbose is for --dry-run")
    return arguments


def _complete_model(tree: dict[str, Any], source: str) -> None:
    from megafp8.training.init_from import complete_model  # needs torch

    complete_model(tree, source)


class NoModel(Exception):
    """A missing folder defines the model. The only argument says which folder is missing, and why."""


def _complete_model_if_there(tree: dict[str, Any], source: str) -> None:
    """Complete the model for a dry run, in which the folder may still be missing.

    Raises NoModel if the folder is missing and the config does not describe the model.
    """
    from megafp8.data.hub import missing_folder
    from megafp8.training.init_from import complete_model

    try:
        complete_model(tree, source, download=False)
    except ConfigError:
        missing = missing_folder(tree["checkpoint"]["init_from"])
        if missing is None:
            raise
        if not tree.get("model"):
            raise NoModel(missing) from None


def check_config(config: Config, world_size: int, source: str) -> list[PlannedStage]:
    """Return the stages of the run after checking their layouts and recipes for `world_size` ranks.

    Raises ConfigError if a check fails.
    """
    stages = planned_stages(config, source)
    for stage in stages:
        check_layout(stage.config, world_size, stage.source)
    from megafp8.training.fp8_config import check_recipe  # needs torch

    for stage in stages:
        check_recipe(stage.config, stage.source)
    return stages


def prepare(arguments: argparse.Namespace) -> RunInputs | None:
    """Do all checks that need no process group, and return the inputs of the run; None if there is nothing to train.

    Importing torch takes longer than all checks, so checks that do not need torch come before the import.
    """
    if arguments.print_schema:
        print(json.dumps(json_schema(), indent=2))
        return None
    if arguments.dry_run:
        _dry_run(arguments)
        return None
    config = load_config(arguments.config, arguments.overrides, _complete_model)
    notify.subscribe(config)
    if config.data.num_workers and not config.data.text:
        start_server()
    world_size, source = launched_ranks(), on_launched_ranks(arguments.config)
    check_config(config, world_size, source)
    # From here on torch is needed.
    from megafp8.training.validate import validate

    return validate(config, world_size, source)


def _dry_run(arguments: argparse.Namespace) -> None:
    """Print the output of `--dry-run`."""
    gc.disable()  # this process ends soon, and garbage collection would take a sixth of its time
    try:
        config = load_config(arguments.config, arguments.overrides, _complete_model_if_there)
    except NoModel as missing:
        print(
            f"needed before a start:\n  checkpoint.init_from = {missing}; it defines the model, so nothing else is "
            "known yet"
        )
        return
    world_size = arguments.world_size or ("WORLD_SIZE" in os.environ and launched_ranks())
    if not world_size:
        world_size = fewest_ranks([stage.config for stage in planned_stages(config, arguments.config)])
        ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
        print(f"{ranks}, the fewest that this config runs on; --world-size N plans for others\n")
    stages = check_config(config, world_size, arguments.config)
    # From here on torch is needed; a dry run imports no more of it than it must.
    from megafp8.training.describe import dry_run

    if len(stages) > 1:
        from megafp8.training.state import check_stages  # imports all training code

        check_stages(stages)
    for stage in stages:
        steps = end_of_stage(config, stage.begin) - stage.begin if config.stages else config.training.steps
        if stage.name is not None:
            print(f"stage {stage.name}, steps {stage.begin + 1} to {stage.begin + steps}:\n")
        print(dry_run(stage.config, world_size, stage.source, steps, verbose=arguments.verbose))


def run(description: str | None, live_uses: Callable[[RunInputs], LiveUses]) -> None:
    """Parse the command line, check the config and train. `live_uses` is described at `main`."""
    inputs = prepare(parse_arguments(description))
    if inputs is not None:
        from megafp8.training.run import train

        train(inputs, live_uses(inputs))
        # Free the process groups that models hold in reference cycles. This ends gloo's threads: a thread that drops
        # the last reference to a tensor while Python exits would abort the process.
        gc.collect()


def main(description: str | None, live_uses: Callable[[RunInputs], LiveUses]) -> int:
    """Train a model according to the command line and return the exit code.

    Args:
        description: Help text of the script.
        live_uses: Function that checks the evaluations and rollouts of the config, and returns the functions that run
            them on the live model. It raises ValueError if the config is wrong.
    """
    code = run_and_report(partial(run, description, live_uses))
    if not code:
        notify.ended(notify.process_subscription(), code)
    return code


def exit_with(code: int) -> None:
    """End the process without waiting for communicators if `code` is not 0.

    Communicators may wait for other ranks, which may wait for this process.
    """
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
