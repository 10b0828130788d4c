"""Write the three questions into README.md and docs/methods.md: python docs/questions.py

Its one source is tl_localize/data/questions.json; `tl-localize methods` prints the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = json.loads((ROOT / "tl_localize/data/questions.json").read_text(encoding="utf-8"))
WHOLE = list(QUESTIONS[0])
# README shows what holds on a pretrained model: of REV nothing does (docs/results/paper-texts.md)
SHIPPED_ONLY = "activation_contrast"
# file -> the columns that it shows, what it leaves out, and the page that a method's name leads to
PLACES = {
    "README.md": (["you want to", "method", "its test"], SHIPPED_ONLY, "docs/methods.md"),
    "docs/methods.md": (WHOLE[:-2], "", ""),
}


def table(columns: list[str], left_out: str, page: str) -> str:
    """The rows of Markdown, the best method with a link to its section."""
    lines = [columns, ["---"] * len(columns)]
    for question in QUESTIONS:
        name = question["method"]
        if name == left_out:
            continue
        title = name.title().replace("_", "")
        link = f"[{title}]({page}#{name.replace('_', '-')})"
        lines.append([(question | {"method": link})[column] for column in columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(name: str) -> str:
    """A file's text with the table as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    block = f"<!-- docs/questions.py -->\n\n{table(*PLACES[name])}\n\n<!-- end -->"
    place = re.compile(r"<!-- docs/questions.py -->.*?<!-- end -->", re.S)
    found, n = place.subn(lambda _: block, text)
    if n != 1:
        raise ValueError(f"{name} must have one place for the table of the questions, got {n}.")
    return found


if __name__ == "__main__":
    for name in PLACES:
        (ROOT / name).write_text(with_table(name), encoding="utf-8")
