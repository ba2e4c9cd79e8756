"""Time generation on a CPU: first token and decode tokens/s, for megafp8 and other engines.

    python -m benchmarks.bench_generate_cpu                              # ours and transformers, 0.2B and 1.1B
    python -m benchmarks.bench_generate_cpu --shapes 0.2b --engines ours-bf16,ours-int8 --rounds 5
    python -m benchmarks.bench_generate_cpu --llama-cpp ~/llama.cpp/build/bin --xft-python ~/xft/bin/python

The other engines are transformers, llama.cpp and xFasterTransformer. Models are Llamas with random weights in bf16,
saved once under --folder. Every engine runs in a separate process with --threads threads, one after the other, --rounds
times. The best result is shown, because other users of the machine can only slow an engine down. Each engine generates
once before it is timed.

"first token" is the time from the call to the first token of all texts. "tokens/s" counts the later tokens of all
texts. llama.cpp is measured by its llama-batched-bench, which includes neither the choice of tokens nor their text.
xFasterTransformer is measured through its `AutoModel`, which runs only on Intel's Xeon.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Table, new_parser, require_positive, write_json


class Shape(NamedTuple):
    """Sizes of a Llama with a vocabulary of 32,000."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int


SHAPES = {"0.2b": Shape(1024, 2816, 12, 16, 4), "1.1b": Shape(2048, 5632, 22, 32, 4)}
ENGINES = (
    "ours-bf16", "ours-int8", "ours-fp8", "transformers-bf16", "llama.cpp-bf16", "llama.cpp-q8_0", "xft-bf16",
    "xft-int8",
)  # fmt: skip
_VOCABULARY, _POSITIONS = 32000, 2048
_MARK = "RESULT "

Generate = Callable[[list[list[int]], int], Iterator[Any]]
"""Function that continues prompts by a given number of tokens, and yields after each step."""


# --- models -----------------------------------------------------------------------------------------------------------


def save_model(shape: Shape, folder: Path) -> None:
    """Save a model in a format that transformers before version 5 can read as well."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False, rope_theta=10000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text()) | {"rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    written.pop("rope_parameters", None)
    file.write_text(json.dumps(written, indent=2))


def save_gguf(shape: Shape, folder: Path, file: Path, kind: str) -> None:
    """Save the matrices of a model in `bf16` or `q8_0`, without a tokenizer.

    Heads keep Hugging Face's order of channels, which changes neither time nor sizes.
    """
    import gguf
    from safetensors.torch import load_file

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.groups)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(_VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    quantized = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module in whole:
            theirs = whole[module]
        else:
            _, _, layer, rest = module.split(".", 3)
            theirs = f"blk.{layer}.{names[rest]}"
        data = tensor.float().numpy()
        if data.ndim == 1:
            writer.add_tensor(f"{theirs}.weight", data)
        else:
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(data, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prepare(name: str, engine: str, arguments: argparse.Namespace) -> Path:
    """Return the model of this name in the engine's format; create it if it does not exist."""
    folder = arguments.folder / name
    if not (folder / "config.json").is_file():
        save_model(SHAPES[name], folder)
    if engine.startswith("llama.cpp"):
        kind = engine.removeprefix("llama.cpp-")
        file = arguments.folder / f"{name}-{kind}.gguf"
        if not file.is_file():
            partial = file.with_suffix(".partial")
            save_gguf(SHAPES[name], folder, partial, kind)
            partial.rename(file)
        return file
    if engine.startswith("xft"):
        converted = arguments.folder / f"{name}-xft"
        if not (converted / "config.ini").is_file():
            program = "import sys, xfastertransformer as x; x.LlamaConvert().convert(sys.argv[1], sys.argv[2])"
            command = [arguments.xft_python, "-c", program, str(folder), str(converted)]
            subprocess.run(command, check=True, capture_output=True)
        return converted
    return folder


# --- engines in this process ------------------------------------------------------------------------------------------


def ours(folder: Path, weights: str) -> Generate:
    """Return the generate function of megafp8."""
    import torch

    from megafp8.inference import Generator, SamplingOptions

    form: Any = None if weights == "bf16" else weights
    generator = Generator.from_checkpoint(folder, device="cpu", dtype=torch.bfloat16, weights=form)

    def generate(prompts: list[list[int]], tokens: int) -> Iterator[Any]:
        options = SamplingOptions(max_tokens=tokens, ignore_end=True)
        for i, piece in enumerate(generator.stream(prompts, options), 1):
            if i % len(prompts) == 0:
                yield piece

    return generate


def of_transformers(folder: Path) -> Generate:
    """Return the generate function of transformers."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> Iterator[Any]:
        steps: list[float] = []

        class Step(transformers.LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                steps.append(time.perf_counter())
                return scores

        ids = torch.tensor(prompts)
        network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, logits_processor=transformers.LogitsProcessorList([Step()]),
        )  # fmt: skip
        return iter([*steps[:1], *[time.perf_counter()] * (tokens - 1)])

    return generate


def time_once(generate: Generate, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token, and the seconds of the others. A step may yield a measured time."""
    start = time.perf_counter()
    times = []
    for step in generate(prompts, tokens):
        times.append(step if isinstance(step, float) else time.perf_counter())
    assert len(times) == tokens
    return times[0] - start, times[-1] - times[0]


def work(engine: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measure an engine in this process for each batch size."""
    import torch

    torch.set_num_threads(arguments.threads)
    name, weights = engine.rsplit("-", 1)
    generate = ours(folder, weights) if name == "ours" else of_transformers(folder)
    random, found = torch.Generator().manual_seed(0), []
    for batch in _batches(arguments):
        prompts = torch.randint(_VOCABULARY, (batch, arguments.prompt), generator=random).tolist()
        time_once(generate, prompts, arguments.tokens)
        first, rest = time_once(generate, prompts, arguments.tokens)
        found.append(_result(batch, first, rest / (arguments.tokens - 1)))
    return found


def _result(batch: int, first: float, step: float) -> dict[str, float]:
    return {"batch": batch, "first_token_ms": first * 1e3, "tokens_per_s": batch / step}


def _batches(arguments: argparse.Namespace) -> list[int]:
    return [int(batch) for batch in arguments.batches.split(",")]


# --- engines in other processes ---------------------------------------------------------------------------------------

_XFT = """
import json, sys, time, torch, xfastertransformer
path, dtype, threads, batches, length, tokens = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = xfastertransformer.AutoModel.from_pretrained(path, dtype=dtype, kv_cache_dtype="fp16")
found = []
for batch in batches:
    ids = torch.randint(32000, (batch, length))
    for _ in range(2):
        model.config(max_length=length + tokens, eos_token_id=-1, pad_token_id=0)
        model.input(ids)
        times = [time.perf_counter()]
        while not model.is_done():
            model.forward()
            times.append(time.perf_counter())
        model.finalize()
    step = (times[-1] - times[1]) / (len(times) - 2)
    found.append({"batch": batch, "first_token_ms": (times[1] - times[0]) * 1e3, "tokens_per_s": batch / step})
print("RESULT " + json.dumps(found))
"""


def command_of(engine: str, model: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the command that measures an engine in another process."""
    batches = _batches(arguments)
    if engine.startswith("llama.cpp"):
        context = max(batches) * (arguments.prompt + arguments.tokens)
        options = {
            "-m": model, "-c": context, "-npp": arguments.prompt, "-ntg": arguments.tokens, "-npl": arguments.batches,
            "-t": arguments.threads, "-tb": arguments.threads, "--output-format": "jsonl",
        }  # fmt: skip
        program = arguments.llama_cpp / "llama-batched-bench"
        return [str(program), *(str(part) for option in options.items() for part in option)]
    if engine.startswith("xft"):
        dtype = engine.removeprefix("xft-")
        given = [str(model), dtype, arguments.threads, batches, arguments.prompt, arguments.tokens]
        return [arguments.xft_python, "-c", _XFT, json.dumps(given)]
    options = {"--worker": engine, "--folder": model, "--batches": arguments.batches, "--prompt": arguments.prompt}
    options |= {"--tokens": arguments.tokens, "--threads": arguments.threads}
    own = [sys.executable, "-m", "benchmarks.bench_generate_cpu"]
    return [*own, *(str(part) for option in options.items() for part in option)]


def run_engine(engine: str, model: Path, arguments: argparse.Namespace) -> list[dict[str, float]] | str:
    """Return the results of an engine, or the last line that it printed if there are none."""
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    if engine.startswith("xft"):
        own = [arguments.xft_python, "-c", "import xfastertransformer.env as e; print(e.__file__)"]
        file = subprocess.run(own, check=True, capture_output=True, text=True).stdout.split()[-1]
        environment["LD_PRELOAD"] = str(Path(file).with_name("libiomp5.so"))
    done = subprocess.run(command_of(engine, model, arguments), capture_output=True, text=True, env=environment)
    if engine.startswith("llama.cpp"):
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found = [_result(row["pl"], row["t_pp"], row["t_tg"] / row["tg"]) for row in rows]
    else:
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        found = json.loads(lines[-1].removeprefix(_MARK)) if lines else []
    if found and done.returncode == 0:
        return found
    said = (done.stdout + done.stderr).strip().splitlines()
    return said[-1] if said else f"ended with {done.returncode}"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--engines", help=f"of {', '.join(ENGINES)}; default: those that are installed")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="tokens after the prompt; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench_generate_cpu"), help="folder for the models")
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama-batched-bench")
    parser.add_argument("--xft-python", help="Python that has xfastertransformer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    require_positive(arguments, "prompt", "rounds", "threads")
    if arguments.tokens < 2:
        parser.error(f"--tokens {arguments.tokens}: must be at least 2")
    there = {"llama.cpp": arguments.llama_cpp is not None, "xft": arguments.xft_python is not None}
    if arguments.engines is None:
        arguments.engines = ",".join(x for x in ENGINES if there.get(x.rsplit("-", 1)[0], True))
    for engine in arguments.engines.split(","):
        if engine not in ENGINES:
            parser.error(f"--engines: {engine} is none of {', '.join(ENGINES)}")
        if not there.get(engine.rsplit("-", 1)[0], True):
            parser.error(f"--engines: {engine} needs --llama-cpp or --xft-python")
    for shape in arguments.shapes.split(","):
        if shape not in SHAPES:
            parser.error(f"--shapes: {shape} is none of {', '.join(SHAPES)}")
    return arguments


def measure(shape: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best of all rounds for each engine and batch size."""
    engines: list[str] = arguments.engines.split(",")
    models = {engine: prepare(shape, engine, arguments) for engine in engines}
    best: dict[tuple[str, int], dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for engine in engines:
            found = failed.get(engine) or run_engine(engine, models[engine], arguments)
            if isinstance(found, str):
                failed[engine] = found
                continue
            for row in found:
                key = engine, int(row["batch"])
                before = best.get(key, row)
                first = min(before["first_token_ms"], row["first_token_ms"])
                rate = max(before["tokens_per_s"], row["tokens_per_s"])
                best[key] = {"first_token_ms": first, "tokens_per_s": rate}
    rows = [{"shape": shape, "engine": key[0], "batch": key[1], **row} for key, row in best.items()]
    return rows + [{"shape": shape, "engine": engine, "why_not": why} for engine, why in failed.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    arguments = parse_arguments(argv)
    if arguments.worker is not None:
        print(_MARK + json.dumps(work(arguments.worker, arguments.folder, arguments)))
        return 0
    rows = []
    print(f"{arguments.threads} threads, prompts of {arguments.prompt} tokens, {arguments.tokens} after them")
    table = Table("", 36, {"first token ms": ",.0f", "tokens/s": ",.1f"})
    print(table.heading())
    for shape in arguments.shapes.split(","):
        found = measure(shape, arguments)
        rows += found
        for row in sorted(found, key=lambda row: row.get("batch", 0)):
            batch = f", batch {row['batch']}" if "batch" in row else ""
            values = row.get("first_token_ms"), row.get("tokens_per_s")
            print(table.row(f"{shape}, {row['engine']}{batch}", *values, note=row.get("why_not", "")), flush=True)
    write_json(arguments.json, {"threads": arguments.threads, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
