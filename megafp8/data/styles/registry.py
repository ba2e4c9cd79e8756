"""Registry of the styles in this folder, by name."""

from __future__ import annotations

from megafp8.data import styles
from megafp8.data.styles import Style
from megafp8.host.registry import records_of

STYLES: dict[str, Style] = {style.name: style for style in records_of(styles, "STYLE")}
