"""Time the output layer and its loss, forward and backward, and measure their memory, for several sizes of parts.

    python -m benchmarks.bench_loss                                    # the width of Llama-3-8B, on one GPU
    python -m benchmarks.bench_loss --hidden 2048 --vocabularies 151936 --lengths 8192,131072 --at-once 0,2048,8192

A line is a micro-batch of one sample, and the number of tokens that have logits at the same time: `0` is the default,
`all` are all tokens. Times are medians, and "of all" compares them with the line `all`. "GiB" is the peak of torch's
allocator above the weights, their gradients and the hidden states, and "predicted" is the same by formula.

Shapes: s sequence, b micro-batch (one sample), h hidden.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from benchmarks.common import Table, add_device_flag, chosen_device, machine, milliseconds, new_parser, now, release
from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.objectives.registry import loss_parts
from megafp8.parallel.parallel_state import initialize_distributed
from megafp8.training.parallel import build_parallel
from megafp8.training.trainer import RankTrainer

TABLE = Table(
    "vocabulary, tokens, at once",
    30,
    {"parts": "d", "ms": ".2f", "of all": ".3f", "GiB": ".2f", "predicted": ".2f", "loss": ".5f"},
)


def config_of(arguments: argparse.Namespace, vocab_size: int, length: int, at_once: str) -> Config:
    """Return the config of a line: a model with one small block, because only its head is used."""
    model = {"num_layers": 1, "hidden_size": arguments.hidden, "num_attention_heads": 32, "ffn_hidden_size": 256}
    training = {"steps": 1, "seq_length": length, "global_batch_size": 1, "precision": "bf16", "cuda_graphs": False}
    given = {"all": length, "0": None}.get(at_once, at_once)
    return Config.model_validate({
        "name": "bench", "model": model | {"vocab_size": vocab_size}, "fp8": {"recipe": "none"},
        "training": training | {"loss_tokens_at_once": given}, "optimizer": {"learning_rate": 1e-4},
        "data": {"train": ["none"]}, "device": arguments.device,
    })  # fmt: skip


def measure(config: Config, trainer: RankTrainer, steps: int) -> dict[str, float | None]:
    """Return the measurements of one line by column, without the comparison."""
    (stage,), device, s = trainer.stages, trainer.parallel.device, config.training.seq_length
    head, size = stage.head, config.model.vocab_size
    assert head is not None
    assert size is not None
    generator = torch.Generator(device).manual_seed(0)
    x_sbh = torch.randn(s, 1, config.model.hidden_size, dtype=torch.bfloat16, device=device, generator=generator)
    tokens = torch.randint(size, (1, s), device=device, generator=generator)
    loss = trainer.stage_functions[0].part_loss(Batch(tokens, tokens))  # type: ignore[attr-defined]
    x_sbh.requires_grad_()
    times, on_cuda = [], device.type == "cuda"
    before = 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    for step in range(steps + 3):
        trainer.strategy.clear()
        x_sbh.grad = None
        start = now(device)
        value, report = head(x_sbh, None, tokens, loss=loss)
        value.backward()
        end = now(device)
        if on_cuda:
            torch.cuda.synchronize(device)
        if step >= 3:
            times.append(milliseconds(start, end))
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if on_cuda else None
    parts = loss_parts(config)
    predicted = parts.tokens * size * 2 + 3 * s * config.model.hidden_size * 2  # x has been counted, its norm has not
    return {
        "parts": parts.number, "ms": statistics.median(times), "GiB": peak, "predicted": predicted / 2**30,
        "loss": float(report[0] / report[1]),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print the table."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabularies", default="151936,262144")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--at-once", default="all,0,4096,2048", help="tokens that have logits at the same time")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(argv)
    device = initialize_distributed(chosen_device(arguments).type)
    print(machine(device))
    print(TABLE.heading())
    for vocab_size in map(int, arguments.vocabularies.split(",")):
        for length in map(int, arguments.lengths.split(",")):
            whole = None
            for at_once in arguments.at_once.split(","):
                config = config_of(arguments, vocab_size, length, at_once)
                trainer = RankTrainer(config, build_parallel(config, device))
                label = f"{vocab_size:,} {length:,} {at_once}"
                try:
                    found = measure(config, trainer, arguments.steps)
                except torch.OutOfMemoryError:
                    print(f"{label:<30}  out of memory")
                    continue
                finally:
                    trainer.close()
                    del trainer
                    release()
                whole = found["ms"] if at_once == "all" else whole
                found["of all"] = found["ms"] / whole if found["ms"] and whole else None
                print(TABLE.row(label, *(found[column] for column in TABLE.columns)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
