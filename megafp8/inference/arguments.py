"""Command-line flags of tools that generate text with a model or evaluate it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from megafp8.inference.options import CacheOptions
from megafp8.linear.weight_format_names import WeightFormatName

if TYPE_CHECKING:
    from megafp8.inference.generator import Generator


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `model_options` and `bind_to_cores` read."""
    model = parser.add_argument_group("model")
    model.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    model.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    model.add_argument("--expert", type=int, default=1, help="expert-parallel size, a divisor of --tensor")
    model.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    model.add_argument("--threads", type=int, help="CPU threads per rank; default: the host's cores divided by ranks")
    model.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: the checkpoint's dtype")
    model.add_argument("--no-fp8", action="store_true", help="compute a model trained in FP8 in high precision")
    model.add_argument("--weights", choices=get_args(WeightFormatName), help="quantize the weights of linear layers")
    model.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="same log-probabilities as in training, for any batch; default: as the run's config says",
    )
    model.add_argument("--max-length", type=int, help="most tokens of a text; default: the sequence length in training")


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `open_checkpoint`, except for path and layout, from the flags."""
    from megafp8.numerics.dtypes import DTYPES

    return {
        "device": arguments.device,
        "dtype": DTYPES.get(arguments.dtype),
        "fp8": not arguments.no_fp8,
        "weights": arguments.weights,
        "batch_invariant": arguments.batch_invariant,
    }


def bind_to_cores(arguments: argparse.Namespace) -> None:
    """Bind the process to its cores if the model runs on a CPU. Call it before the first tensor operation.

    Raises ValueError if `--threads` is not possible.
    """
    import torch

    from megafp8.inference.cpu_threads import bind_threads

    if arguments.device == "cpu" or (arguments.device == "auto" and not torch.cuda.is_available()):
        bind_threads(arguments.threads)
    elif arguments.threads is not None:
        raise ValueError(f"--threads {arguments.threads}: only for CPUs, but the model runs on a GPU; leave it out")


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set `CacheOptions`."""
    default, cache = CacheOptions(), parser.add_argument_group("cache and batches")
    cache.add_argument("--cache-tokens", type=int, help="tokens in the cache, shared by all texts generated at once")
    cache.add_argument("--cache-dtype", choices=("fp8", "int8"), help="store keys and values in half the memory")
    for name, what in (
        ("page-size", "tokens per page"),
        ("max-batch-tokens", "most prompt tokens read in one step"),
        ("max-sequences", "most texts generated at once"),
    ):
        value = getattr(default, name.replace("-", "_"))
        cache.add_argument(f"--{name}", type=int, default=value, help=f"{what}; default: %(default)s")


def load_generator(arguments: argparse.Namespace) -> Generator:
    """Return a generator for `arguments.checkpoint`, built from the model and cache flags. Collective."""
    from megafp8.inference.generator import Generator

    bind_to_cores(arguments)
    return Generator.from_checkpoint(
        arguments.checkpoint,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        expert=arguments.expert,
        max_length=arguments.max_length,
        **model_options(arguments),
        cache=CacheOptions(
            page_size=arguments.page_size,
            cache_tokens=arguments.cache_tokens,
            max_batch_tokens=arguments.max_batch_tokens,
            max_sequences=arguments.max_sequences,
            dtype=arguments.cache_dtype,
        ),
    )
