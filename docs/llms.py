"""Every page of the site as Markdown beside its HTML, and llms.txt, a list of these pages for language models.

This is a hook of MkDocs.  The form of llms.txt is that of https://llmstxt.org.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_texts: dict[str, tuple[str, str]] = {}
"""Path of each page to its title and its Markdown."""

HEADINGS = {"": "vitlab", "guides": "Guides", "coming": "Coming from", "reference": "Reference", "gallery": "Results"}
"""Folders in the order of the list, with their headings."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Keep the Markdown of a page, generated ones included; of a drawing, its caption."""
    title = markdown.lstrip().partition("\n")[0].removeprefix("# ").replace("`", "")
    text = re.sub(r"(?s)<figure>.*?<figcaption>(.*?)</figcaption></figure>", r"*Figure: \1*", markdown)
    _texts[page.file.src_uri] = title, text


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    for path, (_, text) in _texts.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms(str(config.site_name), str(config.site_description)), encoding="utf-8")


def llms(name: str, description: str) -> str:
    """Return the list of pages by folder: title, path and description."""
    lines = [f"# {name}", "", f"> {description}", "", "`vitlab skill` prints instructions for agents."]
    for folder, heading in HEADINGS.items():
        lines += ["", f"## {heading}", ""]
        for path, (title, text) in _texts.items():
            if path.rpartition("/")[0] == folder:
                lines.append(f"- [{title}]({path}): {describe(text)}")
    return "\n".join(lines) + "\n"


def describe(text: str) -> str:
    """Return the first sentence of a page, or the names of the components of a slot."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    prose = next(paragraph for paragraph in paragraphs if re.match(r"[\w*`]", paragraph))
    if prose.startswith("Contract:"):
        return ", ".join(re.findall(r"(?m)^## `(.+)`", text))
    return re.split(r"(?<=[.?])\**(?: |$)", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", prose))[0].strip("*").rstrip(":")
