"""Time generation on one GPU: prefill, and decode steps at several batch sizes, compared with transformers.

    python -m benchmarks.bench_generate                                  # Llama-3-8B's shape, random weights
    python -m benchmarks.bench_generate --variants bf16,delayed,bf16+fp8-cache --batches 1,64 --prompt 2048
    python -m benchmarks.bench_generate --config configs/gemma2-9b.yaml --set model.num_layers=4 --profile

A variant is bf16 or an FP8 recipe, with +int8, +int4, +fp8 (quantized weights; the recipe is then bf16), +fp8-cache or
+int8-cache, +eager (no CUDA graphs) and +invariant (`inference.batch_invariant`). `transformers` is its `generate` in
bf16 with its default cache. `transformers-static` uses the static cache, for which transformers compiles the model.

The time of a decode step is the difference between a call with many tokens and a call with few, divided by the
difference of the numbers of tokens, so it includes everything that `generate` does. "of bound" is the time to read the
weights of blocks and output layer and the cached keys and values once at --bandwidth, as a fraction of the step's time.
"prefill" is the time of one text with --prefill tokens, until its first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Table, machine, new_parser, release, require_positive, write_json
from benchmarks.profiling import Kernel, by_name, record
from megafp8.config import Fp8Config, load_config
from megafp8.host.gpus import H200
from megafp8.inference.generator import CacheOptions, Generator
from megafp8.inference.load import InferenceLayout, build_model, config_of
from megafp8.inference.packed_weights import pack_weights
from megafp8.inference.quantized_weights import quantize_stages
from megafp8.inference.sampling import SamplingOptions
from megafp8.linear.quantized_weight import WEIGHT_FORMATS
from megafp8.parallel.parallel_state import destroy_model_parallel
from megafp8.parallel.tensor.random import initialize_parameters
from megafp8.spec import ModelSpec

FEW = 16
CACHES = {"fp8-cache": {"dtype": "fp8"}, "int8-cache": {"dtype": "int8"}}
Generate = Callable[[list[list[int]], int], Any]
"""Function that continues prompts by a given number of tokens."""


def our_generate(
    model: ModelSpec, variant: str, cache: CacheOptions, longest: int, options: SamplingOptions
) -> tuple[Generate, int]:
    """Build a model with random weights.

    Returns:
        Its generate function, and the bytes of weights that a decode step reads.
    """
    recipe, *extras = variant.split("+")
    for extra in extras:
        if extra not in (*CACHES, *WEIGHT_FORMATS, "eager", "invariant"):
            known = ", +".join((*CACHES, *WEIGHT_FORMATS))
            raise ValueError(f"--variants: +{extra} is none of +eager, +invariant, +{known}")
        cache = cache._replace(**CACHES.get(extra, {}))  # type: ignore[arg-type]
    fp8 = Fp8Config() if recipe == "bf16" else Fp8Config(recipe=recipe)  # type: ignore[arg-type]
    invariant, cuda = "invariant" in extras, torch.cuda.is_available()
    built = build_model(config_of(model, InferenceLayout(), fp8, torch.bfloat16, cuda=cuda, batch_invariant=invariant))
    (stage,) = built.stages
    initialize_parameters(stage, seed=0)
    assert stage.head is not None
    output, blocks = stage.head.output.weight.numel(), sum(p.numel() for p in stage.blocks.parameters())
    size = 2 * output + blocks * (2 if recipe == "bf16" else 1)
    for history in built.fp8.state_dict().values():
        history.fill_(4.0)  # as after training: without amaxes, delayed scaling would first compute each tensor's amax
    built.fp8.invalidate_weights()
    for form in (WEIGHT_FORMATS[extra] for extra in extras if extra in WEIGHT_FORMATS):  # type: ignore[index]
        quantize_stages(built.stages, form)
        size = output + (blocks // 2 if form.kind == "int4" else blocks)
    if not invariant:
        pack_weights(built.stages)
    if "eager" in extras:
        built = replace(built, why_eager="+eager")
    generator = Generator(built, max_length=longest, cache=cache)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        generator.generate(prompts, replace(options, max_tokens=tokens))

    return generate, size


def their_generate(model: ModelSpec, variant: str) -> tuple[Generate, int]:
    """Build transformers' Llama with the same sizes; return its generate function and the bytes of its weights."""
    import transformers

    mixer, ffn = model.layers[0].mixer, model.layers[0].ffn
    config = transformers.LlamaConfig(
        vocab_size=model.stem.rows, num_hidden_layers=model.num_layers, hidden_size=model.hidden_size,
        intermediate_size=ffn.width, num_attention_heads=mixer.num_attention_heads,
        num_key_value_heads=mixer.groups, rope_theta=mixer.rope_theta, max_position_embeddings=131072,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    options = {"cache_implementation": "static"} if variant == "transformers-static" else {}

    @torch.no_grad()
    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device="cuda")
        network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip

    blocks = sum(p.numel() for p in network.model.layers.parameters())
    return generate, 2 * (network.lm_head.weight.numel() + blocks)


def milliseconds(generate: Generate, prompts: list[list[int]], tokens: int, rounds: int) -> float:
    """Return the median time of several calls."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(prompts, tokens)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def kernels_of_step(generate: Generate, prompts: list[list[int]]) -> list[tuple[float, float, str]]:
    """Return microseconds, count and name of the kernels in a decode step, longest first."""
    few, many = (by_name(record(partial(generate, prompts, n), on_cuda=True)[0]) for n in (FEW, FEW + 16))
    before = {kernel.name: kernel for kernel in few}
    nothing = Kernel("", 0, 0.0)
    found = []
    for kernel in many:
        less = before.get(kernel.name, nothing)
        found.append(((kernel.microseconds - less.microseconds) / 16, (kernel.count - less.count) / 16, kernel.name))
    return sorted(found, reverse=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/llama3-8b.yaml"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config keys to change")
    parser.add_argument("--variants", default="bf16,delayed,bf16+fp8-cache,bf16+eager,transformers")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="number of timed decode steps; default: %(default)s")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, the most probable token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=H200.memory_bandwidth / 1e12,
        help="bandwidth of the GPU's memory in TB/s; default: H200",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a decode step for the first batch size"
    )
    arguments = parser.parse_args(argv)
    require_positive(arguments, "prompt", "tokens", "rounds")
    return arguments


def measure(arguments: argparse.Namespace, model: ModelSpec, variant: str, table: Table) -> list[dict[str, Any]]:
    """Measure a variant, print its rows, and return them as records."""
    batches = [int(batch) for batch in arguments.batches.split(",")]
    longest = max(arguments.prompt + FEW + arguments.tokens, arguments.prefill + 1)
    cache_tokens = max(longest, max(batches) * (arguments.prompt + FEW + arguments.tokens + 16))
    theirs = variant.startswith("transformers")
    cache = CacheOptions(cache_tokens=cache_tokens)
    options = SamplingOptions(temperature=arguments.temperature, top_p=arguments.top_p, seed=0, ignore_end=True)
    generate, size = their_generate(model, variant) if theirs else our_generate(model, variant, cache, longest, options)
    own = torch.Generator().manual_seed(0)

    def prompts(batch: int, length: int) -> list[list[int]]:
        return torch.randint(model.stem.rows, (batch, length), generator=own).tolist()

    kept = 1 if "-cache" in variant else 2
    mixer = model.layers[0].mixer
    cached = 2 * kept * model.num_layers * mixer.groups * mixer.channels
    rows = []
    for batch in batches:
        given = prompts(batch, arguments.prompt)
        generate(given, FEW)
        generate(given, FEW)
        few = milliseconds(generate, given, FEW, arguments.rounds)
        many = milliseconds(generate, given, FEW + arguments.tokens, arguments.rounds)
        step = (many - few) / arguments.tokens
        read = size + cached * batch * (arguments.prompt + FEW + arguments.tokens // 2)
        row = {"variant": variant, "batch": batch, "step_ms": step, "tokens_per_s": batch * 1e3 / step}
        row["of_bound"] = read / (arguments.bandwidth * 1e9) / step
        rows.append(row)
        print(table.row(f"{variant}, batch {batch}", step, row["tokens_per_s"], row["of_bound"], None), flush=True)
    if arguments.prefill:
        given = prompts(1, arguments.prefill)
        generate(given, 1)
        prefill = milliseconds(generate, given, 1, arguments.rounds)
        rows.append({"variant": variant, "prefill_ms": prefill})
        print(table.row(f"{variant}, prefill", None, None, None, prefill), flush=True)
    if arguments.profile and not theirs:
        kernels = kernels_of_step(generate, prompts(batches[0], arguments.prompt))
        print(f"{variant}, batch {batches[0]}: kernels of a decode step, {sum(us for us, *_ in kernels):.0f} us")
        for us, count, name in kernels[:24]:
            print(f"  {us:9.1f} us {count:7.1f} x  {name}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("error: needs a GPU; benchmarks/bench_generate_cpu.py times CPUs", file=sys.stderr)
        return 1
    model = load_config(arguments.config, ["fp8.recipe=none", *arguments.set]).spec
    rows: list[dict[str, Any]] = []
    print(f"{machine(torch.device('cuda'))}, torch {torch.__version__}, prompts of {arguments.prompt} tokens")
    table = Table("", 34, {"step ms": ".3f", "tokens/s": ",.0f", "of bound": ".3f", "prefill ms": ".1f"})
    print(table.heading())
    for variant in arguments.variants.split(","):
        rows += measure(arguments, model, variant, table)
        destroy_model_parallel()
        release()
    write_json(arguments.json, {"machine": machine(torch.device("cuda")), "torch": torch.__version__, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
