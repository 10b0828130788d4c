"""Keeps what README.md and docs/ show true.

    python docs/shown.py            # runs every block, writes what each prints and every picture
    python docs/shown.py --check    # runs them too, and names what differs from what is shown
    python docs/shown.py --check docs/elsewhere.md    # one page alone

Blocks of ``python`` and ``bash`` are run in the order of their page: Python in one namespace, and
both in one empty folder. A comment directly before a block says what a reader need not see:

    <!-- run first: CODE -->             CODE runs before the block, in its language
    <!-- run as: OLD => NEW -->          OLD is replaced before it runs; one replacement a line
    <!-- not run: REASON -->             the block is not run; its tl-localize lines are parsed
    <!-- run with: MODULE -->            the block runs where this module is installed, as in the
                                         weekly CI; elsewhere it is only parsed
    <!-- run cells: COLUMN -->           before a table: the code of this column is run as Python

A block of ``text`` is what the block before it prints. It is written by this script. Numbers of a
run may depend on the processor, so a comment before it may allow a difference:

    <!-- printed: integers +- 2, decimals +- 0.05: REASON -->

The output of a block that is not run, as it was seen once, has this comment:

    <!-- seen: WHERE -->
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drawn import figures

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110  # columns to which long lines of an output are folded; a picture of a terminal has them
RUN_LANGUAGES = ("python", "bash")
COMMENT = r"<!--(?:(?!-->).)*-->"
BLOCK = re.compile(
    rf"(?P<comments>(?:^{COMMENT}\n+)*)"
    r"(?:^```(?P<language>\w*)\n(?P<code>.*?)^```$|(?P<table>(?:^\|[^\n]*\n)+))",
    re.M | re.S,
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)")
CHANGED_TOKEN = re.compile(r"\[([^\[\]|]*)\|([^\[\]|]*)\]")  # of a token view: [true|predicted]


@dataclass(frozen=True)
class Tolerance:
    """How far a printed number may lie from the shown one."""

    integers: float = 0
    decimals: float = 0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    comments: dict[str, str] = field(default_factory=dict)
    span: tuple[int, int] = (0, 0)  # of its code in the page

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        if self.language not in RUN_LANGUAGES or "not run" in self.comments:
            return False
        module = self.comments.get("run with")
        return module is None or find_spec(module) is not None

    def code_to_run(self) -> str:
        code = self.code
        for line in self.comments.get("run as", "").strip().splitlines():
            old, new = (part.strip() for part in line.split("=>"))
            if old not in code:
                raise ValueError(f"{self.place}: 'run as' must name text of the block, got {old!r}")
            code = code.replace(old, new)
        return textwrap.dedent(self.comments.get("run first", "")) + "\n" + code

    def tolerance(self) -> Tolerance:
        printed = self.comments.get("printed", "")
        given = re.match(r"integers \+- (\d+)(?:, decimals \+- ([\d.]+))?: \S", printed)
        return Tolerance(float(given[1]), float(given[2] or 0)) if given else Tolerance()


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        comments = {}
        for comment in re.findall(COMMENT, match["comments"], re.S):
            name, _, value = comment[4:-3].strip().partition(":")
            comments[name] = value.strip()
        language, code, start = match["language"], match["code"], match.start("code")
        if match["table"]:
            if "run cells" not in comments:
                continue
            start = match.start("table")
            language, code = "python", cells_of(match["table"], comments["run cells"])
        line = text.count("\n", 0, start) + 1
        found.append(Block(page, line, language, code, comments, match.span("code")))
    return found


def cells_of(table: str, column: str) -> str:
    """The code of a column of a table of Markdown, one line for each cell; what is made one by one
    is made to its end.
    """
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    place = rows[0].index(column)
    cells = [code for row in rows for code in re.findall("`(.*?)`", row[place])]
    return "".join(f"cell = {cell}\nif hasattr(cell, '__next__'): list(cell)\n" for cell in cells)


# What is wrong without running anything


def commands_in(text: str) -> list[str]:
    """The ``tl-localize`` lines of a shell block, those that go on after a backslash as one."""
    joined = text.replace("\\\n", " ")
    return re.findall(r"(?:^|&& )(tl-localize .*)", joined, re.M)


@contextlib.contextmanager
def empty_folder() -> Iterator[str]:
    """The current folder for a while, and then gone."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(here)


def parse_command(line: str) -> str | None:
    """What the command line itself says is wrong with a ``tl-localize`` line; None if nothing.

    Files that it names need not exist.
    """
    from cyclopts import CycloptsError

    from tl_localize.cli import app

    words = shlex.split(line, comments=True)[1:]
    with empty_folder():
        for word in words[1:]:
            if not word.startswith(("-", "/")):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            return str(error)
    return None


def complaints_of(page: Path) -> list[str]:
    """What can be said without running: unknown rules, and commands that do not parse."""
    complaints = []
    previous = None
    for block in blocks_of(page):
        if block.language not in (*RUN_LANGUAGES, "text", "bibtex"):
            complaints.append(f"{block.place}: language must be one of {RUN_LANGUAGES} or text")
        is_output = previous is not None and (previous.runs or "seen" in block.comments)
        if block.language == "text" and not is_output:
            complaints.append(f"{block.place}: text must follow the block that prints it")
        unknown = set(block.comments) - {
            *("run first", "run as", "run with", "run cells", "not run", "printed", "seen")
        }
        known_elsewhere = {
            name for name in unknown if name.startswith(("docs/", "end", "table", "printed by"))
        }
        complaints += [f"{block.place}: no rule {name!r}" for name in unknown - known_elsewhere]
        if block.comments.get("not run") == "":
            complaints.append(f"{block.place}: 'not run' must give a reason")
        if block.language == "python":
            ast.parse(block.code)
        if block.language == "bash":
            for line in commands_in(block.code):
                if wrong := parse_command(line):
                    complaints.append(f"{block.place}: {line}: {wrong}")
        previous = block
    return complaints


# Runs


def run_python(code: str, names: dict[str, Any]) -> str:
    """What a block prints; its names stay for the next block. Who reads the source of what runs, as
    nnsight does, finds it.
    """
    out = io.StringIO()
    linecache.cache["<shown>"] = (len(code), None, code.splitlines(keepends=True), "<shown>")
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<shown>", "exec"), names)
    return out.getvalue()


def run_bash(code: str, folder: str) -> str:
    environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def run_page(page: Path) -> tuple[dict[int, str], list[str]]:
    """Runs the blocks of a page: what each printed, by its place in the list, and what failed."""
    import torch

    blocks = blocks_of(page)
    printed: dict[int, str] = {}
    failed: list[str] = []
    names: dict[str, Any] = {"__name__": __name__}
    threads = torch.get_num_threads()
    with empty_folder() as folder:
        for index, block in enumerate(blocks):
            if not block.runs:
                continue
            try:
                code = block.code_to_run()
                if block.language == "python":
                    printed[index] = run_python(code, names)
                else:
                    printed[index] = run_bash(code, folder)
            except Exception as error:
                failed.append(f"{block.place}: {type(error).__name__}: {error}")
    torch.set_num_threads(threads)
    return printed, failed


# Comparison


def difference(found: str, shown: str, tolerance: Tolerance) -> str | None:
    """How a printed text differs from the shown one; None if it does not.

    Spaces and line ends do not count. Of a token view the true text must be the same; which tokens
    were forgotten is compared by their number, which stands below the view.
    """
    if tolerance != Tolerance():
        found, shown = CHANGED_TOKEN.sub(r"\1", found), CHANGED_TOKEN.sub(r"\1", shown)
    if "".join(NUMBER.sub("#", found).split()) != "".join(NUMBER.sub("#", shown).split()):
        return "other words"
    for new, old in zip(NUMBER.findall(found), NUMBER.findall(shown), strict=True):
        integer = new.lstrip("-").isdecimal() and old.lstrip("-").isdecimal()
        allowed = tolerance.integers if integer else tolerance.decimals
        if abs(float(new) - float(old)) > allowed:
            return f"{new} in place of {old}"
    return None


def folded(text: str) -> str:
    """Lines of at most ``WIDTH`` columns, broken at spaces."""
    lines = [
        textwrap.wrap(line, WIDTH, break_long_words=False) or [""] for line in text.splitlines()
    ]
    return "\n".join(part.rstrip() for line in lines for part in line).strip("\n") + "\n"


def check_page(page: Path, write: bool) -> list[str]:
    """Runs a page. What failed, and what differs; where it is to be written, it is no complaint."""
    blocks = blocks_of(page)
    if not any(block.runs for block in blocks):
        return []
    printed, complaints = run_page(page)
    text = page.read_text(encoding="utf-8")
    for index in reversed(range(1, len(blocks))):  # from the end: places before stay as they are
        block = blocks[index]
        if block.language != "text" or index - 1 not in printed:
            continue
        found = printed[index - 1]
        differs = difference(found, block.code, block.tolerance())
        if write and (differs or folded(found) != block.code):
            start, end = block.span
            text = text[:start] + folded(found) + text[end:]
        elif differs:
            complaints.append(f"{block.place}: {differs}. It prints:\n{found}")
    if write:
        page.write_text(text, encoding="utf-8")
    return complaints


# Pictures: redrawn, and compared by the numbers and words in them

# Why these are not drawn here
DRAWN_ELSEWHERE = {
    "docs/figures/badge-licence.svg": "drawn by hand, three words",
    "docs/figures/badge-python.svg": "drawn by hand, three words",
    "docs/figures/badge-transformerlens.svg": "drawn by hand, three words",
}
# Committed outputs of notebooks, which `pytest notebooks` runs: the notebook, and how its cell ends
FROM_NOTEBOOKS = {
    "docs/figures/target_against_distractors.png": (
        "03_inj_benchmark",
        "target_against_distractors(together)",
    ),
    "docs/figures/recall_curve.png": ("05_your_own_method", "recall_curve(results)"),
    "docs/figures/forgetting.png": ("04_del_benchmark", "forgetting(results)"),
    "docs/figures/confusion.png": ("04_del_benchmark", "confusion(results, 0.15)"),
}
EXPLORER = "docs/figures/explorer.png"
EXPLORER_TOLERANCE = Tolerance(integers=5, decimals=5)  # as of the demo, and points of accuracy
DEMO = "docs/figures/demo.svg"
DEMO_TOLERANCE = Tolerance(integers=5)  # two of 48 tokens, in percent


def demo_picture() -> str:
    """What ``tl-localize demo`` prints in a terminal, as SVG."""
    from rich.console import Console

    from tl_localize.cli.one_text import show_demo

    out = Console(
        file=io.StringIO(), record=True, force_terminal=True, width=WIDTH, highlight=False
    )
    show_demo(out, "quotes-056")
    fonts_from_elsewhere = re.compile(r"@font-face {.*?}", re.DOTALL)
    return fonts_from_elsewhere.sub("", out.export_svg(title="tl-localize demo"))


def text_of_svg(picture: str) -> str:
    from html import unescape

    return unescape("\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture))).replace(
        "\xa0", " "
    )


def notebook_picture(notebook: str, ending: str) -> bytes:
    """The picture below the last cell of a notebook that ends so."""
    from base64 import b64decode

    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in reversed(cells):
        if "".join(cell["source"]).rstrip().endswith(ending):
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    return b64decode(output["data"]["image/png"])
    raise ValueError(f"{path.name} must have a picture below a cell that ends with {ending!r}")


def data_of(figure: Any) -> str:
    """What a figure of matplotlib shows, as JSON: its words, and the numbers of lines and bars."""
    figure.draw_without_rendering()  # names the ticks
    shown: list[Any] = [text.get_text() for legend in figure.legends for text in legend.texts]
    for panel in figure.axes:
        lines = [
            [line.get_label(), line.get_xydata().round(4).tolist()] for line in panel.get_lines()
        ]
        bars = [
            [part.round(4).tolist() for part in bar.get_segments()] for bar in panel.collections
        ]
        words = [panel.get_title(), panel.get_xlabel(), panel.get_ylabel()]
        words += [text.get_text() for text in panel.texts]
        for axis in (panel.xaxis, panel.yaxis):
            words += [label.get_text() for label in axis.get_ticklabels()]
        if legend := panel.get_legend():
            words += [text.get_text() for text in legend.texts]
        shown.append({"words": words, "lines": lines, "errors": bars})
    return json.dumps(shown)


def data_in(path: Path) -> str:
    """The numbers that a picture was drawn from, which it holds itself."""
    from PIL import Image

    with Image.open(path) as picture:
        return str(picture.info.get("Data", ""))


def check_pictures(write: bool) -> list[str]:
    """What pictures do not show what they should; where they are to be written, none."""
    complaints: list[str] = []
    for name, source in FROM_NOTEBOOKS.items():
        path = ROOT / name
        picture = notebook_picture(*source)
        if write:
            path.write_bytes(picture)
        elif not path.exists() or path.read_bytes() != picture:
            complaints.append(f"{name}: must be the picture of notebooks/{source[0]}.ipynb")
    for name, draw in figures().items():
        path = ROOT / name
        figure = draw()
        data = data_of(figure)
        if write:
            figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Data": data})
        elif differs := difference(data, data_in(path), Tolerance(0, 1e-3)):
            complaints.append(f"{name}: {differs}")
    return complaints


def check_demo(write: bool) -> list[str]:
    path = ROOT / DEMO
    picture = demo_picture()
    if write:
        path.write_text(picture, encoding="utf-8")
        return []
    shown = text_of_svg(path.read_text(encoding="utf-8"))
    differs = difference(text_of_svg(picture), shown, DEMO_TOLERANCE)
    return [f"{DEMO}: {differs}"] if differs else []


def screenshot_of_explorer() -> tuple[bytes, str] | None:
    """The explorer of the demo's text in a browser, as PNG, and the words and numbers of the page
    but for tokens and neurons; None where there is no browser.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if not chromium or not find_spec("playwright"):
        return None
    from hooks import explorer_of_the_demo

    sync_playwright = import_module("playwright.sync_api").sync_playwright  # not in every CI
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page_file = Path(folder) / "explorer.html"
        explorer_of_the_demo().save(page_file)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".tlx-tokens svg")
        picture = page.screenshot(full_page=True)
        page.evaluate(
            "document.querySelectorAll('.tlx-tokens, .tlx-chip').forEach(part => part.remove())"
        )
        words = page.inner_text("body")
        browser.close()
    return picture, words


def check_explorer(write: bool) -> list[str]:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    shown = screenshot_of_explorer()
    if shown is None:
        print(f"{EXPLORER}: not looked at, as there is no playwright or no Chromium")
        return []
    picture, words = shown
    if write:
        data = PngInfo()
        data.add_itxt("Data", words)
        Image.open(io.BytesIO(picture)).quantize().save(
            ROOT / EXPLORER, pnginfo=data, optimize=True
        )
        return []
    differs = difference(words, data_in(ROOT / EXPLORER), EXPLORER_TOLERANCE)
    return [f"{EXPLORER}: {differs}"] if differs else []


def stray_pictures() -> list[str]:
    """Pictures of docs/ that nothing draws, or that no page shows."""
    drawn = {*DRAWN_ELSEWHERE, *FROM_NOTEBOOKS, *figures(), DEMO, EXPLORER}
    prose = "".join(page.read_text(encoding="utf-8") for page in pages())
    stray = []
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".png", ".svg", ".gif", ".jpg"):
            continue
        if name not in drawn:
            stray.append(f"{name}: nothing draws it")
        if f"{path.parent.name}/{path.name}" not in prose:
            stray.append(f"{name}: no page shows it")
    return stray


def main(arguments: list[str]) -> int:
    import time

    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    write = "--check" not in arguments
    given = [ROOT / name for name in arguments if not name.startswith("-")]
    complaints: list[str] = []
    if not given:
        complaints += [*stray_pictures(), *check_pictures(write), *check_demo(write)]
        complaints += check_explorer(write)
    for page in given or pages():
        started = time.perf_counter()
        complaints += complaints_of(page)
        complaints += check_page(page, write)
        print(f"{page.relative_to(ROOT)}: {time.perf_counter() - started:.0f} s", flush=True)
    print("\n".join(complaints) or "everything is as it is shown")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
