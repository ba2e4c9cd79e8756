"""Serve a model over HTTP with the API of OpenAI: completions and chats, with streaming.

    megafp8 serve runs/mine
    megafp8 serve meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --api-key-env SERVER_KEY
    torchrun --nproc-per-node 2 -m megafp8 serve runs/mine --tensor 2

docs/serving.md describes endpoints, limits and metrics. After SIGTERM or Ctrl-C, the server finishes running requests
and refuses new ones; a second signal ends them.
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
        raise argparse.ArgumentTypeError(f"{port} is not a port; ports are 0 to 65535")
    return port


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(prog="megafp8 serve", description=__doc__)
    parser.add_argument("checkpoint", type=as_path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument(
        "--port", type=_port, default=8000, help="port to listen on; 0: any free port; default: %(default)s"
    )
    parser.add_argument("--name", help="name of the model in requests; default: last part of the path")
    parser.add_argument("--chat-template", type=Path, help="file with a chat template; default: the tokenizer's")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key for requests")
    parser.add_argument(
        "--allow-refit", action="store_true", help="let requests pause the server and change its weights"
    )
    add_model_flags(parser)
    add_cache_flags(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body-bytes", type=int, default=2**20, help="per request; default: %(default)s")
    limits.add_argument("--max-prompt-tokens", type=int, help="per prompt; default: as many as fit")
    limits.add_argument("--max-tokens", type=int, help="per text; default: as many as fit")
    limits.add_argument("--max-texts", type=int, default=64, help="prompts × n per request; default: %(default)s")
    limits.add_argument(
        "--max-waiting", type=int, default=256, help="texts that wait for a full batch; default: %(default)s"
    )
    limits.add_argument("--max-client-texts", type=int, help="per client address; default: 3/4 of running and waiting")
    limits.add_argument(
        "--max-connections", type=at_least(1), default=1024, help="open connections; default: %(default)s"
    )
    limits.add_argument(
        "--request-seconds", type=_seconds, default=600.0, help="time limit of a request; default: %(default)s"
    )
    limits.add_argument(
        "--shutdown-seconds", type=_seconds, default=20.0, help="wait after SIGTERM; default: %(default)s"
    )
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    return make_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
