"""Every name on the API page has an example in its docstring, and every example runs, but for the call that starts a Ray cluster."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import tl_localize

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api.md"
PARSER = doctest.DocTestParser()


def examples() -> dict[str, doctest.DocTest]:
    """The examples of all functions and classes of the package, by their full name."""
    found: dict[str, doctest.DocTest] = {}
    for module in pkgutil.walk_packages(tl_localize.__path__, "tl_localize."):
        if module.name.endswith("__main__"):
            continue
        for name, thing in vars(importlib.import_module(module.name)).items():
            doc = getattr(thing, "__doc__", None) if getattr(thing, "__module__", None) == module.name else None
            if isinstance(doc, str) and ">>>" in doc:
                found[f"{module.name}.{name}"] = PARSER.get_doctest(doc, {}, name, module.name, 0)
    return found


def documented() -> dict[str, Any]:
    """Every name on the API page; of a module, its public functions and classes."""
    found: dict[str, Any] = {}
    for name in re.findall(r"^::: (\S+)", API.read_text(encoding="utf-8"), re.MULTILINE):
        thing = pkgutil.resolve_name(name)
        if inspect.ismodule(thing):
            own = {key: value for key, value in vars(thing).items() if getattr(value, "__module__", None) == name and key[0] != "_"}
            found |= {f"{name}.{key}": value for key, value in own.items() if inspect.isfunction(value) or inspect.isclass(value)}
        else:
            found[name] = thing
    return found


def own() -> set[str]:
    """Names of all functions and classes of the package but for the commands."""
    modules = [m.name for m in pkgutil.walk_packages(tl_localize.__path__, "tl_localize.") if not m.name.startswith("tl_localize.cli")]
    things = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    things = [value for value in things if inspect.isfunction(value) or inspect.isclass(value)]
    return {value.__name__ for value in things if value.__module__.startswith("tl_localize")}


EXAMPLES = examples()
OWN = own()
DOCUMENTED = documented()


@pytest.fixture(scope="module", autouse=True)
def one_model() -> Any:
    """Examples load the reference model, as a reader would; here it is loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl_localize, "load_model", functools.cache(tl_localize.load_model))
        yield


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(EXAMPLES[name], out=report.append)
    assert runner.tries and not runner.failures, "".join(report)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_name_on_the_api_page_has_an_example(name: str) -> None:
    thing = DOCUMENTED[name]
    assert f"{thing.__module__}.{thing.__qualname__}" in EXAMPLES, f"{name} has no example"


# What the page must hold


def imported(source: str) -> set[str]:
    """Full names that Python source imports from the package."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes if (node.module or "").startswith("tl_localize") for alias in node.names}


def sources() -> tuple[dict[str, str], dict[str, str]]:
    """By place: prose that users read, and code."""
    prose = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    code = {name: "\n".join(re.findall(r"^```python$(.*?)^```$", text, re.DOTALL | re.MULTILINE)) for name, text in prose.items()}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose[path.name], code[path.name] = (
            "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind) for kind in ("markdown", "code")
        )
        code[path.name] = re.sub(r"^( *)%.*", r"\1pass", code[path.name], flags=re.MULTILINE)
    for name, thing in DOCUMENTED.items():
        members = vars(thing).items() if inspect.isclass(thing) else ()
        docs = [thing.__doc__, *(value.__doc__ for key, value in members if key[0] != "_")]
        prose[name] = "\n".join(doc for doc in docs if doc)
    return prose, code


PROSE, CODE = sources()


def full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def test_every_public_name_is_on_the_api_page() -> None:
    import tl_localize.runs

    things = [getattr(module, name) for module in (tl_localize, tl_localize.runs) for name in module.__all__ if name != "METHODS"]
    assert {full_name(thing) for thing in things} - {full_name(thing) for thing in DOCUMENTED.values()} == set()


@pytest.mark.parametrize("place", CODE)
def test_what_users_are_told_to_import_is_on_the_api_page(place: str) -> None:
    things = [pkgutil.resolve_name(name) for name in sorted(imported(CODE[place])) if name != "tl_localize.METHODS"]
    assert {full_name(thing) for thing in things} - {full_name(thing) for thing in DOCUMENTED.values()} == set()


@pytest.mark.parametrize("place", PROSE)
def test_what_users_are_sent_to_is_on_the_api_page(place: str) -> None:
    """A class or function in backticks, unless it is a plain word, which may mean something else."""
    known = {name.rpartition(".")[2] for name in DOCUMENTED}
    named = set(re.findall(r"`(?:[a-z_]+\.)*([a-z]+_\w+|[A-Z]\w+)(?:\([^`]*\))?`", PROSE[place]))
    assert sorted(named & OWN - known) == []
