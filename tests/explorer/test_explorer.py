"""The explorer: its numbers, the page that it saves, its widget, and the view itself in a real
browser.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tl_localize import Attribution, NeuronScores, RowNorm, accuracy, explore
from tl_localize.losses import target_logits
from tl_localize.sequences import SequenceBatch

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RATIOS = (0.05, 0.5)
WIDGET = "application/vnd.jupyter.widget-view+json"


def letters(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


@pytest.fixture
def explorer(gpt2_like: Any, sequences: Any) -> Any:
    text, *others = sequences
    scores = [Attribution()(gpt2_like, text), RowNorm()(gpt2_like, text)]
    general = torch.arange(48).view(3, 16)
    return explore(
        gpt2_like, text, scores, others, general=general, ratios=RATIOS, ratio=0.4, decode=letters
    )


def test_step_measures_what_ablation_changes(explorer: Any, gpt2_like: Any, sequences: Any) -> None:
    step = explorer.answer(["step", 0, 1, "layer", "0,1", "zero"])
    chosen = explorer.pairs[0][1].top_k(0.5)
    with chosen.dropped_out(gpt2_like), torch.no_grad():
        own, *others = accuracy(gpt2_like, sequences).tolist()
        p = target_logits(gpt2_like, SequenceBatch.of(sequences[:1])).softmax(-1)
    assert (step["n"], step["layers"]) == (len(chosen), [24, 24])
    assert (step["self"], step["neg"]) == (round(own, 4), pytest.approx(sum(others) / 3, abs=1e-4))
    right = p[range(len(p)), sequences[0].suffix]
    assert step["p"] == (1000 * right).round().int().tolist()
    wrong = [
        [i, letters([int(t)])] for i, t in enumerate(p.argmax(-1)) if t != sequences[0].suffix[i]
    ]
    assert step["wrong"] == wrong and step["perplexity"] > 0


def test_chosen_neurons_lie_in_the_chosen_layers(explorer: Any) -> None:
    assert explorer.answer(["step", 0, 1, "layer", "1", "mean"])["layers"] == [0, 24]
    assert explorer.chosen(0, 1, "model", "0,1") == explorer.pairs[0][1].top_k(0.5, per="model")


def test_layer_is_the_step_of_that_layer_at_every_ratio(explorer: Any) -> None:
    found = explorer.answer(["layer", 0, 1, "resample"])
    steps = [
        explorer.answer(["step", 0, ratio, "layer", "1", "resample"])
        for ratio in range(len(RATIOS))
    ]
    assert found == {"p": [step["p"] for step in steps], "self": [step["self"] for step in steps]}


def test_card_of_a_neuron(explorer: Any, gpt2_like: Any, sequences: Any) -> None:
    layer, neuron = next(iter(explorer.pairs[0][1].top(1)))
    card = explorer.answer(["card", 0, layer, neuron])
    _, cache = gpt2_like.run_with_cache(sequences[0].tokens)
    assert card["fires"] == [round(x, 3) for x in cache["post", layer][0, :, neuron].tolist()]
    row = gpt2_like.W_out[layer, neuron]
    logits = gpt2_like.unembed(gpt2_like.ln_final(torch.stack([row, 0 * row])[None]))[0]
    promoted = (logits[0] - logits[1]).sort(descending=True)
    assert [token for token, _ in card["promoted"]] == [
        letters([int(i)]) for i in promoted.indices[:8]
    ]
    assert [x for _, x in card["suppressed"]] == pytest.approx(
        promoted.values.flip(0)[:8].tolist(), abs=1e-3
    )
    assert [row[0] for row in card["ranks"]] == ["Attribution", "RowNorm", "Random"] and card[
        "ranks"
    ][0][1:] == [1, 1]
    assert card["compared"] == 3


def test_random_neurons_are_added_once_for_each_text(gpt2_like: Any, sequences: Any) -> None:
    texts = sequences[:2]
    scores = list(Attribution().map(gpt2_like, texts))
    two = explore(gpt2_like, texts, scores, decode=letters, ratios=RATIOS)
    assert [(text, one.method) for text, one in two.pairs] == [
        (0, "attribution"),
        (1, "attribution"),
        (0, "random"),
        (1, "random"),
    ]
    assert two.ablations == ["zero"] and two.data["perplexity"] is None
    assert len(explore(gpt2_like, texts, two.pairs[2][1], decode=letters, ratios=RATIOS).pairs) == 1


def test_explorer_rejects_what_does_not_fit(gpt2_like: Any, sequences: Any) -> None:
    scores = NeuronScores(torch.zeros(2, 48), "mine", "unknown")
    with pytest.raises(ValueError, match="scores must be of this model"):
        explore(gpt2_like, sequences, scores, decode=letters)
    with pytest.raises(ValueError, match="at least one method"):
        explore(gpt2_like, sequences, [], decode=letters)
    with pytest.raises(ValueError, match="general must be text for the ablations"):
        explore(gpt2_like, sequences[0], scores, decode=letters, ablations=["mean"])
    with pytest.raises(ValueError, match="ratios must take a neuron"):
        explore(gpt2_like, sequences[0], scores, decode=letters, ratios=[0.001])


def test_nothing_stays_on_the_model(explorer: Any, gpt2_like: Any, unchanged: Any) -> None:
    check = unchanged(gpt2_like)
    explorer.html(["zero", "resample"])
    check()


def test_page_fetches_nothing(explorer: Any) -> None:
    page = explorer.html()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser fetches
    assert not re.search(r"<(link|img|iframe)|\ssrc=|\bimport\b[ (]", page)


def test_widget_answers_messages(explorer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget")
    sent: list[Any] = []
    monkeypatch.setattr(explorer.widget, "send", sent.append)
    request = ["step", 0, 0, "layer", "1", "zero"]
    explorer.widget._handle_custom_msg({"id": 7, "request": request}, [])
    explorer.widget._handle_custom_msg(
        {"id": 8, "request": ["step", 0, 9, "layer", "1", "zero"]}, []
    )
    assert (
        sent[0] == {"id": 7, "answer": explorer.answer(request)}
        and sent[1]["id"] == 8
        and "error" in sent[1]
    )
    assert WIDGET in explorer._repr_mimebundle_()[0]
    json.dumps(explorer.data), json.dumps(sent)


def test_colab_is_told_where_the_script_of_the_widget_is(
    explorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anywidget")
    colab = SimpleNamespace(
        enable_custom_widget_manager=lambda: None,
        _widgets=SimpleNamespace(_installed_url="https://manager"),
    )
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    assert explorer._repr_mimebundle_()[1] == {
        WIDGET: {"colab": {"custom_widget_manager": {"url": "https://manager"}}}
    }


# ---- in a browser
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if not chromium:
        pytest.skip("needs Chromium, for example from the distribution")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(offline=True, viewport={"width": 1300, "height": 900})
    shown, problems = context.new_page(), []
    shown.set_default_timeout(20_000)
    shown.on("pageerror", lambda error: problems.append(str(error)))
    yield shown
    assert problems == []
    context.close()


def left(page: Any, name: str) -> str:
    return page.locator(f".tlx-panel >> nth=0 >> .tlx-{name}").inner_text()


def shown_as(share: float) -> str:
    return f"\u2192 {round(100 * share, 1):g} %"


def test_saved_page_in_a_browser(explorer: Any, page: Any, tmp_path: Path) -> None:
    explorer.save(tmp_path / "explorer.html")
    page.goto((tmp_path / "explorer.html").as_uri())
    page.wait_for_selector(".tlx-tokens svg")
    first = explorer.answer(["step", 0, 1, "layer", "1", "zero"])
    assert (left(page, "n"), left(page, "self").endswith(shown_as(first["self"]))) == (
        str(first["n"]),
        True,
    )
    assert page.locator(".tlx-panel >> nth=1").inner_text().startswith("Random")
    assert page.locator(".tlx-panel >> nth=0 >> .tlx-token").count() == len(
        explorer.texts[0].suffix
    )
    page.get_by_label("layers", exact=True).fill("1")  # all layers
    page.get_by_label("share of the neurons").fill("0")
    small = explorer.answer(["step", 0, 0, "layer", "0,1", "zero"])
    page.wait_for_function(f"document.querySelector('.tlx-n').textContent === '{small['n']}'")
    page.get_by_text("of these layers together").click()
    layer, neuron = next(iter(explorer.pairs[0][1].top(1)))
    page.locator(".tlx-panel >> nth=0 >> .tlx-chip.best >> nth=0").click()
    page.wait_for_selector(".tlx-card")
    assert page.locator(".tlx-card b >> nth=0").inner_text() == f"Neuron {neuron} of layer {layer}"
    page.get_by_label("right").select_option("-1")
    page.wait_for_function("document.querySelectorAll('.tlx-panel').length === 1")


def test_view_asks_python_in_a_browser(explorer: Any, page: Any) -> None:
    """The kernel's form: the same script, whose requests go to ``Explorer.answer``."""
    from tl_localize.explorer import SCRIPT

    asked: list[list[Any]] = []

    def answer(request: list[Any]) -> Any:
        asked.append(request)
        return explorer.answer(request)

    page.expose_function("askPython", answer)
    start = f"mount(document.body, {json.dumps(explorer.data)}, askPython);"
    page.set_content(
        f'<body></body><script type="module">{SCRIPT.read_text(encoding="utf-8")}\n{start}</script>'
    )
    page.wait_for_selector(".tlx-tokens svg")
    page.get_by_role("button", name="0", exact=True).click()  # adds layer 0
    page.get_by_text("its mean").click()
    wanted = ["step", 0, 1, "layer", "0,1", "mean"]
    page.wait_for_function("document.querySelector('.tlx-n').textContent === '48'")
    page.wait_for_timeout(500)
    # nothing is asked twice
    assert wanted in asked and len(asked) == len({json.dumps(one) for one in asked})
    assert left(page, "self").endswith(shown_as(explorer.answer(wanted)["self"]))
    page.locator("canvas >> nth=0").click(position={"x": 40, "y": 10})
    page.wait_for_selector(".tlx-card")
    assert asked[-1][:3] == ["card", 0, 0]
