"""Hooks of mkdocs: pages that are no files of docs/, links as in the repository, Markdown as GitHub reads it."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

import cards  # noqa: E402
import reference  # noqa: E402

GENERATED = {
    "index.md": lambda: (ROOT / "README.md").read_text(encoding="utf-8"),
    "changelog.md": lambda: (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    "security.md": lambda: (ROOT / "SECURITY.md").read_text(encoding="utf-8"),
    "reference/config.md": reference.config,
    "reference/commands.md": reference.commands,
    "reference/python.md": reference.python,
    "stylesheets/site.css": lambda: (Path(__file__).parent / "site.css").read_text(encoding="utf-8"),
    **cards.GENERATED,
}
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Pages made of files outside docs/, whose links start there."""
OF_SOURCES = {
    "megafp8/config/schema.py": "reference/config.md",
    "megafp8/__init__.py": "reference/python.md",
    "docs/cards": cards.OVERVIEW,
    **{f"configs/{name}.yaml": page for name, page in cards.PAGES.items()},
}
"""Pages that links to sources lead to, where the source is what there is in the repository."""
HISTORY = ("measurements/", "decisions/", "LOG.md", "changelog.md")
"""Pages that a search lists after pages for users."""
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")
_BLOCK = re.compile(r"(- |\d+\. |\|)")


def slug(text: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", text).lower()).replace(" ", separator)


def repository() -> str | None:
    """The web page of the repository that this checkout was cloned from, if it was cloned through HTTPS or SSH."""
    git = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    url = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip().removesuffix(".git")
    ssh = re.fullmatch(r"(?:ssh://)?git@([\w.-]+)[:/](.+)", url)
    return f"https://{ssh[1]}/{ssh[2]}" if ssh else url if url.startswith("https://") and "@" not in url else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set GitHub's anchors and the repository's link, and fill the sections of the navigation that list a folder."""
    config.mdx_configs["toc"]["slugify"] = slug
    config.repo_url = repository()
    docs = ROOT / "docs"
    lists = {
        "Measurements": [
            docs / "measurements" / "README.md",
            *sorted(docs.glob("measurements/*/README.md"), reverse=True),
        ],
        "Decisions": [docs / "decisions" / "README.md", *sorted(docs.glob("decisions/0*.md"))],
    }
    for entry in config.nav or []:
        for name in lists.keys() & entry.keys():
            entry[name] = [path.relative_to(docs).as_posix() for path in lists[name]]
        if "Cards" in entry:
            entry["Cards"] = [cards.OVERVIEW, *cards.PAGES.values()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, make in GENERATED.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    if path.startswith(HISTORY):
        page.meta["search"] = {"boost": 0.1}
    source = FROM_ROOT.get(path, f"docs/{path}")
    return _outside_code(markdown, lambda text: _with_links(_blocks_apart(text), source, path, files))


def _outside_code(markdown: str, change: Any) -> str:
    """`change` applied to what is not in fenced blocks."""
    parts = re.split(r"(^```.*?^```[^\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _blocks_apart(text: str) -> str:
    """An empty line before each list and table that follows a paragraph, which GitHub does not need."""
    lines: list[str] = []
    for line in text.split("\n"):
        start, before = _BLOCK.match(line), lines[-1] if lines else ""
        if start and before.strip() and not _BLOCK.match(before) and not before.startswith("  "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _with_links(text: str, source: str, path: str, files: Files) -> str:
    """Links from the page `path`, whose source is the repository's file `source`, as links between pages of the site.

    Files that are not part of the site are named by their text alone.
    """

    def replaced(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        url = urlsplit(target)
        if url.scheme or not url.path:
            return link[0]
        where = posixpath.normpath(posixpath.join(posixpath.dirname(source), url.path))
        if not (ROOT / where).exists():
            return link[0]  # mkdocs reports it
        pages = OF_SOURCES | {source: page for page, source in FROM_ROOT.items()}
        page = pages.get(where, where.removeprefix("docs/"))
        if files.get_file_from_path(page) is None:
            return label
        anchor = f"#{url.fragment}" if url.fragment else ""
        return f"{mark}[{label}]({posixpath.relpath(page, posixpath.dirname(path) or '.')}{anchor})"

    return _LINK.sub(replaced, text)
