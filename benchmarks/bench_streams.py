"""Tokens that a process tokenizes per second while a run trains, by tokenizer and number of worker processes.

    python -m benchmarks.bench_streams --text 'corpus/*.jsonl' --tokenizers bytes sentencepiece:tokenizer.model
    python -m benchmarks.bench_streams --text 'corpus/*.parquet' --tokenizers huggingface:tokenizer.json --step-ms 500

Micro-batches are those of a job of one data-parallel rank (`megafp8.data.text_stream`). Tokens per second are those of
all steps after the first, which opens the files and starts the workers. `CPU` is the time of this process for a million
tokens: with workers that of reading, and of making micro-batches, which the training loop's process spends; without,
that of tokenizing too. So 1e6 / CPU without workers is what a core tokenizes, whatever else the machine does.

With --step-ms a step of that time is simulated; `waited` is the share of the time in which training would wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import get_args

from benchmarks.common import Table, new_parser, require_positive, write_json
from megafp8.data.blend import Blend, Segment
from megafp8.data.text_source import TextSource
from megafp8.data.text_stream import StreamPositions, batches
from megafp8.data.tokenizers import TokenizerKind, TokenizerSettings
from megafp8.objectives.next_token import NextToken


@dataclass(frozen=True)
class Row:
    """One measurement: a tokenizer and a number of workers.

    `cpu`: seconds of this process for a million tokens. `waited`: share of the time.
    """

    tokenizer: str
    workers: int
    tokens_per_second: float
    cpu: float
    first: float
    waited: float


@dataclass(frozen=True)
class Settings:
    """Sizes of what is read. `step`: seconds of a simulated step; `seconds`: of each measurement."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    step: float
    seconds: float
    text_key: str


def tokenizer_of(text: str) -> TokenizerSettings:
    """The tokenizer that kind:path names. Raises ValueError for an unknown kind."""
    kind, _, path = text.partition(":")
    for known in get_args(TokenizerKind):
        if kind == known:
            return TokenizerSettings(known, path or None)
    raise ValueError(f"--tokenizers {text}: kinds are {', '.join(get_args(TokenizerKind))}, as in sentencepiece:file")


def measure(path: str, tokenizer: TokenizerSettings, workers: int, given: Settings) -> Row:
    """Read the text at `path`."""
    count = given.global_batch_size
    source = TextSource(
        path, text_key=given.text_key, seq_length=given.seq_length, seed=1, canonical_streams=count, key="--text"
    )
    start = time.perf_counter()
    steps = batches(
        Blend([source], Segment.fresh([1.0], 1)),
        StreamPositions(count),
        tokenizer=tokenizer,
        skip_errors=False,
        consumed_samples=0,
        global_batch_size=count,
        micro_batch_size=given.micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
        objective=NextToken(given.seq_length),
        pin_memory=False,
    )
    next(steps)
    begin, cpu, waited, number = time.perf_counter(), time.process_time(), 0.0, 0
    first = begin - start
    while time.perf_counter() - begin < given.seconds or not number:
        asked = time.perf_counter()
        next(steps)
        waited += time.perf_counter() - asked
        time.sleep(given.step)
        number += 1
    seconds, tokens = time.perf_counter() - begin, number * count * given.seq_length
    return Row(
        tokenizer.kind, workers, tokens / seconds, (time.process_time() - cpu) / tokens * 1e6, first, waited / seconds
    )


def measure_all(path: str, tokenizers: list[TokenizerSettings], workers: list[int], given: Settings) -> Iterator[Row]:
    for tokenizer in tokenizers:
        for count in workers:
            yield measure(path, tokenizer, count, given)


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--text", required=True, help="file, folder, pattern or URL of text")
    parser.add_argument("--text-key", default="text", help="key or column (default: %(default)s)")
    parser.add_argument("--tokenizers", nargs="+", default=["bytes"], metavar="KIND:PATH")
    parser.add_argument("--workers", default="0,1,2", help="numbers of worker processes (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples of a step (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a simulated step")
    arguments = parser.parse_args(argv)
    try:
        require_positive(arguments, "seq_length", "micro_batch_size", "global_batch_size")
        workers = [int(count) for count in arguments.workers.split(",")]
        tokenizers = [tokenizer_of(text) for text in arguments.tokenizers]
        sizes = arguments.seq_length, arguments.micro_batch_size, arguments.global_batch_size
        given = Settings(*sizes, arguments.step_ms / 1e3, arguments.seconds, arguments.text_key)
        columns = {"workers": "d", "tokens/s": ",.0f", "CPU s/million": ".2f", "first step s": ".2f", "waited": ".1%"}
        table, rows = Table("tokenizer", 16, columns), []
        print(table.heading())
        for row in measure_all(arguments.text, tokenizers, workers, given):
            rows.append(asdict(row))
            print(table.row(*(getattr(row, name) for name in asdict(row))), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
