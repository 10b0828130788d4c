"""Imports only go down, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tl_localize"
ROOMS = {
    0: ["files", "html", "neurons"],
    1: ["sequences", "scores", "models", "memory", "optim"],
    2: ["side_by_side", "losses", "readers", "stats", "store", "paper"],
    3: ["metrics", "methods", "injection", "dropout", "joint"],
    4: ["collect", "evals"],
    5: ["runs", "tune", "tables", "plots", "token_view", "reference_corpus", "reference"],
    6: ["distributed"],
    7: ["cli", "__main__"],
}
RANKS = {name: rank for rank, names in ROOMS.items() for name in names}
SHARED_IN_METHODS = ("base", "gates", "one_pass")


def imported(path: Path) -> list[tuple[int, str]]:
    """Lines and names of the tl_localize modules that a file imports, anywhere in it."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module.split(".")[0] == "tl_localize":
            if node.module == "tl_localize":
                found += [(node.lineno, f"tl_localize.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "relative import"))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "tl_localize"]
    return found


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    assert parts[0] in RANKS, f"{parts[0]} has no room: add it to ROOMS in {__file__}"
    wrong = []
    for line, name in imported(path):
        target = name.split(".")[1:]
        same_folder = len(parts) > 1 and target[:1] == [parts[0]]
        if name == "tl_localize.__version__":
            continue
        if same_folder:
            allowed = target[-1] in SHARED_IN_METHODS if parts[0] == "methods" else parts[1] != target[-1]
        else:
            allowed = bool(target) and target[0] in RANKS and RANKS[target[0]] < RANKS[parts[0]]
        if not allowed:
            wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_models_names_hooked_transformer(path: Path) -> None:
    names = [
        f"{path}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and ast.unparse(node).startswith(("import transformer_lens", "from transformer_lens"))
    ]
    assert not names or path.name == "models.py", names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_neurons_spells_a_hook_name(path: Path) -> None:
    spelled = [
        f"{path}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr) and "blocks." in ast.unparse(node)
    ]
    assert not spelled or path.name == "neurons.py", spelled


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Modules of a fresh process after ``import tl_localize``."""
    code = "import sys, tl_localize; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout.split())


@pytest.mark.parametrize("name", ["ray", "matplotlib", "datasets", "transformer_lens", "transformers", "typer", "IPython"])
def test_import_pulls_in_no(loaded: set[str], name: str) -> None:
    assert name not in loaded


def test_every_public_name_is_there() -> None:
    import tl_localize

    assert [name for name in tl_localize.__all__ if not hasattr(tl_localize, name)] == []


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
