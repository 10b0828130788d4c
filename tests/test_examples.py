"""Every public name has an example in its docstring, and every example runs."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import tl_localize
from tl_localize import plots

NOT_DOCUMENTED_BY_THEMSELVES = {"METHODS"}  # a dict: its entries are documented
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


EXAMPLES = examples()
FIGURES = [name for name, thing in inspect.getmembers(plots, inspect.isfunction) if thing.__module__ == plots.__name__ and name[0] != "_"]


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


@pytest.mark.parametrize("name", sorted(set(tl_localize.__all__) - NOT_DOCUMENTED_BY_THEMSELVES))
def test_public_name_has_docstring_and_example(name: str) -> None:
    assert ">>>" in (getattr(tl_localize, name).__doc__ or ""), f"{name} has no example"


@pytest.mark.parametrize("name", FIGURES)
def test_figure_has_an_example(name: str) -> None:
    assert f"tl_localize.plots.{name}" in EXAMPLES
