"""What the tests of all commands share."""

import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Figures cost a second each; one test in test_cli_del.py looks at them."""
    for benchmark in ("inj", "del", "rev"):
        monkeypatch.setattr(f"tl_localize.cli.reports.{benchmark}_figures", lambda results: {})
