"""Shell-style patterns over names of layers and tensors, and what to say where one matches nothing.

A pattern that matches nothing is a mistake nobody would see: the run trains, in another precision than was meant. So it
is an error, with the nearest names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence


def no_match(field: str, pattern: str, names: Sequence[str], kind: str = "layer") -> str:
    """The message: no name of that kind matches `pattern` in `field`."""
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    if not nearest:
        return f"FP8 {field} pattern {pattern!r} matches no {kind}: the model has no linear layers"
    example = re.sub(r"(?<=\.)\d+(?=\.)", "*", nearest[0])
    return (
        f"FP8 {field} pattern {pattern!r} matches no {kind}; the nearest names are {', '.join(nearest)}, and "
        f"{example!r} would work"
    )
