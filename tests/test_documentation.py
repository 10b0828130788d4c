"""What the README, the site and the commands say of the same things."""

import importlib
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import invoke

from tl_localize import METHODS
from tl_localize.cli.command_options import LocalizeOptions

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


def script(name, monkeypatch):
    """A script of docs/, as a module."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module(name)


def test_each_shown_block_is_run_or_says_why_not(monkeypatch):
    shown = script("shown", monkeypatch)
    assert [wrong for page in shown.pages() for wrong in shown.complaints_of(page)] == []


def test_a_changed_number_and_an_unknown_table_are_named(monkeypatch, tmp_path):
    tables = script("tables", monkeypatch)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "TABLES", {"mine": lambda: "| 1.5 |"})
    file = tmp_path / "del.csv"
    file.write_text("1.6", encoding="utf-8")
    monkeypatch.setattr(tables, "stored_files", lambda model: {file: "1.5"})
    page = tmp_path / "README.md"
    marked = "<!-- table: {} -->\n\n| {} |\n\n<!-- end -->\n"
    page.write_text(marked.format("mine", "1.6"), encoding="utf-8")
    assert tables.complaints(write=False) == [
        "README.md: a table differs. Run python docs/tables.py",
        "del.csv differs. Run python docs/tables.py",
    ]
    assert tables.complaints(write=True) == []
    assert file.read_text(encoding="utf-8") == "1.5"
    assert page.read_text(encoding="utf-8") == marked.format("mine", "1.5")
    page.write_text(marked.format("other", "1.5"), encoding="utf-8")
    assert tables.complaints(write=False) == [
        "other: docs/tables.py has no such table",
        "mine: no page shows it",
    ]


def test_no_result_was_typed(monkeypatch):
    assert script("typed_numbers", monkeypatch).complaints() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 24 points more.", ["24 points"]),
        ("It takes 24 and 36\npoints more.", ["36 points"]),
        ("It finds 94 % of the rows.", ["94 %"]),
        ("The effect is 5.5 ± 1.3 (p = 0.004).", ["±", "p = 0"]),
        ("A text takes 0.03 s and 17 MiB, 56x faster.", ["0.03 s", "17 MiB", "56x"]),
        ("The oracle reaches 57.4.", ["57.4"]),
        ("It took 20-30 points, 5 percent and 8.5 GB.", ["20-30 points", "5 percent", "8.5 GB"]),
        ("24 of 48 tokens are lost, tau is 0.67.", ["24 of 48 tokens", "tau is 0"]),
        ("| Slimming | 1.5 | -30 |\n", ["1.5", "-30"]),
        ("<!-- table: rev -->\n| Slimming | -14.1 |\n<!-- end -->\n", []),
        ("```text\n25 % of 48 tokens\n```\n", []),
        ("10 % of each layer, `--ratio 0.1`, with 95 % intervals", []),
        ("<!-- printed by: pytest benchmarks/test_kill.py; a CPU -->\n\n| a | 1.5 |\n", []),
        ("<!-- printed by: pytest benchmarks/test_kill.py; a CPU -->\n\nIt took 3 s\n", ["3 s"]),
    ],
)
def test_typed_results_are_named(text, found, monkeypatch, tmp_path):
    typed = script("typed_numbers", monkeypatch)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "test_kill.py").touch()
    monkeypatch.setattr(typed, "ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(text, encoding="utf-8")
    assert [line.rpartition(": ")[2] for line in typed.typed_numbers(page)] == found


def test_a_benchmark_that_printed_a_table_and_allowed_words_must_be_there(monkeypatch, tmp_path):
    typed = script("typed_numbers", monkeypatch)
    monkeypatch.setattr(typed, "ROOT", tmp_path)
    monkeypatch.setattr(typed, "ALLOWED", {"README.md": {"up to 2 %": "a setting"}})
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- printed by: pytest benchmarks/gone.py -k x; a CPU -->\n", encoding="utf-8"
    )
    assert typed.typed_numbers(page) == [
        "README.md: ALLOWED has 'up to 2 %', which is not there",
        "README.md: benchmarks/gone.py printed a table and is not there",
    ]


def test_the_site_opens_on_the_explorer_in_place_of_the_picture(monkeypatch):
    pytest.importorskip("mkdocs")
    markdown = pytest.importorskip("markdown")
    hooks = script("hooks", monkeypatch)
    explorer = SimpleNamespace(html=lambda: "<p>THE EXPLORER</p>")
    monkeypatch.setattr(hooks, "explorer_of_the_demo", lambda: explorer)
    text = markdown.markdown((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    assert "demo.svg" in text
    shown = hooks.on_page_content(text, None, None, None)
    assert "demo.svg" not in shown
    assert (
        shown.index("right ones") < shown.index("THE EXPLORER") < shown.index("one line installs")
    )


def page_with(text, monkeypatch, tmp_path):
    """The runner, and a page of this text for it."""
    shown = script("shown", monkeypatch)
    monkeypatch.setattr(shown, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return shown, page


def test_a_snippet_that_does_not_run_is_named(monkeypatch, tmp_path):
    text = "# P\n\n```python\nprint(torch.float32)\n```\n"
    shown, page = page_with(text, monkeypatch, tmp_path)
    assert shown.check_page(page, write=False) == [
        "page.md:4: NameError: name 'torch' is not defined"
    ]


def test_another_output_is_named_and_written(monkeypatch, tmp_path):
    text = "```python\nprint(25)\n```\n\n```text\n26\n```\n"
    shown, page = page_with(text, monkeypatch, tmp_path)
    (wrong,) = shown.check_page(page, write=False)
    assert wrong.startswith("page.md:6: 25 in place of 26")
    shown.check_page(page, write=True)
    assert page.read_text(encoding="utf-8") == text.replace("26", "25")
    assert shown.check_page(page, write=False) == []


@pytest.mark.parametrize(("module", "n_wrong"), [("json", 1), ("no_such_module", 0)])
def test_a_block_of_another_package_runs_where_it_is_installed(
    module, n_wrong, monkeypatch, tmp_path
):
    code = "```python\nprint(1)\n```\n\n<!-- seen: once -->\n```text\n2\n```\n"
    shown, page = page_with(f"<!-- run with: {module} -->\n{code}", monkeypatch, tmp_path)
    assert shown.complaints_of(page) == []
    assert len(shown.check_page(page, write=False)) == n_wrong


def test_the_source_of_a_block_can_be_read_when_it_runs(monkeypatch, tmp_path):
    text = "```python\nimport inspect\ndef f(): return 1\n\nprint(inspect.getsource(f))\n```\n"
    shown, page = page_with(f"{text}\n```text\ndef f(): return 1\n```\n", monkeypatch, tmp_path)
    assert shown.check_page(page, write=False) == []


def test_an_option_that_no_command_has_is_named(monkeypatch, tmp_path):
    text = "<!-- not run: hours -->\n```bash\ntl-localize inj --nosuch 3\n```\n"
    shown, page = page_with(text, monkeypatch, tmp_path)
    (wrong,) = shown.complaints_of(page)
    assert "--nosuch" in wrong


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("tensor([0.4792])\nand[ c| par]in\n25 of 48", None),
        ("tensor([0.4583])\nand cin\n26 of 48", None),
        ("tensor([0.4792])\nand cin\n30 of 48", "30 in place of 25"),
        ("tensor([0.4])\nand cin\n25 of 48", "0.4 in place of 0.4792"),
        ("tensor([0.4792])\nor cin\n25 of 48", "other words"),
        ("tensor([0.4792])\nand[ par| c]in\n25 of 48", "other words"),  # the true text comes first
    ],
)
def test_outputs_are_the_same_within_the_tolerance(found, expected, monkeypatch):
    shown = script("shown", monkeypatch)
    text = "tensor([0.4792])\nand[ c|!]in\n25 of 48"
    assert shown.difference(found, text, shown.Tolerance(2, 0.05)) == expected


def test_a_picture_of_other_numbers_is_named(monkeypatch):
    shown = script("shown", monkeypatch)
    drawn = script("drawn", monkeypatch)
    read = drawn.read_table

    def read_others(path):
        table = read(path)
        if path.endswith("del-reference-gpt2.csv"):
            table["delta_self_accuracy"] *= 1.01
        return table

    monkeypatch.setattr(drawn, "read_table", read_others)
    names = [f"docs/results/reference-{name}/del_forgetting.png" for name in ("gpt2", "pythia")]
    few = {name: draw for name, draw in shown.figures().items() if name in names}
    monkeypatch.setattr(shown, "figures", lambda: few)
    (wrong,) = shown.check_pictures(write=False)
    assert wrong.startswith("docs/results/reference-gpt2/del_forgetting.png: ")


def test_a_picture_of_other_names_is_named(monkeypatch):
    """The names of its texts stand at the ticks alone."""
    shown = script("shown", monkeypatch)
    drawn = script("drawn", monkeypatch)
    read = drawn.read_table

    def read_renamed(path):
        table = read(path)
        return table.assign(id=table["id"][::-1].to_numpy()) if "others.csv" in path else table

    monkeypatch.setattr(drawn, "read_table", read_renamed)
    (few,) = [item for item in shown.figures().items() if "others-smollm2" in item[0]]
    monkeypatch.setattr(shown, "figures", lambda: dict([few]))
    assert len(shown.check_pictures(write=False)) == 1


def test_a_page_without_a_place_for_the_questions_is_named(monkeypatch, tmp_path):
    questions = script("questions", monkeypatch)
    (tmp_path / "README.md").write_text("<!-- docs/question.py --> <!-- end -->", encoding="utf-8")
    monkeypatch.setattr(questions, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"README\.md must have one place"):
        questions.with_table("README.md")


def test_links_lead_somewhere_in_the_repository(monkeypatch):
    assert script("check_links", monkeypatch).dead_links_of_files(ROOT) == []


def test_dead_links_of_the_repository_are_named(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    text = "# A\n[x](notebooks/x.ipynb) [y][tl_localize.Y] [z](#b) [a](#a) `[n](no.md)`\n"
    text += '[t](t.md "title") [s](<s.md>) [c](c(1).md)\n[d]: d.md\n::: tl_localize\n'
    text += "[g](#tl_localize.Gone) [h](#tl_localize.HardConcrete.map)\n"
    (tmp_path / "docs" / "a.md").write_text(text, encoding="utf-8")
    dead = script("check_links", monkeypatch).dead_links_of_files(tmp_path)
    assert [line.partition(": ")[2] for line in dead] == [
        "][tl_localize.Y] is read by the site alone",
        "notebooks/x.ipynb",
        "#b",
        "t.md",
        "s.md",
        "c(1).md",
        "d.md",
        "#tl_localize.Gone",
    ]


def test_readme_says_in_a_shell_block_how_to_test():
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    assert any("pytest" in block for block in blocks)  # .ci/run takes its command from there


def test_what_stands_behind_readme_is_there():
    """Each statement is README's, word for word, and each file is in the repository."""
    plain = re.compile(r"\]\([^)]*\)|[^\w%.,;:/-]+")  # without links and marks

    def words(text):
        return plain.sub(" ", text).split()

    readme = " ".join(words((ROOT / "README.md").read_text("utf-8")))
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page, re.M)[2:]
    assert len(rows) > 15
    assert [said for said, _ in rows if " ".join(words(said)) not in readme] == []
    files = {name for _, proof in rows for name in re.findall(r"`([\w.-]+/[\w./-]+)", proof)}
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_titles_of_pages_differ():
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    titles = [re.search(r"^# (.*)", text, re.M)[1] for text in texts]
    assert len(set(titles)) == len(titles)
