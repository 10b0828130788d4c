"""Find every dead link and anchor, as the repository shows its pages and in the built site:

python docs/check_links.py               # README.md, docs/ and notebooks/, as files
python docs/check_links.py build/site    # these, and the pages of the site
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from pydoc import locate
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(
    r"\]\(<?([^()\s<>]+(?:\([^()\s]*\)[^()\s<>]*)?)>?(?:\s+\"[^\"]*\")?\)"
    r"|(?:src|href)=\"([^\"]+)\"|^\[[^\]\n]+\]:\s*(\S+)",
    re.M,
)
RAW = re.compile(r"\]\[[\w.]+\]")  # [text][name], which only the site resolves
CODE = re.compile(r"<!--.*?-->|^```.*?^```|`[^`\n]*`", re.S | re.M)


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


def text_of(path: Path) -> str:
    """The prose of a page or of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page: of its headings as GitHub makes them, and the names that the API shows."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.S | re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in headings(text)]
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.M))


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*?)\s*$", text, re.M)


def in_api(anchor: str, anchors: set[str]) -> bool:
    """Whether a page has this anchor; of a page of the API, whether it shows the name, or the class
    or module that it is of, and the package has it.
    """
    if anchor in anchors:
        return True
    whole, _, name = anchor.rpartition(".")
    shown = any(anchor.startswith(f"{each}.") for each in anchors)
    return shown and (
        locate(anchor) is not None or name in getattr(locate(whole), "__annotations__", {})
    )


def dead_links_of_files(root: Path) -> list[str]:
    """Links of a repository's pages to files and anchors that are not there."""
    places = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *root.glob("notebooks/*.ipynb")]
    dead: list[str] = []
    for path in sorted(places):
        text = text_of(path)
        name = path.relative_to(root)
        dead += [f"{name}: {raw} is read by the site alone" for raw in RAW.findall(without(text))]
        for link in ("".join(found) for found in LINK.findall(without(text))):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = not target.exists()
            if parts.fragment and target.suffix in (".md", ".ipynb") and not missing:
                missing = not in_api(parts.fragment, anchors_of(target))
            if missing:
                dead.append(f"{name}: {link}")
    return dead


def without(text: str) -> str:
    """A text without its code and comments."""
    return CODE.sub("", text)


if __name__ == "__main__":
    found = dead_links_of_files(ROOT)
    if len(sys.argv) > 1:
        found += dead_links(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "no dead link")
    sys.exit(bool(found))
