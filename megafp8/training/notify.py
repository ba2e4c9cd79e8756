"""Notifications of a run: the command `resilience.notify` is run when the run starts, restarts, ends or fails.

Problem: each event is to be told once, by whom it cannot escape. A rank that is killed tells nothing, and of the ranks
that fail after another one each knows a failure. So rank 0 tells of starts, and of the end the agent of its node
(launch/agent.py), which knows the outcome that all nodes agreed on; without such an agent rank 0 itself. Rank 0 gives
the agent what it needs by a file that the agent names in AGENT_FILE.

What a run says of itself is given in environment variables and as JSON, never as part of the command. The command has
a time limit, and its failure is a warning. This module must not import torch (`megafp8.training.errors`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.host.redaction import redact
from megafp8.host.text_file import replace_text

if TYPE_CHECKING:  # the agent does not read configs
    from megafp8.config import Config

logger = logging.getLogger(__name__)

AGENT_FILE = "MEGAFP8_NOTIFY_FILE"
"""Variable set by launch/agent.py: the file for rank 0's subscription, if it has one."""
_OF_PROCESS = "MEGAFP8_NOTIFY"
"""Variable for the subscription of rank 0 without such an agent."""
SECONDS = 30.0
_LONGEST_REASON, _TAIL = 4000, 1 << 16


@dataclass(frozen=True)
class Subscription:
    """What is told of which run. `folder`: of the run. `steps`: with the last of them it is finished.

    `restarted`: the agents have started the ranks before, which torch counts on the node whose rank failed alone.
    """

    command: str
    run: str
    folder: str
    steps: int
    restarted: bool = False


def subscribe(config: Config) -> None:
    """On rank 0, make `resilience.notify` known to whoever tells of this job. Call it once."""
    command = config.resilience.notify
    if command is None or os.environ.get("RANK", "0") != "0":
        return
    file, folder = os.environ.get(AGENT_FILE), Path(config.run_dir).absolute() / config.name
    restarted = bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) or (
        file is not None and Path(file).exists()
    )
    text = json.dumps(asdict(Subscription(command, config.name, str(folder), config.training.steps, restarted)))
    if file is not None:
        replace_text(Path(file), text)
    else:
        os.environ[_OF_PROCESS] = text


def process_subscription() -> Subscription | None:
    """The subscription of this process, if it tells of its end itself."""
    text = os.environ.get(_OF_PROCESS)
    return None if text is None else Subscription(**json.loads(text))


def file_subscription(path: Path) -> Subscription | None:
    """The subscription that rank 0, on this node, has left for its agent."""
    try:
        return Subscription(**json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return None


def started(step: int) -> threading.Thread | None:
    """Tell of a start or restart after `step` steps, on rank 0, without waiting."""
    if os.environ.get("RANK", "0") != "0":
        return None
    file = os.environ.get(AGENT_FILE)
    subscription = process_subscription() if file is None else file_subscription(Path(file))
    if subscription is None:
        return None
    event = "restart" if subscription.restarted else "start"
    thread = threading.Thread(target=tell, args=(subscription, event, step), daemon=True)
    thread.start()
    return thread


def ended(subscription: Subscription | None, code: int, reason: str = "") -> None:
    """Tell of the end of a job with exit code `code`: failure, finish, or stop where steps are left."""
    if subscription is None:
        return
    step = last_step(Path(subscription.folder) / "metrics.jsonl")
    event = "failure" if code else "finish" if step >= subscription.steps else "stop"
    tell(subscription, event, step, reason, code)


def last_step(path: Path) -> int:
    """The last step in metrics.jsonl; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            return int(json.loads(line)["step"])
    return 0


def tell(
    subscription: Subscription,
    event: str,
    step: int,
    reason: str = "",
    code: int | None = None,
    seconds: float = SECONDS,
) -> None:
    """Run the command by a shell, for at most `seconds`. What goes wrong is logged and never raised.

    Variables MEGAFP8_EVENT, _RUN, _FOLDER, _STEP, _REASON, _EXIT_CODE and _HOST, and a JSON object on stdin with the
    same names in lower case. Credentials are removed from the reason.
    """
    facts = {
        "event": event,
        "run": subscription.run,
        "folder": subscription.folder,
        "step": step,
        "reason": redact(reason).replace("\0", "")[:_LONGEST_REASON],
        "exit_code": code,
        "host": socket.gethostname(),
    }
    values = {f"MEGAFP8_{key.upper()}": "" if value is None else str(value) for key, value in facts.items()}
    environment = {key: value for key, value in os.environ.items() if key not in (AGENT_FILE, _OF_PROCESS)}
    try:
        problem = _run(subscription.command, json.dumps(facts) + "\n", environment | values, seconds)
    except Exception as error:  # whatever it is, the run is worth more
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(f"resilience.notify, for {event}: {redact(problem)}")


def _run(command: str, text: str, environment: dict[str, str], seconds: float) -> str:
    """Run it; returns what went wrong."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as said:
        stdin.write(text.encode("utf-8", "backslashreplace"))
        stdin.seek(0)
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=stdin,
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,  # so that all that it starts can be ended
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"ended after {seconds:g} s without an end of its own"
        said.seek(max(0, os.fstat(said.fileno()).st_size - 500))
        shown = " ".join(said.read().decode("utf-8", "replace").split())
    return f"exit code {code}{f': {shown}' if shown else ''}" if code else ""
