"""Write the table of Hugging Face families in docs/huggingface.md: `python docs/site/families.py`."""

from __future__ import annotations

from pathlib import Path

from megafp8.conversion.huggingface import families
from megafp8.conversion.huggingface.config import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "huggingface.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
EXPERTS = {True: "yes", False: "no", None: "optional"}


def file_of(name: str) -> Path:
    """Return the file that holds the record of a family."""
    files = Path(families.__file__).parent.glob("*.py")
    return next(path for path in files if f'Family("{name}", ' in path.read_text())


def table() -> str:
    """Return the table in Markdown, with a row for each family."""
    rows = ["| `model_type` | models and options | experts | generates | file |", "|---|---|---|---|---|"]
    for name, family in sorted(FAMILIES.items()):
        generates = "yes" if family.kind == "gpt" else "no"
        rows.append(f"| `{name}` | {family.about} | {EXPERTS[family.moe]} | {generates} | `{file_of(name).name}` |")
    return "\n".join(rows) + "\n"


def page_with_table(page: str) -> str:
    """Return the text of the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
