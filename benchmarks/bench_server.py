"""Soak test of the server: clients that stream, wait, leave and send malformed requests; measures time and memory.

    python -m benchmarks.bench_server --seconds 600
    python -m benchmarks.bench_server runs/mine --clients 256 --server "--max-sequences 128" --device cuda

The server runs as a separate process, by default with a tiny random model. --clients requests are always open, with
prompts and outputs of random lengths; two thirds of them are streams. Of a hundred requests, the client leaves 15 at a
random time, and 5 are malformed. Each answer is compared with the result of `Generator.generate` for the same request
alone, which is computed first. Times are measured on streams, as the client sees them, from the first byte of the
request; every token is a chunk. If there are more clients than places (`--server "--max-sequences ... --max-waiting
..."`), some requests are refused with 429 and sent again after a second. Pages and memory are read from /metrics once a
second. The clients use a CPU core as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.common import new_parser, require_positive, write_json
from megafp8.inference import Generator, SamplingOptions
from megafp8.parallel.parallel_state import destroy_model_parallel

LENGTH = 256
TINY_SERVER = "--max-sequences 16 --max-waiting 32 --cache-tokens 1024 --max-batch-tokens 256"
"""Server arguments with so few pages that texts lose their pages, and so few places that requests are refused."""
LEAVING, MALFORMED = 0.15, 0.05
BAD_BODIES = (b"", b"{", b"[]", b"\xff\xfe", b'{"model":"soak"}', b'{"model":"soak","prompt":[[1],"a"]}', b"[" * 9999)
JSON = {"content-type": "application/json"}
WARM_UP = 30.0


def write_tiny_model(folder: Path) -> None:
    """Write a Llama with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<|endoftext|>": 0} | {x: i for i, x in enumerate(alphabet, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Case:
    """Request, with the expected text and number of tokens of the answer."""

    body: dict[str, Any]
    text: str
    tokens: int


def make_cases(generator: Generator, count: int) -> list[Case]:
    """Create requests with random prompts and lengths, and compute their expected answers."""
    draw, found = random.Random(0), []
    longest = min(generator.max_length, 4096)
    for seed in range(count):
        prompt = "".join(draw.choice("abcdefg 12\né東") for _ in range(draw.randint(1, longest // 4)))
        options: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.0]), "seed": seed}
        options |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"ignore_end": True}])
        options["max_tokens"] = draw.randint(1, longest // 4)
        (completion,) = generator.generate(prompt, SamplingOptions(**options))
        body = options | {"model": "soak", "prompt": prompt, "logprobs": 0}
        found.append(Case(body, completion.text, len(completion.tokens)))
    return found


@dataclass
class Tally:
    """Results that the clients have seen: outcomes, tokens, seconds to the first token and between tokens, errors."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Client:
    """Client that sends one request after another until the time `end` of `time.monotonic`."""

    def __init__(self, number: int, http: httpx.AsyncClient, cases: Sequence[Case], tally: Tally, end: float) -> None:
        self._draw, self._http, self._cases, self._tally, self._end = random.Random(number), http, cases, tally, end

    async def run(self) -> None:
        """Send requests until the end."""
        while time.monotonic() < self._end:
            try:
                outcome = await self._one()
            except httpx.HTTPError as error:
                outcome = f"failed ({type(error).__name__})"
            self._tally.outcomes[outcome] += 1
            if outcome == "refused (429)":
                await asyncio.sleep(1)

    async def _one(self) -> str:
        """Send a request of a random kind, and return its outcome."""
        kind = self._draw.random()
        if kind < MALFORMED:
            return await self._malformed()
        if kind > MALFORMED + LEAVING:
            return await self._request(self._draw.choice(self._cases))
        with anyio.move_on_after(self._draw.random() * 2):
            return await self._request(self._draw.choice(self._cases))
        return "left by the client"

    async def _malformed(self) -> str:
        path = self._draw.choice(["/v1/completions", "/v1/chat/completions"])
        answer = await self._http.post(path, content=self._draw.choice(BAD_BODIES), headers=JSON)
        return "malformed (400)" if answer.status_code == 400 else f"malformed, {answer.status_code}"

    async def _request(self, case: Case) -> str:
        stream = self._draw.random() < 2 / 3
        start, first, between = time.monotonic(), [], []
        body = case.body | {"stream": stream}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return "refused (429)" if answer.status_code == 429 else f"status {answer.status_code}"
            if not stream:
                text = json.loads(await answer.aread())["choices"][0]["text"]
            else:
                text, last = "", start
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    (between if first else first).append(now - last)
                    last = now
                    text += json.loads(line[6:])["choices"][0]["text"]
        self._tally.first += first
        self._tally.between += between
        self._tally.tokens += case.tokens
        if text != case.text:
            self._tally.wrong.append(f"{case.body}: {text!r} instead of {case.text!r}")
        return "answered"


def read_metrics(text: str) -> dict[str, float]:
    """Return the values of all metrics without labels."""
    return {x.name: x.value for family in text_string_to_metric_families(text) for x in family.samples if not x.labels}


async def soak(url: str, cases: Sequence[Case], clients: int, seconds: float) -> tuple[Tally, list[dict[str, float]]]:
    """Run the clients; return their results, and the metrics of each second and after the last request."""
    tally, samples = Tally(), []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def sample() -> dict[str, float]:
            samples.append(read_metrics((await http.get("/metrics")).text))
            return samples[-1]

        end = time.monotonic() + seconds
        tasks = [asyncio.ensure_future(Client(i, http, cases, tally, end).run()) for i in range(clients)]
        await sample()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1)
            await sample()
        await asyncio.gather(*tasks)
        for _ in range(10):  # clients that have just left
            if not (await sample())["megafp8_pages_used"]:
                break
            await asyncio.sleep(1)
    return tally, samples


@contextmanager
def server(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server, and yield its URL and process."""
    command = [sys.executable, "-m"]
    if arguments.tensor > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.tensor), "-m"]
    command += ["megafp8", "serve", str(folder), "--name", "soak", "--port", "0"]
    command += ["--tensor", str(arguments.tensor), "--device", arguments.device, *shlex.split(arguments.server)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if line.startswith("serving ")), "")
        if not line:
            raise ValueError(f"the server has not started: {shlex.join(command)}")
        yield line.split()[-1], process
    finally:
        if process.poll() is None:
            process.kill()


def percentiles(seconds: Sequence[float]) -> str:
    """Format the percentiles 50, 90 and 99 in milliseconds."""
    if len(seconds) < 2:
        return "-"
    cuts = statistics.quantiles(seconds, n=100)
    return " / ".join(f"{cuts[i - 1] * 1e3:.1f}" for i in (50, 90, 99))


def figures(tally: Tally, samples: Sequence[dict[str, float]], seconds: float) -> dict[str, Any]:
    """Return the figures of the report in their order."""
    last, warm = samples[-1], samples[min(int(WARM_UP), len(samples) // 2)]
    mebibytes = [x["process_resident_memory_bytes"] / 2**20 for x in (samples[0], warm, last)]
    others = {name: count for name, count in sorted(tally.outcomes.items()) if name != "answered"}
    expected = {"answered", "left by the client", "malformed (400)", "refused (429)"}
    return {
        "seconds": round(seconds, 1),
        "requests": tally.outcomes.total(),
        "answered": tally.outcomes["answered"],
        **others,
        "unexpected outcomes": sum(count for name, count in others.items() if name not in expected),
        "wrong answers": len(tally.wrong),
        "requests/s": round(tally.outcomes.total() / seconds, 2),
        "tokens generated": int(last["megafp8_generated_tokens_total"]),
        "tokens generated/s": round(last["megafp8_generated_tokens_total"] / seconds, 1),
        "tokens of prompts/s": round(last["megafp8_prompt_tokens_total"] / seconds, 1),
        "first token, ms, p50 / p90 / p99": percentiles(tally.first),
        "between tokens, ms, p50 / p90 / p99": percentiles(tally.between),
        "pages": int(last["megafp8_pages_used"] + last["megafp8_pages_free"]),
        "most pages used": int(max(x["megafp8_pages_used"] for x in samples)),
        "most texts running": int(max(x["megafp8_running"] for x in samples)),
        "most texts waiting": int(max(x["megafp8_waiting"] for x in samples)),
        "pages leaked": int(last["megafp8_pages_used"]),
        "memory, MiB, start / warm / end": " / ".join(f"{x:.0f}" for x in mebibytes),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the soak test, print the report, and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="checkpoint with a tokenizer; default: a tiny random model"
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=64, help="number of requests that are always open")
    parser.add_argument("--cases", type=int, default=64, help="number of different requests")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size of the server")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--server", default=TINY_SERVER, help="other arguments of the server; default: %(default)s")
    arguments = parser.parse_args(argv)
    require_positive(arguments, "seconds", "clients", "cases", "tensor")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.checkpoint or Path(temporary)
        if arguments.checkpoint is None:
            write_tiny_model(folder)
        generator = Generator.from_checkpoint(folder, device=arguments.device)
        cases = make_cases(generator, arguments.cases)
        del generator
        destroy_model_parallel()
        with server(folder, arguments) as (url, process):
            start = time.monotonic()
            tally, samples = asyncio.run(soak(url, cases, arguments.clients, arguments.seconds))
            report = figures(tally, samples, time.monotonic() - start)
            process.send_signal(signal.SIGTERM)
            report["exit code after SIGTERM"] = process.wait(timeout=60)
    for name, value in report.items():
        print(f"{name:<40}{value:>24}")
    for line in tally.wrong[:5]:
        print(f"wrong: {line}")
    write_json(arguments.json, report)
    return 1 if tally.wrong or report["pages leaked"] or report["unexpected outcomes"] else 0


if __name__ == "__main__":
    sys.exit(main())
