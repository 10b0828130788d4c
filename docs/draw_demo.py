"""Draws docs/figures/demo.svg, the picture of ``tl-localize demo``: python docs/draw_demo.py"""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from tl_localize.cli.one_text import show_demo

out = Console(file=StringIO(), record=True, force_terminal=True, width=110, highlight=False)
show_demo(out, "quotes-056")
picture = out.export_svg(title="tl-localize demo")
fonts_from_elsewhere = re.compile(r"@font-face {.*?}", re.DOTALL)
path = Path(__file__).parent / "figures" / "demo.svg"
path.write_text(fonts_from_elsewhere.sub("", picture), encoding="utf-8")
