"""Examples of docstrings, which stand at their end, get a section of their own on the site."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if not obj.docstring:
            return
        text, mark, example = obj.docstring.value.partition("\n>>> ")
        if mark:
            text += "\n\nExamples:\n" + indent(">>> " + example, "    ")
        if obj.is_class:  # of a method: what a call of it returns
            text = re.sub(r"^Returns:\n +", "**Returns:** ", text, flags=re.MULTILINE)
        obj.docstring.value = text
