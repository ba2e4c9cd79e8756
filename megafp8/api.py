"""Training from Python scripts and notebooks; does the same as pretrain_gpt.py.

The package exports these names at its top level, next to the names of `megafp8.inference` (docs/python.md).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any

from megafp8 import config as configs
from megafp8.config import Config
from megafp8.host.launched import launched_ranks, on_launched_ranks
from megafp8.inference import live
from megafp8.parallel.parallel_state import destroy_model_parallel
from megafp8.training import metrics
from megafp8.training.command_line import check_config
from megafp8.training.init_from import complete_model
from megafp8.training.run import train
from megafp8.training.validate import run_folder, validate


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, with overrides such as `"parallel.tensor=2"` applied in order.

    With `checkpoint.init_from`, missing keys of `model` are read from that model. Raises ConfigError, a ValueError that
    names each wrong key, its value, the rule and what would work.
    """
    return configs.load_config(path, overrides, complete_model)


class Trainer:
    """Training run described by a config; does the same as pretrain_gpt.py, for scripts and notebooks.

    In a script under torchrun or `megafp8 launch`, every rank creates a Trainer. Otherwise the layout has one process.
    Raises ConfigError if the config does not fit the number of ranks.

    Attributes: `config` is the config, and `run_folder` the folder with all files of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run_folder = run_folder(config)
        self._world_size, self._source = launched_ranks(), on_launched_ranks("config")
        check_config(config, self._world_size, self._source)

    def train(self) -> None:
        """Train to the last step, from the run's newest checkpoint or from the beginning. Call it from the main thread.

        Ctrl-C or SIGTERM end training after the current step, with a checkpoint; call `train` again to continue.

        Raises:
            ValueError: The config, a data set or a checkpoint is wrong. Nothing has been written.
            TrainingError: Training cannot continue.
        """
        inputs = validate(self.config, self._world_size, self._source)
        uses = live.uses(inputs)
        with _own_signal_handlers():
            try:
                train(inputs, uses)
            except BaseException:
                # A single process may live on. With more ranks it ends: leaving the groups would wait for other ranks,
                # and these wait for this one.
                if self._world_size == 1:
                    destroy_model_parallel()
                raise


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps in order, one dict per step, with the keys of metrics.jsonl (docs/python.md).

    `run` is the run's folder. Steps that were repeated after a crash appear once. Raises ValueError if the folder has
    no metrics.
    """
    path = Path(expanduser(run)) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{run} has no metrics.jsonl: give the folder of a run, <run_dir>/<name>")
    return metrics.read_metrics(path)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end of the context."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
