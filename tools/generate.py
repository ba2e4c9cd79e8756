"""Continue texts with a model: the newest checkpoint of a run, a checkpoint of any format, or a Hugging Face folder.

    megafp8 generate runs/quickstart "def main("
    megafp8 generate runs/quickstart "def main(" --temperature 0.8 --top-p 0.95 --samples 3 --seed 1
    megafp8 generate meta-llama/Llama-3.1-8B --file prompts.txt --json > texts.jsonl
    torchrun --nproc-per-node 2 tools/generate.py runs/mine --tensor 2
    megafp8 generate runs/mine "def main(" --device cpu --weights int8
    megafp8 generate runs/mine < article.txt

Without a prompt, the command asks for prompts on a terminal; otherwise it reads standard input as one prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.host.arguments import ArgumentParser
from megafp8.host.object_store import as_path
from megafp8.host.tool import run_tool
from megafp8.inference.arguments import add_cache_flags, add_model_flags, load_generator
from megafp8.inference.options import SamplingOptions

if TYPE_CHECKING:
    from megafp8.inference import Completion, Generator


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=as_path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("prompt", nargs="?", help="text to continue")
    parser.add_argument("--file", type=Path, help="file with one prompt per line; \\n stands for a line break")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per text, with tokens and log-probabilities"
    )
    sampling = parser.add_argument_group("sampling")
    default, add = SamplingOptions(), sampling.add_argument
    help = f"maximum per text; default: {default.max_tokens}, or as many as fit after the prompt"
    sampling.add_argument("--max-tokens", type=int, help=help)
    sampling.add_argument(
        "--temperature", type=float, default=default.temperature, help="sampling temperature; 0: greedy"
    )
    add("--top-k", type=int, default=default.top_k, help="sample from this many most probable tokens; 0: all")
    sampling.add_argument(
        "--top-p", type=float, default=default.top_p, help="sample from the fewest tokens with this total probability"
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=default.min_p,
        help="leave out tokens below this fraction of the largest probability",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=default.repetition_penalty,
        help="penalty of tokens that occurred before; 1: none",
    )
    sampling.add_argument(
        "--stop", nargs="+", default=(), help="strings before which a text ends; \\n stands for a line break"
    )
    sampling.add_argument("--seed", type=int, help="random seed; default: a new one for each call")
    sampling.add_argument("--samples", type=int, default=default.num_samples, help="number of texts per prompt")
    sampling.add_argument(
        "--logprobs", type=int, default=0, help="number of most probable tokens to list per token, with --json"
    )
    sampling.add_argument("--ignore-end", action="store_true", help="continue after a token that ends texts")
    add_model_flags(parser)
    add_cache_flags(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)  # the prompt may follow options
    if arguments.prompt is not None and arguments.file is not None:
        parser.error("give a prompt or --file, not both")
    return arguments


def sampling_options(arguments: argparse.Namespace) -> SamplingOptions:
    """Return the sampling options that the arguments set."""
    return SamplingOptions(
        max_tokens=SamplingOptions.max_tokens if arguments.max_tokens is None else arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        stop=tuple(_with_line_breaks(stop) for stop in arguments.stop),
        seed=arguments.seed,
        num_samples=arguments.samples,
        logprobs=arguments.logprobs,
        ignore_end=arguments.ignore_end,
    )


def _with_line_breaks(text: str) -> str:
    return text.replace("\\n", "\n")


def given_prompts(arguments: argparse.Namespace) -> list[str] | None:
    """Return the prompts from the arguments, a file or standard input; None if the user is to be asked for them.

    All ranks share standard input, so only the first rank reads it.
    """
    if arguments.prompt is not None:
        return [arguments.prompt]
    if arguments.file is not None:
        lines = arguments.file.read_text(encoding="utf-8").splitlines()
        if not any(lines):
            raise ValueError(f"{arguments.file} has no prompts")
        return [_with_line_breaks(line) for line in lines if line]
    return None if sys.stdin.isatty() or os.environ.get("RANK", "0") != "0" else [sys.stdin.read()]


def as_json(completion: Completion, prompt: str) -> str:
    """Return a completion as a line of --json output."""
    fields: dict[str, Any] = asdict(completion)
    fields["prompt"] = prompt
    return json.dumps(fields, ensure_ascii=False)


class Writer:
    """Prints texts on the first rank: a single text while it is generated, several texts one after another.

    With `fits`, a text gets fewer than `options.max_tokens` tokens if no more fit after its prompt.
    """

    def __init__(self, generator: Generator, options: SamplingOptions, *, fits: bool, json: bool) -> None:
        self.generator, self.options, self.fits, self.json = generator, options, fits, json
        self.prints = generator.model.parallel.world.is_first

    def write(self, prompts: Sequence[str]) -> None:
        """Generate texts for the prompts and print them."""
        grows = len(prompts) * self.options.num_samples == 1 and not self.json
        completions: dict[tuple[int, int], Completion] = {}
        for piece, completion in self.generator.stream(list(prompts), [self._options(prompt) for prompt in prompts]):
            if grows:
                self._print(piece, end="")
            if completion.finish_reason is not None:
                completions[completion.prompt, completion.sample] = completion
        if grows:
            self._print("")
            return
        for key in sorted(completions):
            prompt, text = prompts[key[0]], completions[key]
            self._print(as_json(text, prompt) if self.json else f"--- {prompt!r}, {key[1]}\n{text.text}")

    def _options(self, prompt: str) -> SamplingOptions:
        """Return the sampling options for a prompt."""
        room = self.generator.room(len(self.generator.encode(prompt)))
        if not self.fits or room < 1:
            return self.options
        return replace(self.options, max_tokens=min(self.options.max_tokens, room))

    def ask(self) -> None:
        """Ask for prompts and continue them, until an empty prompt or the end of the input."""
        from megafp8.parallel.collectives import broadcast_object

        while prompt := broadcast_object(self._asked(), self.generator.model.parallel.world.group):
            try:
                self.write([prompt])
            except ValueError as error:  # the same on all ranks
                self._print(f"error: {error}")

    def _asked(self) -> str | None:
        if not self.prints:
            return None
        try:
            return input("prompt (empty: end)> ")
        except EOFError:
            return None

    def _print(self, text: str, end: str = "\n") -> None:
        if self.prints:
            print(text, end=end, flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Generate texts for the prompts that the arguments give, or ask for prompts."""
    from megafp8.parallel.collectives import broadcast_object
    from megafp8.parallel.parallel_state import destroy_model_parallel

    options = sampling_options(arguments)
    prompts = given_prompts(arguments)
    generator = load_generator(arguments)
    try:
        if generator.tokenizer is None:
            raise ValueError(f"{arguments.checkpoint} has no tokenizer; use megafp8.inference.Generator with tokens")
        writer = Writer(generator, options, fits=arguments.max_tokens is None, json=arguments.json)
        prompts = broadcast_object(prompts, generator.model.parallel.world.group)
        if prompts is None:
            writer.ask()
        else:
            writer.write(prompts)
    finally:
        destroy_model_parallel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
