"""Convert a checkpoint between megafp8, Hugging Face and Megatron-LM, tensor by tensor, on a CPU.

    megafp8 convert --load runs/mine --save exported --to hf --verify
    megafp8 convert --load runs/mine --save fp8 --to hf --quantization fp8-block
    megafp8 convert --load meta-llama/Llama-3.1-8B --save llama --to native
    megafp8 convert --load runs/mine --save megatron --to megatron --tensor 2 --pipeline 4
    megafp8 convert --load runs/mine --save megatron --to torch_dist
    megafp8 convert --load runs/mine --save weights --to consolidated --dtype fp32
    megafp8 convert --load runs/lora --save adapter --to peft

The command needs memory for the largest tensor, whatever the size of the model. An interrupted command continues when
it is repeated. Nothing is overwritten, and the target appears when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.conversion.format_names import ACTIVATIONS, FORM_NAMES, FORMAT_NAMES, WRITTEN_NAMES
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.messages import print_error

if TYPE_CHECKING:
    from megafp8.conversion.base import CheckpointSource
    from megafp8.conversion.formats import CheckpointFormat
    from megafp8.conversion.huggingface.quantized_export import QuantizedExport
    from megafp8.conversion.target import Sink

OF_MEGATRON = ("megatron", "torch_dist")
SOURCE_OPTIONS = ("vocab_size",)
"""Keyword arguments of the sources of `OF_MEGATRON`."""
SINK_OPTIONS = {
    "hf": ("quantization", "activations", "kv_cache_scales"),
    "megatron": ("tensor", "pipeline", "virtual_pipeline", "expert", "implementation"),
    "torch_dist": ("implementation",),
    "peft": ("base",),
}
"""Keyword arguments of sinks, by format."""


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--load", required=True, type=expanduser, metavar="PATH", help="checkpoint or run folder, as a path or URL"
    )
    parser.add_argument("--save", required=True, type=Path, metavar="PATH", help="folder to create, or an empty folder")
    formats = "megatron and torch_dist are Megatron-LM's --ckpt-format torch and torch_dist (docs/converting.md)"
    parser.add_argument("--to", required=True, choices=WRITTEN_NAMES, help=formats)
    parser.add_argument(
        "--from", dest="source", choices=FORMAT_NAMES, help="format of the source; default: detected from its files"
    )
    help = (
        "dtype of weights; tensors that training keeps in fp32 stay fp32 (docs/converting.md); implies --weights-only"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help=help)
    parser.add_argument("--weights-only", action="store_true", help="leave optimizer state and FP8 scales out")
    parser.add_argument("--verify", action="store_true", help="read the target back and compare every value")
    to = parser.add_argument_group("to Megatron-LM")
    to.add_argument("--tensor", type=at_least(1), metavar="N", help="tensor-parallel size (megatron)")
    to.add_argument("--pipeline", type=at_least(1), metavar="N", help="pipeline-parallel size (megatron)")
    to.add_argument("--virtual-pipeline", type=at_least(1), metavar="N", help="stages per pipeline rank (megatron)")
    to.add_argument("--expert", type=at_least(1), metavar="N", help="expert-parallel size (megatron)")
    names = ("transformer_engine", "local")
    to.add_argument("--transformer-impl", dest="implementation", choices=names, help="default: transformer_engine")
    of = parser.add_argument_group("from Megatron-LM")
    of.add_argument(
        "--vocab-size",
        type=at_least(1),
        metavar="N",
        help="vocabulary size before padding, if the files do not contain it",
    )
    quantized = parser.add_argument_group("to Hugging Face, in FP8 (docs/converting.md)")
    quantized.add_argument("--quantization", choices=FORM_NAMES, help="format of the weights that are FP8 in the run")
    help = "static: use the run's input scales; default: static if every FP8 layer has one"
    quantized.add_argument("--activations", choices=ACTIVATIONS, help=help)
    help = "scales of FP8 key-value caches, written by megafp8 evaluate --kv-cache-scales"
    quantized.add_argument("--kv-cache-scales", type=expanduser, metavar="FILE", help=help)
    help = "Hugging Face folder of the adapted model; default: the run's checkpoint.init_from"
    parser.add_argument_group("to PEFT").add_argument("--base", type=expanduser, metavar="PATH", help=help)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line, after checking that they fit the target format."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for format, options in SINK_OPTIONS.items():
        foreign = tuple(option for option in options if option not in SINK_OPTIONS.get(arguments.to, ()))
        if given(arguments, foreign):
            parser.error(f"the format {arguments.to} has no such option: give {', '.join(foreign)} to {format}")
    if arguments.activations and not arguments.quantization:
        parser.error(f"--activations {arguments.activations} is for FP8: give --quantization fp8-tensor too")
    if arguments.kv_cache_scales and not arguments.quantization:
        parser.error("--kv-cache-scales is for FP8: give --quantization fp8-tensor too")
    if arguments.quantization and arguments.dtype:
        parser.error("--quantization already determines the dtype of weights: leave --dtype out")
    return arguments


def given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments among `names` that are set."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def opened(format: CheckpointFormat, path: Path, to: CheckpointFormat, **options: Any) -> CheckpointSource:
    """Open the source at `path`, restricted to the contents that the format `to` can hold."""
    from megafp8.conversion.adapters import AdaptersAlone
    from megafp8.conversion.model import check_size_of

    source = format.source(path, **options)
    check_size_of(source)
    return AdaptersAlone(source) if to.adapters else source


def run(arguments: argparse.Namespace) -> None:
    """Convert the checkpoint that the arguments name, and verify it if requested."""
    from megafp8.conversion.convert import Selected, convert, verify
    from megafp8.conversion.formats import FORMATS, fetched, recognize
    from megafp8.conversion.huggingface.quantized_export import Expected
    from megafp8.conversion.huggingface.sink import HfSink
    from megafp8.inference.kv_cache_scales import read_scales
    from megafp8.numerics.dtypes import DTYPES
    from megafp8.training.quantized_export import quantized_export

    load = fetched(arguments.load)
    format, to = arguments.source or recognize(load), FORMATS[arguments.to]
    source_options = given(arguments, SOURCE_OPTIONS)
    if source_options and format not in OF_MEGATRON:
        flags, formats = ", ".join(source_options), " and ".join(OF_MEGATRON)
        raise ValueError(f"{arguments.load} has the format {format}; {flags} is for {formats}")
    whole = opened(FORMATS[format], load, to, **source_options)
    selected = Selected(
        whole,
        weights_only=arguments.weights_only or arguments.dtype is not None or to.weights_only,
        dtype=DTYPES.get(arguments.dtype),
        mtp=to.mtp,
    )
    export: QuantizedExport | None = None
    if arguments.quantization:
        kv_cache = read_scales(Path(arguments.kv_cache_scales)) if arguments.kv_cache_scales else {}
        export = quantized_export(whole, arguments.quantization, arguments.activations, kv_cache)
        sink: Sink = HfSink(arguments.save, quantized=export)
    else:
        sink = to.sink(arguments.save, **given(arguments, SINK_OPTIONS.get(arguments.to, ())))
    options = (
        "to",
        "dtype",
        "weights_only",
        *dict.fromkeys(x for options in SINK_OPTIONS.values() for x in options),
        *SOURCE_OPTIONS,
    )
    print(f"{sink.path}: {convert(selected, sink, {name: getattr(arguments, name) for name in options})}")
    if arguments.verify:
        expected = selected if export is None else Expected(selected, export)
        rounded = f" with {selected.rounded} of its tensors rounded to {arguments.dtype}" if selected.rounded else ""
        print(f"{sink.path}: equal to {selected.path}{rounded}: {verify(expected, opened(to, sink.hidden, to))}")
    sink.publish()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from megafp8.conversion.convert import keep_freed_memory

    keep_freed_memory()
    try:
        run(parse_arguments(argv))
    except (ValueError, OSError) as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
