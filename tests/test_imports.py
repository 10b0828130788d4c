"""Imports only go down, rooms have no circles, files stay small, and importing the package stays
light.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tl_localize"
ROOMS = [  # from the top; a module imports from lines below its own, and from its own room
    ["cli", "__main__"],
    ["explorer"],
    ["report"],
    ["evals"],
    ["collect"],
    ["execution"],
    ["injection"],
    ["methods"],
    ["reference", "models", "readers"],
    ["units", "neurons", "sequences", "scores", "losses", "metrics", "stats", "batching"],
    ["forward"],
    ["files", "changes", "identity"],  # scores are saved, and neurons ablated for a while
]
RANKS = {name: rank for rank, names in enumerate(ROOMS) for name in names}
SHARED_IN_METHODS = ("base", "contrast", "masks", "partial_runs", "position_parallel")
MODULES = 17


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """Lines and names of the tl_localize modules that a file imports, anywhere in it, also by
    ``import_module("...")``.
    """
    return imports_in(path.read_text(encoding="utf-8"))


def imports_in(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ["relative import"]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = PACKAGE.parent / str(node.module).replace(".", "/") / f"{alias.name}.py"
                own = f"{node.module}.{alias.name}" if inside.is_file() else str(node.module)
                names += [own] if alias.name != "__version__" else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        found += [
            (node.lineno, name)
            for name in names
            if name.split(".")[0] in ("tl_localize", "relative import")
        ]
    return found


@pytest.mark.parametrize(
    ("first", "given", "found"),
    [("", None, "passive"), ("torch, ", None, "None"), ("", "active", "active")],
)
def test_waiting_threads_do_not_spin_where_torch_comes_later(first, given, found):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    code = f"import os, {first}tl_localize; print(os.environ.get('OMP_WAIT_POLICY'))"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert told.stdout.strip() == found, told.stderr


@pytest.mark.parametrize(
    "source",
    [
        "from tl_localize.report import figures",
        "import tl_localize.report.figures",
        "def later():\n    import_module('tl_localize.report.figures')",
        "importlib.import_module('tl_localize.report.figures').forgetting",
    ],
)
def test_every_way_to_import_is_seen(source):
    assert [name for _, name in imports_in(source)] == ["tl_localize.report.figures"]


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def name_of(path):
    """``tl_localize.evals`` for the room's ``__init__.py``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_only_go_down():
    wrong = []
    for path in modules():
        own = name_of(path).split(".")[1:]
        assert own[0] in RANKS, f"{own[0]} has no room: add it to ROOMS in {__file__}"
        for line, name in imported(path):
            target = name.split(".")[1:]
            if not target or target[0] not in RANKS:
                allowed = False
            elif target[0] == own[0]:  # of its own room, not through the room's door
                shared = own[0] != "methods" or len(own) == 1 or target[-1] in SHARED_IN_METHODS
                allowed = len(target) == 2 and shared
            else:
                allowed = RANKS[target[0]] > RANKS[own[0]] or (
                    len(own) == len(target) == 1 and RANKS[target[0]] == RANKS[own[0]]
                )
            if not allowed:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle():
    graph = {
        name_of(path): [(path, line, name) for line, name in imported(path)] for path in modules()
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


def test_root_has_few_modules():
    found = sorted(
        path.name
        for path in PACKAGE.glob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    assert len(found) <= MODULES, found


def test_modules_that_annotate_tensors_are_checked_at_run_time(pytestconfig):
    *checked, _ = pytestconfig.getoption("jaxtyping_packages").split(",")
    names = [
        name_of(path)
        for path in modules()
        if "from jaxtyping import" in path.read_text(encoding="utf-8")
    ]
    assert names
    assert [
        name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in checked)
    ] == []


def test_only_models_and_forward_import_transformer_lens():
    found = {
        path.name
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and ast.unparse(node).startswith(("import transformer_lens", "from transformer_lens"))
    }
    assert found <= {"models.py", "forward.py"}


def test_only_units_neurons_and_forward_spell_a_hook_name():
    found = {
        path.name
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.JoinedStr) and "blocks." in ast.unparse(node)
    }
    assert found <= {"units.py", "neurons.py", "forward.py"}


def fresh(code):
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return done.stdout


def test_import_pulls_in_nothing_large():
    large = "ray matplotlib datasets transformer_lens transformers typer IPython torch pandas"
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
from tl_localize.cli import app
app(["del", "--help"], standalone_mode=False)
assert "torch" not in sys.modules
"""
    assert "--ablation" in fresh(code)
