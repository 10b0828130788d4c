"""Small pieces of HTML for objects that show themselves in a notebook; no style sheet, no script, and greys only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CELL = "text-align:right;padding:1px 8px"
BAR = "display:inline-block;height:0.7em;background:#777"
BAR_WIDTH = 120  # pixels of a full bar


def card(title: str, *parts: str) -> str:
    """A title and what belongs to it, side by side."""
    beside = "".join(f'<div style="margin-right:2em">{part}</div>' for part in parts)
    return f'<div><div style="margin-bottom:4px">{escape(title)}</div><div style="display:flex;flex-wrap:wrap">{beside}</div></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a ``Bar`` becomes one, everything else is escaped text."""
    head = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Bar(float):
    """A share in [0, 1], drawn as a bar."""


def _cell(value: object) -> str:
    if isinstance(value, Bar):
        return f'<td style="padding:1px 8px"><span style="{BAR};width:{round(BAR_WIDTH * value)}px"></span></td>'
    return f'<td style="{CELL}">{escape(f"{value:.4g}" if isinstance(value, float) else str(value))}</td>'
