"""Write the list of Hugging Face families in docs/huggingface.md: `python docs/site/families.py`."""

from __future__ import annotations

from pathlib import Path

from megafp8.conversion.huggingface import families
from megafp8.conversion.huggingface.config import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "huggingface.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"


def file_of(name: str) -> Path:
    """Return the file that holds the record of a family."""
    files = Path(families.__file__).parent.glob("*.py")
    return next(path for path in files if f'Family("{name}", ' in path.read_text())


def page_with_families(page: str) -> str:
    """Return the text of the page with the current list."""
    before, _, rest = page.partition(BEGIN)
    items = "\n".join(f"- `{name}`: {family.about}" for name, family in sorted(FAMILIES.items()))
    return f"{before}{BEGIN}\n{items}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_families(PAGE.read_text()))
