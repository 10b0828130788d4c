"""Every name on the API page has an example in its docstring, and every example runs, but for the
call that starts a Ray cluster.

An example has these names ready: those of the package and of its own module, ``torch``, ``np``,
``pd``, ``Path``, a ``model``, one ``sequence`` that it recites, a ``few`` of them, general ``text``
[1 pos], results of small benchmarks (``inj_results``, ``del_results``, ``single_layers``,
``rev_results``), and an empty ``folder``. docs/api/index.md has their code.
"""

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import tl_localize
from tl_localize import (
    Activations,
    Attribution,
    DelBenchmark,
    InjBenchmark,
    Recipe,
    RevBenchmark,
)

ROOT = Path(__file__).resolve().parents[1]
API = "".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md"))
)
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(tl_localize.__path__, "tl_localize.")
]


def defined(module):
    """Functions and classes that are written in a module, by name."""
    things = {
        name: thing
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) or inspect.isclass(thing)
    }
    return {name: thing for name, thing in things.items() if thing.__module__ == module.__name__}


def documented():
    """Every name on the pages of the API; of a module, its public functions and classes, of a
    package those of its ``__all__``.
    """
    found = {}
    for name in re.findall(r"^::: (\S+)", API, re.MULTILINE):
        thing = pkgutil.resolve_name(name)
        names = (
            getattr(thing, "__all__", None) or [key for key in defined(thing) if key[0] != "_"]
            if inspect.ismodule(thing)
            else []
        )
        found |= {f"{name}.{key}": getattr(thing, key) for key in names} if names else {name: thing}
    return {name: thing for name, thing in found.items() if callable(thing)}


def full_name(thing):
    return f"{thing.__module__}.{thing.__qualname__}"


WRITTEN = {
    full_name(thing): (module, thing) for module in MODULES for thing in defined(module).values()
}
EXAMPLES = [name for name, (_, thing) in WRITTEN.items() if ">>>" in (thing.__doc__ or "")]
DOCUMENTED = documented()


@pytest.fixture(scope="session")
def ready():
    from tl_localize.texts.reference import held_out_tokens, reference_sequences

    model = tl_localize.load_model("reference")
    # shorter than they are, for the sake of time
    windows = [
        replace(sequence, tokens=sequence.tokens[:48])
        for sequence in reference_sequences(model)[:3]
    ]
    few = [replace(each, tokens=each.tokens[:24], n_prefix=16) for each in windows]
    short = [replace(each, tokens=each.tokens[:10], n_prefix=6) for each in windows]
    general = held_out_tokens()[:1, :48]
    names = {name: getattr(tl_localize, name) for name in tl_localize.__all__} | {
        "torch": torch,
        "np": np,
        "pd": pd,
        "Path": Path,
    }
    return names | {
        "model": model,
        "sequence": few[0],
        "few": few,
        "text": general[:, :24],
        "longer": {"few": windows, "text": general},  # for the search of a corpus
        "shorter": {"few": short},  # for trainings
    }


@pytest.fixture(scope="session")
def inj_results(ready):
    two = InjBenchmark(ready["model"], ready["few"][:2], ratio=0.02, distractors=1)
    return two.run([Activations()], progress=False)


@pytest.fixture(scope="session")
def small(make_model, make_sequences):
    """A model, two texts and general text for results of DEL and REV, of which the examples show no
    number that depends on the model.
    """
    model = make_model(1, n_layers=6, model_name="reference-gpt2")
    both = zip(make_sequences((9, 3), (9, 3)), "ab", strict=True)
    pair = [replace(sequence, category=category) for sequence, category in both]
    return {"model": model, "few": pair, "text": torch.arange(9)[None]}


@pytest.fixture(scope="session")
def two_texts(small):
    how = {"ratios": (0.05,), "n_dev": 0}
    return DelBenchmark(small["model"], small["few"], small["text"], **how)


@pytest.fixture(scope="session")
def del_results(two_texts):
    return two_texts.run([Attribution()], progress=False)


@pytest.fixture(scope="session")
def single_layers(two_texts):
    each = replace(two_texts, layers="each", multiples=(1,))
    return each.run([Attribution()], progress=False).single_layers


@pytest.fixture(scope="session")
def rev_results(small):
    one = {"n_sequences": 1, "ratios": (0.1,), "recipe": Recipe(max_steps=2, stop_loss=9.0)}
    benchmark = RevBenchmark(small["model"], small["few"][:1], small["text"], **one)
    return benchmark.run([Activations()], progress=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, ready, tmp_path, request, monkeypatch):
    # for the sake of time
    if name == full_name(tl_localize.texts.known.known):
        request.getfixturevalue("few_planted")
    monkeypatch.setattr(tl_localize.explorer, "CARDS", 2)
    module, thing = WRITTEN[name]
    names = vars(module) | ready | {"folder": tmp_path}
    if name.startswith(("tl_localize.collect.", "tl_localize.texts.readers.")):
        names |= ready["longer"]
    if name.startswith("tl_localize.injection."):
        names |= ready["shorter"]
    test = doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, 0)
    code = "".join(example.source for example in test.examples)
    for results in ("inj_results", "del_results", "single_layers", "rev_results"):
        if results in code:
            test.globs[results] = request.getfixturevalue(results)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append)
    assert runner.tries and not runner.failures, "".join(report)


def test_names_on_the_api_pages_have_an_example():
    assert [name for name, thing in DOCUMENTED.items() if full_name(thing) not in EXAMPLES] == []


# What the page must hold


def imported(source):
    """Full names that Python source imports from the package."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {
        f"{node.module}.{alias.name}"
        for node in nodes
        if (node.module or "").startswith("tl_localize")
        for alias in node.names
    }


def sources():
    """By place: prose that users read, and code."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "api").glob("*.md"),
    ]
    prose = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages}
    code = {
        name: "\n".join(re.findall(r"^```python$(.*?)^```$", text, re.DOTALL | re.MULTILINE))
        for name, text in prose.items()
    }
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose[path.name], code[path.name] = (
            "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)
            for kind in ("markdown", "code")
        )
        code[path.name] = re.sub(r"^( *)[%!].*", r"\1pass", code[path.name], flags=re.MULTILINE)
    for name, thing in DOCUMENTED.items():
        members = vars(thing).items() if inspect.isclass(thing) else ()
        docs = [thing.__doc__, *(value.__doc__ for key, value in members if key[0] != "_")]
        prose[name] = "\n".join(doc for doc in docs if doc)
    return prose, code


PROSE, CODE = sources()


ON_THE_PAGES = {full_name(thing) for thing in DOCUMENTED.values()}


def test_every_public_name_is_on_the_api_pages():
    rooms = [tl_localize, *(module for module in MODULES if hasattr(module, "__all__"))]
    rooms = [room for room in rooms if room.__name__ != "tl_localize.cli"]  # commands have pages
    things = [getattr(room, name) for room in rooms for name in room.__all__]
    assert {full_name(thing) for thing in things if callable(thing)} <= ON_THE_PAGES


def test_what_users_are_told_to_import_is_on_the_api_pages():
    names = set().union(*map(imported, CODE.values())) - {"tl_localize.METHODS"}
    assert {full_name(pkgutil.resolve_name(name)) for name in names} <= ON_THE_PAGES


def test_what_users_are_sent_to_is_on_the_api_pages():
    """A class or function in backticks, unless it is a plain word with another meaning."""
    known = {name.rpartition(".")[2] for name in DOCUMENTED}
    own = {name.rpartition(".")[2] for name in WRITTEN if not name.startswith("tl_localize.cli")}
    for place, text in PROSE.items():
        named = set(re.findall(r"`(?:[a-z_]+\.)*([a-z]+_\w+|[A-Z]\w+)(?:\([^`]*\))?`", text))
        assert sorted(named & own - known) == [], place
