"""A page of HTML, one file to send to others: what it is of, and its parts, such as a text token by
token, tables and figures. It fetches nothing, and all that it is given is escaped.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, runtime_checkable

import pandas as pd

from tl_localize.report.saving import flat
from tl_localize.stats import html_table

STYLE = (
    "body{font-family:sans-serif;max-width:64em;margin:2em auto;padding:0 1em}"
    "dl{display:grid;grid-template-columns:max-content auto;gap:4px 16px}"
    "dd{margin:0;overflow-wrap:anywhere}"
    "section,figure{margin:2em 0;overflow-x:auto}"
    "img{max-width:100%}"
    "table.dataframe{border-collapse:collapse;border:0;margin-top:8px;font-size:90%}"
    ".dataframe td,.dataframe th{border:0;border-bottom:1px solid #ddd;padding:3px 10px;"
    "text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:break-word;"
    "max-width:36em}"
)


@runtime_checkable
class Shown(Protocol):
    """What a page can show, such as a ``TokenView``.

    >>> isinstance(PageTable(pd.DataFrame()), Shown)
    True
    """

    def html(self) -> str:
        """A part of a page."""
        ...


@dataclass(frozen=True, eq=False)
class PageTable:
    """A table of a page; the levels of its index become columns.

    >>> shown = PageTable(pd.DataFrame({"text": ["a < b"]}, index=["s0"]), "Texts").html()
    >>> "a &lt; b" in shown
    True
    """

    table: pd.DataFrame
    caption: str = ""

    def html(self) -> str:
        """The caption and the table."""
        whole = flat(self.table)
        return f"<section>{html_table(whole, self.caption)}</section>"


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure of a page.

    Args:
        png: The content of its file.

    >>> PageFigure(b"", "A curve").html().count("A curve")
    2
    """

    png: bytes
    caption: str

    def html(self) -> str:
        """The picture, which the page itself holds, and the caption below it."""
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        text = escape(self.caption)
        image = f'<img src="{source}" alt="{text}">'
        return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def page(parts: Sequence[Shown], title: str, about: Mapping[str, str]) -> str:
    """A whole HTML page, one file to send to others: what it is of, and its parts.

    Args:
        parts: Such as a ``TokenView``, a ``PageTable`` and a ``PageFigure``.
        about: What stands above them, by its name, such as the model and the method; what is empty
            is left out.

    >>> texts = PageTable(pd.DataFrame({"text": ["a"]}, index=["s0"]), "Texts")
    >>> "<dt>model</dt><dd>gpt2</dd>" in page([texts], "A title", {"model": "gpt2"})
    True
    """
    rows = [
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in about.items() if text
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "".join(part.html() for part in parts)
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>'
        f"<h1>{escape(title)}</h1><dl>{''.join(rows)}</dl>{body}</body></html>\n"
    )


def in_words(value: Any) -> str:
    """Settings, as JSON holds them, as a line of text.

    >>> in_words({"class": "Attribution", "units": {"class": "MLPNeurons"}, "contrast": 0.5})
    'Attribution(units=MLPNeurons(), contrast=0.5)'
    >>> in_words({"ratio": 0.05, "multiples": [1, 2]})
    'ratio=0.05, multiples=[1, 2]'
    """
    if isinstance(value, Mapping):
        named: Mapping[str, Any] = value
        parts = [f"{name}={in_words(part)}" for name, part in named.items() if name != "class"]
        listed = ", ".join(parts)
        return f"{named['class']}({listed})" if "class" in named else listed
    if isinstance(value, list | tuple):
        several: Sequence[Any] = value
        return f"[{', '.join(in_words(part) for part in several)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
