"""The notebooks are part of the site without a second copy in the repository; formulas become
MathML, which needs no script.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


@event_priority(100)  # before mkdocs-jupyter, which makes pages of them
def on_files(files: Files, config: Any) -> Files:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(
            File(
                f"notebooks/{path.name}",
                str(ROOT),
                config["site_dir"],
                config["use_directory_urls"],
            )
        )
    return files


def on_page_content(text: str, page: Any, config: Any, files: Files) -> str:
    """What a notebook links to as a file, which is right on GitHub, is a page of the site."""
    text = re.sub(r'href="(\w+)\.ipynb(["#])', r'href="\1.html\2', text)
    text = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda found: convert(html.unescape(found[1])),
        text,
        flags=re.DOTALL,
    )
    block = r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>'
    return re.sub(
        block,
        lambda found: f"<p>{convert(html.unescape(found[1]), display='block')}</p>",
        text,
        flags=re.DOTALL,
    )
