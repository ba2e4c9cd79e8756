"""Run a config with every combination of some values, each in its own run folder, and compare them in a table.

    megafp8 sweep configs/mine.yaml optimizer.learning_rate=1e-4,3e-4,1e-3 training.global_batch_size=32,64
    megafp8 sweep configs/mine.yaml optimizer.learning_rate=1e-4..1e-2:5:log seed=1..3:3 training.steps=1000
    megafp8 sweep configs/mine.yaml fp8.recipe=none,current,delayed --slurm "--nodes=2 --time=8:00:00"

Commas separate the values of a key, except inside brackets, braces or quotes: `parallel.layers_per_stage=[3,5],[4,4]`
has two values, and `data.split='"98,2,0"'` has one. FIRST..LAST:COUNT stands for evenly spaced numbers; with `:log`,
they are spaced by equal factors.

The runs are in <run_dir>/<name>-sweep/<values>. They run one after another, or as tasks of a Slurm array with
`--slurm`. Repeating the command skips completed runs, and resumes or repeats the others. A run that fails does not end
the others. The output of a run is in <values>.log next to its folder. The final table is also written to results.csv
and results.json; `--table` prints it for runs that were started before. Exit code: 0 if all runs are done, else 1.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megafp8.commands import add_config_flags, parse_with_config
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.text_file import replace_text
from megafp8.host.tool import run_tool, text_table

SCRIPT = "launch/slurm.sbatch"
_MOST = 1000
_NUMBER = r"([-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}:([0-9]+)(:log)?")
_QUOTES, _OPENING, _CLOSING = "\"'", "[{(", "]})"


def split_values(text: str) -> list[str]:
    """Return the values that are separated by commas outside brackets, braces and quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING + _CLOSING:
            depth += 1 if character in _OPENING else -1
        elif character == "," and not depth:
            values.append("")
            continue
        values[-1] += character
    return values


def values_of(text: str) -> list[str]:
    """Return the values of a swept key, given as a range or a list. Raises ValueError for an invalid range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return split_values(text)
    first, last, count, log = float(match[1]), float(match[2]), int(match[3]), match[4] is not None
    if count < 2 or count > _MOST or (log and not 0 < first < math.inf) or (log and not 0 < last < math.inf):
        raise ValueError(f"{text}: a range has 2 to {_MOST} values, and positive ends with :log")
    parts = [i / (count - 1) for i in range(count)]
    numbers = [first * (last / first) ** x if log else first + (last - first) * x for x in parts]
    return [f"{number:.6g}" for number in numbers]


@dataclass(frozen=True)
class SweepRun:
    """Run with one combination of values.

    `values`: values of the swept keys. `overrides`: all words after the config. `steps`: number of steps after which it
    is done.
    """

    folder: Path
    values: dict[str, str]
    overrides: list[str]
    steps: int

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def ended(self) -> Path:
        """File with the exit code of the latest start."""
        return self.folder.with_name(f"{self.folder.name}.ended.json")


def name_of(values: dict[str, str]) -> str:
    """Return a name for a run folder that shows the values, such as learning_rate-1e-3-seed-2."""
    parts = (f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    text = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts)).strip("_")
    if len(text) <= 100:
        return text
    return f"{text[:90]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def combinations(config: str, overrides: Sequence[str], folder: Path | None) -> list[SweepRun]:
    """Return all runs.

    Raises ConfigError for a combination that is not a valid config, and ValueError if nothing is swept.
    """
    from megafp8.config import load_config

    words = [override.partition("=") for override in overrides]
    values = {key: values_of(text) if equals else [text] for key, equals, text in words}
    swept = {key: choices for key, choices in values.items() if len(choices) > 1}
    fixed = [override for override, (key, *_) in zip(overrides, words, strict=True) if key not in swept]
    if not swept:
        raise ValueError("no key has several values: give one as optimizer.learning_rate=1e-4,3e-4")
    if reserved := {"name", "run_dir"} & swept.keys():
        raise ValueError(f"{reserved.pop()} cannot be swept: each run gets its own folder, named by its values")
    if (count := math.prod(map(len, swept.values()))) > _MOST:
        raise ValueError(f"{count:,} combinations; a sweep has at most {_MOST:,}")
    runs: dict[str, SweepRun] = {}
    for chosen in itertools.product(*swept.values()):
        combination = dict(zip(swept, chosen, strict=True))
        own_words = [*fixed, *(f"{key}={value}" for key, value in combination.items())]
        loaded = load_config(config, own_words, _complete)
        name, where = name_of(combination), folder or Path(loaded.run_dir) / f"{loaded.name}-sweep"
        name = f"{name}-{len(runs)}" if name in runs else name
        own_words += [f"run_dir={where}", f"name={name}"]
        runs[name] = SweepRun(where / name, combination, own_words, loaded.training.last_step)
    return list(runs.values())


def _complete(tree: dict[str, Any], source: str) -> None:
    from megafp8.training.init_from import complete_model  # needs torch

    complete_model(tree, source)


# --- results --------------------------------------------------------------------------------------------------------


def result_of(run: SweepRun) -> dict[str, Any]:
    """Return a row of the table with the progress of a run.

    `exit_code` is the exit code of its latest start; None if it has not ended.
    """
    from megafp8.training.metrics import read_metrics, read_records

    path = run.folder / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    (ended,) = read_records(run.ended, "exit_code", "overrides")[-1:] or [{}] if run.ended.is_file() else [{}]
    validation = [r["validation_loss"] for r in records if r.get("validation_loss") is not None]
    rates = [r["tokens_per_second_per_gpu"] for r in records if r.get("tokens_per_second_per_gpu") is not None]
    step = records[-1]["step"] if records else 0
    code = ended["exit_code"] if ended.get("overrides") == run.overrides else None
    return {
        "run": run.folder.name,
        **run.values,
        "steps": step,
        "loss": records[-1]["loss"] if records else None,
        "validation_loss": validation[-1] if validation else None,
        "tokens_per_second_per_gpu": median(rates) if rates else None,
        "exit_code": code,
        "done": code == 0 and step >= run.steps,
    }


_COLUMNS = {  # key of a result: heading, format
    "steps": ("steps", ","),
    "loss": ("last loss", ".5f"),
    "validation_loss": ("validation", ".5f"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ",.0f"),
    "exit_code": ("exit code", "d"),
}


def table(runs: Sequence[SweepRun], results: Sequence[dict[str, Any]]) -> str:
    """Return the table of all runs as text."""
    swept = list(runs[0].values)
    heading = [*swept, *(heading for heading, _ in _COLUMNS.values())]
    rows = [
        [*(str(row[key]) for key in swept)]
        + ["-" if row[key] is None else format(row[key], form) for key, (_, form) in _COLUMNS.items()]
        for row in results
    ]
    return text_table(heading, rows, left=len(swept))


def write_results(runs: Sequence[SweepRun], results: Sequence[dict[str, Any]]) -> None:
    """Write results.csv and results.json to the sweep's folder."""
    folder = runs[0].folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        writer.writerows(results)


# --- running --------------------------------------------------------------------------------------------------------


def start_one(config: str, run: SweepRun, processes: int | None) -> int:
    """Run one combination to its end, record its exit code, and return it.

    SIGTERM or Ctrl-C lets the run save and stop; KeyboardInterrupt is then raised.
    """
    launch = [] if processes is None else ["launch", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-m", "megafp8", *launch, "pretrain", "--config", config, *run.overrides]
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        # It has its own session, so that Ctrl-C reaches it only once, from this process.
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
        raise
    replace_text(run.ended, json.dumps({"exit_code": code, "overrides": run.overrides}) + "\n")
    return code


def run_all(config: str, runs: Sequence[SweepRun], processes: int | None) -> None:
    """Run all combinations that are not done, one after another."""
    for number, run in enumerate(runs, 1):
        where = f"{number}/{len(runs)} {run.folder.name}"
        if result_of(run)["done"]:
            print(f"{where}: done before", flush=True)
            continue
        start = time.monotonic()
        print(f"{where}: started, output in {run.log}", flush=True)
        code = start_one(config, run, processes)
        print(f"{where}: exit code {code} after {time.monotonic() - start:,.0f} s", flush=True)


def submit(config: str, runs: Sequence[SweepRun], options: Sequence[str]) -> None:
    """Submit all combinations that are not done as tasks of a Slurm array.

    SCRIPT reads their words from the sweep's folder.
    """
    from megafp8.config.files import file_of

    if not Path(SCRIPT).is_file():
        raise ValueError(f"--slurm: there is no {SCRIPT} here; start the sweep in the folder that has launch/")
    if shutil.which("sbatch") is None:
        raise ValueError("--slurm: there is no sbatch on PATH; start the sweep on a machine that submits jobs")
    folder = runs[0].folder.parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [run for run in runs if not result_of(run)["done"]]
    if not tasks:
        return
    for index, run in enumerate(runs):
        if any("\n" in word for word in run.overrides):
            raise ValueError(f"--slurm: {run.folder.name}: a value has a line break")
        replace_text(folder / f"{index}.words", "".join(f"{word}\n" for word in run.overrides))
        replace_text(folder / f"{index}.ended", f"{run.ended.absolute()}\n{json.dumps(run.overrides)}\n")
    array = ",".join(str(index) for index, run in enumerate(runs) if run in tasks)
    command = ["sbatch", f"--array={array}", *options, SCRIPT, str(file_of(config))]
    print(f"SWEEP={shlex.quote(str(folder))} {shlex.join(command)}", flush=True)
    done = subprocess.run(command, env={**os.environ, "SWEEP": str(folder)}, check=False)
    if done.returncode:
        raise ValueError(f"sbatch ended with exit code {done.returncode}")
    print("to print the results: megafp8 sweep with the same arguments and --table")


def sweep(arguments: argparse.Namespace) -> bool:
    """Run or submit the sweep, print its table, and return whether all runs are done."""
    runs = list(combinations(arguments.config, arguments.overrides, arguments.folder))
    if arguments.slurm is not None:
        submit(arguments.config, runs, shlex.split(arguments.slurm))
        return True
    try:
        if not arguments.table:
            run_all(arguments.config, runs, arguments.nproc_per_node)
    finally:  # also for a sweep that was stopped
        results = [result_of(run) for run in runs]
        write_results(runs, results)
        print(f"\n{table(runs, results)}\n\n{runs[0].folder.parent}/results.csv, results.json")
    for line in best_lines(results):
        print(line)
    return all(result["done"] for result in results)


def best_lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each kind of loss with the best of the completed runs."""
    done = [result for result in results if result["done"]]
    for key, what in (("validation_loss", "validation loss"), ("loss", "last loss")):
        known = [result for result in done if result[key] is not None]
        if known:
            best = min(known, key=lambda result: float(result[key]))
            yield f"lowest {what}: {best[key]:.5f}, {best['run']}"


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: <run_dir>/<name>-sweep of the config")
    parser.add_argument(
        "--nproc-per-node", type=at_least(1), help="processes per run, started by megafp8 launch; default: one"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slurm", metavar="OPTIONS", help=f"submit {SCRIPT} as an array with these sbatch options")
    where.add_argument("--table", action="store_true", help="start nothing; print the table of earlier runs")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    arguments = parse_with_config(parser, argv)
    done: list[bool] = []
    code = run_tool(lambda: done.append(sweep(arguments)))
    return code or int(not done[0])


if __name__ == "__main__":
    sys.exit(main())
