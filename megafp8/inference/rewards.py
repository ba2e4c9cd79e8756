"""Rewards of texts: by a Python function, or by a program that reads JSON lines.

Both are code of the user's, so whatever goes wrong there is a ValueError that says what, where and what would work.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megafp8.config import ConfigError, GrpoConfig, Problem
from megafp8.data.prompts import Prompt

Reward = Callable[[Sequence[Prompt], Sequence[str]], list[float]]
"""From the prompt of each text, and what continues it, to its reward. Raises ValueError."""

_LONGEST_OUTPUT = 2000
"""Characters of a program's errors that are shown."""


def open_reward(config: GrpoConfig, keys: Sequence[str]) -> Reward:
    """The reward that a config names. `keys`: those that the records of all prompts have. Raises ConfigError."""
    if config.reward is not None:
        return _of_function(config.reward, _load(config.reward), [key for key in keys if key != config.prompt_key])
    command = config.reward_command
    assert command is not None
    if shutil.which(command[0]) is None:
        rule, works = "no such program, or one that cannot be run", "give its path, or make it executable"
        raise ConfigError("config", [Problem("data.grpo.reward_command", command, rule, works)])
    return _of_command(command, config.reward_seconds)


def _load(name: str) -> Callable[..., Any]:
    """The function `module:function`, or `path.py:function`."""
    where, _, function_name = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"reward_{Path(where).stem}", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # where dataclasses and pickle look for it
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, function_name)
        if not callable(function):
            raise TypeError(f"{function_name} is a {type(function).__name__}")
    except (Exception, SystemExit) as error:  # sys.exit() would end the run with the code of one that is done
        rule = f"{type(error).__name__}: {error}"
        works = "give a function as module:function, importable from here, or as path.py:function"
        raise ConfigError("config", [Problem("data.grpo.reward", name, rule, works)]) from error
    found: Callable[..., Any] = function
    return found


def _of_function(name: str, function: Callable[..., Any], keys: Sequence[str]) -> Reward:
    about = f"data.grpo.reward = {name}"

    def reward(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        fields = {key: [prompt.record[key] for prompt in prompts] for key in keys}
        try:
            values = function(prompts=[x.text for x in prompts], completions=list(completions), **fields)
            values = list(values) if isinstance(values, Iterator) else values  # here a generator's body runs
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"{about}: raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}); it must "
                "return a number for every text"
            ) from error
        try:
            found = list(values)
        except TypeError:
            raise ValueError(
                f"{about}: returned a {type(values).__name__}; it must return a list with a number for each text"
            ) from None
        return _checked(found, completions, f"{about}: returned")

    return reward


def _of_command(command: Sequence[str], seconds: float) -> Reward:
    about = f"data.grpo.reward_command = {list(command)}"

    def reward(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        lines = [json.dumps({**x.record, "completion": text}) + "\n" for x, text in zip(prompts, completions)]
        try:
            done = subprocess.run(
                command, input="".join(lines), capture_output=True, timeout=seconds, check=True, encoding="utf-8"
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{about}: did not end within data.grpo.reward_seconds = {seconds:g} for {len(lines)} texts; give it "
                "more, or make it faster"
            ) from None
        except subprocess.CalledProcessError as error:
            said = error.stderr[-_LONGEST_OUTPUT:].strip()
            raise ValueError(f"{about}: ended with code {error.returncode}: {said or 'it wrote no errors'}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{about}: {error}") from None
        return _checked(done.stdout.splitlines(), completions, f"{about}: wrote")

    return reward


def _checked(values: Sequence[Any], completions: Sequence[str], what: str) -> list[float]:
    """Finite numbers, as many as texts. Raises ValueError."""
    if len(values) != len(completions):
        raise ValueError(
            f"{what} {len(values)} rewards for {len(completions)} texts; it must give one for each, in order"
        )
    rewards = []
    for value, text in zip(values, completions):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{what} {value!r} for the text {text[:100]!r}; a reward must be a finite number, such as 0.0 for a "
                "text that cannot be rated"
            )
        rewards.append(number)
    return rewards
