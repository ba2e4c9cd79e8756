"""Notifications of a run: call the command `resilience.notify` when the run starts, restarts, ends or fails.

Problem: each event must be reported exactly once, by a process that is sure to notice it. A killed rank reports
nothing, and if one rank fails, many other ranks fail after it. Rank 0 therefore reports starts. The agent of its node
(launch/agent.py) reports the end, because it knows the outcome that all nodes agreed on. Without such an agent, rank 0
reports the end too. Rank 0 passes the command and the run's data to the agent in a file that the agent names in
AGENT_FILE.

The command gets the data of an event in environment variables and as JSON, never as part of the command itself. It has
a time limit, and its failure is only a warning. This module must not import torch (`megafp8.training.errors`).
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
from megafp8.host.text_file import last_integer, replace_text

if TYPE_CHECKING:  # the agent does not read configs
    from megafp8.config import Config

logger = logging.getLogger(__name__)

AGENT_FILE = "MEGAFP8_NOTIFY_FILE"
"""Environment variable set by launch/agent.py: path of the file in which rank 0 leaves its subscription."""
_OF_PROCESS = "MEGAFP8_NOTIFY"
"""Environment variable that holds the subscription of rank 0 if there is no such agent."""
SECONDS = 30.0
_LONGEST_REASON = 4000


@dataclass(frozen=True)
class Subscription:
    """Command for notifications, and the run that they are about.

    Attributes:
        command: Shell command.
        run: Name of the run.
        folder: Run folder.
        steps: Number of steps after which the run is finished.
        restarted: Whether agents have started the ranks before. torch counts restarts only on the node with the failed
            rank.
    """

    command: str
    run: str
    folder: str
    steps: int
    restarted: bool = False


def subscribe(config: Config) -> None:
    """Store the subscription of `resilience.notify` for the agent or this process, on rank 0. Call this once."""
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
    """Return the subscription of this process if it reports its end itself, or None."""
    text = os.environ.get(_OF_PROCESS)
    return None if text is None else Subscription(**json.loads(text))


def file_subscription(path: Path) -> Subscription | None:
    """Return the subscription that rank 0 on this node has left for its agent, or None."""
    try:
        return Subscription(**json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return None


def started(step: int) -> threading.Thread | None:
    """Report a start or restart after `step` steps, in a thread that is returned. Only rank 0 reports."""
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
    """Report the end of a job with exit code `code`: a failure, a finish, or a stop if steps are left."""
    if subscription is None:
        return
    step = last_integer(Path(subscription.folder) / "metrics.jsonl", "step")
    event = "failure" if code else "finish" if step >= subscription.steps else "stop"
    tell(subscription, event, step, reason, code)


def tell(
    subscription: Subscription,
    event: str,
    step: int,
    reason: str = "",
    code: int | None = None,
    seconds: float = SECONDS,
) -> None:
    """Run the command in a shell for at most `seconds`. Failures are logged and never raised.

    The command gets the environment variables MEGAFP8_EVENT, _RUN, _FOLDER, _STEP, _REASON, _EXIT_CODE and _HOST, and a
    JSON object on stdin with the same names in lower case. Credentials are removed from the reason.
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
    except Exception as error:  # no failure of the command may end the run
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(f"resilience.notify, for {event}: {redact(problem)}")


def _run(command: str, text: str, environment: dict[str, str], seconds: float) -> str:
    """Run the command with `text` on stdin, and return a description of its failure, or an empty text."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as said:
        stdin.write(text.encode("utf-8", "backslashreplace"))
        stdin.seek(0)
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=stdin,
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,  # so that all its child processes can be killed
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"killed after {seconds:g} s, because it did not end"
        said.seek(max(0, os.fstat(said.fileno()).st_size - 500))
        shown = " ".join(said.read().decode("utf-8", "replace").split())
    return f"exit code {code}{f': {shown}' if shown else ''}" if code else ""
