"""What is committed of the notebooks: executed in order, to the end, small, of no particular
machine. ``pytest notebooks`` runs them.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 600_000  # of a notebook with its figures
PLACE = re.compile(
    r"/(home|root|tmp|Users|work|var|usr)/\w|https?://(?!arxiv\.org|github\.com|www\.w3\.org/2000/svg)"
)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def test_there_are_five_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_executed_from_top_to_bottom(path: Path) -> None:
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_outputs_are_small_and_without_errors_or_warnings(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    for cell in code_cells(path):
        assert all(
            output["output_type"] != "error" and output.get("name") != "stderr"
            for output in cell["outputs"]
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_names_no_machine(path: Path) -> None:
    texts = [json.dumps(cell["source"]) for cell in code_cells(path)]
    for cell in code_cells(path):
        for output in cell["outputs"]:
            shown = output.get("data", {})
            texts += [
                json.dumps(output.get("text", "")),
                json.dumps(shown.get("text/plain", "")),
                json.dumps(shown.get("text/html", "")),
            ]
    assert [match[0] for text in texts for match in PLACE.finditer(text)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_begins_with_one_collapsed_line_and_a_picture(path: Path) -> None:
    install = code_cells(path)[0]
    assert (
        len(install["source"]) == 1
        and install["metadata"]["jupyter"]["source_hidden"]
        and not install["outputs"]
    )
    with_output = next(cell for cell in code_cells(path) if cell["outputs"])
    assert {"image/png", "text/html"} & set(with_output["outputs"][-1]["data"])
    assert install == code_cells(NOTEBOOKS[0])[0]


@pytest.mark.parametrize(("missing", "asked"), [(1, ["show", "install"]), (0, ["show"])])
def test_first_line_installs_the_package_where_it_is_missing(
    missing: int, asked: list[str], tmp_path: Path
) -> None:
    line = "".join(code_cells(NOTEBOOKS[0])[0]["source"])
    assert line.startswith("!")
    pip = f'pip() {{ echo "$1" >> asked; case "$1" in show) return {missing};; esac; }}\n'
    subprocess.run(["sh", "-c", pip + line.removeprefix("!")], cwd=tmp_path, check=True)
    assert (tmp_path / "asked").read_text().split() == asked


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_tells_what_to_do_in_colab(path: Path) -> None:
    intro = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    assert "In Colab" in intro and "`!git clone ADDRESS /content/tl_localize`" in intro


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_says_more_than_it_shows(path: Path) -> None:
    """Prose after the last result: what was seen is said."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert (cells[0]["cell_type"], cells[-1]["cell_type"]) == ("markdown", "markdown")
    assert not any(
        "nan" in "".join(output.get("data", {}).get("text/plain", ""))
        for cell in code_cells(path)
        for output in cell["outputs"]
    )
