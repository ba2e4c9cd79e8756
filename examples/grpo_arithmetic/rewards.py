"""Rewards of answers to sums."""

from __future__ import annotations

from collections.abc import Sequence


def exact(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[int]) -> list[float]:
    """1 for the right number and nothing else, 0 for any other text."""
    return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]
