"""Names the numbers of results that were typed into README.md and docs/.

    python docs/typed_numbers.py

A result stands on a page where docs/tables.py wrote it from a committed frame, or where a code
block shows it. A table that a benchmark printed, of which no frame is kept, says so in a comment:

    <!-- printed by: COMMAND; MACHINE -->

All else that looks like a result is named: a percent that is not a share of each layer, points, p,
an error, a time, memory, nats, how many times faster, a decimal number of two digits or more before
its point, and a decimal number alone in the cell of a table. ALLOWED has the few that are none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Pages that may hold numbers that were seen once: they are dated, and say so on their first lines
NOTEBOOK = "docs/notebook/"
WRITTEN = (
    re.compile(r"<!-- (?:table: [\w-]+|docs/questions\.py) -->\n.*?<!-- end -->", re.S),
    re.compile(r"^```.*?^```", re.S | re.M),
    re.compile(
        r"^<!-- printed by: (?:pytest|python) benchmarks/[^;]+; [^>]+ -->\n+(?:\|.*\n)+", re.M
    ),
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\$[^$]*\$"),
    re.compile(r"\]\([^)\s]*\)|<img[^>]*>"),
    re.compile(r"95 % (?:bootstrap )?intervals?"),
)
NUMBER = r"(?<![\w.,:/@-])[-+]?(?:\d[\d,]*(?:\.\d+)?-)?\d[\d,]*(?:\.\d+)?"
SHARE = r"\sof\s(?:each|every|a)\slayer"
UNIT = (
    rf"(?:%(?!{SHARE})|x\b(?! \d)|(?:points?|nats|times)\b"
    r"|(?:s|ms|min|h|seconds?|minutes?|hours?|KiB|MiB|GiB|GB|percent)\b)"
)
RESULT = re.compile(
    rf"±|\bp\s*[<>=]\s*\.?\d|{NUMBER}\s*{UNIT}"
    r"|(?<![\w.:/-])[-+]?\d{2,}\.\d+(?!\w|\.\d)|\btau\s(?:is|of)\s[-+]?\d"
    rf"|{NUMBER}\sof\s(?:the\s)?\d+\s(?:tokens|texts|rows|sentences|models|targets)\b"
    r"|(?<=\|)\s*(?:[-+]?\d+\.\d+|[-+]\d+)\s*(?=[|/])"
)
PRICE = "the price at which methods are compared"
SETTING = "a setting or a default of the code"
ALLOWED = {  # page -> words -> why they are no result
    "docs/benchmarks.md": {
        "below 0.05 nats": SETTING,
        "-5 points, with a bootstrap error": PRICE,
        "own where the others have lost 5 points": PRICE,
        "0.01 is 1 %": "what a unit is",
    },
    "docs/differences.md": {
        "20 points from 0 to 1": SETTING,
        "0.05 at 0.1 %, 0.01 at 1 %": "published, as the column says",
        "up to 2 %": SETTING,
        "at most 0.1 nats": SETTING,
        "such as the top 1 %": SETTING,
    },
    "docs/glossary.md": {
        "0.01 is 1 %": "what a unit is",
        "from 90 % to 85 % are 5 points": "what a unit is",
        "-40 means that 40 of 100 tokens": "what a unit is",
    },
    "docs/methods.md": {"takes 20 points and both ends": SETTING},
    "docs/own-model.md": {"0.5 GB and 0.25 GB": "of the parameters"},
    "docs/reproduce.md": {
        **dict.fromkeys(
            ("3.3 GB", "6.5 GB", "5.5 GB", "11.1 GB", "13.7 GB", "27.4 GB"), "of the parameters"
        ),
        "24 GB | 40 GB | 80 GB": "of the cards",
    },
    "docs/results/gemma.md": {"on 7 of the 17 targets": "how a setting was chosen"},
    "docs/results.md": {
        "others have lost 3 or 5 points": PRICE,
        "other sentences have lost 5 points": PRICE,
    },
    "docs/results/third.md": {"more than 64 times": "how the model was made"},
    "docs/speed.md": {"by 2 points (its memory by all)": "how it was measured"},
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def typed_numbers(page: Path) -> list[str]:
    """What looks like a typed result on a page, and what ALLOWED has for it and it lacks."""
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text(encoding="utf-8")
    allowed = ALLOWED.get(name, {})
    missing = [
        f"{name}: ALLOWED has {words!r}, which is not there"
        for words in allowed
        if words not in text
    ]
    missing += [
        f"{name}: {script} printed a table and is not there"
        for script in re.findall(r"<!-- printed by: \w+ (\S+?)[ ;]", text)
        if not (ROOT / script).exists()
    ]
    for words in allowed:
        text = text.replace(words, "")
    for place in WRITTEN:
        text = place.sub(lambda found: "\n" * found[0].count("\n"), text)
    return missing + [
        f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())}"
        for found in RESULT.finditer(text)
    ]


def complaints() -> list[str]:
    return [
        line
        for page in pages()
        if NOTEBOOK not in page.relative_to(ROOT).as_posix()
        for line in typed_numbers(page)
    ]


if __name__ == "__main__":
    found = complaints()
    print("\n".join(found) or "no result was typed")
    sys.exit(bool(found))
