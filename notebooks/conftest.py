from __future__ import annotations

import faulthandler

import pytest

TIME_LIMIT = 3600  # seconds for a notebook


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="keep the outputs in the notebooks")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.timeout(TIME_LIMIT))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()  # the limit of the tests
