"""What the tests of all commands share."""

import pytest


@pytest.fixture(autouse=True)
def whole_runs(unchecked):
    """They are all of whole runs."""


@pytest.fixture
def undrawn(monkeypatch):
    """Figures cost a second each; one test in test_cli_del.py looks at them."""
    from tl_localize.cli.publish import REPORTS

    for benchmark, (results, tables, _) in REPORTS.items():
        monkeypatch.setitem(REPORTS, benchmark, (results, tables, lambda results: {}))
