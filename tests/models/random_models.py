"""Random models of all kinds of layers in random layouts, each compared in float64 with the unsharded twin.

    python -m tests.models.random_models --draws 200 --out draws.jsonl
    python -m tests.models.random_models --draw '{"model": {...}, "tp": 2}'      # one of them again

A draw is the network of a random composition (`tests.compositions`), made small, and how it runs: tensor, sequence,
context, pipeline, expert and expert tensor parallelism, recompute, documents, prefixes. A draw passes if the loss of
each token is that of `tests.models.twin` to 1e-11, and each gradient to 1e-10 (`tests.models.test_gpt.compare`). Exit
code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megafp8.config.parts import PARTS
from megafp8.prove.shrink import shrink
from tests.compositions.draw import draw as draw_composition
from tests.models.test_gpt import compare
from tests.training.presets import config
from tests.world import Ranks, World

Draw = dict[str, Any]
"""The arguments of `compare`."""


def draw(generator: random.Random) -> Draw | None:
    """A draw; None if its stages have different numbers of layers."""
    composition = draw_composition(generator, "gpt")
    small = shrink(composition.config, composition.ranks).config
    model, p, data = small.model, small.parallel, small.data
    if p.virtual_pipeline > 1 or model.num_layers % p.pipeline:
        return None
    recompute = "first" if p.recompute == "full" and p.recompute_blocks is not None else p.recompute
    return {
        "model": model.model_dump(mode="json"), "tp": p.tensor, "cp": p.context, "pp": p.pipeline, "ep": p.expert,
        "sequence_parallel": p.sequence_parallel and p.tensor > 1, "etp": p.expert_tensor,
        "gathers_tokens": small.gathers_tokens, "recompute": recompute, "documents": data.reset_at_documents,
        "prefix": None if data.prefix_lm is None else [3, 8], "z_loss": small.training.z_loss,
    }  # fmt: skip


def ranks_of(d: Draw) -> int:
    return d["tp"] * d["cp"] * d["pp"]


def draws(seed: int, count: int, largest: int) -> list[Draw]:
    """`count` different draws on at most `largest` ranks."""
    generator, drawn = random.Random(seed), dict[str, Draw]()
    while len(drawn) < count:
        d = draw(generator)
        if d is not None and ranks_of(d) <= largest:
            drawn[json.dumps(d)] = d
    return list(drawn.values())


def kinds_of(d: Draw) -> list[str]:
    """What a draw has, for the table."""
    checked = config(model=d["model"]).model
    found = {f"{part} {getattr(spec, part).kind}" for spec in checked.spec.distinct_layers for part in ("mixer", "ffn")}
    found |= {f"{key} {d[key]}" for key in ("tp", "cp", "pp", "ep", "etp")}
    found |= {key for key in ("documents", "prefix", "sequence_parallel") if d[key]}
    return sorted(found | {f"recompute {d['recompute']}"})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest layout that is drawn")
    parser.add_argument("--draw", type=json.loads, help="one draw, in place of random ones")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith")
    parser.add_argument("--out", type=Path, help="file that a line of JSON is added to for each draw")
    options = parser.parse_args()
    i, n = options.part
    chosen = [options.draw] if options.draw else draws(options.seed, options.draws, options.largest)[i::n]
    ranks, counts, failed = Ranks(), Counter[str](), 0
    try:
        for d in tqdm(chosen, mininterval=10):
            begin, problem, compared = time.monotonic(), None, 0
            try:
                compared = sum(World(ranks, 8).run(compare, ranks=ranks_of(d), **d))
            except AssertionError as error:
                problem = str(error)
                failed += 1
                tqdm.write(f"FAILED --draw '{json.dumps(d)}'\n{problem[:3000]}", file=sys.stdout)
            counts.update(kinds_of(d))
            if options.out:
                line = {"draw": d, "seconds": time.monotonic() - begin, "gradients": compared, "problem": problem}
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    finally:
        ranks.close()
    drawn = {f"mixer {part.model_fields['kind'].default}" for part in PARTS} & {*counts}
    assert options.draw or len(chosen) < 100 or len(drawn) > 5, "a kind of mixer was never drawn"
    print(f"{len(chosen)} draws, {failed} failed")
    print("\n".join(f"| {name} | {count} |" for name, count in sorted(counts.items())))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
