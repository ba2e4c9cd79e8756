"""Errors that end a run, exit codes of the process, and the report of a rank's failure.

Problem: under an elastic agent (launch/agent.py or torchrun) the failure of one rank makes all other ranks fail, and
the agent prints its own summary, so the cause is hard to find. A failing rank therefore writes its message to the file
that the agent reads (`TORCHELASTIC_ERROR_FILE`), and the agent prints this message last. The first rank of a node to
fail writes its message. Ranks that fail later write one line that says that they failed later.

Error files have torch's format (`torch.distributed.elastic.multiprocessing.errors.ErrorHandler`), with two more keys in
`extraInfo`: `exit_code`, and `follows`, which is true if another rank's failure caused this failure.

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
HUNG = 3  # no progress: the rank's hang watch ended the process; its message names the rank at fault

AGENT_PID = "MEGAFP8_AGENT_PID"
"""Environment variable with the process id of launch/agent.py, which prints the error files of every attempt."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TrainingError(RuntimeError):
    """Training cannot continue, for a reason that the user can act on. All ranks raise it, with the same message."""

    exit_code: ClassVar[int] = FAILED


class StateDiffers(TrainingError):
    """Ranks or replicas hold state that differs although it must be bitwise equal."""


class ComputationDiffers(TrainingError):
    """A rank computed different results from the same input."""


class Diverged(TrainingError):
    """Too many steps in a row were skipped, or the loss jumped repeatedly after the same checkpoint."""

    exit_code: ClassVar[int] = NO_RESTART  # the same steps would be skipped again


def run_and_report(job: Callable[[], object]) -> int:
    """Run `job`, report any exception to the agent or on stderr, and return the exit code of this process.

    A ValueError raised by this package means a fault of config, data or checkpoint, and so does an ObjectStoreError
    that would occur again. Both end with `NO_RESTART`, and only their message is shown, as for a TrainingError. Only
    the message is also shown for other exceptions of this package (SaveFailed), any other ObjectStoreError and a full
    disk; a restart may succeed after these. Other exceptions, including ValueErrors raised by libraries, are shown with
    their traceback. SystemExit and KeyboardInterrupt pass through. Credentials are removed from printed texts.

    SIGUSR2 prints the stacks of all threads on stderr, to show where a rank without progress waits. SIGBUS and other
    fatal signals do the same. The limit of open files is raised to the hard limit.
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
    """Hide the warnings of Python's resource tracker, which removes the semaphores of a killed process.

    Python starts the tracker with the warning options of this process. Otherwise the tracker would print its warning
    after the error message.
    """
    option = "ignore:resource_tracker"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def _end_with_agent() -> None:
    """Let the kernel kill this process if launch/agent.py, which started it, ends first.

    An agent that is killed cannot end its ranks, because they run in separate sessions. The ranks would continue, or
    wait for each other, on devices that the next attempt needs.
    """
    agent = os.environ.get(AGENT_PID)
    if agent is None or os.getppid() != int(agent):  # a user's script started this process and may end earlier
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(agent):  # the agent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _is_ours(error: ValueError) -> bool:
    """Return whether this package raised `error`, so that its message is written for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return _is_our_class(error) or raised_in.startswith("megafp8.")


def _is_our_class(error: Exception) -> bool:
    """Return whether this package defines the exception's class, so that its message is written for the user."""
    return type(error).__module__.startswith("megafp8.")


def _file_limit(error: BaseException) -> str | None:
    """Return a message with advice for an error caused by a limit of open files, or None for other errors."""
    if (host_error := os_error(error, errno.ENFILE)) is not None:
        return f"{host_error}: the host has reached its limit of open files; see sysctl fs.file-max"
    phrase = os.strerror(errno.EMFILE)  # loader processes and native code raise other classes
    for one in causes(error):
        if (isinstance(one, OSError) and one.errno == errno.EMFILE) or phrase in str(one):
            text, (most, _) = str(one).partition("\n")[0], resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{text}: this process may open {most:,} files; raise the hard limit first, e.g. ulimit -n 4096"
    return None


def report_failure(message: str, code: int, trace: str, *, follows: bool = False) -> None:
    """Report why this process ends with exit code `code`, to the agent or on stderr, and to notifications.

    `follows` is True if another rank's failure caused this failure. Credentials are removed from both texts.
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
    except OSError as error:  # such as a full disk, which may also be the failure to report
        print(f"{message}\n{file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return
    if follows:
        return
    if not _is_first_of_node(file):
        _write_error_file(file, "failed after another rank of this node", code, trace, follows=True)
    elif not _agent_prints_error_file():
        print(message, file=sys.stderr, flush=True)


def _is_first_of_node(file: Path) -> bool:
    """Return whether this rank's error file is the first that a rank of this node has written in this attempt."""
    # The agent ends all ranks as soon as one has exited. Each rank therefore writes its message before it makes this
    # link, and a rank that finds the link can rely on the other rank's message.
    try:
        os.link(file, file.parent.parent / "first_error.json")  # atomic; fails if the name exists
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return True
    return True


def _write_error_file(file: Path, message: str, code: int, trace: str, follows: bool) -> None:
    # torchrun takes the earliest failure, in whole seconds, as the root cause, so consequences get one second more.
    extra = {"timestamp": str(int(time.time()) + follows), "exit_code": code, "follows": follows, "traceback": trace}
    replace_text(file, json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _agent_prints_error_file() -> bool:
    """Return whether the agent prints the error file of this attempt.

    launch/agent.py prints it after every attempt, torchrun only after the last attempt.
    """
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return bool(os.environ.get(AGENT_PID)) or restarts >= limit
