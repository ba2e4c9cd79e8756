"""Serve a model over HTTP, by the API of OpenAI: completions and chats, with streams.

    megafp8 serve runs/mine
    megafp8 serve meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --api-key-env SERVER_KEY
    torchrun --nproc-per-node 2 -m megafp8 serve runs/mine --tensor 2

docs/serving.md describes endpoints, limits and metrics. SIGTERM or Ctrl-C lets running requests end and refuses others;
a second one ends them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.host.arguments import ArgumentParser, at_least, between
from megafp8.host.messages import print_error
from megafp8.host.object_store import as_path
from megafp8.inference.arguments import add_cache_flags, add_model_flags

_seconds = between(0.001, 1e9)


def _port(text: str) -> int:
    """Parse the value of --port."""
    port = int(text)
    if not 0 <= port < 2**16:
        raise argparse.ArgumentTypeError(f"{port} is no port; ports are 0 to 65535")
    return port


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="megafp8 serve", description=__doc__)
    parser.add_argument("checkpoint", type=as_path, help="run, checkpoint or folder of Hugging Face")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    parser.add_argument("--port", type=_port, default=8000, help="0: a free one; default: %(default)s")
    parser.add_argument("--name", help="of the model in requests; default: the last part of the path")
    parser.add_argument("--chat-template", type=Path, help="default: the tokenizer's template")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of requests")
    parser.add_argument("--allow-refit", action="store_true", help="requests may pause it and change its weights")
    add_model_flags(parser)
    add_cache_flags(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body-bytes", type=int, default=2**20, help="of a request; default: %(default)s")
    limits.add_argument("--max-prompt-tokens", type=int, help="of a prompt; default: what fits")
    limits.add_argument("--max-tokens", type=int, help="of a text; default: what fits")
    limits.add_argument("--max-texts", type=int, default=64, help="prompts times n of a request; default: %(default)s")
    limits.add_argument("--max-waiting", type=int, default=256, help="texts beside a full batch; default: %(default)s")
    limits.add_argument("--max-client-texts", type=int, help="of an address; default: 3/4 of those that run and wait")
    limits.add_argument("--max-connections", type=at_least(1), default=1024, help="open at once; default: %(default)s")
    limits.add_argument(
        "--request-seconds", type=_seconds, default=600.0, help="a request may take; default: %(default)s"
    )
    limits.add_argument("--shutdown-seconds", type=_seconds, default=20.0, help="after SIGTERM; default: %(default)s")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    return make_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(format="%(message)s")
    from megafp8.inference.server.run import run

    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
