"""Find every dead link and anchor of the built site: python docs/check_links.py build/site"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Anchors of a page, and what it links to within the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (
                name in ("href", "src")
                and value
                and not urlsplit(value).scheme
                and not value.startswith("//")
            ):
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    dead: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            base = site if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                target in pages and anchor and anchor not in pages[target].anchors
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


if __name__ == "__main__":
    found = dead_links(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "no dead link")
    sys.exit(bool(found))
