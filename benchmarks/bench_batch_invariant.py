"""Check on one GPU that generation has the log-probabilities of training bit for bit, and time what that costs.

    python -m benchmarks.bench_batch_invariant                  # all of it: some minutes on an H100
    python -m benchmarks.bench_batch_invariant --only exact --families llama3,gemma2
    python -m benchmarks.bench_batch_invariant --only speed

*exact*: a few layers of each family at its own width, with random weights. Prompts of 1 to --prompt tokens are
continued in batches of each size, in random order, with prompts read in chunks and a cache so small that texts wait and
are read again, and each text is computed once more by the training forward pass, with gradients, in micro-batches of
another order. The table has the largest difference of a token's log-probability, with CUDA graphs and without. The last
column has it for the usual kernels, to show that it does not vanish by itself.

*speed*: decode steps and a prefill of Llama-3-8B's shape, batch 8, and a training forward and backward pass of its
layers, with inference.batch_invariant and without.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_generate
from benchmarks.common import Table, machine, new_parser, release, require_positive, write_json
from megafp8.batch import Batch
from megafp8.config import load_config
from megafp8.config.schema import Fp8Config, ModelConfig
from megafp8.inference.generator import CacheOptions, Generator
from megafp8.inference.load import Layout, build_model, config_of
from megafp8.inference.model import Model
from megafp8.inference.sampling import SamplingOptions
from megafp8.parallel_state import destroy_model_parallel
from megafp8.tensor_parallel.random import initialize_parameters

FAMILIES = {
    "llama3": ("llama3-8b", ["model.num_layers=3"]),
    "qwen3-moe": ("qwen3-30b-a3b", ["model.num_layers=2"]),
    "gemma2": ("gemma2-9b", ["model.num_layers=2"]),
    "deepseek-v3": (
        "deepseek-v3",
        ["model.num_layers=2", "model.pattern=[dense,sparse]", "model.mtp_num_layers=0", "model.moe.num_experts=32"],
    ),
    "gpt-oss": ("gpt-oss-20b", ["model.num_layers=2"]),
}
"""A config and its changes."""
_ALIGNMENT = 128
"""FP8 GEMMs get a multiple of this many tokens."""


def model_of(family: str) -> ModelConfig:
    name, changes = FAMILIES[family]
    one_gpu = ["parallel.tensor=1", "parallel.expert=1", "parallel.pipeline=1", "fp8.recipe=none"]
    return load_config(Path(f"configs/{name}.yaml"), [*one_gpu, *changes]).model


def built(model: ModelConfig, recipe: str, *, invariant: bool, default: bool = True) -> Model:
    """With random weights, the same each time, and amaxes as after training. `default`: as of `build_model`."""
    fp8 = Fp8Config() if recipe == "bf16" else Fp8Config(recipe=recipe)  # type: ignore[arg-type]
    made = build_model(
        config_of(model, Layout(), fp8, torch.bfloat16, cuda=torch.cuda.is_available(), batch_invariant=invariant),
        default=default,
    )
    (stage,) = made.stages
    initialize_parameters(stage, seed=0)
    for history in made.fp8.state_dict().values():
        history.fill_(4.0)
    made.fp8.invalidate_weights()
    return made


def trained_logprobs(model: Model, texts: Sequence[Sequence[int]], order: random.Random) -> list[torch.Tensor]:
    """Log-probabilities of each token of a text but the first, by forward passes of training: micro-batches of one to
    four texts in random order, whose ends are filled up."""
    (stage,) = model.stages
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    waiting = order.sample(range(len(texts)), len(texts))
    while waiting:
        chosen = [waiting.pop() for _ in range(min(len(waiting), order.randint(1, 4)))]
        longest = max(len(texts[i]) - 1 for i in chosen)
        length = -(-longest // _ALIGNMENT) * _ALIGNMENT
        ids = torch.zeros(len(chosen), length + 1, dtype=torch.int64)
        for row, i in zip(ids, chosen, strict=True):
            row[: len(texts[i])] = torch.tensor(texts[i])
        ids = ids.to(model.parallel.device)
        with model.fp8.recording(False):
            loss_sb = stage(None, Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())).cross_entropy
        for column, i in enumerate(chosen):
            found[i] = -loss_sb.detach()[: len(texts[i]) - 1, column].double().cpu()
        del loss_sb
    return found


def largest_difference(
    model: Model, trained: Model, batches: Sequence[int], arguments: argparse.Namespace, *, graphs: bool
) -> float:
    """Over all batches, of generated tokens' log-probabilities from those of `trained`, which has the same weights.

    It is a second model, as training quantizes weights anew, and recorded decode steps go on reading the copies that
    they were recorded with.
    """
    if not graphs:
        model = replace(model, why_eager="--only exact")
    most = arguments.prompt + arguments.tokens
    cache = CacheOptions(
        cache_tokens=max(most, min(64, max(batches)) * most // 3), max_batch_tokens=arguments.prompt // 2 + 1
    )
    generator = Generator(model, max_length=most, cache=cache)
    own = random.Random(0)
    prompts = [
        [own.randrange(1, model.config.vocab_size or 2) for _ in range(own.randint(1, arguments.prompt))]
        for _ in range(max(batches))
    ]
    options = SamplingOptions(max_tokens=arguments.tokens, temperature=1.0, seed=1, ignore_end=True)
    worst = 0.0
    for batch in batches:
        order = own.sample(range(batch), batch)
        completions = generator.generate([prompts[i] for i in order], options)
        found = trained_logprobs(trained, [[*x.prompt_tokens, *x.tokens] for x in completions], own)
        for completion, logprobs in zip(completions, found, strict=True):
            given = torch.tensor(completion.logprobs, dtype=torch.float64)
            worst = max(worst, float((logprobs[-len(given) :] - given).abs().max()))
    return worst


def exact(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    batches = [int(x) for x in arguments.batches.split(",")]
    table = Table("largest |difference| of log-probabilities", 42, {"graphs": ".3g", "eager": ".3g", "usual": ".3g"})
    print(table.heading())
    rows = []
    for family in arguments.families.split(","):
        for recipe in arguments.recipes.split(","):
            differences = []
            for invariant, some, graphs in ((True, batches, (True, False)), (False, batches[:3], (True,))):
                model = built(model_of(family), recipe, invariant=invariant)
                trained = built(model_of(family), recipe, invariant=invariant, default=False)
                differences += [largest_difference(model, trained, some, arguments, graphs=each) for each in graphs]
                why = model.why_eager
                del model, trained
                destroy_model_parallel()
                release()
            graphs, eager, usual = differences
            rows.append({"family": family, "recipe": recipe, "graphs": graphs, "eager": eager, "usual": usual})
            print(table.row(f"{family}, {recipe}{', all eager' if why else ''}", graphs, eager, usual), flush=True)
    worst = max(max(row["graphs"], row["eager"]) for row in rows)
    print(f"batches of {arguments.batches}: the largest difference is {worst:g}")
    return rows


def training_milliseconds(recipe: str, *, invariant: bool, tokens: int = 8192) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward pass through four layers of Llama-3-8B."""
    model = built(
        load_config(Path("configs/llama3-8b.yaml"), ["model.num_layers=4"]).model, recipe, invariant=invariant
    )
    (stage,) = model.stages
    ids = torch.randint(1000, (1, tokens + 1), device="cuda")
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    forward, backward = [], []
    for _ in range(6):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        loss = stage(None, batch).cross_entropy.mean()
        events[1].record()
        loss.backward()
        events[2].record()
        torch.cuda.synchronize()
        forward.append(events[0].elapsed_time(events[1]))
        backward.append(events[1].elapsed_time(events[2]))
        stage.zero_grad()
    destroy_model_parallel()
    return sorted(forward)[2], sorted(backward)[2]


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    model = load_config(Path("configs/llama3-8b.yaml"), ["fp8.recipe=none"]).model
    given = ["--batches", arguments.speed_batches, "--prompt", "512", "--prefill", "4096"]
    options = bench_generate.parse_arguments(given + (["--profile"] if arguments.profile else []))
    table = Table("", 34, {"step ms": ".3f", "tokens/s": ",.0f", "of bound": ".3f", "prefill ms": ".1f"})
    print(table.heading())
    for recipe in arguments.recipes.split(","):
        found = []
        for variant in (recipe, f"{recipe}+invariant"):
            found.append(bench_generate.measure(options, model, variant, table))
            rows += found[-1]
            destroy_model_parallel()
            release()
        for usual, invariant in zip(*found, strict=True):
            key = "step_ms" if "step_ms" in usual else "prefill_ms"
            what = f"decode, batch {usual['batch']}" if key == "step_ms" else "prefill"
            print(f"  {recipe}, {what}: {usual[key] / invariant[key]:.3f} of the usual speed", flush=True)
    print("training, four layers, 8192 tokens, ms: forward and backward, usual; batch-invariant")
    for recipe in arguments.recipes.split(","):
        times = []
        for invariant in (False, True):
            times.append(training_milliseconds(recipe, invariant=invariant))
            release()
        print(f"  {recipe}: {times[0][0]:.1f} + {times[0][1]:.1f}; {times[1][0]:.1f} + {times[1][1]:.1f}", flush=True)
        rows.append({"training": recipe, "usual_ms": times[0], "invariant_ms": times[1]})
    return rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--only", choices=("exact", "speed"))
    parser.add_argument("--families", default="llama3,qwen3-moe,gemma2,deepseek-v3", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--recipes", default="bf16")
    parser.add_argument("--batches", default="1,2,3,8,17,64")
    parser.add_argument("--prompt", type=int, default=300, help="most tokens of a prompt; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=12, help="tokens that are generated; default: %(default)s")
    parser.add_argument("--speed-batches", default="8", help="batches whose decode steps are timed")
    parser.add_argument("--profile", action="store_true", help="kernels of a decode step")
    arguments = parser.parse_args(argv)
    require_positive(arguments, "prompt", "tokens")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("error: needs a GPU; tests/inference/test_batch_invariant.py checks CPUs", file=sys.stderr)
        return 1
    print(f"{machine(torch.device('cuda'))}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    if arguments.only != "speed":
        rows += exact(arguments)
    if arguments.only != "exact":
        rows += speed(arguments)
    write_json(arguments.json, {"machine": machine(torch.device("cuda")), "torch": torch.__version__, "rows": rows})
    exact_rows = [row for row in rows if "eager" in row]
    return int(any(row["graphs"] or row["eager"] for row in exact_rows))


if __name__ == "__main__":
    sys.exit(main())
