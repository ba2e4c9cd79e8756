"""Rewards of texts, computed by a Python function or by a program that reads JSON lines.

Both are the user's code. Any failure in it becomes a ValueError that says what failed, where, and what would work.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megafp8.config import ConfigError, GrpoConfig, Problem
from megafp8.data.prompts import Prompt
from megafp8.host.processes import run_limited

Reward = Callable[[Sequence[Prompt], Sequence[str]], list[float]]
"""Function that maps prompts, and the text that continues each of them, to a list of rewards. Raises ValueError."""

_LONGEST_OUTPUT = 2000
"""Number of characters of a program's error output that are shown."""
_MOST_OUTPUT = 2**24
"""Largest number of bytes that a program may write."""


def open_reward(config: GrpoConfig, keys: Sequence[str]) -> Reward:
    """Return the reward that a config names. Raises ConfigError if it cannot be loaded.

    `keys` are the keys that the records of all prompts have; a function gets their values as arguments.
    """
    if config.reward is not None:
        return _of_function(config.reward, _load(config.reward), [key for key in keys if key != config.prompt_key])
    command = config.reward_command
    assert command is not None
    if shutil.which(command[0]) is None:
        rule, works = "there is no such program, or it cannot be run", "give its path, or make it executable"
        raise ConfigError("config", [Problem("data.grpo.reward_command", command, rule, works)])
    return _of_command(command, config.reward_seconds)


def _load(name: str) -> Callable[..., Any]:
    """Import the function `module:function` or `path.py:function`. Raises ConfigError."""
    where, _, function_name = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"reward_{Path(where).stem}", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickle look for the module here
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, function_name)
        if not callable(function):
            raise TypeError(f"{function_name} is a {type(function).__name__}")
    except (Exception, SystemExit) as error:  # sys.exit() would end the run with the exit code of a finished run
        rule = f"{type(error).__name__}: {error}"
        works = "give a function as module:function, importable from here, or as path.py:function"
        raise ConfigError("config", [Problem("data.grpo.reward", name, rule, works)]) from error
    loaded: Callable[..., Any] = function
    return loaded


def _of_function(name: str, function: Callable[..., Any], keys: Sequence[str]) -> Reward:
    about = f"data.grpo.reward = {name}"

    def reward(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        fields = {key: [prompt.record[key] for prompt in prompts] for key in keys}
        try:
            values = function(prompts=[x.text for x in prompts], completions=list(completions), **fields)
            is_iterable = hasattr(type(values), "__iter__") or hasattr(type(values), "__getitem__")
            rewards = list(itertools.islice(values, len(completions) + 1)) if is_iterable else None
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"{about}: raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}); it must "
                "return a number for every text"
            ) from error
        if rewards is None:
            raise ValueError(
                f"{about}: returned a {type(values).__name__}; it must return a list with a number for each text"
            )
        return _checked(rewards, completions, f"{about}: returned")

    return reward


def _of_command(command: Sequence[str], seconds: float) -> Reward:
    about = f"data.grpo.reward_command = {list(command)}"

    def reward(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        lines = [json.dumps({**x.record, "completion": text}) + "\n" for x, text in zip(prompts, completions)]
        try:
            done = run_limited(command, "".join(lines).encode(), seconds=seconds, most=_MOST_OUTPUT)
            written = done.stdout.decode("utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{about}: {error}") from None
        if len(done.stdout) > _MOST_OUTPUT:
            raise ValueError(
                f"{about}: wrote more than {_MOST_OUTPUT:,} bytes for {len(lines)} texts; it must write one number per "
                "text, each on its own line"
            )
        if done.code is None:
            raise ValueError(
                f"{about}: did not end within data.grpo.reward_seconds = {seconds:g} for {len(lines)} texts; give it "
                "more time, or make it faster"
            )
        if done.code:
            said = done.stderr.decode("utf-8", "replace")[-_LONGEST_OUTPUT:].strip()
            raise ValueError(f"{about}: ended with code {done.code}: {said or 'it wrote no errors'}")
        return _checked(written.splitlines(), completions, f"{about}: wrote")

    return reward


def _checked(values: Sequence[Any], completions: Sequence[str], what: str) -> list[float]:
    """Return `values` as finite floats, one for each text. Raises ValueError."""
    if len(values) != len(completions):
        count = len(values) if len(values) < len(completions) else f"more than {len(completions)}"
        raise ValueError(f"{what} {count} rewards for {len(completions)} texts; it must give one for each, in order")
    rewards = []
    for value, text in zip(values, completions):
        try:
            number = float(value)
        except (Exception, SystemExit):  # the user's object may raise any exception; an int may be too large
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{what} {_shown(value)} for the text {text[:100]!r}; a reward must be a finite number, such as 0.0 "
                "for a text that cannot be rated"
            )
        rewards.append(number)
    return rewards


def _shown(value: Any) -> str:
    """Return a short text that shows a value in an error message."""
    try:
        return repr(value)[:100]
    except (Exception, SystemExit):  # also for an int with more digits than Python prints
        return f"a {type(value).__name__}"
