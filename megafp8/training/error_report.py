"""Exit codes of a job, and the one message with which a job that fails ends.

Under an elastic agent (`launch/agent.py` or torchrun) a failure of one rank makes all other ranks fail, and the agent
prints a summary of its own. So a rank leaves its message in the file that the agent reads
(`TORCHELASTIC_ERROR_FILE`), and the agent prints it last. The first rank of a node to fail writes its message; the
others, which found the same fault or lost the connection to a rank that failed, write one line that says so.

Error files have torch's format (`torch.distributed.elastic.multiprocessing.errors.ErrorHandler`), with two more keys in
`extraInfo`: `exit_code`, and `follows`: whether this failure is the consequence of another rank's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from megafp8.training.errors import DONE, FAILED, NO_RESTART, TrainingError

AGENT_REPORTS = "MEGAFP8_AGENT_REPORTS"  # set by launch/agent.py, which prints the error files of every attempt

# What gloo, NCCL and the TCP store raise on a rank whose peer has ended its process.
_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Connection was likely closed",
    "recvValue failed",
    "remote process exited",
)


def run_and_report(job: Callable[[], object]) -> int:
    """Run `job` and return the exit code of this process; an exception is reported as the module's docstring says.

    A ValueError of this package is a fault of config, data or checkpoint: its message is all that is said, as of a
    TrainingError. Other exceptions, ValueErrors from within a library too, are reported with their traceback.
    SystemExit and KeyboardInterrupt pass through.
    """
    try:
        job()
    except TrainingError as error:
        _report(f"error: {error}", error.exit_code, traceback.format_exc())
        return error.exit_code
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            _report(f"error: {error}", NO_RESTART, traceback.format_exc())
            return NO_RESTART
        if lost_connection(error):
            first_line = str(error).partition("\n")[0]  # torch adds the C++ stack
            _report(f"lost the connection to another rank: {first_line}", FAILED, traceback.format_exc(), follows=True)
        else:
            _report(traceback.format_exc().rstrip(), FAILED, traceback.format_exc())
        return FAILED
    return DONE


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised `error`, so that its message is for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return type(error).__module__.startswith("megafp8.") or raised_in.startswith("megafp8.")


def lost_connection(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is the end of a connection to another rank: the failure is elsewhere."""
    return any(
        isinstance(cause, RuntimeError) and any(phrase in str(cause) for phrase in _LOST_CONNECTION)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _report(message: str, code: int, trace: str, *, follows: bool = False) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        print(message, file=sys.stderr, flush=True)
        return
    _write_error_file(Path(file), message, code, trace, follows)
    if not follows and not _is_first_of_node(Path(file)):
        follows = True
        _write_error_file(Path(file), "failed after another rank of this node", code, trace, follows)
    if not follows and _is_lost_otherwise():
        print(message, file=sys.stderr, flush=True)


def _is_first_of_node(file: Path) -> bool:
    """Whether this rank's error file is the first that a rank of this node has written in this attempt."""
    # The agent ends all ranks as soon as one has left. So the message is written before the claim: whoever leaves
    # because another rank was first can rely on the message of that rank.
    try:
        os.link(file, file.parent.parent / "first_error.json")  # atomic, and fails where the name exists
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return True
    return True


def _write_error_file(file: Path, message: str, code: int, trace: str, follows: bool) -> None:
    # torchrun takes the earliest failure as the root cause, in whole seconds: followers come a second later.
    extra = {"timestamp": str(int(time.time()) + follows), "exit_code": code, "follows": follows, "traceback": trace}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    temporary.replace(file)


def _is_lost_otherwise() -> bool:
    """Whether nobody will print the error file: torchrun does so only after its last attempt."""
    if os.environ.get(AGENT_REPORTS):
        return False
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return restarts < limit
