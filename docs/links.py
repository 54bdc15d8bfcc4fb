"""Check of the built site: every link inside it leads to a page, a file or a heading that exists.

This is a hook of MkDocs, whose own validation does not see the anchors of generated pages.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build when a link is dead.

    Raises:
        PluginError: with every dead link.
    """
    from mkdocs.exceptions import PluginError

    if dead := dead_links(Path(config.site_dir)):
        raise PluginError("dead links:\n" + "\n".join(f"  {page}: {link}" for page, link in dead))


def dead_links(site: Path) -> list[tuple[str, str]]:
    """Return the dead links of a built site, as page and address; links to other sites are not tried.

    Args:
        site: the folder the site was built into.
    """
    site = site.resolve()
    pages = {file: _Page(file) for file in sorted(site.rglob("*.html"))}
    dead = []
    for file, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            path = unquote(address.path)
            target = (site / path.lstrip("/") if path.startswith("/") else file.parent / path).resolve()
            target = file if not path else target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {address.fragment}
            if not target.exists() or (address.fragment and address.fragment not in anchors):
                dead.append((str(file.relative_to(site)), link))
    return dead


class _Page(HTMLParser):
    """Links of a page, and the anchors that links can lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and (href := values.get("href")):
            self.links.append(href)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
