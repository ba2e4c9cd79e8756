"""Write the table of Hugging Face families in docs/huggingface.md: `python docs/site/families.py`."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from megafp8.config import load_config, with_keys
from megafp8.conversion.huggingface import families
from megafp8.conversion.huggingface.config import FAMILIES, choose
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import HfPlace
from megafp8.host.shipped import shipped_configs

PAGE = Path(__file__).resolve().parent.parent / "huggingface.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"


def file_of(name: str) -> Path:
    """Return the file that holds the record of a family."""
    files = Path(families.__file__).parent.glob("*.py")
    return next(path for path in files if f'Family("{name}", ' in path.read_text())


def page_with_families(page: str) -> str:
    """Return the text of the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}"


def table() -> str:
    """Return the table of all families."""
    configs = configs_of_families()
    rows = ["| family (card) | models | generates | FP8 folder |", "|---|---|:-:|:-:|"]
    for name, family in sorted(FAMILIES.items()):
        links = ", ".join(f"[{config}](../configs/{config}.yaml)" for config in configs[name])
        cells = (f"`{name}` ({links})" if links else f"`{name}`", family.about, generates(family), fp8_folder(family))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def configs_of_families() -> dict[str, list[str]]:
    """Return the shipped configs whose models are exported as a family, by its name."""
    names = defaultdict[str, list[str]](list)
    for name, path in shipped_configs().items():
        with suppress(ValueError):  # the model comes from a folder, or has no family
            config = load_config(path)
            names[choose(with_keys(config.spec, max_position_embeddings=config.position_rows)).model_type].append(name)
    return names


def generates(family: Family) -> str:
    """Return a mark if models of the family continue a text."""
    return "✓" if family.kind == "gpt" else ""


def fp8_folder(family: Family) -> str:
    """Return a mark if the family's models can be exported in FP8: each tensor of a linear layer holds one matrix."""
    places = [x for x in (family.names.places | family.names.ungated).values() if isinstance(x, HfPlace)]
    if any(place.transposed for place in places) or (family.moe and any(place.stacked for place in places)):
        return ""
    return "without experts" if any(place.stacked for place in places) else "✓"


if __name__ == "__main__":
    PAGE.write_text(page_with_families(PAGE.read_text()))
