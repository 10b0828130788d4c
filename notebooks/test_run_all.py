"""Runs every notebook to the end and prints wall time and processor time of each. Started by
``pytest notebooks``, not by ``pytest``.

``pytest notebooks --write`` keeps the outputs in the files, without times and machine names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

# Jupyter's own warnings; those of a notebook would be in its outputs
pytestmark = pytest.mark.filterwarnings("default")
HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(
    path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    notebook = nbformat.read(path, as_version=4)
    started, before = time.perf_counter(), kernels_time()
    # Sockets in files: of two kernels that start at once, one may take the other's port. Their
    # names must be short.
    with TemporaryDirectory() as sockets:
        manager = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            config=Config(KernelManager=manager),
            resources={"metadata": {"path": str(tmp_path)}},
        ).execute()
    seconds = time.perf_counter() - started
    with capsys.disabled():  # also where the test passes
        used = kernels_time() - before
        print(f"\n{path.name}: {seconds:.0f} s wall time, {used:.0f} s processor time")
    if request.config.getoption("--write"):
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            for output in list(cell.get("outputs", [])):
                # the widget is of a kernel that is gone; its HTML stays, a bar has none
                shown = output.get("data", {})
                if shown.pop(WIDGET, None) and "text/html" not in shown:
                    cell.outputs.remove(output)
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook.metadata = {"kernelspec": kernel}
        nbformat.write(notebook, path)


def kernels_time() -> float:
    """Seconds of CPU that kernels used which have ended."""
    used = os.times()
    return used.children_user + used.children_system
