"""Tokens that a process loads per second: local files, blends, packing, object storage with a cold and a warm cache.

    python -m benchmarks.bench_data --folder /data/bench --tokens 100e6
    python -m benchmarks.bench_data --folder /data/bench --url s3://bucket/bench --step-ms 300

The data set is synthetic: documents of 1 to 2,000 random tokens, uint16, shuffled as in training. `batches`, which
training calls, makes the micro-batches in this process or with --workers loader processes, as the job of one
data-parallel rank does. Tokens per second are those of all steps but the first, which is given by itself: it opens the
files and makes the sample index, or finds it. Local files are in the page cache.

Object storage is read with an empty cache (cold) and again with the blocks that are in it then (warm); "on demand"
reads nothing ahead. Without --url it is moto's S3 server, which this starts in a process of its own on this machine,
with --latency-ms before each answer; so figures tell how latency is hidden, and not the speed of S3.

With --step-ms a step is simulated after each global batch, as long as a step of training; `waited` is then the share
of the time in which training would have waited for data.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.common import Table, new_parser, require_positive, write_json
from megafp8.data.blend import Blend, Segment
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.packing import PackingName
from megafp8.data.sampler import batches
from megafp8.data.samples import PackedDataset
from megafp8.object_store import ObjectPath
from megafp8.object_store.cache import ObjectCache
from megafp8.object_store.path import filesystem
from megafp8.objectives.next_token import NextToken

BLEND = (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class Row:
    """One way to load. `first`: seconds until the first batch; `waited`: share of the time spent waiting for others."""

    case: str
    workers: int
    tokens_per_second: float
    first: float
    waited: float


def write_dataset(prefix: Path, tokens: int, seed: int) -> None:
    """Random documents with at least so many tokens in all."""
    generator = np.random.default_rng(seed)
    writer = IndexedDatasetWriter(prefix, np.uint16)
    while tokens > 0:
        length = int(generator.integers(1, 2000))
        writer.add_document(generator.integers(0, 50_000, length, np.uint16))
        tokens -= length
    writer.close()


@dataclass(frozen=True)
class Settings:
    """What is loaded: labels of a sample, samples of a micro-batch and of a step, steps, and seconds of a step."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    steps: int
    step_seconds: float
    index_cache: Path


def measure(
    case: str, datasets: list[IndexedDataset], workers: int, given: Settings, packing: PackingName = "concatenate"
) -> Row:
    """Load steps of `datasets`, a blend if they are several."""
    whole = packing == "best_fit"
    packed = [
        PackedDataset(x, range(x.num_documents), given.seq_length, 0, given.index_cache, 50_000, packing, context=whole)
        for x in datasets
    ]
    stream = batches(
        Blend(packed, Segment.fresh(BLEND[: len(packed)], 0)),
        consumed_samples=0,
        global_batch_size=given.global_batch_size,
        micro_batch_size=given.micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
        objective=NextToken(given.seq_length, reset_at_documents=whole, mask_eod_loss=whole),
        pin_memory=False,
    )
    begin = time.perf_counter()
    next(stream)
    first, waited, start = time.perf_counter() - begin, 0.0, time.perf_counter()
    for _ in range(given.steps):
        time.sleep(given.step_seconds)
        asked = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - asked
    seconds = time.perf_counter() - start
    tokens = given.steps * given.global_batch_size * given.seq_length
    return Row(case, workers, tokens / seconds, first, waited / seconds)


def measure_all(
    folder: Path, url: ObjectPath, tokens: int, workers: list[int], given: Settings, block_bytes: int
) -> Iterator[Row]:
    """All cases, of data sets in `folder`, which are copied to `url` and deleted again there."""
    prefixes = [folder / f"corpus-{i}" for i in range(len(BLEND))]
    for i, prefix in enumerate(prefixes):
        write_dataset(prefix, tokens, i)
    local = [IndexedDataset(prefix) for prefix in prefixes]
    for count in workers:
        yield measure("local", local[:1], count, given)
        yield measure("local, blend of 3", local, count, given)
        yield measure("local, best_fit", local[:1], count, given, "best_fit")
    for kind in ("bin", "idx"):
        (url / f"corpus-0.{kind}").write_bytes(Path(f"{prefixes[0]}.{kind}").read_bytes())
    try:
        for count in workers:
            for state in ("cold, on demand", "cold", "warm"):
                name = "on-demand" if state == "cold, on demand" else "ahead"
                cache = ObjectCache(folder / f"objects-{count}-{name}", block_bytes=block_bytes)
                datasets = [IndexedDataset(f"{url}/corpus-0", cache=cache)]
                with patch.object(Blend, "is_remote", False) if name == "on-demand" else nullcontext():
                    yield measure(f"object storage, {state}", datasets, count, given)
    finally:
        url.remove_tree()


def _serve(pipe: Connection, latency: float) -> None:
    """moto's S3 server; sends its port, and ends with the pipe."""
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)

    def delayed(*arguments: object) -> object:
        time.sleep(latency)
        return application(*arguments)

    server = make_server("127.0.0.1", 0, delayed, threaded=True)
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def server(latency: float) -> Iterator[ObjectPath]:
    """A prefix on an S3 server on this machine, which answers after `latency` seconds."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, latency), daemon=True)
    process.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        filesystem("s3://").mkdir("bench")
        yield ObjectPath("s3://bench/data")
    finally:
        process.terminate()
        process.join()


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="local disk for data sets and caches; is made")
    parser.add_argument("--url", help="prefix in object storage; default: moto's S3 server on this machine")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of moto's server, before each answer")
    parser.add_argument("--tokens", type=float, default=20e6, help="of a data set (default: %(default)s)")
    parser.add_argument("--workers", default="0,2", help="numbers of loader processes (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples of a step (default: %(default)s)")
    parser.add_argument("--block-mib", type=float, default=4.0, help="of the cache (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a simulated step")
    arguments = parser.parse_args(argv)
    try:
        require_positive(arguments, "seq_length", "micro_batch_size", "global_batch_size", "steps", "tokens")
        workers = [int(count) for count in arguments.workers.split(",")]
        arguments.folder.mkdir(parents=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = arguments.seq_length, arguments.micro_batch_size, arguments.global_batch_size, arguments.steps
    given = Settings(*sizes, arguments.step_ms / 1e3, arguments.folder / "index")
    block = int(arguments.block_mib * 2**20)
    columns = {"workers": "d", "tokens/s": ",.0f", "first step s": ".2f", "waited": ".1%"}
    table, rows = Table("case", 32, columns), []
    print(table.heading())
    try:
        with server(arguments.latency_ms / 1e3) if arguments.url is None else _given(arguments.url) as url:
            for row in measure_all(arguments.folder, url, int(arguments.tokens), workers, given, block):
                rows.append(asdict(row))
                print(table.row(row.case, row.workers, row.tokens_per_second, row.first, row.waited), flush=True)
    finally:
        shutil.rmtree(arguments.folder)
    write_json(arguments.json, rows)
    return 0


@contextmanager
def _given(url: str) -> Iterator[ObjectPath]:
    yield ObjectPath(url)


if __name__ == "__main__":
    sys.exit(main())
