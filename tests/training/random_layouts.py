"""Small models in random layouts, each compared with the same model on one rank.

    python -m tests.training.random_layouts --draws 500 --out draws.jsonl
    python -m tests.training.random_layouts --words "moe tp2 dp2 ep2 fsdp fp64 delayed"      # one of them again

A draw combines a model, a precision, an FP8 recipe, a layout, a schedule, a form of data parallelism, and options of
memory, batches and optimizer, all as words of `runs.WORDS`. What the config's checks refuse is drawn again. A draw
fails if a rank raises, dies or hangs, if ranks that hold the same values differ, or if a loss or gradient norm is not
that of one rank within `test_layouts.tolerances`. Exit code 1 if one fails.

Some layouts are documented to compute something else than one rank (`documented_difference`); these draws are held to
`test_layouts.LOOSE`. A draw that is held to `LOOSE`, for that reason or for its precision, may still be off by more in
a model that amplifies rounding errors, so it is decided by a sharper one: the same draw with 64 or 32 bits instead of
16, without the documented difference (`sharper`). Both kinds are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError
from tqdm import tqdm

from megafp8.config import Config, ConfigError
from tests.training.runs import Curve, Outcome, _train, check_config, config_of, merged, ranks_of, without_execution
from tests.training.test_layouts import FP8, LOOSE, ROUNDED_SUMS, tolerances
from tests.world import Ranks, World

LARGEST = 8
"""Ranks of the largest layout that is drawn."""
MOVED = (1e-6, 1e-4)
"""Relative limits in float64 of loss and norm after the first update, where ranks round gradients to fp32 before they
are added up: the update then moves a few weights over a rounding boundary of FP8. Scales of a wrong group show as 1e-5
to 1e-3 in the loss."""
EXPERTS = ["moe", "moe", "deepseek", "deepseek", "gpt-oss", "few-rows", "global-balance", "dropping"]
DENSE = ["", "gpt2", "qkv-bias", "qk-norm", "parallel-block", "gemma", "bloom", "window", "mtp", "bert", "bert-pre",
         "t5", "t5-tied"]  # fmt: skip


def draw(generator: random.Random) -> str:
    """Words of a run, which the config's checks may refuse."""
    choose = generator.choice

    def maybe(share: float, *options: str) -> str:
        return choose(options) if generator.random() < share else ""

    experts = generator.random() < 0.6
    model = choose(EXPERTS if experts else DENSE)
    mlps = not experts or model == "deepseek"  # which "custom" has a rule for
    tensor, context, data = choose([1, 1, 2, 2, 4]), choose([1, 1, 1, 2, 4]), choose([1, 2, 2, 4])
    stages = choose([1, 1, 1, 2, 2, 4])
    recipe = maybe(0.7, "delayed", "delayed", "current", "current", "rowwise", "blockwise", "mxfp8", "calibrated",
                   "custom" if mlps else "current")  # fmt: skip
    # With sums in float64 a wrong group of ranks for a scale cannot hide behind rounding.
    precision = (
        choose(["fp64", "fp64", "fp64", "", "bf16"])
        if recipe
        else choose(["", "", "", "bf16", "fp16" if model != "gpt-oss" else ""])
    )
    words = [
        "" if stages == 1 else "4-layers", model, maybe(0.25, "tied"), maybe(0.1, "mtp"), maybe(0.15, "dropout"),
        maybe(0.12, "lora", "lora-2", "lora-q-down"), precision, recipe,
        f"tp{tensor}" if tensor > 1 else "", f"cp{context}" if context > 1 else "",
        f"pp{stages}" if stages > 1 else "", f"dp{data}" if data > 1 else "",
        maybe(0.15, "no-sp") if tensor > 1 else "",
        maybe(0.5, "zb-h1", "interleaved", "zb-v", "dualpipev") if stages > 1 else "",
        maybe(0.75, "zero", "fsdp", "fsdp", "hsdp") if data > 1 else "",
        maybe(0.4, "fp8-gather") if recipe and data > 1 else "",
        maybe(0.1, "late-reduce", "late-gather", "large-buckets", "bf16-reduce") if data > 1 else "",
        maybe(0.25, "full", "selective", "norms", "activation", "offload", "offload selective", "graphs"),
        maybe(0.3, "masked", "documents", "best-fit", "answers", "prefix"),
        maybe(0.3, "muon", "bf16-moments", "fp8-moments", "average", "groups", "no-clip", "clip"),
        maybe(0.3, "4-samples", "8-samples") if stages > 1 or data > 1 else "", maybe(0.1, "micro2"),
    ]  # fmt: skip
    if experts:
        words += [maybe(0.6, "ep2", "ep2", "ep4"), maybe(0.25, "etp2"), maybe(0.2, "all-to-all")]
    return " ".join(filter(None, words))


def configs_of(words: str) -> tuple[Config, Config]:
    """The config that `words` describe and that of the same computation on one rank; ConfigError or ValidationError
    where one is refused."""
    found = config_of(words, device="auto" if "graphs" in words.split() else "cpu")
    check_config(found, ranks_of(words))
    plain_sections = without_execution(words)
    if FP8 & {*words.split()}:  # an amax is that of a micro-batch
        plain_sections = merged(plain_sections, {"training": {"micro_batch_size": found.training.micro_batch_size}})
    plain = config_of("", seed=1234, device="cpu", **plain_sections)
    check_config(plain, 1)
    return config_of(words), plain


def draws(seed: int, count: int) -> list[str]:
    """`count` different runs that the checks accept, with `LARGEST` ranks at most."""
    generator, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        words = draw(generator)
        try:
            if ranks_of(words) <= LARGEST:
                configs_of(words)
                found[words] = None
        except (ConfigError, ValidationError):
            pass
    return list(found)


def documented_difference(words: str) -> str | None:
    """Why this layout computes something else than one rank does, if it does."""
    found, names = config_of(words), {*words.split()}
    p, moe = found.parallel, found.model.moe
    if moe is not None and FP8 & names and p.tensor * p.context % (p.expert * p.expert_tensor):
        return "FP8 experts receive tokens of several micro-batches (docs/mixture-of-experts.md)"
    if moe is not None and moe.capacity_factor is not None and p.tensor * p.context > 1:
        return "the capacity of an expert is counted over a rank's tokens (docs/mixture-of-experts.md)"
    if {"rowwise", "custom"} & names and p.tensor > 1:
        return "tensor parallelism cuts rows that have one scale (README.md, FP8 recipes)"
    return None


def sharper(words: str) -> str | None:
    """The draw that decides whether `words`, held to `LOOSE`, computes what it should."""
    names = words.split()
    if documented_difference(words):
        dropped = FP8 | {"fp8-gather", "fp64", "bf16", "fp16"}
        kept = ["moe" if name == "dropping" else name for name in names if name not in dropped]
        return " ".join(kept)
    if {"bf16", "fp16"} & {*names}:
        wide = "fp64" if FP8 & {*names} else ""
        return " ".join(filter(None, (wide if name in ("bf16", "fp16") else name for name in names)))
    return None


def differences(found: Curve, expected: Curve, words: str) -> list[str]:
    """Losses and norms that are not finite, or not those of one rank within the tolerance."""
    exact, sharp = tolerances(words)
    if documented_difference(words):
        sharp = (0, 0)
    names = {*words.split()}
    moves = "fp64" in names and bool(FP8 & names) and bool(ROUNDED_SUMS & names)
    problems = []
    for step, pair in enumerate(zip(found, expected, strict=True)):
        for i, (a, b) in enumerate(zip(*pair)):
            limit = exact[i] if step < sharp[i] else LOOSE[i]
            if step == 1 and moves and limit == exact[i]:
                limit = MOVED[i]
            if not math.isfinite(a) or a != pytest.approx(b, rel=limit):
                off = (a - b) / b if b else math.inf
                problems.append(f"{('loss', 'norm')[i]} {step}: {a!r}, one rank {b!r}, off {off:.1e} (limit {limit})")
    return problems


@dataclass(frozen=True)
class Trial:
    """The outcome of one draw, which has passed if `problems` is empty.

    `documented`: why it is held to `LOOSE`. `decided`: the problems that a sharper draw, which had none, has explained.
    """

    words: str
    ranks: int
    documented: str | None
    problems: list[str]
    decided: list[str]
    seconds: float


def trial(words: str, world: World, one_rank: dict[str, Curve]) -> Trial:
    """Train on one rank, unless that run is in `one_rank`, and in the layout."""
    begin, decided = time.monotonic(), list[str]()
    problems = _problems(words, world, one_rank)
    if any(problem.startswith(("loss", "norm")) for problem in problems) and (other := sharper(words)) is not None:
        sharp = _problems(other, world, one_rank)
        if sharp:
            problems += [f"{other!r}, which decides: {problem}" for problem in sharp]
        else:
            problems, decided = [], problems
    return Trial(words, ranks_of(words), documented_difference(words), problems, decided, time.monotonic() - begin)


def _problems(words: str, world: World, one_rank: dict[str, Curve]) -> list[str]:
    layout, plain = configs_of(words)
    try:
        if (key := plain.model_dump_json()) not in one_rank:
            one_rank[key] = Outcome.of(world.run(_train, plain, 2, ranks=1)).curve
        found = Outcome.of(world.run(_train, layout, 2, ranks=ranks_of(words))).curve
    except AssertionError as error:
        return [str(error)]
    return differences(found, one_rank[key], words)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", help="one run, in place of random ones")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith")
    parser.add_argument("--out", type=Path, help="file that a line of JSON is added to for each draw")
    options = parser.parse_args()
    i, n = options.part
    chosen = [options.words] if options.words else draws(options.seed, options.draws)[i::n]
    ranks, one_rank, done = Ranks(), dict[str, Curve](), list[Trial]()
    try:
        for words in tqdm(chosen, mininterval=10):
            done.append(trial(words, World(ranks, LARGEST), one_rank))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(vars(done[-1])) + "\n")
            if done[-1].problems:
                tqdm.write(f'FAILED --words "{words}"\n  ' + "\n  ".join(done[-1].problems), file=sys.stdout)
    finally:
        ranks.close()
    print(report(done))
    return int(any(x.problems for x in done))


def report(done: list[Trial]) -> str:
    """A table of what was drawn and how it came out."""

    def row(name: str, found: list[Trial]) -> str:
        return f"| {name} | {len(found)} | {sum(bool(x.problems) for x in found)} |"

    def having(*words: str) -> list[Trial]:
        return [x for x in done if {*words} & {*x.words.split()}]

    rows = [row("all", done), row("experts", having(*EXPERTS)), row("FP8", having(*FP8))]
    rows.append(row("FP8 experts", [x for x in having(*FP8) if x in having(*EXPERTS)]))
    rows += [
        row(reason, [x for x in done if x.documented == reason])
        for reason in sorted({x.documented or "" for x in done})[1:]
    ]
    rows.append(row("above their limit, decided by a sharper draw", [x for x in done if x.decided]))
    rows.append(row("FSDP, HSDP", having("fsdp", "hsdp")))
    rows += [row(f"{count} ranks", [x for x in done if x.ranks == count]) for count in sorted({x.ranks for x in done})]
    recipes = Counter(word for x in done for word in x.words.split() if word in FP8)
    rows.append(f"\nRecipes: {', '.join(f'{name} {count}' for name, count in recipes.most_common())}")
    return "\n".join(["| draws | number | failed |", "|:--|--:|--:|", *rows])


if __name__ == "__main__":
    sys.exit(main())
