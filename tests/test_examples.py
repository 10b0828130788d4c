"""Every name on the API page has an example in its docstring, and every example runs, but for the call that starts a Ray cluster."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import tl_localize

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"
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


EXAMPLES = examples()
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


def test_every_public_name_is_on_the_api_page() -> None:
    assert {f"tl_localize.{name}" for name in tl_localize.__all__} - set(DOCUMENTED) == {"tl_localize.METHODS"}  # its entries are
