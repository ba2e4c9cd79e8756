"""Pages of the verification cards of shipped configs, from the evidence in docs/cards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megafp8.host.shipped import shipped_configs
from megafp8.prove.card import markdown, read_card

EVIDENCE = Path(__file__).resolve().parent.parent / "cards"
FOLDER = "cards"
OVERVIEW = f"{FOLDER}/index.md"
PAGES = {name: f"{FOLDER}/{name}.md" for name in shipped_configs()}


def overview() -> str:
    """Return the page with a table of all configs and their claims."""
    cards = [read_card(name, EVIDENCE) for name in PAGES]
    topics = [claim.topic for claim in cards[0].claims]
    lines = [
        "# What is verified", "",
        "Each config has a card with its evidence: results, dates, commits and commands. Empty cells have no evidence.",
        "`megafp8 card` writes the card of [your config](../prove.md).", "",
        f"| config | {' | '.join(topics)} | rows |", "|---" * (len(topics) + 2) + "|",
    ]  # fmt: skip
    for card in cards:
        cells = [
            "yes" if x.status == "verified" else "" if x.status == "not verified" else x.status for x in card.claims
        ]
        lines.append(f"| [{card.name}]({card.name}.md) | {' | '.join(cells)} | {len(card.rows) or ''} |")
    return "\n".join(lines) + "\n"


def page(name: str) -> str:
    """Return the page of a shipped config."""
    return markdown(read_card(name, EVIDENCE))


GENERATED = {OVERVIEW: overview, **{path: partial(page, name) for name, path in PAGES.items()}}
