"""Small pieces of HTML for objects that show themselves in a notebook; no style sheet, no script, and greys only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CELL = "padding:1px 8px;text-align:"
BAR = "display:inline-block;height:0.7em;background:#777"
BAR_WIDTH = 120  # pixels of a full bar


def card(title: str, *parts: str) -> str:
    """A title and what belongs to it, side by side; lines of a table do not wrap."""
    beside = "".join(f'<div style="margin-right:2em;white-space:nowrap">{part}</div>' for part in parts)
    box = "display:flex;flex-wrap:wrap;overflow-x:auto"
    return f'<div><div style="margin-bottom:4px">{escape(title)}</div><div style="{box}">{beside}</div></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with text on the left and numbers on the right of their columns; a ``Bar`` becomes one, everything else is escaped text."""
    rows = list(rows)
    sides = [_side(value) for value in rows[0]] if rows else ["left"] * len(header)
    head = "".join(f'<th style="{CELL}{side}">{escape(name)}</th>' for name, side in zip(header, sides, strict=True))
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Bar(float):
    """A share in [0, 1], drawn as a bar."""


def _side(value: object) -> str:
    return "left" if isinstance(value, str | Bar) else "right"


def _cell(value: object) -> str:
    if isinstance(value, Bar):
        content = f'<span style="{BAR};width:{round(BAR_WIDTH * value)}px"></span>'
    else:
        content = escape(f"{value:.5g}" if isinstance(value, float) else str(value))
    return f'<td style="{CELL}{_side(value)}">{content}</td>'
