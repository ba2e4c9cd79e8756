"""Write the verification card of a config: what commands have verified, with date and commit, and what they have not.

    megafp8 card llama3-8b
    megafp8 card my.yaml --out my.md                  # with my.certificate.json, which megafp8 prove wrote
    megafp8 card my.yaml --save evidence              # copies the certificates without the small config

The card is Markdown. It reads certificates of `megafp8 prove` and rows of `python -m benchmarks.records`. Certificates
that prove other values than the config has now are listed as outdated. docs/prove.md has more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megafp8.host.arguments import ArgumentParser
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("config", help="YAML file of a run, or the name of a shipped config")
    places = "for a shipped config docs/cards of a checkout or the current folder, otherwise the folder of the config"
    parser.add_argument("--evidence", type=Path, metavar="FOLDER", help=f"folder of the evidence; default: {places}")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--out", type=Path, help="file for the card; default: standard output")
    target.add_argument("--save", type=Path, metavar="FOLDER", help="copy the certificates here instead")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print or write the card, or copy its evidence."""
    from megafp8.prove.card import evidence_folder, markdown, read_card, save_evidence

    folder = arguments.evidence or evidence_folder(arguments.config)
    card = read_card(arguments.config, folder)
    if arguments.save is not None:
        print("\n".join(map(str, save_evidence(arguments.config, folder, arguments.save))))
    elif arguments.out is None:
        print(markdown(card), end="")
    else:
        arguments.out.write_text(markdown(card), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
