"""Docstrings as this project writes them, put into the form that mkdocstrings reads.

Args:
    ratio: share of the rows.          Args:
    seed: draws the rows.         ->       ratio: share of the rows.

Raises:
    ValueError: ratio is 0.                seed: draws the rows.
"""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import griffe

ITEM = re.compile(r"^[\w.]+: ")  # else a line goes on with the item above it
SECTION = re.compile(r"^(Args|Returns|Raises|Source):(?: +(\S.*))?$")


class HouseStyle(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = google(obj.docstring.value)


def google(text: str) -> str:
    """Sections as Google's style has them; a source is a paragraph; examples get a section of their
    own.
    """
    lines: list[str] = []
    section: list[str] | None = None  # lines of the section at hand, without their indent
    name = ""

    def close() -> None:
        nonlocal section
        if section is not None:
            lines.extend(["", *_section(name, section), ""])
            section = None

    for line in text.splitlines():
        if match := SECTION.match(line):
            close()
            name, section = match[1], [match[2]] if match[2] else []
        elif line.startswith(">>>") and (section is None or name != "Examples"):
            close()
            name, section = "Examples", [line]
        elif section is not None and name != "Examples" and (line.startswith(" ") or not line):
            section.append(line)
        else:
            if name != "Examples" or not line:
                close()
            (lines if section is None else section).append(line)
    close()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _section(name: str, body: list[str]) -> list[str]:
    while body and not body[-1]:
        body.pop()
    margin = min((len(line) - len(line.lstrip()) for line in body[1:] if line.strip()), default=0)
    if body and not body[0].startswith(" "):
        body = [body[0], *(line[margin:] for line in body[1:])]
    else:
        margin = min(len(line) - len(line.lstrip()) for line in body if line.strip())
        body = [line[margin:] for line in body]
    if name in ("Args", "Raises"):
        body = [line if ITEM.match(line) else f"    {line}" for line in body]
    text = "\n".join(body)
    if name == "Source":
        return [f"*Source:* {text}"]
    if name == "Returns":
        return [f"**Returns:** {text}"]
    return [f"{name}:", indent(text, "    ")]
