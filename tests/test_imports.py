"""Imports only go down, rooms have no circles, and importing the package stays light."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tl_localize"
# From the top; a module imports from rooms below its own, and from its own room.
ROOMS = [
    ["cli", "__main__"],
    ["explorer"],
    ["evals"],
    ["erasure"],
    ["report"],
    ["collect"],
    ["execution"],
    ["injection"],
    ["paper"],
    ["methods"],
    ["texts"],
    ["metrics"],
    ["scores"],
    ["sequences"],
    ["model"],
    ["units"],
    ["checks", "drawing", "files", "stats"],
]
RANKS = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
# What several methods take from their room; a method's own file imports no other method's.
SHARED_IN_METHODS = (
    "base",
    "concrete",
    "contrast",
    "general_text",
    "masks",
    "partial_runs",
    "position_parallel",
    "unlearned_masks",
)
BENCHMARKS = ("inj", "deletion", "rev")  # folders of evals, of which none imports another


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_in(source):
    """Lines and names of the tl_localize modules that a file imports, anywhere in it, also by
    ``import_module("...")``.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ["relative import"]
        elif isinstance(node, ast.ImportFrom):
            names = [module_of(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            names = [given.value for given in node.args if isinstance(given, ast.Constant)]
        for name in names:
            if name.split(".")[0] in ("tl_localize", "relative import"):
                found.append((node.lineno, name))
    return found


def module_of(module, name):
    """The module that ``from module import name`` reaches."""
    inside = PACKAGE.parent / module.replace(".", "/") / name
    is_module = inside.with_suffix(".py").is_file() or inside.is_dir()
    return f"{module}.{name}" if is_module else module


@pytest.mark.parametrize(
    ("first", "given", "found"),
    [
        ("pass", None, "passive"),
        ("sys.modules['torch'] = os", None, "None"),  # as if it were imported
        ("pass", "active", "active"),
    ],
)
def test_waiting_threads_do_not_spin_where_torch_comes_later(first, given, found):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    code = f"import os, sys; {first}; import tl_localize; print(os.environ.get('OMP_WAIT_POLICY'))"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert told.stdout.strip() == found, told.stderr


@pytest.mark.parametrize(
    "source",
    [
        "from tl_localize.report import looks",
        "import tl_localize.report.looks",
        "def later():\n    import_module('tl_localize.report.looks')",
        "importlib.import_module('tl_localize.report.looks').looks",
    ],
)
def test_every_way_to_import_is_seen(source):
    assert [name for _, name in imports_in(source)] == ["tl_localize.report.looks"]


@cache
def modules():
    """The files of the package, and their imports."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    return {path: imports_in(path.read_text(encoding="utf-8")) for path in files}


def name_of(path):
    """``tl_localize.evals`` for the room's ``__init__.py``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def may_import(own, target):
    """Whether a module of the package may import another one; both without ``tl_localize``."""
    own, target = own.split("."), target.split(".")
    if target[0] not in RANKS:
        return False
    if target[0] != own[0]:
        return RANKS[target[0]] > RANKS[own[0]] or (
            len(ROOMS[RANKS[own[0]]]) > 1 and (RANKS[target[0]] == RANKS[own[0]])
        )
    if len(target) == 1:
        return False  # of its own room, through the room's door
    if own[0] == "methods" and len(own) > 1:
        return target[1] in SHARED_IN_METHODS
    if own[0] == "evals" and len(own) > 1 and own[1] in BENCHMARKS:
        return target[1] == own[1] or target[1] not in BENCHMARKS
    return True


@pytest.mark.parametrize(
    ("own", "target", "allowed"),
    [
        ("evals.shared", "execution.store", True),
        ("evals.shared", "evals.ablation", True),
        ("evals.tuning", "evals.inj.results", True),
        ("evals.inj.benchmark", "evals.inj.results", True),
        ("evals.inj.benchmark", "evals.rev.results", False),
        ("execution.store", "evals.shared", False),
        ("evals.shared", "evals", False),
        ("methods.slimming", "methods.masks", True),
        ("methods.slimming", "methods.zero_out", False),
        ("methods", "methods.zero_out", True),
        ("files", "checks", True),
        ("checks", "units", False),
        ("units", "something_new", False),
    ],
)
def test_rules_of_imports_are_these(own, target, allowed):
    assert may_import(own, target) == allowed


def test_imports_only_go_down():
    wrong = []
    for path, imports in modules().items():
        own = name_of(path).removeprefix("tl_localize.")
        assert own.split(".")[0] in RANKS, f"{own} has no room: add it to ROOMS in {__file__}"
        for line, name in imports:
            is_version = name == "tl_localize" and own.startswith("cli")
            if not is_version and not may_import(own, name.removeprefix("tl_localize.")):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle():
    graph = {
        name_of(path): [(path, *found) for found in imports] for path, imports in modules().items()
    }
    done = set()

    def visit(module, above):
        for path, line, name in graph.get(module, []):
            assert name not in [*above, module], (
                f"{path}:{line} imports {name}, which imports it: "
                f"{' -> '.join([*above, module, name])}"
            )
            if name not in done:
                visit(name, [*above, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def test_only_the_room_of_the_model_imports_transformer_lens():
    found = {
        path
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and ast.unparse(node).startswith(("import transformer_lens", "from transformer_lens"))
    }
    assert found and {path.parent.name for path in found} == {"model"}


def test_only_units_and_the_room_of_the_model_spell_hook_names():
    found = {
        path
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.JoinedStr) and "blocks." in ast.unparse(node)
    }
    assert found
    assert [p for p in found if p.parent.name != "model" and p != PACKAGE / "units.py"] == []


def fresh(code):
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return done.stdout


def test_import_pulls_in_nothing_large():
    large = "ray matplotlib datasets transformer_lens transformers cyclopts IPython torch pandas"
    loaded = fresh("import sys, tl_localize; print(' '.join(sys.modules))")
    assert not set(large.split()) & set(loaded.split())


def test_every_public_name_is_there_and_is_completed():
    import tl_localize

    assert [name for name in tl_localize.__all__ if not hasattr(tl_localize, name)] == []
    assert {"load_model", "explore", "HardConcrete"} <= set(dir(tl_localize))


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_help_of_the_command_line_needs_no_torch():
    code = """
import sys
from tl_localize.cli import main
main(["del", "--help"])
assert not {"torch", "pandas", "transformer_lens"} & set(sys.modules)
"""
    assert "--ablation" in fresh(code)
