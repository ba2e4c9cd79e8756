"""Time a refit on one GPU: the weights of a live trainer in a generator.

    python -m benchmarks.bench_refit                     # Llama-3-8B's shape: bf16, delayed and blockwise scaling
    python -m benchmarks.bench_refit --full --set optimizer.moments_dtype=bf16         # all weights; for an H200

The trainer is a real one with random weights. By default it trains adapters (`lora`), so that 8B parameters fit into 80
GB; with --full all weights.

    same      `Generator.from_trainer` in the trainer's layout: seconds of a refit, and what it copied. "shared": how
              much of the generator's parameters is the memory of the trainer's
    first     seconds of one token for one text right after a refit, in which FP8 copies of weights are made that the
              refit forgot; "later": the same again
    copied    a second model on the same GPU, whose memory is not shared: seconds and bytes of a refit by its plan, and
              its bandwidth, counting a byte that is read and written once
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    add_device_flag,
    chosen_device,
    machine,
    new_parser,
    release,
    require_positive,
    seconds,
    write_json,
)
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config, load_config
from megafp8.dtypes import DTYPES
from megafp8.inference.generator import CacheOptions, Generator
from megafp8.inference.load import Layout, build_model, config_of
from megafp8.inference.options import SamplingOptions
from megafp8.inference.refit import JobPeers, Refit
from megafp8.inference.staged_weights import tensors_of
from megafp8.parallel_state import destroy_model_parallel, initialize_distributed
from megafp8.training.parallel import build_parallel
from megafp8.training.state import weights
from megafp8.training.trainer import Trainer

ONE_GPU = [
    *("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence_parallel=false", "parallel.layers_per_stage=null"),
    *("training.seq_length=512", "training.global_batch_size=1", "training.cuda_graphs=false"),
    *("data.tokenizer=null", "data.train=[none]", "data.reset_at_documents=false"),
]
ADAPTERS = ["lora={rank: 8, alpha: 16}"]
PROMPT, TOKEN = [1, 2, 3, 4], SamplingOptions(max_tokens=1, ignore_end=True)


def measure(config: Config, device: torch.device, rounds: int) -> dict[str, Any]:
    device = initialize_distributed(device.type)
    trainer = Trainer(config, build_parallel(config, device))
    for history in trainer.fp8.state_dict().values():
        history.fill_(4.0)  # as after training: without amaxes, delayed scaling would look at each tensor first
    trainer.fp8.invalidate_weights()
    generator = Generator.from_trainer(trainer, cache=CacheOptions(cache_tokens=256))
    generator.generate(PROMPT, TOKEN)  # compiles kernels
    assert generator.live is not None
    parameters = [p for stage in generator.model.stages for p in stage.parameters()]
    own = {p.data_ptr() for p in trainer.model.parameters()}
    first, later = [], []
    for _ in range(rounds):
        trainer.fp8.forget_weights()  # as a step does
        first += seconds(lambda: generator.generate(PROMPT, TOKEN), device, 1)
        later.append(_later(generator, device))
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in parameters),
        "shared": sum(p.numel() for p in parameters if p.data_ptr() in own) / sum(p.numel() for p in parameters),
        "same_seconds": statistics.median(seconds(generator.refit, device, rounds)),
        "same_copies": generator.live.copies.local + generator.live.copies.received,
        "first_token_seconds": statistics.median(first),
        "later_token_seconds": statistics.median(later),
    }
    layout, dtype = Layout(), DTYPES[config.training.precision]
    second = build_model(config_of(config.model, layout, config.fp8, dtype, cuda=device.type == "cuda"), default=False)
    wants = tensors_of(second)

    def has() -> Any:
        return weights(trainer) | as_rectangles(trainer.fp8.state_dict())

    refit = Refit(has(), wants, JobPeers(trainer.parallel.world.group))
    row["copied_seconds"] = statistics.median(seconds(lambda: refit.run(has(), wants), device, rounds))
    copies = refit.run(has(), wants)
    row |= {"copied_copies": copies.local, "copied_bytes": copies.nbytes}
    row["equal"] = all(
        torch.equal(x.view, y.view)
        for name, rectangles in wants.items()
        for x, y in zip(has()[name].parts, rectangles.parts)
    )
    trainer.close()
    return row


def _later(generator: Generator, device: torch.device) -> float:
    """Seconds of a token with the weights' FP8 copies made: of the second token of a text."""
    submission = generator.submit(PROMPT, SamplingOptions(max_tokens=2, ignore_end=True))
    generator.step()
    return seconds(lambda: (generator.step(), generator.cancel(submission)), device, 1)[0]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--config", type=Path, default=Path("configs/llama3-8b.yaml"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the config")
    parser.add_argument("--recipes", default="none,delayed,blockwise")
    parser.add_argument("--full", action="store_true", help="train all weights, not adapters")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    require_positive(arguments, "rounds")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = chosen_device(arguments)
    print(f"{machine(device)}, torch {torch.__version__}")
    rows = []
    for recipe in arguments.recipes.split(","):
        overrides = [*ONE_GPU, *([] if arguments.full else ADAPTERS), f"fp8.recipe={recipe}", f"device={device.type}"]
        row = {"recipe": recipe} | measure(
            load_config(arguments.config, [*overrides, *arguments.set]), device, arguments.rounds
        )
        rows.append(row)
        rate = 2 * row["copied_bytes"] / row["copied_seconds"] / 1e9
        print(
            f"{recipe}: {row['parameters'] / 1e9:.2f}B parameters, {row['shared']:.1%} shared\n"
            f"  same    {row['same_seconds']:.4f} s, {row['same_copies']} copies\n"
            f"  first   {row['first_token_seconds']:.4f} s, later {row['later_token_seconds']:.4f} s\n"
            f"  copied  {row['copied_seconds']:.4f} s, {row['copied_copies']} copies, "
            f"{row['copied_bytes'] / 1e9:.2f} GB, {rate:.0f} GB/s, equal: {row['equal']}",
            flush=True,
        )
        destroy_model_parallel()
        release()
    write_json(arguments.json, {"machine": machine(device), "torch": torch.__version__, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
