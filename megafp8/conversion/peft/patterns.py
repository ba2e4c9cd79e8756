"""Match regular expressions from untrusted files, in time linear in the length of the text (RE2).

Python's `re` backtracks: the time of `(a+)+b` doubles with each additional `a` in the text. RE2 does not backtrack, and
therefore refuses back references and look-around. A pattern must also be valid in Python, for which it was written.
"""

from __future__ import annotations

import re
import warnings

from megafp8.host.shipped import install_command

_LONGEST = 1000
"""Maximum number of characters in a pattern or a name."""


def matches_end(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches a dotted name, or everything after one of its dots, as in PEFT.

    Raises:
        ValueError: The pattern is invalid, too long or not supported, or google-re2 is not installed.
    """
    try:
        import re2
    except ImportError:
        raise ValueError(f"patterns need google-re2, which is not installed: {install_command('hf')}") from None
    if max(len(pattern), len(name)) > _LONGEST:
        raise ValueError(f"a pattern or name of more than {_LONGEST} characters: {max(pattern, name, key=len)[:40]}...")
    whole, options = rf"(.*\.)?({pattern})$", re2.Options()
    options.log_errors = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns about sets and flags that RE2 interprets differently
            re.compile(whole)
        if re.search(r"\{,\d*\}", pattern):
            raise ValueError("RE2 reads {,n} as text; write {0,n}")
        return re2.match(whole, name, options=options) is not None
    except (re.error, re2.error, Warning, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"{pattern!r} cannot be matched: {error}") from None
