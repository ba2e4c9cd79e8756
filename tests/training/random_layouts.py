"""Small models in random layouts, each compared with the same model on one rank.

    python -m tests.training.random_layouts --draws 500 --out draws.jsonl
    python -m tests.training.random_layouts --preset "moe tp2 dp2 ep2 fsdp fp64 delayed"     # one of them again

A draw combines a model, a precision, an FP8 recipe, a layout, a schedule, a form of data parallelism, and options of
memory, batches and optimizer, all from `PRESETS`. What the config's checks refuse is drawn again. A draw
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
from tests.training.presets import *  # noqa: F403
from tests.training.presets import PRESETS, Preset, config_of, joined, merged, without_execution
from tests.training.runs import Curve, Outcome, _train, check_config
from tests.training.test_layouts import FP8, LOOSE, tolerances
from tests.world import Ranks, World

LARGEST = 8
"""Ranks of the largest layout that is drawn."""
EXPERTS = [MOE, MOE, DEEPSEEK, DEEPSEEK, GPT_OSS, FEW_ROWS, GLOBAL_BALANCE, DROPPING]
DENSE = [NONE, GPT2, QKV_BIAS, QK_NORM, PARALLEL_BLOCK, GEMMA, BLOOM, WINDOW, MTP, BERT, BERT_PRE,
         T5, T5_TIED]  # fmt: skip


def draw(generator: random.Random) -> Preset:
    """A run, which the config's checks may refuse."""
    choose = generator.choice

    def maybe(share: float, *options: Preset) -> Preset:
        return choose(options) if generator.random() < share else NONE

    experts = generator.random() < 0.6
    model = choose(EXPERTS if experts else DENSE)
    mlps = not experts or model == DEEPSEEK  # which "custom" has a rule for
    tensor, context, data = choose([1, 1, 2, 2, 4]), choose([1, 1, 1, 2, 4]), choose([1, 2, 2, 4])
    stages = choose([1, 1, 1, 2, 2, 4])
    recipe = maybe(0.7, DELAYED, DELAYED, CURRENT, CURRENT, ROWWISE, BLOCKWISE, MXFP8, CALIBRATED,
                   CUSTOM if mlps else CURRENT)  # fmt: skip
    # With sums in float64 a wrong group of ranks for a scale cannot hide behind rounding.
    precision = (
        choose([FP64, FP64, FP64, NONE, BF16])
        if recipe != NONE
        else choose([NONE, NONE, NONE, BF16, FP16 if model != GPT_OSS else NONE])
    )
    presets = [
        NONE if stages == 1 else LAYERS_4, model, maybe(0.25, TIED), maybe(0.1, MTP), maybe(0.15, DROPOUT),
        maybe(0.12, LORA, LORA_2, LORA_Q_DOWN), precision, recipe,
        PRESETS[f"tp{tensor}"] if tensor > 1 else NONE, PRESETS[f"cp{context}"] if context > 1 else NONE,
        PRESETS[f"pp{stages}"] if stages > 1 else NONE, PRESETS[f"dp{data}"] if data > 1 else NONE,
        maybe(0.15, NO_SP) if tensor > 1 else NONE,
        maybe(0.5, ZB_H1, INTERLEAVED, ZB_V, DUALPIPEV) if stages > 1 else NONE,
        maybe(0.75, ZERO, FSDP, FSDP, HSDP) if data > 1 else NONE,
        maybe(0.4, FP8_GATHER) if recipe != NONE and data > 1 else NONE,
        maybe(0.1, LATE_REDUCE, LATE_GATHER, LARGE_BUCKETS, BF16_REDUCE) if data > 1 else NONE,
        maybe(0.25, FULL, SELECTIVE, NORMS, ACTIVATION, OFFLOAD, OFFLOAD | SELECTIVE, GRAPHS),
        maybe(0.3, MASKED, DOCUMENTS, BEST_FIT, ANSWERS, PREFIX),
        maybe(0.3, MUON, BF16_MOMENTS, FP8_MOMENTS, AVERAGE, GROUPS, NO_CLIP, CLIP),
        maybe(0.3, SAMPLES_4, SAMPLES_8) if stages > 1 or data > 1 else NONE, maybe(0.1, MICRO2),
    ]  # fmt: skip
    if experts:
        presets += [maybe(0.6, EP2, EP2, EP4), maybe(0.25, ETP2), maybe(0.2, ALL_TO_ALL)]
    return joined(presets)


def configs_of(preset: Preset) -> tuple[Config, Config]:
    """The config of `preset` and that of the same computation on one rank; ConfigError or ValidationError where one is
    refused."""
    layout = config_of(preset, device="auto" if GRAPHS in preset else "cpu")
    check_config(layout, preset.ranks)
    plain_sections = without_execution(preset)
    if FP8 & {*preset.parts}:  # an amax is that of a micro-batch
        plain_sections = merged(plain_sections, {"training": {"micro_batch_size": layout.training.micro_batch_size}})
    plain = config_of(NONE, **plain_sections)
    check_config(plain, 1)
    return config_of(preset), plain


def draws(seed: int, count: int) -> list[Preset]:
    """`count` different runs that the checks accept, with `LARGEST` ranks at most."""
    generator, drawn = random.Random(seed), dict[Preset, None]()
    while len(drawn) < count:
        preset = draw(generator)
        try:
            if preset.ranks <= LARGEST:
                configs_of(preset)
                drawn[preset] = None
        except (ConfigError, ValidationError):
            pass
    return list(drawn)


def documented_difference(preset: Preset) -> str | None:
    """Why this layout computes something else than one rank does, if it does."""
    config, parts = config_of(preset), {*preset.parts}
    p, moe = config.parallel, config.model.moe
    if moe is not None and FP8 & parts and p.tensor * p.context % (p.expert * p.expert_tensor):
        return "FP8 experts receive tokens of several micro-batches (docs/mixture-of-experts.md)"
    if moe is not None and moe.capacity_factor is not None and p.tensor * p.context > 1:
        return "the capacity of an expert is counted over a rank's tokens (docs/mixture-of-experts.md)"
    if {ROWWISE, CUSTOM} & parts and p.tensor > 1:
        return "tensor parallelism cuts rows that have one scale (docs/fp8.md)"
    return None


def sharper(preset: Preset) -> Preset | None:
    """The draw that decides whether `preset`, held to `LOOSE`, computes what it should."""
    parts = preset.parts
    if documented_difference(preset):
        dropped = FP8 | {FP8_GATHER, FP64, BF16, FP16}
        return joined(MOE if part == DROPPING else part for part in parts if part not in dropped)
    if {BF16, FP16} & {*parts}:
        wide = FP64 if FP8 & {*parts} else NONE
        return joined(wide if part in (BF16, FP16) else part for part in parts)
    return None


def differences(found: Curve, expected: Curve, preset: Preset) -> list[str]:
    """Losses and norms that are not finite, or not those of one rank within the tolerance."""
    exact, sharp = tolerances(preset)
    if documented_difference(preset):
        sharp = (0, 0)
    problems = []
    for step, pair in enumerate(zip(found, expected, strict=True)):
        for i, (a, b) in enumerate(zip(*pair)):
            limit = exact[i] if step < sharp[i] else LOOSE[i]
            if not math.isfinite(a) or a != pytest.approx(b, rel=limit):
                off = (a - b) / b if b else math.inf
                problems.append(f"{('loss', 'norm')[i]} {step}: {a!r}, one rank {b!r}, off {off:.1e} (limit {limit})")
    return problems


@dataclass(frozen=True)
class Trial:
    """The outcome of one draw, which has passed if `problems` is empty.

    `documented`: why it is held to `LOOSE`. `decided`: the problems that a sharper draw, which had none, has explained.
    """

    preset: str
    ranks: int
    documented: str | None
    problems: list[str]
    decided: list[str]
    seconds: float


def trial(preset: Preset, world: World, one_rank: dict[str, Curve]) -> Trial:
    """Train on one rank, unless that run is in `one_rank`, and in the layout."""
    begin, decided = time.monotonic(), list[str]()
    problems = _problems(preset, world, one_rank)
    if any(problem.startswith(("loss", "norm")) for problem in problems) and (other := sharper(preset)) is not None:
        sharp = _problems(other, world, one_rank)
        if sharp:
            problems += [f"'{other}', which decides: {problem}" for problem in sharp]
        else:
            problems, decided = [], problems
    return Trial(str(preset), preset.ranks, documented_difference(preset), problems, decided, time.monotonic() - begin)


def _problems(preset: Preset, world: World, one_rank: dict[str, Curve]) -> list[str]:
    layout, plain = configs_of(preset)
    try:
        if (key := plain.model_dump_json()) not in one_rank:
            one_rank[key] = Outcome.of(world.run(_train, plain, 2, ranks=1)).curve
        found = Outcome.of(world.run(_train, layout, 2, ranks=preset.ranks)).curve
    except AssertionError as error:
        return [str(error)]
    return differences(found, one_rank[key], preset)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", help="names of the presets of one run, in place of random ones")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith")
    parser.add_argument("--out", type=Path, help="file that a line of JSON is added to for each draw")
    options = parser.parse_args()
    i, n = options.part
    given = joined(PRESETS[name] for name in (options.preset or "").split())
    chosen = [given] if options.preset else draws(options.seed, options.draws)[i::n]
    ranks, one_rank, done = Ranks(), dict[str, Curve](), list[Trial]()
    try:
        for preset in tqdm(chosen, mininterval=10):
            done.append(trial(preset, World(ranks, LARGEST), one_rank))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(vars(done[-1])) + "\n")
            if done[-1].problems:
                tqdm.write(f'FAILED --preset "{preset}"\n  ' + "\n  ".join(done[-1].problems), file=sys.stdout)
    finally:
        ranks.close()
    print(report(done))
    return int(any(x.problems for x in done))


def report(done: list[Trial]) -> str:
    """A table of what was drawn and how it came out."""

    def row(name: str, found: list[Trial]) -> str:
        return f"| {name} | {len(found)} | {sum(bool(x.problems) for x in found)} |"

    def having(*presets: Preset) -> list[Trial]:
        names = {name for preset in presets for name in preset.names}
        return [x for x in done if names & {*x.preset.split()}]

    rows = [row("all", done), row("experts", having(*EXPERTS)), row("FP8", having(*FP8))]
    rows.append(row("FP8 experts", [x for x in having(*FP8) if x in having(*EXPERTS)]))
    rows += [
        row(reason, [x for x in done if x.documented == reason])
        for reason in sorted({x.documented or "" for x in done})[1:]
    ]
    rows.append(row("above their limit, decided by a sharper draw", [x for x in done if x.decided]))
    rows.append(row("FSDP, HSDP", having(FSDP, HSDP)))
    rows += [row(f"{count} ranks", [x for x in done if x.ranks == count]) for count in sorted({x.ranks for x in done})]
    recipes = Counter(name for x in done for name in x.preset.split() if PRESETS[name] in FP8)
    rows.append(f"\nRecipes: {', '.join(f'{name} {count}' for name, count in recipes.most_common())}")
    return "\n".join(["| draws | number | failed |", "|:--|--:|--:|", *rows])


if __name__ == "__main__":
    sys.exit(main())
