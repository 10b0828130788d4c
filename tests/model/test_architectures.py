"""docs/architectures.md: what it says of each architecture is what comes out here."""

from importlib.metadata import version
from pathlib import Path

import pytest
from architectures import CONFIGS, row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
# the versions of the page; others adapt other architectures (with transformers 5.24 not CodeGen)
NEWEST = version("transformer-lens").startswith("4.3")
OF_PAGE = NEWEST and version("transformers").startswith("5.23")
TRIED = CONFIGS if NEWEST else ("GPT-NeoX (Pythia)", "Gemma 2")  # of others two, for their numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_architecture_is_as_documented(tmp_path, name):
    made = row(name, tmp_path)
    if OF_PAGE:
        assert made in PAGE.read_text(encoding="utf-8").splitlines()


def test_every_line_of_the_page_is_tested():
    lines = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    assert {line.split("|")[1].strip() for line in lines} - {"Architecture"} == set(CONFIGS)
