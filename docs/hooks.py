"""The notebooks, the changelog and a page for each command are part of the site without a second
copy in the repository; the home page opens on the explorer; formulas become drawings, which need
neither a script nor a font.
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.textpath import TextPath
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from tl_localize.cli import app
from tl_localize.cli.commands import default_text
from tl_localize.explorer import Explorer

ROOT = Path(__file__).resolve().parents[1]
ABOUT_EXPLORER = (
    "A small language model recites this text. First it is without the neurons that a method names "
    "for the text, then without equally many random ones. A token on a dark ground is forgotten, "
    "and the one that is predicted instead stands above it. Move the sliders."
)
# The picture that stands on the home page where no script runs, with the mark above it
PICTURE = re.compile(r"<!-- the explorer:.*?-->.*?</p>", re.DOTALL)
RATIOS = (0.02, 0.05, 0.1)  # shares of each layer that its slider offers
N_OTHERS = 8  # texts that should survive
# What pages link to outside of docs/, which is right in the repository: its place on the site
OUTSIDE = {"../notebooks/": "notebooks/", "../tl_localize/cli/commands.py": "commands/demo.md"}


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
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for name in app:
        if not name.startswith("-"):
            page = File.generated(config, f"commands/{name}.md", content=command_page(name))
            files.append(page)
    return files


def command_page(name: str) -> str:
    """What ``tl-localize NAME --help`` says."""
    command = app[name]
    options: list[str] = []
    arguments = ""
    for option in command.assemble_argument_collection():
        if option.children or not option.show:
            continue
        flags = " ".join(f"<code>{flag}</code>" for flag in option.names)
        arguments += "" if option.name.startswith("-") else f" {option.name}"
        default = default_text(option.field_info.default)
        shown = f"`{default}`" if option.show_default and default is not None else ""
        about = (option.parameter.help or "").replace("|", "\\|")
        options.append(f"| {flags} | {shown} | {about} |")
    usage = f"tl-localize {name} [OPTIONS]{arguments}"
    lines = [f"# tl-localize {name}", command.help, f"```text\n{usage}\n```"]
    if options:
        head = "| option | default | what it does |\n|---|---|---|"
        lines.append("\n".join([head, *options]))
    return "\n\n".join(lines)


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead to the pages that ``on_files`` makes."""
    for place, on_site in OUTSIDE.items():
        text = re.sub(rf"\]\(((?:\.\./)*?){re.escape(place)}", rf"](\1{on_site}", text)
    return text


def on_page_content(text: str, page: Any, config: Any, files: Files) -> str:
    """What a notebook links to as a file, which is right on GitHub, is a page of the site."""
    text = re.sub(r'href="(\w+)\.ipynb(["#])', r'href="\1.html\2', text)
    text = PICTURE.sub(lambda _: f"<p>{ABOUT_EXPLORER}</p>{explorer_of_the_demo().html()}", text)
    # a short name or command is not broken at its hyphens
    text = re.sub(r"<code>([^<]{1,32})</code>", r'<code class="short">\1</code>', text)
    text = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda found: drawn(html.unescape(found[1])),
        text,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>',
        lambda found: f'<p class="formula">{drawn(html.unescape(found[1]), "d")}</p>',
        text,
        flags=re.DOTALL,
    )


@cache
def explorer_of_the_demo() -> Explorer:
    """The explorer of the text of the demo, with all numbers in it, which are measured now."""
    from tl_localize import IterativeAttribution, example, explore, load_model
    from tl_localize.texts.reference import reference_sequences

    model = load_model("reference-gpt2", "cpu")
    sequence = example(model, "quotes-056")
    some = [text for text in reference_sequences(model) if text.id != sequence.id]
    others = some[:: len(some) // N_OTHERS][:N_OTHERS]
    return explore(model, sequence, IterativeAttribution()(model, sequence), others, ratios=RATIOS)


def drawn(latex: str, display: str = "") -> str:
    """A formula as SVG of the text's size and colour, by matplotlib's own fonts."""
    math = re.sub(r"\\[lr]Vert", r"\\Vert", latex).replace(r"\frac", rf"\{display}frac")
    limits = r"(?:_(?:\{[^}]*\}|\w))?(?:\^(?:\{[^}]*\}|\w))?"
    math = re.sub(rf"\\(?:sum|int){limits}", r"\\,\g<0>\\,", math)
    with rc_context({"mathtext.fontset": "stix"}):
        path = TextPath((0, 0), f"${' '.join(math.split())}$", size=100)
    steps: list[str] = []
    for points, code in path.iter_segments():
        letter = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}[int(code)]
        numbers = [] if letter == "Z" else points * ([1, -1] * (len(points) // 2))
        steps.append(letter + " ".join(f"{number:.1f}" for number in numbers))
    low, high = min(0.0, path.vertices[:, 1].min()), path.vertices[:, 1].max()
    left, right = path.vertices[:, 0].min() - 2, path.vertices[:, 0].max() + 2
    box = f"{left:.1f} {-high:.1f} {right - left:.1f} {high - low:.1f}"
    place = f"height:{(high - low) / 100:.3f}em;vertical-align:{low / 100:.3f}em"
    name = html.escape(latex.strip(), quote=True)
    about = f'role="img" aria-label="{name}" viewBox="{box}" style="{place}"'
    return f'<svg class="formula" {about}><path d="{"".join(steps)}"/></svg>'
