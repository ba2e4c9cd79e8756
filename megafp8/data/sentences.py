"""Splits text into sentences by a plain rule.

A sentence ends after . ! ? or … (or their full-width forms), with quotes and brackets that close it, where white space
and no small letter follow; and at a blank line. So "e.g. this" is not split, and "Dr. Smith" is. A wrong split costs
little: sentences only say where a pair may be divided. The rule needs no model, no download and no language, and is the
same on every machine; nltk's punkt, which Megatron-LM's preprocessing uses, reads its models from the network.
"""

from __future__ import annotations

import re

_END = re.compile(r"""(?<=[.!?…])["'”’)\]]*\s+(?![a-z\s])|(?<=[。！？])["'”’)\]」』]*|\n\s*\n\s*""")


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, without the white space between them, none of them empty."""
    ends = [match.end() for match in _END.finditer(text)]
    pieces = [text[start:end].strip() for start, end in zip([0, *ends], [*ends, len(text)])]
    return [piece for piece in pieces if piece]
