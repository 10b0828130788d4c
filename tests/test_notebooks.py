"""What is committed of the notebooks: executed in order, to the end, small, of no particular
machine. ``pytest notebooks`` runs them.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 600_000  # of a notebook with its figures
PLACE = re.compile(
    r"/(home|root|tmp|Users|work|var|usr)/\w"
    r"|https?://(?!arxiv\.org|github\.com|www\.w3\.org/2000/svg)"
)


def cells_of(path, kind):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_five_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@EACH
def test_notebook_is_executed_from_top_to_bottom(path):
    counts = [cell["execution_count"] for cell in cells_of(path, "code")]
    assert counts == list(range(1, len(counts) + 1))


@EACH
def test_notebook_outputs_are_small_and_name_no_error_no_warning_and_no_machine(
    path,
):
    assert path.stat().st_size < MAX_BYTES
    for cell in cells_of(path, "code"):
        assert not PLACE.search(source(cell))
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            shown = output.get("data", {})
            plain = json.dumps(shown.get("text/plain", ""))
            assert "nan" not in plain
            texts = json.dumps([output.get("text", ""), shown.get("text/html", "")])
            assert not PLACE.search(plain + texts)


@EACH
def test_notebook_begins_with_one_collapsed_line_and_a_picture(path):
    install, *others = cells_of(path, "code")
    assert len(install["source"]) == 1 and not install["outputs"]
    assert install["metadata"]["jupyter"]["source_hidden"]
    with_output = next(cell for cell in others if cell["outputs"])
    assert {"image/png", "text/html"} & set(with_output["outputs"][-1]["data"])
    assert install == cells_of(NOTEBOOKS[0], "code")[0]


@pytest.mark.parametrize(("missing", "asked"), [(1, ["show", "install"]), (0, ["show"])])
def test_first_line_installs_the_package_where_it_is_missing(missing, asked, tmp_path):
    line = source(cells_of(NOTEBOOKS[0], "code")[0])
    assert line.startswith("!")
    pip = f'pip() {{ echo "$1" >> asked; case "$1" in show) return {missing};; esac; }}\n'
    subprocess.run(["sh", "-c", pip + line.removeprefix("!")], cwd=tmp_path, check=True)
    assert (tmp_path / "asked").read_text().split() == asked


@EACH
def test_notebook_begins_and_ends_with_prose_and_tells_what_to_do_in_colab(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert (cells[0]["cell_type"], cells[-1]["cell_type"]) == ("markdown", "markdown")
    intro = source(cells[0])
    assert "In Colab" in intro and "`!git clone ADDRESS /content/tl_localize`" in intro
