"""What the README, the site and the commands say of the same things."""

import json
import re
import runpy
from pathlib import Path

import pytest
from commands import invoke

from tl_localize import METHODS
from tl_localize.cli.commands import LocalizeOptions

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = json.loads((ROOT / "tl_localize/data/questions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_decision_table_is_that_of_its_source(page):
    expected = runpy.run_path(str(ROOT / "docs/questions.py"))["with_table"](page)
    assert (ROOT / page).read_text(encoding="utf-8") == expected, "run python docs/questions.py"


def test_command_prints_the_decision_table():
    shown = " ".join(invoke("methods").stdout.split())
    for question in QUESTIONS:
        assert all(" ".join(text.split()) in shown for text in question.values())


def test_localize_takes_the_method_that_says_what_a_text_needs():
    default = LocalizeOptions().method
    assert default == QUESTIONS[0]["method"]
    assert {question["method"] for question in QUESTIONS} <= set(METHODS)


def test_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 8 * 1024


def test_readme_says_in_a_shell_block_how_to_test():
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    assert any("pytest" in block for block in blocks)  # .ci/run takes its command from there


def test_titles_of_pages_differ():
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    titles = [re.search(r"^# (.*)", text, re.M)[1] for text in texts]
    assert len(set(titles)) == len(titles)
