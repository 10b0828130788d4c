"""The explorer: its numbers, the page that it saves, its widget, and the view itself in a real
browser.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tl_localize import Attribution, MemorizedSequence, NeuronScores, RowNorm, accuracy, explore
from tl_localize.explorer import SCRIPT
from tl_localize.losses import target_logits
from tl_localize.sequences import SequenceBatch

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RATIOS = (0.05, 0.5)
WIDGET = "application/vnd.jupyter.widget-view+json"


def letters(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def words(ids: list[int]) -> str:
    """Predicted words are longer than the true ones, which are all of one letter here."""
    return "".join(LETTERS[i] if i < 31 else LETTERS[i] * 8 for i in ids)


@pytest.fixture
def make(gpt2_like: Any, sequences: Any) -> Callable[..., Any]:
    def make(decode: Any = letters) -> Any:
        text, *others = sequences
        scores = [Attribution()(gpt2_like, text), RowNorm()(gpt2_like, text)]
        general = torch.arange(48).view(3, 16)
        settings = {"ratios": RATIOS, "ratio": 0.4, "decode": decode}
        return explore(gpt2_like, text, scores, others, general=general, **settings)

    return make


@pytest.fixture
def explorer(make: Callable[..., Any]) -> Any:
    return make()


def test_step_measures_what_ablation_changes(explorer: Any, gpt2_like: Any, sequences: Any) -> None:
    step = explorer.answer(["step", 0, 1, "layer", "0,1", "zero"])
    chosen = explorer.pairs[0][1].top_k(0.5)
    with chosen.dropped_out(gpt2_like), torch.no_grad():
        now = accuracy(gpt2_like, sequences).tolist()
        p = target_logits(gpt2_like, SequenceBatch.of(sequences[:1])).softmax(-1)
    assert step["layers"] == [24, 24]
    before = explorer.data["accuracy"]
    after = [was + change for was, change in zip(before, step["accuracy"], strict=True)]
    assert after == pytest.approx(now, abs=2e-4)
    one = sequences[0]
    right = p[range(len(p)), one.suffix]
    assert step["p"] == (1000 * right).round().int().tolist()
    guesses = enumerate(p.argmax(-1).tolist())
    wrong = [[one.n_prefix + i, LETTERS[t]] for i, t in guesses if t != one.suffix[i]]
    assert step["wrong"] == wrong


def test_chosen_neurons_lie_in_the_chosen_layers(explorer: Any) -> None:
    assert explorer.answer(["step", 0, 1, "layer", "1", "mean"])["layers"] == [0, 24]
    assert explorer.chosen(0, 1, "model", "0,1") == explorer.pairs[0][1].top_k(0.5, per="model")


def test_layers_in_which_a_method_did_not_choose_are_not_ablated(
    gpt2_like: Any, sequences: Any
) -> None:
    """Masks give the layers that they spare the highest score, 1."""
    values = torch.stack([torch.ones(48), torch.rand(48)])
    scores = NeuronScores(values, "mine", sequences[0].id, first_layer=1)
    view = explore(gpt2_like, sequences[0], scores, decode=letters, ratios=RATIOS)
    for layers, per in (("0,1", "layer"), ("0,1", "model"), ("1", "layer")):
        assert view.chosen(0, 1, per, layers) == scores.top_k(0.5)
    assert view.answer(["step", 0, 1, "layer", "0", "zero"])["layers"] == [0, 0]
    assert all(layer == 1 for layer, _ in view.data["pairs"][0]["top"])


def test_layer_is_the_step_of_that_layer_at_every_ratio(explorer: Any) -> None:
    found = explorer.answer(["layer", 0, 1, "resample"])
    steps = [explorer.answer(["step", 0, ratio, "layer", "1", "resample"]) for ratio in (0, 1)]
    own = [explorer.data["accuracy"][0] + step["accuracy"][0] for step in steps]
    assert found == {"p": [step["p"] for step in steps], "self": pytest.approx(own, abs=2e-4)}


def test_card_of_a_neuron(explorer: Any, gpt2_like: Any, sequences: Any) -> None:
    layer, neuron = explorer.data["pairs"][0]["top"][0]
    card = explorer.answer(["card", 0, layer, neuron])
    _, cache = gpt2_like.run_with_cache(sequences[0].tokens)
    assert card["fires"] == [round(x, 3) for x in cache["post", layer][0, :, neuron].tolist()]
    row = gpt2_like.W_out[layer, neuron]
    logits = gpt2_like.unembed(gpt2_like.ln_final(torch.stack([row, 0 * row])[None]))[0]
    promoted = (logits[0] - logits[1]).sort(descending=True)
    best = [LETTERS[i] for i in promoted.indices[:8].tolist()]
    assert [token for token, _ in card["promoted"]] == best
    lowest = promoted.values.flip(0)[:8].tolist()
    assert [x for _, x in card["suppressed"]] == pytest.approx(lowest, abs=1e-3)
    assert [row[0] for row in card["ranks"]] == ["Attribution", "RowNorm", "Random"]
    assert card["ranks"][0][1:] == [1, 1] and len(card["elsewhere"]) == 3


def test_random_neurons_are_added_once_for_each_text(gpt2_like: Any, sequences: Any) -> None:
    texts = sequences[:2]
    scores = list(Attribution().map(gpt2_like, texts))
    two = explore(gpt2_like, texts, scores, decode=letters, ratios=RATIOS)
    names = ["attribution", "attribution", "random", "random"]
    assert [(text, one.method) for text, one in two.pairs] == list(
        zip([0, 1, 0, 1], names, strict=True)
    )
    assert two.ablations == ["zero"] and two.data["perplexity"] is False
    assert len(explore(gpt2_like, texts, two.pairs[2][1], decode=letters, ratios=RATIOS).pairs) == 1


def test_explorer_rejects_what_does_not_fit(
    gpt2_like: Any, sequences: Any, unchecked: None
) -> None:
    of_other, own = (Attribution()(gpt2_like, one) for one in (sequences[1], sequences[0]))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (of_other, {}, "scores must be of this model"),
        ([own, of_other], {}, "scores must be of this model"),
        (NeuronScores(own.values, "mine", "?"), {}, "scores must be of this model"),
        (NeuronScores(torch.zeros(2, 40)), {}, "scores must be of this model"),
        ([], {}, "at least one method"),
        (own.top_k(0.1), {}, "scores must be NeuronScores or several, got NeuronSet"),
        (own, {"ablation": "mean"}, "general must be text for the ablations"),
        (
            own,
            {"ablation": "zer"},
            r"ablation must be of \['zero', 'mean', 'resample'\], got 'zer'",
        ),
        (own, {"ratios": [0.001]}, "ratios must take a neuron"),
    ]
    for scores, given, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            explore(gpt2_like, sequences[0], scores, decode=letters, **given)


def test_scores_without_an_id_are_of_the_only_text(gpt2_like: Any, sequences: Any) -> None:
    scores = NeuronScores(torch.rand(2, 48), "mine")
    assert explore(gpt2_like, sequences[0], scores, decode=letters, ratios=RATIOS).pairs[0][0] == 0


def test_characters_that_are_several_tokens_are_whole(gpt2_like: Any) -> None:
    """é is two of these tokens, which have no text alone."""
    codes = "xné".encode().ljust(61, b"x")

    def decode(ids: list[int]) -> str:
        return bytes(codes[i] for i in ids).decode(errors="replace")

    text = MemorizedSequence(torch.tensor([0, 1, 2, 3]), 1, "accent")
    scores = Attribution()(gpt2_like, text)
    view = explore(gpt2_like, text, scores, decode=decode, ratios=RATIOS)
    assert view.data["texts"][0]["pieces"] == [(0, 1, "x"), (1, 2, "n"), (2, 4, "é")]
    assert "\ufffd" not in json.dumps(view.data, ensure_ascii=False)


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
    for i, ratio in ((7, 0), (8, 9)):
        message = {"id": i, "request": ["step", 0, ratio, *request[3:]]}
        explorer.widget._handle_custom_msg(message, [])
    assert sent[0] == {"id": 7, "answer": explorer.answer(request)}
    assert sent[1]["id"] == 8 and "error" in sent[1]
    assert WIDGET in explorer._repr_mimebundle_()[0]
    json.dumps(explorer.data), json.dumps(sent)


def test_colab_is_told_where_the_script_of_the_widget_is(
    explorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anywidget")
    widgets = SimpleNamespace(_installed_url="https://manager")
    colab = SimpleNamespace(enable_custom_widget_manager=lambda: None, _widgets=widgets)
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    manager = {"custom_widget_manager": {"url": "https://manager"}}
    assert explorer._repr_mimebundle_()[1] == {WIDGET: {"colab": manager}}


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ["chromium", "chromium-browser", "google-chrome"]
    chromium = next(filter(None, map(shutil.which, names)), None)
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


def check_shown(explorer: Any, page: Any, request: list[Any]) -> None:
    """What the left panel shows of a step."""
    step = explorer.answer(request)
    page.wait_for_function(
        f"document.querySelector('.tlx-n').textContent === '{sum(step['layers'])}'"
    )
    own = explorer.data["accuracy"][0] + step["accuracy"][0]
    assert left(page, "self").endswith(f"\u2192 {round(100 * own, 1):g} %")


def open_saved(explorer: Any, page: Any, folder: Path) -> None:
    explorer.save(folder / "explorer.html")
    page.goto((folder / "explorer.html").as_uri())
    page.wait_for_selector(".tlx-tokens svg")


def test_saved_page_in_a_browser(explorer: Any, page: Any, tmp_path: Path) -> None:
    open_saved(explorer, page, tmp_path)
    check_shown(explorer, page, ["step", 0, 1, "layer", "1", "zero"])
    assert page.locator(".tlx-panel >> nth=1").inner_text().startswith("Random")
    n_tokens = page.locator(".tlx-panel >> nth=0 >> .tlx-token").count()
    assert n_tokens == len(explorer.texts[0].suffix)
    page.get_by_label("layers", exact=True).fill("1")  # all layers
    page.get_by_label("share of the neurons").fill("0")
    check_shown(explorer, page, ["step", 0, 0, "layer", "0,1", "zero"])
    page.get_by_text("of these layers together").click()
    layer, neuron = explorer.data["pairs"][0]["top"][0]
    page.get_by_role("button", name=f"L{layer} N{neuron}", exact=True).first.click()
    page.wait_for_selector(".tlx-card")
    assert page.locator(".tlx-card b >> nth=0").inner_text() == f"Neuron {neuron} of layer {layer}"
    page.get_by_label("right").select_option("-1")
    page.wait_for_function("document.querySelectorAll('.tlx-panel').length === 1")


def test_predicted_tokens_are_whole_and_do_not_overlap(
    make: Callable[..., Any], page: Any, tmp_path: Path
) -> None:
    open_saved(make(words), page, tmp_path)
    boxes = page.eval_on_selector_all(
        ".tlx-panel:first-child em",
        """nodes => nodes.filter(n => n.textContent).map(n => {
          const range = document.createRange(); range.selectNodeContents(n);
          const [text, box] = [range.getBoundingClientRect(), n.getBoundingClientRect()];
          return [text.top, text.left, text.right, box.right]; })""",
    )
    assert len(boxes) > 3 and all(right <= edge + 0.5 for _, _, right, edge in boxes)
    for i, (top, start, _, edge) in enumerate(boxes):
        rest = [other for other in boxes[:i] if other[0] == top]
        assert all(start >= right or edge <= begin for _, begin, right, _ in rest)


def test_page_follows_the_dark_scheme_and_the_theme_of_a_notebook(
    explorer: Any, page: Any, tmp_path: Path
) -> None:
    def ground() -> str:
        return page.eval_on_selector(".tlx", "node => getComputedStyle(node).backgroundColor")

    open_saved(explorer, page, tmp_path)
    assert ground() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert dark != "rgb(255, 255, 255)"
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert ground() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="light")
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    assert ground() == dark


def test_arrow_keys_move_a_slider_and_nothing_else(
    explorer: Any, page: Any, tmp_path: Path
) -> None:
    """A notebook would go to another cell."""
    open_saved(explorer, page, tmp_path)
    page.evaluate("document.addEventListener('keydown', () => { window.moved = true })")
    page.get_by_label("share of the neurons").focus()
    page.keyboard.press("ArrowLeft")
    check_shown(explorer, page, ["step", 0, 0, "layer", "1", "zero"])
    assert not page.evaluate("Boolean(window.moved)")
    assert page.locator(".tlx").get_attribute("data-lm-suppress-shortcuts") == "true"


def test_view_asks_python_in_a_browser(explorer: Any, page: Any) -> None:
    """The kernel's form: the same script, whose requests go to ``Explorer.answer``."""
    asked: list[list[Any]] = []

    def answer(request: list[Any]) -> Any:
        asked.append(request)
        return explorer.answer(request)

    page.expose_function("askPython", answer)
    start = f"""
      const ask = async (request) => {{
        window.busy = (window.busy ?? "") + document.querySelector(".tlx").className + ",";
        return askPython(request);
      }};
      mount(document.body, {json.dumps(explorer.data)}, ask);"""
    script = SCRIPT.read_text(encoding="utf-8")
    page.set_content(f'<body></body><script type="module">{script}\n{start}</script>')
    page.wait_for_selector(".tlx-tokens svg")
    page.get_by_role("button", name="0", exact=True).click()  # adds layer 0
    page.get_by_text("its mean").click()
    wanted = ["step", 0, 1, "layer", "0,1", "mean"]
    page.wait_for_function("document.querySelector('.tlx').className === 'tlx'")  # all is there
    seen = page.evaluate("window.busy").strip(",").split(",")
    assert set(seen) == {"tlx busy"}  # a sign while Python computes
    # nothing is asked twice
    assert wanted in asked and len(asked) == len({json.dumps(one) for one in asked})
    check_shown(explorer, page, wanted)
    page.locator("canvas >> nth=0").click(position={"x": 40, "y": 10})
    page.wait_for_selector(".tlx-card")
    assert asked[-1][:3] == ["card", 0, 0]
