"""Agent of `megafp8 launch`: torchrun's agent, with exit codes and clean stops of training jobs (launch/command.py).

torchrun's agent treats all failures alike. It restarts a job with a wrong config, prints its own traceback after a
clean stop, and reports only lost connections on the other nodes. This agent is a subclass of torch's
`LocalElasticAgent`, with torchrun's options (c10d rendezvous only), and differs as follows:

- Exit codes: 0 done, or stopped cleanly; 2 wrong config, data or checkpoint, never restarted; 3 no progress and 1
  another failure, after its restarts. The last output is the message of the rank that failed first.
  STOPPED_EXIT_CODE in the environment sets the exit code of all nodes after a clean stop, for schedulers that interpret
  0 as the end of the job.
- SIGTERM and Ctrl-C ask the ranks to finish their step, save and exit; the agent waits for them. torchrun's agent
  raises an exception instead, and agents of other nodes wait 5 minutes for it. A second Ctrl-C kills the ranks at once.
  While no ranks run, signals end the agent like any other process.
- The outcome of the job is written to the rendezvous store, so that all nodes end at once, with one message and code.
- The rendezvous store is in the agent of the head node. If that agent is lost, the others rejoin when it is back, for
  as long as a rendezvous may take (`--rdzv-conf join_timeout=600`).
- Each attempt gets its own process group store, see `main`.
- The agent of rank 0's node tells `resilience.notify` how the job ended (megafp8/training/notify.py).

Exit codes, and messages of ranks: megafp8/training/errors.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Mapping
from os.path import expanduser
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from megafp8.commands import COMMANDS
from megafp8.host.arguments import ArgumentParser
from megafp8.training import notify
from megafp8.training.errors import AGENT_PID, DONE, FAILED, NO_RESTART

LOST_STORE = (RendezvousConnectionError, dist.DistNetworkError, dist.DistStoreError)
OUTCOME_KEY = "megafp8/outcome"
STOPPED_KEY = "megafp8/stopped"
OUTCOME_SECONDS = 45.0  # time for other nodes to read the outcome: torch takes up to 30 s to end ranks that hang
FOLLOWER_SECONDS = 5.0  # time for the node of the rank that failed first to report it
GRACE_SECONDS = 5  # time for ranks to exit by themselves once one has failed
STOP_SECONDS = 110  # time from a stop signal until ranks are killed; TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it


SAID_BY_OUTCOME = (
    "Setting OMP_NUM_THREADS",
    "Sending process",
    "Unable to shutdown process",
    "failed (exitcode",
    "death signal",
    "Got termination signal",
)
"""Parts of messages from torch's agent that repeat the outcome of the job with less information."""
TORCH_LOGGERS = ("run", "elastic.multiprocessing.api", "elastic.agent.server.api")


def hide_torch_messages() -> None:
    """Drop messages of torch's agent that the outcome of the job makes redundant; all others are shown."""
    for name in TORCH_LOGGERS:
        logging.getLogger(f"torch.distributed.{name}").addFilter(
            lambda record: not any(part in str(record.msg) for part in SAID_BY_OUTCOME)
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a job, or of one attempt.

    `follows`: it is the consequence of a failure on another node. `stopped`: a signal requested it.
    """

    code: int
    message: str = ""
    follows: bool = False
    stopped: bool = False


def outcome_of(failures: Mapping[int, ProcessFailure], failed_first: Collection[int] = ()) -> Outcome:
    """Return the outcome of the failures of one node's ranks (by global rank), as determined by the first cause.

    `failed_first` are the ranks that failed before the agent ended the others, if it did.
    """

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        signals = (-signal.SIGTERM, -signal.SIGKILL) if failed_first else (-signal.SIGTERM,)
        ended_by_agent = rank not in failed_first and not _details(failure) and failure.exitcode in signals
        return ended_by_agent, bool(_details(failure).get("follows")), failure.timestamp

    if not failures:
        return Outcome(FAILED, "error: the ranks of this node were ended")
    rank = min(failures, key=order)
    failure = failures[rank]
    details = _details(failure)
    where = f"rank {rank} on {socket.gethostname()}"
    if details:
        message, code = failure.message["message"], int(details["exit_code"])  # type: ignore[index]
        if message.startswith("error: "):  # a message for the user about the whole job
            return Outcome(code, message, details["follows"])
        space = "\n" if "\n" in message else " "
        return Outcome(code, f"error: {where} failed:{space}{message}", details["follows"])
    if failure.exitcode < 0:
        hint = ", as the kernel does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        name = signal.Signals(-failure.exitcode).name
        return Outcome(FAILED, f"error: {where} (process {failure.pid}) was ended by {name}{hint}")
    code = NO_RESTART if failure.exitcode == NO_RESTART else FAILED
    return Outcome(code, f"error: {where} left with exit code {failure.exitcode}")


def _details(failure: ProcessFailure) -> dict[str, Any]:
    """Return the `extraInfo` of the rank's error file; an empty dict if the rank wrote none."""
    message = failure.message
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if "exit_code" in extra else {}


class Agent(LocalElasticAgent):
    """torch's agent of one node. `outcome` tells how the job ended, once it has."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig) -> None:
        super().__init__(
            spec,
            config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
        )
        self.outcome: Outcome | None = None
        self.stopped = False
        self._failed_first: list[int] = []  # global ranks
        self._stop_signal: int | None = None
        self._stop_deadline = float("inf")

    @property
    def remaining_restarts(self) -> int:
        """Number of restarts that are left."""
        return self._remaining_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # No rank is running that could be asked to stop, and waiting for other nodes may take long.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = super()._start_workers(worker_group)
        self._failed_first = []
        for number in (signal.SIGTERM, signal.SIGINT):  # torch has installed its own
            signal.signal(number, self._on_signal)
        return workers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_signal == number == signal.SIGINT:
            self._signal_ranks(signal.SIGKILL)
            raise SignalException("second Ctrl-C", signal.SIGINT)
        if self._stop_signal is None:
            seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS))
            self._stop_deadline = time.monotonic() + seconds
            self._signal_ranks(signal.SIGTERM)
        self._stop_signal = number
        self._remaining_restarts = 0

    def _signal_ranks(self, number: int) -> None:
        for handler in self._pcontext.subprocess_handlers.values():  # type: ignore[union-attr]
            handler.proc.send_signal(number)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._end_ranks()
        super()._shutdown(*args, **kwargs)

    def _end_ranks(self) -> None:
        # The ranks' handler of SIGTERM waits for the end of their step. If a rank is lost, the step never ends: the
        # others wait for it in a collective, and torch would wait 30 seconds for them, on one node after another.
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, GRACE_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop_signal is not None and not self.stopped:
            self.stopped = True
            if worker_group.group_world_size > 1:
                with contextlib.suppress(*LOST_STORE):
                    self._store.set(STOPPED_KEY, "1")
        ranks = self._pcontext.subprocess_handlers.items()  # type: ignore[union-attr]
        failed = [worker_group.workers[local_rank].global_rank for local_rank, rank in ranks if rank.proc.poll()]
        if failed:
            self._failed_first = self._failed_first or failed
            self._end_ranks()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            if time.monotonic() > self._stop_deadline:
                self._signal_ranks(signal.SIGKILL)
            if self._ended_elsewhere():
                return RunResult(state=WorkerState.FAILED)
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._on_failure(outcome_of(result.failures, self._failed_first), result.failures)
        return result

    def _exit_barrier(self) -> None:
        nodes = self._worker_group.group_world_size
        if nodes > 1:
            try:
                barrier(self._store, nodes, f"{STOPPED_KEY}/known", self._exit_barrier_timeout)
                self.stopped |= self._store.check([STOPPED_KEY])
            except LOST_STORE:
                return  # a node is gone
        super()._exit_barrier()  # the node that has the store must exit last

    def _on_failure(self, outcome: Outcome, failures: Mapping[int, ProcessFailure]) -> None:
        """Decide whether to restart the ranks of this node, which have ended."""
        if self._stop_signal is not None and failures:
            ends = {failure.exitcode for failure in failures.values()}
            if ends == {-signal.SIGTERM}:  # they had not installed their handler yet, so there is nothing to save
                outcome = Outcome(DONE, "stopped on request before training began", stopped=True)
            elif ends <= {-signal.SIGTERM, -signal.SIGKILL} and time.monotonic() > self._stop_deadline:
                outcome = Outcome(FAILED, "error: killed: the step and its checkpoint did not finish in time")
        if outcome.follows and self._is_decided_elsewhere():
            return
        if self._remaining_restarts == 0 or outcome.code == NO_RESTART:
            self._end(outcome)
        else:
            left = f"restarting, {self._remaining_restarts} left"
            print(f"{outcome.message}\n{left}", file=sys.stderr, flush=True)

    def _is_decided_elsewhere(self) -> bool:
        """Wait a few seconds for the node on which a rank failed first.

        Return whether that node has ended or restarts the job.
        """
        deadline = time.monotonic() + FOLLOWER_SECONDS
        while self._worker_group.group_world_size > 1 and time.monotonic() < deadline:
            if self._ended_elsewhere():
                return True
            if self._remaining_restarts and self._rdzv_handler.num_nodes_waiting():
                return True
            time.sleep(self._worker_group.spec.monitor_interval)
        return False

    def _ended_elsewhere(self) -> bool:
        """Return whether another node has ended the job. If so, end this node with the same outcome."""
        if self._worker_group.group_world_size > 1 and self._store.check([OUTCOME_KEY]):
            self._end(Outcome(FAILED))
            return True
        return False

    def _end(self, outcome: Outcome) -> None:
        """End the job on all nodes, with the outcome that was written first."""
        self._remaining_restarts = 0
        self.outcome = outcome
        nodes = self._worker_group.group_world_size
        if nodes == 1:
            return
        try:
            written = self._store.compare_set(OUTCOME_KEY, "", json.dumps(dataclasses.asdict(outcome)))
            self.outcome = Outcome(**json.loads(written))
            self._rdzv_handler.set_closed()  # for nodes that wait in a rendezvous
            # The node that has the store must exit last.
            barrier(self._store, nodes, f"{OUTCOME_KEY}/known", OUTCOME_SECONDS)
        except (*LOST_STORE, RendezvousError):
            pass  # a node is gone

    def end_as_others(self) -> Outcome:
        """Return the outcome if the rendezvous is closed because another node has ended the job."""
        try:
            if self._store is not None and self._store.check([OUTCOME_KEY]):
                self._end(Outcome(FAILED))
        except LOST_STORE:
            pass
        return self.outcome or Outcome(FAILED, "error: the rendezvous is closed: another node has ended the job")


def run(config: LaunchConfig, entrypoint: str, arguments: list[str]) -> tuple[Outcome, bool]:
    """Run the ranks of this node until the job has ended on all nodes. Also return whether rank 0 was one of them."""
    restarts = config.max_restarts
    patience = float(config.rdzv_configs.get("join_timeout", 600))
    give_up = time.monotonic() + patience
    while True:
        try:
            agent = _make_agent(config, restarts, entrypoint, arguments)
        except RendezvousConnectionError as error:
            if time.monotonic() > give_up:
                cause = error.__cause__ or error
                text = f"error: no agent answers at the head node, {config.rdzv_endpoint}: {cause}"
                return Outcome(FAILED, text), False
            time.sleep(1.0)
            continue
        outcome = _attempt(agent)
        if outcome is not None:
            return outcome, agent.get_worker_group().group_rank == 0
        restarts = agent.remaining_restarts - 1
        if restarts < 0:
            return Outcome(FAILED, f"error: lost the agent of the head node, {config.rdzv_endpoint}"), False
        text = f"lost the agent of the head node, {config.rdzv_endpoint}; waiting for it to be restarted"
        print(f"{text}, {restarts} restarts left", file=sys.stderr, flush=True)
        give_up = time.monotonic() + patience


def _make_agent(config: LaunchConfig, max_restarts: int, entrypoint: str, arguments: list[str]) -> Agent:
    """Return an agent with a new rendezvous. Raises RendezvousConnectionError if the store does not answer."""
    settings = dict(config.rdzv_configs)
    if can_listen(config.rdzv_endpoint):
        settings.setdefault("is_host", "true")
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            config.rdzv_backend,
            config.rdzv_endpoint,
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            local_addr=config.local_addr,
            **settings,
        )
    )
    shared = {field.name for field in dataclasses.fields(WorkerSpec)} & {f.name for f in dataclasses.fields(config)}
    options = {name: getattr(config, name) for name in shared} | {"max_restarts": max_restarts}
    spec = WorkerSpec(
        local_world_size=config.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=entrypoint,
        args=tuple(arguments),
        **options,
    )
    return Agent(spec, config)


def can_listen(endpoint: str) -> bool:
    """Return whether this machine has the address of the rendezvous, and nothing listens there yet.

    torch compares the address only with the addresses of the machine's host name. On many machines, that is 127.0.0.1,
    or an address in another network. All agents would then wait for a store that none of them creates.
    """
    host, port = parse_rendezvous_endpoint(endpoint, default_port=29400)
    with contextlib.suppress(OSError):  # an unknown name, or an address of another machine
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
                probe.bind(address)
                return True
    return False


def _attempt(agent: Agent) -> Outcome | None:
    """Run an agent to its end. Return None if it lost the rendezvous store."""
    try:
        result = agent.run()
    except SignalException as stopped:
        outcome = Outcome(FAILED, f"error: ended at once by {stopped.sigval.name}")
    except RendezvousClosedError:
        outcome = agent.end_as_others()
    except LOST_STORE:
        return None
    except RendezvousError as error:
        outcome = Outcome(FAILED, f"error: the nodes of the job did not meet: {type(error).__name__} {error}")
    else:
        if result is not None and not result.is_failed():
            outcome = Outcome(DONE, stopped=agent.stopped)
        else:
            outcome = agent.outcome or Outcome(FAILED, "error: the job ended unexpectedly")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    return outcome


def with_command(options: argparse.Namespace) -> argparse.Namespace:
    """Return torchrun's options, adapted if the script is a command of megafp8 such as `pretrain`.

    A job on one node then needs no `--standalone`.
    """
    name = options.training_script
    if name in COMMANDS and not options.module and not options.no_python and not os.path.exists(name):
        options.module, options.training_script = True, "megafp8"
        options.training_script_args = [name, *options.training_script_args]
    if options.nnodes in ("1", "1:1") and options.rdzv_backend == "static" and not options.rdzv_endpoint:
        options.standalone = True
    return options


def sizes_problem(options: argparse.Namespace) -> str | None:
    """Describe invalid numbers of processes or nodes, for which torchrun raises a traceback; None if they are valid."""
    processes, nodes = str(options.nproc_per_node), str(options.nnodes)
    if processes not in ("auto", "cpu", "gpu", "xpu") and not re.fullmatch("[1-9][0-9]*", processes):
        return f"--nproc-per-node {processes}: give a number of at least 1, or gpu for all GPUs"
    sizes = re.fullmatch("([1-9][0-9]*)(?::([1-9][0-9]*))?", nodes)
    if sizes is None or int(sizes[2] or sizes[1]) < int(sizes[1]):
        return f"--nnodes {nodes}: give a number of at least 1, or MIN:MAX"
    return None


def main() -> int:
    """Run the job of this node and return its exit code."""
    # By default, the ranks of all attempts share one store for their process groups: the store of the agent on the
    # first node (DynamicRendezvousHandler._shared_tcp_store_server). It keeps the addresses of ranks from an earlier
    # attempt. Ranks of the next attempt then connect to these addresses ("connectFullMesh failed ... Connection
    # refused", or a wait of minutes for a process that no longer exists). The store is also lost with that node.
    # Without sharing, rank 0 creates a store for each attempt, at a port on which the agents agree each time.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[AGENT_PID] = str(os.getpid())
    hide_torch_messages()
    parser = get_args_parser()
    parser.__class__ = ArgumentParser  # reports errors like all other commands
    parser.register("type", str, expanduser)  # for --log-dir and the script
    options = with_command(parser.parse_args(sys.argv[1:]))
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if options.rdzv_backend != "c10d":
        print("error: --standalone or --rdzv-backend c10d is needed", file=sys.stderr)
        return NO_RESTART
    if (problem := sizes_problem(options)) is not None:
        parser.error(problem)
    try:
        config, entrypoint, arguments = config_from_args(options)
    except ValueError as error:  # --nproc-per-node gpu without a GPU
        parser.error(f"--nproc-per-node {options.nproc_per_node}: {error}")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    with tempfile.TemporaryDirectory(prefix="megafp8-agent-") as folder:
        subscription = Path(folder) / "notify.json"
        os.environ[notify.AGENT_FILE] = str(subscription)
        outcome, has_rank_0 = run(config, str(entrypoint), arguments)
        if outcome.message:
            print(outcome.message, file=sys.stderr, flush=True)
        if has_rank_0:
            notify.ended(notify.file_subscription(subscription), outcome.code, outcome.message)
    return int(os.environ.get("STOPPED_EXIT_CODE", DONE)) if outcome.stopped else outcome.code


if __name__ == "__main__":
    sys.exit(main())
