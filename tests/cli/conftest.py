"""What the tests of all commands share."""

import pytest


@pytest.fixture(scope="session")
def loaded_models():
    """What ``load_once`` has loaded."""
    return {}


@pytest.fixture(autouse=True)
def load_once(monkeypatch, model_dir, loaded_models):
    """Commands of one session share the shipped models and that of ``model_dir``, which they leave
    as they were.
    """
    import tl_localize
    from tl_localize.model import loading

    load = tl_localize.load_model  # found by its name now, or the package would keep what follows

    def load_first_time(name, *how):
        if name not in (str(model_dir), *loading.REFERENCE_MODELS):
            return load(name, *how)
        key = name, *how
        if key not in loaded_models:
            loaded_models[key] = load(name, *how)
        return loaded_models[key]

    monkeypatch.setattr(loading, "load_model", load_first_time)


@pytest.fixture(autouse=True)
def little_text_for_perplexity(monkeypatch, few_docstrings):
    """A row instead of eight: ``localize`` measures it again for every set that it looks at."""
    monkeypatch.setattr("tl_localize.cli.one_text.N_GENERAL", 1)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures cost a second each; one test in test_cli_del.py looks at them."""
    for benchmark in ("inj", "del", "rev"):
        monkeypatch.setattr(f"tl_localize.cli.reports.{benchmark}_figures", lambda results: {})
