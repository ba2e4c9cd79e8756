"""Serve the lighthouse that decides which replicas of a job train together (resilience.replicas).

    export MEGAFP8_LIGHTHOUSE_TOKEN=$(openssl rand -hex 16)
    megafp8 lighthouse --bind HOST:29510 --min 2

Replicas connect with the same token. The lighthouse runs until it is stopped, and may be restarted at any time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from megafp8.host.arguments import ArgumentParser, between
from megafp8.host.messages import print_error

_MAX_REPLICAS = 1_000_000
_MAX_SECONDS = 1e9


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bind", default="0.0.0.0", metavar="HOST[:PORT]", help="address to listen on (%(default)s, port 29510)"
    )
    parser.add_argument(
        "--min",
        type=between(1, _MAX_REPLICAS),
        default=1,
        metavar="N",
        help="minimum number of replicas that train (%(default)s)",
    )
    parser.add_argument(
        "--join-seconds",
        type=between(0.0, _MAX_SECONDS),
        default=10.0,
        metavar="S",
        help="maximum wait for live replicas that have not asked for the next step (%(default)s)",
    )
    parser.add_argument(
        "--heartbeat-seconds",
        type=between(0.001, _MAX_SECONDS),
        default=5.0,
        metavar="S",
        help="time without a heartbeat after which a replica counts as lost (%(default)s)",
    )
    return parser


def main() -> int:
    """Run the command and return its exit code."""
    options = make_parser().parse_args()
    from megafp8.parallel.replicas import lighthouse  # needs torch

    try:
        bind = lighthouse.address_of(options.bind)
        token = lighthouse.token_of(os.environ)
        stop = lighthouse.start(bind, token, options.min, options.join_seconds, options.heartbeat_seconds)
    except ValueError as error:
        print_error(error)
        return 2
    print(f"lighthouse at {options.bind}, for {options.min} or more replicas", flush=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
