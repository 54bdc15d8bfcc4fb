"""Every page of the site as Markdown beside its HTML, and llms.txt, a list of these pages for language models.

This is a hook of MkDocs.  The form of llms.txt is that of https://llmstxt.org.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_texts: dict[str, tuple[str, str]] = {}
"""Path of each page to its title and its Markdown."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Keep the Markdown of a page, generated ones included."""
    title = markdown.lstrip().partition("\n")[0].removeprefix("# ").replace("`", "")
    _texts[page.file.src_uri] = title, markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    for path, (_, text) in _texts.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms(str(config.site_name), str(config.site_description)), encoding="utf-8")


def llms(name: str, description: str) -> str:
    """Return the list of pages by folder: title and path."""
    folders: dict[str, list[str]] = {}
    for path, (title, _) in _texts.items():
        folders.setdefault(path.rpartition("/")[0], []).append(f"- [{title}]({path})")
    lines = [f"# {name}", "", f"> {description}", "", "`vitlab skill` prints instructions for agents."]
    for folder, pages in folders.items():
        lines += ["", f"## {folder.rpartition('/')[2] or 'vitlab'}", "", *pages]
    return "\n".join(lines) + "\n"
