"""Rule-based splitting of text into sentences.

A sentence ends after . ! ? or …, including closing quotes and brackets, if white space and no lower-case letter follow.
It also ends after a full-width 。！？, and at a blank line. So "e.g. this" is not split, but "Dr. Smith" is. A wrong
split does little harm, because sentences only say where a pair may be divided. The rule needs no model, no download and
no language setting, and gives the same result on every machine. Megatron-LM's preprocessing uses nltk's punkt, which
downloads its models.
"""

from __future__ import annotations

import re

_END = re.compile(r"""(?<=[.!?…])["'”’)\]]*\s+(?![a-z\s])|(?<=[。！？])["'”’)\]」』]*|\n\s*\n\s*""")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text` that are not empty, without the white space between them."""
    ends = [match.end() for match in _END.finditer(text)]
    sentences = [text[start:end].strip() for start, end in zip([0, *ends], [*ends, len(text)])]
    return [sentence for sentence in sentences if sentence]
