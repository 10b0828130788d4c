"""The pages that commands write to be sent to others."""

import json
import re
import shutil

import pytest
from commands import invoke

from tl_localize.cli import publish

SCRIPT = "<script>alert(1)</script>"
INJ = "inj --ratio 0.1 --max-steps 1 --limit 1 --methods activations"

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def texts(tmp_path):
    """Texts that are HTML."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{SCRIPT} {i}"}) + "\n" for i in range(8)))
    return path


@pytest.fixture
def named(model_dir, tmp_path):
    """The tiny model under a name that is HTML."""
    return shutil.copytree(model_dir, tmp_path / "<script>model")


def test_page_of_a_results_folder_says_what_it_is_of(named, texts, tmp_path):
    out = tmp_path / "out"
    command = f"{INJ} --seed 7"
    result = invoke(command, "--model", named, "--data", texts, "--out", out)
    assert f"A page to send to others: {out / 'report.html'}" in result.stderr
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert "<h1>INJ, &lt;script&gt;model</h1>" in page
    about = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page, re.S))
    assert about["measured"] == "1 text" and about["texts"].startswith("005 &lt;script&gt;")
    assert "seed=7" in about["settings"] and "ratio=0.1" in about["settings at 0.1"]
    assert "torch=" in about["made with"] and "tl_localize=" in about["made with"]
    assert about["command"].startswith(f"tl-localize {command} --model")
    assert "Activations(units=MLPNeurons(), absolute=token" in page
    assert "NONE of 1 injections converged" in page


def test_page_is_written_again_from_the_folder_with_the_commands_that_made_it(
    model_dir, texts, tmp_path
):
    out = tmp_path / "out"
    for methods in ("activations", "random", "random"):
        command = f"inj --ratio 0.1 --max-steps 1 --limit 1 --methods {methods}"
        invoke(command, "--model", model_dir, "--data", texts, "--out", out)
    written = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    invoke("table", out)
    assert (out / "report.html").read_bytes() == written
    measured_with = json.loads((out / "measured_with.json").read_text())
    words = [command.split() for command in measured_with["commands"]]
    assert [line[line.index("--methods") + 1] for line in words] == ["activations", "random"]
    assert all(command in written.decode() for command in measured_with["commands"])


def test_page_of_a_folder_of_a_run_in_python_has_single_layers(gpt2_like, sequences, tmp_path):
    import torch

    from tl_localize import Activations, DelBenchmark
    from tl_localize.execution import Store

    general = torch.arange(48).view(3, 16)
    for layers in ("each", "all"):
        how = {"ratios": (0.1,), "n_dev": 0, "layers": layers, "multiples": (1,), "decode": str}
        benchmark = DelBenchmark(gpt2_like, sequences[:2], general, **how)
        benchmark.run([Activations()], Store(tmp_path / "out"))
        result = invoke("table", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert (layers == "each") == ("one layer against all" in result.stdout)
        page = (tmp_path / "out" / "report.html").read_text()
        assert "DEL, one layer against all at equal budget" in page and "2 texts" in page
        assert "<dt>command</dt>" not in page


def test_nothing_half_written_stays_of_a_page(model_dir, texts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = [INJ, "--model", model_dir, "--data", texts, "--out", out]
    invoke(*arguments)
    before = (out / "report.html").read_bytes()

    def no_page(*_):
        raise OSError(28, "no room on the disk")

    monkeypatch.setattr(publish, "methods_table", no_page)
    assert invoke(*arguments).exit_code == 2
    assert (out / "report.html").read_bytes() == before
    assert not list(out.glob(".report*"))


@pytest.mark.usefixtures("few_planted")
def test_known_writes_a_page_of_all_texts_beside_its_file(named, texts, tmp_path):
    out = tmp_path / "found" / "known.jsonl"
    command = f"known --min-accuracy 0 --data {texts} --out {out} --model"
    result = invoke(command, named)
    assert result.exit_code == 0, result.output
    page = out.with_suffix(".html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt; ") == 8
    assert all(json.loads(line)["id"] in page for line in out.read_text().splitlines())
    assert "What a threshold keeps" in page and f"--out {out}" in page
    assert result.stderr.splitlines()[-1].startswith("Next: tl-localize del --model")


@pytest.mark.usefixtures("few_planted")
def test_known_with_one_text_offers_an_edit(named, texts, tmp_path):
    """DEL needs another text."""
    one = tmp_path / "one.jsonl"
    one.write_text(texts.read_text().splitlines()[0] + "\n")
    out = tmp_path / "known.jsonl"
    result = invoke(f"known --min-accuracy 0.05 --data {one} --out {out} --model", named)
    assert result.exit_code == 0 and len(out.read_text().splitlines()) == 1
    assert result.stderr.splitlines()[-1].startswith("Next: tl-localize erase --model")


@pytest.mark.parametrize("command", ["known", "localize --example quotes-056"])
def test_a_result_is_not_written_into_the_place_of_its_page(command, tmp_path):
    result = invoke(f"{command} --out {tmp_path / 'out.html'}")
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert re.search(r"out must be a \.\w+ file, got .*out\.html", " ".join(result.stderr.split()))
