"""What it costs to be one of several replicas, part by part, and what a lost peer costs; two replicas of one rank each.

    python -m benchmarks.bench_replicas --elements 1000000000 --state-bytes 14

    quorum            `Membership.begin` with unchanged members
    exchange          sums of the gradients, and the vote
    vote              `exchange` of nothing
    all-reduce        torch's, of the same gradients: what any data parallelism needs
    copy              the state of a replica that rejoins, in GB/s
    lost              from SIGKILL of the peer, within an exchange, until the next step has been exchanged without it

On CUDA each replica has a GPU. `--elements`: gradients of a rank, fp32; 10^9 are those of 8B parameters on 8 GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import seconds
from megafp8.replicas import Membership, ReplicaLost, lighthouse
from megafp8.replicas.membership import Limits, StateTensors
from megafp8.replicas.quorum import NEW

TOKEN = "a token of benchmarks"


def _replica(index: int, options: argparse.Namespace, folder: str, restarted: bool = False) -> None:
    device = torch.device("cuda", index) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    store_port = options.ports[index] + (2 if restarted else 0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port)}
    dist.init_process_group("gloo", init_method="env://", rank=0, world_size=1)
    gradients = torch.full((options.elements,), float(index + 1), device=device)
    state = torch.full((options.elements * options.state_bytes // 4,), float(index + 1), device=device)
    membership = Membership(
        lighthouse.Place("127.0.0.1", options.port, TOKEN, index),
        True,
        device,
        Limits(exchange=options.limit, quorum=120.0),
        state=lambda: StateTensors([state], []),
        metadata=lambda: {"step": 0},
        restore=lambda metadata: None,
    )
    results: dict[str, Any] = {}

    def begin(step: int, members: int = 2) -> None:
        while len(membership.begin(step).members) < members:
            time.sleep(0.05)

    if restarted:
        start = time.perf_counter()
        quorum = membership.begin(NEW)
        results["copy"] = state.numel() * 4 / 1e9 / (time.perf_counter() - start)
        assert quorum.step > 0
        assert torch.all(state[:1000] == 1.0)
        membership.exchange([gradients.zero_()], [])
        Path(folder, "restarted.json").write_text(json.dumps(results))
        membership.close()
        os._exit(0)
    begin(0)
    step = 0

    def one_step() -> None:
        nonlocal step
        membership.exchange([gradients], [])
        step += 1
        begin(step)

    one_step()
    expected = 3.0
    assert torch.all(gradients[:: 1 << 16] == expected), gradients[:4]
    empty: list[torch.Tensor] = []

    def vote() -> None:
        nonlocal step
        membership.exchange(empty, empty)
        step += 1

    quorums, votes, exchanges = [], [], []
    for _ in range(options.times):
        votes += seconds(vote, device, 1)
        quorums += seconds(partial(begin, step), device, 1)
        gradients.fill_(index + 1.0)
        exchanges += seconds(lambda: membership.exchange([gradients], []), device, 1)
        step += 1
        begin(step)
    results |= {
        name: statistics.median(xs) for name, xs in (("quorum", quorums), ("vote", votes), ("exchange", exchanges))
    }
    if options.cuda:
        prefix = dist.PrefixStore("plain", dist.TCPStore("127.0.0.1", options.ports[0], timeout=timedelta(seconds=60)))
        plain = dist.ProcessGroupNCCL(prefix, index, 2, dist.ProcessGroupNCCL.Options())
        plain.allreduce([gradients]).wait()
        results["all-reduce"] = statistics.median(
            seconds(lambda: plain.allreduce([gradients]).wait(), device, options.times)
        )
    if index == 1:
        Path(folder, "killed").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    state.fill_(1.0)
    lost = None
    while lost is None:
        gradients.fill_(1.0)
        try:
            membership.exchange([gradients], [])
            lost = time.time()
        except ReplicaLost:
            begin(step, 1)
    step += 1
    results["lost"] = lost - float(Path(folder, "killed").read_text())
    assert float(gradients[0]) == 1.0
    Path(folder, "alone").write_text("")
    while True:  # until the peer is back and has copied the state
        quorum = membership.begin(step)
        if len(quorum.members) == 2:
            break
        membership.exchange([gradients], [])
        step += 1
        time.sleep(0.02)
    gradients.fill_(1.0)
    start = time.perf_counter()
    membership.exchange([gradients], [])
    results["exchange with a copy"] = time.perf_counter() - start
    Path(folder, "results.json").write_text(json.dumps(results))
    membership.close()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--state-bytes", type=int, default=14, help="bytes of state for each gradient")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of one operation")
    options = parser.parse_args()
    options.cuda = torch.cuda.is_available()
    options.port, options.ports = 29555, [29561, 29562]
    stop = lighthouse.start(("127.0.0.1", options.port), TOKEN, 1, 1.0, 1.0)
    context = mp.get_context("spawn")
    with TemporaryDirectory() as folder:
        processes = [context.Process(target=_replica, args=(i, options, folder)) for i in range(2)]
        for process in processes:
            process.start()
        processes[1].join()
        while not Path(folder, "alone").exists() and processes[0].is_alive():
            time.sleep(0.05)
        again = context.Process(target=_replica, args=(1, options, folder, True))
        again.start()
        again.join()
        processes[0].join()
        results = json.loads(Path(folder, "results.json").read_text())
        results |= json.loads(Path(folder, "restarted.json").read_text())
    for name, value in results.items():
        shown = f"{value:.2f} GB/s" if name == "copy" else f"{1000 * value:.2f} ms"
        print(f"{name:24} {shown}")
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
