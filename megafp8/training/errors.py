"""Errors that end a run, the exit codes of the process, and how a rank reports its failure.

Problem: under an elastic agent (launch/agent.py or torchrun) the failure of one rank makes all other ranks fail, and
the agent prints a summary of its own, so the cause is hard to find. A failing rank therefore writes its message to the
file that the agent reads (`TORCHELASTIC_ERROR_FILE`), and the agent prints it last. The first rank of a node to fail
writes its message; ranks that fail later write one line that says so.

Error files have torch's format (`torch.distributed.elastic.multiprocessing.errors.ErrorHandler`), with two more keys in
`extraInfo`: `exit_code`, and `follows`, which is true if the failure was caused by that of another rank.

This module must not import torch: errors of the command line and the config are reported before torch is imported.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from megafp8.host.error_causes import causes, lost_connection, no_space, os_error
from megafp8.host.messages import printable
from megafp8.host.object_store import ObjectStoreError, is_transient
from megafp8.host.redaction import redact
from megafp8.host.text_file import replace_text
from megafp8.training import notify

DONE = 0  # all steps done, or stopped cleanly on request
FAILED = 1  # may succeed after a restart: a crash, a lost node, a full disk
NO_RESTART = 2  # fails again after a restart: config, data, checkpoint, divergence
HUNG = 3  # no progress: ended by the rank's hang watch, whose message names the rank at fault

AGENT_PID = "MEGAFP8_AGENT_PID"
"""Variable set by launch/agent.py, which prints the error files of every attempt: the number of its process."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TrainingError(RuntimeError):
    """Training cannot continue, for a reason the user can act on. All ranks raise it together, with one message."""

    exit_code: ClassVar[int] = FAILED


class StateDiffers(TrainingError):
    """Ranks, or replicas, hold different bits of state that must be equal."""


class ComputationDiffers(TrainingError):
    """A rank computed something else from the same input."""


class Diverged(TrainingError):
    """Too many steps in a row were skipped, or the loss jumped again and again after the same checkpoint."""

    exit_code: ClassVar[int] = NO_RESTART  # the same steps would be skipped again


def run_and_report(job: Callable[[], object]) -> int:
    """Run `job` and return the exit code of this process; an exception is reported to the agent, or on stderr.

    A ValueError raised by this package is a fault of config, data or checkpoint, and so is an ObjectStoreError that
    would come again: only its message is shown, as of a TrainingError. So it is of other exceptions whose class is this
    package's (SaveFailed), of any ObjectStoreError and of a full disk, after which a restart may succeed. Other
    exceptions, including ValueErrors raised by libraries, are shown with their traceback.
    SystemExit and KeyboardInterrupt pass through. Credentials are removed from what is printed. SIGUSR2 prints the
    stacks of all threads on stderr, to see where a rank that makes no progress waits, and so do SIGBUS and other fatal
    signals. The process may open as many files as the hard limit allows.
    """
    faulthandler.register(signal.SIGUSR2, file=2)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _clean_up_silently()
    _end_with_agent()
    try:
        job()
    except Exception as error:
        trace = traceback.format_exc()
        if (limit := _file_limit(error)) is not None:
            code, message = FAILED, f"error: {limit}"
        elif isinstance(error, TrainingError):
            code, message = error.exit_code, f"error: {error}"
        elif (isinstance(error, ValueError) and _is_ours(error)) or (
            isinstance(error, ObjectStoreError) and not is_transient(error)
        ):
            code, message = NO_RESTART, f"error: {error}"
        elif lost_connection(error):
            first_line = str(error).partition("\n")[0]  # torch adds the C++ stack
            report_failure(f"lost the connection to another rank: {first_line}", FAILED, trace, follows=True)
            return FAILED
        elif no_space(error) is not None or isinstance(error, ObjectStoreError) or _is_our_class(error):
            code, message = FAILED, f"error: {error}"
        else:
            code, message = FAILED, trace.rstrip()
        report_failure(message, code, trace)
        return code
    return DONE


def _clean_up_silently() -> None:
    """Hide the warnings of the process that removes the semaphores which this one leaves when it is killed.

    Python starts that process with the warning options of this one. It prints the warning after the error message.
    """
    option = "ignore:resource_tracker"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def _end_with_agent() -> None:
    """Let the kernel kill this process when launch/agent.py, which started it, ends without having ended it.

    An agent that is killed cannot end its ranks, which have sessions of their own. They would go on, or wait for each
    other, on devices that the next attempt needs.
    """
    agent = os.environ.get(AGENT_PID)
    if agent is None or os.getppid() != int(agent):  # it was started by a script of the user's, which may end before
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(agent):  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised `error`, so that its message is written for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return _is_our_class(error) or raised_in.startswith("megafp8.")


def _is_our_class(error: Exception) -> bool:
    """Whether this package defines the exception's class, so that its message is written for the user."""
    return type(error).__module__.startswith("megafp8.")


def _file_limit(error: BaseException) -> str | None:
    """The message for an error that was caused by a limit of open files, with what to do; None for other errors."""
    if (host_error := os_error(error, errno.ENFILE)) is not None:
        return f"{host_error}: the host has as many open files as it allows; see sysctl fs.file-max"
    phrase = os.strerror(errno.EMFILE)  # loader processes and native code raise other classes
    for one in causes(error):
        if (isinstance(one, OSError) and one.errno == errno.EMFILE) or phrase in str(one):
            text, (most, _) = str(one).partition("\n")[0], resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{text}: this process may open {most:,} files; raise the hard limit first, e.g. ulimit -n 4096"
    return None


def report_failure(message: str, code: int, trace: str, *, follows: bool = False) -> None:
    """Report why this process ends with exit code `code`: to the agent, or on stderr.

    `follows`: the failure was caused by another rank's failure. Credentials are removed from both texts.
    """
    message, trace = printable(redact(message)), printable(redact(trace))
    _report(message, code, trace, follows=follows)
    notify.ended(notify.process_subscription(), code, message)


def _report(message: str, code: int, trace: str, *, follows: bool) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        print(message, file=sys.stderr, flush=True)
        return
    file = Path(path)
    try:
        _write_error_file(file, message, code, trace, follows)
    except OSError as error:  # a full disk, perhaps the failure itself
        print(f"{message}\n{file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return
    if follows:
        return
    if not _is_first_of_node(file):
        _write_error_file(file, "failed after another rank of this node", code, trace, follows=True)
    elif not _agent_prints_error_file():
        print(message, file=sys.stderr, flush=True)


def _is_first_of_node(file: Path) -> bool:
    """Whether this rank's error file is the first that a rank of this node has written in this attempt."""
    # The agent ends all ranks as soon as one has exited, so each rank writes its message before it makes this link: a
    # rank that finds the link made can rely on the other rank's message.
    try:
        os.link(file, file.parent.parent / "first_error.json")  # atomic; fails if the name exists
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return True
    return True


def _write_error_file(file: Path, message: str, code: int, trace: str, follows: bool) -> None:
    # torchrun takes the earliest failure, in whole seconds, as the root cause: consequences get a second more.
    extra = {"timestamp": str(int(time.time()) + follows), "exit_code": code, "follows": follows, "traceback": trace}
    replace_text(file, json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _agent_prints_error_file() -> bool:
    """launch/agent.py prints it after every attempt, torchrun after the last attempt only."""
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return bool(os.environ.get(AGENT_PID)) or restarts >= limit
