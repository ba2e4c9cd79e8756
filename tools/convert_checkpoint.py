"""Convert a checkpoint between megafp8, Hugging Face and Megatron-LM, tensor by tensor, on a CPU.

    python tools/convert_checkpoint.py --load runs/mine --save exported --to hf --verify
    python tools/convert_checkpoint.py --load meta-llama/Llama-3.1-8B --save llama --to native
    python tools/convert_checkpoint.py --load runs/mine --save megatron --to megatron --tensor 2 --pipeline 4
    python tools/convert_checkpoint.py --load runs/mine --save weights --to consolidated --dtype fp32

It needs memory for the largest tensor, whatever the size of the model. A command that was killed goes on when it is
repeated. Nothing is overwritten, and the target appears when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megafp8.conversion.convert import Note, Selected, convert, verify
from megafp8.conversion.formats import FORMATS, open_source

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, type=Path, metavar="PATH", help="checkpoint, or the folder of a run")
    parser.add_argument("--save", required=True, type=Path, metavar="PATH", help="folder to make")
    parser.add_argument("--to", required=True, choices=list(FORMATS))
    parser.add_argument("--from", dest="source", choices=list(FORMATS), help="default: what the files look like")
    parser.add_argument("--tensor", type=int, metavar="N", help="megatron: tensor-parallel size of the target")
    parser.add_argument("--pipeline", type=int, metavar="N", help="megatron: pipeline-parallel size of the target")
    parser.add_argument("--dtype", choices=list(DTYPES), help="convert weights; implies --weights-only")
    parser.add_argument("--weights-only", action="store_true", help="leave optimizer state and FP8 scales out")
    parser.add_argument("--verify", action="store_true", help="read the target back and compare every value")
    arguments = parser.parse_args(argv)
    if arguments.to != "megatron" and (arguments.tensor or arguments.pipeline):
        parser.error(f"--tensor and --pipeline are for --to megatron; a {arguments.to} checkpoint has no layout")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    dtype = DTYPES.get(arguments.dtype)
    weights_only = arguments.weights_only or dtype is not None or FORMATS[arguments.to].weights_only
    opened = open_source(arguments.load, arguments.source)
    source = Selected(opened, weights_only=weights_only, dtype=dtype)
    options = ("to", "tensor", "pipeline", "dtype", "weights_only")
    note = Note(arguments.save, source, {name: getattr(arguments, name) for name in options})
    if note.check():
        print(f"{arguments.save}: {convert(source, FORMATS[arguments.to].sink(arguments.save), note)}")
    if arguments.verify:
        print(f"{arguments.save}: equal to {source.path}: {verify(source, open_source(arguments.save, arguments.to))}")
    note.remove()


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse_arguments(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
